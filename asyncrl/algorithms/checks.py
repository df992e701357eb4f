"""Checks of the objective and its advantages, made by `asyncrl config check` before a run starts. Does not import
torch."""

import math
from collections.abc import Iterator, Mapping

import msgspec

from asyncrl.algorithms.baselines import (
    CRITIC_BASED,
    GROUP_BASELINES,
    Advantage,
    CriticBased,
    Outcome,
    OwnEstimator,
    has_token_advantages,
    resolve_advantage,
    reward_kl,
)
from asyncrl.algorithms.objective import (
    Objective,
    averages_advantages,
    corrects_twice,
    inert_in_one_update,
    is_corrected,
    is_product,
)
from asyncrl.algorithms.presets import (
    PRESETS,
    advantage_of,
    baseline_of,
    own_loss,
    published_baseline,
    resolve_objective,
)
from asyncrl.config.parts import part_configs
from asyncrl.config.schema import AlgorithmSection, Config
from asyncrl.errors import ConfigError

NEEDS_CRITIC = tuple(CRITIC_BASED)
_SHARES = {
    "informative_share": "the share of samples whose group has unequal rewards",
    "nonzero_share": "the share of rewards that are not 0",
}
"""The values of the axis `scale` that divide advantages by a share of the step, so that groups whose advantages are 0
do not make the step smaller; with their meaning in words."""
TOKEN_NOISE_NATS = 0.05
"""Assumed standard deviation, in nats, of a token's log-ratio between learner and sampler in a healthy asynchronous
run. The prediction of the effective share of samples uses it."""


def check_algorithm(config: Config) -> list[str]:
    """Checks the section `algorithm`, also together with the other sections. Returns the warnings. Raises ConfigError
    with all violations if the algorithm cannot run."""
    violations, warnings = list(_filters(config)), list[str]()
    advantage: Advantage | None = None
    try:
        advantage = resolve_advantage(advantage_of(config.algorithm))
    except ConfigError as error:
        violations.append(str(error))
    violations += _critic(config, advantage)
    violations += [] if advantage is None else _equal_groups(config, advantage)
    if advantage is not None and has_token_advantages(advantage) and config.most_branches > 1:
        violations.append(
            f"algorithm.advantage = {baseline_of(config.algorithm)}: has an advantage for each token, which follows "
            f"the order of the tokens. The branches of an episode do not follow each other, so it cannot be used with "
            f"environment.max_branches = {config.most_branches}; set environment.max_branches to 1, or set another "
            "algorithm.advantage"
        )
    if isinstance(advantage, Outcome):
        violations += _outcome(config, advantage)
        warnings += _single(config, advantage)
    objective: Objective | None = None
    if own_loss(config.algorithm) is not None:
        violations += _own(config)
        warnings += _unknown(config)
    else:
        try:
            objective = resolve_objective(config.algorithm.loss, config.algorithm.overrides)
        except ConfigError as error:
            violations.append(str(error))
    if objective is not None:
        violations += _uncorrected(config, objective)
        violations += _uncentered(config, objective)
        if advantage is not None:
            violations += _pooled(config, objective, advantage)
            warnings += _pulls_twice(config, objective)
        warnings += _warnings(config, objective)
        warnings += _unread(config, objective)
    if violations:
        raise ConfigError("\n".join(violations))
    return warnings


def uncorrected_in_words(config: Config) -> str | None:
    """Returns a sentence without its full stop if the run trains the uncorrected stale baseline: an objective without
    off-policy correction on samples of older weights (`algorithm.uncorrected`). Returns None for other runs."""
    algorithm, limit = config.algorithm, config.staleness.max_versions
    if not (algorithm.uncorrected and limit) or own_loss(algorithm) is not None:
        return None
    if is_corrected(resolve_objective(algorithm.loss, algorithm.overrides)):
        return None
    return (
        f"Uncorrected stale baseline (algorithm.uncorrected = true): {_loss_in_words(algorithm)} has no "
        f"off-policy correction, and staleness.max_versions = {limit} allows samples of older weights, so the "
        "gradient is biased"
    )


