"""Shows failed rollouts on the learner's terminal and in its log during the run.

The first failure of each class and reason is shown in full. After that, one line with counts follows every
`COUNTS_EVERY_S` seconds if there were more failures since the last line. The call to the buffer returns when there are
new failures, or after `WAIT_S` seconds. A run without failures therefore makes one call every `WAIT_S` seconds.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncrl.buffer.records import FailureCount
from asyncrl.errors import RunError

logger = logging.getLogger(__name__)

WAIT_S = 10.0
COUNTS_EVERY_S = 10.0
PAUSE_S = 0.5
"""Seconds between two calls, so that many failures in a row do not become as many calls."""


class Buffer(Protocol):
    """The part of `BufferClient` that this module uses."""

    async def call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any: ...


class FailureWatch:
    """Polls the buffer for failed rollouts and logs them.

    `run` polls until it is cancelled. `finish` then logs the failures that were not shown yet. `keep` is called with
    all counts each time something was logged.
    """

    def __init__(
        self,
        *,
        buffer: Buffer,
        keep: Callable[[Sequence[FailureCount]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._keep = keep
        self._clock = clock
        self._seen: set[str] = set()
        self._shown_rollouts = 0
        self._shown_s = clock()
        self.counts: tuple[FailureCount, ...] = ()

    @property
    def rollouts(self) -> int:
        """The number of failed rollouts at the last answer of the buffer."""
        return sum(count.rollouts for count in self.counts)

    async def run(self) -> None:
        """Shows failures until it is cancelled. When the buffer does not answer, it tries again after `WAIT_S`
        seconds."""
        while True:
            try:
                counts = await self._buffer.call("failures", self.rollouts, WAIT_S, wait_s=WAIT_S)
            except (RunError, TimeoutError) as error:
                logger.warning("failed rollouts cannot be shown until the buffer answers again: %s", error)
                await asyncio.sleep(WAIT_S)
                continue
            self.show(counts)
            await asyncio.sleep(PAUSE_S)

    async def finish(self) -> None:
        """Reads the counts a last time and shows all failures that were not shown yet."""
        self.show(await self._buffer.call("failures", -1, 0.0), at_once=True)

    def show(self, counts: Sequence[FailureCount], *, at_once: bool = False) -> None:
        """Shows the new failures of `counts`.

        The line with counts is shown at most every `COUNTS_EVERY_S` seconds, unless `at_once` is set.
        """
        self.counts = tuple(counts)
        new = [count for count in counts if count.first.label not in self._seen]
        for count in new:
            self._seen.add(count.first.label)
            logger.warning("%s", first_failure(count))
        if new and self.rollouts == self._shown_rollouts + len(new):
            # Each new failure is the only one of its kind and was just shown in full: a line of counts adds nothing.
            self._shown_rollouts = self.rollouts
            self._shown_s = self._clock()
        due = at_once or self._clock() - self._shown_s >= COUNTS_EVERY_S
        more = self.rollouts > self._shown_rollouts
        if due and more:
            self._shown_rollouts, self._shown_s = self.rollouts, self._clock()
            logger.warning("rollouts that failed so far: %s", in_words(counts))
        if new or (due and more):
            self._keep(self.counts)


def first_failure(count: FailureCount) -> str:
    """Returns the message, prompt and completion of the first failure of a class and reason."""
    failure = count.first
    lines = [f"first failure of {failure.reason}: {failure.message}"]
    lines += [f"  prompt: {failure.prompt!r}"] if failure.prompt else []
    lines += [f"  completion: {failure.completion!r}"] if failure.completion else []
    return "\n".join(lines)


def in_words(counts: Sequence[FailureCount]) -> str:
    """Returns the number of failed rollouts by reason, the most frequent first: `reward_raised 20, reward_timeout
    3`."""
    rollouts: Counter[str] = Counter()
    for count in counts:
        rollouts[count.first.reason] += count.rollouts
    return ", ".join(f"{reason} {number}" for reason, number in rollouts.most_common())


def groups_by_reason(counts: Sequence[FailureCount]) -> dict[str, int]:
    """Returns the number of groups by failure reason, the most frequent first. Groups that were retried do not
    count."""
    groups: Counter[str] = Counter()
    for count in counts:
        groups[count.first.reason] += count.groups
    return {reason: number for reason, number in groups.most_common() if number}
