"""The seconds by state add up to wall time for every history of state changes."""

import doctest
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from asyncrl.metrics import states
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.states import SlotStates, StateClock, caught_up, monotonic_at_process_start

NAMES = ("idle", "generating", "blocked")

# Multiples of 1/1024 s. Their sums are exact in floats, so the tests can compare them with ==.
ticks = st.integers(min_value=0, max_value=2**20).map(lambda ticks: ticks / 1024)


class FakeClock:
    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now


@given(start=ticks, history=st.lists(st.tuples(ticks, st.sampled_from(NAMES))), rest=ticks)
def test_a_state_clocks_seconds_add_up_to_wall_time_and_belong_to_their_states(
    start: float, history: list[tuple[float, str]], rest: float
) -> None:
    now = FakeClock(start)
    clock = StateClock(states=NAMES, initial="idle", clock=now)
    expected = dict.fromkeys(NAMES, 0.0)
    state = "idle"
    for elapsed, target in history:
        now.now += elapsed
        expected[state] += elapsed
        clock.enter(target)
        state = target
        assert clock.state == target
    now.now += rest
    expected[state] += rest
    assert clock.seconds() == expected
    assert clock.seconds() == expected, "reading changes nothing"
    assert sum(expected.values()) == now.now - start


@given(
    slots=st.integers(min_value=1, max_value=64),
    history=st.lists(
        st.tuples(ticks, st.sampled_from(NAMES), st.sampled_from(NAMES), st.floats(min_value=0, max_value=1))
    ),
)
def test_slot_seconds_over_slots_add_up_to_wall_time(slots: int, history: list[tuple[float, str, str, float]]) -> None:
    now = FakeClock(5.0)
    pool = SlotStates(slots, states=NAMES, initial="idle", clock=now)
    expected = dict.fromkeys(NAMES, Fraction(0))
    for elapsed, source, target, share in history:
        now.now += elapsed
        for state, count in pool.counts().items():
            expected[state] += Fraction(elapsed) * count
        count = int(share * pool.counts()[source])
        counts = pool.counts()
        counts[source] -= count
        counts[target] += count
        pool.set(counts)
        assert sum(pool.counts().values()) == slots
    seconds = pool.seconds()
    assert seconds == {state: float(total) / slots for state, total in expected.items()}
    assert sum(seconds.values()) == pytest.approx(now.now - 5.0, rel=1e-12)


@given(made=ticks, started=ticks, rest=ticks, slots=st.integers(min_value=1, max_value=8))
def test_what_came_before_the_clock_was_made_belongs_to_its_first_state(
    made: float, started: float, rest: float, slots: int
) -> None:
    now = FakeClock(made)
    pool = SlotStates(slots, states=NAMES, initial="blocked", started_s=made - started, clock=now)
    clock = StateClock(states=NAMES, initial="blocked", started_s=made - started, clock=now)
    pool.set({"idle": slots})
    clock.enter("idle")
    now.now += rest
    expected = {"idle": rest, "generating": 0.0, "blocked": started}
    assert clock.seconds() == expected
    assert pool.seconds() == pytest.approx(expected)


def test_a_process_started_when_its_endpoint_says_that_it_did() -> None:
    told = REGISTRY.get_sample_value("process_start_time_seconds")
    before_s = time.time()
    age_s = time.monotonic() - monotonic_at_process_start()
    after_s = time.time()
    assert before_s - age_s - 0.5 <= told <= after_s - age_s + 0.5


def test_within_returns_to_the_state_before_even_after_an_error() -> None:
    now = FakeClock()
    clock = StateClock(states=NAMES, initial="idle", clock=now)

    def fail_after_two_seconds() -> None:
        with clock.within("generating"):
            now.now = 2.0
            raise KeyError

    with pytest.raises(KeyError):
        fail_after_two_seconds()
    now.now = 5.0
    assert clock.seconds() == {"idle": 3.0, "generating": 2.0, "blocked": 0.0}


def test_refused_counts_change_nothing() -> None:
    now = FakeClock()
    pool = SlotStates(4, states=NAMES, initial="idle", clock=now)
    for refused in (
        lambda: pool.set({"idle": 3}),
        lambda: pool.set({"idle": 5, "generating": -1}),
        lambda: pool.set({"sleeping": 4}),
    ):
        with pytest.raises(ValueError, match=r"slots|state"):
            refused()
    now.now = 1.0
    assert pool.counts() == {"idle": 4, "generating": 0, "blocked": 0}
    assert pool.seconds() == {"idle": 1.0, "generating": 0.0, "blocked": 0.0}


