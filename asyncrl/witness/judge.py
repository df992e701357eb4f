"""The witness's request to the ranks, its comparisons of an update with the formulas, and their findings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.witness.bounds import unlike_bounds
from asyncrl.witness.objective import Axes, Counts, Sample, Tokens, derivatives

CHECKS = ("counts", "prompts", "rows", "advantages", "bounds", "coefficients", "gradient", "optimizer", "frozen")
"""The names of the checks, in the order in which a reader should look at them: a later check uses numbers that an
earlier one has checked."""
EQUAL = 1e-5
"""Largest accepted difference of a coefficient (the derivative of the loss by a token's log-prob) or of an advantage,
as a share of the largest coefficient or advantage."""
ROUNDING_NATS = 1e-6
"""Rounding of log-probs in float32: a token so near to the edge of a clip or a gate may be on either side."""
FORMULA = "formula"
"""The kind of a finding that compares a number with a formula. A finding of another kind is about a function of the
user's own, which the witness calls a second time."""


class GradientLimits(NamedTuple):
    """The accepted differences between two computations of the same gradient, as shares of its norm: `of_tensor` for
    each tensor, `of_all` for all together. For a tensor with less than the share `least` of the norm of all tensors,
    the difference is a share of `least` times this norm. `of_token` is for the rounding of single tokens: for the
    gradient of n tokens, of_token / √n is added to `of_tensor` and `of_all`."""

    of_tensor: float
    of_all: float
    least: float
    of_token: float


GRADIENT_FLOAT32 = GradientLimits(of_tensor=1e-3, of_all=1e-3, least=0.01, of_token=0.0)
GRADIENT_BFLOAT16 = GradientLimits(of_tensor=0.2, of_all=0.15, least=0.1, of_token=0.6)
"""The measured differences in bfloat16, on which these limits are based. SmolLM2-135M, with hundreds of tokens: at most
0.08 for the whole gradient, and at most 0.32 for single tensors, which had 2 % of the whole norm. The tiny model of the
quickstart, where often only one to five tokens of a group still have a probability below 1: for the whole gradient
0.015 in the median of 400 steps, and once 0.35."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The facts that the driver knows about a step that is witnessed. The drawn rows are those of the group that the
    witness has drawn.

    `counts` has the samples and tokens of each update, counted from the metadata of the step's groups. `advantages` has
    one number for each drawn row, from the rewards by plain formulas or by the user's own estimator, as `advantages_by`
    says. It is None if the ranks compute an advantage for each token, or if the estimator cannot be called again.
    `largest_advantage` is the largest absolute one of the whole step. With `every_part`, the ranks also pass each
    micro-batch alone, to compare the sum of these gradients with the gradient of the update. `rewards` has the reward
    of each drawn row after the filters, 0 for a reward that failed; it is empty if the rewards are not known.
    """

    counts: tuple[Counts, ...]
    advantages: tuple[float, ...] | None = None
    advantages_by: str = FORMULA
    largest_advantage: float = 1.0
    every_part: bool = False
    rewards: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check, which may have many. `ratio` is a difference divided by the accepted one: the check has
    failed if it is above 1 or NaN. `words` say where the difference is. `kind` says with what a number was compared (a
    formula, or the user's own function), or why it was not compared."""

    check: str
    ratio: float
    words: str = ""
    kind: str = FORMULA

    @property
    def failed(self) -> bool:
        return not self.ratio <= 1.0

    @property
    def message(self) -> str:
        """Says what a check that failed has found, and what that means."""
        size = f"this is {self.ratio:.3g} times what is accepted" if math.isfinite(self.ratio) else "none is accepted"
        cause = "It is a bug of asyncrl or of a library: report it with the run's directory"
        if self.kind != FORMULA:
            key = "algorithm.advantage" if self.check == "advantages" else "algorithm.loss"
            cause = f"It is a bug of your function, {key}, or of asyncrl (compared by: {self.kind})"
        return (
            f"an update is not the one that the configuration describes. The witness's check `{self.check}` found: "
            f"{self.words}; {size}. {cause}. `witness.on_failure` says whether training goes on"
        )


def worst(findings: Sequence[Finding]) -> dict[str, Finding]:
    """Returns the worst finding of each check, in the order of `CHECKS`."""
    return {
        check: max(own, key=lambda finding: (finding.ratio != finding.ratio, finding.ratio))
        for check in CHECKS
        if (own := [finding for finding in findings if finding.check == check])
    }


def coefficients(
    axes: Axes,
    samples: Mapping[int, Sample],
    counts: Counts,
    found: Mapping[int, Sequence[float]],
    *,
    scale: float,
    of: str,
) -> list[Finding]:
    """Compares the derivatives of the loss that the ranks used (`found`) with those of the objective's formula, for
    each trained token. `of` is a field of `Derivatives`: it says by what the loss is derived. The keys of `samples` and
    `found` are indices within the drawn group. `scale` is the largest derivative of the whole group."""
    findings = []
    for number, values in found.items():
        both = [derivatives(axes, samples[number], counts, apart_nats=by) for by in (0, ROUNDING_NATS, -ROUNDING_NATS)]
        sides = [getattr(side, of) for side in both]
        for t, (value, *expected) in enumerate(zip(values, *sides, strict=True)):
            outside = max(min(expected) - value, value - max(expected), 0.0) if value == value else math.nan
            words = (
                f"the ranks' backward pass gave trained token {t} of sample {number} the coefficient {value:.6g}, and "
                f"the objective's formula gives {expected[0]:.6g}"
            )
            findings.append(Finding(check="coefficients", ratio=outside / (EQUAL * scale), words=words))
    return findings


def counts_finding(expected: Counts, *, tokens: float, sequences: float) -> Finding:
    """Compares the counts by which an update divides its loss with those of the step's groups (`expected`). The masks
    of a run are 0 or 1, so a difference of half a token or sample is accepted."""
    apart = max(abs(tokens - expected.tokens), abs(sequences - expected.sequences))
    words = (
        f"the ranks train {tokens:.10g} tokens of {sequences:.10g} samples in an update, but the groups of the step "
        f"have {expected.tokens:.10g} tokens of {expected.sequences:.10g} samples that are not masked"
    )
    return Finding(check="counts", ratio=2 * apart, words=words)


def advantage_findings(request: Request, samples: Mapping[int, Sample]) -> list[Finding]:
    """Compares the advantages of the drawn rows with those of the request. Returns none if the request has none."""
    if request.advantages is None:
        return []
    giver = "its rewards give" if request.advantages_by == FORMULA else "the estimator gives for reordered groups"
    findings = []
    for number, sample in samples.items():
        expected = request.advantages[number]
        for value in sample.advantages:
            words = f"the ranks trained sample {number} with the advantage {value:.6g}, and {giver} {expected:.6g}"
            ratio = abs(value - expected) / (EQUAL * (request.largest_advantage or 1.0))
            findings.append(Finding(check="advantages", ratio=ratio, words=words, kind=request.advantages_by))
    return findings


def bounds_finding(configured: Axes, used: Axes, tokens: Tokens) -> Finding:
    """Judges the bounds of an objective that depend on all tokens of a step. `configured` are its settings
    (axes) in the configuration, and `used` the same settings with the bounds with which the step was trained."""
    problem = unlike_bounds(configured, used, tokens)
    return Finding(check="bounds", ratio=math.inf if problem else 0.0, words=problem)


def steps_finding(found: int, *, expected: int) -> Finding:
    """Compares the number of steps that the optimizer's moments have counted with the number of steps that the ranks
    have made."""
    words = f"the optimizer's moments are those of {found} steps, and it has made {expected}"
    return Finding(check="optimizer", ratio=0.0 if found == expected else math.inf, words=words)
