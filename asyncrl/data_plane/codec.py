"""Encodes columns for transport: per-token columns without padding, other columns with one value for each row. Padding
is added again when they are read.

A column of two or more dimensions has its tokens on dim 1, as everywhere in asyncrl. Its rows are concatenated into one
flat array without padding. dtype and values are restored exactly; padding is restored as the pad value. Flat arrays are
NumPy arrays, because Ray's object store gives those to readers without a copy. The tensor's dtype is stored with them,
for types that NumPy lacks (bfloat16).

Shape letters: B rows, S tokens, N tokens of all rows.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import BRANCH, NO_BRANCH, NO_TOKEN, NO_VERSION, SUPPORT, TOP_IDS
from asyncrl.data_plane.interfaces import LENGTHS_FIELD

PAD_VALUES: Mapping[str, float] = {
    "weight_versions": NO_VERSION,
    SUPPORT: NO_TOKEN,
    TOP_IDS: NO_TOKEN,
    BRANCH: NO_BRANCH,
}
"""Pad values of columns in which 0 is a valid value."""

WireColumn = tuple[npt.NDArray[Any] | list[Any], npt.NDArray[np.int64] | None, str | None]
"""A `Column` as (values, ends, name of the dtype), for transport."""

Spans = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""For each row: the place of its first token in the values of a column, and the number of its tokens."""

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types, by element size in bytes, that carry the values of dtypes that NumPy lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One encoded field of some rows.

    `values` is [B], or [N, …] if `ends` is given: then row i is values[ends[i − 1] : ends[i]]. It is a list if `dtype`
    is None.
    """

    values: npt.NDArray[Any] | list[Any]
    dtype: torch.dtype | None
    ends: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values if self.ends is None else self.ends)

    @property
    def row_bytes(self) -> npt.NDArray[np.int64]:
        """Size of each row, bytes; 0 in a list."""
        if isinstance(self.values, list):
            return np.zeros(len(self), dtype=np.int64)
        one = self.values.nbytes // max(len(self.values), 1)
        return np.full(len(self), one) if self.ends is None else np.diff(self.ends, prepend=0) * one

    def rows(self, rows: Sequence[int]) -> "Column":
        """Returns these rows as a new column. They are copied, so that the old column need not stay alive."""
        if isinstance(self.values, list):
            return Column(values=[self.values[row] for row in rows], dtype=None)
        if self.ends is None:
            return Column(values=self.values[list(rows)], dtype=self.dtype)
        starts, tokens = self.spans(np.array(rows, dtype=np.int64))
        spans = zip(starts.tolist(), tokens.tolist(), strict=True)
        parts = [self.values[start : start + length] for start, length in spans]
        values = np.concatenate(parts) if parts else self.values[:0].copy()
        return Column(values=values, dtype=self.dtype, ends=np.cumsum(tokens))

    def spans(self, rows: npt.NDArray[np.int64]) -> Spans:
        """Returns for each of these rows the place of its first token in `values`, and the number of its tokens."""
        assert self.ends is not None
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        return starts, self.ends[rows] - starts

    def wire(self) -> WireColumn:
        """Returns plain arrays, so that a process that only passes rows on can unpickle them without torch."""
        return self.values, self.ends, None if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @classmethod
    def from_wire(cls, wire: WireColumn) -> "Column":
        values, ends, dtype = wire
        return cls(values=values, ends=ends, dtype=None if dtype is None else getattr(torch, dtype))


class Picked(NamedTuple):
    """Rows of a batch that one column has: row `samples[i]` of the batch is row `rows[i]` of the column."""

    column: Column
    samples: Sequence[int]
    rows: Sequence[int]

    def spans(self, limits_B: npt.NDArray[np.int64] | None) -> Spans:
        """Returns for each row the place of its first token in the column, and the number of its tokens: at most its
        entry in `limits_B`. In a column that is not per token, it returns the row's index and 0 tokens."""
        rows = np.array(self.rows, dtype=np.int64)
        if self.column.ends is None:
            return rows, np.zeros_like(rows)
        starts, tokens = self.column.spans(rows)
        return starts, tokens if limits_B is None else np.minimum(tokens, limits_B[list(self.samples)])


PickedFields = Mapping[str, Sequence[Picked]]
"""The rows of a batch, by field."""


