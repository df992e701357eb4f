"""Who waits for whom: seconds split by state, so that they add up to wall time.

`StateClock` is for a process that does one thing at a time (the learner), `SlotStates` for one whose concurrency
slots are each in a state of their own (a generator): its seconds are slot-seconds ÷ slots, so that n slots, too, add
up to wall time. Both take their clock as an argument and may be read from another thread, such as a scraper's. With
`monotonic_at_process_start` as their `started_s`, the time that a process took to make them is not missing.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

Clock = Callable[[], float]


def monotonic_at_process_start() -> float:
    """The monotonic moment at which this process started: what a run's seconds count from, imports included."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())


class SlotStates:
    """`slots` slots, each in one of `states`; all are in `initial` from `started_s` on, now when it is left out.

    >>> now = 0.0
    >>> slots = SlotStates(4, states=("idle", "generating"), initial="idle", clock=lambda: now)
    >>> slots.move("idle", "generating", count=3)
    >>> now = 8.0
    >>> slots.seconds()
    {'idle': 2.0, 'generating': 6.0}
    """

    def __init__(
        self,
        slots: int,
        *,
        states: Sequence[str],
        initial: str,
        started_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        if slots < 1:
            raise ValueError(f"{slots} slots: at least 1 is needed")
        if initial not in states:
            raise ValueError(f"the initial state {initial!r} is none of {', '.join(states)}")
        self._slots = slots
        self._clock = clock
        self._lock = Lock()
        self._counts = dict.fromkeys(states, 0) | {initial: slots}
        self._slot_seconds = dict.fromkeys(states, 0.0)
        self._since = clock() if started_s is None else started_s

    def move(self, source: str, target: str, *, count: int = 1) -> None:
        """Let `count` slots go from one state to another. ValueError when there are fewer in `source`."""
        with self._lock:
            self._known(source)
            self._known(target)
            if not 0 <= count <= self._counts[source]:
                raise ValueError(f"cannot move {count} slots out of {source}: it has {self._counts[source]}")
            self._settle()
            self._counts[source] -= count
            self._counts[target] += count

    def set(self, counts: Mapping[str, int]) -> None:
        """Say where all slots are; states that are left out have none. ValueError unless they add up."""
        with self._lock:
            for state, count in counts.items():
                self._known(state)
                if count < 0:
                    raise ValueError(f"{count} slots in {state}")
            if sum(counts.values()) != self._slots:
                raise ValueError(f"{dict(counts)} does not add up to {self._slots} slots")
            self._settle()
            self._counts = dict.fromkeys(self._counts, 0) | dict(counts)

    def counts(self) -> dict[str, int]:
        """Slots by state, now."""
        with self._lock:
            return dict(self._counts)

    def seconds(self) -> dict[str, float]:
        """Slot-seconds ÷ slots by state since the start, the present moment included."""
        with self._lock:
            self._settle()
            return {state: seconds / self._slots for state, seconds in self._slot_seconds.items()}

    def reattribute(self, source: str, parts: Mapping[str, float]) -> None:
        """Of the slot-seconds spent in `source`, so many belong to other states. ValueError when there are fewer."""
        with self._lock:
            for state in (source, *parts):
                self._known(state)
            self._settle()
            moved = sum(parts.values())
            if not 0 <= moved <= self._slot_seconds[source]:
                raise ValueError(f"cannot move {moved} s out of {source}: it has {self._slot_seconds[source]}")
            self._slot_seconds[source] -= moved
            for state, seconds in parts.items():
                self._slot_seconds[state] += seconds

    def _settle(self) -> None:
        now = self._clock()
        for state, count in self._counts.items():
            self._slot_seconds[state] += count * (now - self._since)
        self._since = now

    def _known(self, state: str) -> None:
        if state not in self._counts:
            raise ValueError(f"the state {state!r} is none of {', '.join(self._counts)}")


class StateClock:
    """A process that is in one state at a time, in `initial` from `started_s` on, now when it is left out.

    >>> now = 0.0
    >>> clock = StateClock(states=("waiting", "training"), initial="waiting", clock=lambda: now)
    >>> now = 3.0
    >>> clock.enter("training")
    >>> now = 4.0
    >>> clock.seconds()
    {'waiting': 3.0, 'training': 1.0}
    """

    def __init__(
        self,
        *,
        states: Sequence[str],
        initial: str,
        started_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._slot = SlotStates(1, states=states, initial=initial, started_s=started_s, clock=clock)

    @property
    def state(self) -> str:
        return next(state for state, count in self._slot.counts().items() if count)

    def enter(self, state: str) -> None:
        """Be in `state` from now on. ValueError when it is unknown."""
        self._slot.set({state: 1})

    @contextmanager
    def within(self, state: str) -> Iterator[None]:
        """Be in `state` for the length of a block, then again in the one before."""
        before = self.state
        self.enter(state)
        try:
            yield
        finally:
            self.enter(before)

    def reattribute(self, source: str, parts: Mapping[str, float]) -> None:
        """Of the seconds spent in `source`, so many belong to other states. ValueError when there are fewer.

        For a stage that only its end can split, such as a call to other processes that time themselves.
        """
        self._slot.reattribute(source, parts)

    def seconds(self) -> dict[str, float]:
        """Seconds by state since the start, the present moment included."""
        return self._slot.seconds()


def caught_up(shown: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Totals to show after `shown` that add up to `seconds` and of which none falls: seconds that were shown under one
    state may since have been reattributed to others.

    A total that is ahead of its state waits for it. What all of `seconds` grew by goes to the states that are behind,
    each its part of the arrears; so the totals are those of `seconds` as soon as none is ahead.

    >>> caught_up({"training": 15.0, "optimizer": 0.0, "waiting": 0.0}, {"training": 10.0, "optimizer": 5.0})
    {'training': 15.0, 'optimizer': 0.0, 'waiting': 0.0}
    >>> caught_up({"training": 15.0, "optimizer": 0.0}, {"training": 12.0, "optimizer": 5.0})
    {'training': 15.0, 'optimizer': 2.0}
    >>> caught_up({"training": 15.0, "optimizer": 2.0}, {"training": 20.0, "optimizer": 5.0})
    {'training': 20.0, 'optimizer': 5.0}
    """
    behind = {state: max(0.0, float(seconds.get(state, 0.0)) - total) for state, total in shown.items()}
    arrears = sum(behind.values())
    grown = sum(float(seconds.get(state, 0.0)) for state in shown) - sum(shown.values())
    part = min(1.0, max(0.0, grown) / arrears) if arrears else 0.0
    return {state: total + part * behind[state] for state, total in shown.items()}
