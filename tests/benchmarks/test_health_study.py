"""The study of broken runs: which note it finds first, what counts as right, and which runs it trains again."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import health_study
import msgspec
import pytest
from health_study import BROKEN, HEALTHY, RUNS, End, Run, is_right, page, row, seen_in
from made_up_run import make_step
from report_page import PAGE
from written_runs import write_run

from asyncrl.common.concern import Concern
from asyncrl.learner.records import EvalRecord

ENDED = End(code=0, seconds=9, words="")
FAILED = End(code=2, seconds=9, words="error: no room")
WITHOUT_A_RUN = {Concern.NOTHING_TRAINED, Concern.NOT_VERIFIED, Concern.PARITY}
"""Notes that need an error in the code."""
CUT = Run(what="too short", expected=Concern.CUT)


def test_the_first_note_has_the_number_of_steps_after_which_a_reader_had_it(tmp_path: Path) -> None:
    seen = seen_in(
        write_run(tmp_path / "cut", [make_step(step, truncated_ratio=1.0) for step in range(6)], evals=False)
    )
    assert seen.first is not None
    assert (seen.first.concern, seen.steps, seen.recorded, len(seen.last)) == (Concern.CUT, 3, 6, 1)
    assert is_right(CUT, seen, ENDED)
    assert not is_right(CUT, seen, FAILED)
    assert row(CUT, seen, ENDED)[2:] == [
        "`cut`: 100 % of the answers of the last 3 steps are cut at their length limit", "3", "`cut`", "right",
    ]  # fmt: skip
    assert not is_right(Run(what="healthy"), seen, ENDED)
    assert not is_right(Run(what="another fault", expected=Concern.ENTROPY), seen, ENDED)


def test_a_note_that_comes_late_is_wrong_and_a_recipe_without_one_is_right(tmp_path: Path) -> None:
    cut_later = [make_step(step, truncated_ratio=float(step > 3)) for step in range(20)]
    late = seen_in(write_run(tmp_path / "late", cut_later, evals=False))
    assert late.steps == 14, "the mean of all steps is above the limit from then on"
    assert row(CUT, late, ENDED)[-1] == "**wrong**"
    healthy = seen_in(write_run(tmp_path / "healthy", [make_step(step) for step in range(20)], evals=False))
    assert is_right(Run(what="healthy", steps=20), healthy, ENDED)
    assert not is_right(CUT, healthy, ENDED)
    assert row(CUT, healthy, FAILED)[-1] == "**wrong**; ended after 20 steps: error: no room"


@pytest.mark.parametrize(("every", "right"), [(4, True), (3, False)])
def test_a_note_about_held_out_rewards_has_three_evaluations(every: int, right: bool, tmp_path: Path) -> None:
    steps = [make_step(step, reward_mean=0.1 + 0.05 * step + 0.01 * (step % 2)) for step in range(17)]
    rewards = (0.5, 0.3, 0.1) if right else (0.5, 0.5, 0.3, 0.1)
    evals = [
        EvalRecord(version=every * n, wall_s=9.5 + every * n, prompts=99, reward_mean=reward, reward_stderr=0.02)
        for n, reward in enumerate(rewards)
    ]
    run = write_run(tmp_path, steps, evals=False)
    (run / "evals.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(evals))
    seen = seen_in(run)
    assert seen.first is not None
    assert (seen.first.concern, seen.evaluations) == (Concern.HELDOUT, len(rewards))
    assert is_right(Run(what="mislabelled", expected=Concern.HELDOUT), seen, ENDED) is right


def test_a_recipe_that_fails_or_has_fewer_steps_is_wrong(tmp_path: Path) -> None:
    nothing = seen_in(tmp_path)
    assert (nothing.first, nothing.recorded) == (None, 0)
    recipe = Run(what="healthy", steps=20)
    assert row(recipe, nothing, FAILED)[-1] == "**wrong**; ended after 0 steps: error: no room"
    fewer = seen_in(write_run(tmp_path, [make_step(step) for step in range(19)], evals=False))
    assert row(recipe, fewer, ENDED)[-1] == "**wrong**"
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart.json").write_text(json.dumps(asdict(FAILED)))
    assert "and 0 of 1 recipes without a fault had all of their steps and no note" in page(tmp_path, busy=0.0)[-1]


def test_each_note_has_a_run_unless_the_page_names_it_and_recipes_have_none() -> None:
    assert {run.expected for run in BROKEN.values()} == {*Concern} - {Concern.BOTTLENECK} - WITHOUT_A_RUN
    [said] = re.findall(r"except for those that need an error in the code:\n(.*?)\. ", PAGE.read_text())
    assert {*re.findall(r"`(\w+)`", said)} == WITHOUT_A_RUN
    assert {run.expected for run in HEALTHY.values()} == {None}
    assert len(HEALTHY) == 10


def test_the_page_names_the_runs_without_a_result(tmp_path: Path) -> None:
    write_run(tmp_path, [make_step(step, truncated_ratio=1.0) for step in range(6)], evals=False, name="cut")
    (tmp_path / "cut.json").write_text(json.dumps(asdict(ENDED)))
    lines = page(tmp_path, busy=0.0)
    assert len([line for line in lines if line.startswith("|")]) == 3
    assert lines[-1].startswith("1 of 1 broken runs had the right note first and in time, and 0 of 0 recipes")
    assert lines[-1].endswith(f"Runs without a result: {', '.join(f'`{name}`' for name in RUNS if name != 'cut')}.")


def test_a_run_with_a_result_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def train(name: str, run: Run, *, folder: Path) -> End:
        trained.append(name)
        write_run(folder, [make_step(0)], evals=False, name=name)
        return ENDED

    monkeypatch.setattr(health_study, "train", train)
    monkeypatch.setattr(health_study, "busy_percent", lambda: 0.0)
    for name in [*RUNS][2:]:
        (tmp_path / f"{name}.json").write_text(json.dumps(asdict(ENDED)))
    for words, again in (((), [*RUNS][:2]), ((), []), (("--only", "--again", "stale"), ["stale"])):
        trained.clear()
        monkeypatch.setattr("sys.argv", ["health_study.py", "--folder", str(tmp_path), *words])
        assert health_study.main() == 0
        assert trained == again
