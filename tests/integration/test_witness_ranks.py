"""Healthy updates pass the witness on one rank and on two, for every named objective; planted faults are found by the
check that is meant for them (spawned processes, gloo)."""

import pickle
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from own_losses import HEALTHY, MISTAKEN
from tiny_groups import make_model
from witness_scenarios import FAULTS, MODES, healthy_steps, run_rank, steps_with_faults

from asyncrl.algorithms.presets import PRESETS
from asyncrl.metrics.numbers import WITNESSED
from asyncrl.witness.judge import CHECKS

pytestmark = pytest.mark.integration

Results = Callable[[int], dict[str, Any]]
WORLDS = [pytest.param(1, marks=pytest.mark.campaign), 2]
"""Faults are planted on two ranks, in the campaign on one rank too."""


def results_of(folder: Path, work: Callable[..., dict[str, Any]], *worlds: int) -> dict[int, dict[str, Any]]:
    """Returns the results of the first rank by number of ranks."""
    make_model(folder / "model")
    contexts = [
        torch.multiprocessing.start_processes(
            run_rank, args=(world_size, folder, work), nprocs=world_size, join=False, start_method="forkserver"
        )
        for world_size in worlds
    ]
    for context in contexts:
        while not context.join():
            pass
    return {world: pickle.loads((folder / f"results-{world}-0.pkl").read_bytes()) for world in worlds}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return results_of(tmp_path_factory.mktemp("healthy"), healthy_steps, 1, 2)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns a function that returns the results of steps with faults for a number of ranks."""

    @cache
    def of(world: int) -> dict[str, Any]:
        return results_of(tmp_path_factory.mktemp("planted"), steps_with_faults, world)[world]

    return of


def check_healthy(results: dict[str, Any], *, steps: int) -> None:
    assert len(results) == steps
    # the bound of a budget, and choices by covariance, depend on all tokens of the step
    assert all("bounds" in found for name, found in results.items() if name.endswith((" m2po", "_cov")))
    for name, found in results.items():
        assert set(found) >= {"counts", "rows", "advantages", "coefficients", "optimizer"}, name
        for check, ratio in found.items():
            assert ratio < 0.7, (name, check)
    # some objectives gate all tokens of the drawn group, which then has no gradient
    assert sum("gradient" in found for found in results.values()) > 0.8 * steps


@pytest.mark.parametrize(("world", "steps"), [(1, len(PRESETS) + 2 * 4 + 3 * 2), (2, 3 * 4 + 3 * 2)])
def test_healthy_updates_pass(healthy: dict[int, dict[str, Any]], world: int, steps: int) -> None:
    check_healthy(healthy[world], steps=steps)


@pytest.mark.campaign
def test_updates_of_every_objective_pass_in_every_mode_and_precision(tmp_path: Path) -> None:
    for found in results_of(tmp_path, partial(healthy_steps, every=True), 1, 2).values():
        check_healthy(found, steps=len(PRESETS) * len(MODES) * 2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(planted: Results, world: int, fault: str) -> None:
    check, _ = FAULTS[fault]
    assert planted(world)[f"fault: {fault}"][check] > 1.0
    assert all(ratio < 0.7 for ratio in planted(world)[f"after: {fault}"].values()), "the next update is healthy"


@pytest.mark.parametrize("world", WORLDS)
def test_equal_samples_share_a_plain_pass(planted: Results, world: int) -> None:
    found, passes = planted(world)["equal samples"]
    assert found["gradient"] < 0.7
    assert found["rows"] < 0.7
    assert passes == 1


@pytest.mark.parametrize("world", WORLDS)
def test_a_failed_check_ends_the_step_before_the_optimizer(planted: Results, world: int) -> None:
    found = planted(world)["stopped"]
    assert "The witness's check `coefficients` found: the ranks' backward pass gave trained token" in found["message"]
    assert found["unchanged"]
    assert all(ratio < 0.7 for ratio in found["after"].values()), "the ranks stay usable"
    assert found["nonfinite"] == (True, {}), "a step that is not finite is skipped, and not witnessed"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode", ["packed", "padded"])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_loss_of_the_users_own_passes_and_the_kind_of_its_witness_is_known(
    planted: Results, world: int, mode: str, name: str
) -> None:
    found, (_, kind) = planted(world)[f"own {mode}: {name}"], HEALTHY[name]
    if name != "pairwise" or mode == "packed":  # padded micro-batches divide the group
        assert found["coefficients"].kind == kind
    assert all(finding.ratio < 0.7 for finding in found.values())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode", ["packed", "padded"])
@pytest.mark.parametrize("name", MISTAKEN)
def test_a_mistake_in_a_loss_of_the_users_own_is_found(planted: Results, world: int, mode: str, name: str) -> None:
    found = planted(world)[f"own {mode}: {name}"]
    finding = found["coefficients"]
    assert finding.failed
    assert not any(other.failed for check, other in found.items() if check != "coefficients"), "one error is enough"
    assert MISTAKEN[name][1] in finding.message
    assert "It is a bug of your function, algorithm.loss, or of asyncrl" in finding.message


@pytest.mark.parametrize("world", WORLDS)
def test_a_witnessed_step_trains_as_another_one_and_skips_what_is_not_finite(planted: Results, world: int) -> None:
    assert planted(world)["untouched"], "a loss that changes its rows finds those of the step"
    assert planted(world)["overflow"], "infinite gradients skip the step"
    for mode in ("packed", "padded"):
        found = planted(world)[f"random, not drawn: {mode}"]
        assert not any(finding.failed for finding in found.values()), "a random loss has no two equal passes"


@pytest.mark.parametrize("world", WORLDS)
def test_with_a_learning_rate_of_0_the_weights_stay_and_all_checks_pass(planted: Results, world: int) -> None:
    for same, has_gradient, rate, findings in planted(world)["fixed"]:
        assert (same, has_gradient, rate) == (True, True, 0.0)
        assert set(findings) >= {"counts", "rows", "advantages", "coefficients", "gradient", "optimizer", "frozen"}
        assert all(finding.ratio < 0.7 for finding in findings.values())


def test_the_numbers_of_a_step_have_every_check() -> None:
    assert tuple(WITNESSED) == CHECKS
