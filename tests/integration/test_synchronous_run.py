"""A run with η = 0 is stopped and goes back to an early checkpoint. Its processes are killed, and it trains the same.
test_run_from_python.py compares the batches of such a run with those of a sequential loop."""

import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, Command, Run, in_this_process, small_overrides
from kills import kill
from onlookers import reported

from asyncrl.complete_directory import COMPLETE
from asyncrl.views.headline import Bound

pytestmark = [pytest.mark.integration, pytest.mark.campaign]

STEPS = 16
STOPPED_AT = 12
"""The uninterrupted run is stopped when it has so many steps. It then may train a few more."""
EARLY = 2
"""The step of the checkpoint to which the run goes back."""
ADVICE = "raise staleness.max_versions while the effective sample size is high"
SYNCHRONOUS = [
    "staleness.max_versions=0",
    "generator.max_concurrent_groups=4",
    f"learner.total_steps={STEPS}",
    "checkpoint.every_steps=2",
    "checkpoint.keep=9",
    "run.max_restarts=9",
    "learner.groups_logged=1000",
    "environment.reward=dense_reward:by_checksum",
    "run.shutdown_grace_s=120",  # on a busy machine, too, some of it is left for the evaluation of the last weights
]
IMPORTS = {"PYTHONPATH": os.pathsep.join(sys.path)}


def up(model_path: str, run: Path) -> list[str]:
    """Returns the arguments of a command that starts the run."""
    directory = [f"run.dir={run.parent}", f"run.name={run.name}"]
    return ["up", "-c", str(QUICKSTART), *directory, *small_overrides(model_path), *SYNCHRONOUS]


@pytest.fixture(scope="module")
def stopped(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a run that was stopped before its end."""
    run = tmp_path_factory.mktemp("synchronous") / "run"
    command = Command(up(model_path, run), log=run.with_suffix(".log"), environment=IMPORTS)
    try:
        command.wait_for(lambda: len(records(run, "steps")) >= STOPPED_AT, timeout_s=400, what=f"step {STOPPED_AT}")
        command.process.send_signal(signal.SIGINT)
        assert command.wait(400) == 0, command.output()[-4000:]
        assert records(run, "evals")[-1]["version"] == len(records(run, "steps")), "the last weights are evaluated"
    finally:
        command.end()
    return run


@pytest.fixture(scope="module")
def whole(stopped: Path) -> Path:
    """Returns a copy of that directory, for comparisons with what the run trains when it goes on."""
    return Path(shutil.copytree(stopped, stopped.with_name("whole")))


def records(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def resumptions(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "run.json").read_bytes()).get("resumed", [])
    return found


def trained(run: Path) -> list[tuple[float, float, float]]:
    return [(step["loss"], step["grad_norm"], step["reward_mean"]) for step in records(run, "steps")]


@pytest.mark.fault("F6", "F7", "F8", "F34", "F36", "F37", "F38")
@pytest.mark.timeout(1500)
def test_a_run_whose_processes_are_killed_trains_what_an_uninterrupted_run_trains(
    stopped: Path, whole: Path, run_command: Run
) -> None:
    """Losses and weights are equal, bit by bit. The run goes back to an earlier checkpoint than its newest. While it
    trains the steps again, it is killed."""
    run = stopped
    found = reported(whole)
    assert found.bound is Bound.STALENESS, "the two sides wait for each other in turn"
    assert ADVICE in found.sentence
    assert json.loads((run / "run.json").read_bytes())["state"] in ("stopped", "finished")
    folders = {path.name for path in (run / "checkpoints").iterdir()}
    assert f"step-{len(trained(whole))}" in folders, "the end of the run waits for the save of its last step"
    assert all((run / "checkpoints" / name / COMPLETE).exists() for name in folders), folders
    command = run_command("resume", str(run), "--trust", "--at", f"step-{EARLY}", **IMPORTS)

    def has_trained(steps: int) -> bool:
        return len(records(run, "steps")) >= steps

    def has_restarted(times: int) -> bool:
        return len(resumptions(run)) == times

    command.wait_for(partial(has_restarted, 1), timeout_s=400, what="the start of the resumed run")
    assert f"resuming run {run.name} from step {EARLY}:" in command.output()
    aside = run / "checkpoints" / "lost-2"
    assert {path.name for path in aside.iterdir()} == {name for name in folders if int(name[5:]) > EARLY}
    assert all((aside / path.name / COMPLETE).exists() for path in aside.iterdir())

    reached = EARLY + 3
    command.wait_for(partial(has_trained, reached), timeout_s=400, what=f"step {reached}, after which its parts die")
    for target in ("rank", "buffer", "weight store", "generator"):
        kill(run, target)
    command.wait_for(partial(has_restarted, 2), timeout_s=400, what="a restart")
    reached = resumptions(run)[-1]["step"] + 2
    command.wait_for(partial(has_trained, reached), timeout_s=400, what=f"step {reached}")
    kill(run, "row store")  # the learner makes another one, and the lost groups are generated again
    assert command.wait(600) == 0, command.output()[-4000:]

    expected = trained(whole)
    assert trained(run)[: len(expected)] == expected
    assert [step["step"] for step in records(run, "steps")] == list(range(STEPS))
    assert json.loads((run / "summary.json").read_bytes())["ledger_closed"] is True
    again = [path for path in aside.iterdir() if (run / "checkpoints" / path.name).exists()]
    assert len(again) > 2, "no checkpoints to compare"
    for path in again:
        weights = [folder / path.name / "hf" / "model.safetensors" for folder in (aside, run / "checkpoints")]
        assert weights[0].read_bytes() == weights[1].read_bytes(), path.name
    assert [evaluation["version"] for evaluation in records(run, "evals")] == [0, STEPS]
    lost = [step["step"] for step in records(run, "lost-steps")]
    assert sorted(set(lost)) == list(range(EARLY, len(expected))), "the steps that it trained before it went back"
    assert lost.count(resumptions(run)[1]["step"]) > 1, "the first kill came after the step that follows the checkpoint"

    audit = in_this_process("audit", str(run))
    assert len([line for line in audit.splitlines() if "passed" in line]) == 4, audit
