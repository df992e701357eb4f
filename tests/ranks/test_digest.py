"""The digest of weights: equal for every cut between rows, and different after any change of one element."""

import multiprocessing
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from asyncrl.ranks.digest import combined, model_digest, tensor_digest

SHAPES = {"matrix": (7, 5), "vector": (7,), "cube": (3, 2, 2), "scalar": ()}


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parts_of_a_tensor_add_up_wherever_it_is_cut(dtype: torch.dtype) -> None:
    for name, tensor in weights(dtype).items():
        if not tensor.ndim:
            continue
        whole = tensor_digest(name, tensor)
        for cut in range(len(tensor) + 1):
            parts = tensor_digest(name, tensor[:cut]), tensor_digest(name, tensor[cut:], start=cut)
            assert combined(parts) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_digest_of_a_vector_does_not_depend_on_how_much_is_mixed_at_once(dtype: torch.dtype) -> None:
    """2²⁰ elements are mixed at once, counted from the start of each part."""
    vector = torch.arange(2**20 + 7).to(dtype)
    whole = tensor_digest("v", vector, start=2**63)
    for cut in (1, 5, 2**20, 2**20 + 2):
        parts = tensor_digest("v", vector[:cut], start=2**63), tensor_digest("v", vector[cut:], start=2**63 + cut)
        assert combined(parts) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_digest_of_a_long_vector_needs_little_memory(dtype: torch.dtype) -> None:
    """A file of a run directory from elsewhere may have any length, and take no place on the disk."""
    vector = torch.zeros(2**24, dtype=dtype)
    tracemalloc.start()
    try:
        tensor_digest("v", vector)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", SHAPES)
def test_one_bit_another_place_or_another_name_change_the_digest(name: str) -> None:
    tensor = weights()[name]
    unchanged = tensor_digest(name, tensor)
    for place in range(tensor.numel()):
        flipped = tensor.clone()
        flipped.view(-1).view(torch.int32)[place] ^= 1
        assert tensor_digest(name, flipped) != unchanged
    assert tensor_digest("other", tensor) != unchanged
    if tensor.ndim:
        assert tensor_digest(name, tensor.flip(0)) != unchanged
        assert tensor_digest(name, tensor, start=1) != unchanged


class Weights(torch.nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor))
        self.tied = self.matrix


def digest_on_rank(rank: int, ranks: int, folder: Path) -> None:
    """Writes the parts of this rank: with all ranks sharing one copy, and with two copies if there are four ranks."""
    init_process_group("gloo", store=FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    parts = []
    for shape in [(ranks,), (2, ranks // 2)] if ranks == 4 else [(ranks,)]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
        places = [Shard(0)] if len(shape) == 1 else [Replicate(), Shard(0)]
        sharded: dict[str, torch.Tensor] = {
            name: distribute_tensor(tensor, mesh, places) if tensor.ndim else tensor
            for name, tensor in weights().items()
        }
        assert isinstance(sharded["matrix"], DTensor)
        parts.append(model_digest(Weights(sharded), rank=rank))
    (folder / f"{rank}.txt").write_text(" ".join(map(str, parts)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_and_copies_has_the_digest_of_the_whole_weights(ranks: int, tmp_path: Path) -> None:
    whole = combined(tensor_digest(name, tensor) for name, tensor in weights().items())
    assert model_digest(Weights(weights()), rank=0) == whole, "a tied tensor counts once, under its first name"
    processes = [
        multiprocessing.get_context("forkserver").Process(target=digest_on_rank, args=(rank, ranks, tmp_path))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    parts = [list(map(int, (tmp_path / f"{rank}.txt").read_text().split())) for rank in range(ranks)]
    assert [combined(each) for each in zip(*parts, strict=True)] == [whole] * (2 if ranks == 4 else 1)
