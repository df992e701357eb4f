"""The autoscaler: the number of replicas follows the learner's speed, and does not swing."""

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from asyncrl.config.schema import AutoscaleSection
from asyncrl.coordinator.autoscaler import KNOWN_WINDOWS, WINDOW_STEPS, Autoscaler, Change, Load

DWELL_S = 20.0
LOADS = 500
WINDOWS = 24
"""Length of a phase of a simulated load, in windows."""
MOST_TURNS = 3
"""Changes of direction in a phase. One of 979 phases has three, all others have at most two."""


@dataclass
class Pace:
    """The load of one phase: the learner trains `replicas` times the groups a second of a full engine."""

    replicas: float
    seconds: int


@dataclass
class SimulatedLoad:
    """A run in ticks of one second. Amounts of groups are not whole numbers.

    An engine of `slots` slots finishes `rate` groups a second when all are busy. With fewer groups, each of them is
    faster: `batching` is 0 if the engine always finishes `rate` groups, and infinite if each group takes the same time
    in any company. A step takes `step_groups`, and the buffer admits `admitted`. `noise` is the standard deviation of
    the logarithm of a step's time and of the engines' speed. A replica generates `start_s` after it was added.
    """

    choose: random.Random
    least: int
    most: int
    slots: int
    rate: float
    batching: float
    step_groups: int
    admitted: float
    noise: float
    start_s: int
    pace: Pace = field(default_factory=lambda: Pace(1.0, 0))
    now_s: int = 0
    step: int = 0
    ready: float = 0.0
    leased: float = 0.0
    in_flight: float = 0.0
    training_s: float = 0.0
    speed: float = 1.0
    replicas: int = 1
    live: int = 1
    joins_s: list[int] = field(default_factory=list)
    leaves_s: list[int] = field(default_factory=list)
    learner_waits_s: float = 0.0
    both_wait_s: float = 0.0
    replica_s: float = 0.0
    blocked_s: float = 0.0

    def tick(self) -> None:
        self.now_s += 1
        self.live += sum(at_s <= self.now_s for at_s in self.joins_s)
        self.joins_s = [at_s for at_s in self.joins_s if at_s > self.now_s]
        self.leaves_s = [at_s for at_s in self.leaves_s if at_s > self.now_s]
        waited_s = self._train()
        room = self.live * self.slots - self.in_flight
        issued = max(0.0, min(room, self.admitted - self.ready - self.leased - self.in_flight))
        self.in_flight += issued
        refused = issued < room - 1e-9
        self.speed += 0.2 * (self.choose.gauss(1.0, self.noise) - self.speed)
        made = min(self.in_flight, max(0.0, self.speed) * self.live * self._finished(self.in_flight / self.live))
        self.in_flight, self.ready = self.in_flight - made, self.ready + made
        if refused:
            self.both_wait_s += waited_s
            self.blocked_s += self.live * (1 - self.in_flight / (self.live * self.slots))
        else:
            self.learner_waits_s += waited_s
        self.replica_s += self.live + len(self.leaves_s)

    def _train(self) -> float:
        """Trains for one second. Returns for how much of it the learner waited."""
        left_s = 1.0
        while left_s > 0:
            if self.training_s > 0:
                used_s = min(left_s, self.training_s)
                left_s, self.training_s = left_s - used_s, self.training_s - used_s
                if self.training_s <= 0:
                    self.step, self.leased = self.step + 1, 0.0
            elif self.ready >= self.step_groups:
                self.ready, self.leased = self.ready - self.step_groups, self.step_groups
                self.training_s = self.step_s * math.exp(self.choose.gauss(0.0, self.noise))
            else:
                return left_s
        return 0.0

    @property
    def step_s(self) -> float:
        return self.step_groups / (self.pace.replicas * self.rate)

    def _finished(self, groups: float) -> float:
        """Returns the groups a second that one engine finishes while it generates `groups`."""
        groups = min(groups, self.slots)
        return self.rate * groups * (self.slots + self.batching) / (self.slots * (groups + self.batching) + 1e-9)

    def load(self) -> Load:
        return Load(
            at_s=self.now_s,
            step=self.step,
            groups_per_step=self.step_groups,
            groups=self.step * self.step_groups + self.leased + self.ready,
            learner_waits_s=self.learner_waits_s,
            both_wait_s=self.both_wait_s,
            replica_s=self.replica_s,
            blocked_s=self.blocked_s,
        )

    def scale(self, replicas: int) -> None:
        assert abs(replicas - self.replicas) == 1
        if replicas > self.replicas:
            self.joins_s.append(self.now_s + self.start_s)
        elif self.joins_s:
            self.joins_s.pop()
        else:
            self.live -= 1
            self.leaves_s.append(self.now_s + round(self.slots / self.rate))
        self.replicas = replicas


