"""Rows are divided among data-parallel ranks by their lengths only."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.sharding import DynamicBatchingArgs, SequencePackingArgs
from asyncrl.data_plane.interfaces import PAD_SEQLEN, KVBatchMeta
from asyncrl.data_plane.sharding import shard_meta_for_dp

DYNAMIC = DynamicBatchingArgs(
    max_tokens_per_microbatch=64, sequence_length_round=8, input_key="input_ids", input_lengths_key="input_lengths"
)
PACKED = SequencePackingArgs(
    max_tokens_per_microbatch=64,
    input_key="input_ids",
    input_lengths_key="input_lengths",
    algorithm="first_fit_decreasing",
    sequence_length_pad_multiple=4,
)
MODES: dict[str, dict[str, Any]] = {
    "even": {},
    "dynamic": {"dynamic_batching_args": DYNAMIC},
    "packed": {"sequence_packing_args": PACKED},
}


def meta_of(lengths: list[int]) -> KVBatchMeta:
    ids = [f"{i}.0_g0" for i in range(len(lengths))]
    tags = [{"row": i} for i in range(len(lengths))]
    return KVBatchMeta("train", "train", ids, ["x"], list(lengths), {PAD_SEQLEN: 64, "keep": [1]}, tags)


def tokens_of(mode: str, lengths: list[int], width: int) -> int:
    """Returns the tokens of a micro-batch of these rows, as its mode counts them."""
    return len(lengths) * width if mode == "dynamic" else sum(-(-length // 4) * 4 for length in lengths)


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data(), dp_world=st.integers(1, 3), chunks=st.integers(1, 2))
@settings(max_examples=40, deadline=None)
def test_every_row_goes_to_one_rank_with_its_tags_and_the_indices_restore_the_order(
    mode: str, data: st.DataObject, dp_world: int, chunks: int
) -> None:
    batch_size = dp_world * 4
    total = batch_size * chunks
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=total, max_size=total))
    meta = meta_of(lengths)
    before = copy.deepcopy(meta)
    shards, indices = shard_meta_for_dp(meta, dp_world=dp_world, batch_size=batch_size, **MODES[mode])
    assert meta == before
    assert len(shards) == dp_world
    joined = shards[0].concat(*shards[1:])
    order = list(range(total)) if indices is None else indices
    restored: list[Any] = [None] * total
    for place, row in enumerate(order):  # like reorder_data: out[indices[i]] = in[i]
        restored[row] = joined.sample_ids[place]
    assert restored == meta.sample_ids
    assert joined.tags == [{"row": row} for row in order]
    assert joined.sequence_lengths == [lengths[row] for row in order]
    for shard in shards:
        assert (shard.partition_id, shard.fields, shard.extra_info["keep"]) == ("train", ["x"], [1])
        assert sum(shard.extra_info["elem_counts_per_gb"]) == shard.size
    if mode != "even":
        counts = {tuple(map(len, shard.extra_info["micro_batch_indices"])) for shard in shards}
        assert len(counts) == 1, "ranks have different numbers of micro-batches"


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
@given(data=st.data(), dp_world=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_micro_batches_in_extra_info_cover_the_rank_and_keep_the_limit(
    mode: str, data: st.DataObject, dp_world: int
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=6 * dp_world, max_size=6 * dp_world))
    shards, _ = shard_meta_for_dp(meta_of(lengths), dp_world=dp_world, **MODES[mode])
    for shard in shards:
        assert shard.sequence_lengths is not None
        (bounds,) = shard.extra_info["micro_batch_indices"]
        (widths,) = shard.extra_info["micro_batch_lengths"]
        assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == shard.size
        for (start, end), width in zip(bounds, widths, strict=True):
            assert tokens_of(mode, shard.sequence_lengths[start:end], width) <= 64


def test_a_cut_that_keeps_the_order_has_no_indices() -> None:
    assert shard_meta_for_dp(meta_of([1, 2, 3, 4]), dp_world=2)[1] is None
    assert shard_meta_for_dp(meta_of([1, 2, 3, 4]), dp_world=2, batch_size=2)[1] == [0, 2, 1, 3]


def test_a_shard_carries_no_cut_of_before() -> None:
    (packed,), _ = shard_meta_for_dp(meta_of([4, 4]), dp_world=1, **MODES["packed"])
    assert packed.extra_info["micro_batch_indices"]
    (plain,), _ = shard_meta_for_dp(packed, dp_world=1, batch_size=1)
    assert "micro_batch_indices" not in plain.extra_info
    assert "micro_batch_lengths" not in plain.extra_info
    assert plain.extra_info["elem_counts_per_gb"] == [1, 1]


def test_dynamic_micro_batches_are_no_wider_than_the_stamped_width() -> None:
    meta = meta_of([60, 60])
    meta.extra_info[PAD_SEQLEN] = 60
    (shard,), _ = shard_meta_for_dp(meta, dp_world=1, dynamic_batching_args={**DYNAMIC, "sequence_length_round": 32})
    assert shard.extra_info["micro_batch_lengths"] == [[60, 60]]


@pytest.mark.parametrize(
    ("meta", "args", "match"),
    [
        (meta_of([]), {}, "names no rows"),
        (KVBatchMeta("train", None, ["a", "b"]), {}, "no sequence_lengths"),
        (meta_of([1, 2]), {**MODES["dynamic"], **MODES["packed"]}, "exclude each other"),
    ],
)
def test_what_cannot_be_cut_is_a_value_error(meta: KVBatchMeta, args: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        shard_meta_for_dp(meta, dp_world=2, **args)


def test_a_batch_that_the_ranks_cannot_share_is_refused_with_the_numbers() -> None:
    with pytest.raises(AssertionError, match="3"):
        shard_meta_for_dp(meta_of([1, 2, 3]), dp_world=2)
