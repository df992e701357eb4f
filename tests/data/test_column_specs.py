"""Right padding is verified row by row. The names of `asyncrl.data` import torch only on first use."""

from typing import Any

import pytest
import torch

import asyncrl.data
from asyncrl.data.specs import DP_TRAIN_FIELDS, EXTRA_FIELDS, LP_SEED_FIELDS, TrainDatumSpec, verify_right_padding


def prompts(**columns: Any) -> dict[str, Any]:
    return {"input_ids": torch.tensor([[5, 6, 0], [7, 0, 0]]), "input_lengths": torch.tensor([2, 1]), **columns}


def test_right_padded_rows_pass() -> None:
    assert verify_right_padding(prompts()) == (True, None)
    assert verify_right_padding(prompts(input_lengths=torch.tensor([3, 3]))) == (True, None)
    responses = {
        "output_ids": torch.tensor([[5, 6, 9], [7, 8, 9]]),
        "generation_lengths": torch.tensor([1, 1]),
        "unpadded_sequence_lengths": torch.tensor([2, 2]),
    }
    assert verify_right_padding(responses, pad_value=9) == (True, None)


def test_a_rows_own_tokens_may_equal_the_pad_value() -> None:
    assert verify_right_padding(prompts(input_ids=torch.tensor([[5, 0, 0], [0, 0, 0]]))) == (True, None)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"input_ids": torch.tensor([[5, 6, 0], [0, 0, 7]])},
            "row 1 of input_ids has token 7 at 2, beyond its length 1",
        ),
        (
            {"input_ids": torch.tensor([[5, 6, 0], [7, 8, 0]])},
            "row 1 of input_ids has token 8 at 1, beyond its length 1",
        ),
        ({"input_lengths": torch.tensor([2, 4])}, "row 1: input_lengths is 4, but must be 0 to 3"),
        ({"input_lengths": torch.tensor([-1, 1])}, "row 0: input_lengths is -1"),
        ({"input_lengths": torch.tensor([2])}, r"input_lengths has shape \[1\], but input_ids has 2 rows"),
        ({"input_ids": torch.tensor([5, 6])}, r"input_ids has shape \[2\], but must have two dimensions"),
    ],
)
def test_what_is_not_right_padded_is_a_value_error_or_a_message_with_its_row(
    columns: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        verify_right_padding(prompts(**columns))
    passed, found = verify_right_padding(prompts(**columns), raise_error=False)
    assert not passed
    with pytest.raises(ValueError, match=message):
        raise ValueError(found)


def test_other_padding_than_asked_for_is_found() -> None:
    with pytest.raises(ValueError, match="not right-padded with 1"):
        verify_right_padding(prompts(), pad_value=1)


def test_columns_that_have_no_ids_are_a_value_error_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"the columns are \['input_ids', 'rewards'\]"):
        verify_right_padding({"input_ids": torch.zeros(1, 1), "rewards": torch.zeros(1)})


def test_every_column_that_a_stage_reads_is_a_column_of_a_sample() -> None:
    counted_by = {"group_ids", "rewards"}  # only some losses read them
    assert {*LP_SEED_FIELDS} < {*DP_TRAIN_FIELDS} == {*TrainDatumSpec.__annotations__} - counted_by - {*EXTRA_FIELDS}


def test_every_name_of_the_package_can_be_imported_from_it() -> None:
    assert all(getattr(asyncrl.data, name) is not None for name in asyncrl.data.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Batch'"):
        asyncrl.data.Batch  # noqa: B018
