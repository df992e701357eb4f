"""The digests of weights: equal for every cut between rows, and different after any change of one element."""

import itertools
import multiprocessing
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed import FileStore, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.ranks import digest
from asyncrl.ranks.digest import KINDS, MULTILINEAR, combined, model_digest, tensor_digest

SHAPES = {"matrix": (7, 5), "vector": (7,), "cube": (3, 2, 2), "scalar": ()}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def test_both_kinds_keep_their_values() -> None:
    """The records of a run are compared with digests that a later version of asyncrl computes."""
    matrix = torch.arange(6.0).reshape(3, 2)
    found = [tensor_digest("w", rows, kind=kind) for kind in KINDS for rows in (matrix, matrix[1])]
    assert found == [0x636BAED162B6DFBD, 0xE24BDEC5B2332F44, 0x3941754AD5511051, 0x42395F97D04B75D7]


def plain_digest(name: str, rows: list[list[int]], *, nbytes: int) -> int:
    """Returns the multilinear digest of rows of words, computed with Python's integers."""

    def mixed(number: int) -> int:
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            number = (number % 2**64 ^ number % 2**64 >> 32) * factor
        return number % 2**64 ^ number % 2**64 >> 32

    seed = xxhash.xxh3_64_intdigest(name.encode())
    return combined(
        mixed(nbytes + sum(word * (mixed(column + 1) | 1) for column, word in enumerate(row)) + mixed(seed + number))
        for number, row in enumerate(rows)
    )


@every_dtype
def test_the_multilinear_digest_is_that_of_a_plain_computation(dtype: torch.dtype) -> None:
    matrix = weights(dtype)["matrix"]
    words = matrix.view(torch.int16 if dtype.itemsize == 2 else torch.int32).tolist()
    plain = plain_digest("matrix", words, nbytes=5 * dtype.itemsize)
    assert tensor_digest("matrix", matrix, kind=MULTILINEAR) == plain


@every_kind
@every_dtype
def test_parts_of_a_tensor_add_up_wherever_it_is_cut(dtype: torch.dtype, kind: str) -> None:
    """Also with empty parts."""
    for name, tensor in weights(dtype).items():
        if not tensor.ndim:
            continue
        whole = tensor_digest(name, tensor, kind=kind)
        for one, other in itertools.combinations_with_replacement(range(len(tensor) + 1), 2):
            parts = [(0, tensor[:one]), (one, tensor[one:other]), (other, tensor[other:])]
            assert combined(tensor_digest(name, rows, start=start, kind=kind) for start, rows in parts) == whole


@every_kind
@every_dtype
def test_the_digest_of_a_vector_does_not_depend_on_how_much_is_mixed_at_once(dtype: torch.dtype, kind: str) -> None:
    """2²⁰ elements of xxh3, and 2²¹ of the other kind, are mixed at once, counted from the start of each part."""
    vector = torch.arange(2**21 + 7).to(dtype)
    whole = tensor_digest("v", vector, start=2**63, kind=kind)
    for cut in (1, 5, 2**20, 2**21 + 2):
        parts = [(2**63, vector[:cut]), (2**63 + cut, vector[cut:])]
        assert combined(tensor_digest("v", rows, start=start, kind=kind) for start, rows in parts) == whole


@every_dtype
def test_the_multilinear_digest_does_not_depend_on_how_much_is_computed_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a row is longer than what is computed at once, and if rows of several tensors are mixed together."""
    tensors = torch.nn.ParameterDict(weights(dtype) | {"wide": torch.nn.Parameter(torch.randn(2, 40).to(dtype))})
    whole = digest.digests_by_tensor(tensors, rank=0, kind=MULTILINEAR)
    assert whole == {name: tensor_digest(name, tensor, kind=MULTILINEAR) for name, tensor in tensors.items()}
    for at_once in (1, 2, 3, 16):
        monkeypatch.setattr(digest, "_WORDS_AT_ONCE", at_once)
        assert digest.digests_by_tensor(tensors, rank=0, kind=MULTILINEAR) == whole


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


class Operations(TorchDispatchMode):
    """Notes the largest new tensor, bytes, and how often a number is read from a device."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.reads = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        new = isinstance(found, torch.Tensor) and not function.is_view and not function._schema.is_mutable
        self.largest = max(self.largest, found.nbytes if new else 0)
        self.reads += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default)
        return found


