"""Simulated runs of random pools: the staleness bound holds, every run finishes, and no group is discarded.

Broken variants of the buffer show that the simulation can find errors: with them, the same pools die.
"""

import random

import pytest
from pool_simulation import NewBuffer, Outcome, Pool, Simulation, discarded_groups

from asyncrl.buffer.ledger import Event, Fate
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.staleness import Admission, admissible
from asyncrl.common.version import Version

pytestmark = pytest.mark.slow

POOLS = 2000
BROKEN_POOLS = 16


def simulate(seed: int, *, new_buffer: NewBuffer = ReplayBuffer, **fixed: float) -> tuple[Pool, Outcome]:
    rng = random.Random(seed)
    pool = Pool.draw(rng, **fixed)
    return pool, Simulation(pool, rng=rng, new_buffer=new_buffer).run()


def dead(*, new_buffer: NewBuffer = ReplayBuffer, **fixed: float) -> int:
    """Returns the number of pools that do not finish."""
    return sum(simulate(seed, new_buffer=new_buffer, **fixed)[1].end != "finished" for seed in range(BROKEN_POOLS))


def test_random_pools_finish_within_the_bound_and_discard_nothing() -> None:
    stalest: dict[int, int] = {}
    for seed in range(POOLS):
        pool, outcome = simulate(seed)
        assert outcome.end == "finished", (seed, pool)
        assert max(outcome.staleness, default=0) <= pool.eta, (seed, pool)
        assert outcome.account.closed, (seed, pool)
        assert discarded_groups(outcome.account) == 0, (seed, pool)
        assert len(set(outcome.trained)) == len(outcome.trained), (seed, pool)
        skipped = outcome.account.fates[Fate.SKIPPED].groups
        wanted = pool.total_steps * pool.per_step
        assert len(outcome.trained) == (wanted if pool.prompts is None else min(wanted, pool.prompts - skipped))
        stalest[pool.eta] = max(stalest.get(pool.eta, 0), *outcome.staleness, 0)
    assert stalest == {0: 0, 1: 1, 2: 2, 3: 3}, "some pools must reach the bound, otherwise they do not test it"


class CountsAdmissions(ReplayBuffer):
    """Broken: counts all groups admitted since the start, instead of the slots in use."""

    def _admission(self, version: Version, *, actor: str | None = None) -> Admission:
        admitted = self.account.events[Event.ATTEMPT]
        return admissible(
            self.limits,
            slots=admitted - self.step * self.limits.groups_per_step,
            booked_bytes=0,
            learner_step=self.step,
            replica_step=version.step,
        )


class FreesAtLease(ReplayBuffer):
    """Broken: frees a group's slot at the lease instead of at the ack."""

    def _admission(self, version: Version, *, actor: str | None = None) -> Admission:
        return admissible(
            self.limits,
            slots=len(self.groups.reserved) + len(self.groups.ready),
            booked_bytes=0,
            learner_step=self.step,
            replica_step=version.step,
        )


class SkipAdvances(ReplayBuffer):
    """Broken: a skipped step increases the version, and its groups stay ready."""

    def skip(self, incarnation: int, step: int) -> tuple[str, ...]:
        self.give_back(incarnation, step)
        self.step += 1
        return ()


STRAGGLING = {"straggler_rate": 0.3, "straggler_ticks": 15, "eta": 2, "capacity_groups": 12, "total_steps": 12}
CALM = {"prompts": None, "crash_rate": 0.0, "infra_rate": 0.0, "skip_rate": 0.0}


@pytest.mark.parametrize(
    ("broken", "pools", "least_dead"),
    [
        (CountsAdmissions, CALM | {"skip_rate": 0.3, "total_steps": 12}, 10),
        (CountsAdmissions, CALM | {"infra_rate": 0.3, "total_steps": 12}, 10),
        (FreesAtLease, CALM | {"step_ticks": 4, "slots_a_replica": 8, "total_steps": 12}, 10),
        (SkipAdvances, CALM | {"skip_rate": 0.3, "slots_a_replica": 8, "total_steps": 12}, 10),
    ],
    ids=["admissions and skips", "admissions and retries", "slots freed at the lease", "skips that advance"],
)
def test_what_breaks_the_bound_breaks_it(broken: type[ReplayBuffer], pools: dict[str, float], least_dead: int) -> None:
    assert dead(**pools) == 0
    assert dead(new_buffer=broken, **pools) >= least_dead


def test_without_rule_2_pools_with_stragglers_die(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = CALM | STRAGGLING
    assert dead(**pools) == 0
    monkeypatch.setattr("asyncrl.buffer.replay_buffer.lease_violation", lambda **_: None)
    assert dead(**pools) >= 10
