"""An engine whose matrices are split over two workers loads unsplit weights, and computes the same as one worker."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_contract import PARITY_NATS

pytestmark = pytest.mark.integration

SCENARIO = Path(__file__).parent / "tensor_parallel_scenario.py"


def test_an_engine_of_two_workers_agrees_with_the_trainer_after_every_update(model_path: str) -> None:
    folders = os.pathsep.join([str(SCENARIO.parent.parent / "generation"), *sys.path])
    done = subprocess.run(
        [sys.executable, str(SCENARIO), model_path],
        env=os.environ | {"PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found["apart_nats"]) < PARITY_NATS
    assert found["versions"] == [["1.1"], ["1.2"]]
    assert found["processes"] == 3, "the processes are the engine's core and its two workers"
