"""Which rows go to which rank, and where its micro-batches are cut. Pure: numbers of rows and lengths in, indices out.

A batch is cut into chunks of `batch_size` rows (one optimizer step each), a chunk into `shards` parts; a shard is its
parts of all chunks, chunk after chunk. Whatever the mode:

- every row is in exactly one shard, and never leaves its chunk;
- the rows of all shards, concatenated, are `caller_rows(plans)`: what `BatchedDataDict.reorder_data` takes to restore
  the caller's order;
- with micro-batches, every shard has the same number of them in a chunk, because their collectives must line up, and
  none is over `max_tokens_per_microbatch`.

Batches of tensors (`BatchedDataDict.shard_by_batch_size`) and batches that are only named (the data plane) are cut by
the same functions. Arguments that contradict the batch are AssertionErrors with the numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypedDict

from asyncrl.data.packing import get_packer


class DynamicBatchingArgs(TypedDict):
    """Micro-batches of rows alike in length, padded to the longest.

    `sequence_length_round`: that width is rounded up to a multiple of it, so that few different shapes occur.
    `input_key` names the column [B, S] whose width caps it, `input_lengths_key` the column [B] of lengths.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


class SequencePackingArgs(TypedDict):
    """Micro-batches of rows that are laid end to end, without padding between them.

    `algorithm`: one of `asyncrl.data.packing`. `sequence_length_pad_multiple`: each row takes a multiple of it.
    """

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: str
    sequence_length_pad_multiple: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One shard. `rows`: the caller's row numbers in the shard's order; the rest has an entry a chunk.

    `micro_batch_indices[c]`: [start, end) of each micro-batch, counted from the first row of chunk c in this shard.
    `micro_batch_lengths[c]`: tokens of each: the width its rows are cut to, or all tokens of a packed bin.
    Both are None for a plain cut.
    """

    rows: list[int]
    rows_per_chunk: list[int]
    micro_batch_indices: list[list[list[int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None


def require(condition: bool, message: str) -> None:
    """AssertionError unless `condition`. No assert statement: python -O would let a caller's mistake through."""
    if not condition:
        raise AssertionError(message)


def check_modes(*, batch_size: int | None, allow_uneven_shards: bool, dynamic: bool, packed: bool) -> None:
    """AssertionError for modes that exclude each other."""
    require(not (dynamic and packed), "dynamic_batching_args and sequence_packing_args cannot be passed together")
    require(batch_size is None or not allow_uneven_shards, f"uneven shards are of all rows, batch_size is {batch_size}")
    require(
        not (dynamic and allow_uneven_shards),
        "uneven shards and dynamic batching cannot be had together: ranks would have unlike micro-batches",
    )