def test_set_leaves_unnamed_states_empty() -> None:
    pool = SlotStates(4, states=NAMES, initial="idle", clock=FakeClock())
    pool.set({"generating": 1, "blocked": 3})
    pool.set({"generating": 4})
    assert pool.counts() == {"idle": 0, "generating": 4, "blocked": 0}


@pytest.mark.parametrize(("slots", "initial"), [(0, "idle"), (1, "sleeping")])
def test_impossible_slots_are_refused(slots: int, initial: str) -> None:
    with pytest.raises(ValueError, match=r"slots|initial"):
        SlotStates(slots, states=NAMES, initial=initial)


def test_doctests() -> None:
    # The examples assign to `now`. The lambda reads the new value because the examples share one namespace.
    assert doctest.testmod(states).failed == 0


@given(spent=st.integers(min_value=0, max_value=1000), first=st.integers(0, 1000), second=st.integers(0, 1000))
def test_reattributed_seconds_still_add_up_and_no_more_can_be_moved_than_were_spent(
    spent: int, first: int, second: int
) -> None:
    now = FakeClock()
    clock = StateClock(states=NAMES, initial="idle", clock=now)
    now.now = float(spent)
    clock.enter("generating")
    parts = {"generating": float(first), "blocked": float(second)}
    if first + second > spent:
        with pytest.raises(ValueError, match="cannot move"):
            clock.reattribute("idle", parts)
        assert clock.seconds()["idle"] == spent
    else:
        clock.reattribute("idle", parts)
        assert clock.seconds() == {"idle": spent - first - second} | parts


calls = st.tuples(ticks, ticks, st.floats(min_value=0, max_value=1), st.floats(min_value=0, max_value=1))


@given(history=st.lists(calls, max_size=8))
def test_what_scrapes_show_adds_up_to_wall_time_and_never_falls_while_calls_are_split_at_their_ends(
    history: list[tuple[float, float, float, float]],
) -> None:
    """There are scrapes before, during and after each call; at its end, part of the call moves to other states."""
    now = FakeClock()
    clock = StateClock(states=NAMES, initial="idle", clock=now)
    shown = dict.fromkeys(NAMES, 0.0)
    for wait_s, call_s, first, second in history:
        for elapsed, state in ((wait_s / 2, "idle"), (wait_s / 2, "generating"), (call_s, "idle")):
            now.now += elapsed
            clock.enter(state)
            before, shown = shown, caught_up(shown, clock.seconds())
            assert sum(shown.values()) == pytest.approx(now.now, rel=1e-9, abs=1e-9)
            assert all(shown[name] >= before[name] for name in NAMES)
        parts = {"blocked": first * call_s / 2, "idle": second * call_s / 2}
        clock.reattribute("generating", parts)
    now.now += 2.0**40
    clock.enter("generating")
    now.now += 2.0**40
    assert caught_up(shown, clock.seconds()) == pytest.approx(clock.seconds()), "no seconds are lost"


def test_a_scraped_learner_with_long_steps_shows_its_wall_time_and_every_stage() -> None:
    """Each of two steps takes 150 s, of which 50 s move to `optimizer` at its end. There is a scrape every 10 s."""
    now = FakeClock()
    clock, metrics = StateClock(states=LEARNER_STATES, initial="other", clock=now), LearnerMetrics()
    metrics.states_from(clock.seconds)

    def scraped() -> dict[str, float]:
        read = metrics.registry.get_sample_value
        return {state: read("asyncrl_learner_state_seconds_total", {"state": state}) or 0.0 for state in LEARNER_STATES}

    shown = scraped()
    for step in (1, 2):
        clock.enter("forward_backward")
        for _ in range(15):
            now.now += 10.0
            before, shown = shown, scraped()
            assert sum(shown.values()) == pytest.approx(now.now)
            assert sum(shown.values()) - sum(before.values()) == pytest.approx(10.0), "the sum grows by the wall time"
            assert all(shown[state] >= before[state] for state in LEARNER_STATES)
        clock.enter("other")
        clock.reattribute("forward_backward", {"optimizer": 50.0})
        assert sum(scraped().values()) == pytest.approx(150.0 * step), "nothing is counted twice"
    assert shown["optimizer"] == pytest.approx(50.0), "the first step's seconds; the second's come later"
    now.now += 1000.0
    clock.enter("forward_backward")
    now.now += 50.0
    assert scraped() == pytest.approx(clock.seconds())
