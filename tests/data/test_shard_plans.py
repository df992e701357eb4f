"""Shard plans: each row is in one shard and in its chunk, ranks have the same micro-batches, none over the limit."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.packing import get_packer
from asyncrl.data.sharding import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    ShardPlan,
    caller_rows,
    plan_shards,
)

ALGORITHMS = ("concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing")

LIMIT = 64


def dynamic_args(*, limit: int = LIMIT, multiple: int = 1) -> DynamicBatchingArgs:
    return {
        "max_tokens_per_microbatch": limit,
        "sequence_length_round": multiple,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }


def packing_args(
    *, limit: int = LIMIT, multiple: int = 1, algorithm: str = "first_fit_decreasing"
) -> SequencePackingArgs:
    return {
        "max_tokens_per_microbatch": limit,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": algorithm,
        "sequence_length_pad_multiple": multiple,
    }


def planned(lengths: Sequence[int], *, width: int = 1000, **arguments: Any) -> list[ShardPlan]:
    return plan_shards(len(lengths), lengths=lambda _: lengths, width=lambda _: width, **arguments)


def rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int, int | None]:
    """Draws (lengths, shards, batch_size) of some chunks. The rows of a chunk are a multiple of the shards."""
    shards = draw(st.integers(1, 4))
    chunk_rows = shards * draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 40), min_size=chunks * chunk_rows, max_size=chunks * chunk_rows))
    return lengths, shards, chunk_rows if chunks > 1 or draw(st.booleans()) else None


def check_rows(plans: list[ShardPlan], *, rows: int, batch_size: int | None) -> list[list[list[int]]]:
    """Checks that every row is there once, in its chunk. Returns the rows by [shard][chunk]."""
    assert sorted(caller_rows(plans)) == list(range(rows))
    parts = []
    for plan in plans:
        assert sum(plan.rows_per_chunk) == len(plan.rows)
        ends = [sum(plan.rows_per_chunk[: c + 1]) for c in range(len(plan.rows_per_chunk))]
        mine = [plan.rows[end - count : end] for count, end in zip(plan.rows_per_chunk, ends, strict=True)]
        for c, part in enumerate(mine):
            assert {row // (batch_size or rows) for row in part} <= {c}
        parts.append(mine)
    return parts


def micro_batches(plan: ShardPlan, parts: list[list[int]]) -> list[list[tuple[list[int], int]]]:
    """Returns (rows, tokens) of each micro-batch by chunk. Checks that they cover the chunk's rows in order."""
    assert plan.micro_batch_indices is not None
    assert plan.micro_batch_lengths is not None
    found = []
    for part, bounds, tokens in zip(parts, plan.micro_batch_indices, plan.micro_batch_lengths, strict=True):
        cuts = [(part[start:end], count) for (start, end), count in zip(bounds, tokens, strict=True)]
        assert [row for rows, _ in cuts for row in rows] == part
        assert all(rows for rows, _ in cuts)
        found.append(cuts)
    return found


@given(batch=batches())
@settings(max_examples=50, deadline=None)
def test_even_shards_are_equal_contiguous_parts_of_every_chunk(batch: tuple[list[int], int, int | None]) -> None:
    lengths, shards, batch_size = batch
    for shard, parts in enumerate(
        check_rows(
            planned(lengths, shards=shards, batch_size=batch_size),
            rows=len(lengths),
            batch_size=batch_size,
        )
    ):
        size = (batch_size or len(lengths)) // shards
        for c, part in enumerate(parts):
            start = c * size * shards + shard * size
            assert part == list(range(start, start + size))


def test_uneven_shards_are_full_from_the_first_on_and_may_be_empty() -> None:
    assert [plan.rows for plan in planned([1] * 5, shards=4, allow_uneven_shards=True)] == [[0, 1], [2, 3], [4], []]
    assert [plan.rows for plan in planned([], shards=2, allow_uneven_shards=True)] == [[], []]


@given(batch=batches(), multiple=st.integers(1, 16), width=st.sampled_from([1000, 40, 41]))
@settings(max_examples=60, deadline=None)
def test_dynamic_micro_batches_have_the_same_boundaries_on_every_shard_and_keep_to_the_limit(
    batch: tuple[list[int], int, int | None], multiple: int, width: int
) -> None:
    lengths, shards, batch_size = batch
    plans = planned(lengths, shards=shards, dynamic=dynamic_args(multiple=multiple), batch_size=batch_size, width=width)
    assert all(plan.micro_batch_indices == plans[0].micro_batch_indices for plan in plans)
    assert all(plan.micro_batch_lengths == plans[0].micro_batch_lengths for plan in plans)
    parts = check_rows(plans, rows=len(lengths), batch_size=batch_size)
    by_shard = [micro_batches(plan, mine) for plan, mine in zip(plans, parts, strict=True)]
    for chunk in zip(*by_shard, strict=True):
        dealt = [[lengths[row] for rows, _ in shard for row in rows] for shard in chunk]
        in_turn = [length for deal in zip(*dealt, strict=True) for length in deal]
        assert in_turn == sorted(in_turn)
        for position in range(len(chunk[0])):
            rows, tokens = chunk[0][position]
            longest = max(lengths[row] for shard in chunk for row in shard[position][0])
            assert tokens == min(rounded(max(1, longest), multiple), width)
            assert len(rows) * tokens <= LIMIT
            if position + 1 < len(chunk[0]):  # the micro-batch was closed because the next deal did not fit
                following = max(lengths[shard[position + 1][0][0]] for shard in chunk)
                assert (len(rows) + 1) * min(rounded(max(1, following), multiple), width) > LIMIT


