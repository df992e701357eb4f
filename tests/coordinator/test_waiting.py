"""Waiting calls: a change wakes only calls that can get a ticket, first come, first served, and no wake-up is lost."""

import asyncio
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.common.roles import Role
from asyncrl.common.version import Version
from asyncrl.coordinator.waiting import Waiting
from asyncrl.metrics.catalogue import BUFFER_WAITS
from asyncrl.metrics.states import StateClock

FAR_S = 60.0


class Slots:
    """Slots that calls wait for. A call at a version below `oldest` gets none."""

    def __init__(self) -> None:
        self.free = 0
        self.oldest = 0
        self.refused: set[int] = set()
        """The numbers of calls that get no ticket for a reason of their own."""
        self.unhealthy: set[int] = set()
        """The numbers of the calls of replicas that must not ask."""
        self.asked: list[int] = []
        """The numbers of the calls that asked, in order."""
        self.granted: list[int] = []
        states = StateClock(states=BUFFER_WAITS, initial="nobody_waits")
        self.waiting = Waiting(states=states, may_get=self.may_get, may_ask=self.may_ask, clock=time.monotonic)

    def may_get(self, version: Version) -> bool:
        return self.free > 0 and version.step >= self.oldest

    def may_ask(self, replica: str) -> bool:
        return int(replica.removeprefix("replica-")) not in self.unhealthy

    def changed(self, *, free: int = 0, oldest: int | None = None) -> None:
        self.free += free
        self.oldest = self.oldest if oldest is None else oldest
        self.waiting.tickets.wake()

    async def reserve(
        self, number: int, version: Callable[[], Version] = lambda: Version(1, 0), *, wait_s: float = FAR_S
    ) -> bool:
        def ask() -> bool:
            self.asked.append(number)
            if not self.may_get(version()) or number in self.refused:
                return False
            self.free -= 1
            self.granted.append(number)
            return True

        await self.waiting.tickets.earlier_have_asked()
        return await self.waiting.answer(
            ask,
            final=bool,
            enter=lambda: self.waiting.tickets.enter(f"replica-{number}", version),
            wait_s=wait_s,
            role=Role.GENERATOR,
        )


async def all_run() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def waiting_calls(slots: Slots, count: int) -> list[asyncio.Task[bool]]:
    """Returns calls that wait, in order. `slots.asked` is empty again."""
    calls = [asyncio.create_task(slots.reserve(number)) for number in range(count)]
    await all_run()
    assert not any(call.done() for call in calls)
    slots.asked.clear()
    return calls