@pytest.mark.parametrize("shape", [(400, 100), (40_000,), (2, 20_000), (40_000, 1)])
def test_the_multilinear_digest_needs_little_memory_and_reads_nothing_on_the_way(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The totals of all tensors are read together, at the end."""
    monkeypatch.setattr(digest, "_WORDS_AT_ONCE", 1000)
    tensors = torch.nn.ParameterDict({str(i): torch.nn.Parameter(torch.ones(shape)) for i in range(3)})
    with Operations() as operations:
        digest.digests_by_tensor(tensors, rank=0, kind=MULTILINEAR)
    assert operations.largest == 8 * 1000
    assert operations.reads == 0


@every_kind
@every_dtype
@pytest.mark.parametrize("name", SHAPES)
def test_one_bit_another_place_or_another_name_change_the_digest(name: str, dtype: torch.dtype, kind: str) -> None:
    tensor = weights(dtype)[name]
    unchanged = tensor_digest(name, tensor, kind=kind)
    bits = 8 * tensor.element_size()
    for place, bit in itertools.product(range(tensor.numel()), (0, bits // 2, bits - 1)):  # one ulp, …, the sign
        flipped = tensor.clone()
        flipped.view(-1).view(WORDS[tensor.element_size()])[place] ^= 1 << bit if bit < bits - 1 else -(1 << bit)
        assert tensor_digest(name, flipped, kind=kind) != unchanged
    assert tensor_digest("other", tensor, kind=kind) != unchanged
    if tensor.ndim:
        assert tensor_digest(name, tensor.flip(0), kind=kind) != unchanged
        assert tensor_digest(name, tensor, start=1, kind=kind) != unchanged


@every_kind
@every_dtype
def test_elements_and_rows_that_change_places_change_the_digest(dtype: torch.dtype, kind: str) -> None:
    tensor = weights(dtype)["matrix"]
    unchanged = tensor_digest("w", tensor, kind=kind)
    for one, other in itertools.combinations(range(tensor.numel()), 2):
        swapped = tensor.clone().view(-1)
        swapped[[one, other]] = swapped[[other, one]]
        assert tensor_digest("w", swapped.view_as(tensor), kind=kind) != unchanged
    for one, other in itertools.combinations(range(len(tensor)), 2):
        swapped = tensor.clone()
        swapped[[one, other]] = swapped[[other, one]]
        assert tensor_digest("w", swapped, kind=kind) != unchanged


@every_kind
def test_tensors_that_change_places_change_the_digest_of_the_model(kind: str) -> None:
    one, other = torch.randn(3, 4), torch.randn(3, 4)
    models = [torch.nn.ParameterDict({"a": a, "b": b}) for a, b in ((one, other), (other, one))]
    first, second = (model_digest(model, rank=0, kind=kind) for model in models)
    assert first != second


@every_kind
@every_dtype
def test_signs_of_zero_and_bits_of_nan_count(dtype: torch.dtype, kind: str) -> None:
    """Two signs of a row, too: torch computes modulo 2⁶⁴, where two times the highest bit is 0."""
    zeros = torch.zeros(2, 3, dtype=dtype)
    nans = torch.full_like(zeros, torch.nan)
    other_nans = (nans.view(WORDS[zeros.element_size()]) + 1).view(dtype)
    assert other_nans.isnan().all()
    variants = [zeros, nans, other_nans]
    for places in ([0], [1], [0, 1], [0, 2], [0, 1, 2]):
        negative = zeros.clone()
        negative[0, places] = -0.0
        assert torch.equal(negative, zeros)
        variants.append(negative)
    assert len({tensor_digest("w", each, kind=kind) for each in variants}) == len(variants)


@every_kind
def test_zeros_at_the_end_of_a_row_count(kind: str) -> None:
    digests = [tensor_digest("w", torch.zeros(2, width), kind=kind) for width in range(1, 5)]
    digests += [tensor_digest("w", torch.tensor([[1, 2, 3]], dtype=dtype), kind=kind) for dtype in WORDS.values()]
    assert len(set(digests)) == len(digests)


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
        parts += [model_digest(Weights(sharded), rank=rank, kind=kind) for kind in KINDS]
    (folder / f"{rank}.txt").write_text(" ".join(map(str, parts)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_and_copies_has_the_digest_of_the_whole_weights(ranks: int, tmp_path: Path) -> None:
    whole = [combined(tensor_digest(name, tensor, kind=kind) for name, tensor in weights().items()) for kind in KINDS]
    tied = [model_digest(Weights(weights()), rank=0, kind=kind) for kind in KINDS]
    assert tied == whole, "a tied tensor counts once, under its first name"
    processes = [
        multiprocessing.get_context("forkserver").Process(target=digest_on_rank, args=(rank, ranks, tmp_path))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    parts = [list(map(int, (tmp_path / f"{rank}.txt").read_text().split())) for rank in range(ranks)]
    assert [combined(each) for each in zip(*parts, strict=True)] == whole * (2 if ranks == 4 else 1)
