"""Two terminals and a Ray head: either side may start first, generators come and go, SIGTERM leaves nothing behind."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from conftest import QUICKSTART, REPOSITORY, Command, Run, engines_of, ray_session, small_overrides

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

READY_S = 240
SLOTS_OF_SECOND = 5

Engines = Callable[[], set[int]]


class Head(NamedTuple):
    """A Ray head: its address, and the folder of its session."""

    address: str
    session: str


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A Ray head that this module alone uses, with a token of its own; it ends with its process."""
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    log = tmp_path_factory.mktemp("ray") / "head.log"
    options = [
        "--num-cpus=4",
        "--labels=pool=both",
        "--port=0",
        "--include-dashboard=false",
        "--disable-usage-stats",
        "--block",
    ]
    with log.open("wb") as file:
        process = psutil.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + 120
    while not (found := re.search(r"--address='([0-9.]+:\d+)'", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.2)  # polling another process
    yield Head(found[1], ray_session(process))
    del os.environ["RAY_AUTH_TOKEN"]
    family = process.children(recursive=True)
    process.terminate()
    _, alive = psutil.wait_procs([process, *family], timeout=30)
    for left in alive:
        left.kill()


@pytest.fixture
def ray_head(head: Head) -> str:
    """The address."""
    return head.address


@pytest.fixture
def engines(head: Head) -> Engines:
    """Processes of this Ray's engines."""
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
        "generator.node_labels={pool: both}",
        "learner.node_labels={pool: both}",
        *overrides,
    )


def status(address: str, run: str) -> dict[str, Any]:
    answer = subprocess.run(
        [sys.executable, "-m", "asyncrl", "status", run, "--address", address, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
        check=False,
    )
    if answer.returncode != 0:
        return {}
    loaded: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return loaded


def steps_of(tmp_path: Path) -> int:
    path = tmp_path / tmp_path.name / "steps.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_f2_generators_join_are_killed_and_leave_and_no_group_is_lost(
    run_command: Run, ray_head: str, engines: Engines, model_path: str, tmp_path: Path
) -> None:
    name = tmp_path.name
    overrides = [
        "learner.samples_logged=4",  # one of each group of a step
        "generator.max_starts_per_s=1",  # a replica holds tickets that it has not started yet: none is ever idle
    ]
    first = deployment(run_command, "generator", ray_head, model_path, tmp_path, *overrides)
    first.wait_for(lambda: status(ray_head, name), timeout_s=READY_S, what="a run without a learner")
    learner = deployment(run_command, "learner", ray_head, model_path, tmp_path, *overrides)
    learner.wait_for(lambda: steps_of(tmp_path) >= 3, timeout_s=READY_S, what="steps")
    of_first = engines()

    # a smaller machine
    room = [f"generator.max_concurrent_groups={SLOTS_OF_SECOND}", "generator.kv_cache_gib=0.25"]
    second = deployment(run_command, "generator", ray_head, model_path, tmp_path, *overrides, *room)
    wrong = run_command(
        "learner", "--address", ray_head, "-c", str(QUICKSTART), f"run.dir={tmp_path}/other",
        f"run.name={name}", *small_overrides(model_path), *overrides, "learner.total_steps=100000",
    )  # fmt: skip
    assert wrong.wait(90) == 1
    assert "eval.prompts = 16, but the run was started with 4" in wrong.output()

    seen: list[dict[str, Any]] = []

    def both_generate() -> bool:
        seen.append(status(ray_head, name))
        views = seen[-1].get("replicas", [])
        for view in views:
            assert view["version"] is not None or not view["busy_slots"], "tickets before a version was loaded"
        committed = [report["samples"] for report in seen[-1].get("reports", {}).values()]
        return len(views) == 2 and all(view["busy_slots"] for view in views) and all(committed)

    second.wait_for(both_generate, timeout_s=READY_S, what="two replicas in the middle of rollouts")
    [_, slots_of_second] = sorted((v["busy_slots"] + v["free_slots"] for v in seen[-1]["replicas"]), reverse=True)
    assert slots_of_second == SLOTS_OF_SECOND
    [engine] = engines() - of_first
    os.kill(psutil.Process(engine).ppid(), signal.SIGKILL)  # an engine's parent is its replica's process
    killed_at = steps_of(tmp_path)
    assert second.wait(90) == 1, second.output()[-3000:]
    assert "generator.min_replicas is 1" in second.output()

    def one_is_forgotten() -> bool:
        seen.append(status(ray_head, name))
        return len(seen[-1]["replicas"]) == 1 and seen[-1]["account"]["events"]["ticket_expired"] > 0

    learner.wait_for(one_is_forgotten, timeout_s=90, what="expired tickets")
    reached = steps_of(tmp_path)
    # at most three steps' groups were under way at the kill, and lost tickets come first again
    learner.wait_for(lambda: steps_of(tmp_path) > reached + 5, timeout_s=120, what="steps with what is left")
    events = status(ray_head, name)["account"]["events"]

    first.terminate()
    assert first.wait(90) == 0, first.output()[-3000:]
    assert learner.process.poll() is None, learner.output()[-3000:]
    learner.terminate()
    assert learner.wait(90) == 0, learner.output()[-3000:]
    assert not engines(), "an engine outlived its deployment"
    assert status(ray_head, name) == {}, "the run's actors outlived the last deployment"

    assert events["replica_lost"] >= 1
    assert events["retry"] >= events["ticket_expired"]
    assert not [event for event in events if event.startswith("commit_") and events[event]], "a commit was refused"
    run = tmp_path / name
    summary = json.loads((run / "summary.json").read_bytes())
    assert summary["ledger_closed"] is True
    assert summary["groups_discarded"] == 0
    assert summary["max_token_staleness"] <= summary["max_group_staleness"] <= 2
    # Groups are numbered as they are issued: each of before the kill was trained, and none twice.
    samples = [line for file in (run / "samples").glob("step-*.jsonl") for line in file.read_text().splitlines()]
    trained = [json.loads(line)["group"] for line in samples]
    assert len(trained) == len(set(trained)) == 4 * summary["steps"]
    assert set(range(4 * (killed_at + 3))) <= set(trained)


