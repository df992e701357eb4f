"""Whole tensors are put together from the files of all ranks, or refused: the files say where their parts belong."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.errors import CheckpointDamaged
from asyncrl.ranks.shard_files import STATE, SavedTensors

WHOLE = torch.arange(12.0).reshape(4, 3)


def saved(folder: Path, parts: Sequence[tuple[torch.Tensor, Any]]) -> SavedTensors:
    """Writes a file for each part of the tensor `w`, with its place."""
    (folder / STATE).mkdir()
    for number, (part, offsets) in enumerate(parts):
        places = json.dumps({"w": {"saved_offsets": offsets}})
        metadata = {"format": "pt", "DCP_SHARDING_INFO": places}
        save_file({"w": part.contiguous()}, folder / STATE / f"{number}.safetensors", metadata=metadata)
    return SavedTensors(folder)


@pytest.mark.parametrize("cuts", [[4], [1, 3], [2, 2], [4, 0], [1, 1, 1, 1]], ids=lambda cuts: "-".join(map(str, cuts)))
def test_parts_make_the_whole_tensor(cuts: list[int], tmp_path: Path) -> None:
    places = [sum(cuts[:number]) for number in range(len(cuts))]
    parts = [(part, [place, 0]) for part, place in zip(WHOLE.split(cuts), places, strict=True)]
    assert torch.equal(saved(tmp_path, parts).read("w", dtype=torch.float32), WHOLE)


def test_a_scalar_is_a_whole_tensor(tmp_path: Path) -> None:
    assert saved(tmp_path, [(torch.tensor(2.0), [])]).read("w", dtype=torch.float32) == 2.0


FORGED: dict[str, list[Any]] = {
    "far": [[10**12, 0], [0, 0]],
    "far in both dimensions": [[10**6, 10**6], [0, 0]],
    "a gap": [[0, 0], [3, 0]],
    "a gap before": [[2, 0], [4, 0]],
    "the same place": [[0, 0], [0, 0]],
    "negative": [[-2, 0], [0, 0]],
}


@pytest.mark.parametrize("kind", FORGED)
def test_parts_that_make_no_tensor_are_refused_before_memory_is_taken(kind: str, tmp_path: Path) -> None:
    parts = list(zip(WHOLE.split(2), FORGED[kind], strict=True))
    with pytest.raises(CheckpointDamaged, match="which do not make one tensor"):
        saved(tmp_path, parts).read("w", dtype=torch.float32)


def test_no_memory_of_the_process_is_read_where_parts_overlap(tmp_path: Path) -> None:
    """Two of them overlap, and their sizes add up to that of the whole tensor."""
    ones = torch.ones(1, 3)
    whole = saved(tmp_path, [(ones, [0, 0]), (ones, [0, 0]), (ones, [2, 0])]).read("w", dtype=torch.float32)
    assert whole[1].tolist() == [0.0, 0.0, 0.0]
