"""Separate commands on a Ray of two nodes, one for the learner and one for generators: either side may start first,
generators join and leave, and SIGTERM leaves no process behind."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import QUICKSTART, Command, Run, engines_of, in_this_process, small_overrides
from kills import kill
from onlookers import expect_advice
from two_nodes import CONTROL_ACTORS, PLACEMENT, TwoNodes, pools_of, two_nodes

from asyncrl.cli.restarts import RESTART_MENDS
from asyncrl.errors import PREEMPTED
from asyncrl.views.headline import Bound

pytestmark = [pytest.mark.integration, pytest.mark.campaign]

READY_S = 480
SLOTS_OF_SECOND = 5
IMPORTS = {"PYTHONPATH": os.pathsep.join(sys.path)}

Engines = Callable[[], set[int]]
Status = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """A Ray that only this module uses."""
    with two_nodes(tmp_path_factory.mktemp("ray")) as nodes:
        yield nodes


@pytest.fixture
def ray_head(head: TwoNodes) -> str:
    """Returns the address of the Ray."""
    return head.address


@pytest.fixture(scope="module")
def status(head: TwoNodes) -> Iterator[Status]:
    """Returns a function that returns the status of a run by name; {} if there is no such run."""
    command = [sys.executable, str(Path(__file__).with_name("status_answers.py")), head.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(run: str) -> dict[str, Any]:
            print(run, file=process.stdin, flush=True)
            while not (line := process.stdout.readline()).startswith("{"):
                assert line, "the program that answers with the status has ended"
            answer: dict[str, Any] = json.loads(line)
            return answer

        yield ask
        process.stdin.close()


@pytest.fixture
def engines(head: TwoNodes) -> Engines:
    """Returns a function that lists the processes of this Ray's engines."""
    return lambda: engines_of(head.session)


def deployment(
    run_command: Run, command: str, address: str, model_path: str, tmp_path: Path, *overrides: str
) -> Command:
    return run_command(
        command,
        "--address",
        address,
        "-c",
        str(QUICKSTART),
        f"run.dir={tmp_path}",
        f"run.name={tmp_path.name}",
        *small_overrides(model_path),
        "learner.total_steps=100000",
        "eval.prompts=4",
        *PLACEMENT,
        *overrides,
        **IMPORTS,
    )


def steps_of(tmp_path: Path) -> int:
    path = tmp_path / tmp_path.name / "steps.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def has_steps(tmp_path: Path, least: int) -> bool:
    return steps_of(tmp_path) >= least


def resumed_at(run: Path) -> int | None:
    """Returns the step from which the run was resumed; None if it was not."""
    resumed = json.loads((run / "run.json").read_bytes()).get("resumed", [])
    return resumed[-1]["step"] if resumed else None


