"""A run whose processes are killed goes on from its newest checkpoint, with real Ray, vLLM and FSDP2."""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, Command, Run, small_overrides
from kills import EVERYTHING, kill

from asyncrl.complete_directory import COMPLETE

pytestmark = pytest.mark.integration

STEPS = 14
SYNCHRONOUS = [
    "staleness.max_versions=0",
    "generator.max_concurrent_groups=4",
    f"learner.total_steps={STEPS}",
    "checkpoint.every_steps=2",
    "checkpoint.keep=9",
    "run.max_restarts=9",
    "environment.reward=dense_reward:by_checksum",
]
IMPORTS = {"PYTHONPATH": os.pathsep.join(sys.path)}


def start(run_command: Run, model_path: str, run: Path) -> Command:
    return run_command(
        "up", "-c", str(QUICKSTART), f"run.dir={run.parent}", f"run.name={run.name}",
        *small_overrides(model_path), *SYNCHRONOUS, **IMPORTS,
    )  # fmt: skip


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
def test_a_run_that_is_killed_again_and_again_trains_what_an_uninterrupted_run_trains(
    run_command: Run, model_path: str, tmp_path: Path
) -> None:
    """With staleness.max_versions = 0, losses and weights are equal, bit by bit. At last, the run goes back to an
    earlier checkpoint than its newest."""
    whole = start(run_command, model_path, tmp_path / "whole")
    assert whole.wait(600) == 0, whole.output()[-4000:]

    run = tmp_path / "killed"
    command = start(run_command, model_path, run)

    def has_trained(steps: int) -> bool:
        return len(records(run, "steps")) >= steps

    def has_restarted(times: int) -> bool:
        return len(resumptions(run)) == times

    reached = 3
    for restart, targets in enumerate([[EVERYTHING], ["rank", "buffer", "weight store", "generator"]], start=1):
        command.wait_for(partial(has_trained, reached), timeout_s=400, what=f"step {reached} before {targets} die")
        for target in targets:
            kill(run, target)
        command.wait_for(partial(has_restarted, restart), timeout_s=400, what=f"restart {restart}")
        reached = resumptions(run)[-1]["step"] + 2
    command.wait_for(partial(has_trained, reached), timeout_s=400, what=f"step {reached}")
    kill(run, "row store")  # the learner makes another one, and the lost groups are generated again
    command.wait_for(partial(has_trained, reached + 1), timeout_s=400, what="a step after the row store died")
    command.process.send_signal(signal.SIGINT)
    assert command.wait(400) == 0, command.output()[-4000:]
    assert json.loads((run / "run.json").read_bytes())["state"] in ("stopped", "finished")
    folders = {path.name for path in (run / "checkpoints").iterdir()}
    assert f"step-{len(records(run, 'steps'))}" in folders, "the end of the run waits for the save of its last step"
    assert all((run / "checkpoints" / name / COMPLETE).exists() for name in folders), folders

    *_, earlier, newest = sorted(int(name.removeprefix("step-")) for name in folders)
    assert len(trained(run)) == newest
    again = run_command("resume", str(run), "--at", f"step-{earlier}", **IMPORTS)
    assert again.wait(600) == 0, again.output()[-4000:]
    assert f"resuming run killed from step {earlier}:" in again.output()
    aside = run / "checkpoints" / f"lost-{len(resumptions(run)) + 1}"
    assert [path.name for path in aside.iterdir()] == [f"step-{newest}"]
    assert (aside / f"step-{newest}" / COMPLETE).exists()

    assert trained(run) == trained(tmp_path / "whole")
    assert [step["step"] for step in records(run, "steps")] == list(range(STEPS))
    assert json.loads((run / "summary.json").read_bytes())["ledger_closed"] is True
    weights = [
        path / "checkpoints" / f"step-{STEPS}" / "hf" / "model.safetensors" for path in (tmp_path / "whole", run)
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [evaluation["version"] for evaluation in records(run, "evals")] == [0, STEPS]
    lost = [step["step"] for step in records(run, "lost-steps")]
    assert resumptions(run)[0]["step"] in lost, "the first kill came after the step that follows the checkpoint"

    audit = run_command("audit", str(run), **IMPORTS)
    assert audit.wait(200) == 0, audit.output()
    checks = [line for line in audit.output().splitlines() if "passed" in line]
    assert len(checks) == 4, audit.output()
