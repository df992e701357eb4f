"""Calls that wait for a change of the run's state, with deadlines. The seconds of waiting are counted by role.

A change wakes only the calls whose answer it may change:

- A call of `reserve` that waits stands in a line (`TicketLine`). A change wakes the first call in line that can get a
  ticket now. After that call has asked again, it wakes the next one that can, so tickets are first come, first served.
  With 1,000 waiting generators and no room, a commit wakes none of them.
- The other calls are few, and all of one kind wake together (`Waiters`): the learner's lease, the watchers of failures,
  and an evaluation that waits for a replica.

A wake-up carries no answer: the woken call asks for its answer itself. So no ticket or lease is lost if the call is
cancelled at this moment. The cancelled call only wakes the next call in line.
"""

import asyncio
import contextlib
import itertools
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import TypeVar

from asyncrl.common.roles import Role
from asyncrl.common.version import Version
from asyncrl.metrics.states import StateClock

Answer = TypeVar("Answer")
_NUMBER = attrgetter("number")

_WAITS = {
    (False, False): "nobody_waits",
    (True, False): "learner_waits",
    (False, True): "generators_wait",
    (True, True): "both_wait",
}
"""Maps (whether the learner waits, whether any generator waits) to the state in the metrics."""


class Waiter:
    """A call that waits. `woken` is set when the call has to ask again."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()

    def wait_on(self) -> None:
        """Prepares the next wait, after the call has asked again and its answer was not final."""
        self.woken.clear()

    def end(self) -> None:
        """Called when the call does not wait any more. A subclass removes the call from its line here."""


class Waiters(Waiter):
    """Calls that all wake at each `wake_all`."""

    def wake_all(self) -> None:
        """Wakes the calls that wait now."""
        self.woken.set()
        self.woken = asyncio.Event()

    def enter(self) -> Waiter:
        """Returns the waiter of a call that begins to wait."""
        return self


class TicketLine:
    """Reserves that wait for a ticket, in the order in which they came.

    `may_get` returns whether a reserve at a version would get a ticket now. An actor that stands in the line at an old
    version may have to wait while others behind it get tickets. So there is one line for each version: after a change,
    one call of `may_get` for each version shows whether any call can get a ticket, however many calls wait. `may_ask`
    returns False for an actor that gets no tickets now because of its own state (`Refusal.UNHEALTHY`). Such actors are
    few, and are passed over.
    """

    def __init__(self, *, may_get: Callable[[Version], bool], may_ask: Callable[[str], bool]) -> None:
        self._may_get = may_get
        self._may_ask = may_ask
        self._lines: dict[Version, list[_WaiterInLine]] = {}
        self._of_actor: dict[str, set[_WaiterInLine]] = {}
        self._numbers = itertools.count()
        self._awake = 0

    def wake(self) -> None:
        """Wakes the first call in line that can get a ticket."""
        self._wake_after(-1)

    def wake_actor(self, actor: str) -> None:
        """Wakes the calls of an actor, because they may get another answer: the actor has loaded another version, sends
        heartbeats again, was quarantined, or has left."""
        for waiter in self._of_actor.get(actor, ()):
            self._wake(waiter)

    def enter(self, actor: str, version: Callable[[], Version]) -> Waiter:
        """Returns the waiter of a call that begins to wait. `version` returns the present version of its actor."""
        waiter = _WaiterInLine(self, actor, version, number=next(self._numbers))
        self._of_actor.setdefault(actor, set()).add(waiter)
        insort(self._lines.setdefault(waiter.version, []), waiter, key=_NUMBER)
        return waiter

    async def earlier_have_asked(self) -> None:
        """Waits until all woken calls have asked, so that a new call takes no ticket for which another one was
        woken."""
        while self._awake:  # noqa: ASYNC110 - the woken calls run in the next turns of the event loop
            await asyncio.sleep(0)

    def wait_on(self, waiter: "_WaiterInLine") -> None:
        """Keeps the waiter of a call that got no ticket, in the line of its actor's present version, and wakes the next
        call."""
        version = waiter.version_now()
        if version != waiter.version:
            self._leave_line(waiter)
            waiter.version = version
            insort(self._lines.setdefault(version, []), waiter, key=_NUMBER)
        self._pass_on(waiter)

    def end(self, waiter: "_WaiterInLine") -> None:
        """Removes the waiter of a call that ends: with a ticket, at its deadline, or because it was cancelled."""
        self._leave_line(waiter)
        waiters = self._of_actor[waiter.actor]
        waiters.discard(waiter)
        if not waiters:
            del self._of_actor[waiter.actor]
        self._pass_on(waiter)

    def _leave_line(self, waiter: "_WaiterInLine") -> None:
        line = self._lines[waiter.version]
        line.remove(waiter)
        if not line:
            del self._lines[waiter.version]

    def _pass_on(self, waiter: "_WaiterInLine") -> None:
        """Wakes the next call behind this one, if this one was woken. The calls before it have asked already, or could
        get no ticket."""
        if waiter.woken.is_set():
            waiter.woken.clear()
            self._awake -= 1
            self._wake_after(waiter.number)

    def _wake_after(self, number: int) -> None:
        """Wakes the first call that came after call number `number` and can get a ticket. If that call is woken
        already, it wakes the next one itself after it has asked."""
        first: _WaiterInLine | None = None
        for version, line in self._lines.items():
            at = bisect_right(line, number, key=_NUMBER)
            if at < len(line) and (first is None or line[at].number < first.number) and self._may_get(version):
                behind = itertools.islice(line, at, None)
                next_one = next((waiter for waiter in behind if self._may_ask(waiter.actor)), None)
                if next_one is not None and (first is None or next_one.number < first.number):
                    first = next_one
        if first is not None:
            self._wake(first)

    def _wake(self, waiter: "_WaiterInLine") -> None:
        if not waiter.woken.is_set():
            waiter.woken.set()
            self._awake += 1


class _WaiterInLine(Waiter):
    def __init__(self, line: TicketLine, actor: str, version_now: Callable[[], Version], *, number: int) -> None:
        super().__init__()
        self._line = line
        self.actor = actor
        self.version_now = version_now
        self.version = version_now()
        self.number = number

    def wait_on(self) -> None:
        self._line.wait_on(self)

    def end(self) -> None:
        self._line.end(self)


class Waiting:
    """The calls that wait: of generators for `tickets`, of the learner for `leases`, of the failure log for new
    `failures`, and of evaluations for a replica that `loads` a version. `states` counts the seconds in which the
    learner waits, or a generator, or both."""

    def __init__(
        self,
        *,
        states: StateClock,
        may_get: Callable[[Version], bool],
        may_ask: Callable[[str], bool],
        clock: Callable[[], float],
    ) -> None:
        self._states = states
        self._clock = clock
        self._waiting: Counter[Role] = Counter()
        self.tickets = TicketLine(may_get=may_get, may_ask=may_ask)
        self.leases, self.failures, self.loads = Waiters(), Waiters(), Waiters()

    def groups_changed(self) -> None:
        """Wakes the learner, and a generator if it can get a ticket, because groups have changed their states."""
        self.tickets.wake()
        self.leases.wake_all()

    async def answer(
        self,
        ask: Callable[[], Answer],
        *,
        final: Callable[[Answer], bool],
        enter: Callable[[], Waiter],
        wait_s: float,
        role: Role | None = None,
    ) -> Answer:
        """Calls `ask` at once and at each wake-up, until its answer is final. Calls it a last time after `wait_s`
        seconds. Returns the last answer.

        `enter` is called only if the call has to wait, and returns its waiter. There is no `await` between the last
        call of `ask` and the return, so a cancelled wait never loses an answer. If `role` is not None, the metrics
        count the wait as one of this role.
        """
        started_s = self._clock()
        answer = ask()
        if final(answer) or wait_s <= 0:
            return answer
        waiter = enter()
        self._count(role, 1)
        try:
            while True:
                left_s = wait_s - (self._clock() - started_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await waiter.woken.wait()
                answer = ask()
                if final(answer) or self._clock() - started_s >= wait_s:
                    return answer
                waiter.wait_on()
        finally:
            self._count(role, -1)
            waiter.end()

    def _count(self, role: Role | None, change: int) -> None:
        if role is not None:
            self._waiting[role] += change
            self._states.enter(_WAITS[self._waiting[Role.LEARNER] > 0, self._waiting[Role.GENERATOR] > 0])
