"""Numbers of a whole step: one value for each trained token, reduced over all ranks, updates and micro-batches.

They are computed once a step, before the first gradient, with the weights at the step's start. All ranks get the same
numbers. `calibration.py` puts them into objectives. A loss of a user declares its own in the attribute
`statistics`, and gets them in the argument `statistics` of each call:

    def ratios(tokens: StepTokens) -> torch.Tensor:
        return tokens.log_ratio("current", "behaviour").exp()

    class Bounded:
        columns = ("advantages", "generation_logprobs")
        statistics = {"mean": StepStatistic(ratios, mean), "high": StepStatistic(ratios, quantile(0.99))}

Ranks do not exchange tokens. A reduction sums a few numbers over the ranks. A quantile, and a bound for which a
condition on sums holds, are found by a search: each round sums the numbers of a grid of candidates, and the next grid
is finer. All decisions depend on these sums only, so every rank makes the same calls of `Reduce`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from asyncrl.algorithms.diagnostics import MAX_FLOAT64_LOG_RATIO
from asyncrl.errors import CallRefused
from asyncrl.user_code import describe_error

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Returns the sum of a small tensor over all ranks."""
Reduction = Callable[[torch.Tensor, Reduce], float]
"""Reduces the values of all ranks, float64 [n] on each, to one number. A collective."""

# four rounds of 64 intervals narrow the range from 1e-12 to 1e18 to a relative precision of 4e-6
_GRID, _ROUNDS = 64, 4
_SMALLEST, _LARGEST = 1e-12, 1e18
_MAGNITUDE = 2**63 - 1
"""All bits of a float64 but its sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The trained tokens of one rank's step, flattened to [N].

    `sources` has log-probs, in nats, by the policy's name: `current`, `proximal`, and `behaviour` or `reference` if
    the loss reads their columns. Before the first gradient, the current policy equals the recomputed proximal policy.
    It differs from an interpolated proximal policy. `columns` has the other columns that the loss names; a column with
    one value for each row is repeated for the row's tokens. `statistics` has the numbers of the statistics that were
    declared before this one.
    """

    sources: Mapping[str, torch.Tensor]
    advantages: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    statistics: Mapping[str, float] = field(default_factory=dict)

    def log_ratio(self, p: str, q: str) -> torch.Tensor:
        """Returns log p − log q of every token, float64."""
        return self.sources[p].double() - self.sources[q].double()

    def bounded_ratio(self, p: str, q: str) -> torch.Tensor:
        """Returns p/q of every token, float64, so bounded that the square of a ratio fits float64."""
        return self.log_ratio(p, q).clamp(-MAX_FLOAT64_LOG_RATIO, MAX_FLOAT64_LOG_RATIO).exp()


@dataclass(frozen=True, slots=True)
class StepStatistic:
    """A number of a whole step. `of` returns one finite value for each trained token of a rank, or for some of them.
    `reduction` makes one number of the values of all ranks. Each value counts once, also that of a token whose sample
    mask is between 0 and 1."""

    of: Callable[[StepTokens], torch.Tensor]
    reduction: Reduction


def statistics_of(loss_fn: object) -> Mapping[str, StepStatistic]:
    """Returns the statistics of the step that a loss declares in its attribute `statistics`; none without the
    attribute. Raises TypeError if it is not a mapping of names to StepStatistic."""
    found = getattr(loss_fn, "statistics", None) or {}
    if not isinstance(found, Mapping) or not all(isinstance(each, StepStatistic) for each in found.values()):
        raise TypeError(f"the loss's statistics are {found!r}; they must be a mapping of names to StepStatistic")
    return found


