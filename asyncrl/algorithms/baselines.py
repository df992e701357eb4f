"""Advantage estimators as rows of data: each row has a baseline, a scale and a whitening. Does not import torch.

`algorithm.advantage` names a row, or a row and the axes to replace in it. `advantages.py` computes the rows of
`OUTCOMES` from the rewards of samples. If a row also has a part for each token, `token_estimators.py` computes that
part. `asyncrl.value.estimators` computes the rows of `CRITIC_BASED` from a critic's values.

`axes.py` makes docs/losses.md, `asyncrl losses --axes` and `asyncrl config schema` from the docstrings here. They
describe every named value as "`value`: text". In the formulas of the rows, r is a sample's reward, and mean, std and n
are those of its group.
"""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from asyncrl.algorithms.axis_errors import check_positive, problems
from asyncrl.config.import_path import OwnCallable, is_import_path, suggest
from asyncrl.errors import ConfigError

KEY = "algorithm.advantage"

GROUP_BASELINES = frozenset({"group_mean", "leave_one_out", "length_weighted_mean", "soft_value"})
"""Baselines that compare the samples of a group. They give an advantage of 0 if all rewards of a group are equal."""


class Whitening(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says how the advantages of a whole step are whitened, and how every standard deviation is computed, also the one
    of a group's rewards."""

    whiten: Literal["none", "samples", "tokens"] = "none"
    """Subtracts the mean over the step and divides by the standard deviation over the step. `none`: neither. `samples`:
    every sample has the same weight in both. `tokens`: every trained token has the same weight, so a long completion
    has a larger weight."""
    keep_mean: bool = False
    """Adds the mean back after whitening, so that only the scale changes."""
    eps: float = 1e-6
    """Added to a divisor (see `eps_in`), so that nearly equal rewards do not become large advantages."""
    eps_in: Literal["std", "variance"] = "std"
    """The place of eps in a divisor. `std`: the divisor is std + eps. `variance`: the divisor is √(variance + eps)."""
    divisor: Literal["n-1", "n"] = "n-1"
    """The number by which a variance divides the sum of the squares of n values. `n-1`: n − 1. `n`: n."""

    def __post_init__(self) -> None:
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps is {self.eps:g}: it must be finite and at least 0")


class RewardKL(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KL to the reference policy as part of the reward: every trained token gets a reward of −beta · KL, with the KL
    in nats (InstructGPT, 2203.02155)."""

    beta: float
    """β, above 0."""
    kind: Literal["k1", "k2", "k3"] = "k1"
    """The estimate of the KL, from d = log π − log π_ref with the policy π at the step's start. `k1`: d. `k2`: d²/2.
    `k3`: e^(−d) − 1 + d."""

    def __post_init__(self) -> None:
        check_positive("kl.beta", self.beta, "; to train without a KL, remove kl")


class Outcome(Whitening, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One advantage for each sample: (reward − baseline) / scale, then whitened."""

    rewards: Literal["total", "components"] = "total"
    """The rewards that are compared. `total`: one reward of each sample. `components`: several rewards of each sample.
    Each of them gets its own baseline and scale, and the results are weighted and added."""
    weights: dict[str, float] = {}
    """Weight of each reward component, by its name. If empty, every weight is 1."""
    length_penalty: float | None = None
    """α: before all other steps, a reward is multiplied by 1 / (1 + α · tokens / mean tokens of its group)."""
    baseline: Literal[
        "none", "group_mean", "leave_one_out", "length_weighted_mean", "soft_value", "batch_mean", "greedy"
    ] = "none"
    """The value that is subtracted from a reward. `none`: 0. `group_mean`: the mean of the group. `leave_one_out`: the
    mean of the other rewards of the group. `length_weighted_mean`: Σ l·r / Σ l over the group, where l is the number of
    tokens of a completion. `soft_value`: temperature · log of the mean of e^(r / temperature) over the group.
    `batch_mean`: the mean of the step's rewards. `greedy`: the reward of a greedy completion of the same prompt."""
    temperature: float = 1.0
    """Temperature of `soft_value`. A small value gives nearly the best reward of the group, a large one the mean."""
    scale: Literal[
        "none", "group_std", "leave_one_out_std", "batch_std", "group_mean", "informative_share", "nonzero_share"
    ] = "none"
    """The divisor of reward − baseline. `none`: 1. `group_std`: the standard deviation of the group's rewards.
    `leave_one_out_std`: the standard deviation of the other rewards of the group; if these are all equal, the divisor
    is 1. `batch_std`: the standard deviation of the step's rewards. `group_mean`: the mean of the group.
    `informative_share`: the share of the step's samples whose group has unequal rewards, GPG's (B − M) / B.
    `nonzero_share`: the share of the step's rewards that are not 0, which verl uses in place of
    `informative_share`."""
    single: Literal["zero", "raw"] = "zero"
    """Advantage of a sample that is alone in its group. `zero`: 0. `raw`: its reward."""

    def __post_init__(self) -> None:
        Whitening.__post_init__(self)
        if self.scale != "none" and self.baseline not in GROUP_BASELINES:
            raise ValueError(
                f"scale is {self.scale} with baseline {self.baseline}: a scale needs one of the baselines "
                f"{', '.join(sorted(GROUP_BASELINES))}; set baseline to one of them, or set scale: none"
            )
        if self.length_penalty is not None:
            check_positive("length_penalty", self.length_penalty, ", or null")
        check_positive("temperature", self.temperature)
        if self.weights and (
            not all(map(math.isfinite, self.weights.values())) or not any(weight for weight in self.weights.values())
        ):
            raise ValueError(f"weights are {self.weights}: they must be finite, and at least one must not be 0")

    @property
    def compares_a_group(self) -> bool:
        """True if advantages compare the samples of a group, so that a sample alone in its group has an advantage of
        0."""
        return self.baseline in GROUP_BASELINES and self.single == "zero"

    @property
    def refuses_negative_rewards(self) -> bool:
        """True if the estimator would invert the meaning of a negative reward: a negative mean as divisor changes every
        sign, and a length penalty improves a negative reward."""
        return self.scale == "group_mean" or self.length_penalty is not None

    @property
    def divides_by_std(self) -> bool:
        return self.whiten != "none" or self.scale in ("group_std", "leave_one_out_std", "batch_std")


class DiscountedOutcome(Outcome, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An `Outcome` whose tokens may have their own advantages.

    If `kl` is set or `gamma` is below 1, the last trained token of a sample gets the reward less the baseline. With
    `kl`, every trained token also gets −beta · KL. The advantage of a token is then the discounted sum of its own and
    all later rewards, whitened over the step.
    """

    kl: RewardKL | None = None
    """The KL to the reference inside the reward, or null for none. It is an option of `reinforce_pp`,
    `reinforce_pp_baseline`, `gae` and `vtrace`."""
    gamma: float = 1.0
    """γ: a reward counts γ^k for the token that is k trained tokens before it. It is above 0 and at most 1. It is an
    option of `reinforce_pp` and `reinforce_pp_baseline`; for `gae` and `vtrace` it is `critic.gamma`."""

    def __post_init__(self) -> None:
        Outcome.__post_init__(self)
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma:g}: it must be above 0 and at most 1")

    @property
    def by_token(self) -> bool:
        """True if each token of a sample has its own advantage."""
        return self.kl is not None or self.gamma != 1


class CriticBased(Whitening, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One advantage for each token, from a critic's values. γ and λ are fields of the configuration section
    `critic`."""

    whiten: Literal["none", "samples", "tokens"] = "tokens"
    """Subtracts the mean over the step and divides by the standard deviation over the step. `none`: neither. `samples`:
    every sample has the same weight in both. `tokens`: every trained token has the same weight."""
    kl: RewardKL | None = None
    """The KL to the reference inside the reward of each token, or null for none."""

    @property
    def divides_by_std(self) -> bool:
        return self.whiten != "none"


class OwnEstimator(OwnCallable, frozen=True, kw_only=True):
    """An estimator of the user."""


Advantage = Outcome | CriticBased | OwnEstimator
"""The estimator of the advantages: a name, an import path, or a mapping of its `name` and options. In the formulas, r
is a sample's reward, and mean, std and n are those of the sample's group. The batch is the whole step.
An option that the mapping does not name keeps the value of the named estimator; the defaults in the list of options are
those of an estimator that does not set it. A `kl`, or a `gamma` below 1, sets `whiten` to `tokens` if the mapping does
not name it.

Stale tokens: an advantage does not depend on the age of the tokens. Only `vtrace` reads importance weights.

Example: `algorithm: {loss: decoupled_icepop, advantage: {name: group_norm, eps: 1e-4, divisor: n}}`"""

OUTCOMES: Mapping[str, Outcome] = MappingProxyType(
    {
        "group_norm": Outcome(baseline="group_mean", scale="group_std"),
        "group_mean": Outcome(baseline="group_mean"),
        "leave_one_out": Outcome(baseline="leave_one_out"),
        "leave_one_out_std": Outcome(baseline="leave_one_out", scale="leave_one_out_std"),
        "batch_std": Outcome(baseline="group_mean", scale="batch_std"),
        "batch_mean": Outcome(baseline="batch_mean"),
        "reinforce_pp": DiscountedOutcome(whiten="samples"),
        "reinforce_pp_baseline": DiscountedOutcome(baseline="group_mean", whiten="samples"),
        "maxrl": Outcome(baseline="group_mean", scale="group_mean"),
        "gpg": Outcome(baseline="group_mean", scale="informative_share"),
        "opo": Outcome(baseline="length_weighted_mean"),
        "oapl": Outcome(baseline="soft_value"),
        "gr3": Outcome(length_penalty=0.33, baseline="group_mean"),
        "gdpo": Outcome(rewards="components", baseline="group_mean", scale="group_std", whiten="samples"),
        "remax": Outcome(baseline="greedy"),
    }
)
"""Estimators that need only the step's `Samples`. A `DiscountedOutcome` with `by_token` also needs tokens.

`group_norm`: (r − mean) / std (GRPO, 2402.03300). `group_mean`: r − mean (Dr. GRPO, 2503.20783). `leave_one_out`: r −
mean of the other rewards (RLOO, 2402.14740). `leave_one_out_std`: like `leave_one_out`, divided by the std of the other
rewards if they differ (as NeMo RL does it). `batch_std`: (r − mean) / std of the batch (2508.08221). `batch_mean`: r −
mean of the batch, also with one sample of each prompt (FlashREINFORCE, Hu et al. 2026). `reinforce_pp`: r, whitened
over the batch (REINFORCE++, 2501.03262). `reinforce_pp_baseline`: r − mean, whitened over the batch
(2501.03262). `maxrl`: (r − mean) / mean; needs rewards of at least 0 (MaxRL, 2602.02710). `gpg`: (r − mean) · B / (B −
M), for B samples of which M are in groups of equal rewards (GPG, 2504.02546). `opo`: r − Σ l·r / Σ l, where l is the
number of tokens of a completion (OPO, 2505.23585). `oapl`: r − τ · log mean e^(r/τ), with τ = `temperature` = 1 (OAPL,
2602.19362). `gr3`: q − mean of q, with q = r / (1 + α · l / mean l) and α = 0.33; needs rewards of at least 0
(2603.10535). `gdpo`: each of several rewards as in `group_norm`, weighted, added, whitened over the batch (GDPO,
2601.05242). `remax`: r − the reward of a greedy completion of the same prompt (ReMax, 2310.10505)."""

CRITIC_BASED: Mapping[str, CriticBased] = MappingProxyType({"gae": CriticBased(), "vtrace": CriticBased()})
"""Estimators that need the configuration section `critic`.

`gae`: an advantage for each token, from a critic, whitened over the step's tokens (1506.02438). `vtrace`: an advantage
for each token, from a critic and the importance weights, whitened over the step's tokens (1802.01561)."""


def advantage_name(advantage: str | Mapping[str, Any] | None) -> str | None:
    """Returns the name of the estimator in `algorithm.advantage`, or None if there is no name."""
    return advantage if advantage is None or isinstance(advantage, str) else advantage.get("name")


def has_token_advantages(axes: Advantage) -> bool:
    """Returns True if each token of a sample has its own advantage."""
    return isinstance(axes, CriticBased) or (isinstance(axes, DiscountedOutcome) and axes.by_token)


def reward_kl(advantage: str | Mapping[str, Any]) -> RewardKL | None:
    """Returns the KL to the reference in the reward, or None. Raises ConfigError like `resolve_advantage`."""
    axes = resolve_advantage(advantage)
    return axes.kl if isinstance(axes, DiscountedOutcome | CriticBased) else None


def resolve_advantage(advantage: str | Mapping[str, Any]) -> Advantage:
    """Returns the row of `OUTCOMES` or `CRITIC_BASED` that `advantage` names, with the axes replaced that its other
    keys name; or a user's estimator with its options.

    Raises ConfigError with the key, the value and the choices. It also refuses an option that has no effect. If each
    token of a sample has its own advantage, `whiten` is `tokens` unless the user sets it.

    >>> resolve_advantage({"name": "group_norm", "eps": 1e-4}).eps
    0.0001
    """
    name = advantage_name(advantage)
    options = {} if isinstance(advantage, str) else {key: value for key, value in advantage.items() if key != "name"}
    rows: Mapping[str, Outcome | CriticBased] = {**OUTCOMES, **CRITIC_BASED}
    if not isinstance(name, str):
        raise ConfigError(f"{KEY}: it has no name; add `name:`, one of {', '.join(rows)} or an import path")
    if name not in rows:
        if is_import_path(name):
            return OwnEstimator(path=name, options=options)
        raise ConfigError(
            f"{KEY} = {name}: it is neither one of {', '.join(rows)} nor an import path like "
            f"package.module:callable{suggest(name, list(rows))}"
        )
    row = rows[name]
    known = list(row.__struct_fields__)
    for option in options:
        if option not in known:
            owners = [other for other, axes in rows.items() if option in axes.__struct_fields__]
            others = f"; {option} is an option of {', '.join(owners)}" if owners else suggest(option, known)
            raise ConfigError(f"{KEY}.{option}: {name} has no such option; its options are {', '.join(known)}{others}")
    axes = {**msgspec.to_builtins(row), **_plain(options)}
    if wrong := problems(axes, struct=type(row), key=KEY):
        raise ConfigError("\n".join(wrong))
    found = msgspec.convert(axes, type(row))
    if isinstance(found, DiscountedOutcome) and found.by_token and "whiten" not in options:
        found = msgspec.structs.replace(found, whiten="tokens")
    idle = dict(_idle(found))
    for option in options:
        if option in idle:
            raise ConfigError(f"{KEY}.{option}: the option has no effect, because {idle[option]}; remove it")
    return found


def _plain(value: Any) -> Any:
    """Returns options with Python's own numbers in the place of NumPy scalars and of arrays without a dimension, which
    msgspec refuses."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _idle(axes: Outcome | CriticBased) -> Iterator[tuple[str, str]]:
    """Yields the names of the axes of an advantage estimator that have no effect because of its other axes, each with
    the reason."""
    if axes.whiten == "none":
        yield "keep_mean", "whiten is none"
    if not axes.divides_by_std:
        yield "divisor", "the estimator does not divide by a standard deviation"
        yield "eps_in", "the estimator does not divide by a standard deviation"
    if isinstance(axes, CriticBased):
        if not axes.divides_by_std:
            yield "eps", "the estimator does not divide by a standard deviation"
        return
    if not axes.divides_by_std and axes.scale != "group_mean":
        yield "eps", "the estimator divides neither by a standard deviation nor by a mean"
    if axes.baseline not in GROUP_BASELINES:
        yield "single", f"baseline {axes.baseline} does not compare the samples of a group"
    if axes.baseline != "soft_value":
        yield "temperature", f"baseline {axes.baseline} has no temperature"
    if axes.rewards == "total":
        yield "weights", "rewards is total, so there is one reward"
