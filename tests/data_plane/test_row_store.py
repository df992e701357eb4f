"""The body of a row store, without Ray."""

from asyncrl.data_plane.row_store import RowStore


def test_keys_and_whole_folders_are_dropped_and_counted() -> None:
    store = RowStore(keep=lambda rows: rows)
    store.put({"p/0.0/a": 1, "p/rows/b": 2, "pq/0.0/c": 3, "q/0.0/d": 4})
    store.put({"p/0.0/a": 9})  # a repeated key is ignored
    assert store.refs(["p/0.0/a", "nowhere"]) == {"p/0.0/a": 1}
    assert store.clear(["q/0.0/d", "q/0.0/d", "nowhere"]) == 1
    assert store.clear(["p/0.0/a", "p/"]) == 2
    assert store.refs(["p/rows/b", "pq/0.0/c", "q/0.0/d"]) == {"pq/0.0/c": 3}
