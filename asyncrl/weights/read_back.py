"""Reads samples of the live parameters of a vLLM model back, and compares them with the published numbers.

It runs in vLLM's worker after an update. It finds a fault that the probe of log-probs cannot see: a parameter that was
not updated, but differs too little from the new version to change a log-prob measurably, such as an old embedding.

The places of the tensors do not come from vLLM's loader, because this comparison must find the loader's errors. They
come from the names of vLLM's modules: a fused layer such as `qkv_proj` has the tensors that `packed_modules_mapping`
names, one below the other.

The sample differs with each update. It has whole columns or rows of a matrix: two columns of an embedding (every token
has a part in them) and of each matrix that vLLM has packed for a CPU, two rows of any other matrix. A packed matrix
cannot be read, so it is multiplied with unit vectors: the products are its columns, exactly, because they are sums of
one weight and zeros. All elements of a vector are compared.

Parameters of other kinds, such as fused experts, are not read. The result names them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from asyncrl.vllm_internals import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from asyncrl.weights.manifest import ReadBack

SAMPLES = 2
"""Number of columns or rows of a matrix that are compared."""

Slices = list[tuple[torch.Tensor, slice]]
"""Published tensors and the rows of each that a worker has, in the order in which the worker has them."""


@torch.no_grad()
def read_back(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], *, seed: int) -> ReadBack:
    """Compares a sample of each live parameter of `model` with the published `weights`, which have Hugging Face names.
    `seed` chooses the sample. Changes nothing."""
    published = _renamed(model, weights)
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    draw = torch.Generator().manual_seed(seed)
    agree: dict[str, bool | None] = {}
    for path, layer in model.named_modules():
        prefix, _, last = path.rpartition(".")
        parts = [f"{prefix}.{part}" if prefix else part for part in fused.get(last, [last])]
        for name, parameter in layer.named_parameters(recurse=False):
            tensors = [published.get(f"{part}.{name}") for part in parts]
            known = [tensor for tensor in tensors if tensor is not None]
            places = _places(layer, known) if len(known) == len(parts) else None
            full_name = f"{path}.{name}"
            agree[full_name] = None if places is None else _agrees(layer, parameter, places, draw)
    return ReadBack(
        alike=frozenset(name for name, same in agree.items() if same),
        differing=frozenset(name for name, same in agree.items() if same is False),
        unread=frozenset(name for name, same in agree.items() if same is None),
    )


def _renamed(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the tensors under the names that vLLM's modules would have without fusion."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = (lambda name: name) if mapper is None else mapper.get_rename_mapper().map_name
    return {rename(name): tensor for name, tensor in weights}


def _places(layer: Any, tensors: Sequence[torch.Tensor]) -> Slices | None:
    """Returns the rows of the tensors that this worker has; None if the layer is of an unknown kind.

    With tensor parallelism, a worker has one of several equal pieces. Workers share a piece if there are fewer pieces
    than workers, as for the heads of keys and values.
    """
    indices = getattr(layer, "shard_indices", None)
    if indices is not None:  # an embedding or an output head
        rows = slice(indices.org_vocab_start_index, indices.org_vocab_end_index)
        return [(tensor, rows) for tensor in tensors]
    sizes: Sequence[int] | None = getattr(layer, "output_partition_sizes", None)
    rank, workers = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
    if workers == 1 or sizes is None:
        return [(tensor, slice(None)) for tensor in tensors]
    if len(sizes) != len(tensors):
        return None
    places = []
    for tensor, size in zip(tensors, sizes, strict=True):
        first = _first(tensor.shape[0], size, rank=rank, workers=workers)
        places.append((tensor, slice(first, first + size)))
    return places


def _first(whole: int, size: int, *, rank: int, workers: int) -> int:
    """Returns the index at which a worker's piece of `size` elements begins among `whole` elements.

    >>> [_first(8, 4, rank=rank, workers=4) for rank in range(4)]
    [0, 0, 4, 4]
    """
    return size * (rank * (whole // size) // workers)


def _agrees(layer: Any, parameter: torch.Tensor, places: Slices, draw: torch.Generator) -> bool | None:
    """Returns whether the live parameter is as published; None if it cannot be compared."""
    method, is_matrix = getattr(layer, "quant_method", None), places[0][0].ndim == 2
    is_embedding = isinstance(method, UnquantizedEmbeddingMethod)
    if is_matrix and not (is_embedding or isinstance(method, UnquantizedLinearMethod)):
        return None
    if places[0][0].ndim > 2:
        return None
    compared = list(_samples(layer, parameter, places, draw) if is_matrix else [(parameter, _joined(places))])
    if not compared or any(live.shape != expected.shape for live, expected in compared):
        return None
    return all(_same(live.cpu(), expected.to(live.dtype)) for live, expected in compared)


def _samples(
    layer: Any, parameter: torch.Tensor, places: Slices, draw: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields samples of a live matrix (columns or rows), each with the published numbers at the same places. Yields
    nothing if the published rows are not as many as the live ones."""
    columns_in = places[0][0].shape[1]
    own_columns: int = getattr(layer, "input_size_per_partition", columns_in)
    first = _first(columns_in, own_columns, rank=getattr(layer, "tp_rank", 0), workers=getattr(layer, "tp_size", 1))
    is_embedding = isinstance(layer.quant_method, UnquantizedEmbeddingMethod)
    packed = hasattr(layer, "cpu_linear")
    if packed or is_embedding:
        columns = torch.randint(own_columns, (SAMPLES,), generator=draw)
        expected = _joined([(tensor[:, first + columns], rows) for tensor, rows in places])
        if packed:
            units = torch.nn.functional.one_hot(columns, own_columns).to(places[0][0].dtype)
            products = layer.quant_method.apply(layer, units).T
            yield products[: len(expected)], expected  # vLLM pads an embedding with more rows
        if parameter.numel():
            yield parameter[: len(expected), columns.to(parameter.device)], expected
        return
    rows_in = sum(len(_rows(place)) for place in places)
    if rows_in != parameter.shape[0]:
        return
    picked = torch.randint(rows_in, (SAMPLES,), generator=draw)
    expected = torch.stack([_row(places, index)[first : first + own_columns] for index in picked.tolist()])
    yield parameter[picked.to(parameter.device)], expected


def _rows(place: tuple[torch.Tensor, slice]) -> range:
    tensor, rows = place
    return range(*rows.indices(len(tensor)))


def _row(places: Slices, index: int) -> torch.Tensor:
    """Returns row `index` of the worker's matrix, as it was published."""
    for place in places:
        rows = _rows(place)
        if index < len(rows):
            return place[0][rows[index]]
        index -= len(rows)
    raise IndexError(index)


def _joined(places: Slices) -> torch.Tensor:
    return torch.cat([tensor[rows] for tensor, rows in places])


def _same(live: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((live == expected) | (live.isnan() & expected.isnan())).all())
