"""Statistics over a few runs that differ in their seed: a mean with its interval, and the difference of two groups.

Intervals and tests use Student's t-distribution, which is right for few runs if their numbers are about normal. Groups
are compared as Colas et al. recommend for few seeds: by Welch's t-test, which allows unequal variances ("A Hitchhiker's
Guide to Statistical Comparisons of Reinforcement Learning Algorithms", arXiv:1904.06979), or, where most runs of both
groups have the same seeds, by the paired t-test. Agarwal et al. 2021 (arXiv:2108.13264) explain why a number of few
runs needs an interval. With three seeds, only differences of several standard deviations are found (Colas et al. 2018,
"How Many Random Seeds?", arXiv:1806.08295).
"""

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

LEVEL = 0.95
"""Probability with which an interval covers the true mean, if the numbers are normal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The mean of `n` runs. The interval from `low` to `high` is the t-interval; both are None for a single run."""

    n: int
    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean difference of two groups, with its t-interval and the two-sided p-value of `test`, which is `paired` or
    `welch`. `n` is the number of pairs, or of the runs of both groups. Without enough runs for a test, `test` is empty
    and the interval and the p-value are None."""

    test: str
    n: int
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Returns the mean with its t-interval; None without values.

    >>> estimate([1.0, 2.0, 3.0]).high  # 2 + 4.303 / sqrt(3)
    4.4841377...
    """
    if not values:
        return None
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Estimate(n=1, mean=mean)
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(n=n, mean=mean, low=mean - half, high=mean + half)


def difference(ours: Sequence[tuple[Hashable, float]], theirs: Sequence[tuple[Hashable, float]]) -> Difference | None:
    """Returns the difference of two groups of runs, `ours` minus `theirs`. Each run has a seed and a value. None if a
    group has no run.

    The runs are compared in pairs of equal seeds, and other runs are left out, if

    - at least two seeds are in both groups,
    - these are the seeds of more than half of the runs of each group, and
    - no group has two runs of a seed.

    Else all runs are compared by Welch's test, which needs two runs in each group.
    """
    if not ours or not theirs:
        return None
    by_seed, others = dict(ours), dict(theirs)
    shared = [seed for seed in by_seed if seed in others]
    most = len(shared) > 1 and 2 * len(shared) > max(len(ours), len(theirs))
    if most and (len(by_seed), len(others)) == (len(ours), len(theirs)):
        return _paired([by_seed[seed] - others[seed] for seed in shared])
    return _welch([value for _, value in ours], [value for _, value in theirs])


def _paired(differences: Sequence[float]) -> Difference:
    n, mean = len(differences), statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(n)
    return _tested("paired", n, mean, error, degrees=n - 1)


def _welch(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Returns the difference by Welch's test, with the degrees of freedom of Welch and Satterthwaite."""
    n, mean = len(ours) + len(theirs), statistics.fmean(ours) - statistics.fmean(theirs)
    if min(len(ours), len(theirs)) < 2:
        return Difference(test="", n=n, mean=mean)
    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in (ours, theirs)]
    total = sum(part for part, _ in parts)
    # Shares of the total do not underflow, as squares of very small variances would.
    degrees = 1 / sum((part / total) ** 2 / free for part, free in parts) if total > 0 else n - 2
    return _tested("welch", n, mean, math.sqrt(total), degrees=degrees)


def _tested(test: str, n: int, mean: float, error: float, *, degrees: float) -> Difference:
    """Returns the difference with its interval and p-value. Without any spread (`error` is 0), a difference other than
    0 has the p-value 0, and no difference has 1."""
    half = t_quantile(degrees) * error
    p = two_sided_p(mean / error, degrees) if error > 0 else float(mean == 0)
    return Difference(test=test, n=n, mean=mean, low=mean - half, high=mean + half, p=p)


def two_sided_p(t: float, degrees: float) -> float:
    """Returns the probability that the absolute value of Student's t is at least `abs(t)`: I_x(ν/2, 1/2) with
    x = ν / (ν + t²), ν the degrees of freedom.

    >>> round(two_sided_p(4.303, 2), 4)
    0.05
    """
    x = degrees / (degrees + t * t)
    return _incomplete_beta(x, degrees / 2, 0.5)


@cache
def t_quantile(degrees: float) -> float:
    """Returns the t of which the `LEVEL` of the distribution is between -t and t.

    >>> [round(t_quantile(degrees), 3) for degrees in (1, 2, 4, 30)]
    [12.706, 4.303, 2.776, 2.042]
    """
    low, high = 0.0, 1.0
    while two_sided_p(high, degrees) > 1 - LEVEL:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, degrees) > 1 - LEVEL else (low, middle)
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Returns the regularised incomplete beta function I_x(a, b), by its continued fraction with Lentz's method
    (Numerical Recipes, 3rd edition, section 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below this x
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction
