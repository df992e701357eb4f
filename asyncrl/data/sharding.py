"""Decides which rows go to which rank, and where a rank's micro-batches are cut. The functions are pure: they take
numbers of rows and lengths, and return indices.

A batch is cut into chunks of `batch_size` rows, one optimizer step each. A chunk is cut into `shards` parts. A shard
consists of its parts of all chunks, chunk after chunk. In every mode:

- Every row is in exactly one shard, and stays in its chunk.
- `caller_rows(plans)` lists the rows of all concatenated shards. `BatchedDataDict.reorder_data` takes it to restore the
  caller's order.
- With micro-batches, every shard has the same number of them in a chunk, because ranks must call their collectives
  equally often. No micro-batch has more than `max_tokens_per_microbatch` tokens.

The same functions cut batches of tensors (`BatchedDataDict.shard_by_batch_size`) and batches that are only references
(the data plane). Arguments that do not fit the batch raise AssertionError with the numbers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypedDict

from asyncrl.data.packing import get_packer, round_up


class DynamicBatchingArgs(TypedDict):
    """Micro-batches of rows with similar lengths, padded to the longest row.

    Their width is rounded up to a multiple of `sequence_length_round`, so that few different shapes occur. `input_key`
    names the column [B, S] whose width is the upper limit of this width. `input_lengths_key` names the column [B] of
    lengths (B rows, S tokens).
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


class SequencePackingArgs(TypedDict):
    """Micro-batches whose rows are concatenated without padding between them.

    `algorithm` is one of `asyncrl.data.packing`. Each row is rounded up to a multiple of `sequence_length_pad_multiple`
    tokens. `input_lengths_key` names the column [B] of lengths; `input_key` is not read.
    """

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: str
    sequence_length_pad_multiple: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One shard. `rows` are the caller's row numbers in the shard's order. The other lists have an entry for each
    chunk.

    `rows_per_chunk[c]`: the shard's rows of chunk c.
    `micro_batch_indices[c]`: [start, end) of each micro-batch, counted from the shard's first row of chunk c.
    `micro_batch_lengths[c]`: for each micro-batch, the width to which its rows are cut (dynamic batching), or the
    number of all tokens in its bin (packing).
    The last two are None for shards without micro-batches.
    """

    rows: list[int]
    rows_per_chunk: list[int]
    micro_batch_indices: list[list[list[int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None


def require(condition: bool, message: str) -> None:
    """Raises AssertionError unless `condition`. `assert` is not used, because python -O would skip the check."""
    if not condition:
        raise AssertionError(message)


def plan_shards(
    total_rows: int,
    *,
    shards: int,
    lengths: Callable[[str], Sequence[int]],
    width: Callable[[str], int],
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
    dynamic: DynamicBatchingArgs | None = None,
    packing: SequencePackingArgs | None = None,
) -> list[ShardPlan]:
    """Cuts every chunk of `batch_size` rows (None: all rows) into one part for each shard, in the mode that the
    arguments name: contiguous parts, dynamic batching, or packing.

    `lengths(name)` returns the column of lengths (tokens), and `width(name)` the width (tokens) of the padded column of
    token ids. They are called only if the mode needs them. With `allow_uneven_shards` the number of rows need not be a
    multiple of `shards`.

    Raises AssertionError for modes that exclude each other, for numbers that do not divide, and with dynamic batching
    for a row over the limit. Raises ValueError for a multiple below 1, and with packing for a row over the limit and
    for fewer rows than bins.
    """
    require(
        dynamic is None or packing is None, "dynamic_batching_args and sequence_packing_args cannot be passed together"
    )
    require(
        batch_size is None or not allow_uneven_shards,
        f"uneven shards need all rows in one chunk, but batch_size is {batch_size}; omit one of the two",
    )
    require(
        dynamic is None or not allow_uneven_shards,
        "uneven shards and dynamic batching exclude each other: ranks would have different numbers of micro-batches",
    )
    chunks = _chunks(total_rows, shards=shards, batch_size=batch_size, even=not allow_uneven_shards)
    if dynamic is not None:
        rows_lengths = lengths(dynamic["input_lengths_key"])
        most = width(dynamic["input_key"])
        parts = [_dynamic(chunk, rows_lengths, shards=shards, args=dynamic, width=most) for chunk in chunks]
    elif packing is not None:
        rows_lengths = lengths(packing["input_lengths_key"])
        parts = [_packed(chunk, rows_lengths, shards=shards, args=packing) for chunk in chunks]
    else:
        parts = [_contiguous(chunk, shards=shards) for chunk in chunks]
    is_cut = dynamic is not None or packing is not None
    return [_plan([chunk[shard] for chunk in parts], is_cut=is_cut) for shard in range(shards)]


def caller_rows(plans: Iterable[ShardPlan]) -> list[int]:
    """Returns the caller's row number of each row of the concatenated shards.

    >>> caller_rows([ShardPlan(rows=[0, 2], rows_per_chunk=[1, 1]), ShardPlan(rows=[1, 3], rows_per_chunk=[1, 1])])
    [0, 2, 1, 3]
    """
    return [row for plan in plans for row in plan.rows]


def _chunks(total_rows: int, *, shards: int, batch_size: int | None, even: bool) -> list[range]:
    size = total_rows if batch_size is None else batch_size
    require(shards > 0, f"shards is {shards}, but must be at least 1")
    require(batch_size is None or batch_size > 0, f"batch_size is {batch_size}, but must be at least 1")
    require(
        batch_size is None or total_rows % batch_size == 0,
        f"Total batch size ({total_rows}) is not a multiple of batch_size ({batch_size})",
    )
    require(not even or size % shards == 0, f"Batch size ({size}) is not a multiple of shards ({shards})")
    if batch_size is None:
        return [range(total_rows)]
    return [range(start, start + batch_size) for start in range(0, total_rows, batch_size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One shard's part of one chunk. `micro_batches` has (number of rows, length) of each micro-batch, in order, with
    the lengths of `ShardPlan.micro_batch_lengths`; it is empty in the mode without micro-batches."""

    rows: Sequence[int]
    micro_batches: Sequence[tuple[int, int]] = ()


