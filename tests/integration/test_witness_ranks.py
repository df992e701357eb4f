"""Healthy updates pass the witness on one rank and on two, for every named objective; planted faults are found by the
check that is meant for them (spawned processes, gloo)."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_groups import make_model
from witness_scenarios import FAULTS, MODES, run_rank

from asyncrl.algorithms.presets import PRESETS
from asyncrl.metrics.numbers import WITNESSED
from asyncrl.witness.judge import CHECKS

pytestmark = pytest.mark.integration

WORLDS = (1, 2)


def results_of(folder: Path, *, every: bool = False) -> dict[int, dict[str, Any]]:
    """Returns the results of the first rank by number of ranks."""
    make_model(folder / "model")
    contexts = [
        torch.multiprocessing.start_processes(
            run_rank, args=(world_size, folder, every), nprocs=world_size, join=False, start_method="forkserver"
        )
        for world_size in WORLDS
    ]
    for context in contexts:
        while not context.join():
            pass
    return {world: pickle.loads((folder / f"results-{world}-0.pkl").read_bytes()) for world in WORLDS}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return results_of(tmp_path_factory.mktemp("witness"))


def check_healthy(results: dict[str, Any], *, steps: int) -> None:
    healthy = {name: found for name, found in results.items() if name.split()[0] in MODES}
    assert len(healthy) == steps
    for name, found in healthy.items():
        assert set(found) >= {"counts", "rows", "advantages", "coefficients", "optimizer"}, name
        for check, ratio in found.items():
            assert ratio < 0.7, (name, check)
    # some objectives gate all tokens of the drawn group, which then has no gradient
    assert sum("gradient" in found for found in healthy.values()) > 0.8 * steps


@pytest.mark.parametrize(("world", "steps"), [(1, len(PRESETS) + 5 * 3), (2, 6 * 3)])
def test_healthy_updates_pass(results: dict[int, dict[str, Any]], world: int, steps: int) -> None:
    check_healthy(results[world], steps=steps)


@pytest.mark.campaign
def test_updates_of_every_objective_pass_in_every_mode_and_precision(tmp_path: Path) -> None:
    for found in results_of(tmp_path, every=True).values():
        check_healthy(found, steps=len(PRESETS) * len(MODES) * 2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(results: dict[int, dict[str, Any]], world: int, fault: str) -> None:
    check, _ = FAULTS[fault]
    assert results[world][f"fault: {fault}"][check] > 1.0
    assert all(ratio < 0.7 for ratio in results[world][f"after: {fault}"].values()), "the next update is healthy"


@pytest.mark.parametrize("world", WORLDS)
def test_a_failed_check_ends_the_step_before_the_optimizer(results: dict[int, dict[str, Any]], world: int) -> None:
    found = results[world]["stopped"]
    assert "The witness's check `coefficients` found: the ranks' backward pass gave trained token" in found["message"]
    assert found["unchanged"]
    assert all(ratio < 0.7 for ratio in found["after"].values()), "the ranks stay usable"
    assert found["nonfinite"] == (True, {}), "a step that is not finite is skipped, and not witnessed"


def test_the_numbers_of_a_step_have_every_check() -> None:
    assert tuple(WITNESSED) == CHECKS
