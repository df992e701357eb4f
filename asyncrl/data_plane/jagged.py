"""Jagged batches: per-token columns whose rows have different numbers of tokens, as PyTorch's nested tensors.

`DataPlaneClient.put_samples` takes jagged columns as well as plain ones. Its reads return padded columns. These
functions are for loops that keep jagged batches themselves:

    fields = pack_jagged_fields(batch, lengths=batch["input_lengths"])
    client.put_samples(ids, "train", fields=fields)
    batch = materialize(fields, pad_value_dict={"input_ids": pad_token_id}, pad_to_seqlen=width)

Shape letters: B rows, S tokens of the longest row, S_i tokens of row i. A jagged tensor [B, S_i, …] has
`layout=torch.jagged` and is jagged on dim 1.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.codec import PAD_VALUES, plain


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
    arrays of objects stay unchanged. Without `lengths` all columns do. Raises TypeError for a column of another type,
    ValueError when the lengths do not fit.
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
    padded to `pad_to_seqlen` if that is longer. The pad value is 0, −1 in `weight_versions`, or the field's entry in
    `pad_value_dict`. With the layout "jagged" nothing is padded. Columns of objects become lists. Raises ValueError for
    another layout.
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
