"""`asyncrl status`: every line names its subject, and the learner is shown as training only when it trains."""

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from made_up_run import make_status, make_step

from asyncrl.buffer.ledger import Account, Amount, Event, Fate
from asyncrl.buffer.records import TOOL_FAILED, Failure, FailureCount, LeaseWait
from asyncrl.common.device_time import Device, Pool, PoolCost
from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Version
from asyncrl.coordinator.status import RunStatus
from asyncrl.errors import FailureClass
from asyncrl.learner.records import EvalRecord, StepRecord
from asyncrl.learner.training_time import TrainingTime
from asyncrl.views import status_text
from asyncrl.views.run_view import RunView, run_view

NOW = datetime(2026, 11, 23, 8, 7, 31, tzinfo=timezone(timedelta(hours=2)))


def since_start(status: RunStatus, steps: Sequence[StepRecord] = (), evals: Sequence[EvalRecord] = ()) -> RunView:
    return run_view(steps, recent=False, evals=evals, status=status)


def status_lines(status: RunStatus, **records: Any) -> list[str]:
    return status_text.status_lines(status, since_start(status, **records), now=NOW)


def status_json(status: RunStatus, **records: Any) -> bytes:
    return status_text.status_json(status, since_start(status, **records), now=NOW)


def test_a_status_says_when_it_was_read() -> None:
    assert status_lines(make_status())[0].endswith(", as of 06:07:31 UTC")
    assert msgspec.json.decode(status_json(make_status()))["as_of"] == NOW.isoformat()


def learner(status: RunStatus) -> str:
    (line,) = [line for line in status_lines(status) if line.startswith("buffer")]
    return line.partition("; learner ")[2].partition(";")[0]


@pytest.mark.parametrize("state", [RunState.STARTING, RunState.CLOSING, RunState.FINISHED, RunState.FAILED])
def test_the_learner_trains_only_while_the_run_runs(state: RunState) -> None:
    assert learner(make_status(state=state)) == state.value
    assert learner(make_status()) == "trains"


def test_a_learner_that_waits_or_is_not_there_is_said_to() -> None:
    status = make_status()
    waits = msgspec.structs.replace(status.counts, lease_wait=LeaseWait.NOT_ENOUGH_READY)
    assert learner(make_status(counts=waits)) == "waits: not enough ready"
    generators = tuple(each for each in status.deployments if each.role is Role.GENERATOR)
    assert learner(make_status(deployments=generators)) == "not attached"


def test_a_replica_names_its_deployment_and_every_line_says_what_it_is_about() -> None:
    lines = status_lines(make_status())
    assert (
        "replica generator-a of deployment generator-d: weights of step 3, 2 of 4 slots busy, 3 groups reserved"
        in lines[3]
    )
    assert "deployment generator-d: pid 2 on h" in lines
    assert "deployment learner-d: pid 1 on h" in lines


def test_the_log_of_a_replica_is_named_as_scp_takes_it_also_after_its_death() -> None:
    status = make_status()
    assert not any("log" in line for line in status_lines(status) if line.startswith("replica "))
    report = msgspec.structs.replace(status.reports["generator-a"], node="gpu-7", log="/runs/a/logs/replica-a.log")
    dead = msgspec.structs.replace(status.replicas[0], live=False, silent_s=60.0)
    status = make_status(reports={"generator-a": report}, replicas=(dead,))
    [line] = [line for line in status_lines(status) if line.startswith("replica generator-a")]
    assert "; log gpu-7:/runs/a/logs/replica-a.log" in line


def test_the_reason_of_the_last_change_of_the_number_of_replicas_is_shown() -> None:
    line = "the deployments should have 3 replicas together; the last change: why"
    assert line in status_lines(make_status(wanted_replicas={"d": 1, "e": 2}, scaled_because="why"))
    assert not any("the last change" in line for line in status_lines(make_status(wanted_replicas={"d": 1})))


def test_versions_are_steps_and_the_incarnation_is_named_from_the_second_on() -> None:
    assert status_lines(make_status())[1].startswith("step 3 of 9, weights published: step 3, ")
    again = make_status(version=Version(2, 4), published=None)
    assert status_lines(again)[1].startswith("step 4 of incarnation 2 of 9, weights published: none, ")


