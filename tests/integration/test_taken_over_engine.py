"""An engine that another run takes over generates what a new engine would, bit for bit, and has nothing of its first
run but its processes. An engine that is not in order is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config

pytestmark = [pytest.mark.integration, pytest.mark.campaign, pytest.mark.timeout(300)]

SCENARIO = Path(__file__).parent / "taken_over_scenario.py"


@pytest.fixture(scope="module")
def found(model_path: str, run_config: Config) -> dict[str, Any]:
    """Returns what the scenario prints."""
    ended = subprocess.run(
        [sys.executable, str(SCENARIO), model_path, run_config.model_dump_json()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def test_it_has_the_processes_of_the_first_run_and_no_weights(found: dict[str, Any]) -> None:
    first, second = found["pids"]
    assert first == second
    assert found["version"] is None
    assert found["label at rest"] == "default", "a token of the old weights would have a version of the new run"


def test_with_equal_weights_and_seeds_it_samples_as_a_new_engine(found: dict[str, Any]) -> None:
    assert found["second"]["samples"] == found["first"]["samples"]
    assert found["second"]["scores"] == found["first"]["scores"]
    versions = {version for _, _, of_sample in found["second"]["samples"] for version in of_sample}
    assert versions == {"1.1"}


def test_it_counts_from_zero_and_has_no_cached_prefix(found: dict[str, Any]) -> None:
    assert found["second"]["counted"] == found["first"]["counted"]
    assert found["first"]["counted"][1] > 0, "the prompts of the scenario share a block"


def test_all_weights_are_sent_again(found: dict[str, Any]) -> None:
    assert (found["differing"], found["alike"] > 0) == ([], True)


@pytest.mark.parametrize(
    ("case", "said"), [("with requests", "requests"), ("torn", "not whole"), ("other settings", "max_num_seqs")]
)
def test_it_is_refused_if_it_is_not_in_order_or_would_start_with_other_settings(
    found: dict[str, Any], case: str, said: str
) -> None:
    assert said in found[case]
