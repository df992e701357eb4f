"""Advantages from rewards. The driver computes them; it has rewards, group ids and lengths, but no tokens.

The driver computes the advantages once a step, over all samples of the step, before it distributes the samples to
ranks, updates and micro-batches. "The batch" below is the whole step, so statistics of the batch are global. They count
every sample once, unless an estimator's `whiten` is `tokens`.

- A group is identified by its id, never by position or by equal prompts. An incomplete group uses the members that are
  present.
- A group whose rewards are all equal gets exactly 0 from a group baseline. There is no 0/0 and no amplified rounding.
- Standard deviations divide by n − 1, unless an estimator's `divisor` is `n`.

`baselines.py` has the estimators as rows of data. docs/losses.md has their formulas and sources. Estimators that
give every token its own advantage are in `token_estimators.py` and `returns.py`. Legend: N samples of the step, in any
order.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

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
from asyncrl.algorithms.interfaces import misfit
from asyncrl.algorithms.returns import ROUNDING, deviation
from asyncrl.config.import_path import fitting_options, resolve
from asyncrl.errors import ConfigError, RunError
from asyncrl.user_code import describe_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of a step. Every tensor is [N]. A column is None if the training loop does not have it.

    `completion_tokens_N` is the number of tokens of each completion. `components` holds several rewards by name.
    `greedy_rewards_N` is the reward of a greedy completion of the sample's prompt. Raises RunError if shapes differ.
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
                raise RunError(
                    f"rewards have shape {tuple(self.rewards_N.shape)} and {name} {shape}: both must be [N], one entry "
                    "for each sample"
                )


Estimator = Callable[[Samples], torch.Tensor]
"""Computes the advantages [N] of a step's samples."""


@dataclass(frozen=True, slots=True)
class OutcomeEstimator:
    """An estimator of one advantage for each sample: (reward − baseline) / scale, then whitened over the step. `axes`
    chooses the baseline, the scale and the whitening.

    A call raises RunError if the samples lack a column that the axes need, if a reward is negative and the axes need
    rewards of at least 0, or if `weights` are given for other names than those of the components.
    """

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
        """Returns the rewards that the estimator compares, float64 [N], by component name. If `axes.rewards` is
        `total`, there is one entry with the name "". A length penalty is already applied."""
        found = {"": samples.rewards_N}
        if self.axes.rewards == "components":
            found = dict(_known(samples.components or None, "components"))
        if self.axes.refuses_negative_rewards:
            for rewards_N in found.values():
                _check_not_negative(rewards_N)
        if self.axes.length_penalty is None:
            return {name: rewards_N.double() for name, rewards_N in found.items()}
        tokens_N = _known(samples.completion_tokens_N, "completion_tokens_N").double()
        # the clamp avoids 0/0 for a group of empty completions, whose lengths are all 0
        relative_N = tokens_N / Groups(samples.group_ids_N).mean(tokens_N).clamp(min=1e-9)
        return {name: rewards_N / (1 + self.axes.length_penalty * relative_N) for name, rewards_N in found.items()}

    def varied(self, samples: Samples) -> torch.Tensor:
        """Returns True for samples whose group has unequal rewards after the length penalty, bool [N]. With several
        reward components, one unequal component suffices. With a baseline that does not compare the samples of a group,
        it returns True for all: equal rewards have a gradient too."""
        if self.axes.baseline not in GROUP_BASELINES:
            return torch.ones_like(samples.group_ids_N, dtype=torch.bool)
        groups = Groups(samples.group_ids_N)
        return torch.stack([groups.varied(rewards_N) for rewards_N in self.rewards(samples).values()]).any(0)

    def _weight(self, name: str, samples: Samples) -> float:
        weights, names = self.axes.weights, set(samples.components or {})
        if weights and set(weights) != names:
            raise RunError(
                f"{KEY}.weights has the names {', '.join(sorted(weights))}, but the components of the rewards are "
                f"{', '.join(sorted(names))}: give every component one weight"
            )
        return weights.get(name, 1.0)


class Groups:
    """Statistics of the samples' groups, float64 [N]: entry i is the statistic of the group of sample i."""

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
        """Returns True for samples whose group has unequal values, bool [N]. It is False for a group of one sample."""
        # max > min instead of std > 0: the mean of equal values may differ from them by a rounding error
        return self.max(values_N) > self._reduced(values_N, "amin")

    def _reduced(self, values_N: torch.Tensor, reduce: str) -> torch.Tensor:
        empty = torch.zeros(self._count, dtype=torch.float64)
        return empty.scatter_reduce(0, self._index_N, values_N.double(), reduce, include_self=False)[self._index_N]