def _loss_in_words(algorithm: AlgorithmSection) -> str:
    return f"algorithm.loss = {algorithm.loss_name}{' with algorithm.overrides' if algorithm.overrides else ''}"


def _uncorrected(config: Config, objective: Objective) -> Iterator[str]:
    if config.algorithm.uncorrected:
        return
    nearest = nearest_corrected(objective, with_critic=config.critic is not None)[:3]
    if config.staleness.max_versions > 0 and not is_corrected(objective):
        yield (
            f"{_loss_in_words(config.algorithm)} has no off-policy correction, but "
            f"staleness.max_versions = {config.staleness.max_versions} allows training on samples of older weights, so "
            f"the gradient would be biased. Set staleness.max_versions=0, or choose a preset with a correction: the "
            f"nearest are {', '.join(nearest)}, the default is {AlgorithmSection().loss} (`asyncrl losses` lists all). "
            "If you write the axes yourself, add `weight: {p: proximal, q: behaviour}` or `anchor: behaviour`. For the "
            "biased gradient as a baseline, set algorithm.uncorrected=true"
        )


def _uncentered(config: Config, objective: Objective) -> Iterator[str]:
    if objective.centering is not None and config.generator.logprobs is None:
        yield (
            f"generator.logprobs is unset: {_loss_in_words(config.algorithm)} has centering = {objective.centering}, "
            "which reads the sampler's most likely tokens; set generator.logprobs, for example to 16, or "
            "algorithm.overrides.centering to null"
        )


def _unread(config: Config, objective: Objective) -> Iterator[str]:
    if objective.centering is None and config.generator.logprobs is not None:
        yield (
            f"generator.logprobs = {config.generator.logprobs}: {_loss_in_words(config.algorithm)} has no centering "
            f"and does not read the sampler's most likely tokens, whose {8 * config.generator.logprobs} bytes a token "
            "have no effect; unset generator.logprobs, or set algorithm.loss to score_centering"
        )


def nearest_corrected(objective: Objective, *, with_critic: bool) -> list[str]:
    """Returns the presets that correct for samples of older weights, with the most similar to `objective` first.

    The distance is the number of fields that differ. Presets that were published with a critic are included only if
    `with_critic` is True. Presets with `centering` are left out, because they need `generator.logprobs`.
    """
    ours = msgspec.to_builtins(objective)
    usable = [
        name
        for name, preset in PRESETS.items()
        if is_corrected(preset.objective)
        and preset.objective.centering is None  # it would need generator.logprobs
        and (with_critic or preset.baseline not in NEEDS_CRITIC)
    ]
    return sorted(usable, key=lambda name: _differences(ours, msgspec.to_builtins(PRESETS[name].objective)))


