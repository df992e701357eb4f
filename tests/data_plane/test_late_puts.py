"""A put whose answer does not come in time leaves nothing in the row store."""

from typing import Any

import pytest

from asyncrl.data_plane import object_store
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
    with pytest.raises(CallTimeout, match="storing 2 objects of rows in rows-a took longer than 30 s"):
        object_store.put_objects(object(), {"train/0.0/p": {}, "train/1.0/p": {}}, store="rows-a", timeout_s=30.0)
    keys = ["train/0.0/p", "train/1.0/p"]
    assert calls == [("put", keys), ("clear", keys)], "a store answers its calls in order"
