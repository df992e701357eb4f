"""Shows failed rollouts, rewards and tools on the learner's terminal and in its log during the run.

The first failure of each class and reason is shown in full. After that, one line with counts follows every
`COUNTS_EVERY_S` seconds if there were more failures since the last line. The call to the coordinator returns when there
are new failures, or after `WAIT_S` seconds. A run without failures therefore makes one call every `WAIT_S` seconds.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncrl.buffer.failure_records import FailureCount
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.failures import FailureReports
from asyncrl.errors import RunError
from asyncrl.learner.failures import first_failure, in_words

logger = logging.getLogger(__name__)

WAIT_S = 10.0
COUNTS_EVERY_S = 10.0
PAUSE_S = 0.5
"""Seconds between two calls, so that many failures in a row do not become as many calls."""


@dataclass(kw_only=True)
class FailureWatch:
    """Polls the coordinator for failures and logs them.

    `run` polls until it is cancelled. `finish` then logs the failures that were not shown yet. `keep` is called with
    all counts each time something was logged.
    """

    coordinator: CoordinatorClient
    keep: Callable[[Sequence[FailureCount]], None]
    clock: Callable[[], float] = time.monotonic
    counts: tuple[FailureCount, ...] = field(default=(), init=False)
    _seen: set[str] = field(default_factory=set, init=False)
    _shown_failures: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._shown_s = self.clock()

    @property
    def failures(self) -> int:
        """The number of failures at the last answer of the coordinator."""
        return sum(count.failures for count in self.counts)

    async def run(self) -> None:
        """Shows failures until it is cancelled. When the coordinator does not answer, it tries again after `WAIT_S`
        seconds."""
        while True:
            try:
                counts = await self.coordinator.call(FailureReports.more_than, self.failures, wait_s=WAIT_S)
            except (RunError, TimeoutError) as error:
                logger.warning("failures cannot be shown until the buffer answers again: %s", error)
                await asyncio.sleep(WAIT_S)
                continue
            self.show(counts)
            await asyncio.sleep(PAUSE_S)

    async def finish(self) -> None:
        """Reads the counts a last time and shows all failures that were not shown yet."""
        counts = await self.coordinator.call(FailureReports.more_than, -1, wait_s=0.0)
        self.show(counts, at_once=True)

    def show(self, counts: Sequence[FailureCount], *, at_once: bool = False) -> None:
        """Shows the new failures of `counts`.

        The line with counts is shown at most every `COUNTS_EVERY_S` seconds, unless `at_once` is set.
        """
        self.counts = tuple(counts)
        new = [count for count in counts if count.first.label not in self._seen]
        for count in new:
            self._seen.add(count.first.label)
            logger.warning("%s", first_failure(count))
        if new and self.failures == self._shown_failures + len(new):
            # Each new failure is the only one of its kind and was just shown in full: a line of counts adds nothing.
            self._shown_failures = self.failures
            self._shown_s = self.clock()
        due = at_once or self.clock() - self._shown_s >= COUNTS_EVERY_S
        more = self.failures > self._shown_failures
        if due and more:
            self._shown_failures, self._shown_s = self.failures, self.clock()
            logger.warning("failures so far: %s", in_words(counts))
        if new or (due and more):
            self.keep(self.counts)