def _differences(ours: object, theirs: object) -> int:
    """Counts the fields in which two trees of axes differ. A field that only one of them has counts, unless it is
    null."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return sum(_differences(ours.get(key), theirs.get(key)) for key in ours.keys() | theirs.keys())
    if isinstance(ours, Mapping) or isinstance(theirs, Mapping):
        return 1
    return int(ours != theirs)


def _critic(config: Config, advantage: Advantage | None) -> Iterator[str]:
    critic, name = config.critic, baseline_of(config.algorithm)
    if isinstance(advantage, CriticBased) and critic is None:
        because = (
            ": without one, its weight on an early token is the product of the ratios of all later tokens"
            if name == "vtrace"
            else ""
        )
        yield (
            f"algorithm.advantage = {name} needs a critic, but this run has none{because}; add the section critic "
            "(`critic: {}` uses its defaults), or set algorithm.advantage to a group estimator such as group_norm, "
            "which keeps only the policy's part of the preset"
        )
    if isinstance(advantage, Outcome | OwnEstimator) and critic is not None:
        yield (
            f"critic: algorithm.advantage = {name} does not use a critic; remove the section critic, or set "
            f"algorithm.advantage to one of {', '.join(NEEDS_CRITIC)}"
        )
    for key in ("value_lam", "length_alpha") if name == "vtrace" else ():
        if critic is not None and getattr(critic, key) is not None:
            yield (
                f"critic.{key} = {getattr(critic, key):g}: it is an option of gae, but algorithm.advantage = vtrace "
                "does not have a λ; remove it"
            )


def _equal_groups(config: Config, advantage: Advantage) -> Iterator[str]:
    compares = isinstance(advantage, OwnEstimator) or getattr(advantage, "baseline", None) in GROUP_BASELINES
    if config.algorithm.zero_variance != "keep" and not compares:
        yield (
            f"algorithm.zero_variance = {config.algorithm.zero_variance}: algorithm.advantage = "
            f"{baseline_of(config.algorithm)} does not compare the samples of a group, so groups of equal rewards have "
            "a gradient too, and would be lost; set algorithm.zero_variance to keep, or algorithm.advantage to an "
            "estimator with a group baseline such as reinforce_pp_baseline"
        )


def _outcome(config: Config, advantage: Outcome) -> Iterator[str]:
    """Refuses estimators that read columns which a run does not have, or that cannot take the run's rewards or
    groups."""
    named, group_size = f"algorithm.advantage = {baseline_of(config.algorithm)}", config.learner.group_size
    names = {frozenset(term.name for term in part.environment.rewards) for part in part_configs(config).values()}
    if advantage.rewards == "components" and not any(names):
        yield (
            f"{named} reads several rewards of a sample, but this configuration gives one reward; name the rewards in "
            "environment.rewards, or set algorithm.advantage to an estimator of one reward such as group_norm"
        )
    if advantage.rewards == "components" and len(names) > 1:
        yield (
            f"{named} reads several rewards of a sample, but the parts of data.mixture have rewards with different "
            "names; give each part the same names, or set algorithm.advantage to an estimator of one reward such as "
            "group_norm"
        )
    if advantage.baseline == "greedy":
        yield (
            f"{named} reads the reward of a greedy completion of each prompt, but a run generates no greedy "
            "completions for training; set algorithm.advantage to a group estimator such as leave_one_out, or write "
            "your own loop and call `compute_advantages` with `Samples(greedy_rewards_N=...)`"
        )
    if advantage.refuses_negative_rewards and config.algorithm.overlong == "penalise":
        yield (
            f"algorithm.overlong = penalise: it lowers a reward by up to 1, so that a reward may become negative, but "
            f"{named} needs rewards of at least 0; set algorithm.overlong to mask or keep"
        )
    if advantage.scale in _SHARES and config.algorithm.zero_variance == "mask":
        yield (
            f"algorithm.zero_variance = mask: {named} already divides by {_SHARES[advantage.scale]}, and mask takes "
            "groups of equal rewards out of the denominator of the loss too, so advantages would be scaled twice; set "
            "algorithm.zero_variance to keep or resample"
        )
    if advantage.compares_a_group and group_size < 2:
        yield (
            f"learner.group_size = {group_size}: {named} compares the samples of a group, so a group of one sample has "
            "an advantage of 0; set learner.group_size to at least 2"
        )


def _pooled(config: Config, objective: Objective, advantage: Advantage) -> Iterator[str]:
    name = baseline_of(config.algorithm)
    if has_token_advantages(advantage) and averages_advantages(objective):
        options = "" if isinstance(advantage, CriticBased) else " with kl or gamma"
        yield (
            f"algorithm.advantage = {name}{options} gives every token its own advantage, but algorithm.loss = "
            f"{config.algorithm.loss} has one ratio a sequence (level: {objective.level}). Such a loss moves every "
            "token by the sum of the sequence's advantages, so advantages 1 and −1 would have no gradient. Choose an "
            "objective at token level, e.g. algorithm.loss: gspo_token, or a group estimator such as group_norm"
        )


def _pulls_twice(config: Config, objective: Objective) -> Iterator[str]:
    pulls = any(part.q == "reference" and part.kind not in ("entropy", "positive_nll") for part in objective.penalties)
    if pulls and reward_kl(advantage_of(config.algorithm)) is not None:
        yield (
            f"algorithm.advantage.kl: algorithm.loss = {config.algorithm.loss} already has a penalty against the "
            "reference, so the policy is pulled to the reference twice; remove one of them (`algorithm.overrides: "
            "{penalties: []}` removes the penalties)"
        )


def _single(config: Config, advantage: Outcome) -> Iterator[str]:
    group_size = config.learner.group_size
    if advantage.single == "raw" and group_size > 1:
        yield (
            f"algorithm.advantage.single = raw: it has no effect, because it is for groups of one sample and "
            f"learner.group_size = {group_size}; remove it, or set learner.group_size=1"
        )


def _filters(config: Config) -> Iterator[str]:
    section, limit = config.algorithm, config.generator.max_completion_tokens
    if section.overlong == "penalise" and section.overlong_buffer_tokens > limit:
        yield (
            f"algorithm.overlong_buffer_tokens = {section.overlong_buffer_tokens}: it must be at most "
            f"generator.max_completion_tokens = {limit}, or every completion would be penalised; lower it"
        )
    if section.zero_variance != "keep" and config.learner.group_size < 2:
        yield (
            f"algorithm.zero_variance = {section.zero_variance}: with learner.group_size = "
            f"{config.learner.group_size}, no group has different rewards, so none "
            "would be trained; set algorithm.zero_variance to keep"
        )


def _own(config: Config) -> Iterator[str]:
    if config.algorithm.overrides:
        yield (
            f"algorithm.overrides: overrides replace the axes of a preset, but algorithm.loss = "
            f"{config.algorithm.loss_name} is not a preset; remove algorithm.overrides, or set algorithm.loss to a "
            "preset"
        )


def _unknown(config: Config) -> Iterator[str]:
    if config.staleness.max_versions > 0:
        yield (
            f"algorithm.loss = {config.algorithm.loss_name}: it is not verified to correct for samples of older "
            f"weights, but staleness.max_versions = {config.staleness.max_versions} allows them; make sure that it "
            "corrects for them, or set staleness.max_versions=0"
        )


def _warnings(config: Config, objective: Objective) -> Iterator[str]:
    if (uncorrected := uncorrected_in_words(config)) is not None:
        yield uncorrected
    # warns only if the user chose the objective: the default has an inert clip too, and no user asked for it
    chosen = bool(config.algorithm.model_fields_set & {"loss", "overrides"})
    inert = inert_in_one_update(objective) if chosen and config.learner.updates_per_step == 1 else []
    if inert:
        yield (
            f"learner.updates_per_step = 1: the proximal policy equals the current policy, so the parts that compare "
            f"the two ({', '.join(inert)}) have no effect; only parts that compare with the sampler's log-probs "
            "correct for samples of older weights"
        )
    if corrects_twice(objective):
        yield (
            f"algorithm.loss = {config.algorithm.loss} corrects twice: its ratio is against the sampler (anchor: "
            "behaviour), and its weight also divides by the sampler's probability; remove one of the two"
        )
    published, baseline = published_baseline(config.algorithm), baseline_of(config.algorithm)
    if published in NEEDS_CRITIC and baseline not in NEEDS_CRITIC:
        yield (
            f"algorithm.advantage = {baseline}: algorithm.loss = {config.algorithm.loss} was published with a critic "
            f"and {published}; without them, only its policy objective remains (`asyncrl losses` shows its source)"
        )
    if is_product(objective) and config.staleness.max_versions > 0:
        length = config.generator.max_completion_tokens
        yield (
            f"algorithm.loss = {config.algorithm.loss} multiplies ratios over whole sequences. For {length} tokens "
            f"whose log-ratios have a standard deviation of {TOKEN_NOISE_NATS:g} nats each, the effective share of the "
            f"samples, before any bound on the weight, is about "
            f"e^(−{TOKEN_NOISE_NATS:g}² · {length}) = {math.exp(-(TOKEN_NOISE_NATS**2) * length):.2g}"
        )