SHARES = {"waiting_for_groups": 6.0, "optimizer": 4.0}
STEPS = [make_step(0), make_step(1)]


def busy_status(**changed: Any) -> RunStatus:
    """Returns the status of a run whose learner waits for groups most of the time."""
    return make_status(**({"learner_state_seconds": SHARES} | changed))


def test_what_limits_the_run_is_said_when_both_sides_are_known() -> None:
    (line,) = [line for line in status_lines(busy_status()) if line.startswith("since the start")]
    assert "The learner waits for groups 60 % of the time, and" not in line
    assert "The learner waits for groups 60 % of the time: " in line
    alone = busy_status(reports={}, replicas=())
    assert not [line for line in status_lines(alone) if line.startswith("since the start")]
    assert not [line for line in status_lines(make_status()) if line.startswith("since the start")]


@pytest.mark.parametrize("seconds", [{}, {"waiting_for_groups": 0.0}])
def test_of_no_time_there_are_no_shares_and_no_sentence(seconds: dict[str, float]) -> None:
    status = make_status(learner_state_seconds=seconds)
    assert status_lines(status) == status_lines(make_status())
    assert told(status) == {
        "learner_shares": None,
        "generator_shares": {"generating": 0.9, "idle": 0.1},
        "bottleneck": None,
        "headline": None,
        "notes": [],
        "ess_ratio_mean": None,
        "ess_ratio_lowest": None,
        "training_time": None,
        "effective_training_time_ratio": None,
        "costs": [],
    }


def test_json_has_all_that_the_buffer_knows_and_what_limits_the_run() -> None:
    status = busy_status()
    assert msgspec.json.decode(status_json(status, steps=STEPS), type=RunStatus) == status
    sentence = (
        "The learner waits for groups 60 % of the time: add generators, or slots (generator.max_concurrent_groups) "
        "where cores or GPUs are free."
    )
    assert told(status) == {
        "learner_shares": {"waiting_for_groups": 0.6, "optimizer": 0.4},
        "generator_shares": {"generating": 0.9, "idle": 0.1},
        "bottleneck": {"bound": "generators", "sentence": sentence},
        "headline": {"concern": "bottleneck", "sentence": sentence},
        "notes": [],
        "ess_ratio_mean": None,
        "ess_ratio_lowest": None,
        "training_time": None,
        "effective_training_time_ratio": None,
        "costs": [],
    }


FAILED = FailureCount(
    rollouts=20,
    groups=20,
    first=Failure(
        failure_class=FailureClass.DATA, reason="reward_raised", message="KeyError: 'KEY' (tasks.py:30)", prompt="0+3="
    ),
)


def test_failed_rollouts_are_counted_with_the_first_cause_and_warned_of_when_they_are_many() -> None:
    fates = dict.fromkeys(Fate, Amount()) | {Fate.TRAINED: Amount(60, 60, 60), Fate.FAILED: Amount(20, 20, 0)}
    account = Account(issued=Amount(80, 80, 60), fates=fates, events={})
    status = busy_status(failures=(FAILED,), account=account)
    lines = status_lines(status, steps=STEPS)
    assert "failures: reward_raised 20 rollouts; 25% of the groups that ended failed" in lines
    assert "first reward_raised: KeyError: 'KEY' (tasks.py:30) for prompt '0+3='" in lines
    (warning,) = [line for line in lines if line.startswith("warning: ")]
    assert (
        "25 % of the groups failed and were not trained (reward_raised 20). Fix the reward (environment.reward)."
        in warning
    )
    assert not any(line.startswith("since the start") for line in lines)
    cut = [make_step(step, truncated_ratio=1.0) for step in range(3)]
    both = [line for line in status_lines(status, steps=cut) if line.startswith("warning: ")]
    assert [line.split(" of the ")[0] for line in both] == ["warning: 100 %", "warning: 25 %"]
    found = msgspec.json.decode(status_json(status, steps=STEPS))
    assert found["failures"][0]["first"]["prompt"] == "0+3="
    assert found["since_start"]["headline"]["concern"] == "failures"
    assert not any("fail" in line for line in status_lines(busy_status(), steps=STEPS))


