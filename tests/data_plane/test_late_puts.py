"""A put whose answer does not come in time leaves nothing in the row store."""

from typing import Any

import pytest

from asyncrl.data_plane import object_store
from asyncrl.data_plane.object_store import ObjectStoreClient
from asyncrl.errors import CallTimeout


@pytest.mark.fault("F37")
def test_the_store_drops_the_objects_of_a_put_that_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    def start(actor: Any, method: Any, objects: Any) -> None:
        calls.append((method.__name__, list(objects)))

    def answer(ref: Any, *, timeout_s: float, what: str) -> None:
        raise CallTimeout(f"{what} took longer than {timeout_s:g} s")

    monkeypatch.setattr(object_store, "start", start)
    monkeypatch.setattr(object_store, "answer", answer)
    client = object.__new__(ObjectStoreClient)  # without the index, which is an actor of Ray
    client._handles, client._timeout_s = {"rows-a": object()}, 30.0
    with pytest.raises(CallTimeout, match="storing 2 objects of rows in rows-a took longer than 30 s"):
        client._put("rows-a", {"train/0.0/p": {}, "train/1.0/p": {}})
    keys = ["train/0.0/p", "train/1.0/p"]
    assert calls == [("put", keys), ("clear", keys)], "a store answers its calls in order"
