"""How columns travel: per-token columns jagged, one value a row otherwise; padding is added where they are read.

A column of two or more dimensions has tokens on dim 1, as everywhere in asyncrl. Its rows are laid end to end in one
flat array, without padding; dtype and values come back exactly, padding comes back as the pad value. Flat arrays are
numpy's, because Ray's object store hands those to readers without a copy; the tensor's dtype is kept beside them for
the types that numpy lacks (bfloat16).

Legend: B rows, S tokens, N tokens of all rows.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import NO_VERSION
from asyncrl.data_plane.interfaces import LENGTHS_FIELD

PAD_VALUES: Mapping[str, float] = {"weight_versions": NO_VERSION}
"""Padding of columns in which 0 would mean something."""

WireColumn = tuple[npt.NDArray[Any] | list[Any], npt.NDArray[np.int64] | None, str | None]
"""A `Column` as (values, ends, name of the dtype)."""

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One field of some rows, encoded.

    `values`: [B] or, with `ends`, [N, …]: row i is values[ends[i − 1] : ends[i]]; a list where there is no `dtype`.
    """

    values: npt.NDArray[Any] | list[Any]
    dtype: torch.dtype | None
    ends: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values if self.ends is None else self.ends)

    @property
    def per_token(self) -> bool:
        return self.ends is not None

    def tokens(self, row: int, limit: int | None = None) -> int:
        """Tokens of a row, of the first `limit` ones; 0 in a column that has none."""
        tokens = 0 if self.ends is None else int(self.ends[row] - self._start(row))
        return tokens if limit is None else min(tokens, limit)

    def row(self, row: int) -> Any:
        """The value of one row, or its tokens: a view."""
        return self.values[row] if self.ends is None else self.values[self._start(row) : int(self.ends[row])]

    def rows(self, rows: Sequence[int]) -> "Column":
        """These rows as a column of their own, copied: nothing else is kept alive by it."""
        if isinstance(self.values, list):
            return Column(values=[self.values[row] for row in rows], dtype=None)
        if self.ends is None:
            return Column(values=self.values[list(rows)], dtype=self.dtype)
        parts = [self.row(row) for row in rows]
        values = np.concatenate(parts) if parts else self.values[:0].copy()
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return Column(values=values, dtype=self.dtype, ends=ends)

    def wire(self) -> WireColumn:
        """Plain arrays: a process that only passes rows on needs no torch to unpickle them."""
        return self.values, self.ends, None if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @classmethod
    def from_wire(cls, wire: WireColumn) -> "Column":
        values, ends, dtype = wire
        return cls(values=values, ends=ends, dtype=None if dtype is None else getattr(torch, dtype))

    def _start(self, row: int) -> int:
        assert self.ends is not None
        return int(self.ends[row - 1]) if row else 0


def encode(fields: Mapping[str, Any], *, lengths: Sequence[int] | None = None) -> dict[str, Column]:
    """Columns of a put: a mapping or a TensorDict. Columns that are encoded already pass.

    Per-token columns [B, S, …] are cut to `lengths` (tokens a row), else to the field `input_lengths`, else kept whole.
    Nested tensors, jagged on dim 1, are per-token columns without padding. Arrays of objects and the non-tensor columns
    of a TensorDict travel as lists. ValueError when columns have unequal rows, when dim 1 differs between the columns
    that are cut, when it is shorter than a length, and when a jagged row is longer than its length. TypeError for any
    other column.
    """
    given = {name: plain(column) for name, column in fields.items()}
    if lengths is None and LENGTHS_FIELD in given:
        column = given[LENGTHS_FIELD]
        lengths = row_lengths(column) if isinstance(column, Column) else [int(length) for length in column]
    if min(lengths or [], default=0) < 0:
        raise ValueError(f"a row has a negative length: {min(lengths or [])}")
    widths = {
        name: column.shape[1]
        for name, column in given.items()
        if isinstance(column, torch.Tensor | np.ndarray) and not _is_nested(column) and column.ndim >= 2
    }
    if lengths is not None and widths:
        _check_widths(widths, lengths=lengths)
    columns = {name: _encoded(name, column, lengths=lengths) for name, column in given.items()}
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"columns have unequal rows: {rows}")
    if lengths is not None:
        _check_tokens(columns, lengths=lengths)
    return columns


def decode(
    fields: Mapping[str, Sequence[tuple[Column, int]]],
    *,
    lengths: Sequence[int | None] | None = None,
    width: int | None = None,
    pad_value_dict: Mapping[str, float] | None = None,
) -> BatchedDataDict:
    """A batch from (column, row) of each of its rows, field by field.

    A row's tokens end at its entry in `lengths`, if there is one: what a put kept beyond it is padding. Per-token
    columns are right-padded to `width`, else to the longest row of any of them. ValueError for a row beyond `width`,
    and when the rows of a field are of different kinds.
    """
    rows = len(next(iter(fields.values()), ()))
    limits = [None] * rows if lengths is None else lengths
    longest = max(
        (
            column.tokens(row, limit)
            for places in fields.values()
            for (column, row), limit in zip(places, limits, strict=True)
        ),
        default=0,
    )
    if width is not None and longest > width:
        raise ValueError(f"a row has {longest} tokens, the width to pad to (global_forward_pad_seqlen) is {width}")
    pads = {**PAD_VALUES, **(pad_value_dict or {})}
    return BatchedDataDict(
        {
            name: _joined(name, places, limits, width=longest if width is None else width, pad_value=pads.get(name, 0))
            for name, places in fields.items()
        }
    )