def simulated(seed: int) -> tuple[SimulatedLoad, list[Pace]]:
    """Returns a random load, and its phases. The buffer admits enough groups for all replicas."""
    choose = random.Random(seed)
    most = choose.randint(1, 10)
    slots, group_s = choose.choice([4, 16, 64]), choose.uniform(3.0, 12.0)
    step_groups = max(1, round(slots * choose.uniform(0.5, 3.0)))
    load = SimulatedLoad(
        choose=choose,
        least=choose.randint(1, min(2, most)),
        most=most,
        slots=slots,
        rate=slots / group_s,
        batching=slots * choose.choice([0.0, 0.1, 1.0, 100.0]),
        step_groups=step_groups,
        admitted=most * slots + 2 * step_groups + slots * choose.uniform(0.0, 3.0),
        noise=choose.choice([0.0, 0.05, 0.2]),
        start_s=round(DWELL_S * choose.uniform(0.1, 3.0)),
    )
    load.replicas = load.live = choose.randint(load.least, most)
    phases = []
    for _ in range(choose.randint(1, 3)):
        pace = Pace(choose.uniform(0.3, most + 1.0), 0)
        step_s = step_groups / (pace.replicas * load.rate)
        window_s = max(DWELL_S, (WINDOW_STEPS + 1) * step_s)
        pace.seconds = round(WINDOWS * window_s + 2 * most * load.start_s)
        phases.append(pace)
    return load, phases


def changes_in(load: SimulatedLoad, pace: Pace, scaler: Autoscaler) -> list[tuple[int, int]]:
    """Simulates one phase. Returns the time and the new number of each change."""
    load.pace, changes = pace, []
    for _ in range(pace.seconds):
        load.tick()
        change = scaler.decide(load.load(), replicas=load.replicas, live=load.live + len(load.leaves_s))
        if change is not None:
            changes.append((load.now_s, change.replicas))
            load.scale(change.replicas)
    return changes


def turns(numbers: list[int]) -> int:
    """Returns how often a change goes the other way than the one before it."""
    ways = [after - before for before, after in pairwise(numbers)]
    return sum(way != before for before, way in pairwise(ways))