def step_numbers(
    declared: Mapping[str, StepStatistic],
    *,
    tokens: StepTokens,
    reduce: Reduce,
    together: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, float]:
    """Returns the number of each statistic, equal on all ranks. `tokens` are those of this rank. A collective.

    The functions of the statistics run in the context `together`. A run passes one that raises the error of one rank on
    all ranks; the default does not. The functions are not called on a rank without a trained token. Raises CallRefused
    if a function fails or does not return at most one finite value for each token, or if a reduction raises TypeError.
    A reduction of your own must not fail on an empty tensor: the other ranks would wait for the rank on which it
    failed.
    """
    found: dict[str, float] = {}
    for name, statistic in declared.items():
        with together():
            values = _values(name, statistic, replace(tokens, statistics=dict(found)))
        try:
            found[name] = statistic.reduction(values, reduce)
        except TypeError as error:  # for example, the reduction is `quantile` and not `quantile(0.9)`
            raise CallRefused(f"the reduction of the statistic {name!r} failed: {describe_error(error)}") from error
    return found


def _values(name: str, statistic: StepStatistic, tokens: StepTokens) -> torch.Tensor:
    if not tokens.advantages.numel():
        return torch.zeros(0, dtype=torch.float64)
    try:
        values = torch.as_tensor(statistic.of(tokens)).detach().double()
    except Exception as error:  # a function of the user may raise anything
        raise CallRefused(
            f"the statistic {name!r} of the loss failed: {describe_error(error)}; it can read the columns that the "
            "loss names in `columns`"
        ) from error
    if values.ndim != 1 or values.numel() > tokens.advantages.numel() or not bool(values.isfinite().all()):
        raise CallRefused(
            f"the statistic {name!r} of the loss returned {list(values.shape)} values, of which "
            f"{int((~values.isfinite()).sum())} are not finite, for {tokens.advantages.numel()} trained tokens; it "
            "must return a tensor [n] with at most one finite value for each token"
        )
    return values


# The reductions. Each of them is 0 if no rank has a value, unless its docstring says otherwise.


def total(values: torch.Tensor, reduce: Reduce) -> float:
    """The sum of all values."""
    return float(reduce(values.sum().reshape(1)))


def mean(values: torch.Tensor, reduce: Reduce) -> float:
    """The mean of all values."""
    first, count = _sums(reduce, values.sum(), values.numel())
    return first / count if count else 0.0


def effective_share(values: torch.Tensor, reduce: Reduce) -> float:
    """The share (Σw)² / (n · Σw²) of n weights w that is effective, at most 1. It is 1 if there are no weights."""
    first, second, count = _sums(reduce, values.sum(), values.square().sum(), values.numel())
    return min(1.0, first**2 / (count * second)) if count and second else 1.0


def smallest(values: torch.Tensor, reduce: Reduce) -> float:
    """The smallest of all values."""
    return _quantile(values, reduce, q=0.0)


def largest(values: torch.Tensor, reduce: Reduce) -> float:
    """The largest of all values."""
    return _quantile(values, reduce, q=1.0)


def quantile(q: float) -> Reduction:
    """The smallest value for which at least a share q of all values is at most that value. It is a value of a token;
    values are not interpolated (`method="inverted_cdf"` of NumPy)."""
    if not 0 <= q <= 1:
        raise ValueError(f"q is {q}: a quantile is a share from 0 to 1")
    return partial(_quantile, q=q)


def _quantile(values: torch.Tensor, reduce: Reduce, *, q: float) -> float:
    [count] = _sums(reduce, values.numel())
    if not count:
        return 0.0
    # without the factor 1 - 1e-12, a rounding error of q · n could make the rank greater by 1
    return _ranked(values, reduce, rank=max(1, math.ceil(q * count * (1 - 1e-12))))


