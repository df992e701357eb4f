"""The summary of a run, compared with numbers computed by hand, and the reading of records."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_up_run import TOTALS, make_step

from asyncrl.errors import RunError
from asyncrl.learner.records import (
    EvalRecord,
    HeldoutEnds,
    StepRecord,
    Summary,
    build_summary,
    edge_window,
    ess_of_steps,
    read_lines,
    state_shares,
)


def step(number: int, **changed: Any) -> StepRecord:
    """Returns step `number`, which ends at second 10 + 2 · number.

    In each 2 s the learner waits for 0.5 s and computes for 1.4 s; the rest is `other`.
    """
    fields: dict[str, Any] = {
        "wall_s": 10.0 + 2 * number,
        "duration_s": 1.5,
        "reward_mean": 0.0,
        "group_staleness": {0: 16},
        "token_staleness": {0: 600},
        "learner_state_s": {
            "waiting_for_groups": 3 + 0.5 * number,
            "forward_backward": 1.2 * number,
            "publish": 0.2 * number,
            "other": 7 + 0.1 * number,
        },
        "generator_state_s": {"generating": 1 + 1.5 * number, "idle": 9 + 0.5 * number},
    }
    return make_step(number, **(fields | changed))


def test_the_summary_has_exactly_the_promised_keys() -> None:
    summary = build_summary([step(0)], [], TOTALS, staleness_limit=2)
    assert set(json.loads(msgspec.json.encode(summary))) == {
        "tokens_continued", "tokens_dropped", "tokens_thrown_away",
        "steps", "wall_s", "time_to_first_step_s", "samples_per_s", "reward_first", "reward_last", "heldout_first",
        "heldout_last", "staleness_limit", "max_group_staleness", "max_token_staleness", "groups_discarded",
        "groups_failed", "heldout_prompts", "heldout_failed",
        "ledger_closed", "rows_outstanding", "weight_updates", "mid_sequence_updates", "parity_max_nats",
        "generator_busy_ratio", "learner_busy_ratio", "generated_tokens", "trained_tokens",
        "ess_ratio_mean", "ess_ratio_lowest", "restarts", "lost_steps", "stop_reason", "heldout_sets",
        "witnessed_steps", "witness_failures", "notes", "heldout_first_step", "heldout_last_step", "heldout_numbers",
        "effective_training_time_ratio", "costs",
    }  # fmt: skip


def test_the_effective_sample_size_of_a_run_is_that_of_its_trained_steps() -> None:
    sizes = (1.0, 0.5, None, float("nan"), 0.25)
    records = [*(step(n, ess_ratio=size) for n, size in enumerate(sizes)), step(5, ess_ratio=0.01, trained=False)]
    assert ess_of_steps(records) == (1.75 / 3, 0.25)
    assert ess_of_steps(records[2:4]) == (None, None)
    summary = build_summary(records, [], TOTALS, staleness_limit=2)
    assert (summary.ess_ratio_mean, summary.ess_ratio_lowest) == ess_of_steps(records)


def test_the_summary_of_a_run_by_hand() -> None:
    steps = [
        step(number, reward_mean=float(number), group_staleness={0: 15, number % 3: 1}, token_staleness={0: 590, 1: 10})
        for number in range(40)
    ]
    evals = [EvalRecord(version=v, wall_s=9, prompts=128, reward_mean=r) for v, r in ((0, 0.4), (20, 0.7), (40, 0.9))]
    summary = build_summary(steps, evals, TOTALS, staleness_limit=2)
    assert summary.steps == 40
    assert summary.wall_s == TOTALS.wall_s
    assert summary.time_to_first_step_s == 10.0
    assert summary.samples_per_s == pytest.approx(39 * 128 / 78)
    assert (summary.reward_first, summary.reward_last) == (0.5, 38.5), "5 % of 40 steps are 2"
    assert (summary.heldout_first, summary.heldout_last) == (0.4, 0.9)
    assert (summary.staleness_limit, summary.max_group_staleness, summary.max_token_staleness) == (2, 2, 1)
    assert summary.learner_busy_ratio == pytest.approx(1.4 / 2.0), "start-up, waiting and other are not busy"
    assert summary.generator_busy_ratio == pytest.approx(1.5 / 2.0)
    assert (summary.generated_tokens, summary.trained_tokens) == (TOTALS.generated_tokens, 40 * 600)
    assert summary.parity_max_nats == TOTALS.parity_max_nats, "the probe has the largest difference"
    assert summary.weight_updates == TOTALS.weight_updates
    assert summary.mid_sequence_updates == TOTALS.mid_sequence_updates
    assert (summary.groups_discarded, summary.ledger_closed) == (0, True)


@pytest.mark.parametrize(("steps", "window"), [(1, 1), (19, 1), (20, 1), (40, 2), (200, 10), (100_000, 10)])
def test_first_and_last_are_five_percent_of_steps_at_least_one_at_most_ten(steps: int, window: int) -> None:
    assert edge_window(steps) == window


def test_skipped_steps_are_no_steps_and_their_missing_numbers_are_left_out() -> None:
    skipped = step(1, trained=False, reward_mean=math.nan, parity_nats=None, trained_samples=0, trained_tokens=0)
    steps = [step(0, reward_mean=0.25, parity_nats=5e-6), skipped, step(1, reward_mean=0.75)]
    summary = build_summary(steps, [], TOTALS, staleness_limit=2)
    assert summary.steps == 2
    assert summary.trained_tokens == 1200
    assert (summary.reward_first, summary.reward_last) == (0.25, 0.75)
    assert summary.parity_max_nats == 5e-6
    assert (summary.heldout_first, summary.heldout_last) == (None, None)


def test_one_evaluation_is_the_first_and_not_the_last() -> None:
    evals = [EvalRecord(version=0, wall_s=9, prompts=8, reward_mean=0.4)]
    summary = build_summary([step(0)], evals, TOTALS, staleness_limit=2)
    assert (summary.heldout_first, summary.heldout_last) == (0.4, None)


def test_each_held_out_set_has_its_own_ends() -> None:
    evals = [
        EvalRecord(name=name, version=version, wall_s=9, prompts=8, failed=version, reward_mean=reward)
        for version, name, reward in ((0, "heldout", 0.4), (0, "sums", 0.1), (2, "heldout", 0.6), (2, "sums", 0.9))
    ]
    summary = build_summary([step(0)], evals, TOTALS, staleness_limit=2)
    assert (summary.heldout_first, summary.heldout_last) == (0.4, 0.6)
    assert summary.heldout_sets == {
        "sums": HeldoutEnds(first=0.1, last=0.9, first_step=0, last_step=2, prompts=8, failed=2)
    }
    assert summary.heldout_ends() == {
        "heldout": HeldoutEnds(first=0.4, last=0.6, first_step=0, last_step=2, prompts=8, failed=2),
        **summary.heldout_sets,
    }
    first = build_summary([step(0)], evals[:2], TOTALS, staleness_limit=2)
    assert first.heldout_sets == {"sums": HeldoutEnds(first=0.1, first_step=0, prompts=8)}


def test_the_numbers_of_the_newest_evaluation_are_in_the_summary_with_its_step() -> None:
    measured = {"completion_tokens_mean": 20.5, "truncated_ratio": 0.25, "turns_mean": 2.0, "pass_at": {2: 0.75}}
    old, new = (
        EvalRecord(version=version, wall_s=9, prompts=8, reward_mean=0.5, **numbers)
        for version, numbers in ((0, {}), (4, measured | {"reward_components": {"right": 0.5}}))
    )
    numbers = {"pass_at_2": 0.75, "component_right": 0.5, "completion_tokens_mean": 20.5, "truncated_ratio": 0.25}
    numbers |= {"turns_mean": 2.0}
    assert new.numbers() == {"mean": 0.5, **numbers}
    summary = build_summary([step(0)], [old, new], TOTALS, staleness_limit=2)
    assert (summary.heldout_numbers, summary.heldout_first_step, summary.heldout_last_step) == (numbers, 0, 4)
    [only] = build_summary([step(0)], [new], TOTALS, staleness_limit=2).heldout_ends().values()
    assert (only.numbers, only.newest_step, only.last) == (numbers, 4, None)


def test_a_run_of_one_step_counts_from_the_start() -> None:
    summary = build_summary([step(0)], [], TOTALS, staleness_limit=0)
    assert summary.samples_per_s == pytest.approx(128 / 10)
    assert summary.generator_busy_ratio == pytest.approx(1 / 10)


def test_a_start_is_neither_busy_nor_waiting_also_in_a_run_of_one_step() -> None:
    learner = {"starting": 60.0, "waiting_for_groups": 3.0, "forward_backward": 1.0}
    only = step(0, learner_state_s=learner, generator_state_s={"starting": 50.0, "generating": 1.0, "idle": 4.0})
    assert state_shares([only], "learner_state_s") == {"waiting_for_groups": 0.75, "forward_backward": 0.25}
    summary = build_summary([only], [], TOTALS, staleness_limit=0)
    assert (summary.learner_busy_ratio, summary.generator_busy_ratio) == (0.25, 0.2)
    assert state_shares([step(0, learner_state_s={"starting": 60.0})], "learner_state_s") == {}


def test_the_starts_of_a_restarted_run_do_not_make_it_look_slow() -> None:
    before = {"starting": 10.0, "waiting_for_groups": 4.0, "forward_backward": 4.0}
    after = {"starting": 70.0, "waiting_for_groups": 6.0, "forward_backward": 12.0}
    generators = {"generator_state_s": {"starting": 50.0, "generating": 1.0}}
    records = [
        step(0, wall_s=18.0, learner_state_s=before, **generators),
        step(
            1, wall_s=88.0, learner_state_s=after, generator_state_s={"starting": 90.0, "generating": 4.0, "idle": 1.0}
        ),
    ]
    lost = [step(1), step(2), step(2, trained=False)]
    summary = build_summary(records, [], TOTALS, staleness_limit=2, restarts=3, lost=lost)
    assert summary.samples_per_s == pytest.approx(128 / 10)
    assert (summary.learner_busy_ratio, summary.generator_busy_ratio) == (0.8, 0.75)
    assert (summary.restarts, summary.lost_steps) == (3, 2)


@pytest.mark.parametrize("records", [[], [step(0, trained=False)]], ids=["no record", "skipped steps only"])
def test_no_trained_step_no_summary(records: list[StepRecord]) -> None:
    with pytest.raises(RunError, match="the run trained no step"):
        build_summary(records, [], TOTALS, staleness_limit=2)


def test_skipped_steps_at_either_end_move_no_edge_of_the_summary() -> None:
    idle: dict[str, Any] = {"trained": False, "trained_samples": 0, "trained_tokens": 0}
    trained = [step(number) for number in range(3)]
    bare = build_summary(trained, [], TOTALS, staleness_limit=2)
    around = [step(0, wall_s=5.0, reward_mean=9.0, **idle), *trained, step(3, reward_mean=9.0, **idle)]
    assert build_summary(around, [], TOTALS, staleness_limit=2) == bare


def test_state_shares_add_up_to_one_or_there_are_none() -> None:
    shares = state_shares([step(0), step(7)], "learner_state_s")
    assert sum(shares.values()) == pytest.approx(1)
    assert state_shares([step(3), step(3)], "learner_state_s") == {}


def test_records_read_back_equal_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    records = [step(0), step(1, loss=math.nan, grad_norm=math.inf)]
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    first, second = read_lines(path, StepRecord)
    assert first == records[0], "histograms keep their integer keys"
    assert (second.loss, second.grad_norm) == (None, None)


def test_the_torn_last_line_of_a_killed_writer_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    whole = msgspec.json.encode(step(0)) + b"\n"
    path.write_bytes(whole + whole[:100])
    assert read_lines(path, StepRecord) == [step(0)]
    path.write_bytes(whole[:100])
    assert read_lines(path, StepRecord) == []


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(msgspec.json.encode(step(0)) + b'\n{"step": 1}\n' + msgspec.json.encode(step(2)) + b"\n")
    with pytest.raises(RunError, match=r"steps\.jsonl, line 2 is not a StepRecord"):
        read_lines(path, StepRecord)


def test_no_file_is_no_record(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "evals.jsonl", EvalRecord) == []


def test_a_summary_reads_back_equal() -> None:
    summary = build_summary([step(0)], [], TOTALS, staleness_limit=2)
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary
