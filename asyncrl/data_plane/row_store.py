"""Row stores: one a node, owning the bulk rows of the groups that were written there.

A Ray object dies with the process that put it, and a killed generator must not take finished groups with it: so the
store puts the rows itself, from values that it is handed, under keys that begin with the partition's name.
"""

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

STORE_PREFIX = "rows-"
"""Actor names of row stores begin with it."""


class RowStore:
    """Body of the row-store actor."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def put(self, rows_by_key: Mapping[str, Any]) -> None:
        """Keeps rows, an object a key; a repeated put of one key changes nothing."""
        for key, rows in rows_by_key.items():
            if key not in self._objects:
                self._objects[key] = ray.put(rows)

    def refs(self, keys: list[str]) -> dict[str, Any]:
        """References, to be read with `ray.get` where the rows are needed, of the keys that are there."""
        return {key: self._objects[key] for key in keys if key in self._objects}

    def clear(self, keys: list[str]) -> int:
        """Drops the keys that are there; how many they were."""
        return sum(self._objects.pop(key, None) is not None for key in keys)

    def clear_prefix(self, prefix: str) -> int:
        """Drops every key that begins with `prefix`; how many they were."""
        return self.clear([key for key in self._objects if key.startswith(prefix)])


def ensure_row_store(*, namespace: str) -> str:
    """Name of this node's row store, made by whoever comes first; it outlives the process that made it."""
    node = ray.get_runtime_context().get_node_id()
    name = f"{STORE_PREFIX}{node[:12]}"
    ray.remote(RowStore).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    ).remote()
    return name
