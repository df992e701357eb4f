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
PROBE_FACTOR = 2.0
"""A probe in bfloat16 may differ by this factor times `weights.parity_mean_nats` on average. It has some dozen tokens,
the same in each update. One of them may always round badly, so it has no quantile."""
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

    def __add__(self, other: "Differences") -> "Differences":
        return Differences(
            tokens=self.tokens + other.tokens,
            beyond=self.beyond + other.beyond,
            sum_nats=self.sum_nats + other.sum_nats,
            max_nats=max(self.max_nats, other.max_nats),
        )

    @property
    def words(self) -> str:
        """The differences as text, for error messages."""
        mean_nats = self.sum_nats / max(self.tokens, 1)
        return (
            f"of {self.tokens} tokens {self.beyond} differ by more than the tolerance, at most by {self.max_nats:.3g} "
            f"nats, on average by {mean_nats:.3g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityLimits:
    """The differences between the log-probs of an engine and of the learner that `weights.parity_*` accept.

    At most a share `beyond_ratio` of the tokens may differ by more than `tolerance_nats`. The mean difference may be at
    most `mean_nats`. In float32 `beyond_ratio` is 0."""

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

    def ratio_of_probe(self, found: Differences) -> float:
        """Returns how large the judged number of one probe is as a share of its limit: above 1 the loaded weights are
        not the published ones."""
        if not self.beyond_ratio:
            return found.max_nats / self.tolerance_nats
        return found.sum_nats / max(found.tokens, 1) / (PROBE_FACTOR * self.mean_nats)

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

    @property
    def pooled(self) -> Differences:
        """The differences that were judged last: in float32 only the newest ones."""
        return sum(self._pool, Differences(tokens=0, beyond=0, sum_nats=0.0, max_nats=0.0))

    def ratio(self, new: Differences) -> float:
        """Adds differences. Returns how large the judged number is as a share of its limit: above 1 the log-probs do
        not agree. It is 0 if there are no new tokens."""
        if not new.tokens:
            return 0.0
        if not self.limits.beyond_ratio:
            self._pool = deque([new])
            return new.max_nats / self.limits.tolerance_nats
        self._pool.append(new)
        while sum(each.tokens for each in self._pool) - self._pool[0].tokens >= POOLED_TOKENS:
            self._pool.popleft()
        pooled = self.pooled
        tokens = max(POOLED_TOKENS, pooled.tokens)
        return max(
            pooled.beyond / tokens / self.limits.beyond_ratio,
            pooled.sum_nats / tokens / self.limits.mean_nats,
        )