def _ranked(values: torch.Tensor, reduce: Reduce, *, rank: int) -> float:
    """Returns exactly the value at the place `rank` in the ascending order of the values of all processes; the smallest
    value has `rank` 1. Searches in 11 rounds, each of which counts the values up to each of 64 candidates."""
    keys = _ordered((values + 0.0).view(torch.int64)).sort().values
    low, high = -_MAGNITUDE - 1, _MAGNITUDE
    while low < high:
        candidates = sorted({low + (high - low) * step // _GRID for step in range(1, _GRID + 1)})
        below = torch.searchsorted(keys, torch.tensor(candidates), right=True)
        first = next(i for i, number in enumerate(reduce(below.double()).tolist()) if number >= rank)
        low, high = candidates[first - 1] + 1 if first else low, candidates[first]
    return float(_ordered(torch.tensor([low])).view(torch.float64))


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Returns integers in the order of the float64 numbers that have these bits. Applied twice, it returns the bits."""
    return torch.where(bits < 0, bits ^ _MAGNITUDE, bits)


def bound_of_largest(share: float) -> Reduction:
    """Returns the reduction to the bound above which the k largest of the n values lie, k = max(1, ⌊share · n⌋); −inf
    if k = n, or if there are no values. The bound is halfway between the k-th largest value and the next one, so that
    rounding does not move a value across it. If the two are equal, the values that equal them are not above the bound:
    then fewer than k values are, or none."""

    def reduction(values: torch.Tensor, reduce: Reduce) -> float:
        [count] = _sums(reduce, values.numel())
        # without the factor 1 + 1e-12, a rounding error of share · n could make the floor smaller by 1
        below = int(count) - max(1, math.floor(share * count * (1 + 1e-12)))
        if below <= 0:
            return -math.inf
        return _ranked(values, reduce, rank=below) / 2 + _ranked(values, reduce, rank=below + 1) / 2

    return reduction


def bound_of_mean(budget: float) -> Reduction:
    """Returns the reduction to the largest bound for which the values at or below it have a mean of at most `budget`;
    inf if the mean of all values is at most `budget`, or if there are none."""

    def reduction(values: torch.Tensor, reduce: Reduce) -> float:
        def sums(bound: float) -> tuple[float, float]:
            kept = values[values <= bound]
            return float(kept.sum()), float(kept.numel())

        return _largest_bound(sums, holds=lambda first, count: first <= budget * count, reduce=reduce)

    return reduction


def cap_of_share(share: float, *, lo: float) -> Reduction:
    """Returns the reduction to the largest cap for which the weights, clamped to [lo, cap], have at least this
    effective share (`effective_share`); inf if they need no cap."""

    def reduction(values: torch.Tensor, reduce: Reduce) -> float:
        [count] = _sums(reduce, values.numel())

        def sums(bound: float) -> tuple[float, float]:
            clamped = values.clamp(lo, bound)
            return float(clamped.sum()), float(clamped.square().sum())

        return _largest_bound(sums, holds=lambda w, squares: w**2 >= share * count * squares, reduce=reduce)

    return reduction


def _sums(reduce: Reduce, *own: torch.Tensor | float) -> list[float]:
    """Returns each number, summed over the ranks."""
    found: list[float] = reduce(torch.tensor([float(each) for each in own], dtype=torch.float64)).tolist()
    return found


def _largest_bound(
    sums: Callable[[float], tuple[float, float]], *, holds: Callable[[float, float], bool], reduce: Reduce
) -> float:
    """Returns the largest bound for which `holds` is true of the two numbers `sums(bound)`, added up over all ranks, to
    a relative precision of 4e-6. `holds` must be true for small bounds and false for large ones. Returns inf if it is
    true for inf, and the smallest bound of the grid if it is false for all."""

    def held(bounds: Sequence[float]) -> list[bool]:
        rows = torch.tensor([sums(bound) for bound in bounds], dtype=torch.float64)
        return [holds(first, second) for first, second in reduce(rows).tolist()]

    if held([math.inf])[0]:
        return math.inf
    low, high = _SMALLEST, _LARGEST
    for _ in range(_ROUNDS):
        step = (high / low) ** (1 / _GRID)
        bounds = [low * step**index for index in range(_GRID + 1)]
        answers = held(bounds)
        last = max((index for index, answer in enumerate(answers) if answer), default=0)
        low, high = bounds[last], bounds[min(last + 1, _GRID)]
    return low
