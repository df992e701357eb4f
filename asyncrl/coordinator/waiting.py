"""Calls that wait for a change of the run's state, with deadlines. The seconds of waiting are counted by role."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from asyncrl.common.roles import Role
from asyncrl.metrics.states import StateClock

Answer = TypeVar("Answer")

_WAITS = {
    (False, False): "nobody_waits",
    (True, False): "learner_waits",
    (False, True): "generators_wait",
    (True, True): "both_wait",
}
"""Maps (whether the learner waits, whether any generator waits) to the state in the metrics."""


class Waiting:
    """Wakes waiting calls when something has changed. `states` counts the seconds in which calls of each role wait."""

    def __init__(self, *, states: StateClock, clock: Callable[[], float]) -> None:
        self._states = states
        self._clock = clock
        self._changed = asyncio.Condition()
        self._waiting: Counter[Role] = Counter()

    async def changed(self) -> None:
        """Wakes all waiting calls, because an answer may have changed."""
        async with self._changed:
            self._changed.notify_all()

    async def answer(
        self, ask: Callable[[], Answer], *, final: Callable[[Answer], bool], wait_s: float, role: Role | None = None
    ) -> Answer:
        """Calls `ask` again after each change, until its answer is final or `wait_s` seconds have passed.

        Returns the last answer. There is no `await` between that call of `ask` and the return, so a cancelled wait
        never loses an answer. A wait counts in the metrics as a wait of `role`, if there is one.
        """
        started_s = self._clock()
        async with self._changed:
            while True:
                answer = ask()
                left_s = wait_s - (self._clock() - started_s)
                if final(answer) or left_s <= 0:
                    return answer
                self._count(role, 1)
                try:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(left_s):
                            await self._changed.wait()
                finally:
                    self._count(role, -1)

    def _count(self, role: Role | None, change: int) -> None:
        if role is not None:
            self._waiting[role] += change
            self._states.enter(_WAITS[self._waiting[Role.LEARNER] > 0, self._waiting[Role.GENERATOR] > 0])
