"""A whole run with an adapter: it resumes when Ray's head has died, and its audit computes every step again."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, Run, small_overrides
from kills import kill

from asyncrl.complete_directory import COMPLETE
from asyncrl.errors import PREEMPTED

pytestmark = [pytest.mark.integration, pytest.mark.campaign]

NAME = "lora"
IMPORTS = {"PYTHONPATH": os.pathsep.join(sys.path)}


def steps_of(run: Path) -> list[dict[str, Any]]:
    path = run / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.fault("F39")
@pytest.mark.timeout(900)
def test_a_run_with_an_adapter_whose_ray_loses_its_head_starts_ray_again_and_goes_on(
    run_command: Run, model_path: str, tmp_path: Path
) -> None:
    """The run trains on until Ray's processes give up their head, which takes a minute if Ray is left as it is."""
    run = tmp_path / NAME
    overrides = [
        *small_overrides(model_path),
        f"run.name={NAME}",
        f"run.dir={tmp_path}",
        "model.lora={rank: 4, alpha: 8}",
        "learner.ranks=2",
        "learner.batching=packed",
        "generator.top_k=8",
        "learner.optimizer.learning_rate=1e-3",
        "learner.total_steps=100000",
        "generator.max_starts_per_s=4",  # a step a second, because the audit computes all of them again
        "environment.reward=dense_reward:by_checksum",
        "checkpoint.every_steps=2",
        "audit.keep_weights=all",
        "algorithm.overrides={penalties: [{kind: k3, beta: 0.01, q: reference}]}",
    ]
    command = run_command(
        "up", "-c", str(QUICKSTART), *overrides, **IMPORTS, RAY_gcs_rpc_server_reconnect_timeout_s="5"
    )

    def resumed_at() -> list[int]:
        return [resumption["step"] for resumption in json.loads((run / "run.json").read_bytes()).get("resumed", [])]

    command.wait_for(lambda: len(steps_of(run)) > 3, timeout_s=400, what="steps before the head dies")
    kill(run, "Ray head")
    command.wait_for(resumed_at, timeout_s=400, what="a restart")
    assert "Failed to connect to GCS" in command.output()
    [step] = resumed_at()
    assert step >= 2
    command.wait_for(lambda: len(steps_of(run)) > step + 1, timeout_s=400, what="steps after the restart")
    pids = [command.process.pid, json.loads((run / "run.json").read_bytes())["pid"]]
    for pid in pids:  # `ray job stop` and systemd signal each process, and the command's parent passes its signal on
        os.kill(pid, signal.SIGTERM)
    assert command.wait(400) == PREEMPTED, command.output()[-4000:]
    steps = steps_of(run)
    info = json.loads((run / "run.json").read_bytes())
    assert (info["state"], info["exit_reason"].split(",")[0]) == ("stopped", "asked to end by SIGTERM")
    assert (run / "checkpoints" / f"step-{len(steps)}" / COMPLETE).exists(), "trained steps were lost"
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert all(0 <= step["staleness_max"] <= 2 for step in steps if "staleness_max" in step)

    audit = run_command("audit", str(run), **IMPORTS)
    assert audit.wait(300) == 0, audit.output()
    assert f"{len(steps)} steps follow each other" in audit.output()
    assert f"{len(steps)} steps computed again" in audit.output()

    refused = run_command("resume", str(run), "--trust", "model.lora.alpha=16", **IMPORTS)
    assert refused.wait(120) == 2
    assert "model.lora.alpha" in refused.output()
