"""An engine of one process, or of two workers that have half of every matrix each, loads the shards of two learner
ranks, which come over two transports, and computes the same as the trainer. It does not outlive the process that
started it, even if that process is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engine_contract import PARITY_NATS

pytestmark = pytest.mark.integration

SCENARIO = Path(__file__).parent / "lone_engine_scenario.py"


@pytest.mark.parametrize(("workers", "processes"), [(1, 1), (2, 3)], ids=["one process", "core and two workers"])
@pytest.mark.fault("F29")
@pytest.mark.timeout(600)
def test_an_engine_agrees_with_the_trainer_after_every_update_and_ends_when_its_parent_is_killed(
    model_path: str, workers: int, processes: int
) -> None:
    # This test does not use Ray, because Ray itself ends some child processes of a killed worker.
    with subprocess.Popen(
        [sys.executable, str(SCENARIO), model_path, str(workers)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        line = next((line for line in parent.stdout if line.startswith("{")), "")
        assert line, "the engine did not start"
        found = json.loads(line)
        left = [psutil.Process(pid) for pid in found["everything"]]
        parent.kill()
    try:
        assert psutil.wait_procs(left, timeout=60)[1] == []
    finally:
        for process in left:
            if process.is_running():
                process.kill()
    assert len(found["engine"]) == processes
    assert set(found["engine"]) < set(found["everything"]), "the list must also have Python's resource tracker"
    assert max(found["apart_nats"]) < PARITY_NATS
    assert found["versions"] == [["1.1"], ["1.2"]]
