"""Rules about the objective and its baseline that `asyncrl config check` applies before anything starts. Torch-free."""

import math
from collections.abc import Iterator, Mapping

import msgspec

from asyncrl.algorithms.baselines import (
    CRITIC_BASED,
    CriticBased,
    Outcome,
    OwnEstimator,
    has_token_advantages,
    resolve_advantage,
    reward_kl,
)
from asyncrl.algorithms.objective import (
    Objective,
    Reinforce,
    Weighted,
    corrects_twice,
    inert_in_one_update,
    is_corrected,
    is_product,
)
from asyncrl.algorithms.presets import (
    PRESETS,
    advantage_of,
    baseline_of,
    is_own_loss,
    published_baseline,
    resolve_objective,
)
from asyncrl.config.schema import AlgorithmSection, Config
from asyncrl.errors import ConfigError

NEEDS_CRITIC = tuple(CRITIC_BASED)
TOKEN_NOISE_NATS = 0.05
"""Spread of a token's log ρ that a healthy asynchronous run has; what the predicted effective share assumes."""


def check_algorithm(config: Config) -> list[str]:
    """Warnings about an algorithm that can run; ConfigError with every violation of one that cannot."""
    violations, warnings = [*_critic(config), *_filters(config)], list[str]()
    advantage: Outcome | CriticBased | OwnEstimator | None = None
    try:
        advantage = resolve_advantage(advantage_of(config.algorithm))
    except ConfigError as error:
        violations.append(str(error))
    else:
        violations += [*_baseline(config, advantage), *_unavailable(config, advantage), *_group_size(config, advantage)]
        warnings += _single(config, advantage)
    if is_own_loss(config.algorithm):
        violations += _own(config)
        warnings += _unknown(config)
    else:
        objective = resolve_objective(config.algorithm.loss, config.algorithm.overrides)
        violations += _uncorrected(config, objective)
        if advantage is not None:
            violations += _pooled(config, objective, advantage)
            warnings += _pulls_twice(config, objective)
        warnings += _warnings(config, objective)
    if violations:
        raise ConfigError("\n".join(violations))
    return warnings


def _uncorrected(config: Config, objective: Objective) -> Iterator[str]:
    overridden = " with algorithm.overrides" if config.algorithm.overrides else ""
    nearest = nearest_corrected(objective, with_critic=config.critic is not None)[:3]
    if config.staleness.max_versions > 0 and not is_corrected(objective):
        yield (
            f"algorithm.loss = {config.algorithm.loss}{overridden} has no off-policy correction, and "
            f"staleness.max_versions = {config.staleness.max_versions} trains on samples of older weights: its "
            f"gradient would be biased. Set staleness.max_versions=0, or take a preset for older weights: the nearest "
            f"are {', '.join(nearest)}, the default is {AlgorithmSection().loss} (`asyncrl losses` lists all). In axes "
            "of your own, add a correction: `weight: {p: proximal, q: behaviour}` or `anchor: behaviour`"
        )


def nearest_corrected(objective: Objective, *, with_critic: bool) -> list[str]:
    """Presets that bear samples of older weights, by how much of them differs from `objective`, nearest first.

    Presets that were published with a critic are left out unless the run has one.
    """
    ours = msgspec.to_builtins(objective)

    def distance(name: str) -> int:
        return _differences(ours, msgspec.to_builtins(PRESETS[name].objective))

    usable = [
        name
        for name, preset in PRESETS.items()
        if is_corrected(preset.objective) and (with_critic or preset.baseline not in NEEDS_CRITIC)
    ]
    return sorted(usable, key=distance)


