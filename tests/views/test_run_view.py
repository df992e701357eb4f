"""The facts that views show: the steps that they cover, and whether this machine has a free core."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_up_run import make_status, make_step
from written_runs import write_run

from asyncrl.common.concern import Concern
from asyncrl.config.schema import Config
from asyncrl.learner.records import DataRecord, EvalRecord
from asyncrl.views.evidence import RECENT_STEPS
from asyncrl.views.run_view import run_view
from asyncrl.views.setting import Setting, setting_at, setting_of, usable_cores


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("sections", "cores", "room"),
    [
        ({}, 2, False),
        ({}, 3, True),
        ({"generator": {"replicas": 2}}, 3, False),
        ({"learner": {"ranks": 2}}, 3, False),
        ({}, None, None),
        ({"generator": {"gpus": 1.0}}, 64, None),
    ],
)
def test_room_is_a_core_beyond_those_of_ranks_and_replicas(
    sections: dict[str, Any], cores: int | None, room: bool | None
) -> None:
    assert setting_of(config(**sections), cores=cores).room is room


@pytest.mark.parametrize(
    ("sections", "teach"),
    [
        ({}, False),
        ({"algorithm": {"advantage": "group_norm"}}, False),
        ({"algorithm": {"advantage": "reinforce_pp"}}, True),
        ({"algorithm": {"advantage": "gae"}, "critic": {}}, True),
    ],
)
def test_equal_rewards_teach_nothing_where_only_the_samples_of_a_group_are_compared(
    sections: dict[str, Any], teach: bool
) -> None:
    assert setting_of(config(**sections), cores=None).equal_rewards_teach is teach


def equal_at_the_end(steps: int) -> list[Any]:
    """Returns `steps` steps. Each of the last 20 has equal rewards in all groups, and one failed group."""
    first_of_last = steps - RECENT_STEPS
    return [
        make_step(
            step,
            zero_variance_ratio=float(step >= first_of_last),
            diagnostics={"all_right_ratio": 0.0},
            ledger_groups={"trained": 3 * (step + 1), "failed": max(0, step - first_of_last + 1), "reserved": 7},
        )
        for step in range(steps)
    ]


def test_a_live_view_is_of_the_last_steps_and_a_report_of_all() -> None:
    steps = equal_at_the_end(60)
    live = run_view(steps, recent=True)
    whole = run_view(steps, recent=False)
    assert (live.groups["trained"], live.groups["failed"]) == (60, 20)
    assert (whole.groups["trained"], whole.groups["failed"]) == (180, 20)
    assert [note.number for view in (live, whole) for note in view.notes if note.concern is Concern.NO_GRADIENT] == [
        1.0,
        1.0,
    ], "both cover the last steps only"
    short = run_view(steps[-3:], recent=True)
    assert short.groups == steps[-1].ledger_groups, "with few steps, all groups since the start count"


def test_a_view_has_the_notes_of_its_records_and_of_the_failures() -> None:
    steps = [make_step(0), make_step(1, trained=False, zero_variance_ratio=1.0)]
    facts = run_view(steps, recent=True)
    assert (facts.steps_trained, facts.steps_skipped, facts.notes) == (1, 1, ())
    found = run_view(equal_at_the_end(60), recent=False, failures={"x": 1})
    assert found.failures == {"x": 1}
    assert [note.concern for note in found.notes] == [Concern.NO_GRADIENT, Concern.FAILURES]


def test_the_setting_of_a_run_here_knows_its_cores_and_that_of_a_strange_folder_nothing(tmp_path: Path) -> None:
    assert setting_at(tmp_path) == Setting()
    run = write_run(tmp_path, [make_step(0)])
    assert setting_at(run).room is (usable_cores() > 2)
    assert setting_at(run).hidden_tags == ()
    record = DataRecord(training=1, heldout=0, sets={}, left_out={}, hidden_tags=("<think>",))
    (run / "data.json").write_bytes(msgspec.json.encode(record))
    assert setting_at(run).hidden_tags == ("<think>",)
    earlier = run.rename(run.with_name("earlier.1"))
    assert setting_at(earlier).run == str(earlier)
    run = earlier.rename(run)
    info = run / "run.json"
    info.write_text(info.read_text().replace('"host": "', '"host": "not-'))
    assert setting_at(run).room is None


def test_skipped_steps_count_in_what_is_shown_of_the_last_steps() -> None:
    skipped = {"trained": False, "truncated_ratio": 1.0, "zero_variance_ratio": 1.0, "ess_ratio": 0.1}
    view = run_view([make_step(0, truncated_ratio=0.0, zero_variance_ratio=0.0), make_step(1, **skipped)], recent=True)
    assert (view.truncated_ratio, view.zero_variance_ratio, view.ess_ratio) == (0.5, 0.5, 0.1)


def test_a_held_out_set_keeps_its_place_and_evaluations_without_a_reward_are_left_out() -> None:
    evals = [
        EvalRecord(name=name, version=version, wall_s=1, prompts=8, reward_mean=reward)
        for name, version, reward in (("a", 0, None), ("b", 0, 0.5), ("c", 0, None), ("a", 4, 0.25))
    ]
    assert list(run_view([], recent=False, evals=evals).heldout.items()) == [("a", [(4, 0.25)]), ("b", [(0, 0.5)])]


def test_the_status_has_the_shares_of_time_since_the_start_and_the_records_those_of_the_last_steps() -> None:
    status = make_status(learner_state_seconds={"waiting_for_groups": 6.0, "optimizer": 4.0})
    steps = [make_step(0), make_step(1)]
    assert run_view(steps, recent=False, status=status).learner_shares == {"waiting_for_groups": 0.6, "optimizer": 0.4}
    assert run_view(steps, recent=True, status=status).learner_shares == run_view(steps, recent=True).learner_shares
    assert run_view([], recent=True, status=status).learner_shares is None
