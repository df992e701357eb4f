"""Shows failed rollouts on the learner's terminal and in its log while the run goes on.

The first failure of each class and reason is shown in full, and after that one line of counts every
`COUNTS_EVERY_S` seconds, when there are more failures than the last line said. The buffer answers when there is
news, so that a run without failures costs one call every `WAIT_S` seconds.
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
"""Seconds between two calls while rollouts fail one after the other."""


class Buffer(Protocol):
    """The calls of `BufferClient` that are used here."""

    async def call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any: ...


class FailureWatch:
    """`run` shows failures until it is cancelled; `finish` shows what came last. `keep` gets the counts whenever
    something was shown."""

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
        """Failed rollouts, as far as they are known."""
        return sum(count.rollouts for count in self.counts)

    async def run(self) -> None:
        while True:
            try:
                counts = await self._buffer.call("failures", self.rollouts, WAIT_S, wait_s=WAIT_S)
            except (RunError, TimeoutError) as error:
                logger.warning("failed rollouts are not shown now, because the buffer does not answer: %s", error)
                await asyncio.sleep(WAIT_S)
                continue
            self.show(counts)
            await asyncio.sleep(PAUSE_S)

    async def finish(self) -> None:
        """Asks once more and shows all that was not shown yet."""
        self.show(await self._buffer.call("failures", -1, 0.0), at_once=True)

    def show(self, counts: Sequence[FailureCount], *, at_once: bool = False) -> None:
        """Shows what is new in `counts`; the line of counts only when its time has come, or `at_once`."""
        self.counts = tuple(counts)
        new = [count for count in counts if count.first.label not in self._seen]
        for count in new:
            self._seen.add(count.first.label)
            logger.warning("%s", first_failure(count))
        if new and self.rollouts == self._shown_rollouts + len(new):
            self._shown_rollouts = self.rollouts  # all of them have just been shown in full
            self._shown_s = self._clock()
        due = at_once or self._clock() - self._shown_s >= COUNTS_EVERY_S
        more = self.rollouts > self._shown_rollouts
        if due and more:
            self._shown_rollouts, self._shown_s = self.rollouts, self._clock()
            logger.warning("rollouts that failed so far: %s", in_words(counts))
        if new or (due and more):
            self._keep(self.counts)


def first_failure(count: FailureCount) -> str:
    """The first failure of a class and reason, in full."""
    failure = count.first
    lines = [f"first failure of {failure.reason}: {failure.message}"]
    lines += [f"  prompt: {failure.prompt!r}"] if failure.prompt else []
    lines += [f"  completion: {failure.completion!r}"] if failure.completion else []
    return "\n".join(lines)


def in_words(counts: Sequence[FailureCount]) -> str:
    """Failed rollouts by reason, the most frequent reason first, such as `reward_raised 20, reward_timeout 3`."""
    rollouts: Counter[str] = Counter()
    for count in counts:
        rollouts[count.first.reason] += count.rollouts
    return ", ".join(f"{reason} {number}" for reason, number in rollouts.most_common())


def groups_by_reason(counts: Sequence[FailureCount]) -> dict[str, int]:
    """Groups that failed for good, by reason, the most frequent reason first."""
    groups: Counter[str] = Counter()
    for count in counts:
        groups[count.first.reason] += count.groups
    return {reason: number for reason, number in groups.most_common() if number}