async def ended(calls: list[asyncio.Task[bool]]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_change_wakes_as_many_calls_as_can_get_a_ticket_and_no_others() -> None:
    slots = Slots()
    calls = await waiting_calls(slots, 1000)
    for free, oldest, asked in ((0, 0, []), (3, 1, []), (0, 0, [0, 1, 2]), (0, 0, []), (1, 0, [3])):
        slots.changed(free=free, oldest=oldest)
        await all_run()
        assert slots.asked == asked
        slots.asked.clear()
    await ended(calls)


@pytest.mark.asyncio
async def test_a_change_does_not_wake_the_calls_of_actors_that_must_not_ask() -> None:
    slots = Slots()
    calls = await waiting_calls(slots, 4)
    slots.unhealthy = {0, 1, 3}
    for free, asked in ((1, [2]), (1, [])):
        slots.changed(free=free)
        await all_run()
        assert slots.asked == asked
        slots.asked.clear()
    slots.unhealthy = {0}
    slots.changed()
    await all_run()
    assert slots.granted == [2, 1]
    await ended(calls)


@pytest.mark.asyncio
@pytest.mark.fault("F16")
async def test_a_call_that_is_cancelled_when_it_was_woken_passes_the_wake_up_on() -> None:
    slots = Slots()
    calls = await waiting_calls(slots, 3)
    slots.changed(free=1)
    calls[0].cancel()
    calls[1].cancel()
    await all_run()
    assert (slots.granted, slots.free) == ([2], 0)
    await ended(calls)


@pytest.mark.asyncio
async def test_a_woken_call_that_gets_no_ticket_for_a_reason_of_its_own_passes_the_wake_up_on_once() -> None:
    slots = Slots()
    calls = await waiting_calls(slots, 4)
    slots.refused = {0, 1, 3}
    for free, asked in ((1, [0, 1, 2]), (1, [0, 1, 3])):
        slots.changed(free=free)
        await all_run()
        assert slots.asked == asked
        slots.asked.clear()
    await ended(calls)


@pytest.mark.asyncio
async def test_calls_at_different_versions_get_their_tickets_in_the_order_in_which_they_came() -> None:
    slots = Slots()
    versions = [Version(1, 0), Version(1, 1), Version(1, 0)]
    calls = [asyncio.create_task(slots.reserve(n, lambda version=v: version)) for n, v in enumerate(versions)]
    await all_run()
    calls[0].cancel()
    for granted in ([1], [1, 2]):
        slots.changed(free=1)
        await all_run()
        assert slots.granted == granted
    await ended(calls)


@pytest.mark.asyncio
async def test_a_call_that_ends_at_its_deadline_leaves_the_line() -> None:
    slots = Slots()
    assert not await slots.reserve(0, wait_s=1e-6)
    calls = await waiting_calls(slots, 1)
    slots.changed(free=1)
    await all_run()
    assert slots.asked == slots.granted == [0]
    assert await calls[0]


@pytest.mark.asyncio
async def test_a_new_call_takes_no_ticket_for_which_an_earlier_one_was_woken() -> None:
    slots = Slots()
    calls = await waiting_calls(slots, 2)
    slots.changed(free=2)
    assert not await slots.reserve(7, wait_s=0.0)
    assert slots.granted == [0, 1]
    await ended(calls)


@pytest.mark.asyncio
async def test_a_call_whose_replica_has_loaded_other_weights_asks_again_and_keeps_its_place() -> None:
    slots = Slots()
    loaded = Version(1, 0)
    calls = [
        asyncio.create_task(slots.reserve(0, lambda: loaded)),
        asyncio.create_task(slots.reserve(1, lambda: Version(1, 1))),
    ]
    await all_run()
    slots.asked.clear()
    slots.changed(oldest=1)
    loaded = Version(1, 1)
    slots.waiting.tickets.wake_actor("replica-0")
    await all_run()
    assert slots.asked == [0], "it may be refused for another reason now"
    slots.changed(free=1)
    await all_run()
    assert slots.granted == [0]
    await ended(calls)


@pytest.mark.asyncio
async def test_a_bell_wakes_all_of_its_calls() -> None:
    slots, known = Slots(), 0

    async def more_than(number: int) -> int:
        return await slots.waiting.answer(
            lambda: known, final=lambda now: now > number, enter=slots.waiting.failures.enter, wait_s=FAR_S
        )

    calls = [asyncio.create_task(more_than(number)) for number in (0, 0, 1)]
    await all_run()
    known = 1
    slots.waiting.failures.wake_all()
    await all_run()
    assert [call.done() for call in calls] == [True, True, False]
    known = 2
    slots.waiting.failures.wake_all()
    assert await calls[2] == 2


STEPS = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 2)),
    st.tuples(st.just("call"), st.integers(0, 2)),
    st.tuples(st.just("free"), st.integers(1, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("load"), st.integers(0, 9)),
    st.tuples(st.just("oldest"), st.integers(0, 2)),
    st.tuples(st.just("run"), st.integers(1, 3)),
)


@pytest.mark.fault("F16")
@given(st.lists(STEPS, max_size=60))
def test_no_wake_up_is_lost_and_calls_at_one_version_get_their_tickets_in_order(steps: list[tuple[str, int]]) -> None:
    asyncio.run(a_history(steps))


async def a_history(steps: list[tuple[str, int]]) -> None:
    slots = Slots()
    calls: list[asyncio.Task[bool]] = []
    versions: list[int] = []
    moved: set[int] = set()
    freed = 0
    for what, number in steps:
        match what:
            case "call":
                place = len(calls)
                versions.append(number)
                calls.append(asyncio.create_task(slots.reserve(place, lambda place=place: Version(1, versions[place]))))
            case "free":
                freed += number
                slots.changed(free=number)
            case "oldest":
                slots.changed(oldest=number)
            case "cancel" if calls:
                calls[number % len(calls)].cancel()
            case "load" if calls:
                place = number % len(calls)
                versions[place] += 1
                moved.add(place)
                slots.waiting.tickets.wake_actor(f"replica-{place}")
            case "run":
                for _ in range(number):
                    await asyncio.sleep(0)
    await all_run()
    waits = [place for place, call in enumerate(calls) if not call.done()]
    assert not [place for place in waits if slots.may_get(Version(1, versions[place]))], "a wake-up was lost"
    assert slots.free + len(slots.granted) == freed
    for version in range(3):
        order = [place for place in slots.granted if versions[place] == version and place not in moved]
        assert order == sorted(order)
    await ended(calls)
    assert (slots.waiting.tickets._lines, slots.waiting.tickets._of_actor, slots.waiting.tickets._awake) == (
        {},
        {},
        0,
    )