def encode(fields: Mapping[str, Any], *, lengths: Sequence[int] | None = None) -> dict[str, Column]:
    """Encodes the columns of a put, from a mapping or a TensorDict. Encoded columns are returned unchanged.

    Per-token columns [B, S, …] are cut to `lengths` (numbers of tokens), or to the field `input_lengths` if there is
    one, or not at all. Nested tensors, jagged on dim 1, are per-token columns without padding. Arrays of objects and
    the non-tensor columns of a TensorDict become lists.

    Raises ValueError when columns have different numbers of rows, when the columns to cut differ in dim 1, when dim 1
    is shorter than a length, when a jagged row is longer than its length, and for a negative length or a scalar. Raises
    TypeError for any other column.
    """
    given = {name: plain(column) for name, column in fields.items()}
    if lengths is None and LENGTHS_FIELD in given:
        column = given[LENGTHS_FIELD]
        lengths = row_lengths(column) if isinstance(column, Column) else [int(length) for length in column]
    if min(lengths or [], default=0) < 0:
        raise ValueError(f"a row has a negative length: {min(lengths or [])}; lengths are numbers of tokens")
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
        raise ValueError(f"the columns have different numbers of rows: {rows}; give all of them the same rows")
    if lengths is not None:
        _check_tokens(columns, lengths=lengths)
    return columns


def decode(
    fields: PickedFields,
    *,
    lengths: Sequence[int | None] | None = None,
    width: int | None = None,
    pad_value_dict: Mapping[str, float] | None = None,
) -> BatchedDataDict:
    """Builds a batch from the picked rows of each field.

    A row's tokens end at its entry in `lengths`, if there is one; tokens beyond it are treated as padding. Per-token
    columns are right-padded to `width`, or to the longest row of all of them. Raises ValueError for a row longer than
    `width`, and when the rows of a field differ in dtype or in shape after dim 1, or when only some are per token.
    """
    limits_B = None if lengths is None else np.array([_ANY if n is None else n for n in lengths], dtype=np.int64)
    spans = {name: [part.spans(limits_B) for part in parts] for name, parts in fields.items()}
    longest = max((int(tokens.max(initial=0)) for of_field in spans.values() for _, tokens in of_field), default=0)
    if width is not None and longest > width:
        raise ValueError(
            f"a row has {longest} tokens, more than the width {width} to pad to (global_forward_pad_seqlen); stamp a "
            "larger width"
        )
    pads = {**PAD_VALUES, **(pad_value_dict or {})}
    return BatchedDataDict(
        {
            name: _joined(
                name,
                parts,
                spans[name],
                width=longest if width is None else width,
                pad_value=pads.get(name, 0),
            )
            for name, parts in fields.items()
        }
    )


def row_lengths(column: Column) -> list[int]:
    """Returns the encoded `input_lengths` as integers."""
    return [int(length) for length in column.values]


def plain(column: Any) -> Any:
    """Returns the column without the container of its library. Objects are returned as a list."""
    # tensordict is optional: its objects can exist only if it has been imported
    is_non_tensor = getattr(sys.modules.get("tensordict"), "is_non_tensor", None)
    if is_non_tensor is not None and is_non_tensor(column):
        payload: Any = getattr(column, "data", None)
        if not _is_object_array(payload) or len(payload) != len(column):
            return list(column.tolist())
        column = payload  # a TensorDict keeps an array with one object a row as one object that all rows share
    return list(column) if _is_object_array(column) else column


