"""Advantages from rewards: computed by the driver, which knows rewards, group ids and lengths but no tokens.

The driver computes them once a step over all of its samples, before they are dealt to ranks, updates or micro-batches.
"The batch" below is the whole step, so that statistics of the batch are global. They weigh samples and not tokens,
unless an estimator's `whiten` is `tokens`.

- Groups are found by id, never by position or by equal prompts. An incomplete group uses the members that are present.
- A group whose rewards are all equal gets exactly 0 from a group baseline, never 0/0 and never amplified rounding.
- Standard deviations divide by n − 1, unless an estimator's `divisor` is `n`.

`baselines.py` has the estimators as rows of data, docs/advantages.md their formulas and sources. Token-level
estimators are in `token_estimators.py` and `returns.py`. Legend: N samples of the step, in any order.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from asyncrl.algorithms.baselines import (
    GROUP_BASELINES,
    KEY,
    CriticBased,
    DiscountedOutcome,
    Outcome,
    OwnEstimator,
    Whitening,
    resolve_advantage,
)
from asyncrl.algorithms.returns import ROUNDING, deviation
from asyncrl.config.import_path import resolve
from asyncrl.errors import ConfigError, RunError
from asyncrl.user_code import describe_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A step's samples, as far as they are known. Every tensor is [N]; a column that a loop does not know is None.

    `completion_tokens_N` are the tokens of each completion. `components` are several rewards by name.
    `greedy_rewards_N` is the reward of a greedy completion of the sample's prompt. RunError when the shapes differ.
    """

    rewards_N: torch.Tensor
    group_ids_N: torch.Tensor
    completion_tokens_N: torch.Tensor | None = None
    components: Mapping[str, torch.Tensor] | None = None
    greedy_rewards_N: torch.Tensor | None = None

    def __post_init__(self) -> None:
        columns = {
            "group ids": self.group_ids_N,
            "completion tokens": self.completion_tokens_N,
            "greedy rewards": self.greedy_rewards_N,
            **{f"rewards of component {name!r}": values_N for name, values_N in (self.components or {}).items()},
        }
        for name, values_N in columns.items():
            if self.rewards_N.ndim != 1 or (values_N is not None and values_N.shape != self.rewards_N.shape):
                shape = None if values_N is None else tuple(values_N.shape)
                raise RunError(f"rewards {tuple(self.rewards_N.shape)} and {name} {shape} must all be [N]")


