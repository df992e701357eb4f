"""Counts the seconds of a process by state. The states add up to wall time, so they show which side waits for the
other.

`StateClock` is for a process that is in one state at a time, such as the learner. `SlotStates` is for a process whose
concurrency slots have separate states, such as a generator. It divides slot-seconds by the number of slots, so that its
states add up to wall time too. Both take their clock as an argument. Both may be read from another thread, such as the
thread of a scrape. With `started_s=monotonic_at_process_start()`, the seconds include the time between the start of the
process and the construction of the object.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

Clock = Callable[[], float]


def monotonic_at_process_start() -> float:
    """Returns the start of this process on the monotonic clock. A run's seconds count from here, so they include the
    time of imports."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())


class SlotStates:
    """Counts the seconds of `slots` slots, each of which is in one of `states`.

    All slots are in the state `initial` from `started_s` on (default: now).

    >>> now = 0.0
    >>> slots = SlotStates(4, states=("idle", "generating"), initial="idle", clock=lambda: now)
    >>> slots.set({"idle": 1, "generating": 3})
    >>> now = 8.0
    >>> slots.seconds()
    {'idle': 2.0, 'generating': 6.0}
    """

    def __init__(
        self,
        slots: int = 1,
        *,
        states: Sequence[str],
        initial: str,
        started_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots = {slots}: there must be at least 1 slot")
        if initial not in states:
            raise ValueError(f"the initial state {initial!r} is not one of {', '.join(states)}")
        self._slots = slots
        self._clock = clock
        self._lock = Lock()
        self._counts = dict.fromkeys(states, 0) | {initial: slots}
        self._slot_seconds = dict.fromkeys(states, 0.0)
        self._since = clock() if started_s is None else started_s

    def set(self, counts: Mapping[str, int]) -> None:
        """Sets the number of slots in each state; a state that is not in `counts` has none.

        Raises ValueError when a state is unknown, a count is negative, or the counts do not add up to the number of
        slots.
        """
        with self._lock:
            for state, count in counts.items():
                self._known(state)
                if count < 0:
                    raise ValueError(f"{count} slots in {state}: the number must not be negative")
            if sum(counts.values()) != self._slots:
                raise ValueError(f"{dict(counts)} does not add up to {self._slots} slots")
            self._settle()
            self._counts = dict.fromkeys(self._counts, 0) | dict(counts)

    def counts(self) -> dict[str, int]:
        """Returns the present number of slots in each state."""
        with self._lock:
            return dict(self._counts)

    def seconds(self) -> dict[str, float]:
        """Returns slot-seconds divided by slots, by state, from the start until now."""
        with self._lock:
            self._settle()
            return {state: seconds / self._slots for state, seconds in self._slot_seconds.items()}

    def reattribute(self, source: str, parts: Mapping[str, float]) -> None:
        """Moves slot-seconds from `source` to other states. `parts` maps a state to the seconds that it gets.

        This is for a call to other processes that return the durations of their stages at the end of the call. Raises
        ValueError when a state is unknown, or when `source` has fewer slot-seconds than `parts` adds up to.
        """
        with self._lock:
            for state in (source, *parts):
                self._known(state)
            self._settle()
            moved = sum(parts.values())
            if not 0 <= moved <= self._slot_seconds[source]:
                raise ValueError(f"cannot move {moved} s out of {source}, which has {self._slot_seconds[source]} s")
            self._slot_seconds[source] -= moved
            for state, seconds in parts.items():
                self._slot_seconds[state] += seconds

    def _settle(self) -> None:
        """Adds the time since the last call to the states in which the slots are."""
        now = self._clock()
        for state, count in self._counts.items():
            self._slot_seconds[state] += count * (now - self._since)
        self._since = now

    def _known(self, state: str) -> None:
        """Raises ValueError when `state` is not one of the states."""
        if state not in self._counts:
            raise ValueError(f"the state {state!r} is not one of {', '.join(self._counts)}")


class StateClock(SlotStates):
    """Counts the seconds of a process that is in one state at a time.

    The process is in the state `initial` from `started_s` on (default: now).

    >>> now = 0.0
    >>> clock = StateClock(states=("waiting", "training"), initial="waiting", clock=lambda: now)
    >>> now = 3.0
    >>> clock.enter("training")
    >>> now = 4.0
    >>> clock.seconds()
    {'waiting': 3.0, 'training': 1.0}
    """

    @property
    def state(self) -> str:
        return next(state for state, count in self.counts().items() if count)

    def enter(self, state: str) -> None:
        """Changes the state to `state`. Raises ValueError when the state is unknown."""
        self.set({state: 1})

    @contextmanager
    def within(self, state: str) -> Iterator[None]:
        """Changes the state to `state` for the duration of a `with` block, then back to the previous state."""
        before = self.state
        self.enter(state)
        try:
            yield
        finally:
            self.enter(before)


def caught_up(shown: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the totals to show next, after the totals `shown`, for the measured `seconds`.

    A scrape may have shown seconds under one state that were moved to other states since (`reattribute`). The new
    totals still never fall, because a counter must not fall, and they add up to `seconds`. If `seconds` add up to less
    than `shown`, as after a failed read, the totals stay.

    A state whose shown total is above its seconds keeps this total. The growth of the sum goes to the states whose
    totals are below their seconds, in proportion to the differences. When no state is above its seconds any more, the
    totals are equal to `seconds`.

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
