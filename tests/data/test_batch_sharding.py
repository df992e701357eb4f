"""Batches cut for ranks: results return in the caller's order, and no micro-batch is too large."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data import BatchedDataDict, DynamicBatchingArgs, SequencePackingArgs, SlicedDataDict

WIDTH = 12
LIMIT = 24


def dynamic_args(*, limit: int = LIMIT, multiple: int = 4) -> DynamicBatchingArgs:
    return {
        "max_tokens_per_microbatch": limit,
        "sequence_length_round": multiple,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }


def packing_args(*, limit: int = LIMIT, multiple: int = 2, algorithm: str = "first_fit_shuffle") -> SequencePackingArgs:
    return {
        "max_tokens_per_microbatch": limit,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": algorithm,
        "sequence_length_pad_multiple": multiple,
    }


def batch_of(lengths: list[int]) -> BatchedDataDict[Any]:
    """Builds a batch in which row i has the token i + 1, `lengths[i]` times, and right padding."""
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    tokens_B1 = torch.arange(1, len(lengths) + 1).unsqueeze(1)
    ids_BS = torch.where(torch.arange(WIDTH) < lengths_B.unsqueeze(1), tokens_B1, 0)
    return BatchedDataDict(
        {"input_ids": ids_BS, "input_lengths": lengths_B, "names": [f"row {i}" for i in range(len(lengths))]}
    )


def result_of(part: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Returns what a rank computes for some rows: a column that is as wide as its input."""
    return BatchedDataDict({"logprobs": part["input_ids"] * -2.0, "echo": [f"{name}!" for name in part["names"]]})


def check_restored(results: BatchedDataDict[Any], batch: BatchedDataDict[Any]) -> None:
    width = results["logprobs"].shape[1]
    assert torch.equal(results["logprobs"], batch["input_ids"][:, :width] * -2.0)
    assert not batch["input_ids"][:, width:].any()  # only padding was cut off
    assert results["echo"] == [f"{name}!" for name in batch["names"]]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], int, int | None]:
    """Draws (lengths, shards, batch_size) with at least one chunk, and at least two rows a shard in each chunk."""
    shards = draw(st.integers(1, 3))
    chunk_rows = shards * draw(st.integers(2, 4))
    chunks = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, WIDTH), min_size=chunks * chunk_rows, max_size=chunks * chunk_rows))
    return lengths, shards, chunk_rows if chunks > 1 or draw(st.booleans()) else None


