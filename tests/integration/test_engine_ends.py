"""An engine of one process, or of two workers that have half of every matrix each, loads the shards of two learner
ranks, which come over two transports, and computes the same as the trainer. The end of each of its processes is
noticed, and the end of another child of the replica's process is not taken for it. An engine does not outlive the
process that started it, even if that process is killed.

One process starts all engines, because the import of vLLM takes ten seconds of a core.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_contract import PARITY_NATS

pytestmark = [pytest.mark.integration, pytest.mark.campaign, pytest.mark.timeout(600)]

SCENARIO = Path(__file__).parent / "engine_ends_scenario.py"
CASES = ("1,0", "2,0", "2,1", "2,2")
"""Number of workers, and the process that is killed: each one in turn."""


@pytest.fixture(scope="module")
def ended(model_path: str) -> Iterator[list[dict[str, Any]]]:
    """Returns what the scenario prints for each engine. The process of the last engine has been killed."""
    # This test does not use Ray, because Ray itself ends some child processes of a killed worker.
    with subprocess.Popen(
        [sys.executable, str(SCENARIO), model_path, *CASES],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        lines = (json.loads(line) for line in parent.stdout if line.startswith("{"))
        found = list(itertools.islice(lines, len(CASES) + 1))
        assert len(found) == len(CASES) + 1, "an engine did not start"
        processes = [psutil.Process(pid) for pid in found[-1]["everything"]]
        parent.kill()
    found[-1]["left"] = [process.pid for process in psutil.wait_procs(processes, timeout=60)[1]]
    yield found
    for process in processes:
        if process.is_running():
            process.kill()


def test_an_engine_agrees_with_the_trainer_after_every_update(ended: list[dict[str, Any]]) -> None:
    for engine, case in zip(ended, [*CASES, "2"], strict=True):
        assert max(engine["apart_nats"]) < PARITY_NATS
        assert engine["versions"] == [["1.1"], ["1.2"]]
        workers = int(case.split(",")[0])
        names = [f"VLLM::Worker_TP{number}" for number in range(workers)] if workers > 1 else []
        assert engine["names"] == ["VLLM::EngineCore", *names]


@pytest.mark.parametrize("number", range(len(CASES)), ids=CASES)
@pytest.mark.fault("F3")
def test_the_end_of_each_of_its_processes_is_noticed(number: int, ended: list[dict[str, Any]]) -> None:
    engine = ended[number]
    assert not engine["mistaken"], "the end of another child was taken for the engine's"
    assert any(name in engine["cause"] for name in engine["names"]), engine["cause"]
    assert engine["left"] == []


@pytest.mark.fault("F29")
def test_no_process_of_an_engine_outlives_the_one_that_started_it(ended: list[dict[str, Any]]) -> None:
    lone = ended[-1]
    assert len(lone["engine"]) == 3, "the core and two workers"
    assert set(lone["engine"]) < set(lone["everything"]), "the list must also have Python's resource tracker"
    assert lone["left"] == []
