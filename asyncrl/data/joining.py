"""Columns of several batches, or of several ranks, as one.

Gathering is a collective: every rank learns every rank's columns before a tensor moves, so that a batch that cannot be
joined is refused on all ranks alike and none is left waiting for one that has given up. The group's own timeout bounds
every wait.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


def join_columns(columns: list[Any], *, pad_value: float, key: str) -> Any:
    """The rows of `columns`, all lists or all tensors of as many dimensions, right-padded to the longest on dim 1.

    NotImplementedError for anything else; `key` is the column's name in it.
    """
    if all(isinstance(column, list) for column in columns):
        return [item for column in columns for item in column]
    dimensions = {column.ndim if isinstance(column, torch.Tensor) else 0 for column in columns}
    if 0 in dimensions or len(dimensions) > 1:
        found = sorted({f"{c.ndim}-D tensor" if isinstance(c, torch.Tensor) else type(c).__name__ for c in columns})
        raise NotImplementedError(
            f"column {key!r}: lists, or tensors of as many dimensions (1 or more), can be joined, got {found}"
        )
    if dimensions == {1}:
        return torch.cat(columns)
    longest = max(column.shape[1] for column in columns)
    padded = []
    for column in columns:
        # functional.pad counts from the last dimension: (0, 0) for each after dim 1
        widths = (0, 0) * (column.ndim - 2) + (0, longest - column.shape[1])
        padded.append(torch.nn.functional.pad(column, widths, value=pad_value))
    return torch.cat(padded)


class _TensorHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def gather_columns(columns: Mapping[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """The columns of every rank of `group`, by rank. A collective; not differentiable.

    Shapes may differ between ranks, and a rank may have no columns at all. A tensor arrives on its rank's kind of
    device, which the group's backend must serve; a list travels pickled.
    """
    mine = {
        key: _TensorHeader(tuple(column.shape), column.dtype, column.device.type)
        if isinstance(column, torch.Tensor)
        else column
        for key, column in columns.items()
    }
    headers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(headers, mine, group=group)

    gathered: list[dict[str, Any]] = [dict(header) for header in headers]
    # the order of the first rank that has a column, the same on all ranks: these are collectives
    for key in dict.fromkeys(key for header in headers for key in header):
        tensor_headers = [header.get(key) for header in headers]
        if any(isinstance(header, _TensorHeader) for header in tensor_headers):
            for rank, tensor in _gather_tensor(columns.get(key), tensor_headers, group).items():
                gathered[rank][key] = tensor
    return gathered


def _gather_tensor(mine: Any, headers: list[Any], group: dist.ProcessGroup | None) -> dict[int, torch.Tensor]:
    """One column's tensors by rank. `headers` has something else at a rank without a tensor of that name."""
    known = {rank: header for rank, header in enumerate(headers) if isinstance(header, _TensorHeader)}
    nbytes = max(header.nbytes for header in known.values())
    device = mine.device if isinstance(mine, torch.Tensor) else torch.device(next(iter(known.values())).device_type)
    # as bytes: backends know few dtypes, and ranks of unequal shapes need one size anyway
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if isinstance(mine, torch.Tensor) and mine.numel():
        as_bytes = mine.detach().contiguous().reshape(-1).view(torch.uint8)
        sent[: len(as_bytes)] = as_bytes
    received = [torch.empty_like(sent) for _ in headers]
    if nbytes:
        dist.all_gather(received, sent, group=group)
    return {
        # a copy, or each tensor would keep the longest rank's buffer alive
        rank: received[rank][: header.nbytes].clone().view(header.dtype).reshape(header.shape)
        for rank, header in known.items()
    }
