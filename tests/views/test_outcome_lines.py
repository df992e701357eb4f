"""The last lines of a run about its totals."""

import msgspec
from made_up_run import TOTALS, make_step

from asyncrl.learner.records import build_summary
from asyncrl.views.outcome import totals_lines


def test_the_end_of_a_run_counts_stored_tokens_only_if_there_are_any() -> None:
    without = build_summary([make_step(0)], [], TOTALS, staleness_limit=2)
    assert "stored tokens" not in "\n".join(totals_lines(without, total_steps=1))
    some = msgspec.structs.replace(without, tokens_continued=30, tokens_dropped=4)
    line = "30 stored tokens of replicas that ended were continued, 4 dropped"
    assert line in totals_lines(some, total_steps=1)