def test_shares_of_the_generators_are_over_all_replicas() -> None:
    report = make_status().reports["generator-a"]
    blocked = msgspec.structs.replace(report, state_seconds={"blocked_on_staleness": 10.0})
    status = make_status(reports={"generator-a": report, "generator-b": blocked})
    assert since_start(status, STEPS).generator_shares == pytest.approx(
        {"generating": 0.45, "idle": 0.05, "blocked_on_staleness": 0.5}
    )


def test_the_rewards_of_each_held_out_set_are_shown() -> None:
    evals = [
        EvalRecord(name=name, version=version, wall_s=1, prompts=8, reward_mean=reward, pass_at={4: version / 8})
        for name, version, reward in (
            ("heldout", 0, 0.25), ("sums", 0, 0.5), ("heldout", 2, 0.5), ("heldout", 4, 0.75), ("heldout", 6, None),
        )
    ]  # fmt: skip
    lines = status_lines(make_status(), evals=evals)
    assert "held-out reward: 0.250 (step 0) → 0.750 (step 4)" in lines
    assert "held out at step 4: pass@4 0.5" in lines
    assert "held-out reward of sums: 0.500 (step 0)" in lines
    assert "held out at step 0: pass@4 0 (sums)" in lines
    found = msgspec.json.decode(status_json(make_status(), evals=evals))["heldout"]
    assert (found["sums"]["first"], found["heldout"]["first"]) == (0.5, 0.25)
    assert not any("held-out" in line for line in status_lines(make_status()))


def test_the_effective_sample_size_is_shown_if_the_records_have_it() -> None:
    steps = [make_step(step, ess_ratio=size) for step, size in enumerate((1.0, 0.75, 0.5))]
    assert "effective sample size of the steps: mean 0.750, lowest 0.500" in status_lines(make_status(), steps=steps)
    assert not any("effective" in line for line in status_lines(make_status()))
    since = since_start(make_status(), steps)
    assert (since.ess_ratio_mean, since.ess_ratio_lowest) == (0.75, 0.5)


def test_the_time_in_which_processes_start_counts_in_no_line_of_the_status() -> None:
    report = make_status().reports["generator-a"]

    def lines(generator_s: dict[str, float], learner_s: dict[str, float]) -> tuple[str, str]:
        reports = {"generator-a": msgspec.structs.replace(report, state_seconds=generator_s)}
        found = status_lines(make_status(reports=reports, learner_state_seconds=learner_s))
        replica = next(line for line in found if line.startswith("replica generator-a"))
        return replica.rpartition("; ")[2], next((line for line in found if line.startswith("since the start")), "")

    replica, run = lines(
        {"starting": 85.0, "generating": 6.0, "blocked_on_staleness": 9.0}, {"starting": 90.0, "x": 9.0}
    )
    assert replica == "since the start: blocked_on_staleness 60%, generating 40%"
    assert run.startswith("since the start: Generators wait for the learner 60 % of the time")
    assert lines({"starting": 85.0}, {"starting": 90.0}) == ("starting", "")


def told(status: RunStatus) -> dict[str, Any]:
    """Returns the object `since_start` of `status --json`."""
    found: dict[str, Any] = msgspec.json.decode(status_json(status))["since_start"]
    return found


def test_stored_tokens_are_counted_if_there_are_any() -> None:
    status = make_status()
    assert not any("stored tokens" in line for line in status_lines(status))
    events = {Event.TOKENS_CONTINUED: 30, Event.TOKENS_DROPPED: 4, Event.PREFIX_CONTINUED: 2}
    account = msgspec.structs.replace(status.account, events=status.account.events | events)
    lines = status_lines(make_status(account=account))
    assert "stored tokens of replicas that ended: 30 continued in 2 groups, 4 dropped" in lines
    thrown_away = {Event.TOKENS_THROWN_AWAY: 5}
    account = msgspec.structs.replace(status.account, events=status.account.events | thrown_away)
    lines = status_lines(make_status(account=account))
    assert "tokens of attempts that began again or failed: 5 thrown away" in lines


