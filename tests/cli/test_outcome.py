"""The last lines of a run: dropped groups with the reasons, and a warning if the run ended well but could not learn."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_up_run import TOTALS, make_step
from written_runs import write_run

from asyncrl.cli.options import print_outcome
from asyncrl.config.schema import Config
from asyncrl.learner.records import EvalRecord, Summary, build_summary
from asyncrl.views.outcome import dropped_in_words


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
    flat = write_run(tmp_path / "flat", [make_step(0, zero_variance_ratio=1.0)])
    print_outcome(summary(), flat, config=Config(), again=["up"])
    assert "warning: In 100 % of the groups of the last step all rewards are equal" in capsys.readouterr().out
    print_outcome(summary(), write_run(tmp_path / "healthy", [make_step(0)]), config=Config(), again=["up"])
    assert "warning" not in capsys.readouterr().out
    print_outcome(summary(), tmp_path / "gone", config=Config(), again=["up"])
    assert "warning" not in capsys.readouterr().out, "unreadable records must not fail a finished run"


def test_held_out_prompts_that_got_no_reward_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evals = [EvalRecord(version=v, wall_s=9, prompts=15, failed=1, reward_mean=r) for v, r in ((0, 0.25), (1, 0.5))]
    run = write_run(tmp_path, [make_step(0)])
    print_outcome(build_summary([make_step(0)], evals, TOTALS, staleness_limit=2), run, config=Config(), again=["up"])
    assert "held-out reward 0.250 → 0.500 (15 of 16 prompts)" in capsys.readouterr().out
