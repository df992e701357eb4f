"""A batch as a dictionary of columns: tensors with rows first, or lists with one entry a row.

Right padding everywhere. A `UserDict`, not a `dict`, so that a batch is never mistaken for plain keyword arguments.
"""

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch


class BatchedDataDict(UserDict[str, Any]):
    """Columns of one batch. All have the same number of rows."""

    @property
    def size(self) -> int:
        """Rows: the length of the first column, 0 without any."""
        return len(next(iter(self.data.values()))) if self.data else 0

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """The rows of all batches, in order.

        Lists and 1-D tensors are concatenated; 2-D tensors are right-padded to the longest with `pad_value_dict[key]`
        (0 unless given), tensors of more dimensions likewise on dim 1. KeyError when a batch that is not empty lacks a
        column, NotImplementedError for a column of another type.
        """
        # an empty batch has no columns to miss
        filled = [batch for batch in batches if len(batch)]
        if not filled:
            return cls()
        pads = pad_value_dict or {}
        keys = dict.fromkeys(key for batch in filled for key in batch)
        return cls(
            {key: _joined([batch[key] for batch in filled], pad_value=pads.get(key, 0), key=key) for key in keys}
        )

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The rows `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.long)
        return type(self)(
            {
                key: column[index.to(column.device)] if isinstance(column, torch.Tensor) else [column[i] for i in index]
                for key, column in self.data.items()
            }
        )

    def slice(self, start: int, end: int) -> Self:
        """Rows start … end − 1."""
        return type(self)({key: column[start:end] for key, column in self.data.items()})

    def truncate_tensors(self, dim: int, length: int) -> None:
        """Cuts every tensor that has dimension `dim` to `length` there, in place."""
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor) and column.ndim > dim:
                self.data[key] = column.narrow(dim, 0, min(length, column.shape[dim]))

    def to(self, device: torch.device | str) -> Self:
        """Moves every tensor, in place."""
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor):
                self.data[key] = column.to(device)
        return self

    def get_dict(self) -> dict[str, Any]:
        """The columns themselves, not a copy."""
        return self.data


def _joined(columns: list[Any], *, pad_value: float, key: str) -> Any:
    if all(isinstance(column, list) for column in columns):
        return [item for column in columns for item in column]
    if not all(isinstance(column, torch.Tensor) for column in columns):
        types = sorted({type(column).__name__ for column in columns})
        raise NotImplementedError(f"column {key!r}: batches of tensors or of lists can be joined, got {types}")
    if columns[0].ndim == 1:
        return torch.cat(columns)
    longest = max(column.shape[1] for column in columns)
    padded = []
    for column in columns:
        # functional.pad counts from the last dimension: (0, 0) for each after dim 1
        widths = (0, 0) * (column.ndim - 2) + (0, longest - column.shape[1])
        padded.append(torch.nn.functional.pad(column, widths, value=pad_value))
    return torch.cat(padded)