def test_learner_first_then_a_generator_and_down_ends_what_a_killed_learner_left(
    run_command: Run, ray_head: str, engines: Engines, model_path: str, tmp_path: Path
) -> None:
    name = tmp_path.name
    learner = deployment(run_command, "learner", ray_head, model_path, tmp_path)
    learner.wait_for(lambda: "waiting for a generator" in learner.output(), timeout_s=READY_S, what="a waiting learner")
    generator = deployment(run_command, "generator", ray_head, model_path, tmp_path)
    learner.wait_for(lambda: steps_of(tmp_path) >= 2, timeout_s=READY_S, what="steps")
    for command in ("learner", "generator"):
        wrong = deployment(run_command, command, ray_head, model_path, tmp_path, "eval.prompts=5")
        assert wrong.wait(90) == 1
        assert "error: eval.prompts = 5, but the run was started with 4" in wrong.output()
        assert "starting" not in wrong.output()
    learner.process.kill()
    learner.process.wait(30)
    assert status(ray_head, name), "the buffer outlives a killed deployment"
    down = run_command("down", name, "--address", ray_head)
    assert down.wait(60) == 0, down.output()
    assert {"buffer", "weights"} <= set(re.findall(r"\w+", down.output()))
    assert status(ray_head, name) == {}
    assert generator.wait(90) == 1, generator.output()[-3000:]
    assert not engines(), "an engine outlived its deployment"
    again = run_command("down", name, "--address", ray_head)
    assert again.wait(60) == 0, again.output()
    assert f"nothing of run {name} was there" in again.output()
