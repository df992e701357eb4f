"""The last lines of a run: dropped groups with the reasons, and a warning if the run ended well but could not learn."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_up_run import TOTALS, make_step
from written_runs import write_run

from asyncrl.cli.options import print_outcome
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.load import dump_config
from asyncrl.config.schema import Config
from asyncrl.learner.records import EvalRecord, Summary, build_summary
from asyncrl.views.outcome import dropped_in_words, totals_lines
from asyncrl.views.report import read_run, report_html


def summary(**totals: Any) -> Summary:
    return build_summary([make_step(0)], [], msgspec.structs.replace(TOTALS, **totals), staleness_limit=2)


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        ({}, "no group was dropped; all groups are accounted for"),
        (
            {"groups_discarded": 23, "groups_failed": {"reward_raised": 20, "reward_timeout": 3}},
            "23 groups were dropped because the reward failed (reward_raised 20, reward_timeout 3); all groups are "
            "accounted for",
        ),
        (
            {"groups_discarded": 6, "groups_failed": {"reward_raised": 1, "expired": 1}, "ledger_closed": False},
            "2 groups were dropped because their rollouts failed (reward_raised 1, expired 1) and 4 other groups were "
            "dropped; NOT all groups are accounted for, which is a bug in asyncrl",
        ),
        ({"groups_discarded": 4}, "4 groups were dropped; all groups are accounted for"),
    ],
)
def test_the_last_line_says_why_groups_were_dropped(totals: dict[str, Any], words: str) -> None:
    assert dropped_in_words(summary(**totals)) == words


def test_a_run_that_could_not_learn_ends_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = write_run(tmp_path / "flat", [make_step(step, zero_variance_ratio=1.0) for step in range(3)])
    print_outcome(summary(), flat, config=Config(), again=["up"])
    assert "warning: In 100 % of the groups of the last 3 steps all rewards are equal" in capsys.readouterr().out
    print_outcome(summary(), write_run(tmp_path / "healthy", [make_step(0)]), config=Config(), again=["up"])
    assert "warning" not in capsys.readouterr().out
    print_outcome(summary(), tmp_path / "gone", config=Config(), again=["up"])
    assert "warning" not in capsys.readouterr().out, "unreadable records must not fail a finished run"
    huge = [make_step(step, completion_tokens_mean=1e308 * (1 + step % 2 / 2), reward_mean=1e308) for step in range(12)]
    print_outcome(summary(), write_run(tmp_path / "huge", huge), config=Config(), again=["up"])
    assert "report: " in capsys.readouterr().out, "and neither must the numbers of damaged ones"


def test_held_out_prompts_that_got_no_reward_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evals = [EvalRecord(version=v, wall_s=9, prompts=15, failed=1, reward_mean=r) for v, r in ((0, 0.25), (1, 0.5))]
    run = write_run(tmp_path, [make_step(0)])
    print_outcome(build_summary([make_step(0)], evals, TOTALS, staleness_limit=2), run, config=Config(), again=["up"])
    assert "held-out reward 0.250 (step 0) → 0.500 (step 1), 15 of 16 prompts\n" in capsys.readouterr().out


def test_an_uncorrected_stale_baseline_is_named_in_the_last_lines_and_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words = write_run(tmp_path, [make_step(0)]), "Uncorrected stale baseline (algorithm.uncorrected = true)"
    plain = Config.model_validate({"algorithm": {"loss": "dapo"}, "run": {"name": "quick", "dir": str(tmp_path)}})
    for uncorrected in (False, True):
        algorithm = plain.algorithm.model_copy(update={"uncorrected": uncorrected})
        (run / "config.yaml").write_text(dump_config(plain.model_copy(update={"algorithm": algorithm})))
        print_outcome(summary(), run, config=plain, again=["up"])
        assert (f"note: {words}: algorithm.loss = dapo" in capsys.readouterr().out) is uncorrected
        assert (words in report_html(read_run(run))) is uncorrected


def test_a_run_that_was_stopped_names_the_step_of_its_last_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    first, last = (
        EvalRecord(
            name=name, version=version, wall_s=9, prompts=8, reward_mean=reward, pass_at={2: 0.75},
            reward_components={"right": 0.25}, completion_tokens_mean=20.25, truncated_ratio=0.125, turns_mean=None,
        )
        for name, version, reward in (("sums", 0, 0.25), ("sums", 12, 0.31))
    )  # fmt: skip
    run = build_summary([make_step(step) for step in range(18)], [first, last], TOTALS, staleness_limit=2)
    lines = list(totals_lines(run, total_steps=60))
    assert lines[:3] == [
        "Stopped at step 18 of 60.",
        "held-out reward of sums 0.250 (step 0) → 0.310 (step 12); the weights of step 18 were not evaluated",
        "held out at step 12: pass@2 0.75, component right 0.25, tokens of a completion 20.2, share of truncated "
        "completions 0.125 (sums)",
    ]


def test_a_run_that_an_evaluation_ended_says_so_and_names_its_best_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "ended after step 1 of 200, because the evaluation heldout of step 1 has the reward 0.960"
    run = write_run(tmp_path, [make_step(0)])
    for file in (COMPLETE, f"hf/{COMPLETE}"):
        (run / "checkpoints" / "step-1" / file).parent.mkdir(parents=True, exist_ok=True)
        (run / "checkpoints" / "step-1" / file).touch()
    record = EvalRecord(version=1, wall_s=9, prompts=8, reward_mean=0.96, reward_stderr=0.02)
    (run / "evals.jsonl").write_bytes(msgspec.json.encode(record) + b"\n")
    print_outcome(summary(stop_reason=reason), run, config=Config(), again=["up"])
    printed = capsys.readouterr().out
    assert "Ended after step 1 of 200, because the evaluation heldout of step 1 has the reward 0.960." in printed
    assert "Stopped at step" not in printed
    assert "continue training from them in a new run" in printed
    assert "best checkpoint" not in printed, "without checkpoint.keep_best it is only the newest one"
    keeping = Config.model_validate({"checkpoint": {"keep_best": 1}})
    print_outcome(summary(), run, config=keeping, again=["up"])
    best = f"best checkpoint: {run / 'checkpoints' / 'step-1'} (held-out reward 0.960 ± 0.020 at step 1)"
    assert best in capsys.readouterr().out