@pytest.mark.fault("F2", "F6", "F42")
def test_a_generator_and_the_learner_are_killed_and_no_group_is_lost(
    run_command: Run, head: TwoNodes, ray_head: str, engines: Engines, status: Status, model_path: str, tmp_path: Path
) -> None:
    name = tmp_path.name
    overrides = [
        "learner.groups_logged=4",  # all groups of a step
        "generator.max_starts_per_s=2",  # a replica always has tickets to start, so it is never idle
        "checkpoint.every_steps=2",
    ]
    first = deployment(run_command, "generator", ray_head, model_path, tmp_path, *overrides)
    first.wait_for(lambda: status(name), timeout_s=READY_S, what="a run without a learner")
    learner = deployment(run_command, "learner", ray_head, model_path, tmp_path, *overrides)
    learner.wait_for(lambda: steps_of(tmp_path) >= 3, timeout_s=READY_S, what="steps")
    assert pools_of("RankActor", head) == ["learner"]
    assert pools_of("GeneratorActor", head) == ["generator"]
    assert [pools_of(actor, head) for actor in CONTROL_ACTORS] == [["learner"]] * len(CONTROL_ACTORS)
    of_first = engines()

    # the second deployment stands for a smaller machine
    room = [f"generator.max_concurrent_groups={SLOTS_OF_SECOND}", "generator.kv_cache_gib=0.25"]
    room += ["generator.max_restarts=0"]
    second = deployment(run_command, "generator", ray_head, model_path, tmp_path, *overrides, *room)
    seen: list[dict[str, Any]] = []

    def both_generate() -> bool:
        seen.append(status(name))
        views = seen[-1].get("replicas", [])
        for view in views:
            assert view["version"] is not None or not view["reserved_groups"], (
                "a replica has tickets before it has loaded a version"
            )
        committed = [report["samples"] for report in seen[-1].get("reports", {}).values()]
        return len(views) == 2 and all(view["reserved_groups"] for view in views) and all(committed)

    second.wait_for(both_generate, timeout_s=READY_S, what="two replicas in the middle of rollouts")
    assert pools_of("GeneratorActor", head) == ["generator", "generator"]
    reports = seen[-1]["reports"].values()
    assert min(report["slots"] for report in reports) == SLOTS_OF_SECOND
    assert all(0 <= report["running_groups"] <= report["slots"] for report in reports)
    [engine] = engines() - of_first
    os.kill(psutil.Process(engine).ppid(), signal.SIGKILL)  # the parent of an engine is its replica's process
    killed_at = steps_of(tmp_path)
    assert second.wait(240) == RESTART_MENDS, second.output()[-3000:]
    assert "generator.min_replicas is 1" in second.output()
    assert "generator.max_restarts = 0" in second.output()

    def one_is_forgotten() -> bool:
        seen.append(status(name))
        return len(seen[-1]["replicas"]) == 1 and seen[-1]["account"]["events"]["ticket_expired"] > 0

    learner.wait_for(one_is_forgotten, timeout_s=240, what="expired tickets")
    reached = steps_of(tmp_path)
    # At the kill, the groups of at most three steps were in flight, and lost tickets are issued first again.
    learner.wait_for(lambda: steps_of(tmp_path) > reached + 5, timeout_s=360, what="steps with what is left")
    events = status(name)["account"]["events"]

    run, left = tmp_path / name, engines()
    os.kill(json.loads((run / "run.json").read_bytes())["pid"], signal.SIGKILL)
    learner.wait_for(lambda: resumed_at(run) is not None, timeout_s=240, what="a learner that starts again")
    learner.wait_for(
        lambda: steps_of(tmp_path) > (resumed_at(run) or 0) + 3, timeout_s=360, what="steps of the second learner"
    )
    assert engines() == left, "the generators must outlive the learner"

    first.terminate()
    assert first.wait(240) == PREEMPTED, first.output()[-3000:]
    assert learner.process.poll() is None, learner.output()[-3000:]
    learner.terminate()
    assert learner.wait(240) == PREEMPTED, learner.output()[-3000:]
    assert not engines(), "an engine outlived its deployment"
    assert status(name) == {}, "the run's actors outlived the last deployment"

    assert events["replica_lost"] >= 1
    assert events["retry"] >= events["ticket_expired"]
    assert not [event for event in events if event.startswith("commit_") and events[event]], "a commit was refused"
    summary = json.loads((run / "summary.json").read_bytes())
    assert summary["ledger_closed"] is True
    assert summary["groups_discarded"] == 0
    assert summary["max_token_staleness"] <= summary["max_group_staleness"] <= 2
    # Groups are numbered in the order of their issue. Each group from before the kill was trained, and none twice.
    samples = [line for file in (run / "samples").glob("step-*.jsonl") for line in file.read_text().splitlines()]
    steps_and_groups = {(sample["step"], sample["group"]) for sample in map(json.loads, samples)}
    trained = [group for _, group in steps_and_groups]
    assert len(trained) == len(set(trained)) == 4 * summary["steps"]
    assert set(range(4 * (killed_at + 3))) <= set(trained)
    in_this_process("audit", str(run))


def test_a_generator_waits_for_the_learner_that_sigterm_has_ended_and_serves_the_next_one(
    run_command: Run, ray_head: str, engines: Engines, status: Status, model_path: str, tmp_path: Path
) -> None:
    name, run = tmp_path.name, tmp_path / tmp_path.name
    own = ["learner.groups_logged=4", "checkpoint.every_steps=1000", "generator.max_starts_per_s=2"]
    wait = ["generator.wait_for_learner_s=600"]
    generator = deployment(run_command, "generator", ray_head, model_path, tmp_path, *own, *wait)
    learner = deployment(run_command, "learner", ray_head, model_path, tmp_path, *own)
    for stop in (1, 2):
        learner.wait_for(partial(has_steps, tmp_path, 3 * stop), timeout_s=READY_S, what="steps")
        of_generator = engines()
        learner.terminate()
        assert learner.wait(240) == PREEMPTED, learner.output()[-3000:]
        at = steps_of(tmp_path)
        generator.wait_for(lambda: "waiting for the next one" in generator.output(), timeout_s=60, what="a wait")
        learner = deployment(run_command, "learner", ray_head, model_path, tmp_path, *own)
        learner.wait_for(partial(has_steps, tmp_path, at + 1), timeout_s=READY_S, what="a step")
        assert resumed_at(run) == at, "no step may be lost"
        assert engines() == of_generator, "the engines must outlive the learner"
    learner.terminate()
    assert learner.wait(240) == PREEMPTED, learner.output()[-3000:]
    assert generator.process.poll() is None, generator.output()[-3000:]
    down = run_command("down", name, "--address", ray_head)
    assert down.wait(240) == 0, down.output()
    assert generator.wait(240) == 0, generator.output()[-3000:]
    assert not engines(), "an engine outlived its deployment"
    assert status(name) == {}, "the run's actors outlived the last deployment"
    summary = json.loads((run / "summary.json").read_bytes())
    assert (summary["ledger_closed"], summary["lost_steps"], summary["restarts"]) == (True, 0, 2)
    in_this_process("audit", str(run))


