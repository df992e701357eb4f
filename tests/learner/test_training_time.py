"""The effective training time ratio of invented runs, by hand: what was trained again counts once, and starts, repeated
steps and the time without a learner do not train."""

import dataclasses
import doctest
from typing import Any

import pytest
from made_up_run import make_process

from asyncrl.learner import training_time as module
from asyncrl.learner.records import Resumption, RunInfo, StepRecord
from asyncrl.learner.training_time import TrainingTime, training_time


def test_a_run_that_never_fails_loses_its_start_and_its_end() -> None:
    spent = training_time(make_process(range(0, 30), start_s=100.0), wall_s=420.0)
    assert spent == TrainingTime(wall_s=420.0, trained_s=298.0, starting_s=100.0), (
        "the first step has no wait before it"
    )
    assert (spent.other_s, spent.ratio) == (22.0, 298 / 420)


def test_a_run_that_was_killed_after_step_27_and_resumed_from_20_counts_each_step_once() -> None:
    # The first learner starts for 100 s, trains 27 steps until 368 s, and is killed at 370 s. The second one starts at
    # 400 s, needs 60 s until its first lease, trains the steps 21 to 40 until 658 s, and has closed at 670 s.
    first = make_process(range(0, 27), start_s=100.0)
    second = make_process(range(20, 40), start_s=60.0, before=first[19])
    assert first[-1].wall_s == 368.0
    assert second[-1].wall_s == first[19].wall_s + 258.0
    spent = training_time([*first[:20], *second], lost=first[20:], wall_s=670.0)
    assert spent.trained_s == 198.0 + 198.0, "20 steps of each process, without the wait before its first lease"
    assert spent.starting_s == 100.0 + 60.0
    assert spent.again_s == 8.0 + 6 * 10.0, "7 steps were trained again; the wait before the first one is not known"
    assert spent.other_s == 670 - 396 - 160 - 68
    assert spent.ratio == 396 / 670


def test_a_second_kill_before_the_next_checkpoint_and_a_return_to_an_earlier_one_lose_more() -> None:
    first = make_process(range(0, 27), start_s=100.0)
    second = make_process(range(20, 25), start_s=60.0, before=first[19])
    third = make_process(range(10, 30), start_s=50.0, before=first[9])
    lost = [*first[20:], *first[10:20], *second]
    spent = training_time([*first[:10], *third], lost=lost, wall_s=1000.0)
    assert (spent.trained_s, spent.starting_s) == (98.0 + 198.0, 100.0 + 50.0)
    assert spent.again_s == (8 + 60) + (8 + 90) + (8 + 40)
    killed_at_once = training_time(first[:20], lost=first[20:], wall_s=900.0)
    assert killed_at_once.trained_s == 198.0, "a process that trains nothing adds only to the wall time"


def test_a_skipped_step_does_not_train() -> None:
    records = make_process([0, 1, 2, 3, 3, 4], start_s=100.0, skipped=3)
    assert [record.trained for record in records] == [True, True, True, False, True, True]
    spent = training_time(records, wall_s=160.0)
    assert (spent.trained_s, spent.other_s) == (48.0, 12.0)


@pytest.mark.parametrize(("steps", "wall_s"), [([], 0.0), ([], 100.0)])
def test_a_run_without_a_step_has_trained_for_no_time(steps: list[StepRecord], wall_s: float) -> None:
    assert training_time(steps, wall_s=wall_s).ratio == 0.0


def test_a_clock_that_was_set_back_gives_no_ratio_above_one() -> None:
    assert training_time(make_process(range(0, 30), start_s=100.0), wall_s=200.0).ratio == 1.0
    spent = training_time(make_process(range(0, 30), start_s=100.0), wall_s=400.0)
    assert dataclasses.replace(spent, wall_s=100.0).ratio == 1.0, "until the next step, only the wall time is new"


def run_info(**changed: Any) -> RunInfo:
    fields = {
        "name": "r",
        "state": "running",
        "pid": 1,
        "host": "h",
        "nonce": "n",
        "started": "2026-11-30T08:00:00+00:00",
    }
    return RunInfo(**(fields | changed))


def test_the_wall_time_of_a_run_begins_with_its_first_start_and_ends_with_its_end() -> None:
    at_eight = 1_796_025_600
    resumed = [Resumption(at="2026-11-30T08:06:40+00:00", step=20, incarnation=2)]
    assert run_info(resumed=resumed).wall_s(at_eight + 500.0) == 500.0
    assert run_info(resumed=resumed, finished="2026-11-30T08:11:10+00:00").wall_s(at_eight + 9999.0) == 670.0


@pytest.mark.parametrize("field", ["started", "finished"])
def test_a_time_without_a_unix_time_is_refused_where_run_json_is_read(field: str) -> None:
    with pytest.raises(ValueError, match="year 0 is out of range"):
        run_info(**{field: "0001-01-01T00:00:00"})


def test_the_examples_of_the_documentation_hold() -> None:
    assert doctest.testmod(module).failed == 0
