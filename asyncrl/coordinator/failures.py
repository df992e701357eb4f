"""Failures, as other processes report and read them. Failures of groups arrive with `Coordinator.fail`."""

from collections.abc import Sequence

from asyncrl.buffer.failure_records import Failure, FailureCount
from asyncrl.coordinator.parts import CoordinatorParts


class FailureReports:
    """Access to the buffer's log of failures."""

    def __init__(self, parts: CoordinatorParts) -> None:
        self._parts = parts

    def heldout_failed(self, failure: Failure) -> None:
        """Reports a failed rollout of a held-out evaluation."""
        self._parts.buffer.failures.count(failure, rollouts=1)
        self._parts.waiting.failures.ring()

    async def samples_failed(self, counts: Sequence[FailureCount]) -> None:
        """Reports completions whose reward failed, and calls of tools that failed, in groups that were committed."""
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
