"""Counts failed rollouts and rewards, keeps the first failure of each kind, and detects when too many groups failed in
a row.

Memory is bounded, because the set of reasons is bounded and texts are cut (`Failure`). Agents name tools and the types
of their errors. From `MAX_KINDS` kinds on, a new one counts under its reason only. This module is pure.
"""

import msgspec

from asyncrl.buffer.failure_records import Failure, FailureCount, FailureStreak
from asyncrl.errors import FailureClass

MAX_KINDS = 200
"""The number of kinds of failures from which on new tools and types of errors are not told apart."""


class FailureState(msgspec.Struct, frozen=True, kw_only=True):
    """The failures of a run: a count for each class and reason, and the present streak."""

    counts: tuple[FailureCount, ...]
    streak: FailureStreak | None


class FailureLog:
    """The failures of a run. `max_streak` is `generator.max_data_failures`."""

    def __init__(self, *, max_streak: int) -> None:
        self._max_streak = max_streak
        self._counts: dict[str, FailureCount] = {}
        self.streak: FailureStreak | None = None

    @property
    def total(self) -> int:
        """The number of failures: rollouts, single completions, and calls of tools."""
        return sum(count.failures for count in self._counts.values())

    @property
    def too_many(self) -> bool:
        """Whether `max_streak` groups failed in a row. Once it is True, it stays True.

        Groups that are in flight at that moment may still be committed or fail. They change neither this nor the
        streak.
        """
        return self.streak is not None and self.streak.groups >= self._max_streak

    def failed(self, failure: Failure, *, ended_group: bool) -> None:
        """Counts a failed rollout. `ended_group` is False if the prompt of the group is tried again."""
        self.count(failure, rollouts=1, groups=int(ended_group))
        if failure.failure_class is FailureClass.DATA and not self.too_many:
            streak = self.streak
            self.streak = FailureStreak(
                groups=(streak.groups if streak else 0) + 1, first=streak.first if streak else failure, last=failure
            )

    def count(
        self, failure: Failure, *, rollouts: int = 0, groups: int = 0, samples: int = 0, tool_calls: int = 0
    ) -> None:
        """Counts failures that do not change the streak: rollouts of a held-out evaluation, which belong to no group,
        and completions whose reward failed, and failed calls of tools, in groups that were committed."""
        if failure.label not in self._counts and len(self._counts) >= MAX_KINDS:
            failure = msgspec.structs.replace(failure, tool="", error="")
        known = self._counts.get(failure.label, FailureCount(first=failure))
        self._counts[failure.label] = FailureCount(
            rollouts=known.rollouts + rollouts,
            groups=known.groups + groups,
            samples=known.samples + samples,
            tool_calls=known.tool_calls + tool_calls,
            first=known.first,
        )

    def succeeded(self) -> None:
        """Ends the streak, because a group was committed."""
        if not self.too_many:
            self.streak = None

    def state(self) -> FailureState:
        """Returns the failures, for a snapshot."""
        return FailureState(counts=self.counts(), streak=self.streak)

    def restore(self, state: FailureState) -> None:
        """Continues from the failures of a snapshot. A streak that had ended the run is forgotten: a resumed run gets
        another chance."""
        self._counts = {count.first.label: count for count in state.counts}
        self.streak = state.streak
        if self.too_many:
            self.streak = None

    def counts(self) -> tuple[FailureCount, ...]:
        """Returns one count for each class and reason, in the order of the first failures."""
        return tuple(self._counts.values())
