"""Remembers the answers to calls, so that a repeated call is not performed a second time.

A client repeats a call whose answer is late, and the first one may have been performed. Most calls may be performed
twice: they read, or they name what they change. Those of `ONCE` may not: their answer, or what they count, would be
another one.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

MOST = 100_000
"""Largest number of answers that are remembered."""
ONCE = frozenset(
    {
        "Coordinator.commit",
        "Coordinator.fail",
        "Coordinator.leave",
        "Coordinator.quarantine",
        "Coordinator.restarting",
        "LearnerCalls.ack",
        "LearnerCalls.skip",
        "LearnerCalls.give_back",
        "LearnerCalls.rows_lost",
        "LearnerCalls.release",
        "LearnerCalls.clear_dropped",
        "Registry.detach",
        "FailureReports.heldout_failed",
        "FailureReports.samples_failed",
    }
)
"""The calls that are performed once, by class and method."""


class _Answer(NamedTuple):
    value: Any
    forget_at_s: float


class Answers:
    """The answers to the last calls that have an id. `kept_s` is for how long an answer is remembered, seconds: longer
    than the time until a call is repeated."""

    def __init__(self, *, kept_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept_s = kept_s
        self._clock = clock
        self._known: OrderedDict[str, _Answer] = OrderedDict()

    async def to(self, call_id: str, perform: Callable[[], Awaitable[Any]]) -> Any:
        """Returns the answer to the call of this id. Performs the call unless its answer is known. "" has no id."""
        if not call_id:
            return await perform()
        self._forget()
        if (known := self._known.get(call_id)) is not None:
            return known.value
        value = await perform()
        self._known[call_id] = _Answer(value, self._clock() + self._kept_s)
        return value

    def _forget(self) -> None:
        now_s = self._clock()
        while self._known and (len(self._known) >= MOST or next(iter(self._known.values())).forget_at_s <= now_s):
            self._known.popitem(last=False)
