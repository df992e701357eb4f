"""The end of each process of a real engine is noticed, with one worker and with two. The end of another child of the
replica's process is not taken for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SCENARIO = Path(__file__).parent / "engine_deaths_scenario.py"
CASES = os.environ.get("ENGINE_DEATHS", "1,0 2,1").split()
"""Number of workers, and the process that is killed. `ENGINE_DEATHS="1,0 2,0 2,1 2,2"` kills each one in turn."""


@pytest.mark.fault("F3")
@pytest.mark.timeout(600)
def test_an_engine_notices_the_end_of_each_of_its_processes_and_of_no_other_process(model_path: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCENARIO), model_path, *CASES],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=500, check=True,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(CASES)
    for case, engine in zip(CASES, found, strict=True):
        workers = int(case.split(",")[0])
        names = [f"VLLM::Worker_TP{number}" for number in range(workers)] if workers > 1 else []
        assert engine["names"] == ["VLLM::EngineCore", *names]
        assert not engine["mistaken"], "the end of another child was taken for the engine's"
        assert any(name in engine["cause"] for name in engine["names"]), engine["cause"]
        assert engine["left"] == []