@pytest.mark.fault("F41")
def test_the_index_of_the_rows_is_killed_and_the_run_goes_on_with_a_new_generator(
    run_command: Run, head: TwoNodes, ray_head: str, engines: Engines, model_path: str, tmp_path: Path
) -> None:
    overrides = ["learner.groups_logged=4", "generator.max_starts_per_s=2", "checkpoint.every_steps=2"]
    first = deployment(run_command, "generator", ray_head, model_path, tmp_path, *overrides)
    learner = deployment(run_command, "learner", ray_head, model_path, tmp_path, *overrides)
    learner.wait_for(lambda: steps_of(tmp_path) >= 3, timeout_s=READY_S, what="steps")
    run = tmp_path / tmp_path.name
    kill(run, "row index", also=head.nodes.values())
    learner.wait_for(lambda: first.process.poll() is not None, timeout_s=360, what="a generator without its buffer")
    second = deployment(run_command, "generator", ray_head, model_path, tmp_path, *overrides)
    learner.wait_for(
        lambda: resumed_at(run) is not None and steps_of(tmp_path) > (resumed_at(run) or 0) + 3,
        timeout_s=READY_S,
        what="steps of the second learner",
    )
    second.terminate()
    assert second.wait(240) == PREEMPTED, second.output()[-3000:]
    learner.terminate()
    assert learner.wait(240) == PREEMPTED, learner.output()[-3000:]
    assert not engines(), "an engine outlived its deployment"
    summary = json.loads((run / "summary.json").read_bytes())
    assert (summary["ledger_closed"], summary["groups_discarded"]) == (True, 0)
    samples = [line for file in (run / "samples").glob("step-*.jsonl") for line in file.read_text().splitlines()]
    trained = [group for _, group in {(sample["step"], sample["group"]) for sample in map(json.loads, samples)}]
    assert len(trained) == len(set(trained)) == 4 * summary["steps"]
    in_this_process("audit", str(run))


def test_learner_first_then_a_generator_and_down_ends_what_a_killed_learner_left(
    run_command: Run, ray_head: str, engines: Engines, status: Status, model_path: str, tmp_path: Path
) -> None:
    name = tmp_path.name
    own = [
        "checkpoint.every_steps=0",
        "environment.reward=dense_reward:by_checksum",  # otherwise the advice is about rewards that are all equal
        "learner.group_size=8", "learner.batching=padded", "learner.micro_batch_size=1",  # a slow learner
    ]  # fmt: skip
    learner = deployment(run_command, "learner", ray_head, model_path, tmp_path, *own)
    learner.wait_for(lambda: "waiting for a generator" in learner.output(), timeout_s=READY_S, what="a waiting learner")
    generator = deployment(run_command, "generator", ray_head, model_path, tmp_path, *own)
    learner.wait_for(lambda: steps_of(tmp_path) >= 2, timeout_s=READY_S, what="steps")
    expect_advice(learner, tmp_path / name, bound=Bound.LEARNER, advice="Generators wait for the learner")
    wrong = deployment(run_command, "generator", ray_head, model_path, tmp_path, *own, "eval.prompts=5")
    assert wrong.wait(240) == 1
    assert "error: eval.prompts = 5, but the run was started with 4" in wrong.output()
    assert "starting" not in wrong.output()
    learner.process.kill()
    learner.process.wait(120)
    left = status(name)
    assert left, "the buffer must outlive a killed deployment"
    # The dead learner's weights are gone, and there is no checkpoint. A new learner would train those of model.path
    # under the numbers of the dead one's versions, so it is refused, once the dead one has been silent for long enough.
    again = deployment(run_command, "learner", ray_head, model_path, tmp_path, *own)
    assert again.wait(240) == 1
    assert re.search(r"error: run '\S+' has trained \d+ steps.*`asyncrl down", again.output(), re.DOTALL), (
        again.output()
    )
    now = status(name)
    assert (now["version"], now["published"]) == (left["version"], left["published"])
    down = run_command("down", name, "--address", ray_head)
    assert down.wait(240) == 0, down.output()
    assert {"buffer", "weights"} <= set(re.findall(r"\w+", down.output()))
    assert status(name) == {}
    assert generator.wait(240) == 0, generator.output()[-3000:]
    assert not engines(), "an engine outlived its deployment"
    again = run_command("down", name, "--address", ray_head)
    assert again.wait(240) == 0, again.output()
    assert f"run {name} had no processes and no files to remove" in again.output()
