"""Failures, as other processes report and read them. Failures of groups arrive with `Coordinator.fail`."""

from collections.abc import Sequence

from asyncrl.buffer.failure_records import Failure, FailureCount
from asyncrl.coordinator.parts import CoordinatorParts

MOST_REPORTS = 10_000
"""Number of reports that are remembered. A repeated report comes within minutes of the first one."""


class FailureReports:
    """Access to the buffer's log of failures. Each report has a unique name, and counts once, also if it is repeated
    because its answer was lost."""

    def __init__(self, parts: CoordinatorParts) -> None:
        self._parts = parts
        self._reports: dict[str, None] = {}  # the oldest first

    def heldout_failed(self, report: str, failure: Failure) -> None:
        """Reports a failed rollout of a held-out evaluation. `report` is the name of the report."""
        if self._is_new(report):
            self._parts.buffer.failures.count(failure, rollouts=1)
            self._parts.waiting.failures.ring()

    async def samples_failed(self, report: str, counts: Sequence[FailureCount]) -> None:
        """Reports completions whose reward failed, and calls of tools that failed, in groups that were committed.
        `report` is the name of the report."""
        if self._is_new(report):
            for count in counts:
                self._parts.buffer.failures.count(count.first, samples=count.samples, tool_calls=count.tool_calls)
            self._parts.waiting.failures.ring()

    async def more_than(self, known_failures: int, *, wait_s: float) -> tuple[FailureCount, ...]:
        """Returns the counts of failures.

        Waits until there are more than `known_failures`, but at most `wait_s` seconds.
        """
        log = self._parts.buffer.failures
        return await self._parts.waiting.answer(
            log.counts,
            final=lambda _: log.total > known_failures,
            enter=self._parts.waiting.failures.enter,
            wait_s=wait_s,
        )

    def _is_new(self, report: str) -> bool:
        if report in self._reports:
            return False
        self._reports[report] = None
        if len(self._reports) > MOST_REPORTS:
            del self._reports[next(iter(self._reports))]
        return True
