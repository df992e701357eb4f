"""Advantage estimators as rows of data: a baseline, a scale, a whitening. Torch-free.

`algorithm.advantage` names a row, or a row and the axes that differ from it. `advantages.py` computes the rows of
`OUTCOMES` from one reward a sample, and `token_estimators.py` their part of a token where they have one.
`asyncrl.value.estimators` computes the rows of `CRITIC_BASED` from a critic's values. docs/advantages.md has the
formulas of all rows.
"""

import math
import re
import typing
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from asyncrl.config.import_path import is_import_path, suggest
from asyncrl.errors import ConfigError

KEY = "algorithm.advantage"

GROUP_BASELINES = frozenset({"group_mean", "leave_one_out", "length_weighted_mean", "soft_value"})
"""Baselines that compare the samples of a group: they give 0 where a group's rewards are all equal."""


class Whitening(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How advantages of a whole step are shifted and scaled, and how a standard deviation divides."""

    whiten: Literal["none", "samples", "tokens"] = "none"
    """Divide by the standard deviation over the step. `samples`: every sample counts the same. `tokens`: every trained
    token counts the same, so that a long completion counts more."""
    keep_mean: bool = False
    """Add the mean back after whitening: only the scale changes."""
    eps: float = 1e-6
    """Added where `eps_in` says, so that near-equal rewards do not become large advantages."""
    eps_in: Literal["std", "variance"] = "std"
    """`std`: divide by std + eps. `variance`: divide by √(variance + eps)."""
    divisor: Literal["n-1", "n"] = "n-1"
    """A variance is the sum of squares over the number of values, or over one less."""

    def __post_init__(self) -> None:
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps is {self.eps:g}: it must be finite and at least 0")


class RewardKL(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pull to the reference inside the reward: every trained token earns −beta · KL in nats (InstructGPT,
    2203.02155)."""

    beta: float
    kind: Literal["k1", "k2", "k3"] = "k1"
    """The estimate of the KL: `asyncrl.algorithms.returns.kl_estimate`."""

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"kl.beta is {self.beta:g}: it must be finite and above 0; without a KL, remove kl")


class Outcome(Whitening, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One advantage a sample: (reward − baseline) / scale, then whitened."""

    rewards: Literal["total", "components"] = "total"
    """`components`: every one of several rewards has its own baseline and scale; then they are weighted and added."""
    weights: dict[str, float] = {}
    """Weight of each reward component, by its name. Empty: all 1."""
    length_penalty: float | None = None
    """α: a reward is multiplied by 1 / (1 + α · tokens / mean tokens of its group) before everything else."""
    baseline: Literal["none", "group_mean", "leave_one_out", "length_weighted_mean", "soft_value", "greedy"] = "none"
    """Subtracted from a reward. `soft_value`: temperature · log of the mean of e^(r / temperature) over the group.
    `greedy`: the reward of a greedy completion of the same prompt."""
    temperature: float = 1.0
    """Of `soft_value`: small values weigh the best reward of a group, large ones give its mean."""
    scale: Literal[
        "none", "group_std", "leave_one_out_std", "batch_std", "group_mean", "informative_share", "nonzero_share"
    ] = "none"
    """Divides the difference. `leave_one_out_std`: the standard deviation of the group's other rewards; where those are
    all equal, it is not divided. `informative_share`: the share of the step's samples whose group has unequal rewards.
    `nonzero_share`: the share of the step's rewards that are not 0."""
    single: Literal["zero", "raw"] = "zero"
    """Advantage of a group of one sample: 0, or its reward."""

    def __post_init__(self) -> None:
        Whitening.__post_init__(self)
        if self.scale != "none" and self.baseline not in GROUP_BASELINES:
            raise ValueError(
                f"scale is {self.scale} with baseline {self.baseline}: a scale needs one of the baselines "
                f"{', '.join(sorted(GROUP_BASELINES))}; set one of them, or scale: none"
            )
        if self.length_penalty is not None and not 0 < self.length_penalty < math.inf:
            raise ValueError(f"length_penalty is {self.length_penalty:g}: it must be finite and above 0, or null")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature:g}: it must be finite and above 0")
        if self.weights and (
            not all(map(math.isfinite, self.weights.values())) or not any(weight for weight in self.weights.values())
        ):
            raise ValueError(f"weights are {self.weights}: they must be finite, and at least one must not be 0")

    @property
    def compares_a_group(self) -> bool:
        """Whether a group of one sample gets an advantage of 0."""
        return self.baseline in GROUP_BASELINES and self.single == "zero"

    @property
    def refuses_negative_rewards(self) -> bool:
        """Whether a negative reward would turn the meaning around: dividing by a negative mean flips every sign, and a
        length penalty makes a negative reward better."""
        return self.scale == "group_mean" or self.length_penalty is not None

    @property
    def divides_by_std(self) -> bool:
        return self.whiten != "none" or self.scale in ("group_std", "leave_one_out_std", "batch_std")


