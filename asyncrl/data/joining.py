"""Joins the columns of several batches, or of several ranks.

Gathering is a collective. Every rank learns the columns of all ranks before any tensor moves. Therefore all ranks
refuse a batch that cannot be joined, and no rank waits for a rank that has given up. The group's timeout limits every
wait.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


def join_columns(columns: list[Any], *, pad_value: float, key: str) -> Any:
    """Joins the rows of `columns`. They must be all lists, or all tensors with the same number of dimensions; tensors
    are right-padded to the longest on dim 1.

    Raises NotImplementedError for anything else. `key` is the column's name in the message.
    """
    if all(isinstance(column, list) for column in columns):
        return [item for column in columns for item in column]
    dimensions = {column.ndim if isinstance(column, torch.Tensor) else 0 for column in columns}
    if 0 in dimensions or len(dimensions) > 1:
        found = sorted({f"{c.ndim}-D tensor" if isinstance(c, torch.Tensor) else type(c).__name__ for c in columns})
        raise NotImplementedError(
            f"column {key!r}: cannot join {found}; it must be lists only, or tensors with the same number of "
            "dimensions (at least 1)"
        )
    if dimensions == {1}:
        return torch.cat(columns)
    longest = max(column.shape[1] for column in columns)
    padded = []
    for column in columns:
        # functional.pad starts at the last dimension: (0, 0) for each dimension after dim 1
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
    """Returns the columns of every rank of `group`, in rank order. It is a collective and is not differentiable.

    Shapes may differ between ranks, and a rank may have no columns. A tensor arrives on the same kind of device as on
    its rank; the group's backend must support that device. A list is sent pickled.
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
    # These are collectives, so all ranks need the same order of columns: by the first rank that has the column.
    for key in dict.fromkeys(key for header in headers for key in header):
        tensor_headers = [header.get(key) for header in headers]
        if any(isinstance(header, _TensorHeader) for header in tensor_headers):
            for rank, tensor in _gather_tensor(columns.get(key), tensor_headers, group).items():
                gathered[rank][key] = tensor
    return gathered


def _gather_tensor(mine: Any, headers: list[Any], group: dist.ProcessGroup | None) -> dict[int, torch.Tensor]:
    """Gathers one column. Returns its tensors by rank. `headers[rank]` is not a _TensorHeader if that rank has none."""
    known = {rank: header for rank, header in enumerate(headers) if isinstance(header, _TensorHeader)}
    nbytes = max(header.nbytes for header in known.values())
    device = mine.device if isinstance(mine, torch.Tensor) else torch.device(next(iter(known.values())).device_type)
    # Tensors are sent as bytes: backends support few dtypes, and ranks with different shapes need one common size.
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if isinstance(mine, torch.Tensor) and mine.numel():
        as_bytes = mine.detach().contiguous().reshape(-1).view(torch.uint8)
        sent[: len(as_bytes)] = as_bytes
    received = [torch.empty_like(sent) for _ in headers]
    if nbytes:
        dist.all_gather(received, sent, group=group)
    return {
        # A copy: a view would keep the buffer of the longest rank alive.
        rank: received[rank][: header.nbytes].clone().view(header.dtype).reshape(header.shape)
        for rank, header in known.items()
    }
