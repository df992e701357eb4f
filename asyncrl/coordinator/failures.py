"""Failures, as other processes report and read them. Failures of groups arrive with `Coordinator.fail`."""

from collections.abc import Sequence

from asyncrl.buffer.failure_records import Failure, FailureCount
from asyncrl.buffer.failures import FailureLog
from asyncrl.coordinator.waiting import Waiting


class FailureReports:
    """Access to the buffer's log of failures."""

    def __init__(self, log: FailureLog, *, waiting: Waiting) -> None:
        self._log = log
        self._waiting = waiting

    def heldout_failed(self, failure: Failure) -> None:
        """Reports a failed rollout of a held-out evaluation."""
        self._log.heldout_failed(failure)
        self._waiting.failures.ring()

    async def samples_failed(self, counts: Sequence[FailureCount]) -> None:
        """Reports completions whose reward failed in groups that were committed."""
        for count in counts:
            self._log.samples_failed(count.first, samples=count.samples)
        self._waiting.failures.ring()

    async def more_than(self, known_failures: int, *, wait_s: float) -> tuple[FailureCount, ...]:
        """Returns the counts of failures.

        Waits until there are more than `known_failures`, but at most `wait_s` seconds.
        """
        return await self._waiting.answer(
            self._log.counts,
            final=lambda _: self._log.total > known_failures,
            enter=self._waiting.failures.enter,
            wait_s=wait_s,
        )
