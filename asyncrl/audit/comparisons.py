"""The comparisons of check 6 of the audit: what each compares, its limit, and its worst number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

EQUAL_GRADIENTS = 1e-3
"""Largest accepted difference of the gradient's norm, as a share of the recorded norm."""
EQUAL_RATES = 1e-6
"""Largest accepted difference of a learning rate, or of a penalty's β, as a share of it."""
EQUAL_CHANGES = 0.02
"""Largest accepted difference of a tensor's change in a step, as a share of the norm of this change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of one comparison of check 6, of all steps together that it looked at. `check` is its name, and
    `compares` says in words what is compared. `things` names the compared values, and `number` is their count. `worst`
    is the largest difference and `limit` the largest accepted one, both in `unit`. `where` says in words where the
    largest difference is. `nothing` is the reason to show if there was nothing to compare."""

    check: str
    compares: str
    things: str
    unit: str
    limit: float
    nothing: str = ""
    number: int = 0
    worst: float = 0.0
    where: str = ""

    @property
    def failed(self) -> bool:
        return not self.worst <= self.limit

    def plus(self, number: int, worst: float, where: str) -> "Comparison":
        """Returns the result with `number` more compared things. `worst` is their largest difference, and `where` its
        place. NaN counts as larger than any number."""
        more = replace(self, number=self.number + number)
        is_worse = not self.number or math.isnan(worst) or worst > self.worst
        return replace(more, worst=worst, where=where) if is_worse and not math.isnan(self.worst) else more

    def __str__(self) -> str:
        if not self.worst:
            return f"{self.number:,} {self.things} agree"
        return f"{self.number:,} {self.things} differ by at most {self.worst:.2g} {self.unit} (limit {self.limit:.2g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainComputation:
    """The result of check 6: `steps` were computed again by a plain path, and the new weights of `optimizer_steps` too.
    `trained_steps` is the number of steps of the run. `left_out` says what was not computed, with the reason."""

    steps: tuple[int, ...]
    optimizer_steps: tuple[int, ...]
    trained_steps: int
    comparisons: tuple[Comparison, ...]
    left_out: tuple[str, ...]

    @property
    def failure(self) -> str | None:
        """Says what the first failed comparison found; None if none has failed."""
        for found in self.comparisons:
            if found.failed:
                return (
                    f"{found.check}: {found.where}; this differs by {found.worst:.3g} {found.unit}, and "
                    f"{found.limit:.3g} is accepted"
                )
        return None

    def __str__(self) -> str:
        found = "; ".join(f"{each.check}: {each}" for each in self.comparisons if each.number)
        left_out = f"; not witnessed: {'; '.join(self.left_out)}" if self.left_out else ""
        optimizer = f", the optimizer in {_listed(self.optimizer_steps)}" if self.optimizer_steps else ""
        return (
            f"{len(self.steps)} of {self.trained_steps} steps ({_listed(self.steps)}{optimizer}) were computed by a "
            f"plain path; {found}{left_out}"
        )


def _listed(numbers: Sequence[int]) -> str:
    """Returns numbers as text, those that follow each other as a range.

    >>> _listed((0, 1, 2, 12, 23))
    '0-2, 12, 23'
    """
    starts = [n for place, n in enumerate(numbers) if not place or numbers[place - 1] != n - 1]
    ends = [n for place, n in enumerate(numbers) if n + 1 not in numbers[place + 1 :]]
    return ", ".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def comparisons(*, tolerance_nats: float, equal_advantages: float, most_groups: int) -> list[Comparison]:
    """Returns the comparisons of check 6 before any number was compared, in the order in which a reader should look at
    them.

    `tolerance_nats` is the largest accepted difference of two log-probs, and `equal_advantages` that of two advantages,
    as a share of the largest one. The samples of at most `most_groups` groups are scored again.
    """
    return [*_of_samples(tolerance_nats, most_groups=most_groups), *_of_updates(equal_advantages)]


def _of_samples(tolerance_nats: float, *, most_groups: int) -> list[Comparison]:
    return [
        Comparison(
            check="counts",
            compares="numbers of samples and of tokens that the step trained, by its record and the kept masks, with "
            "those that its filters keep",
            things="tokens",
            unit="samples or tokens",
            limit=0.0,
        ),
        Comparison(
            check="rewards",
            compares="recorded rewards of all steps, with those of the samples' texts, scored again by the reward that "
            f"the configuration names; for groups whose texts the run kept in samples/, at most {most_groups} groups",
            things="rewards",
            unit="(the difference of two rewards)",
            limit=1e-6,
            nothing="see `not_computed`",
        ),
        Comparison(
            check="rows",
            compares="log-probs at the start of the step, as the run kept them, with those of each row alone by the "
            "plain pass under the kept weights",
            things="log-probs",
            unit="nats",
            limit=tolerance_nats,
            nothing="the objective does not read them, so the run did not compute them",
        ),
        Comparison(
            check="sampling",
            compares="sampling log-probs of the step's newest tokens, which the weights before the step have sampled, "
            "with those of the plain pass under the kept weights; check 5 compares tokens of older weights",
            things="sampling log-probs",
            unit="nats",
            limit=tolerance_nats,
            nothing="all tokens of these steps are of older weights",
        ),
        Comparison(
            check="kl",
            compares="recorded KL by which the β of a penalty is set, with the KL of the log-probs by the plain pass; "
            "the shown difference is one of the tokens' log-probs, as large as would change the KL by so much",
            things="means of a KL",
            unit="nats",
            limit=tolerance_nats,
            nothing="no penalty of the objective has `control`",
        ),
    ]


def _of_updates(equal_advantages: float) -> list[Comparison]:
    return [
        Comparison(
            check="advantages",
            compares="advantages in the kept batch, with those that follow from the recorded rewards",
            things="advantages of tokens",
            unit="of the largest advantage",
            limit=equal_advantages,
        ),
        Comparison(
            check="rate",
            compares="learning rate of each trained step of the run in steps.jsonl, with that of the schedule in the "
            "configuration",
            things="learning rates",
            unit="of the rate",
            limit=EQUAL_RATES,
            nothing="steps.jsonl has no line of a trained step",
        ),
        Comparison(
            check="penalty",
            compares="β of the penalty with `control` in each trained step of the run in steps.jsonl, with the β that "
            "follows from the recorded KL of the steps before",
            things="coefficients of a penalty",
            unit="of the coefficient",
            limit=EQUAL_RATES,
            nothing="no penalty of the objective has `control`",
        ),
        Comparison(
            check="gradient",
            compares="norm of the gradient of the loss of all samples before it is clipped, as recorded, with that of "
            "the plain pass and the objective's formula; the mean of the norms of a step's updates",
            things="norms of gradients",
            unit="of the gradient's norm",
            limit=EQUAL_GRADIENTS,
        ),
        Comparison(
            check="optimizer",
            compares="change of each weight tensor between kept versions, with its change by AdamW's formula (or by "
            "the optimizer of learner.optimizer.name, called with whole tensors) and the plain gradients, beginning "
            "without state at the run's first step; what the rounding of float32 explains is subtracted from a "
            "difference",
            things="changes of weights",
            unit="of the norm of the tensor's change",
            limit=EQUAL_CHANGES,
        ),
    ]