@pytest.mark.parametrize("part", range(5))
def test_the_pool_of_500_loads_ends_within_one_replica_of_the_best_size_and_does_not_swing(part: int) -> None:
    for seed in range(part * LOADS // 5, (part + 1) * LOADS // 5):
        load, phases = simulated(seed)
        scaler = Autoscaler(AutoscaleSection(min=load.least, max=load.most, dwell_s=DWELL_S))
        times_s, where = [-math.inf], f"load {seed}: {load}, {phases}"
        for pace in phases:
            begin = load.replicas
            changes = changes_in(load, pace, scaler)
            times_s += [at_s for at_s, _ in changes]
            numbers = [begin, *[number for _, number in changes]]
            assert all(load.least <= number <= load.most for number in numbers), where
            best = min(load.most, max(load.least, math.ceil(pace.replicas)))
            assert abs(load.replicas - best) <= 1, f"{numbers} at {pace}, the best is {best}: {where}"
            assert turns(numbers) <= MOST_TURNS, f"{numbers} at {pace}: {where}"
        assert all(later - earlier >= DWELL_S for earlier, later in pairwise(times_s)), where


# Single decisions.


class MadeUpRun:
    """A run whose replicas and learner wait for given shares of the time. A step takes 10 groups, and the replicas make
    one group a second."""

    def __init__(self, *, least: int = 1, most: int = 4) -> None:
        self.scaler = Autoscaler(AutoscaleSection(min=least, max=most, dwell_s=30.0))
        self.at_s = self.trained = 0.0
        self.totals = dict.fromkeys(("learner_waits_s", "both_wait_s", "replica_s", "blocked_s", "groups"), 0.0)

    def passes(
        self,
        seconds: int,
        *,
        replicas: int,
        live: int | None = None,
        learner: float = 0.0,
        both: float = 0.0,
        blocked: float = 0.0,
        step_s: int = 10,
    ) -> list[Change]:
        """Lets so many seconds pass. Returns the decisions."""
        live, changes = replicas if live is None else live, []
        rates = {
            "learner_waits_s": learner,
            "both_wait_s": both,
            "replica_s": live,
            "blocked_s": live * blocked,
            "groups": 1.0,
        }
        for _ in range(seconds):
            self.at_s += 1.0
            self.trained += 1.0 / step_s
            for name, rate in rates.items():
                self.totals[name] += rate
            load = Load(at_s=self.at_s, step=int(self.trained + 1e-6), groups_per_step=10, **self.totals)
            if (change := self.scaler.decide(load, replicas=replicas, live=live)) is not None:
                changes.append(change)
        return changes

    def becomes(self, seconds: int, **waits: Any) -> list[int]:
        return [change.replicas for change in self.passes(seconds, **waits)]


def test_a_replica_is_added_when_the_learner_waits_and_removed_when_more_than_one_is_blocked() -> None:
    run = MadeUpRun()
    assert run.passes(39, replicas=1, learner=0.5) == []
    assert run.passes(1, replicas=1, learner=0.5) == [
        Change(
            2,
            "generator.autoscale: from 1 to 2 replicas, because the learner waited for groups in 50% of the last 30 s, "
            "and no generator waited for a ticket meanwhile",
        )
    ]
    run.passes(20, replicas=2, live=1, learner=0.5)
    assert run.passes(99, replicas=2, blocked=0.8, step_s=20) == []
    assert run.passes(1, replicas=2, blocked=0.8, step_s=20) == [
        Change(
            1,
            "generator.autoscale: from 2 to 1 replicas, because the staleness limit or a full buffer blocked as many "
            "slots as 1.6 replicas have for the last 40 s, and the learner waited for groups in 0% of this time",
        )
    ]
    assert run.passes(99, replicas=1, blocked=0.9) == [], "it is the smallest number"


def test_nothing_changes_when_both_sides_wait() -> None:
    assert MadeUpRun().passes(200, replicas=2, learner=0.1, both=0.8, blocked=0.9) == []


def test_a_pool_whose_replicas_do_not_all_generate_does_not_grow_but_shrinks() -> None:
    run = MadeUpRun()
    assert run.passes(200, replicas=2, live=1, learner=0.9) == []
    assert run.becomes(100, replicas=2, live=1, blocked=0.4, step_s=20) == [1], (
        "the one that does not generate is not needed"
    )


def test_a_window_begins_when_the_replicas_generate_when_their_number_changes_and_after_a_pause() -> None:
    run = MadeUpRun()
    run.passes(35, replicas=2, live=1, learner=0.9)
    assert run.passes(34, replicas=2, learner=0.9) == [], "the second replica has just begun"
    run = MadeUpRun()
    run.passes(35, replicas=1, learner=0.9)
    assert run.passes(34, replicas=2, learner=0.9) == [], "`asyncrl scale` has just added one"
    run = MadeUpRun()
    run.passes(35, replicas=1, learner=0.9)
    run.scaler.forget()
    assert run.passes(34, replicas=1, learner=0.9) == [], "the learner was away"
    assert run.becomes(1, replicas=1, learner=0.9) == [2]


def test_a_replica_that_is_silent_now_and_then_delays_no_decision() -> None:
    run, became = MadeUpRun(), list[int]()
    for _ in range(5):
        became += run.becomes(9, replicas=2, learner=0.9) + run.becomes(1, replicas=2, live=1, learner=0.9)
    assert became[:1] == [3]


def test_a_decision_is_about_two_whole_steps_also_if_they_take_longer() -> None:
    run = MadeUpRun()
    assert run.passes(299, replicas=1, learner=0.9, step_s=100) == []
    assert len(run.passes(1, replicas=1, learner=0.9, step_s=100)) == 1


def test_a_number_outside_the_limits_is_changed_to_the_nearest_limit() -> None:
    assert MadeUpRun(most=2).becomes(40, replicas=5, learner=0.9) == [2]
    assert MadeUpRun(least=3).becomes(40, replicas=1, blocked=0.9) == [3]


def test_the_pool_does_not_shrink_below_what_its_replicas_have_made_until_that_is_long_ago() -> None:
    run = MadeUpRun()
    assert run.becomes(40, replicas=2, learner=0.5) == [3], "a replica makes 0.5 groups a second"
    assert run.becomes(30 * KNOWN_WINDOWS, replicas=3, blocked=0.8) == [], "the learner takes 1 group a second"
    assert run.becomes(80, replicas=3, blocked=0.8) == [2], "the groups may be shorter now"


def test_after_each_wrong_removal_the_next_one_takes_longer_unless_two_replicas_are_to_spare() -> None:
    run, waits_s = MadeUpRun(), []
    for _ in range(4):
        begin_s = run.at_s
        while run.becomes(1, replicas=3, blocked=0.5) != [2]:
            assert run.at_s < begin_s + 2000
        waits_s.append(round(run.at_s - begin_s))
        run.passes(40, replicas=2, learner=0.2)
        run.scaler._made_by_one = None  # as after many windows
    assert waits_s == [70, 250, 970, 970]
    assert run.becomes(70, replicas=3, blocked=0.8) == [2]