@given(batch=batches(), multiple=st.integers(1, 16), algorithm=st.sampled_from(ALGORITHMS))
@settings(max_examples=60, deadline=None)
def test_packed_shards_have_equally_many_bins_and_no_bin_is_over_the_limit(
    batch: tuple[list[int], int, int | None], multiple: int, algorithm: str
) -> None:
    lengths, shards, batch_size = batch
    args = packing_args(multiple=multiple, algorithm=algorithm)
    padded = [rounded(length, multiple) for length in lengths]
    chunk_rows = batch_size or len(lengths)
    needed = [
        rounded(len(get_packer(algorithm, LIMIT).pack(padded[start : start + chunk_rows])), shards)
        for start in range(0, len(lengths), chunk_rows)
    ]
    if max(needed) > chunk_rows:
        with pytest.raises(ValueError, match="cannot fill"):
            planned(lengths, shards=shards, packing=args, batch_size=batch_size)
        return
    plans = planned(lengths, shards=shards, packing=args, batch_size=batch_size)
    parts = check_rows(plans, rows=len(lengths), batch_size=batch_size)
    by_shard = [micro_batches(plan, mine) for plan, mine in zip(plans, parts, strict=True)]
    for count, chunk in zip(needed, zip(*by_shard, strict=True), strict=True):
        assert {len(shard) for shard in chunk} == {count // shards}
        for shard in chunk:
            for rows, tokens in shard:
                assert tokens == sum(rounded(lengths[row], multiple) for row in rows) <= LIMIT


def test_dynamic_micro_batches_by_hand() -> None:
    # Sorted: 1 2 2 3 5 6 6 8. Dealt in turn, the widths are 2 3 6 8, rounded up to 4 4 8 8.
    plans = planned([6, 2, 8, 1, 5, 2, 6, 3], shards=2, dynamic=dynamic_args(limit=12, multiple=4), width=7)
    assert [plan.rows for plan in plans] == [[3, 5, 4, 6], [1, 7, 0, 2]]
    assert [plan.micro_batch_indices for plan in plans] == [[[[0, 2], [2, 3], [3, 4]]]] * 2
    assert [plan.micro_batch_lengths for plan in plans] == [[[4, 7, 7]]] * 2  # the input is only 7 wide


def test_bin_b_is_a_micro_batch_of_shard_b_modulo_the_shards() -> None:
    # Concatenative bins of 10 tokens: [0 1] [2] [3] [4 5]. Rows are padded to a multiple of 2.
    plans = planned([5, 3, 7, 9, 1, 1], shards=2, packing=packing_args(limit=10, multiple=2, algorithm="concatenative"))
    assert [plan.rows for plan in plans] == [[0, 1, 3], [2, 4, 5]]
    assert [plan.micro_batch_indices for plan in plans] == [[[[0, 2], [2, 3]]], [[[0, 1], [1, 3]]]]
    assert [plan.micro_batch_lengths for plan in plans] == [[[10, 10]], [[8, 4]]]
    assert caller_rows(plans) == [0, 1, 3, 2, 4, 5]


@pytest.mark.parametrize(
    ("rows", "shards", "batch_size", "message"),
    [
        (10, 2, 4, r"Total batch size \(10\) is not a multiple of batch_size \(4\)"),
        (10, 2, 5, r"Batch size \(5\) is not a multiple of shards \(2\)"),
        (9, 2, None, r"Batch size \(9\) is not a multiple of shards \(2\)"),
        (9, 0, None, "shards is 0, but must be at least 1"),
        (9, 1, 0, "batch_size is 0, but must be at least 1"),
    ],
)
def test_numbers_that_do_not_divide_are_assertion_errors_in_every_mode(
    rows: int, shards: int, batch_size: int | None, message: str
) -> None:
    lengths = [1] * rows
    with pytest.raises(AssertionError, match=message):
        planned(lengths, shards=shards, batch_size=batch_size)
    with pytest.raises(AssertionError, match=message):
        planned(lengths, shards=shards, dynamic=dynamic_args(), batch_size=batch_size)
    with pytest.raises(AssertionError, match=message):
        planned(lengths, shards=shards, packing=packing_args(), batch_size=batch_size)


def test_a_row_over_the_limit_is_an_assertion_error_dynamic_and_a_value_error_packed() -> None:
    with pytest.raises(AssertionError, match=r"a row of 72 tokens .* is over max_tokens_per_microbatch \(64\)"):
        planned([1, 65], shards=1, dynamic=dynamic_args(multiple=8))
    with pytest.raises(ValueError, match="sequence 1 has 72 tokens, but a bin holds 0 to 64"):
        planned([1, 65], shards=1, packing=packing_args(multiple=8))


def test_fewer_sequences_than_bins_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="3 sequences cannot fill 4 bins"):
        planned([60, 60, 60], shards=2, packing=packing_args(), allow_uneven_shards=True)


@pytest.mark.parametrize("multiple", [0, -8])
def test_a_multiple_below_one_is_a_value_error(multiple: int) -> None:
    with pytest.raises(ValueError, match=f"sequence_length_round is {multiple}, but must be at least 1"):
        planned([1], shards=1, dynamic=dynamic_args(multiple=multiple))
    with pytest.raises(ValueError, match=f"sequence_length_pad_multiple is {multiple}, but must be at least 1"):
        planned([1], shards=1, packing=packing_args(multiple=multiple))
