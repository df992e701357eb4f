"""The comparisons of check 6 of the audit, each with its worst number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a check over all steps: what it compares, how many `things` it compared, and the worst number with
    its limit, in `unit`, and where that was. `nothing` says in which runs there is nothing to compare."""

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
        """Returns the result with `number` more things, the worst of which is `where`. NaN is the worst number."""
        more = replace(self, number=self.number + number)
        is_worse = not self.number or math.isnan(worst) or worst > self.worst
        return replace(more, worst=worst, where=where) if is_worse and not math.isnan(self.worst) else more

    def __str__(self) -> str:
        if not self.worst:
            return f"{self.number:,} {self.things} agree"
        return f"{self.number:,} {self.things} differ by at most {self.worst:.2g} {self.unit} (limit {self.limit:.2g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainComputation:
    """The work of check 6: `steps` were computed again, of `optimizer_steps` the new weights too. `left_out` has what
    was not computed, with the reason."""

    steps: tuple[int, ...]
    optimizer_steps: tuple[int, ...]
    trained_steps: int
    comparisons: tuple[Comparison, ...]
    left_out: tuple[str, ...]

    @property
    def failure(self) -> str | None:
        """The words of the first check that failed; None if all have passed."""
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
    """Returns numbers in words: ranges, and single ones.

    >>> _listed((0, 1, 2, 12, 23))
    '0-2, 12, 23'
    """
    starts = [n for place, n in enumerate(numbers) if not place or numbers[place - 1] != n - 1]
    ends = [n for place, n in enumerate(numbers) if n + 1 not in numbers[place + 1 :]]
    return ", ".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
