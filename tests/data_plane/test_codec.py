"""Columns are transported without padding and are restored exactly."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data_plane.codec import Column, Picked, decode, encode

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn,
]  # fmt: skip


ROWS = [[[1, 2, 3], [4, 5, 6]], [[7, 8], [9, 10]]]


def picked(columns: dict[str, Column], rows: list[int]) -> dict[str, list[Picked]]:
    return {name: [Picked(column, range(len(rows)), rows)] for name, column in columns.items()}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    trailing=st.sampled_from([(), (2,), (2, 3)]),
    extra_width=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_any_dtype_and_shape_round_trips_bit_for_bit_also_over_the_wire_and_in_parts(
    dtype: torch.dtype, lengths: list[int], trailing: tuple[int, ...], extra_width: int, seed: int
) -> None:
    rows, width = len(lengths), max(lengths) + extra_width
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, width, *trailing)
    integers = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    column_BS = (integers[..., 0] > 127) if dtype == torch.bool else integers.view(dtype).squeeze(-1)
    columns = encode({"x": column_BS, "row": torch.arange(rows)}, lengths=lengths)
    order = list(reversed(range(rows)))
    wired = {
        name: Column.from_wire(pickle.loads(pickle.dumps(column.rows(order).wire())))
        for name, column in columns.items()
    }
    assert len(wired["x"].values) == sum(lengths)  # no padding is transported
    assert columns["x"].row_bytes.tolist() == [len(as_bytes(column_BS[row, : lengths[row]])) for row in range(rows)]
    batch = decode(picked(wired, list(range(rows))), width=width)
    assert batch["x"].dtype == dtype
    assert batch["row"].tolist() == order
    for place, row in enumerate(order):
        assert as_bytes(batch["x"][place, : lengths[row]]) == as_bytes(column_BS[row, : lengths[row]])
        assert not as_bytes(batch["x"][place, lengths[row] :]).strip(b"\0")


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "float32", "uint16", "complex64"])
def test_arrays_come_back_as_tensors_of_the_same_type(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)[:, ::-1]
    array.setflags(write=False)  # Ray returns read-only arrays
    batch = decode(picked(encode({"x": array, "row": array[:, 0]}), [0, 1]))
    assert batch["x"].numpy().dtype == array.dtype
    assert np.array_equal(batch["x"].numpy(), array)
    assert np.array_equal(batch["row"].numpy(), array[:, 0])


@pytest.mark.slow
def test_nested_tensors_are_taken_as_they_are() -> None:
    rows = [torch.arange(3), torch.arange(0), torch.arange(5)]
    batch = decode(picked(encode({"x": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}), [2, 1, 0]))
    assert batch["x"].tolist() == [[0, 1, 2, 3, 4], [0] * 5, [0, 1, 2, 0, 0]]


@pytest.mark.slow
def test_a_jagged_row_beyond_its_length_or_jagged_elsewhere_is_refused() -> None:
    jagged = torch.nested.as_nested_tensor([torch.ones(3), torch.ones(1)], layout=torch.jagged)
    assert encode({"x": jagged, "input_lengths": [4, 1]})["x"].rows([0]).values.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="field 'x': row 1 has 1 tokens, more than its length 0"):
        encode({"x": jagged, "input_lengths": torch.tensor([4, 0])})
    with pytest.raises(ValueError, match="'x' has 2 rows, but there are 1 lengths"):
        encode({"x": jagged}, lengths=[4])
    wide = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.ones(2, 1)], layout=torch.jagged)
    with pytest.raises(ValueError, match="'x': a nested column may be jagged on dim 1"):
        encode({"x": wide})


def test_arrays_of_objects_travel_as_lists() -> None:
    assert encode({"x": np.array(["a", None], dtype=object)})["x"].values == ["a", None]


def test_a_read_ends_rows_at_their_lengths_where_these_are_known() -> None:
    columns = encode({"x": torch.arange(1, 9).reshape(2, 4), "y": torch.ones(2), "z": torch.ones(2, 1)})
    batch = decode(picked(columns, [0, 1]), lengths=[2, None], width=4)
    assert batch["x"].tolist() == [[1, 2, 0, 0], [5, 6, 7, 8]]
    assert decode(picked(columns, [0, 1]), lengths=[2, 3])["x"].tolist() == [[1, 2, 0], [5, 6, 7]]
    with pytest.raises(ValueError, match="a row has 3 tokens, more than the width"):
        decode(picked(columns, [0, 1]), lengths=[2, 3], width=2)


def test_all_per_token_columns_of_a_read_have_one_width() -> None:
    short, long = encode({"x": torch.ones(1, 2)}), encode({"y": torch.ones(1, 4)})
    batch = decode(picked(short, [0]) | picked(long, [0]))
    assert batch["x"].shape == batch["y"].shape == (1, 4)


def test_a_batch_takes_its_rows_from_several_columns_in_any_order() -> None:
    columns = [encode({"x": torch.tensor(rows), "row": torch.tensor(rows)[:, 0], "name": list("ab")}) for rows in ROWS]
    order = [(1, 1), (0, 0), (1, 0), (0, 1), (1, 1)]
    at = [[(i, row) for i, (column, row) in enumerate(order) if column == number] for number in range(2)]
    batch = decode(
        {
            name: [
                Picked(column[name], [i for i, _ in rows], [row for _, row in rows])
                for column, rows in zip(columns, at, strict=True)
            ]
            for name in columns[0]
        }
    )
    assert batch["x"].tolist() == [[*ROWS[number][row], *[0] * number] for number, row in order]
    assert batch["row"].tolist() == [ROWS[number][row][0] for number, row in order]
    assert batch["name"] == ["ab"[row] for _, row in order]


def test_padding_is_zero_minus_one_for_versions_or_what_the_reader_says() -> None:
    columns = encode({name: torch.ones(1, 1) for name in ("x", "weight_versions", "y")})
    batch = decode(picked(columns, [0]), width=2, pad_value_dict={"y": 5})
    assert {name: batch[name][0, 1].item() for name in batch} == {"x": 0, "weight_versions": -1, "y": 5}


def test_a_gradient_does_not_travel() -> None:
    assert not decode(picked(encode({"x": torch.ones(1, 1, requires_grad=True)}), [0]))["x"].requires_grad


@pytest.mark.parametrize(
    ("fields", "lengths", "error", "match"),
    [
        ({"x": torch.zeros(2, 3), "y": torch.zeros(2, 4)}, [1, 1], ValueError, "different widths.*'x': 3, 'y': 4"),
        ({"x": torch.zeros(2, 3)}, [1, 4], ValueError, "4 tokens"),
        ({"x": torch.zeros(2, 3)}, [1, -1], ValueError, "negative length"),
        ({"x": torch.zeros(2), "input_lengths": [1, -1]}, None, ValueError, "negative length"),
        ({"x": torch.zeros(2, 3)}, [1], ValueError, "2 rows, but there are 1 lengths"),
        ({"x": torch.zeros(2), "y": [1]}, None, ValueError, "different numbers of rows: {'x': 2, 'y': 1}"),
        ({"x": torch.tensor(1)}, None, ValueError, "is a scalar"),
        ({"x": np.array(["a"])}, None, TypeError, "'x'.*use a list"),
        ({"x": {"a": 1}}, None, TypeError, "has the type dict, but must be"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(
    fields: dict[str, Any], lengths: list[int] | None, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        encode(fields, lengths=lengths)


def test_rows_of_different_kinds_in_one_field_are_refused_not_converted() -> None:
    integers, floats = encode({"x": torch.ones(1, dtype=torch.int64)}), encode({"x": torch.ones(1)})
    with pytest.raises(ValueError, match="'x': its rows were put with different dtypes or kinds"):
        decode({"x": [Picked(integers["x"], [0], [0]), Picked(floats["x"], [1], [0])]})