def plan_even(total_rows: int, *, shards: int, batch_size: int | None = None) -> list[ShardPlan]:
    """Equal contiguous parts of every chunk."""
    chunks = _chunks(total_rows, shards=shards, batch_size=batch_size, even=True)
    plans = []
    for shard in range(shards):
        parts = [chunk[shard * len(chunk) // shards : (shard + 1) * len(chunk) // shards] for chunk in chunks]
        plans.append(ShardPlan(rows=[row for part in parts for row in part], rows_per_chunk=[len(p) for p in parts]))
    return plans


def plan_uneven(total_rows: int, *, shards: int) -> list[ShardPlan]:
    """⌈rows / shards⌉ contiguous rows a shard; later shards may be short or empty."""
    (chunk,) = _chunks(total_rows, shards=shards, batch_size=None, even=False)
    size = -(-total_rows // shards)
    parts = [list(chunk[shard * size : (shard + 1) * size]) for shard in range(shards)]
    return [ShardPlan(rows=part, rows_per_chunk=[len(part)]) for part in parts]


def plan_dynamic(
    lengths: Sequence[int],
    *,
    shards: int,
    args: DynamicBatchingArgs,
    batch_size: int | None = None,
    width: int | None = None,
) -> list[ShardPlan]:
    """Rows of a chunk by length, shortest first, dealt in turn; the same micro-batch boundaries on every shard.

    A micro-batch is closed when rows × width would exceed the limit. Its width is that of its longest row on any shard,
    rounded up, at most `width` (of the padded input, if it is known).
    """
    limit, multiple = args["max_tokens_per_microbatch"], args["sequence_length_round"]
    _check_multiple("sequence_length_round", multiple)
    parts: list[list[_Part]] = []
    for chunk in _chunks(len(lengths), shards=shards, batch_size=batch_size, even=True):
        order = sorted(chunk, key=lambda row: lengths[row])
        # in ascending order the last of each deal is its longest
        widths = [_padded(max(1, lengths[row]), multiple=multiple, cap=width) for row in order[shards - 1 :: shards]]
        micro_batches = _close_micro_batches(widths, limit=limit)
        parts.append([_Part(rows=order[shard::shards], micro_batches=micro_batches) for shard in range(shards)])
    return _plans(parts, shards=shards)


def plan_packed(
    lengths: Sequence[int],
    *,
    shards: int,
    args: SequencePackingArgs,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
) -> list[ShardPlan]:
    """Each chunk packed into bins, a multiple of `shards`; bin b is a micro-batch of shard b % shards.

    Shards have equally many bins and unequally many rows. `allow_uneven_shards`: the rows of a batch need not be a
    multiple of `shards`. ValueError for a row over the limit, and for fewer rows than bins.
    """
    multiple = args["sequence_length_pad_multiple"]
    _check_multiple("sequence_length_pad_multiple", multiple)
    chunks = _chunks(len(lengths), shards=shards, batch_size=batch_size, even=not allow_uneven_shards)
    packer = get_packer(
        args["algorithm"], args["max_tokens_per_microbatch"], min_bin_count=shards, bin_count_multiple=shards
    )
    parts: list[list[_Part]] = []
    for chunk in chunks:
        padded = [_padded(lengths[row], multiple=multiple) for row in chunk]
        bins = packer.pack(padded)
        dealt = [bins[shard::shards] for shard in range(shards)]
        parts.append(
            [
                _Part(
                    rows=[chunk[i] for content in mine for i in content],
                    micro_batches=[(len(content), sum(padded[i] for i in content)) for content in mine],
                )
                for mine in dealt
            ]
        )
    return _plans(parts, shards=shards)


def caller_rows(plans: Iterable[ShardPlan]) -> list[int]:
    """The caller's row number of every row of the concatenated shards.

    >>> caller_rows(plan_even(4, shards=2, batch_size=2))
    [0, 2, 1, 3]
    """
    return [row for plan in plans for row in plan.rows]


def _chunks(total_rows: int, *, shards: int, batch_size: int | None, even: bool) -> list[range]:
    size = total_rows if batch_size is None else batch_size
    require(shards > 0, f"shards is {shards}, it must be at least 1")
    require(batch_size is None or batch_size > 0, f"batch_size is {batch_size}, it must be at least 1")
    require(
        batch_size is None or total_rows % batch_size == 0,
        f"Total batch size ({total_rows}) is not a multiple of batch_size ({batch_size})",
    )
    require(not even or size % shards == 0, f"Batch size ({size}) is not a multiple of shards ({shards})")
    if batch_size is None:
        return [range(total_rows)]
    return [range(start, start + batch_size) for start in range(0, total_rows, batch_size)]


def _close_micro_batches(widths: Sequence[int], *, limit: int) -> list[tuple[int, int]]:
    """(rows, width) of micro-batches of ascending `widths`, none of more than `limit` tokens."""
    micro_batches: list[tuple[int, int]] = []
    for width in widths:
        require(
            width <= limit,
            f"a row of {width} tokens (sequence_length_round) is over max_tokens_per_microbatch ({limit})",
        )
        if micro_batches and (micro_batches[-1][0] + 1) * width <= limit:
            micro_batches[-1] = (micro_batches[-1][0] + 1, width)
        else:
            micro_batches.append((1, width))
    return micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one shard has of one chunk; `micro_batches`: (rows, tokens) of each, in order."""

    rows: list[int]
    micro_batches: list[tuple[int, int]]


def _plans(parts: list[list[_Part]], *, shards: int) -> list[ShardPlan]:
    """The plans of `parts`, by [chunk][shard]."""
    plans = []
    for shard in range(shards):
        mine = [chunk[shard] for chunk in parts]
        indices = []
        for part in mine:
            ends = list(accumulate(rows for rows, _ in part.micro_batches))
            indices.append([[end - rows, end] for end, (rows, _) in zip(ends, part.micro_batches, strict=True)])
        plans.append(
            ShardPlan(
                rows=[row for part in mine for row in part.rows],
                rows_per_chunk=[len(part.rows) for part in mine],
                micro_batch_indices=indices,
                micro_batch_lengths=[[tokens for _, tokens in part.micro_batches] for part in mine],
            )
        )
    return plans


def _check_multiple(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}, it must be at least 1")


def _padded(length: int, *, multiple: int, cap: int | None = None) -> int:
    padded = -(-length // multiple) * multiple
    return padded if cap is None else min(padded, cap)
