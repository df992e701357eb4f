"""KVBatchMeta: its methods return copies, and certain laws relate them."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl.data_plane
from asyncrl.data_plane.interfaces import PAD_SEQLEN, KVBatchMeta


@st.composite
def metas(draw: st.DrawFn, min_size: int = 0) -> KVBatchMeta:
    size = draw(st.integers(min_size, 8))
    return KVBatchMeta(
        "train",
        draw(st.sampled_from([None, "logprob"])),
        [f"{i // 2}.0_g{i % 2}" for i in range(size)],
        fields=draw(st.sampled_from([None, ["input_ids", "advantages"]])),
        sequence_lengths=draw(st.none() | st.lists(st.integers(0, 99), min_size=size, max_size=size)),
        extra_info=draw(st.sampled_from([{}, {PAD_SEQLEN: 128, "step": 3}])),
        tags=draw(st.none() | st.just([{"reward": i, "nested": [i]} for i in range(size)])),
    )


@given(metas(), st.data())
@settings(max_examples=50, deadline=None)
def test_slices_at_any_cut_concatenate_to_the_whole(meta: KVBatchMeta, data: st.DataObject) -> None:
    first, second = sorted(data.draw(st.tuples(st.integers(0, meta.size), st.integers(0, meta.size))))
    parts = [meta.slice(0, first), meta.slice(first, second), meta.slice(second, meta.size)]
    assert parts[0].concat(*parts[1:]) == meta


@given(metas(min_size=1), st.data())
@settings(max_examples=50, deadline=None)
def test_subset_moves_ids_lengths_and_tags_together_and_drop_is_its_complement(
    meta: KVBatchMeta, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.integers(0, meta.size - 1)))
    subset = meta.subset(rows)
    assert subset.sample_ids == [meta.sample_ids[i] for i in rows]
    assert subset.sequence_lengths == (meta.sequence_lengths and [meta.sequence_lengths[i] for i in rows])
    assert subset.tags == (meta.tags and [meta.tags[i] for i in rows])
    kept = [i for i in range(meta.size) if i not in rows]
    assert meta.drop(rows) == (meta.subset(kept) if kept else None)


@given(metas(min_size=2), st.data())
@settings(max_examples=50, deadline=None)
def test_every_copy_shares_nothing_with_its_source(meta: KVBatchMeta, data: st.DataObject) -> None:
    meta.stamp_tags({"flag": list(range(meta.size))})
    meta.extra_info["nested"] = {"list": [1]}
    before = copy.deepcopy(meta)
    for result in (
        meta.subset([0, 0]), meta.slice(0, 2), meta.drop([0]), meta.concat(meta), meta.with_fields(["returns"])
    ):  # fmt: skip
        assert result is not None
        result.stamp_tags({"flag": ["changed"] * result.size})
        result.extra_info["nested"]["list"].append(2)
        result.sample_ids.append("more")
        for column in (result.fields, result.sequence_lengths):
            if column is not None:
                column.clear()
        for tag in result.tags or []:
            tag.get("nested", []).append("changed")
        assert meta == before


def test_a_row_named_twice_has_tags_of_its_own() -> None:
    twice = KVBatchMeta("train", None, ["a"], tags=[{"x": 1}]).subset([0, 0])
    assert twice.tags is not None
    twice.tags[0]["x"] = 2
    assert twice.tags[1] == {"x": 1}


@pytest.mark.parametrize("column", [{"sequence_lengths": [1]}, {"tags": [{}, {}, {}]}])
def test_lengths_and_tags_that_do_not_align_are_refused(column: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="for 2 sample_ids"):
        KVBatchMeta("train", None, ["a", "b"], **column)


def test_concat_of_two_partitions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['train', 'val'\]"):
        KVBatchMeta("train", None, ["a"]).concat(KVBatchMeta("val", None, ["b"]))


def test_concat_keeps_only_what_holds_for_all_sides() -> None:
    whole = KVBatchMeta(
        "train", "t", ["a"], fields=["x", "y"], sequence_lengths=[1], extra_info={PAD_SEQLEN: 4, "step": 1}, tags=[{}]
    )
    joined = whole.concat(
        KVBatchMeta("train", "t", ["b"], fields=["y", "z"], extra_info={"dp_rank": 1, "more": 2}),
        KVBatchMeta("train", "t", ["c"], fields=["y"], extra_info={"dp_rank": 0, "step": 1}),
    )
    assert joined == KVBatchMeta("train", "t", ["a", "b", "c"], fields=["y"], extra_info={"step": 1, "more": 2})
    assert whole.concat(KVBatchMeta("train", "t", ["b"])).fields is None


@pytest.mark.parametrize(
    ("sides", "stamp"),
    [
        ([(8, [3]), (None, [5])], 8),
        ([(8, [3]), (None, [12])], 12),  # dynamic sampling: one meta is stamped, and the next one has longer rows
        ([(None, [12]), (8, [3])], 12),
        ([(8, [3]), (16, [3])], 16),
        ([(8, None), (16, None)], 16),  # a stamp covers the rows of its own meta
        ([(8, None), (None, [12])], 12),
        ([(8, [3]), (None, None)], None),  # the last meta has neither a stamp nor lengths
        ([(8, [3]), (None, None), (16, [3])], None),
        ([(8, [3]), (None, [])], 8),
        ([(None, [3]), (None, [4])], None),
    ],
)
def test_a_concatenated_stamp_covers_every_row_or_is_taken_off(
    sides: list[tuple[int | None, list[int] | None]], stamp: int | None
) -> None:
    metas = [
        KVBatchMeta(
            "train",
            None,
            [f"{i}.0_g{row}" for row in range(1 if lengths is None else len(lengths))],
            sequence_lengths=lengths,
            extra_info={} if width is None else {PAD_SEQLEN: width},
        )
        for i, (width, lengths) in enumerate(sides)
    ]
    assert metas[0].concat(*metas[1:]).extra_info.get(PAD_SEQLEN) == stamp


def test_a_cut_into_micro_batches_stays_only_with_the_rows_that_were_cut() -> None:
    cut = {"micro_batch_indices": [[[0, 1], [1, 3]]], "micro_batch_lengths": [[4, 8]], "elem_counts_per_gb": [3]}
    meta = KVBatchMeta("train", None, ["a", "b", "c"], extra_info={PAD_SEQLEN: 8, **cut})
    for same in (meta.subset([0, 1, 2]), meta.slice(0, 3), meta.with_fields(["x"]), meta.drop([]), meta.concat()):
        assert same is not None
        assert same.extra_info == meta.extra_info
    uncut = KVBatchMeta("train", None, ["d"])
    for other in (
        meta.subset([1, 0, 2]), meta.slice(0, 2), meta.drop([1]), meta.concat(uncut), uncut.concat(meta),
        meta.concat(meta), uncut.slice(0, 0).concat(meta), uncut.concat(meta.slice(0, 0)),
    ):  # fmt: skip
        assert other is not None
        assert not cut.keys() & other.extra_info.keys()


def test_drop_of_a_row_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IndexError):
        KVBatchMeta("train", None, ["a"]).drop([1])


def test_with_fields_appends_each_name_once() -> None:
    meta = KVBatchMeta("train", None, ["a"], fields=["x"])
    assert meta.with_fields(["y", "x", "y"]).fields == ["x", "y"]
    assert KVBatchMeta("train", None, ["a"]).with_fields(["y"]).fields == ["y"]


def test_stamping_tags_of_another_length_writes_nothing() -> None:
    meta = KVBatchMeta("train", None, ["a", "b"])
    with pytest.raises(ValueError, match="1 values of 'short' for 2 rows"):
        meta.stamp_tags({"fine": [1, 2], "short": [1]})
    assert meta.tags is None
    meta.stamp_tags({"reward": [0.5, 1.0]})
    assert meta.tags == [{"reward": 0.5}, {"reward": 1.0}]


def test_every_name_of_the_package_can_be_imported_from_it() -> None:
    assert all(getattr(asyncrl.data_plane, name) is not None for name in asyncrl.data_plane.__all__)
    assert asyncrl.data_plane.KVBatchMeta is KVBatchMeta
    with pytest.raises(AttributeError, match="no attribute 'Meta'"):
        asyncrl.data_plane.Meta  # noqa: B018