def row_lengths(column: Column) -> list[int]:
    """The encoded `input_lengths` as numbers."""
    return [int(length) for length in column.values]


def plain(column: Any) -> Any:
    """The column without its container: a list for objects, whichever library wrapped them."""
    # optional package: its objects exist only where it is imported
    is_non_tensor = getattr(sys.modules.get("tensordict"), "is_non_tensor", None)
    if is_non_tensor is not None and is_non_tensor(column):
        payload: Any = getattr(column, "data", None)
        if not _is_object_array(payload) or len(payload) != len(column):
            return list(column.tolist())
        column = payload  # a TensorDict keeps an array of objects, one a row, as an object that all rows share
    return list(column) if _is_object_array(column) else column


def _is_object_array(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype == object and column.ndim > 0


def _is_nested(column: Any) -> bool:
    return isinstance(column, torch.Tensor) and column.is_nested


def _check_widths(widths: Mapping[str, int], *, lengths: Sequence[int]) -> None:
    if len(set(widths.values())) > 1:
        raise ValueError(f"per-token columns have different widths (dim 1): {dict(widths)}")
    width, longest = next(iter(widths.values())), max(lengths, default=0)
    if longest > width:
        raise ValueError(f"a row has {longest} tokens by its length, the columns {sorted(widths)} have {width}")


def _check_tokens(columns: Mapping[str, Column], *, lengths: Sequence[int]) -> None:
    """ValueError for a row longer than its length. Only jagged columns can have one: padded columns were cut."""
    for name, column in columns.items():
        if not column.per_token:
            continue
        if len(column) != len(lengths):
            raise ValueError(f"field {name!r} has {len(column)} rows, there are {len(lengths)} lengths")
        for row, length in enumerate(lengths):
            if column.tokens(row) > length:
                raise ValueError(f"field {name!r}: row {row} has {column.tokens(row)} tokens, its length is {length}")


def _encoded(name: str, column: Any, *, lengths: Sequence[int] | None) -> Column:
    if isinstance(column, Column):
        return column
    if isinstance(column, list | tuple):
        return Column(values=list(column), dtype=None)
    if isinstance(column, np.ndarray):
        try:
            column = torch.from_numpy(np.array(column))  # copied: it may be read-only, or strided backwards
        except TypeError as error:
            raise TypeError(f"field {name!r}: an array of {column.dtype} cannot travel ({error}); use a list") from None
    if not isinstance(column, torch.Tensor):
        raise TypeError(f"field {name!r}: a column is a tensor, an array or a list, not {type(column).__name__}")
    if column.is_nested:
        column = column.detach().cpu()
        rows = list(column.unbind())
        if len({row.shape[1:] for row in rows}) > 1:
            raise ValueError(f"field {name!r}: a nested column must be jagged on dim 1 (tokens) only")
        return _laid_out(rows, like=column.values())
    if column.ndim == 0:
        raise ValueError(f"field {name!r} has no dimension: rows come first")
    column = column.detach().cpu()
    if column.ndim == 1:
        return Column(values=_flat(column), dtype=column.dtype)
    if lengths is None:
        lengths = [column.shape[1]] * column.shape[0]
    if len(lengths) != column.shape[0]:
        raise ValueError(f"field {name!r} has {column.shape[0]} rows, there are {len(lengths)} lengths")
    return _laid_out([row[:length] for row, length in zip(column, lengths, strict=True)], like=column[:0].flatten(0, 1))


def _laid_out(rows: list[torch.Tensor], *, like: torch.Tensor) -> Column:
    flat = torch.cat(rows) if rows else like[:0]
    return Column(values=_flat(flat), dtype=flat.dtype, ends=np.cumsum([len(row) for row in rows], dtype=np.int64))


def _flat(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """An array of its own: the writer may go on with the tensor."""
    try:
        return np.array(tensor.numpy())
    except TypeError:  # a type that numpy lacks
        return np.array(tensor.contiguous().view(_CARRIERS[tensor.element_size()]).numpy())


def _joined(
    name: str,
    places: Sequence[tuple[Column, int]],
    limits: Sequence[int | None],
    *,
    width: int,
    pad_value: float,
) -> Any:
    if not places:
        return []
    first = places[0][0]
    kinds = {(column.dtype, column.per_token) for column, _ in places}
    if len(kinds) > 1:
        raise ValueError(f"field {name!r}: rows were put as different kinds: {sorted(map(str, kinds))}")
    if first.dtype is None:
        return [column.row(row) for column, row in places]
    if first.ends is None:
        return torch.from_numpy(np.array([column.row(row) for column, row in places])).view(first.dtype)
    trailing = {np.shape(column.values)[1:] for column, _ in places}
    if len(trailing) > 1:
        raise ValueError(f"field {name!r}: rows have different shapes beyond dim 1: {sorted(trailing)}")
    batch = torch.full((len(places), width, *trailing.pop()), pad_value, dtype=first.dtype)
    # written through an array of the carrier's type, into which shared and read-only rows copy as they are
    array = batch.numpy() if _has_numpy(first.dtype) else batch.view(_CARRIERS[first.dtype.itemsize]).numpy()
    for i, ((column, row), limit) in enumerate(zip(places, limits, strict=True)):
        tokens = column.row(row)[:limit]
        array[i, : len(tokens)] = tokens
    return batch


def _has_numpy(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True
