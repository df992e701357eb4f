"""Judges the differences between log-probs of the engine and of the learner for the same tokens and weights.

In float32 the largest difference decides.

In bfloat16 both sides round, and a healthy model of 30 layers has a mean difference of 0.03 to 0.04 nats, where a small
one has 0.003. So the unit is what this run shows at its start: the mean and the root mean square of its first
differences. Later ones may be `weights.parity_factor` times as large. The unit itself may have a mean of at most
`weights.parity_mean_nats`, over at least `FIRST_TOKENS` tokens: a run with a small batch may never have more on-policy
tokens. Later differences of the learner's training steps are judged over at least `POOLED_TOKENS` tokens.

In both precisions there is a second test, of tokens that the engine has sampled. If the engine reports the
probabilities with which it samples, the mean of p_learner / p_engine over these tokens is 1, whatever weights and
precision the learner has, because Σ_a p_engine(a) · p_learner(a) / p_engine(a) = 1 (importance sampling; A. Owen, Monte
Carlo theory, methods and examples, chapter 9). The numbers behind the limits are in docs/weights.md.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.config.schema import Config

POOLED_TOKENS = 2000
"""Number of tokens over which the means of a learner's training steps are judged; a replica judges each probe by
itself. If there are fewer tokens, the missing ones count as tokens without a difference, so few tokens fail only if
they differ much. In float32, the largest difference of each call is judged instead of the mean."""
FIRST_TOKENS = 200
"""The number of tokens, in place of `POOLED_TOKENS`, before the run has a unit. It is smaller, because the limit of a
unit (`weights.parity_mean_nats`) leaves more room."""
LEAST_UNIT_NATS = 1e-2
"""A unit's mean is at least this large: a model whose probabilities become more extreme rounds more than at the
start."""
LEAST_UNIT_RMS_NATS = 1.6e-2
"""A unit's root mean square is at least this large, for the same reason."""
RELATIVE_SPREAD = 1.2
"""Standard deviation of the difference of a token, as a share of the mean difference: measured in bfloat16."""
SIGMAS = 3.0
"""Standard errors by which the mean over few tokens, as those of a probe, may be larger than its limit."""
WEIGHT_BIAS = 0.01
"""The mean of p_learner / p_engine may differ from 1 by this much and by `WEIGHT_SIGMAS` standard errors."""
WEIGHT_SIGMAS = 5.0
TOLERANCE_NATS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Differences between two log-probs of each of `tokens` tokens: the sum of their absolute values (nats), of their
    squares, and the largest.

    `weight_excess` is the sum of p_learner / p_engine − 1, and `weight_excess_squares` that of its squares. Both are 0
    for tokens that were not sampled.
    """

    tokens: int = 0
    sum_nats: float = 0.0
    sum_squares: float = 0.0
    max_nats: float = 0.0
    weight_excess: float = 0.0
    weight_excess_squares: float = 0.0

    @classmethod
    def of(cls, nats: Iterable[float]) -> "Differences":
        """Returns the sums and the largest of these absolute differences, in nats. A NaN counts as infinite."""
        found = [math.inf if math.isnan(each) else each for each in nats]
        return cls(
            tokens=len(found),
            sum_nats=math.fsum(found),
            sum_squares=math.fsum(each * each for each in found),
            max_nats=max(found, default=0.0),
        )

    def __add__(self, other: "Differences") -> "Differences":
        return Differences(
            tokens=self.tokens + other.tokens,
            sum_nats=self.sum_nats + other.sum_nats,
            sum_squares=self.sum_squares + other.sum_squares,
            max_nats=max(self.max_nats, other.max_nats),
            weight_excess=self.weight_excess + other.weight_excess,
            weight_excess_squares=self.weight_excess_squares + other.weight_excess_squares,
        )

    def spread(self, *, least_tokens: int = 1) -> "Spread":
        """Returns mean and root mean square over the tokens, or over `least_tokens` if there are fewer."""
        tokens = max(self.tokens, least_tokens)
        return Spread(mean_nats=self.sum_nats / tokens, rms_nats=math.sqrt(self.sum_squares / tokens))

    def weight_ratio(self) -> float:
        """Returns how far the mean of p_learner / p_engine is from 1, as a share of what is accepted."""
        tokens = max(self.tokens, POOLED_TOKENS)
        bias = self.weight_excess / tokens
        variance = max(0.0, self.weight_excess_squares / tokens - bias * bias)
        return abs(bias) / (WEIGHT_BIAS + WEIGHT_SIGMAS * math.sqrt(variance / tokens))


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean and the root mean square of differences, nats."""

    mean_nats: float
    rms_nats: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ratio`: how large the judged number is as a share of its limit. Above 1 engine and learner do not agree. `words`
    give the number, the unit and the limit, for messages."""

    ratio: float
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityLimits:
    """The differences that `weights.parity_*` accept. `exact`: the largest difference decides, and is at most
    `tolerance_nats`. Otherwise a unit has a mean of at most `mean_nats`, and later differences are at most `factor`
    units.

    The log-probs are those at `temperature`. A temperature below 1 enlarges the logits and their differences, so that
    `largest_nats` is larger too.
    """

    exact: bool
    tolerance_nats: float
    mean_nats: float
    factor: float
    temperature: float = 1.0

    @classmethod
    def of(cls, config: Config, *, temperature: float = 1.0) -> "ParityLimits":
        weights = config.weights
        return cls(
            exact=config.model.dtype == "float32",
            tolerance_nats=weights.parity_tolerance_nats or TOLERANCE_NATS,
            mean_nats=weights.parity_mean_nats,
            factor=weights.parity_factor,
            temperature=temperature,
        )

    @property
    def largest_nats(self) -> float:
        """The largest accepted difference if `exact`."""
        return self.tolerance_nats / min(1.0, self.temperature)

    def in_words(self) -> str:
        """Returns `largest_nats` and its setting as a text for messages."""
        divided = "" if self.temperature >= 1.0 else f" / generator.temperature = {self.largest_nats:g}"
        return f"weights.parity_tolerance_nats = {self.tolerance_nats:g}{divided}"


def room_for_few(tokens: int) -> float:
    """Returns by which factor the mean difference of `tokens` tokens may exceed its limit by chance in bfloat16.

    >>> round(room_for_few(16), 2), round(room_for_few(1600), 2)
    (1.9, 1.09)
    """
    return 1.0 + SIGMAS * RELATIVE_SPREAD / math.sqrt(max(tokens, 1))


class ParityJudge:
    """Judges differences of log-probs: in float32 the largest one, in bfloat16 their spread against the unit, which is
    the spread of the first ones. With `least_tokens` the newest differences are pooled until they have so many tokens;
    otherwise those of each call are judged alone."""

    def __init__(self, limits: ParityLimits, *, least_tokens: int = 0) -> None:
        self._limits = limits
        self._least_tokens = least_tokens
        self._pool: deque[Differences] = deque()
        self.unit: Spread | None = None
        """The spread with which later differences are compared. None before the first ones, and in float32."""

    def judge(self, new: Differences) -> Verdict:
        """Adds differences, and judges the newest ones. If `new` has no tokens, the ratio is 0."""
        if not new.tokens:
            return Verdict(0.0)
        self._pool.append(new)
        while sum(each.tokens for each in self._pool) - self._pool[0].tokens >= max(1, self._least_tokens):
            self._pool.popleft()
        pooled = sum(self._pool, Differences())
        of_size = self._largest(new) if self._limits.exact else self._spread(pooled)
        return max(of_size, self._weights(pooled), key=lambda verdict: verdict.ratio)

    def _largest(self, new: Differences) -> Verdict:
        return Verdict(
            new.max_nats / self._limits.largest_nats,
            f"the largest difference of {new.tokens} tokens is {new.max_nats:.3g} nats, and {self._limits.in_words()}",
        )

    def _spread(self, pooled: Differences) -> Verdict:
        if self.unit is None:
            found = pooled.spread(least_tokens=min(self._least_tokens, FIRST_TOKENS))
            limit = self._limits.mean_nats
            ratio = found.mean_nats / limit
            if ratio <= 1.0 and pooled.tokens >= self._least_tokens:
                self.unit = Spread(max(found.mean_nats, LEAST_UNIT_NATS), max(found.rms_nats, LEAST_UNIT_RMS_NATS))
            return Verdict(
                ratio,
                f"the first {pooled.tokens} tokens, which give the unit, differ by {found.mean_nats:.3g} nats on "
                f"average (at most by {pooled.max_nats:.3g}), and weights.parity_mean_nats = {limit:g}",
            )
        found = pooled.spread(least_tokens=self._least_tokens)
        unit, factor = self.unit, self._limits.factor
        limit = factor * unit.mean_nats * room_for_few(pooled.tokens)
        by_mean = Verdict(
            found.mean_nats / limit,
            f"{pooled.tokens} tokens differ by {found.mean_nats:.3g} nats on average (at most by "
            f"{pooled.max_nats:.3g}); the unit, which was measured at the start, is {unit.mean_nats:.3g} nats, and "
            f"weights.parity_factor = {factor:g}, so the limit for so many tokens is {limit:.3g}",
        )
        if not self._least_tokens:
            return by_mean  # of the few tokens of a probe, one that always rounds badly would decide the mean square
        limit_rms = factor * unit.rms_nats
        by_rms = Verdict(
            found.rms_nats / limit_rms,
            f"{pooled.tokens} tokens differ by {found.rms_nats:.3g} nats (root mean square; at most by "
            f"{pooled.max_nats:.3g}); the unit, which was measured at the start, is {unit.rms_nats:.3g} nats, and "
            f"weights.parity_factor = {factor:g}, so the limit is {limit_rms:.3g}",
        )
        return max(by_mean, by_rms, key=lambda verdict: verdict.ratio)

    def _weights(self, pooled: Differences) -> Verdict:
        mean = 1.0 + pooled.weight_excess / pooled.tokens
        return Verdict(
            pooled.weight_ratio(),
            f"the mean of p_learner / p_engine over {pooled.tokens} sampled tokens is {mean:.4f}, and not 1: the "
            "engine does not sample from the probabilities that it reports",
        )
