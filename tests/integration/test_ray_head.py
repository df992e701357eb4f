"""Ray's head dies while a run trains: the run names the cause, starts Ray again, and goes on."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from conftest import QUICKSTART, Run, small_overrides
from kills import kill

pytestmark = pytest.mark.integration


@pytest.mark.fault("F39")
@pytest.mark.timeout(1200)
def test_a_run_whose_ray_loses_its_head_starts_ray_again_and_goes_on(
    run_command: Run, model_path: str, tmp_path: Path
) -> None:
    """The run trains on until Ray's processes give up their head, which takes a minute if Ray is left as it is."""
    run = tmp_path / "headless"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
    command = run_command(
        "up", "-c", str(QUICKSTART), f"run.dir={tmp_path}", f"run.name={run.name}", *small_overrides(model_path),
        "learner.total_steps=100000", "checkpoint.every_steps=5", "environment.reward=dense_reward:by_checksum",
        **environment,
    )  # fmt: skip

    def steps() -> int:
        path = run / "steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def resumed_at() -> list[int]:
        return [resumption["step"] for resumption in json.loads((run / "run.json").read_bytes()).get("resumed", [])]

    command.wait_for(lambda: steps() > 6, timeout_s=400, what="steps before the head dies")
    kill(run, "Ray head")
    command.wait_for(resumed_at, timeout_s=400, what="a restart")
    assert "Failed to connect to GCS" in command.output()
    [step] = resumed_at()
    assert step >= 5
    command.wait_for(lambda: steps() > step, timeout_s=400, what="a step after the restart")
    command.process.send_signal(signal.SIGINT)
    assert command.wait(400) == 0, command.output()[-4000:]
    audit = run_command("audit", str(run), **environment)
    assert audit.wait(200) == 0, audit.output()
