"""The reference stays the first weights after any failure, and no rank waits forever (spawned processes, gloo)."""

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_scenarios import DEADLINE_S, FAILURES, WORLD, run_lone_rank, run_reference_rank
from tiny_groups import make_model

pytestmark = pytest.mark.integration

FAULTS, CALLS = ("silent", "dead"), ("train", "a pass")
SLACK_S = 180.0
"""Timeout on a busy machine, seconds. The default deadline of gloo is half an hour."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    make_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """The results by rank of `STEPS` steps on two ranks, and of as many with a reference that fails meanwhile."""
    torch.multiprocessing.start_processes(run_reference_rank, args=(folder,), nprocs=WORLD, start_method="forkserver")
    return [pickle.loads((folder / f"reference-{rank}.pkl").read_bytes()) for rank in range(WORLD)]


@pytest.mark.parametrize("run", ["calm", "failing"])
def test_the_reference_gives_the_same_bits_after_training_and_after_each_failure(ranks: Any, run: str) -> None:
    for rank in ranks:
        first, *later = rank[run]["reference"]
        assert len(later) == 1 + (len(FAILURES) if run == "failing" else 0)
        assert all(np.array_equal(column, first) for column in later)
        assert np.array_equal(first, rank["calm"]["reference"][0])
        assert np.abs(rank[run]["live"] - first).max() > 0.1, "the live policy has not changed"


def test_a_reference_that_fails_half_way_leaves_live_weights_and_optimizer_bit_for_bit(ranks: Any) -> None:
    (first, second), (third, fourth) = [rank["failing"]["kept"] for rank in ranks]
    assert (first, third) == ((True, True), (True, True))
    assert (second, fourth) == ((False, True), (True, True)), "only rank 1 fails at the end"


def test_training_goes_on_as_if_the_reference_had_not_failed(ranks: Any) -> None:
    for rank in ranks:
        calm, failing = rank["calm"]["state"], rank["failing"]["state"]
        assert calm.keys() == failing.keys()
        assert all(np.array_equal(calm[name], failing[name]) for name in calm)


@pytest.fixture(scope="module")
def lone(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What rank 0 found without its peer, by fault and call. Both calls of a fault wait for their peer at the same
    time."""
    for fault in FAULTS:
        contexts = [
            torch.multiprocessing.start_processes(
                run_lone_rank, args=(fault, call, folder), nprocs=WORLD, join=False, start_method="forkserver"
            )
            for call in CALLS
        ]
        for context in contexts:
            while not context.join():
                pass
    cases = itertools.product(FAULTS, CALLS)
    return {case: pickle.loads((folder / f"lone-{' '.join(case)}.pkl").read_bytes()) for case in cases}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_peer_that_does_not_come_ends_a_collective_within_its_deadline(lone: Any, fault: str, call: str) -> None:
    """`train` first waits in a collective of the ranks' control group, a pass of the model in one of FSDP."""
    found = lone[fault, call]
    assert found["error"], "the call must fail without its peer"
    assert found["seconds"] < DEADLINE_S + SLACK_S
    if fault == "silent":
        assert found["seconds"] > DEADLINE_S / 2, "the call must wait for its deadline"
