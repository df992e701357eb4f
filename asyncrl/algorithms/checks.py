"""Rules about the objective and its baseline that `asyncrl config check` applies before anything starts. Torch-free."""

import math
from collections.abc import Iterator

from asyncrl.algorithms.objective import Objective, corrects_twice, inert_in_one_update, is_corrected, is_product
from asyncrl.algorithms.presets import baseline_of, is_own_loss, published_baseline, resolve_objective
from asyncrl.config.import_path import is_import_path, suggest
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

BASELINES = ("group_norm", "group_mean", "leave_one_out", "batch_std", "reinforce_pp", "reinforce_pp_baseline")
COMPARES_A_GROUP = ("group_norm", "group_mean", "leave_one_out", "batch_std", "reinforce_pp_baseline")
NEEDS_CRITIC = ("gae", "vtrace")
TOKEN_NOISE_NATS = 0.05
"""Spread of a token's log ρ that a healthy asynchronous run has; what the predicted effective share assumes."""


def check_algorithm(config: Config) -> list[str]:
    """Warnings about an algorithm that can run; ConfigError with every violation of one that cannot."""
    violations = [*_baseline(config), *_critic(config), *_group_size(config), *_filters(config)]
    if is_own_loss(config.algorithm):
        violations += _own(config)
        warnings = list(_unknown(config))
    else:
        objective = resolve_objective(config.algorithm.loss, config.algorithm.overrides)
        violations += _uncorrected(config, objective)
        warnings = list(_warnings(config, objective))
    if violations:
        raise ConfigError("\n".join(violations))
    return warnings


def _uncorrected(config: Config, objective: Objective) -> Iterator[str]:
    overridden = " with algorithm.overrides" if config.algorithm.overrides else ""
    if config.staleness.max_versions > 0 and not is_corrected(objective):
        yield (
            f"algorithm.loss = {config.algorithm.loss}{overridden} has no off-policy correction, and "
            f"staleness.max_versions = {config.staleness.max_versions} trains on samples of older weights: its "
            "gradient would be biased. Add one, `weight: {p: proximal, q: behaviour}` or `anchor: behaviour`, take an "
            "objective that has one (`asyncrl losses` lists them), or set staleness.max_versions to 0"
        )


def _baseline(config: Config) -> Iterator[str]:
    name = baseline_of(config.algorithm)
    known = [*BASELINES, *NEEDS_CRITIC]
    if name not in known and not is_import_path(name):
        yield (
            f"algorithm.advantage = {name}: is neither one of {', '.join(known)} nor an import path like "
            f"package.module:callable{suggest(name, known)}"
        )
    if name in NEEDS_CRITIC and config.critic is None:
        because = "without one its weight on early tokens is a product of every later ratio" if name == "vtrace" else ""
        yield (
            f"algorithm.advantage = {name} needs a critic, and this run has none{because and ': ' + because}; set "
            "critic (`critic: {}` takes its defaults), or algorithm.advantage to a group estimator such as group_norm, "
            "which leaves only the policy's part of the preset"
        )
    if name not in NEEDS_CRITIC and config.critic is not None:
        yield (
            f"critic: algorithm.advantage = {name} does not ask a critic, and one would be trained for nobody; remove "
            f"critic, or set algorithm.advantage to one of {', '.join(NEEDS_CRITIC)}"
        )


def _critic(config: Config) -> Iterator[str]:
    critic = config.critic
    if critic is None or baseline_of(config.algorithm) != "vtrace":
        return
    for key in ("value_lam", "length_alpha"):
        if getattr(critic, key) is not None:
            yield (
                f"critic.{key} = {getattr(critic, key):g}: is a matter of gae, and algorithm.advantage = vtrace has no "
                "λ; remove it"
            )


def _group_size(config: Config) -> Iterator[str]:
    name, group_size = baseline_of(config.algorithm), config.learner.group_size
    if name in COMPARES_A_GROUP and group_size < 2:
        yield (
            f"learner.group_size = {group_size}: algorithm.advantage = {name} compares the samples of a group and is "
            "0 for a single one; raise it to at least 2"
        )


def _filters(config: Config) -> Iterator[str]:
    section, limit = config.algorithm, config.generator.max_completion_tokens
    if section.overlong == "penalise" and section.overlong_buffer_tokens > limit:
        yield (
            f"algorithm.overlong_buffer_tokens = {section.overlong_buffer_tokens}: must be at most "
            f"generator.max_completion_tokens = {limit}, or every completion is penalised; lower it"
        )
    if section.zero_variance == "mask" and config.learner.group_size < 2:
        yield (
            f"algorithm.zero_variance = mask: with learner.group_size = {config.learner.group_size} no group has a "
            "variance and nothing would be trained; set it to keep"
        )


def _own(config: Config) -> Iterator[str]:
    if config.algorithm.overrides:
        yield (
            f"algorithm.overrides: replace axes of a preset, and algorithm.loss = {config.algorithm.loss} is none; "
            "remove them, or name a preset"
        )


def _unknown(config: Config) -> Iterator[str]:
    if config.staleness.max_versions > 0:
        yield (
            f"algorithm.loss = {config.algorithm.loss}: nobody checked that it corrects for data of older weights, "
            f"and staleness.max_versions = {config.staleness.max_versions}"
        )


def _warnings(config: Config, objective: Objective) -> Iterator[str]:
    # whoever chose an objective is told what of it does nothing; the default is no choice, and no reason for a note
    chosen = bool(config.algorithm.model_fields_set & {"loss", "overrides"})
    inert = inert_in_one_update(objective) if chosen and config.learner.updates_per_step == 1 else []
    if inert:
        yield (
            f"learner.updates_per_step = 1: the proximal policy is the current one, and what compares the two "
            f"({', '.join(inert)}) never acts; an off-policy correction is all in what looks at the sampler"
        )
    if corrects_twice(objective):
        yield (
            f"algorithm.loss = {config.algorithm.loss} corrects twice: its ratio is against the sampler "
            "(anchor: behaviour), and its weight divides by the sampler's probability as well; remove one of them"
        )
    published, baseline = published_baseline(config.algorithm), baseline_of(config.algorithm)
    if published in NEEDS_CRITIC and baseline not in NEEDS_CRITIC:
        yield (
            f"algorithm.advantage = {baseline}: algorithm.loss = {config.algorithm.loss} was published with a critic "
            f"and {published}; without them only its policy objective is left (`asyncrl losses` says whose that is)"
        )
    if is_product(objective) and config.staleness.max_versions > 0:
        length = config.generator.max_completion_tokens
        yield (
            f"algorithm.loss = {config.algorithm.loss} multiplies ratios over whole sequences: of {length} tokens "
            f"whose log-ratios spread by {TOKEN_NOISE_NATS:g} nats each, the effective share of the samples before any "
            f"bound is about e^(−{TOKEN_NOISE_NATS:g}² · {length}) = {math.exp(-(TOKEN_NOISE_NATS**2) * length):.2g}"
        )