@given(cut=cuts())
@settings(max_examples=40, deadline=None)
def test_what_ranks_compute_of_dynamic_micro_batches_is_restored_to_the_callers_order(
    cut: tuple[list[int], int, int | None],
) -> None:
    lengths, shards, batch_size = cut
    batch = batch_of(lengths)
    parts, indices = batch.shard_by_batch_size(shards, batch_size, dynamic_batching_args=dynamic_args())
    results = []
    for c in range(len(lengths) // (batch_size or len(lengths))):
        chunks = [part.get_batch(c) for part in parts]
        assert len({chunk.get_microbatch_iterator_dynamic_shapes_len() for chunk in chunks}) == 1
        shapes = [
            [mb["input_ids"].shape for mb in rank.make_microbatch_iterator_with_dynamic_shapes()] for rank in chunks
        ]
        assert all(shape == shapes[0] for shape in shapes)
        assert all(rows * width <= LIMIT for rows, width in shapes[0])
        assert len(shapes[0]) == chunks[0].get_microbatch_iterator_dynamic_shapes_len()
    for part in parts:
        for c in range(len(part.elem_counts_per_gb or [])):
            micro_batches = part.get_batch(c).make_microbatch_iterator_with_dynamic_shapes()
            results += [result_of(micro_batch) for micro_batch in micro_batches]
    restored = BatchedDataDict.from_batches(results)
    restored.reorder_data(indices)
    check_restored(restored, batch)


@given(
    cut=cuts(),
    algorithm=st.sampled_from(
        ["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"]
    ),
)
@settings(max_examples=40, deadline=None)
def test_what_ranks_compute_of_packed_bins_is_restored_to_the_callers_order(
    cut: tuple[list[int], int, int | None], algorithm: str
) -> None:
    lengths, shards, batch_size = cut
    # Any two rows fit into a bin, so there are enough rows for a multiple of the shards.
    batch = batch_of(lengths)
    parts, indices = batch.shard_by_batch_size(
        shards, batch_size, sequence_packing_args=packing_args(algorithm=algorithm)
    )
    results = []
    for c in range(len(lengths) // (batch_size or len(lengths))):
        counts = {part.get_batch(c).get_microbatch_iterator_for_packable_sequences_len()[0] for part in parts}
        assert len(counts) == 1
    for part in parts:
        for c in range(len(part.elem_counts_per_gb or [])):
            chunk = part.get_batch(c)
            tokens = []
            for micro_batch in chunk.make_microbatch_iterator_for_packable_sequences():
                tokens.append(sum(-(-length // 2) * 2 for length in micro_batch["input_lengths"].tolist()))
                results.append(result_of(micro_batch))
            assert max(tokens) <= LIMIT
            assert chunk.get_microbatch_iterator_for_packable_sequences_len() == (len(tokens), max(tokens))
    restored = BatchedDataDict.from_batches(results)
    restored.reorder_data(indices)
    check_restored(restored, batch)


@given(lengths=st.lists(st.integers(1, WIDTH), min_size=1, max_size=9), shards=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_results_of_uneven_shards_concatenate_to_the_callers_order_even_when_some_are_empty(
    lengths: list[int], shards: int
) -> None:
    batch = batch_of(lengths)
    parts = batch.shard_by_batch_size(shards, allow_uneven_shards=True)
    rows = -(-len(lengths) // shards)
    assert [part.size for part in parts] == [max(0, min(rows, len(lengths) - shard * rows)) for shard in range(shards)]
    assert all(part.keys() == batch.keys() for part in parts)
    check_restored(BatchedDataDict.from_batches([result_of(part) for part in parts]), batch)


@given(cut=cuts())
@settings(max_examples=40, deadline=None)
def test_even_shards_have_the_chunks_regrouped_by_position(cut: tuple[list[int], int, int | None]) -> None:
    lengths, shards, batch_size = cut
    batch = batch_of(lengths)
    parts = batch.shard_by_batch_size(shards, batch_size)
    part_rows = (batch_size or len(lengths)) // shards
    for c in range(len(lengths) // (part_rows * shards)):
        chunk = BatchedDataDict.from_batches([part.get_batch(c, part_rows) for part in parts])
        assert chunk["names"] == batch["names"][c * part_rows * shards : (c + 1) * part_rows * shards]
    if batch_size is None:
        assert [part["names"] for part in parts] == [batch.chunk(rank, shards)["names"] for rank in range(shards)]


def test_shards_are_sliced_batches_that_carry_their_micro_batches() -> None:
    batch = batch_of([3, 1, 2, 4])
    assert [part.micro_batch_indices for part in batch.shard_by_batch_size(2)] == [None, None]
    (first, second), indices = batch.shard_by_batch_size(2, dynamic_batching_args=dynamic_args(limit=8))
    assert isinstance(first, SlicedDataDict)
    assert isinstance(first, BatchedDataDict)
    assert indices == [1, 0, 2, 3]
    assert first.micro_batch_indices == second.micro_batch_indices == [[[0, 2]]]
    assert first.micro_batch_lengths == second.micro_batch_lengths == [[4]]
    assert first.elem_counts_per_gb == second.elem_counts_per_gb == [2]
    for copied in (copy.copy(first), first.copy(), pickle.loads(pickle.dumps(first))):
        assert copied.micro_batch_indices == [[[0, 2]]]
    assert first.slice(0, 1).micro_batch_indices is None
    assert BatchedDataDict.from_batches([first, second]).micro_batch_indices is None


def test_packing_needs_no_even_number_of_rows_when_uneven_shards_are_allowed() -> None:
    parts, indices = batch_of([12, 12, 6]).shard_by_batch_size(
        2, allow_uneven_shards=True, sequence_packing_args=packing_args(algorithm="first_fit_decreasing")
    )
    assert sorted(indices) == [0, 1, 2]
    assert sorted(part.size for part in parts) == [1, 2]


def test_a_shard_takes_no_more_room_on_its_way_to_a_rank_than_its_rows() -> None:
    batch = BatchedDataDict({"x": torch.zeros(64, 1000)})
    for part in batch.shard_by_batch_size(64)[:2]:
        buffer = io.BytesIO()
        torch.save(part["x"], buffer)
        assert len(buffer.getvalue()) < 2 * 1000 * 4


def test_the_dimension_that_micro_batches_are_cut_in_may_be_another() -> None:
    batch = batch_of([3, 1, 2, 4])
    batch["layers_first"] = torch.zeros(4, 2, WIDTH)
    (shard,), _ = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic_args(limit=8, multiple=2))
    widths = (shard.micro_batch_lengths or [])[0]
    cut = list(shard.make_microbatch_iterator_with_dynamic_shapes(sequence_dim=2))
    assert [tuple(part["layers_first"].shape[1:]) for part in cut] == [(2, width) for width in widths]
    assert all(part["input_ids"].shape[1] == WIDTH for part in cut)


def test_columns_of_unequal_length_are_an_assertion_error() -> None:
    batch = BatchedDataDict({"a": torch.zeros(4), "b": [1, 2]})
    message = "Batch sizes are not the same across the rollout batch.*'a': 4, 'b': 2"
    with pytest.raises(AssertionError, match=message):
        batch.shard_by_batch_size(2)
    with pytest.raises(AssertionError, match=message):
        batch.reorder_data([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": 2, "batch_size": 3}, r"Total batch size \(4\) is not a multiple of batch_size \(3\)"),
        ({"shards": 3}, r"Batch size \(4\) is not a multiple of shards \(3\)"),
        ({"shards": 2, "batch_size": 2, "allow_uneven_shards": True}, "uneven shards .* batch_size is 2"),
        (
            {"shards": 2, "allow_uneven_shards": True, "dynamic_batching_args": dynamic_args()},
            "uneven shards and dynamic batching exclude each other",
        ),
        (
            {"shards": 2, "dynamic_batching_args": dynamic_args(), "sequence_packing_args": packing_args()},
            "dynamic_batching_args and sequence_packing_args cannot be passed together",
        ),
        (
            {"shards": 2, "dynamic_batching_args": dynamic_args(limit=7)},
            r"a row of 8 tokens .* max_tokens_per_microbatch \(7\)",
        ),
    ],
)
def test_what_contradicts_the_batch_is_an_assertion_error_that_names_the_numbers(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        batch_of([5, 1, 1, 1]).shard_by_batch_size(**arguments)


def test_packing_errors_are_the_packers_value_errors() -> None:
    with pytest.raises(ValueError, match="sequence 0 has 12 tokens"):
        batch_of([12, 1]).shard_by_batch_size(1, sequence_packing_args=packing_args(limit=10))
    with pytest.raises(ValueError, match="3 sequences cannot fill 4 bins"):
        batch_of([12, 12, 12]).shard_by_batch_size(
            2, allow_uneven_shards=True, sequence_packing_args=packing_args(limit=12)
        )


def test_micro_batch_iterators_refuse_batches_without_micro_batches_and_several_chunks_at_once() -> None:
    batch = batch_of([1, 2, 3, 4])
    (shard,), _ = batch.shard_by_batch_size(1, 2, dynamic_batching_args=dynamic_args())
    for cut, message in ((batch, "no micro-batches"), (shard, r"has 2 chunks, .* get_batch")):
        for call in (
            cut.make_microbatch_iterator_with_dynamic_shapes,
            cut.make_microbatch_iterator_for_packable_sequences,
            cut.get_microbatch_iterator_dynamic_shapes_len,
            cut.get_microbatch_iterator_for_packable_sequences_len,
        ):
            with pytest.raises(AssertionError, match=message):
                call()
