"""A batch: a dictionary of columns. A column is a tensor with rows first, or a list with one entry for each row.

Padding is always on the right. The class is a `UserDict` and not a `dict`, so that a batch is never taken for plain
keyword arguments. An operation that does not fit the batch's size raises AssertionError with the numbers, unless its
docstring names another error.

>>> shards, indices = batch.shard_by_batch_size(ranks, batch_size=gbs, sequence_packing_args=args)
>>> for micro_batch in shard.get_batch(step).make_microbatch_iterator_for_packable_sequences(): ...   # on each rank
>>> results = BatchedDataDict.from_batches(results_of_ranks)              # shard after shard
>>> results.reorder_data(indices)                                         # the caller's order
"""

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Generic, Self, overload

import torch
import torch.distributed as dist
from typing_extensions import TypeVar

from asyncrl.data.sharding import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    ShardPlan,
    caller_rows,
    plan_shards,
    require,
)

ColumnsT = TypeVar("ColumnsT", default=Any)
"""The TypedDict of a batch's columns (`asyncrl.data.specs`). It is documentation: columns are not checked against
it."""


class BatchedDataDict(UserDict[str, Any], Generic[ColumnsT]):
    """The columns of one batch. All of them have the same number of rows.

    A shard that was cut into micro-batches stores the cuts. Entry c describes the rows that the shard has of chunk c of
    `batch_size` rows: `micro_batch_indices[c]` has the [start, end) of each micro-batch, counted from the first of
    these rows. `micro_batch_lengths[c]` has the width of each dynamic micro-batch, or the tokens of each packed one.
    `elem_counts_per_gb[c]` is the number of these rows.
    All three are None for other batches, and for every batch derived from this one except by `get_batch`.
    """

    micro_batch_indices: list[list[list[int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None
    elem_counts_per_gb: list[int] | None = None

    @property
    def size(self) -> int:
        """Number of rows: the length of the first column, or 0 if there is no column."""
        return len(next(iter(self.data.values()))) if self.data else 0

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Joins the rows of all batches, in order.

        Lists and 1-D tensors are concatenated. Tensors of two or more dimensions are right-padded on dim 1 to the
        longest, with `pad_value_dict[key]` (default 0). The result has the columns of the batches that have rows, or of
        all batches if none has rows. Raises KeyError when a batch with rows lacks a column, NotImplementedError for a
        column of another type.
        """
        filled = [batch for batch in batches if not all(_without_rows(column) for column in batch.values())]
        if not filled:
            keys = dict.fromkeys(key for batch in batches for key in batch)
            return cls({key: next(batch[key] for batch in batches if key in batch) for key in keys})
        pads = pad_value_dict or {}
        keys = dict.fromkeys(key for batch in filled for key in batch)
        return cls(
            {key: join_columns([batch[key] for batch in filled], pad_value=pads.get(key, 0), key=key) for key in keys}
        )

    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> "list[SlicedDataDict[ColumnsT]]": ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        dynamic_batching_args: DynamicBatchingArgs,
    ) -> "tuple[list[SlicedDataDict[ColumnsT]], list[int]]": ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        sequence_packing_args: SequencePackingArgs,
    ) -> "tuple[list[SlicedDataDict[ColumnsT]], list[int]]": ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> "list[SlicedDataDict[ColumnsT]] | tuple[list[SlicedDataDict[ColumnsT]], list[int]]":
        """Cuts the batch for `shards` ranks: each chunk of `batch_size` rows (default: all rows) into `shards` parts.

        With dynamic batching or packing it also returns the caller's row number of each row of the concatenated shards,
        for `reorder_data`. Uneven shards without packing have ⌈rows / shards⌉ rows; the last ones may have fewer or
        none, but all columns. `asyncrl.data.sharding` has the rules. Raises the errors of `plan_shards`, such as for
        numbers that do not divide or a row that is too long.
        """
        self._check_rows()
        plans = plan_shards(
            self.size,
            shards=shards,
            lengths=lambda name: torch.as_tensor(self.data[name]).tolist(),
            width=lambda name: int(self.data[name].shape[1]),
            batch_size=batch_size,
            allow_uneven_shards=allow_uneven_shards,
            dynamic=dynamic_batching_args,
            packing=sequence_packing_args,
        )
        cut = [self._shard(plan) for plan in plans]
        if dynamic_batching_args is None and sequence_packing_args is None:
            return cut
        return cut, caller_rows(plans)

    def reorder_data(self, indices: Sequence[int]) -> None:
        """Moves row i to row indices[i], in place. Raises ValueError unless `indices` has each row number once."""
        self._check_rows()
        if sorted(indices) != list(range(self.size)):
            raise ValueError(
                f"the {len(indices)} indices do not have each number of the {self.size} rows once; pass the indices of "
                "shard_by_batch_size"
            )
        sources = sorted(range(self.size), key=indices.__getitem__)
        self.data = self.select_indices(sources).data
        self.micro_batch_indices = self.micro_batch_lengths = self.elem_counts_per_gb = None

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Copies the rows `indices`, in that order. Raises ValueError for a mask."""
        index = torch.as_tensor(indices)
        if index.dtype == torch.bool:
            raise ValueError(
                f"indices are a mask (bool, {len(index)} entries), but must be row numbers; use mask.nonzero()"
            )
        index = index.long()  # an empty list becomes a float tensor
        return type(self)(
            {
                key: column[index.to(column.device)]
                if isinstance(column, torch.Tensor)
                else [column[i] for i in index.tolist()]
                for key, column in self.data.items()
            }
        )

    def slice(self, start: int, end: int) -> "SlicedDataDict[ColumnsT]":
        """Returns the rows from `start` to `end` − 1. Tensors are views."""
        return SlicedDataDict({key: column[start:end] for key, column in self.data.items()})

    def chunk(self, rank: int, chunks: int) -> "SlicedDataDict[ColumnsT]":
        """Returns part `rank` of `chunks` equal contiguous parts."""
        require(0 <= rank < chunks, f"Rank {rank} must be at least 0 and less than chunks {chunks}")
        require(self.size % chunks == 0, f"Total batch size ({self.size}) is not a multiple of chunks ({chunks})")
        rows = self.size // chunks
        return self.slice(rank * rows, (rank + 1) * rows)

    def get_batch(self, i: int, batch_size: int | None = None) -> "SlicedDataDict[ColumnsT]":
        """Returns chunk i with its micro-batches. Raises IndexError if it does not exist.

        A shard that was cut into micro-batches uses its own chunks, which packing makes unequal, and ignores
        `batch_size`. In another batch, chunk i is the i-th `batch_size` rows; the last chunk may have fewer.
        """
        counts = self.elem_counts_per_gb
        if counts is None:
            step = batch_size or 0
            require(step > 0, f"batch_size is {batch_size}; for a batch without micro-batches it must be at least 1")
            counts = [min(step, self.size - start) for start in range(0, self.size, step)]
        if not 0 <= i < len(counts):
            raise IndexError(f"chunk {i} does not exist: the batch of {self.size} rows has {len(counts)} chunks")
        start = sum(counts[:i])
        part = self.slice(start, start + counts[i])
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            part.micro_batch_indices = [self.micro_batch_indices[i]]
            part.micro_batch_lengths = [self.micro_batch_lengths[i]]
            part.elem_counts_per_gb = [counts[i]]
        return part

    def repeat_interleave(self, n: int) -> Self:
        """Returns a batch with n copies of each row, next to each other. List entries are copied deeply, so that no two
        rows share an object."""
        return type(self)(
            {
                key: column.repeat_interleave(n, dim=0)
                if isinstance(column, torch.Tensor)
                else [deepcopy(item) for item in column for _ in range(n)]
                for key, column in self.data.items()
            }
        )

    def truncate_tensors(self, dim: int, length: int) -> None:
        """Cuts dimension `dim` of every tensor to at most `length`, in place. Tensors without it stay whole."""
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor) and column.ndim > dim:
                self.data[key] = column.narrow(dim, 0, min(length, column.shape[dim]))

    def to(self, device: torch.device | str) -> Self:
        """Moves every tensor to `device`, in place."""
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor):
                self.data[key] = column.to(device)
        return self

    def get_dict(self) -> dict[str, Any]:
        """Returns the columns themselves, not a copy."""
        return self.data

    def all_gather(
        self, group: dist.ProcessGroup | None = None, pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Gathers the rows of all ranks of `group` on each of them, in rank order, by `from_batches`.

        It is a collective, limited by the group's timeout. Ranks may have different numbers of rows and widths, or no
        rows at all. Raises the errors of `from_batches`.
        """
        return type(self).from_batches(gather_columns(self.data, group), pad_value_dict)

    def make_microbatch_iterator(self, mb: int) -> "Iterator[SlicedDataDict[ColumnsT]]":
        """Yields micro-batches of `mb` rows."""
        require(
            mb > 0 and self.size % mb == 0, f"Batch size ({self.size}) is not a multiple of micro-batch size ({mb})"
        )
        return (self.slice(start, start + mb) for start in range(0, self.size, mb))

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1
    ) -> "Iterator[SlicedDataDict[ColumnsT]]":
        """Yields the micro-batches of dynamic batching. Each tensor is cut to the micro-batch's width on
        `sequence_dim`."""
        cuts = zip(*self._micro_batches(), strict=True)
        return (self._cut(start, end, dim=sequence_dim, width=width) for (start, end), width in cuts)

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Returns how many micro-batches `make_microbatch_iterator_with_dynamic_shapes` yields, equal on all ranks."""
        return len(self._micro_batches()[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> "Iterator[SlicedDataDict[ColumnsT]]":
        """Yields the bins of sequence packing. Their rows are still padded: the model's code packs them."""
        bounds, _ = self._micro_batches()
        return (self.slice(start, end) for start, end in bounds)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Returns the number of bins of `make_microbatch_iterator_for_packable_sequences`, and the tokens of the
        fullest bin."""
        bounds, tokens = self._micro_batches()
        return len(bounds), max(tokens)

    def _check_rows(self) -> None:
        rows = {key: len(column) for key, column in self.data.items()}
        require(len({*rows.values()}) < 2, f"Batch sizes are not the same across the rollout batch: {rows}")

    def _micro_batches(self) -> tuple[list[list[int]], list[int]]:
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            raise AssertionError(
                "this batch has no micro-batches; shard it with dynamic_batching_args or sequence_packing_args first"
            )
        chunks = len(self.micro_batch_indices)
        require(chunks == 1, f"this shard has {chunks} chunks, but a step trains one; take one with get_batch(i)")
        return self.micro_batch_indices[0], self.micro_batch_lengths[0]

    def _cut(self, start: int, end: int, *, dim: int, width: int) -> "SlicedDataDict[ColumnsT]":
        part = self.slice(start, end)
        part.truncate_tensors(dim, width)
        return part

    def _shard(self, plan: ShardPlan) -> "SlicedDataDict[ColumnsT]":
        # Rows are copied even where a view would do: pickling a view sends the whole batch's storage to every rank.
        shard: SlicedDataDict[ColumnsT] = SlicedDataDict(self.select_indices(plan.rows).data)
        if plan.micro_batch_indices is not None:
            shard.micro_batch_indices = plan.micro_batch_indices
            shard.micro_batch_lengths = plan.micro_batch_lengths
            shard.elem_counts_per_gb = plan.rows_per_chunk
        return shard


class SlicedDataDict(BatchedDataDict[ColumnsT]):
    """A part of a batch: a rank's shard, a chunk, or a micro-batch."""


def _without_rows(column: Any) -> bool:
    """Returns True for a tensor or list without rows. Returns False for other types, which `from_batches` refuses."""
    if isinstance(column, torch.Tensor):
        return column.ndim > 0 and len(column) == 0
    return isinstance(column, list) and not column


# Joins the columns of several batches, or of several ranks.
#
# Gathering is one collective, after which every rank has the columns of all ranks. Therefore all ranks refuse a batch
# that cannot be joined, and no rank waits for a rank that has given up. The group's timeout limits the wait.


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
    CPU. A tensor arrives on the device of this rank's own column of that name. If this rank has none, it arrives on the
    kind of device that it had on its rank.
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