@pytest.mark.parametrize(
    ("diagnostics", "line"),
    [
        ({"turns_mean": 3.2, "tool_calls_mean": 1.5, "failed_tool_calls_mean": 0.25}, "3.20 turns, 1.50 calls"),
        ({"turns_mean": 1.0, "tool_calls_mean": 0.0, "failed_tool_calls_mean": 0.0}, "1.00 turns, 0.00 calls"),
        ({}, None),
    ],
    ids=["tools", "one turn", "no agents"],
)
def test_the_episodes_of_agents_are_shown_if_there_are_any(
    diagnostics: dict[str, float | None], line: str | None
) -> None:
    steps = [make_step(0), msgspec.structs.replace(make_step(1), diagnostics=diagnostics)]
    found = [text for text in status_lines(make_status(), steps=steps) if "episode of an agent" in text]
    assert [line in text for text in found if line] == [True] * (line is not None)
    assert len(found) == (line is not None)


def test_failed_calls_of_tools_are_counted_by_tool() -> None:
    counts = tuple(
        FailureCount(
            tool_calls=calls,
            first=Failure(
                failure_class=FailureClass.DATA, reason=TOOL_FAILED, message=f"{error}: no", tool=tool, error=error
            ),
        )
        for tool, error, calls in [("price", "KeyError", 20), ("price", "NameError", 1), ("stock", "KeyError", 3)]
    )
    lines = status_lines(make_status(failures=counts))
    [line] = [line for line in lines if line.startswith("failures: ")]
    assert line.startswith("failures: tool_failed 24 calls (price 21, stock 3); ")
    assert [line for line in lines if line.startswith("first ")] == [
        "first tool price: KeyError: no", "first tool price: NameError: no", "first tool stock: KeyError: no"
    ]  # fmt: skip


def test_a_status_says_which_share_of_the_wall_time_trained_and_where_the_rest_went() -> None:
    spent = TrainingTime(wall_s=670.0, trained_s=396.0, starting_s=160.0, again_s=68.0)
    status = make_status()
    trained = run_view(STEPS, recent=False, status=status, training=spent)
    line = (
        "effective training time: 59% of 11 min 10 s since the first start; 2 min 40 s starts, 1 min 8 s steps that "
        "were trained again, 46.0 s other"
    )
    assert line in status_text.status_lines(status, trained, now=NOW)
    found = msgspec.json.decode(status_text.status_json(status, trained, now=NOW))["since_start"]
    assert found["training_time"] == {"wall_s": 670.0, "trained_s": 396.0, "starting_s": 160.0, "again_s": 68.0}
    assert found["effective_training_time_ratio"] == 396 / 670
    waits = run_view([], recent=False, status=status, training=TrainingTime(wall_s=9.0))
    assert "effective training time" not in "\n".join(status_text.status_lines(status, waits, now=NOW))


def test_a_status_says_what_each_pool_has_cost() -> None:
    spent = [
        PoolCost(
            pool=pool, device=device, device_s=2000.0, starting_s=100.0, waiting_s=500.0, again_s=200.0, skipped_s=0.0,
            per_token_s=each,
        )
        for pool, device, each in ((Pool.LEARNER, Device.GPU, 0.25), (Pool.GENERATORS, Device.PROCESS, None))
    ]  # fmt: skip
    status = make_status()
    view = run_view(STEPS, recent=False, status=status, costs=spent)
    lost = "5% starts, 25% waiting, 10% steps that were trained again"
    lines = status_text.status_lines(status, view, now=NOW)
    assert f"device time of the learner: 2k GPU-seconds, 0.25 for each trained token; {lost}" in lines
    assert f"device time of the generators: 2k process-seconds; {lost}" in lines
    found = msgspec.json.decode(status_text.status_json(status, view, now=NOW))["since_start"]
    assert found["costs"] == msgspec.to_builtins(spent)
