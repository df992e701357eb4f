"""The last lines of a run about its totals."""

import msgspec
from made_up_run import TOTALS, make_step

from asyncrl.learner.records import EvalRecord, build_summary
from asyncrl.views.outcome import totals_lines


def test_the_end_of_a_run_counts_stored_tokens_only_if_there_are_any() -> None:
    without = build_summary([make_step(0)], [], TOTALS, staleness_limit=2)
    assert "stored tokens" not in "\n".join(totals_lines(without, total_steps=1))
    some = msgspec.structs.replace(without, tokens_continued=30, tokens_dropped=4)
    line = "30 stored tokens of replicas that ended were continued, 4 dropped"
    assert line in totals_lines(some, total_steps=1)
    some = msgspec.structs.replace(without, tokens_thrown_away=7)
    assert "7 tokens of attempts that began again or failed were thrown away" in totals_lines(some, total_steps=1)


def test_the_end_of_a_run_says_whether_the_witness_agrees() -> None:
    def words(*steps: dict[str, float | None]) -> str:
        made = [msgspec.structs.replace(make_step(n), diagnostics=numbers) for n, numbers in enumerate(steps)]
        return "\n".join(totals_lines(build_summary(made, [], TOTALS, staleness_limit=2), total_steps=len(steps)))

    agrees = {"witness_s": 0.3, "witness_rows_ratio": 0.2, "witness_counts_ratio": 0.0}
    assert "verified" not in words({}, {})
    verified = "verified: the witness computed a group a second time (number of steps: 2), and agrees"
    assert verified in words(agrees, {}, agrees)
    assert "(number of steps: 1). The errors" in words(agrees, {"witness_counts_ratio": 1e9})
    assert "NOT verified" in words(agrees | {"witness_rows_ratio": 1.1})


def test_the_end_of_a_run_counts_its_restarts_and_what_they_cost() -> None:
    whole = build_summary([make_step(0)], [], TOTALS, staleness_limit=2)
    assert "resumed" not in "\n".join(totals_lines(whole, total_steps=1))
    once = build_summary([make_step(0)], [], TOTALS, staleness_limit=2, restarts=1)
    assert "resumed 1 time, no step was lost" in totals_lines(once, total_steps=1)
    often = build_summary([make_step(0)], [], TOTALS, staleness_limit=2, restarts=2, lost=[make_step(0)] * 20)
    assert "resumed 2 times, 20 steps were lost and trained again" in totals_lines(often, total_steps=1)


def test_the_end_of_a_run_has_the_share_of_its_wall_time_that_trained() -> None:
    spent = build_summary([make_step(0)], [], TOTALS, staleness_limit=2, effective_training_time_ratio=0.591)
    assert "effective training time: 59% of the time since the first start of the run" in totals_lines(
        spent, total_steps=1
    )
    unknown = build_summary([make_step(0)], [], TOTALS, staleness_limit=2)
    assert "effective" not in "\n".join(totals_lines(unknown, total_steps=1))


def test_the_end_of_a_run_says_of_which_step_its_held_out_rewards_are() -> None:
    steps = [make_step(number) for number in range(6)]

    def line(*versions: int) -> str:
        evals = [EvalRecord(version=at, wall_s=1, prompts=8, reward_mean=0.25 + at / 8) for at in versions]
        summary = build_summary(steps, evals, TOTALS, staleness_limit=2)
        return next(each for each in totals_lines(summary, total_steps=6) if each.startswith("held-out"))

    assert line(0, 6) == "held-out reward 0.250 (step 0) → 1.000 (step 6)"
    assert line(0, 4) == "held-out reward 0.250 (step 0) → 0.750 (step 4); the weights of step 6 were not evaluated"
    assert line(0) == "held-out reward 0.250 (step 0); the weights of step 6 were not evaluated"
