"""Row stores: one for each node. A row store owns the bulk rows of the groups that were written on its node.

A Ray object dies with the process that put it. To keep finished groups when their generator is killed, the row store
puts the values itself. Keys begin with the name of the partition.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.data_plane.calls import detached

STORE_PREFIX = "rows-"
"""Prefix of the actor names of row stores."""


class RowStore:
    """Body of the row-store actor."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def put(self, rows_by_key: Mapping[str, Any]) -> None:
        """Stores one object for each key. Ignores keys that it has already."""
        for key, rows in rows_by_key.items():
            if key not in self._objects:
                self._objects[key] = ray.put(rows)

    def refs(self, keys: Sequence[str]) -> dict[str, Any]:
        """Returns references to the objects of the keys that exist. The reader fetches them with `ray.get`."""
        return {key: self._objects[key] for key in keys if key in self._objects}

    def clear(self, keys: Sequence[str]) -> int:
        """Drops the keys that exist. A key that ends in "/" stands for all keys that begin with it. Returns how many
        were dropped."""
        folders = tuple(key for key in keys if key.endswith("/"))
        below = [key for key in self._objects if key.startswith(folders)] if folders else []
        return sum(self._objects.pop(key, None) is not None for key in [*keys, *below])


def ensure_row_store(*, namespace: str) -> str:
    """Returns the name of this node's row store, and starts it if needed."""
    node = ray.get_runtime_context().get_node_id()
    name = f"{STORE_PREFIX}{node[:12]}"
    here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    detached(RowStore, name=name, namespace=namespace, scheduling_strategy=here)
    return name
