"""Pools are placed on the nodes with their labels, replicas share a GPU, and the error of a failed placement says
why."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.campaign]

SCENARIO = Path(__file__).parent / "placement_scenario.py"
NICENESS = "RAY_worker_niceness"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCENARIO)],
        env={name: value for name, value in os.environ.items() if name == NICENESS or not name.startswith("RAY_")},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    placed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return placed


def test_ranks_are_on_the_nodes_that_their_labels_name(found: dict[str, Any]) -> None:
    assert found["ranks"] == ["learn", "learn"]
    assert found["swapped ranks"] == ["gen", "gen"]


def test_two_replicas_of_half_a_gpu_share_one(found: dict[str, Any]) -> None:
    assert found["replicas"] == ["gen", "gen"]
    assert found["gpus"] == [[0], [0]]


def test_what_has_no_room_says_what_it_asked_for_and_what_there_is(found: dict[str, Any]) -> None:
    assert "2 learner ranks" in found["no such label"]
    assert "on nodes with pool=none (learner.node_labels); the cluster has 2 CPU" in found["no such label"]
    assert "1 engines" in found["no node for engines"]
    assert "on nodes with pool=none (generator.node_labels)" in found["no node for engines"]
    assert "0.5 GPUs, on nodes with pool=gen (generator.node_labels); the cluster has 2 CPU" in found["no GPU left"]
    assert "1 GPU (0 free)" in found["no GPU left"]


def test_a_process_in_its_constructor_is_told_from_an_actor_without_room(found: dict[str, Any]) -> None:
    assert found["processes"] == {"importing": True, "nowhere": False}
