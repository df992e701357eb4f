"""Joins the columns of several batches, or of several ranks.

Gathering is one collective, after which every rank has the columns of all ranks. Therefore all ranks refuse a batch
that cannot be joined, and no rank waits for a rank that has given up. The group's timeout limits the wait.
"""

from collections.abc import Mapping
from typing import Any

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


def gather_columns(columns: Mapping[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Returns the columns of every rank of `group`, in rank order. It is a collective and is not differentiable.

    Shapes may differ between ranks, and a rank may have no columns. Columns are sent pickled, tensors by way of the
    CPU. A tensor arrives on the device of this rank's column, or on the kind of device that it had on its rank.
    """
    # a copy, because pickling a view would send the storage of the whole batch
    on_cpu = {
        key: column.detach().to("cpu", copy=True) if isinstance(column, torch.Tensor) else column
        for key, column in columns.items()
    }
    devices = {key: column.device.type for key, column in columns.items() if isinstance(column, torch.Tensor)}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (on_cpu, devices), group=group)
    own = {key: column.device for key, column in columns.items() if isinstance(column, torch.Tensor)}
    return [
        {key: column.to(own.get(key, kinds[key])) if key in kinds else column for key, column in found.items()}
        for found, kinds in gathered
    ]
