"""Gathering returns the rows of all ranks by rank, with any shapes. All ranks refuse columns that cannot be joined."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncrl.data.batched_data_dict import BatchedDataDict

pytestmark = pytest.mark.integration

COLUMNS_OF_RANKS: list[dict[str, Any]] = [
    {
        "ids": torch.tensor([[1, 2], [3, 4]]).t(),  # not contiguous
        "mask": torch.tensor([True, False]),
        "half": torch.tensor([0.5, -1.0], dtype=torch.bfloat16),
        "versions": torch.tensor([[7], [8]]),
        "empty": torch.zeros(2, 0),
        "names": ["a", "b"],
    },
    {
        "names": ["c"],
        "ids": torch.tensor([[5, 6, 7]]),
        "mask": torch.tensor([True]),
        "half": torch.tensor([3.0], dtype=torch.bfloat16),
        "versions": torch.tensor([[9, 9]]),
        "empty": torch.zeros(1, 0),
    },
]


def run_rank(rank: int, world_size: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store-{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240))
    try:
        whole = BatchedDataDict(COLUMNS_OF_RANKS[rank]).all_gather(dist.group.WORLD, {"versions": -1})
        one_sided = BatchedDataDict(COLUMNS_OF_RANKS[0] if rank == 0 else {}).all_gather(dist.group.WORLD)
        # Rank 1 has no rows, and other columns than rank 0.
        rowless = BatchedDataDict(COLUMNS_OF_RANKS[0] if rank == 0 else {"ids": [], "half": torch.zeros(0, 7)})
        rowless = rowless.all_gather(dist.group.WORLD)
        refused = []
        for unlike in ({"x": [1]} if rank == 0 else {"y": [1]}, {"x": [1] if rank == 0 else torch.ones(1)}):
            try:
                BatchedDataDict(unlike).all_gather(dist.group.WORLD)
            except (KeyError, NotImplementedError) as error:
                refused.append(type(error).__name__)
        torch.save(
            (whole.get_dict(), one_sided.get_dict(), rowless.get_dict(), refused),
            f"{folder}/result-{world_size}-{rank}",
        )
    finally:
        dist.destroy_process_group()


def run(world_size: int, folder: Path) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]]:
    context = torch.multiprocessing.start_processes(
        run_rank, args=(world_size, str(folder)), nprocs=world_size, join=False, start_method="forkserver"
    )
    while not context.join():
        pass
    return [torch.load(folder / f"result-{world_size}-{rank}", weights_only=True) for rank in range(world_size)]


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, column in expected.items():
        if isinstance(column, torch.Tensor):
            assert found[key].dtype == column.dtype
            assert torch.equal(found[key], column)
        else:
            assert found[key] == column


def test_two_ranks_get_all_rows_by_rank_and_refuse_alike_what_cannot_be_joined(tmp_path: Path) -> None:
    for whole, one_sided, rowless, refused in run(2, tmp_path):
        check_same(
            whole,
            {
                "ids": torch.tensor([[1, 3, 0], [2, 4, 0], [5, 6, 7]]),
                "mask": torch.tensor([True, False, True]),
                "half": torch.tensor([0.5, -1.0, 3.0], dtype=torch.bfloat16),
                "versions": torch.tensor([[7, -1], [8, -1], [9, 9]]),
                "empty": torch.zeros(3, 0),
                "names": ["a", "b", "c"],
            },
        )
        check_same(one_sided, COLUMNS_OF_RANKS[0])
        check_same(rowless, COLUMNS_OF_RANKS[0])
        assert refused == ["KeyError", "NotImplementedError"]


def test_one_rank_alone_gets_its_own_rows(tmp_path: Path) -> None:
    ((whole, one_sided, _, refused),) = run(1, tmp_path)
    check_same(whole, COLUMNS_OF_RANKS[0])
    check_same(one_sided, COLUMNS_OF_RANKS[0])
    assert refused == []
