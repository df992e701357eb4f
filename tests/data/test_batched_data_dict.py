"""Batches: joined with right padding, cut by rows, moved in place."""

import pytest
import torch

from asyncrl.data.batched_data_dict import BatchedDataDict


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