class Estimator(Protocol):
    """Advantages [N] of a step's samples."""

    def __call__(self, samples: Samples, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class OutcomeEstimator:
    """The estimator that the axes spell out. RunError where the samples lack what it reads, or where a reward is
    negative and the axes do not allow it."""

    axes: Outcome

    def __call__(self, samples: Samples) -> torch.Tensor:
        axes, groups = self.axes, Groups(samples.group_ids_N)
        advantages_N = torch.zeros(len(samples.rewards_N), dtype=torch.float64)
        for name, rewards_N in self.rewards(samples).items():
            scaled_N = _scaled(axes, rewards_N, groups=groups, samples=samples)
            advantages_N = advantages_N + self._weight(name, samples) * scaled_N
        if axes.whiten == "none":
            return advantages_N
        counts_N = torch.ones_like(advantages_N)
        if axes.whiten == "tokens":
            counts_N = _known(samples.completion_tokens_N, "completion_tokens_N").double()
        whitened_N = _whitened(advantages_N, counts_N, axes)
        if axes.baseline not in GROUP_BASELINES:
            return whitened_N
        return torch.where(self.varied(samples) | _raw(axes, groups), whitened_N, 0.0)

    def rewards(self, samples: Samples) -> dict[str, torch.Tensor]:
        """The rewards that are compared, float64 [N] by component; a single one without a name where there are no
        components."""
        found = {"": samples.rewards_N}
        if self.axes.rewards == "components":
            found = dict(_known(samples.components or None, "components"))
        if self.axes.refuses_negative_rewards:
            for rewards_N in found.values():
                _check_not_negative(rewards_N)
        if self.axes.length_penalty is None:
            return {name: rewards_N.double() for name, rewards_N in found.items()}
        tokens_N = _known(samples.completion_tokens_N, "completion_tokens_N").double()
        # the clamp is for a group of empty completions, whose lengths are all 0
        relative_N = tokens_N / Groups(samples.group_ids_N).mean(tokens_N).clamp(min=1e-9)
        return {name: rewards_N / (1 + self.axes.length_penalty * relative_N) for name, rewards_N in found.items()}

    def varied(self, samples: Samples) -> torch.Tensor:
        """Samples whose group has unequal rewards, as this estimator sees them, bool [N]."""
        groups = Groups(samples.group_ids_N)
        return torch.stack([groups.varied(rewards_N) for rewards_N in self.rewards(samples).values()]).any(0)

    def _weight(self, name: str, samples: Samples) -> float:
        weights, names = self.axes.weights, set(samples.components or {})
        if weights and set(weights) != names:
            raise RunError(
                f"{KEY}.weights has {', '.join(sorted(weights))}, and the rewards' components are "
                f"{', '.join(sorted(names))}: give every component one weight"
            )
        return weights.get(name, 1.0)


class Groups:
    """Statistics of every sample's group, float64 [N]: each is gathered back to the samples."""

    def __init__(self, group_ids_N: torch.Tensor) -> None:
        ids, self._index_N = torch.unique(group_ids_N, return_inverse=True)
        self._count = len(ids)
        self.size_N = self.sum(torch.ones(len(group_ids_N), dtype=torch.float64))

    def sum(self, values_N: torch.Tensor) -> torch.Tensor:
        return self._reduced(values_N, "sum")

    def mean(self, values_N: torch.Tensor) -> torch.Tensor:
        return self.sum(values_N) / self.size_N

    def max(self, values_N: torch.Tensor) -> torch.Tensor:
        return self._reduced(values_N, "amax")

    def varied(self, values_N: torch.Tensor) -> torch.Tensor:
        """Whether a sample's group has unequal values, bool [N]: false in a group of one."""
        # max > min, not std > 0: the mean of equal values may differ from them by a rounding
        return self.max(values_N) > self._reduced(values_N, "amin")

    def _reduced(self, values_N: torch.Tensor, reduce: str) -> torch.Tensor:
        empty = torch.zeros(self._count, dtype=torch.float64)
        return empty.scatter_reduce(0, self._index_N, values_N.double(), reduce, include_self=False)[self._index_N]


def _scaled(axes: Outcome, rewards_N: torch.Tensor, *, groups: Groups, samples: Samples) -> torch.Tensor:
    """(reward − baseline) / scale of one reward; exactly 0 where a group baseline finds all rewards equal."""
    if axes.baseline == "none":
        return rewards_N
    if axes.baseline == "greedy":
        return rewards_N - _known(samples.greedy_rewards_N, "greedy_rewards_N").double()
    raw_N, varied_N = _raw(axes, groups), groups.varied(rewards_N)
    centred_N = torch.where(raw_N, rewards_N, rewards_N - _group_baseline(axes, rewards_N, groups, samples))
    teaches_N = varied_N | (raw_N & (rewards_N != 0))
    return torch.where(teaches_N, centred_N / _scale(axes, rewards_N, groups, teaches_N), 0.0)


def _group_baseline(axes: Outcome, rewards_N: torch.Tensor, groups: Groups, samples: Samples) -> torch.Tensor:
    if axes.baseline == "leave_one_out":
        return (groups.sum(rewards_N) - rewards_N) / (groups.size_N - 1).clamp(min=1)
    if axes.baseline == "length_weighted_mean":
        tokens_N = _known(samples.completion_tokens_N, "completion_tokens_N").double()
        all_N = groups.sum(tokens_N)
        weighted_N = groups.sum(tokens_N * rewards_N) / all_N.clamp(min=1)
        return torch.where(all_N > 0, weighted_N, groups.mean(rewards_N))
    if axes.baseline == "soft_value":
        largest_N = groups.max(rewards_N)  # the exponents are at most 0, so that none overflows
        shares_N = groups.mean(((rewards_N - largest_N) / axes.temperature).exp())
        return largest_N + axes.temperature * shares_N.log()
    return groups.mean(rewards_N)


def _scale(axes: Outcome, rewards_N: torch.Tensor, groups: Groups, teaches_N: torch.Tensor) -> torch.Tensor:
    """The divisor, [N] or a scalar; 1 where a statistic of the group would be one of a single sample."""
    count = max(len(rewards_N), 1)
    match axes.scale:
        case "batch_std":
            squares = (rewards_N - rewards_N.mean()).square().sum()
            return deviation(squares, torch.tensor(float(count)), axes)
        case "informative_share":
            return (teaches_N.sum() / count).clamp(min=1 / count)
        case "nonzero_share":
            return (torch.count_nonzero(rewards_N) / count).clamp(min=1 / count)
    centred_N, size_N = rewards_N - groups.mean(rewards_N), groups.size_N
    squares_N = groups.sum(centred_N.square())
    match axes.scale:
        case "group_std":
            scale_N = deviation(squares_N, size_N, axes)
        case "leave_one_out_std":
            # Σ of the others' squares about their own mean, which is the group's mean − centred / (n − 1)
            others_N = squares_N - centred_N.square() * size_N / (size_N - 1).clamp(min=1)
            equal_N = others_N <= ROUNDING * squares_N
            scale_N = torch.where(equal_N, 1.0, deviation(others_N.clamp(min=0), size_N - 1, axes))
        case "group_mean":
            scale_N = groups.mean(rewards_N) + axes.eps
        case _:
            scale_N = torch.ones_like(rewards_N)
    return torch.where(size_N > 1, scale_N, 1.0)


def _raw(axes: Outcome, groups: Groups) -> torch.Tensor:
    """Samples that are alone in their group and keep their reward as their advantage, bool [N]."""
    return (groups.size_N == 1) & (axes.single == "raw")


def _whitened(values_N: torch.Tensor, counts_N: torch.Tensor, rule: Whitening) -> torch.Tensor:
    """(v − mean) / std, where a value counts `counts_N` times; 0 where it counts 0 times, and where all are equal. The
    mean is added back where `rule` says so."""
    counted_N = counts_N > 0
    inside = values_N[counted_N]
    if inside.numel() == 0:
        return torch.zeros_like(values_N)
    count = counts_N.sum()
    mean = (counts_N * torch.where(counted_N, values_N, 0.0)).sum() / count
    centred_N = torch.where(counted_N, values_N - mean, 0.0)
    if inside.max() > inside.min():
        whitened_N = centred_N / deviation((counts_N * centred_N.square()).sum(), count, rule)
    else:
        whitened_N = torch.zeros_like(values_N)
    return torch.where(counted_N, whitened_N + mean, 0.0) if rule.keep_mean else whitened_N


KnownT = TypeVar("KnownT")


def _known(column: KnownT | None, name: str) -> KnownT:
    if column is None:
        raise RunError(f"{KEY} reads {name}, which these samples do not have")
    return column


def _check_not_negative(rewards_N: torch.Tensor) -> None:
    if bool((rewards_N < 0).any()):
        raise RunError(
            f"{KEY} needs rewards of at least 0, and the least of this step is {float(rewards_N.min()):g}: it divides "
            "by a mean of rewards, or shrinks the rewards of long completions, and both would turn a negative reward "
            "around; shift the rewards, or choose another estimator"
        )


def resolve_estimator(advantage: str | Mapping[str, Any]) -> Estimator:
    """The estimator that `algorithm.advantage` names: a built-in, with the axes that it replaces, or an import path.

    A callable by import path gets (rewards [N], group ids [N]); or, if it has a parameter `samples`, the step's
    `Samples`. The other keys of the mapping are its keyword arguments. ConfigError when there is no such estimator,
    when it needs a critic or tokens (`token_estimators.resolve_estimators`), or when the options do not fit.
    """
    found = resolve_advantage(advantage)
    if isinstance(found, DiscountedOutcome) and found.by_token:
        raise ConfigError(
            f"{KEY} = {advantage}: kl and gamma give every token an advantage of its own, and this call has no tokens; "
            "take `resolve_estimators`, which has a part for the ranks as well, or remove kl and gamma",
            key=KEY,
        )
    if isinstance(found, Outcome):
        return OutcomeEstimator(found)
    if isinstance(found, CriticBased):
        raise ConfigError(f"{KEY} = {advantage}: needs a critic, which computes it on its own ranks", key=KEY)
    return _own(found)


def _own(own: OwnEstimator) -> Estimator:
    function = resolve(own.path, key=KEY)
    try:
        signature: inspect.Signature | None = inspect.signature(function)
    except (TypeError, ValueError):  # a callable written in C may have no signature
        signature = None
    takes_samples = signature is not None and "samples" in signature.parameters
    try:
        if signature is not None and takes_samples:
            signature.bind(samples=None, **own.options)
        elif signature is not None:
            signature.bind(None, None, **own.options)
    except TypeError as error:
        wanted = "samples" if takes_samples else "rewards, group_ids"
        raise ConfigError(
            f"{KEY} = {own.path}: cannot be called with ({', '.join([wanted, *own.options])}): {error}; its parameters "
            f"are {signature}",
            key=KEY,
        ) from error

    def estimate(samples: Samples) -> torch.Tensor:
        try:
            if takes_samples:
                found = function(samples=samples, **own.options)
            else:
                found = function(samples.rewards_N, samples.group_ids_N, **own.options)
        except Exception as error:
            raise RunError(f"{KEY} = {own.path} raised {describe_error(error)}") from error
        return cast(torch.Tensor, found)

    return estimate


def varied(estimator: Estimator | None, samples: Samples) -> torch.Tensor:
    """Samples whose group has unequal rewards, bool [N]: as the estimator sees them, if it is one of ours, else as they
    are scored."""
    if isinstance(estimator, OutcomeEstimator):
        return estimator.varied(samples)
    return Groups(samples.group_ids_N).varied(samples.rewards_N)


def check_rewards(rewards: torch.Tensor) -> None:
    """RunError when one is not finite."""
    if not bool(torch.isfinite(rewards).all()):
        raise RunError(f"{int((~torch.isfinite(rewards)).sum())} of {len(rewards)} rewards are not finite")


def compute_advantages(estimator: Estimator, samples: Samples) -> torch.Tensor:
    """float32 advantages [N]. RunError when a reward or an advantage is not finite in float32, or when an estimator
    gives anything but one number a reward: a NaN would otherwise become a loss of 0, in a run that looks well and
    learns nothing.

    >>> samples = Samples(rewards_N=torch.tensor([1.0, 0.0, 5.0]), group_ids_N=torch.tensor([7, 7, 8]))
    >>> compute_advantages(resolve_estimator("group_norm"), samples)
    tensor([ 0.7071, -0.7071,  0.0000])
    >>> by_n = resolve_estimator({"name": "group_norm", "divisor": "n"})
    >>> compute_advantages(by_n, samples)
    tensor([ 1.0000, -1.0000,  0.0000])
    """
    for rewards_N in (samples.rewards_N, *(samples.components or {}).values()):
        check_rewards(rewards_N)
    found: object = estimator(samples)
    if not isinstance(found, torch.Tensor):
        raise RunError(f"{KEY} gave a {type(found).__name__} instead of a tensor of {len(samples.rewards_N)} values")
    advantages_N = found.float()
    if advantages_N.shape != samples.rewards_N.shape or not bool(torch.isfinite(advantages_N).all()):
        raise RunError(
            f"{KEY} gave {tuple(advantages_N.shape)} values for {tuple(samples.rewards_N.shape)} rewards, "
            f"{int((~torch.isfinite(advantages_N)).sum())} of them not finite in float32"
        )
    return advantages_N
