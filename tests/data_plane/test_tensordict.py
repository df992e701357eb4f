"""`put_samples` takes the TensorDicts of users of TransferQueue, with jagged columns and wrapped objects."""

from typing import Any

import numpy as np
import pytest
import torch
from memory_client import MemoryClient

from asyncrl.data_plane import materialize, pack_jagged_fields
from asyncrl.data_plane.codec import encode

tensordict = pytest.importorskip("tensordict", reason="TensorDict is not installed")

pytestmark = pytest.mark.slow  # tensordict and jagged tensors take seconds to import

IDS = ["0.0_g0", "0.0_g1", "1.0_g0"]
LENGTHS = [3, 0, 2]


def put_and_read(fields: Any) -> dict[str, Any]:
    client = MemoryClient()
    client.register_partition("p", [], 3, ["train"])
    meta = client.put_samples(IDS, "p", fields=fields)
    assert meta.fields == list(fields.keys())
    return client.get_data(meta).get_dict()


def test_a_tensordict_is_put_as_its_columns() -> None:
    rows = [torch.arange(1, 4), torch.arange(0), torch.arange(7, 9)]
    objects = np.empty(3, dtype=object)
    objects[:] = ["a", None, {"b": [1]}]
    fields = tensordict.TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "input_lengths": torch.tensor(LENGTHS),
            "token_mask": torch.ones(3, 4),
            "reward": torch.tensor([0.5, 1.0, 0.0]),
            "stack": tensordict.NonTensorStack("x", {"y": 1}, None),
            "same": tensordict.NonTensorData("every row's", batch_size=[3]),
            "lists": [["a"], ["b", "c"], ["d"]],
            "objects": objects,
        },
        batch_size=[3],
    )
    with pytest.raises(RuntimeError):
        bool(fields)
    read = put_and_read(fields)
    assert read["input_ids"].tolist() == [[1, 2, 3], [0, 0, 0], [7, 8, 0]]
    assert read["token_mask"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 0]]
    assert read["reward"].tolist() == [0.5, 1.0, 0.0]
    assert read["stack"] == ["x", {"y": 1}, None]
    assert read["same"] == ["every row's"] * 3
    assert read["lists"] == [["a"], ["b", "c"], ["d"]]
    assert read["objects"] == ["a", None, {"b": [1]}]


def test_a_tensordict_is_packed_and_materialized() -> None:
    fields = {"input_ids": torch.arange(1, 13).reshape(3, 4), "text": tensordict.NonTensorStack("x", "y", "z")}
    packed = pack_jagged_fields(tensordict.TensorDict(fields, batch_size=[3]), lengths=LENGTHS)
    read = materialize(tensordict.TensorDict(packed, batch_size=[3]))
    assert read["input_ids"].tolist() == [[1, 2, 3], [0, 0, 0], [9, 10, 0]]
    assert read["text"] == ["x", "y", "z"]


def test_the_rows_of_a_tensordict_are_counted() -> None:
    client = MemoryClient()
    client.register_partition("p", [], 3, ["train"])
    with pytest.raises(ValueError, match=r"2 samples were given, but other numbers of rows in {'reward': 3}"):
        client.put_samples(IDS[:2], "p", fields=tensordict.TensorDict({"reward": torch.ones(3)}, batch_size=[3]))
    with pytest.raises(ValueError, match="neither fields nor tags"):
        client.put_samples(IDS, "p", fields=tensordict.TensorDict({}, batch_size=[3]))


def test_a_tensordict_inside_a_tensordict_is_no_column() -> None:
    with pytest.raises(TypeError, match=r"'inner' has the type TensorDict, but must be"):
        encode(tensordict.TensorDict({"inner": {"x": torch.ones(3)}}, batch_size=[3]))


def test_a_row_alone_in_its_tensordict_keeps_its_objects() -> None:
    read = encode(tensordict.TensorDict({"text": tensordict.NonTensorStack("one")}, batch_size=[1]))
    assert read["text"].values == ["one"]