class DiscountedOutcome(Outcome, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An `Outcome` that the last trained token of a sample may earn. A token's advantage is then the discounted sum of
    what it and later tokens earn, whitened over the step."""

    kl: RewardKL | None = None
    gamma: float = 1.0
    """γ: what a reward is worth one trained token earlier."""

    def __post_init__(self) -> None:
        Outcome.__post_init__(self)
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma:g}: it must be above 0 and at most 1")

    @property
    def by_token(self) -> bool:
        """Whether the tokens of a sample have advantages of their own."""
        return self.kl is not None or self.gamma != 1

    def outcome(self) -> Outcome:
        """The part of a sample, which is not whitened: its reward less its baseline."""
        axes = {name: getattr(self, name) for name in Outcome.__struct_fields__}
        return Outcome(**{**axes, "whiten": "none", "keep_mean": False})

    def whitening(self) -> Whitening:
        """How the advantages of tokens are whitened."""
        return Whitening(**{name: getattr(self, name) for name in Whitening.__struct_fields__})


class CriticBased(Whitening, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One advantage a token, from a critic's values; γ and λ are in the section `critic`."""

    whiten: Literal["none", "samples", "tokens"] = "tokens"
    kl: RewardKL | None = None

    @property
    def divides_by_std(self) -> bool:
        return self.whiten != "none"


class OwnEstimator(msgspec.Struct, frozen=True, kw_only=True):
    """An import path, and the keyword arguments that its callable gets."""

    path: str
    options: dict[str, Any] = {}


OUTCOMES: Mapping[str, Outcome] = MappingProxyType(
    {
        "group_norm": Outcome(baseline="group_mean", scale="group_std"),
        "group_mean": Outcome(baseline="group_mean"),
        "leave_one_out": Outcome(baseline="leave_one_out"),
        "leave_one_out_std": Outcome(baseline="leave_one_out", scale="leave_one_out_std"),
        "batch_std": Outcome(baseline="group_mean", scale="batch_std"),
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
"""Estimators that read a step's `Samples`, and no token unless `DiscountedOutcome.by_token`."""

CRITIC_BASED: Mapping[str, CriticBased] = MappingProxyType({"gae": CriticBased(), "vtrace": CriticBased()})
"""Estimators that need the section `critic`."""


class PublishedCritic(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the section `critic` that a paper sets. They hold where the user leaves the field unset."""

    value_lam: float
    length_alpha: float


CRITICS: Mapping[str, PublishedCritic] = MappingProxyType(
    {"vapo": PublishedCritic(value_lam=1.0, length_alpha=0.05)}  # 2504.05118, sections 4.1 and 5.1
)
"""By preset of `algorithm.loss`."""


def advantage_name(advantage: str | Mapping[str, Any] | None) -> str | None:
    """The name in `algorithm.advantage`; None where there is none."""
    return advantage if advantage is None or isinstance(advantage, str) else advantage.get("name")


def has_token_advantages(axes: Outcome | CriticBased | OwnEstimator) -> bool:
    """Whether the tokens of a sample have advantages of their own."""
    return isinstance(axes, CriticBased) or (isinstance(axes, DiscountedOutcome) and axes.by_token)


def reward_kl(advantage: str | Mapping[str, Any]) -> RewardKL | None:
    """The KL to the reference in the reward, where `advantage` has one. ConfigError as `resolve_advantage`."""
    axes = resolve_advantage(advantage)
    return axes.kl if isinstance(axes, DiscountedOutcome | CriticBased) else None


def resolve_advantage(advantage: str | Mapping[str, Any]) -> Outcome | CriticBased | OwnEstimator:
    """The row that `advantage` names, with the axes that it replaces; or an estimator by import path with its options.

    ConfigError names the key, the value and the choices. An option that changes nothing is refused as well. Where the
    tokens of a sample have advantages of their own, they are whitened over tokens unless `whiten` is an option.

    >>> resolve_advantage({"name": "group_norm", "eps": 1e-4}).eps
    0.0001
    """
    name = advantage_name(advantage)
    options = {} if isinstance(advantage, str) else {key: value for key, value in advantage.items() if key != "name"}
    rows: Mapping[str, Outcome | CriticBased] = {**OUTCOMES, **CRITIC_BASED}
    if not isinstance(name, str):
        raise ConfigError(f"{KEY}: has no name; add `name:`, one of {', '.join(rows)} or an import path", key=KEY)
    if name not in rows:
        if is_import_path(name):
            return OwnEstimator(path=name, options=options)
        raise ConfigError(
            f"{KEY} = {name}: is neither one of {', '.join(rows)} nor an import path like "
            f"package.module:callable{suggest(name, list(rows))}",
            key=KEY,
        )
    row = rows[name]
    known = list(row.__struct_fields__)
    for option in options:
        if option not in known:
            owners = [other for other, axes in rows.items() if option in axes.__struct_fields__]
            others = f"; {option} is an option of {', '.join(owners)}" if owners else suggest(option, known)
            raise ConfigError(
                f"{KEY}.{option}: {name} has no such option; there are {', '.join(known)}{others}",
                key=f"{KEY}.{option}",
            )
    try:
        found = msgspec.convert({**msgspec.to_builtins(row), **options}, type(row))
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{KEY}: {error}{_choices(str(error), type(row), options)} ({dict(options)!r})", key=KEY
        ) from error
    if isinstance(found, DiscountedOutcome) and found.by_token and "whiten" not in options:
        found = msgspec.structs.replace(found, whiten="tokens")
    idle = dict(_idle(found))
    for option in options:
        if option in idle:
            raise ConfigError(f"{KEY}.{option}: changes nothing: {idle[option]}; remove it", key=f"{KEY}.{option}")
    return found


def _idle(axes: Outcome | CriticBased) -> Iterator[tuple[str, str]]:
    """Axes that change nothing, each with the reason."""
    if axes.whiten == "none":
        yield "keep_mean", "whiten is none"
    if not axes.divides_by_std:
        yield "divisor", "no standard deviation divides"
        yield "eps_in", "no standard deviation divides"
    if isinstance(axes, CriticBased):
        if not axes.divides_by_std:
            yield "eps", "no standard deviation divides"
        return
    if not axes.divides_by_std and axes.scale != "group_mean":
        yield "eps", "neither a standard deviation nor a mean divides"
    if axes.baseline not in GROUP_BASELINES:
        yield "single", f"baseline {axes.baseline} does not compare the samples of a group"
    if axes.baseline != "soft_value":
        yield "temperature", f"baseline {axes.baseline} has none"
    if axes.rewards == "total":
        yield "weights", "rewards is total: there is one reward"


_FIELD = re.compile(r"at `\$\.(?P<path>[\w.]+)`")


def _choices(error: str, row: type[msgspec.Struct], options: Mapping[str, Any]) -> str:
    """The names that a field takes, where msgspec's error is about a field that takes names."""
    found = _FIELD.search(error)
    if found is None:
        return ""
    kind: Any = row
    value: Any = options
    for field in found["path"].split("."):
        # of the two types of an optional mapping, the one with fields
        structs = [part for part in (kind, *typing.get_args(kind)) if hasattr(part, "__struct_fields__")]
        kind = typing.get_type_hints(structs[0])[field]
        value = value.get(field) if isinstance(value, Mapping) else None
    names = [choice for choice in typing.get_args(kind) if isinstance(choice, str)]
    return f"; there are {', '.join(names)}{suggest(str(value), names)}" if names else ""
