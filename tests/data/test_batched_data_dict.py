"""Batches are joined with right padding, cut by rows, and moved in place."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data import BatchedDataDict, GenerationDatumSpec


def batch(rows: int, width: int, start: int = 0) -> BatchedDataDict:
    ids = torch.arange(start, start + rows * width).reshape(rows, width)
    return BatchedDataDict(
        {"ids": ids, "lengths": torch.full((rows,), width), "names": [f"r{start}.{i}" for i in range(rows)]}
    )


def test_batches_are_joined_in_order_and_padded_on_the_right() -> None:
    joined = BatchedDataDict.from_batches([batch(1, 2), batch(2, 3, start=10)], pad_value_dict={"ids": -1})
    assert joined["ids"].tolist() == [[0, 1, -1], [10, 11, 12], [13, 14, 15]]
    assert joined["lengths"].tolist() == [2, 3, 3]
    assert joined["names"] == ["r0.0", "r10.0", "r10.1"]
    assert joined.size == 3


def test_padding_is_zero_unless_given_and_keeps_the_dtype() -> None:
    joined = BatchedDataDict.from_batches([batch(1, 1), batch(1, 2)])
    assert joined["ids"].tolist() == [[0, 0], [0, 1]]
    assert joined["ids"].dtype == torch.int64


def test_tensors_of_three_dimensions_are_padded_on_dimension_1() -> None:
    joined = BatchedDataDict.from_batches([{"x": torch.ones(1, 1, 2)}, {"x": torch.ones(1, 2, 2)}])
    assert joined["x"].tolist() == [[[1, 1], [0, 0]], [[1, 1], [1, 1]]]


def test_no_batches_and_empty_batches_join_to_what_there_is() -> None:
    assert BatchedDataDict.from_batches([]).size == 0
    assert BatchedDataDict.from_batches([BatchedDataDict(), batch(1, 2)]).size == 1


@pytest.mark.parametrize(
    "empty",
    [
        {"names": []},  # lacks columns
        {"names": [], "ids": torch.zeros(0, 9), "lengths": [], "more": torch.zeros(0)},  # columns of other kinds
        {},
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_batch_without_rows_changes_nothing_whatever_its_columns(empty: dict[str, Any], place: int) -> None:
    batches = [batch(1, 2), batch(2, 2, start=10)]
    whole = BatchedDataDict.from_batches(batches)
    joined = BatchedDataDict.from_batches([*batches[:place], empty, *batches[place:]])
    assert list(joined) == ["ids", "lengths", "names"]
    assert torch.equal(joined["ids"], whole["ids"])
    assert torch.equal(joined["lengths"], whole["lengths"])
    assert joined["names"] == whole["names"]


def test_batches_of_which_none_has_rows_join_to_their_columns_without_rows() -> None:
    joined = BatchedDataDict.from_batches([{"ids": torch.zeros(0, 3)}, {"ids": torch.zeros(0, 5), "names": []}, {}])
    assert {key: list(column) for key, column in joined.items()} == {"ids": [], "names": []}
    assert isinstance(joined["ids"], torch.Tensor)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_missing_column_is_a_key_error_in_either_order(order: tuple[int, int]) -> None:
    batches = [{"a": [1], "b": [2]}, {"a": [1]}]
    with pytest.raises(KeyError):
        BatchedDataDict.from_batches([batches[i] for i in order])


def test_other_types_cannot_be_joined() -> None:
    with pytest.raises(NotImplementedError, match="'x'"):
        BatchedDataDict.from_batches([{"x": "text"}, {"x": "text"}])


@pytest.mark.parametrize("indices", [[2, 0], torch.tensor([2, 0])])
def test_rows_are_selected_in_the_order_asked_for(indices: list[int] | torch.Tensor) -> None:
    chosen = batch(3, 2).select_indices(indices)
    assert chosen["ids"].tolist() == [[4, 5], [0, 1]]
    assert chosen["names"] == ["r0.2", "r0.0"]


def test_a_slice_has_the_rows_from_start_to_before_end() -> None:
    assert batch(4, 1).slice(1, 3)["names"] == ["r0.1", "r0.2"]


def test_truncation_cuts_only_tensors_that_have_the_dimension() -> None:
    data = batch(2, 3)
    data.truncate_tensors(1, 2)
    assert data["ids"].shape == (2, 2)
    assert data["lengths"].shape == (2,)
    data.truncate_tensors(1, 9)
    assert data["ids"].shape == (2, 2)


def test_to_moves_in_place_and_returns_the_batch() -> None:
    data = batch(1, 2)
    assert data.to("meta") is data
    assert data["ids"].device.type == "meta"
    assert data["names"] == ["r0.0"]


def test_get_dict_is_the_columns_themselves() -> None:
    data = batch(1, 2)
    data.get_dict()["new"] = [1]
    assert data["new"] == [1]
    assert not isinstance(data, dict)


def test_columns_may_be_named_by_a_typed_dict_and_given_as_keywords() -> None:
    data: BatchedDataDict[GenerationDatumSpec] = BatchedDataDict[GenerationDatumSpec](names=["a", "b"])
    assert data.size == 2
    assert (data.micro_batch_indices, data.micro_batch_lengths, data.elem_counts_per_gb) == (None, None, None)


@pytest.mark.parametrize(
    "columns", [[torch.zeros(1), torch.zeros(1, 1)], [torch.tensor(1.0)], [[1], torch.zeros(1)], [{"a": 1}]]
)
def test_columns_of_unlike_kinds_cannot_be_joined(columns: list[Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"column 'x': cannot join .* lists only, or tensors"):
        BatchedDataDict.from_batches([{"x": column} for column in columns])


def test_a_mask_is_not_taken_for_row_numbers() -> None:
    with pytest.raises(ValueError, match="indices are a mask"):
        batch(3, 2).select_indices(torch.tensor([True, False, True]))


def test_no_rows_can_be_selected() -> None:
    nothing = batch(3, 2).select_indices([])
    assert nothing["ids"].shape == (0, 2)
    assert nothing["names"] == []


@given(rows=st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_joining_selecting_and_slicing_agree(rows: list[int]) -> None:
    parts = [batch(count, 2, start=10 * i) for i, count in enumerate(rows)]
    joined = BatchedDataDict.from_batches(parts)
    for i, part in enumerate(parts):
        start = sum(rows[:i])
        for same in (joined.slice(start, start + rows[i]), joined.select_indices(range(start, start + rows[i]))):
            assert torch.equal(same["ids"], part["ids"])
            assert same["names"] == part["names"]


def test_reordering_moves_row_i_to_row_indices_i_in_place() -> None:
    data = batch(3, 1)
    data.micro_batch_indices = [[[0, 3]]]
    data.reorder_data([2, 0, 1])
    assert data["ids"].tolist() == [[1], [2], [0]]
    assert data["names"] == ["r0.1", "r0.2", "r0.0"]
    assert data.micro_batch_indices is None  # the cut belonged to the old order


@pytest.mark.parametrize("indices", [[0, 1], [0, 0, 1], [1, 2, 3]])
def test_reordering_by_anything_but_a_permutation_is_a_value_error(indices: list[int]) -> None:
    with pytest.raises(ValueError, match="do not have each number of the 3 rows once"):
        batch(3, 1).reorder_data(indices)


def test_chunks_are_equal_contiguous_parts() -> None:
    assert [batch(4, 1).chunk(rank, 2)["names"] for rank in range(2)] == [["r0.0", "r0.1"], ["r0.2", "r0.3"]]


@pytest.mark.parametrize(
    ("rank", "chunks", "message"),
    [
        (2, 2, "Rank 2 must be at least 0 and less than chunks 2"),
        (-1, 2, "Rank -1 must be"),
        (0, 3, r"Total batch size \(4\) is not a multiple of chunks \(3\)"),
    ],
)
def test_a_chunk_that_there_is_not_is_an_assertion_error(rank: int, chunks: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        batch(4, 1).chunk(rank, chunks)


def test_batches_are_taken_by_number_and_the_last_may_be_short() -> None:
    assert [batch(5, 1).get_batch(i, 2)["names"] for i in range(3)] == [["r0.0", "r0.1"], ["r0.2", "r0.3"], ["r0.4"]]


@pytest.mark.parametrize("i", [3, -1])
def test_a_batch_beyond_the_last_is_an_index_error(i: int) -> None:
    with pytest.raises(IndexError, match=rf"chunk {i} does not exist: the batch of 5 rows has 3 chunks"):
        batch(5, 1).get_batch(i, 2)


@pytest.mark.parametrize("batch_size", [None, 0])
def test_a_batch_without_a_size_is_an_assertion_error(batch_size: int | None) -> None:
    with pytest.raises(AssertionError, match=f"batch_size is {batch_size}"):
        batch(4, 1).get_batch(0, batch_size)


def test_repeated_rows_stand_next_to_each_other_and_share_no_object() -> None:
    repeated = BatchedDataDict({"ids": torch.tensor([1, 2]), "logs": [["a"], ["b"]]}).repeat_interleave(2)
    assert repeated["ids"].tolist() == [1, 1, 2, 2]
    repeated["logs"][0].append("changed")
    assert repeated["logs"] == [["a", "changed"], ["a"], ["b"], ["b"]]


def test_micro_batches_of_a_size_cover_the_batch_in_order() -> None:
    assert [part["names"] for part in batch(4, 1).make_microbatch_iterator(2)] == [["r0.0", "r0.1"], ["r0.2", "r0.3"]]


@pytest.mark.parametrize("size", [3, 0])
def test_a_micro_batch_size_that_does_not_divide_is_an_assertion_error_at_once(size: int) -> None:
    with pytest.raises(AssertionError, match=rf"Batch size \(4\) is not a multiple of micro-batch size \({size}\)"):
        batch(4, 1).make_microbatch_iterator(size)
