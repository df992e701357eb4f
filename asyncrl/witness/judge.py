"""What the witness asks for, what it compares, and what it finds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.witness.bounds import Tokens, unlike_bounds
from asyncrl.witness.objective import Axes, Counts, Sample, derivatives

CHECKS = ("counts", "rows", "advantages", "bounds", "coefficients", "gradient", "optimizer", "frozen")
"""The checks in the order in which a reader should look at them: a later one reads what an earlier one checks."""
EQUAL = 1e-5
"""Largest accepted difference of coefficients and advantages, as a share of the largest one."""
ROUNDING_NATS = 1e-6
"""Rounding of log-probs in float32: a token so near to the edge of a clip or a gate may be on either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientLimits:
    """What is accepted between the gradients of a group by two passes, as shares of a norm: `of_tensor` for each
    tensor, `of_all` for all together. A tensor with less than the share `least` of the whole norm is measured against
    that share."""

    of_tensor: float
    of_all: float
    least: float


GRADIENT_FLOAT32 = GradientLimits(of_tensor=1e-3, of_all=1e-3, least=0.01)
GRADIENT_BFLOAT16 = GradientLimits(of_tensor=0.3, of_all=0.2, least=0.1)
"""Measured with SmolLM2-135M in bfloat16: at most 0.08 for the whole gradient, and 0.32 of the norm of single tensors,
which had 2 % of the whole norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the driver knows of the rows that are witnessed in a step.

    `counts` are those of each update, by the lease. `advantages` are those of the drawn rows by their numbers, from the
    rewards by plain formulas; None if the ranks compute an advantage for each token. `largest_advantage` is that of the
    whole step. With `every_part`, each micro-batch is also passed alone, as in the first step after a start.
    """

    counts: tuple[Counts, ...]
    advantages: tuple[float, ...] | None = None
    largest_advantage: float = 1.0
    every_part: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check: the largest difference as a share of what is accepted, and where it is, in words."""

    check: str
    ratio: float
    words: str = ""

    @property
    def failed(self) -> bool:
        return not self.ratio <= 1.0

    @property
    def message(self) -> str:
        """Says what a check that failed has found, and what that means."""
        return (
            f"an update is not the one that the configuration describes. The witness's check `{self.check}` found: "
            f"{self.words}; this is {self.ratio:.3g} times what is accepted. It is a bug of asyncrl or of a library: "
            "report it with the run's directory. `witness.on_failure` says whether training goes on"
        )


def worst(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Returns the worst finding of each check, in the order of `CHECKS`."""
    found = [*findings]
    return {
        check: max(own, key=lambda finding: (finding.ratio != finding.ratio, finding.ratio))
        for check in CHECKS
        if (own := [finding for finding in found if finding.check == check])
    }


def coefficients(
    axes: Axes,
    samples: Mapping[int, Sample],
    counts: Counts,
    found: Mapping[int, Sequence[float]],
    *,
    scale: float,
    of_entropies: bool = False,
) -> list[Finding]:
    """Compares the derivatives of the loss by the log-probs of each sample, or by their entropies, with those that the
    ranks used. Samples are known by their numbers in the drawn group. `scale` is the largest derivative of the whole
    group."""
    findings = []
    for number in found:
        sample = samples[number]
        both = [derivatives(axes, sample, counts, apart_nats=apart) for apart in (0, ROUNDING_NATS, -ROUNDING_NATS)]
        sides = [side.entropies if of_entropies else side.logprobs for side in both]
        for t, value in enumerate(found[number]):
            expected = [side[t] for side in sides]
            outside = max(min(expected) - value, value - max(expected), 0.0) if value == value else float("nan")
            findings.append(
                Finding(
                    check="coefficients",
                    ratio=outside / (EQUAL * scale) if outside else 0.0,
                    words=(
                        f"the ranks' backward pass gave trained token {t} of sample {number} the coefficient "
                        f"{value:.6g}, and the objective's formula gives {expected[0]:.6g}"
                    ),
                )
            )
    return findings


def counts_finding(expected: Counts, *, tokens: float, sequences: float) -> Finding:
    """Compares the counts by which an update divides its loss with those of the lease."""
    apart = max(abs(tokens - expected.tokens), abs(sequences - expected.sequences))
    return Finding(
        check="counts",
        ratio=apart / (EQUAL * max(expected.tokens, 1.0)),
        words=(
            f"the ranks train {tokens:g} tokens of {sequences:g} samples in an update, and the lease and its masks "
            f"leave {expected.tokens:g} tokens of {expected.sequences:g} samples"
        ),
    )


def advantage_findings(expected: Sequence[float], samples: Mapping[int, Sample], *, scale: float) -> list[Finding]:
    """Compares the advantages of the drawn rows with those that follow from the rewards. `scale` is the largest one of
    the step."""
    return [
        Finding(
            check="advantages",
            ratio=abs(value - expected[number]) / (EQUAL * scale),
            words=(
                f"the ranks trained sample {number} with the advantage {value:.6g}, and its rewards give "
                f"{expected[number]:.6g}"
            ),
        )
        for number, sample in samples.items()
        for value in sample.advantages
    ]


def bounds_finding(configured: Axes, used: Axes, tokens: Tokens) -> Finding:
    """Judges the bounds of an objective that depend on all tokens of a step."""
    problem = unlike_bounds(configured, used, tokens)
    return Finding(check="bounds", ratio=float("inf") if problem else 0.0, words=problem)


def steps_finding(found: int, *, expected: int) -> Finding:
    """Compares the number of steps that the optimizer's moments have seen with the number that it has made."""
    return Finding(
        check="optimizer",
        ratio=0.0 if found == expected else float("inf"),
        words=f"the optimizer's moments are those of {found} steps, and it has made {expected}",
    )
