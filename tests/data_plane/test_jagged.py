"""Columns and batches are converted from padded to jagged and back."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_client import MemoryClient

from asyncrl.data_plane import (
    from_nested,
    materialize,
    pack_jagged_fields,
    to_nested_by_length,
)

pytestmark = pytest.mark.slow  # jagged tensors take seconds to import

LENGTHS = torch.tensor([3, 0, 5])


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    objects = np.empty(3, dtype=object)
    objects[:] = ["a", None, {}]
    return {
        "input_ids": torch.arange(1, 19).reshape(3, 6),
        "logits": torch.randn(3, 6, 2, generator=generator),
        "weight_versions": torch.full((3, 6), 4),
        "input_lengths": LENGTHS,
        "reward": torch.tensor([1.0, 0.5, 0.0]),
        "text": ["x", "y", "z"],
        "objects": objects,
    }


@given(
    lengths=st.lists(st.integers(0, 6), max_size=5),
    extra=st.integers(0, 2),
    trailing=st.sampled_from([(), (2,), (2, 3)]),
    dtype=st.sampled_from([torch.bool, torch.int64, torch.bfloat16, torch.float32]),
    pad_value=st.sampled_from([0, 1]),
)
@settings(max_examples=60, deadline=None)
def test_from_nested_is_the_inverse_of_to_nested_by_length(
    lengths: list[int], extra: int, trailing: tuple[int, ...], dtype: torch.dtype, pad_value: int
) -> None:
    width = max(lengths, default=0) + extra
    generator = torch.Generator().manual_seed(len(lengths))
    padded = torch.randint(0, 2, (len(lengths), width, *trailing), generator=generator).to(dtype)
    nested = to_nested_by_length(padded, torch.tensor(lengths, dtype=torch.int64))
    assert nested.is_nested
    assert nested.layout == torch.jagged
    assert nested.offsets().diff().tolist() == lengths
    for row, tokens, length in zip(nested.unbind(), padded, lengths, strict=True):
        assert torch.equal(row, tokens[:length])
    for i, length in enumerate(lengths):
        padded[i, length:] = pad_value
    back = from_nested(nested, pad_value=pad_value, width=width)
    assert back.dtype == dtype
    assert torch.equal(back, padded)
    assert from_nested(nested).shape == (len(lengths), max(lengths, default=0), *trailing)


def test_gradients_pass_both_ways() -> None:
    padded = torch.ones(2, 3, requires_grad=True)
    (from_nested(to_nested_by_length(padded, [2, 0]), width=4) * 5).sum().backward()
    assert padded.grad is not None
    assert padded.grad.tolist() == [[5, 5, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("padded", "lengths", "match"),
    [
        (torch.ones(2), [1, 1], r"shape \[2\]"),
        (torch.ones(2, 3), [1], "1 lengths for 2 rows"),
        (torch.ones(2, 3), [1, 4], "lengths are 1 to 4, but must be 0 to 3"),
        (torch.ones(2, 3), [-1, 2], "lengths are -1 to 2, but must be 0 to 3"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(padded: torch.Tensor, lengths: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        to_nested_by_length(padded, lengths)


def test_a_row_beyond_the_width_and_a_tensor_that_is_not_nested_are_refused() -> None:
    nested = to_nested_by_length(torch.ones(1, 3), [3])
    with pytest.raises(ValueError, match="3 tokens, more than the width 2"):
        from_nested(nested, width=2)
    with pytest.raises(ValueError, match=r"\[1, 3\] is not nested"):
        from_nested(torch.ones(1, 3))


def test_what_is_packed_materializes_to_the_same_batch_without_the_padding() -> None:
    given_ = batch()
    packed = pack_jagged_fields(given_, lengths=LENGTHS)
    assert [name for name, column in packed.items() if isinstance(column, torch.Tensor) and column.is_nested] == [
        "input_ids", "logits", "weight_versions"
    ]  # fmt: skip
    read = materialize(packed, pad_value_dict={"input_ids": 99}, pad_to_seqlen=7)
    beyond_BS = torch.arange(7) >= LENGTHS.unsqueeze(1)
    for name, pad_value in (("input_ids", 99), ("logits", 0), ("weight_versions", -1)):
        assert torch.equal(read[name][~beyond_BS], given_[name][~beyond_BS[:, :6]])
        assert read[name][beyond_BS].eq(pad_value).all()
    assert materialize(packed)["input_ids"].shape == (3, 5)
    assert read["reward"].tolist() == [1.0, 0.5, 0.0]
    assert (read["text"], read["objects"]) == (["x", "y", "z"], ["a", None, {}])
    assert materialize(packed, layout="jagged")["input_ids"].is_nested


def test_a_packed_column_has_no_gradient() -> None:
    padded = torch.ones(1, 2, requires_grad=True)
    assert not any(column.requires_grad for column in pack_jagged_fields({"x": padded}, lengths=[1]).values())


def test_only_the_named_columns_are_packed_and_plain_ones_are_padded_to_the_same_width() -> None:
    packed = pack_jagged_fields(batch(), lengths=LENGTHS, token_aligned_fields={"input_ids", "input_lengths"})
    assert packed["input_ids"].is_nested
    assert torch.equal(packed["weight_versions"], torch.full((3, 6), 4))
    read = materialize(packed, pad_to_seqlen=8)
    assert read["input_ids"].shape == read["weight_versions"].shape == (3, 8)
    assert read["weight_versions"][0].tolist() == [4] * 6 + [-1] * 2
    assert not any(getattr(column, "is_nested", False) for column in pack_jagged_fields(batch(), lengths=None).values())


def test_packed_columns_are_put_and_read_as_the_padded_ones_are() -> None:
    client = MemoryClient()
    client.register_partition("p", [], 3, ["train"])
    ids, fields = ["a", "b", "c"], batch()
    client.put_samples(ids, "p", fields=pack_jagged_fields(fields, lengths=LENGTHS))
    jagged = client.get_samples(ids, "p", list(fields))
    client.put_samples(ids, "p", fields=fields)
    for name, column in client.get_samples(ids, "p", list(fields)).items():
        assert torch.equal(jagged[name], column) if isinstance(column, torch.Tensor) else jagged[name] == column


def test_columns_of_other_types_and_layouts_are_refused() -> None:
    with pytest.raises(TypeError, match=r"'x' has the type dict, but must be"):
        pack_jagged_fields({"x": {}}, lengths=None)
    with pytest.raises(TypeError, match=r"'x' has the type ndarray, but must be"):
        materialize({"x": np.ones(2)})
    with pytest.raises(ValueError, match="'flat'"):
        materialize({}, layout="flat")  # type: ignore[arg-type]