def _differences(ours: object, theirs: object) -> int:
    """Fields in which two trees of axes differ. Another kind of surrogate counts as all of its fields."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return sum(_differences(ours.get(key), theirs.get(key)) for key in ours.keys() | theirs.keys())
    if isinstance(ours, Mapping) or isinstance(theirs, Mapping):
        return 1
    return int(ours != theirs)


def _baseline(config: Config, advantage: Outcome | CriticBased | OwnEstimator) -> Iterator[str]:
    name = baseline_of(config.algorithm)
    if isinstance(advantage, CriticBased) and config.critic is None:
        because = "without one its weight on early tokens is a product of every later ratio" if name == "vtrace" else ""
        yield (
            f"algorithm.advantage = {name} needs a critic, and this run has none{because and ': ' + because}; set "
            "critic (`critic: {}` takes its defaults), or algorithm.advantage to a group estimator such as group_norm, "
            "which leaves only the policy's part of the preset"
        )
    if not isinstance(advantage, CriticBased) and config.critic is not None:
        yield (
            f"critic: algorithm.advantage = {name} does not use a critic; remove critic, or set algorithm.advantage "
            f"to one of {', '.join(NEEDS_CRITIC)}"
        )


def _unavailable(config: Config, advantage: Outcome | CriticBased | OwnEstimator) -> Iterator[str]:
    """Columns that an estimator reads and a run does not have, and rewards that it cannot take."""
    if not isinstance(advantage, Outcome):
        return
    name = baseline_of(config.algorithm)
    if advantage.rewards == "components":
        yield (
            f"algorithm.advantage = {name} reads several rewards of a sample, and a run's environment gives one; set "
            "algorithm.advantage to an estimator of one reward such as group_norm, or call `compute_advantages` with "
            "`Samples(components=...)` in a loop of your own"
        )
    if advantage.baseline == "greedy":
        yield (
            f"algorithm.advantage = {name} reads the reward of a greedy completion of each prompt, and a run generates "
            "none for training; set algorithm.advantage to a group estimator such as leave_one_out, or call "
            "`compute_advantages` with `Samples(greedy_rewards_N=...)` in a loop of your own"
        )
    if advantage.refuses_negative_rewards and config.algorithm.overlong == "penalise":
        yield (
            f"algorithm.overlong = penalise: takes up to 1 off a reward, and algorithm.advantage = {name} needs "
            "rewards of at least 0; set algorithm.overlong to mask or keep"
        )


def _critic(config: Config) -> Iterator[str]:
    critic = config.critic
    if critic is None or baseline_of(config.algorithm) != "vtrace":
        return
    for key in ("value_lam", "length_alpha"):
        if getattr(critic, key) is not None:
            yield (
                f"critic.{key} = {getattr(critic, key):g}: is an option of gae, and algorithm.advantage = vtrace has "
                "no λ; remove it"
            )


def _pooled(config: Config, objective: Objective, advantage: Outcome | CriticBased | OwnEstimator) -> Iterator[str]:
    name = baseline_of(config.algorithm)
    if has_token_advantages(advantage) and averages_advantages(objective):
        options = "" if isinstance(advantage, CriticBased) else " with kl or gamma"
        yield (
            f"algorithm.advantage = {name}{options} gives every token its own advantage, and algorithm.loss = "
            f"{config.algorithm.loss} has one ratio a sequence (level: {objective.level}), which every token moves by "
            "the sum of the sequence's advantages: advantages 1 and −1 would have no gradient. Take a token level, "
            "e.g. algorithm.loss: gspo_token, or a group estimator such as group_norm"
        )


def _pulls_twice(config: Config, objective: Objective) -> Iterator[str]:
    pulls = any(part.q == "reference" and part.kind not in ("entropy", "positive_nll") for part in objective.penalties)
    if pulls and reward_kl(advantage_of(config.algorithm)) is not None:
        yield (
            f"algorithm.advantage.kl: algorithm.loss = {config.algorithm.loss} has a penalty against the reference "
            "already, so that the policy is pulled to it twice; remove one of them (`algorithm.overrides: "
            "{penalties: []}` removes the penalties)"
        )


def averages_advantages(objective: Objective) -> bool:
    """Whether every token of a sequence gets the gradient of its mean advantage: the gradient goes through a ratio of
    the whole sequence."""
    through_the_ratio = not isinstance(objective.surrogate, Reinforce | Weighted)
    return through_the_ratio and objective.level in ("sequence_mean", "sequence_sum")


def _group_size(config: Config, advantage: Outcome | CriticBased | OwnEstimator) -> Iterator[str]:
    group_size = config.learner.group_size
    if isinstance(advantage, Outcome) and advantage.compares_a_group and group_size < 2:
        yield (
            f"learner.group_size = {group_size}: algorithm.advantage = {baseline_of(config.algorithm)} compares the "
            "samples of a group and is 0 for a single one; raise it to at least 2"
        )


def _single(config: Config, advantage: Outcome | CriticBased | OwnEstimator) -> Iterator[str]:
    group_size = config.learner.group_size
    if isinstance(advantage, Outcome) and advantage.single == "raw" and group_size > 1:
        yield (
            f"algorithm.advantage.single = raw: is about groups of one sample, and learner.group_size = {group_size}; "
            "it never acts"
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
            f"algorithm.loss = {config.algorithm.loss}: it is not verified to correct for data of older weights, "
            f"and staleness.max_versions = {config.staleness.max_versions}"
        )


def _warnings(config: Config, objective: Objective) -> Iterator[str]:
    # a note about inert parts is for an objective that the user chose; the default is not a choice
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