def _contiguous(chunk: range, *, shards: int) -> list[_Part]:
    """Cuts a chunk into contiguous parts of ⌈rows / shards⌉ rows. The last parts of an uneven chunk have fewer rows or
    none."""
    size = -(-len(chunk) // shards)
    return [_Part(rows=chunk[shard * size : (shard + 1) * size]) for shard in range(shards)]


def _dynamic(
    chunk: range, lengths: Sequence[int], *, shards: int, args: DynamicBatchingArgs, width: int
) -> list[_Part]:
    """Sorts the rows of a chunk by length, shortest first, and deals them to the shards in turn. All shards cut their
    micro-batches at the same places.

    A micro-batch is closed when rows × width would exceed the limit. Its width is the length of its longest row on any
    shard, rounded up, and at most `width`, that of the padded input.
    """
    multiple = args["sequence_length_round"]
    _check_multiple("sequence_length_round", multiple)
    order = sorted(chunk, key=lambda row: lengths[row])
    # Lengths ascend, so the last row of each deal is the longest.
    widths = [min(width, round_up(max(1, lengths[row]), multiple)) for row in order[shards - 1 :: shards]]
    micro_batches = _close_micro_batches(widths, limit=args["max_tokens_per_microbatch"])
    return [_Part(rows=order[shard::shards], micro_batches=micro_batches) for shard in range(shards)]


def _close_micro_batches(widths: Sequence[int], *, limit: int) -> list[tuple[int, int]]:
    """Returns (rows, width) of micro-batches of ascending `widths`. None of them has more than `limit` tokens."""
    micro_batches: list[tuple[int, int]] = []
    for width in widths:
        require(
            width <= limit,
            f"a row of {width} tokens (after sequence_length_round) is over max_tokens_per_microbatch ({limit}); "
            "raise that limit, or cut the row",
        )
        if micro_batches and (micro_batches[-1][0] + 1) * width <= limit:
            micro_batches[-1] = (micro_batches[-1][0] + 1, width)
        else:
            micro_batches.append((1, width))
    return micro_batches


def _packed(chunk: range, lengths: Sequence[int], *, shards: int, args: SequencePackingArgs) -> list[_Part]:
    """Packs the rows of a chunk into bins. The number of bins is a multiple of `shards`. Bin b is a micro-batch of
    shard b % shards.

    All shards have the same number of bins but different numbers of rows. Raises ValueError for a row over the limit,
    and for fewer rows than bins.
    """
    multiple = args["sequence_length_pad_multiple"]
    _check_multiple("sequence_length_pad_multiple", multiple)
    packer = get_packer(
        args["algorithm"], args["max_tokens_per_microbatch"], min_bin_count=shards, bin_count_multiple=shards
    )
    padded = [round_up(lengths[row], multiple) for row in chunk]
    bins = packer.pack(padded)
    return [
        _Part(
            rows=[chunk[i] for content in bins[shard::shards] for i in content],
            micro_batches=[(len(content), sum(padded[i] for i in content)) for content in bins[shard::shards]],
        )
        for shard in range(shards)
    ]


def _plan(parts: Sequence[_Part], *, is_cut: bool) -> ShardPlan:
    """Returns the plan of the shard that has the `parts`, one of each chunk. `is_cut`: the parts have micro-batches."""
    rows = [row for part in parts for row in part.rows]
    rows_per_chunk = [len(part.rows) for part in parts]
    if not is_cut:
        return ShardPlan(rows=rows, rows_per_chunk=rows_per_chunk)
    indices = []
    for part in parts:
        ends = list(accumulate(count for count, _ in part.micro_batches))
        indices.append([[end - count, end] for end, (count, _) in zip(ends, part.micro_batches, strict=True)])
    lengths = [[tokens for _, tokens in part.micro_batches] for part in parts]
    return ShardPlan(rows=rows, rows_per_chunk=rows_per_chunk, micro_batch_indices=indices, micro_batch_lengths=lengths)


def _check_multiple(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}, but must be at least 1")
