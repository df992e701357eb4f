"""Adapters in a real engine: every token has the version of the adapter that sampled it, whatever is loaded
meanwhile."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_contract import PARITY_NATS
from tiny_groups import make_model

from asyncrl.config.schema import Config

pytestmark = [pytest.mark.integration, pytest.mark.campaign]

SCENARIO = Path(__file__).parent / "lora_engine_scenario.py"
MAX_VERSIONS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lora")
    lora = {"rank": 4, "alpha": 8, "target_modules": "all-linear"}
    config = Config.model_validate(
        {
            "model": {"path": str(make_model(folder / "model")), "max_length": 60, "lora": lora},
            "generator": {"max_concurrent_groups": 16, "persist_every_tokens": 2},
            "learner": {"group_size": 4},
            "staleness": {"max_versions": MAX_VERSIONS},
        }
    )
    (folder / "config.json").write_text(config.model_dump_json())
    answer = subprocess.run(
        [sys.executable, str(SCENARIO), str(folder / "config.json")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    return json.loads(answer.stdout.splitlines()[-1])


def test_every_token_of_a_sequence_has_the_version_of_its_adapter(found: Any) -> None:
    swapping = found["swapping"]
    assert swapping["tokens"] > 1000
    assert swapping["versions"] > 3, "the adapters did not change while sequences were sampled"
    assert swapping["apart_nats"] < PARITY_NATS
    assert swapping["least_apart_from_another_version_nats"] > 100 * PARITY_NATS, "the versions are too similar"


def test_generation_does_not_pause_and_directories_do_not_pile_up(found: Any) -> None:
    assert found["swapping"]["longest_pause_s"] == 0.0
    # The newest adapters of the last two loads and the new one, and one that became the newest while a group began.
    assert found["swapping"]["most_folders_of_no_running_group"] <= 4
    assert not found["folder"], "the engine left its folder in /dev/shm"


def test_a_request_keeps_its_adapter_through_more_swaps_than_the_engine_has_room_for(found: Any) -> None:
    running = found["running"]
    assert running["swaps_meanwhile"] > MAX_VERSIONS + 2
    assert running["versions"] == running["versions_of_progress"] == ["1.100"]
    assert running["apart_nats"] < PARITY_NATS


def test_a_continued_sample_has_the_version_of_each_part(found: Any) -> None:
    continued = found["running"]["continued"]
    assert continued[:10] == ["1.100"] * 10
    assert set(continued[10:]) == {"1.107"}


def test_an_adapter_that_vllm_refuses_leaves_the_one_before(found: Any) -> None:
    assert "1.201" in found["refused"]["error"]
    assert "rank" in found["refused"]["error"]
    assert found["refused"]["version"] == "1.200"
