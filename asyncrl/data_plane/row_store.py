"""Row stores: one a node, owning the bulk rows of the groups that were written there.

A Ray object dies with the process that put it, and a killed generator must not take finished groups with it: so the
store puts the rows itself, from values that it is handed. A generator's rows are one object a group, under
`<group>.<attempt>`; those of the data plane one object a group and put, under `<partition>/<group>.<attempt>/<put>`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.data_plane.calls import finished

Rows = dict[str, np.ndarray[Any, Any]]
STORE_PREFIX = "rows-"
"""Actor names of row stores begin with it."""


class RowStore:
    """Body of the row-store actor."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def put(self, rows_by_key: Mapping[str, Any]) -> None:
        """Keeps groups' rows, an object each; a repeated put of one key changes nothing."""
        for key, rows in rows_by_key.items():
            if key not in self._objects:
                self._objects[key] = ray.put(rows)

    def refs(self, keys: list[str]) -> list[Any]:
        """One reference a key, to be read with `ray.get` where the rows are needed. KeyError names a missing key."""
        return [self._objects[key] for key in keys]

    def clear(self, keys: list[str]) -> int:
        """Drops the keys that are there; how many they were."""
        return sum(self._objects.pop(key, None) is not None for key in keys)

    def clear_prefix(self, prefix: str) -> int:
        """Drops every key that begins with `prefix`; how many they were."""
        return self.clear([key for key in self._objects if key.startswith(prefix)])


class RowClient:
    """The row stores of a run, by actor name."""

    def __init__(self, *, namespace: str, timeout_s: float) -> None:
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._handles: dict[str, Any] = {}

    async def put(self, store: str, rows_by_key: dict[str, Rows]) -> None:
        await finished(
            self._handle(store).put.remote(rows_by_key),
            timeout_s=self._timeout_s,
            what=f"storing rows of {len(rows_by_key)} groups",
        )

    async def refs(self, store: str, keys: list[str]) -> list[Any]:
        result: list[Any] = await finished(
            self._handle(store).refs.remote(keys),
            timeout_s=self._timeout_s,
            what=f"finding {len(keys)} rows in {store}",
        )
        return result

    async def clear(self, store: str, keys: list[str]) -> None:
        await finished(
            self._handle(store).clear.remote(keys), timeout_s=self._timeout_s, what=f"clearing {len(keys)} rows"
        )

    def _handle(self, store: str) -> Any:
        if store not in self._handles:
            self._handles[store] = ray.get_actor(store, namespace=self._namespace)
        return self._handles[store]


def row_bytes(rows: Rows) -> int:
    """Bytes that the rows take in the store."""
    return sum(column.nbytes for column in rows.values())


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
