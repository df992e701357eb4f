"""Judges the differences between log-probs of the engine and of the learner for the same tokens and weights.

In float32 the largest difference decides. In bfloat16 single tokens differ by more than any useful limit, because both
sides round. There the share of tokens beyond the tolerance decides, and the mean difference, over at least
`POOLED_TOKENS` tokens.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.config.schema import Config

POOLED_TOKENS = 2000
"""Tokens over which differences in bfloat16 are judged. Tokens that are missing count as equal, so that few tokens are
judged too if they differ much."""
TOLERANCE_NATS = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Differences of `tokens` tokens: how many are beyond the tolerance, their sum and the largest (nats)."""

    tokens: int
    beyond: int
    sum_nats: float
    max_nats: float

    @classmethod
    def of(cls, nats: Iterable[float], *, tolerance_nats: float) -> "Differences":
        """Returns the numbers of absolute differences. A NaN counts as infinite."""
        found = [math.inf if math.isnan(each) else each for each in nats]
        return cls(
            tokens=len(found),
            beyond=sum(each > tolerance_nats for each in found),
            sum_nats=math.fsum(found),
            max_nats=max(found, default=0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityLimits:
    """What `weights.parity_*` accept: differences up to `tolerance_nats`, larger ones for a share of the tokens
    `beyond_ratio`, and a mean of `mean_nats`. In float32 every token must be within the tolerance."""

    tolerance_nats: float
    beyond_ratio: float
    mean_nats: float

    @classmethod
    def of(cls, config: Config) -> "ParityLimits":
        weights, exact = config.weights, config.model.dtype == "float32"
        tolerance = weights.parity_tolerance_nats or TOLERANCE_NATS[config.model.dtype]
        return cls(
            tolerance_nats=tolerance,
            beyond_ratio=0.0 if exact else 1.0 - weights.parity_quantile,
            mean_nats=tolerance if exact else weights.parity_mean_nats,
        )

    @property
    def words(self) -> str:
        """The limits as text, for error messages."""
        if not self.beyond_ratio:
            return f"weights.parity_tolerance_nats = {self.tolerance_nats:g}"
        return (
            f"{self.beyond_ratio:.2g} of {POOLED_TOKENS} tokens may be beyond weights.parity_tolerance_nats = "
            f"{self.tolerance_nats:g}, see weights.parity_quantile; weights.parity_mean_nats = {self.mean_nats:g}"
        )


class ParityJudge:
    """Pools differences until there are enough tokens, and compares them with the limits."""

    def __init__(self, limits: ParityLimits) -> None:
        self.limits = limits
        self._pool: deque[Differences] = deque()

    def ratio(self, new: Differences) -> float:
        """Adds differences. Returns how large the judged number is as a share of its limit: above 1 the log-probs do
        not agree. If there are no tokens, the ratio is 0."""
        if not self.limits.beyond_ratio:
            return new.max_nats / self.limits.tolerance_nats
        self._pool.append(new)
        while sum(each.tokens for each in self._pool) - self._pool[0].tokens >= POOLED_TOKENS:
            self._pool.popleft()
        tokens = max(POOLED_TOKENS, sum(each.tokens for each in self._pool))
        beyond = sum(each.beyond for each in self._pool) / tokens
        mean_nats = sum(each.sum_nats for each in self._pool) / tokens
        return max(beyond / self.limits.beyond_ratio, mean_nats / self.limits.mean_nats)

    def start_over(self) -> None:
        """Forgets the pooled differences, after weights that did not agree were replaced."""
        self._pool.clear()