def _scaled(axes: Outcome, rewards_N: torch.Tensor, *, groups: Groups, samples: Samples) -> torch.Tensor:
    """Returns (reward − baseline) / scale of each sample, for one component of the rewards.

    With a baseline that compares the samples of a group, it is exactly 0 for a group whose rewards are all equal,
    except for a sample that is alone in its group and keeps its reward (`single: raw`).
    """
    if axes.baseline == "none":
        return rewards_N
    if axes.baseline == "batch_mean":
        step = Groups(torch.zeros_like(samples.group_ids_N))
        return torch.where(step.varied(rewards_N), rewards_N - step.mean(rewards_N), 0.0)
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
        largest_N = groups.max(rewards_N)  # then the exponents are at most 0, so no exponential overflows
        shares_N = groups.mean(((rewards_N - largest_N) / axes.temperature).exp())
        return largest_N + axes.temperature * shares_N.log()
    return groups.mean(rewards_N)


def _scale(axes: Outcome, rewards_N: torch.Tensor, groups: Groups, teaches_N: torch.Tensor) -> torch.Tensor:
    """Returns the divisor of reward − baseline, [N] or a scalar. A divisor that is a statistic of the group is 1 for a
    sample that is alone in its group. `teaches_N` is True for samples whose reward − baseline may differ from 0."""
    count = max(len(rewards_N), 1)
    match axes.scale:
        case "batch_std":
            squares = (rewards_N - rewards_N.mean()).square().sum()
            return deviation(squares, torch.tensor(float(count)), axes)
        case "informative_share":
            # at least one sample, so that a step in which all groups are equal does not divide by zero
            return (teaches_N.sum().double() / count).clamp(min=1 / count)
        case "nonzero_share":
            return (torch.count_nonzero(rewards_N).double() / count).clamp(min=1 / count)
    centred_N, size_N = rewards_N - groups.mean(rewards_N), groups.size_N
    squares_N = groups.sum(centred_N.square())
    match axes.scale:
        case "group_std":
            scale_N = deviation(squares_N, size_N, axes)
        case "leave_one_out_std":
            # the sum of squares of the other rewards about their mean, which is the group's mean − centred / (n − 1)
            others_N = squares_N - centred_N.square() * size_N / (size_N - 1).clamp(min=1)
            equal_N = others_N <= ROUNDING * squares_N
            scale_N = torch.where(equal_N, 1.0, deviation(others_N.clamp(min=0), size_N - 1, axes))
        case "group_mean":
            scale_N = groups.mean(rewards_N) + axes.eps
        case _:
            scale_N = torch.ones_like(rewards_N)
    return torch.where(size_N > 1, scale_N, 1.0)


def _raw(axes: Outcome, groups: Groups) -> torch.Tensor:
    """Returns True for samples that are alone in their group, if their advantage is their reward (`single: raw`), bool
    [N]."""
    return (groups.size_N == 1) & (axes.single == "raw")


def _whitened(values_N: torch.Tensor, counts_N: torch.Tensor, rule: Whitening) -> torch.Tensor:
    """Returns (v − mean) / std, where value i counts `counts_N[i]` times in mean and std. The result is 0 where the
    count is 0, and 0 everywhere if all counted values are equal. If `rule.keep_mean`, the mean is added back."""
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
        raise RunError(f"{KEY} reads {name}, but these samples do not have it: set it in Samples(...)")
    return column


def _check_not_negative(rewards_N: torch.Tensor) -> None:
    if bool((rewards_N < 0).any()):
        raise RunError(
            f"{KEY} needs rewards of at least 0, but the smallest of this step is {float(rewards_N.min()):g}: the "
            "estimator divides by a mean of rewards, or shrinks the rewards of long completions, and both would invert "
            "the meaning of a negative reward; shift the rewards, or choose another estimator"
        )