def _is_object_array(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype == object and column.ndim > 0


def _is_nested(column: Any) -> bool:
    return isinstance(column, torch.Tensor) and column.is_nested


def _check_widths(widths: Mapping[str, int], *, lengths: Sequence[int]) -> None:
    if len(set(widths.values())) > 1:
        raise ValueError(f"per-token columns have different widths (dim 1): {dict(widths)}; pad them to the same width")
    width, longest = next(iter(widths.values())), max(lengths, default=0)
    if longest > width:
        raise ValueError(
            f"a row has a length of {longest} tokens, but the columns {sorted(widths)} have only {width}; check "
            "input_lengths"
        )


def _check_tokens(columns: Mapping[str, Column], *, lengths: Sequence[int]) -> None:
    """Raises ValueError for a row longer than its entry in `lengths`, in jagged columns. Padded columns were cut."""
    for name, column in columns.items():
        if column.ends is None:
            continue
        if len(column) != len(lengths):
            raise ValueError(f"field {name!r} has {len(column)} rows, but there are {len(lengths)} lengths")
        tokens = np.diff(column.ends, prepend=0)
        longer = np.flatnonzero(tokens > np.array(lengths))
        if len(longer):
            row = int(longer[0])
            raise ValueError(
                f"field {name!r}: row {row} has {tokens[row]} tokens, more than its length {lengths[row]}; check "
                "input_lengths"
            )


def _encoded(name: str, column: Any, *, lengths: Sequence[int] | None) -> Column:
    if isinstance(column, Column):
        return column
    if isinstance(column, list | tuple):
        return Column(values=list(column), dtype=None)
    if isinstance(column, np.ndarray):
        try:
            column = torch.from_numpy(np.array(column))  # a copy, because the array may be read-only or reversed
        except TypeError as error:
            raise TypeError(
                f"field {name!r}: an array of {column.dtype} cannot be stored ({error}); use a list"
            ) from None
    if not isinstance(column, torch.Tensor):
        raise TypeError(
            f"field {name!r} has the type {type(column).__name__}, but must be a tensor, an array or a list"
        )
    column = column.detach().cpu()
    if column.is_nested:
        rows = list(column.unbind())
        if len({row.shape[1:] for row in rows}) > 1:
            raise ValueError(f"field {name!r}: a nested column may be jagged on dim 1 (tokens) only")
        flat = torch.cat(rows) if rows else column.values()[:0]
        return Column(values=_flat(flat), dtype=flat.dtype, ends=np.cumsum([len(row) for row in rows], dtype=np.int64))
    if column.ndim == 0:
        raise ValueError(f"field {name!r} is a scalar, but its first dimension must be the rows")
    if column.ndim == 1:
        return Column(values=_flat(column), dtype=column.dtype)
    if lengths is None:
        lengths = [column.shape[1]] * column.shape[0]
    if len(lengths) != column.shape[0]:
        raise ValueError(f"field {name!r} has {column.shape[0]} rows, but there are {len(lengths)} lengths")
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    flat = column[torch.arange(column.shape[1]) < lengths_B.unsqueeze(1)]
    return Column(values=_array(flat), dtype=column.dtype, ends=np.cumsum(lengths, dtype=np.int64))


def _flat(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Returns a copy as an array, so that the writer may change the tensor afterwards."""
    return np.array(_array(tensor))


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Returns a contiguous tensor's memory as an array. An integer type carries the values of a dtype that NumPy
    lacks."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.contiguous().view(_CARRIERS[tensor.element_size()]).numpy()


_ANY = np.iinfo(np.int64).max
"""The limit of a row whose length is not known."""


def _joined(name: str, parts: Sequence[Picked], spans: Sequence[Spans], *, width: int, pad_value: float) -> Any:
    if not parts:
        return []
    first, size = parts[0].column, sum(len(part.rows) for part in parts)
    kinds = {(part.column.dtype, part.column.ends is not None) for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            f"field {name!r}: its rows were put with different dtypes or kinds, {sorted(map(str, kinds))}; put all "
            "rows of a field with the same dtype"
        )
    if first.dtype is None:
        values: list[Any] = [None] * size
        for part in parts:
            for sample, row in zip(part.samples, part.rows, strict=True):
                values[sample] = part.column.values[row]
        return values
    trailing = {np.shape(part.column.values)[1:] for part in parts}
    if len(trailing) > 1:
        raise ValueError(
            f"field {name!r}: its rows have different shapes after dim 1, {sorted(trailing)}; put all rows of a field "
            "with the same shape"
        )
    if first.ends is None:
        batch = torch.empty((size, *trailing.pop()), dtype=first.dtype)
        array = _array(batch)
        for part in parts:
            array[list(part.samples)] = np.asarray(part.column.values)[list(part.rows)]
        return batch
    batch = torch.full((size, width, *trailing.pop()), pad_value, dtype=first.dtype)
    # Write through an array of the carrier's type, because shared and read-only rows can be copied into it unchanged.
    array = _array(batch)
    for part, (starts, tokens_of) in zip(parts, spans, strict=True):
        flat = part.column.values
        for sample, start, tokens in zip(part.samples, starts.tolist(), tokens_of.tolist(), strict=True):
            array[sample, :tokens] = flat[start : start + tokens]
    return batch


# Jagged batches: per-token columns whose rows have different numbers of tokens, as PyTorch's nested tensors.
#
# `DataPlaneClient.put_samples` takes jagged columns as well as plain ones. Its reads return padded columns. These
# functions are for loops that keep jagged batches themselves:
#
#     fields = pack_jagged_fields(batch, lengths=batch["input_lengths"])
#     client.put_samples(ids, "train", fields=fields)
#     batch = materialize(fields, pad_value_dict={"input_ids": pad_token_id}, pad_to_seqlen=width)
#
# Shape letters: B rows, S tokens of the longest row, S_i tokens of row i. A jagged tensor [B, S_i, …] has
# `layout=torch.jagged` and is jagged on dim 1.


def to_nested_by_length(padded: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Converts a right-padded tensor [B, S, …] to a jagged one [B, S_i, …]: row i keeps its first `lengths[i]` tokens.

    It is differentiable. Raises ValueError when `padded` has fewer than two dimensions, when there are not B lengths,
    and when a length is negative or larger than S.
    """
    if padded.ndim < 2:
        raise ValueError(f"to_nested_by_length: padded has shape {list(padded.shape)}, but must be [rows, tokens, ...]")
    tokens = [int(length) for length in torch.as_tensor(lengths).reshape(-1).tolist()]
    if len(tokens) != len(padded):
        raise ValueError(f"to_nested_by_length: {len(tokens)} lengths for {len(padded)} rows; give one length a row")
    if tokens and not 0 <= min(tokens) <= max(tokens) <= padded.shape[1]:
        raise ValueError(
            f"to_nested_by_length: lengths are {min(tokens)} to {max(tokens)}, but must be 0 to {padded.shape[1]}, the "
            "tokens of a row"
        )
    rows = [row[:length] for row, length in zip(padded, tokens, strict=True)]
    # PyTorch's own constructors of jagged tensors do not support a batch without rows.
    values = torch.cat(rows) if rows else padded[:0].flatten(0, 1)
    ends = torch.tensor([0, *tokens], device=values.device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, ends)


def from_nested(nested: torch.Tensor, *, pad_value: float = 0, width: int | None = None) -> torch.Tensor:
    """Converts a jagged tensor [B, S_i, …] to a right-padded one [B, S, …]. S is `width`, or the longest row's tokens.

    It is the inverse of `to_nested_by_length` and is differentiable. Raises ValueError for a row of more than `width`
    tokens, and for a tensor that is not nested.
    """
    if not nested.is_nested:
        raise ValueError(
            f"from_nested: the tensor {list(nested.shape)} is not nested; make it nested with to_nested_by_length"
        )
    rows = list(nested.unbind())
    longest = max(map(len, rows), default=0)
    if width is not None and longest > width:
        raise ValueError(f"from_nested: a row has {longest} tokens, more than the width {width} to pad to")
    values, size = nested.values(), longest if width is None else width
    padded = values.new_full((len(rows), size, *values.shape[1:]), pad_value)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: torch.Tensor | Sequence[int] | None,
    token_aligned_fields: Collection[str] | None = None,
) -> dict[str, Any]:
    """Makes the per-token columns jagged. `put_samples` takes the result, and `materialize` pads it again.

    Per-token columns are the tensors [B, S, …] named in `token_aligned_fields`, or all tensors of two or more
    dimensions if it is None. They are cut to `lengths` [B] and detached. Other tensors, jagged columns, lists and
    arrays of objects stay unchanged. Without `lengths`, no column is made jagged. Raises TypeError for a column of
    another type, ValueError when the lengths do not fit.
    """
    packed: dict[str, Any] = {}
    for name, given in fields.items():
        column = _column(name, given)
        named = token_aligned_fields is None or name in token_aligned_fields
        if isinstance(column, torch.Tensor):
            column = column.detach()
            if named and lengths is not None and column.ndim >= 2 and not column.is_nested:
                column = to_nested_by_length(column, lengths)
        packed[name] = column
    return packed


def materialize(
    fields: Mapping[str, Any],
    layout: Literal["padded", "jagged"] = "padded",
    pad_value_dict: Mapping[str, float] | None = None,
    pad_to_seqlen: int = 0,
) -> BatchedDataDict:
    """Builds the batch of jagged columns, from a mapping or a TensorDict such as the result of `pack_jagged_fields`.

    Jagged columns [B, S_i, …] are right-padded to their longest row. Then these and the plain tensors [B, S, …] are
    padded to `pad_to_seqlen` if that is longer. The pad value is the field's entry in `pad_value_dict` or `PAD_VALUES`,
    else 0. With the layout "jagged" nothing is padded. Columns of objects become lists. Raises ValueError for
    another layout, and TypeError for a column of another type.
    """
    if layout not in ("padded", "jagged"):
        raise ValueError(f"materialize: layout is {layout!r}, but must be 'padded' or 'jagged'")
    pads = {**PAD_VALUES, **(pad_value_dict or {})}
    batch: dict[str, Any] = {}
    for name, given in fields.items():
        column = _column(name, given)
        if isinstance(column, torch.Tensor) and column.ndim >= 2 and layout == "padded":
            pad_value = pads.get(name, 0)
            if column.is_nested:
                column = from_nested(column, pad_value=pad_value)
            missing = max(0, pad_to_seqlen - column.shape[1])
            # functional.pad starts at the last dimension: (0, 0) for each dimension after dim 1
            widths = (0, 0) * (column.ndim - 2) + (0, missing)
            column = torch.nn.functional.pad(column, widths, value=pad_value)
        batch[name] = column
    return BatchedDataDict(batch)


def _column(name: str, given: Any) -> torch.Tensor | list[Any]:
    column = plain(given)
    if not isinstance(column, torch.Tensor | list):
        kind = type(column).__name__
        raise TypeError(f"field {name!r} has the type {kind}, but must be a tensor, a list or an array of objects")
    return column
