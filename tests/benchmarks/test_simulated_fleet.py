"""The simulated fleet goes on through many failures, and the simulation finds a broken state machine."""

import dataclasses

import pytest
from simulated_fleet import ETA, Kind, Outcome, Scenario, Simulation

from asyncrl.buffer.fleet import Fleet, start_of
from asyncrl.buffer.replay_buffer import ReplayBuffer

ROUGH = Scenario(replicas=24, hours=2.0, failures_a_day=80.0, learner_over_pool=1.33)
"""One in ten attempts ends because its replica fails."""


def run(scenario: Scenario = ROUGH, **changes: float) -> Outcome:
    return Simulation(dataclasses.replace(scenario, **changes)).run()


@pytest.mark.parametrize("learner_over_pool", [1.33, 0.75])
def test_a_pool_whose_replicas_fail_all_the_time_trains_within_the_bound_and_loses_no_prompt(
    learner_over_pool: float,
) -> None:
    outcome = run(learner_over_pool=learner_over_pool)
    assert not outcome.dead_end
    assert max(outcome.staleness) <= ETA
    assert outcome.closed
    assert (outcome.failed, outcome.discarded, outcome.trained_twice) == (0, 0, 0)
    assert min(outcome.failures[kind] for kind in Kind) > 5, "each kind must occur, otherwise it is not tested"
    assert outcome.restarts > 50
    assert outcome.added > ROUGH.replicas, "the pool must grow, otherwise that is not tested"


@pytest.mark.slow
@pytest.mark.parametrize("learner_over_pool", [1.33, 0.75])
def test_the_throughput_is_that_of_the_closed_form(learner_over_pool: float) -> None:
    outcome = run(learner_over_pool=learner_over_pool, hours=6.0, failures_a_day=20.0)
    assert outcome.over_closed_form == pytest.approx(1.0, abs=0.02)


def test_without_restarts_the_run_is_too_slow_and_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Fleet.is_heard
    monkeypatch.setattr(Fleet, "is_heard", lambda self, actor: start_of(actor) == 1 and heard(self, actor))
    outcome = run(scalings=0)
    assert outcome.dead_end.startswith("no commit and no step since second")


def test_without_forgiveness_for_attempts_on_quarantined_replicas_prompts_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fleet, "is_excused", lambda *_: False)
    assert run().failed > 0


def test_without_expiry_the_tickets_of_lost_nodes_block_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayBuffer, "expire", lambda _: ())
    monkeypatch.setattr(ReplayBuffer, "leave", lambda *_: ())
    assert run().dead_end.startswith("no commit and no step since second")
