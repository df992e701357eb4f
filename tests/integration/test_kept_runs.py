"""The second run of a sweep, with the Ray, the engine and the rank's process of the first one, trains what a run with
new ones trains, bit for bit, and passes the audit. Nothing else of the first run lives when the second one trains."""

import asyncio
import json
import os
import re
import signal
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import QUICKSTART, Command, in_this_process, small_overrides

from asyncrl.cli.kept import Ended
from asyncrl.cli.sweep_processes import TrainingProcess

pytestmark = [pytest.mark.integration, pytest.mark.campaign, pytest.mark.timeout(900)]

STEPS = 4
SYNCHRONOUS = [
    "staleness.max_versions=0",
    "generator.max_concurrent_groups=4",
    f"learner.total_steps={STEPS}",
    "learner.groups_logged=1000",
    "environment.reward=dense_reward:by_checksum",
]
IMPORTS = {"PYTHONPATH": os.pathsep.join(sys.path)}
FIRST, SECOND = "loss-tis", "loss-opsm"
STAYS = re.compile(
    r"gcs_server|raylet|ray::\w*Agent|/ray/.*agent|ray::IDLE|ray::(Generator|Rank)Actor|VLLM::EngineCore|resource_tracker"
)
"""Commands of the processes that may be older than the run that trains, besides the command of the run itself."""


@dataclass(frozen=True)
class Found:
    """The directories of the two runs of a sweep, and of a run of its own with the settings of the second one. `older`
    are the commands of the processes below the second run that are older than it, and `engine` those of its engine."""

    first: Path
    second: Path
    alone: Path
    older: list[str]


def older_processes(run: Path) -> list[str]:
    """Returns the commands of the processes below the command of the run that have started before it."""
    info = json.loads((run / "run.json").read_bytes())
    began_s = datetime.fromisoformat(info["started"]).timestamp() - 1  # it has whole seconds
    children = psutil.Process(info["pid"]).children(recursive=True)
    return [" ".join(each.cmdline()) for each in children if each.create_time() < began_s]


@pytest.fixture(scope="module")
def found(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("kept")
    common = ["-c", str(QUICKSTART), *small_overrides(model_path), *SYNCHRONOUS]
    swept = [*common, "algorithm.loss=tis,opsm", f"run.dir={folder}"]
    sweep = Command(["sweep", "--name", "sweep", *swept], log=folder / "sweep.log", environment=IMPORTS)
    second = folder / "sweep" / SECOND
    try:
        sweep.wait_for(lambda: bool(records(second, "steps")), timeout_s=600, what="the first step of the second run")
        older = older_processes(second)
        assert sweep.wait(300) == 0, sweep.output()[-4000:]
    finally:
        sweep.end()
    own = [*common, "algorithm.loss=opsm", f"run.dir={folder}", f"run.name={SECOND}"]
    alone = Command(["up", *own], log=folder / "alone.log", environment=IMPORTS)
    try:
        assert alone.wait(300) == 0, alone.output()[-4000:]
    finally:
        alone.end()
    return Found(first=folder / "sweep" / FIRST, second=second, alone=folder / SECOND, older=older)


def records(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def samples(run: Path) -> list[str]:
    """Returns the lines of the run's samples: prompts, tokens, log-probs, rewards and advantages."""
    return sorted(line for path in (run / "samples").glob("*.jsonl") for line in path.read_text().splitlines())


def of_steps(run: Path) -> list[list[Any]]:
    keys = ("step", "loss", "grad_norm", "reward_mean", "entropy_nats", "parity_nats", "token_staleness")
    return [[step[key] for key in keys] for step in records(run, "steps")]


def weights(run: Path) -> bytes:
    [path] = (run / "checkpoints" / f"step-{STEPS}" / "hf").glob("*.safetensors")
    return path.read_bytes()


def test_both_runs_have_one_process_one_engine_and_one_rank(found: Found) -> None:
    pids = [json.loads((run / "run.json").read_bytes())["pid"] for run in (found.first, found.second)]
    assert pids[0] == pids[1]
    log = (found.second / "logs" / "up-0.log").read_text()
    assert "has taken over the engine of the run before this one" in log
    assert "the learner takes over the ranks of the run before this one" in log
    assert any("VLLM::EngineCore" in command for command in found.older)


def test_nothing_else_of_the_first_run_lives(found: Found) -> None:
    assert [command for command in found.older if not STAYS.search(command)] == []
    for actor in ("ray::GeneratorActor", "ray::RankActor"):
        assert sum(actor in command for command in found.older) == 1


def test_it_trains_what_a_run_with_a_new_engine_trains(found: Found) -> None:
    assert len(of_steps(found.second)) == STEPS
    assert of_steps(found.second) == of_steps(found.alone)
    assert samples(found.second), "the samples of each step are recorded"
    assert samples(found.second) == samples(found.alone)
    assert weights(found.second) == weights(found.alone)


def test_its_audit_passes(found: Found) -> None:
    for run in (found.first, found.second):
        in_this_process("audit", str(run))


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_an_engine_and_a_rank_at_rest_end_with_their_process(
    number: signal.Signals, model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", IMPORTS["PYTHONPATH"])
    overrides = [*small_overrides(model_path), *SYNCHRONOUS, f"run.dir={tmp_path}", "run.name=rests"]
    command = [sys.executable, "-m", "asyncrl", "up", "-c", str(QUICKSTART), *overrides]
    training = await TrainingProcess.start(command, log=tmp_path / "rests.log")
    try:
        async with asyncio.timeout(600):
            assert await training.ended() == Ended(0, waits=True), (tmp_path / "rests.log").read_text()[-4000:]
        below = psutil.Process(training.process.pid).children(recursive=True)
        resting = [" ".join(process.cmdline()) for process in below]
        assert all(any(name in each for each in resting) for name in ("ray::RankActor", "VLLM::EngineCore"))
        training.process.send_signal(number)
        await training.process.wait()
        assert psutil.wait_procs(below, timeout=300)[1] == [], "Ray's own agents are the last, after a minute"
    finally:
        training.writer.close()
        if training.process.returncode is None:
            training.process.kill()