def resolve_estimator(advantage: str | Mapping[str, Any] | Callable[..., torch.Tensor]) -> Estimator:
    """Returns the estimator that `algorithm.advantage` names: a built-in one with replaced axes, or the callable at an
    import path. A loop of your own may also pass a callable, or a mapping with a callable as `name`.

    A callable gets (rewards [N], group ids [N]). If it has a parameter `samples`, it gets
    the step's `Samples` instead. The other keys of the mapping are its keyword arguments. Raises ConfigError if there
    is no such estimator, if it needs a critic or tokens (use `token_estimators.resolve_estimators` for tokens), or if
    the options do not fit the callable.
    """
    if callable(advantage):
        advantage = {"name": advantage}
    if not isinstance(advantage, str) and callable(function := advantage.get("name")):
        path = getattr(function, "__qualname__", repr(function))
        options = {key: value for key, value in advantage.items() if key != "name"}
        return _estimator_of(function, OwnEstimator(path=path, options=options))
    found = resolve_advantage(advantage)
    if isinstance(found, DiscountedOutcome) and found.by_token:
        raise ConfigError(
            f"{KEY} = {advantage}: the options kl and gamma give every token its own advantage, but "
            "`resolve_estimator` gets no tokens; call `resolve_estimators`, which also returns the part that the "
            "ranks compute, or remove kl and gamma"
        )
    if isinstance(found, Outcome):
        return OutcomeEstimator(found)
    if isinstance(found, CriticBased):
        raise ConfigError(
            f"{KEY} = {advantage}: it needs a critic, and the critic's ranks compute the advantages, so "
            "`resolve_estimator` cannot return it; in your own loop, use `asyncrl.value.estimators`, or choose an "
            "estimator without a critic"
        )
    return _estimator_of(resolve(found.path, key=KEY), found)


def _estimator_of(function: Callable[..., Any], own: OwnEstimator) -> Estimator:
    try:
        signature: inspect.Signature | None = inspect.signature(function)
    except (TypeError, ValueError):  # a callable that is written in C may have no signature
        signature = None
    takes_samples = signature is not None and "samples" in signature.parameters
    given: dict[str, Any] = {"samples": None} if takes_samples else {}
    values = () if takes_samples else (None, None)
    options = fitting_options(function, own.options, key=KEY, name=own.path, values=len(values), given=given)
    problem = None if signature is None else misfit(signature, *values, **given, **options)
    if problem is not None:
        wanted = "samples" if takes_samples else "rewards, group_ids"
        raise ConfigError(
            f"{KEY} = {own.path}: it cannot be called with ({', '.join([wanted, *options])}): {problem}; its "
            f"parameters are {signature}"
        )

    def estimate(samples: Samples) -> torch.Tensor:
        try:
            if takes_samples:
                found = function(samples=samples, **options)
            else:
                found = function(samples.rewards_N, samples.group_ids_N, **options)
        except Exception as error:
            raise RunError(f"{KEY} = {own.path} raised {describe_error(error)}") from error
        return cast(torch.Tensor, found)

    return estimate


def varied(estimator: Estimator | None, samples: Samples) -> torch.Tensor:
    """Returns True for samples whose group has unequal rewards, bool [N].

    For a built-in estimator these are the rewards that it compares, for example after a length penalty (see
    `OutcomeEstimator.varied`). For any other estimator they are the rewards in `samples`. `estimator` is None for a
    critic, which does not compare the samples of a group: then the result is True for all.
    """
    if estimator is None:
        return torch.ones_like(samples.group_ids_N, dtype=torch.bool)
    if isinstance(estimator, OutcomeEstimator):
        return estimator.varied(samples)
    return Groups(samples.group_ids_N).varied(samples.rewards_N)


def check_rewards(rewards: torch.Tensor) -> None:
    """Raises RunError if a reward is not finite."""
    if not bool(torch.isfinite(rewards).all()):
        raise RunError(
            f"{int((~torch.isfinite(rewards)).sum())} of {len(rewards)} rewards are not finite: check the reward "
            "function"
        )


def compute_advantages(estimator: Estimator, samples: Samples) -> torch.Tensor:
    """Returns float32 advantages [N].

    Raises RunError if a reward or an advantage is not finite in float32, or if the estimator does not return one number
    for each reward. Without this check, a NaN would become a loss of 0, in a run that looks healthy and learns nothing.

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
        raise RunError(
            f"{KEY} returned a {type(found).__name__}; it must return a tensor of {len(samples.rewards_N)} values"
        )
    advantages_N = found.float()
    if advantages_N.shape != samples.rewards_N.shape or not bool(torch.isfinite(advantages_N).all()):
        raise RunError(
            f"{KEY} returned values of shape {tuple(advantages_N.shape)} for rewards of shape "
            f"{tuple(samples.rewards_N.shape)}, and {int((~torch.isfinite(advantages_N)).sum())} of the values are not "
            "finite in float32; it must return one finite number for each reward"
        )
    return advantages_N
