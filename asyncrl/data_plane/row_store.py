"""Row stores, one for each node, and the index of the rows. A row store owns the rows of the groups that were written
on its node.

A Ray object dies with the process that put it. To keep finished groups when their generator is killed, the row store
puts the values itself. Keys begin with the name of the partition.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.data_plane.calls import answer, detached, named_actor, start
from asyncrl.data_plane.partitions import Partitions

STORE_PREFIX = "rows-"
"""Prefix of the actor names of row stores."""


class RowStore:
    """The row-store actor. `keep` puts rows into Ray's object store and returns the reference."""

    def __init__(self, keep: Callable[[Any], Any] = ray.put) -> None:
        self._keep = keep
        self._objects: dict[str, Any] = {}

    def put(self, rows_by_key: Mapping[str, Any]) -> None:
        """Stores one object for each key. Ignores keys that it has already."""
        for key, rows in rows_by_key.items():
            if key not in self._objects:
                self._objects[key] = self._keep(rows)

    def refs(self, keys: Sequence[str]) -> dict[str, Any]:
        """Returns references to the objects of the keys that exist. The reader fetches them with `ray.get`."""
        return {key: self._objects[key] for key in keys if key in self._objects}

    def clear(self, keys: Sequence[str]) -> int:
        """Drops the keys that exist. A key that ends in "/" means all keys that begin with it. Returns how many were
        dropped."""
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


# The index of a run's data plane: one small actor with `Partitions`, and a process's access to it (`Index`).
#
# Rows do not pass through the actor. It also tells the row stores to drop the objects that become unused. The clients
# do not, because a client could die after the change of the index, and leave the objects behind.

PARTITIONS = "partitions"
"""Name of the actor in the run's namespace."""

P = ParamSpec("P")
R = TypeVar("R")


class PartitionActor:
    """The actor that holds the index. `find` returns the handle of a row store, or None for one that has ended."""

    def __init__(self, namespace: str, find: Callable[..., Any] = named_actor) -> None:
        self._namespace = namespace
        self._find = find
        self._partitions = Partitions()
        self._produced = asyncio.Event()

    async def call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any], wait_s: float) -> Any:
        """Calls a method of `Partitions`. If the result is None, repeats the call after each put, for at most `wait_s`
        seconds."""
        result = self._call(method, arguments, options)
        if result is None and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while result is None:
                        await self._produced.wait()
                        result = self._call(method, arguments, options)
        return result

    def _call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        result = getattr(self._partitions, method)(*arguments, **options)
        for store, keys in self._partitions.take_unused().items():
            actor = self._find(store, namespace=self._namespace)
            if actor is not None:  # a store that has ended has dropped its objects
                start(actor, RowStore.clear, keys)
        if method == Partitions.produce.__name__:
            self._produced.set()
            self._produced = asyncio.Event()
        return result


class Index:
    """A process's access to the index of the data plane. Each call has the deadline `timeout_s`, plus its `wait_s`.

    The first `Index` of a run starts the actor. `placement` has Ray's options for its node (`control_placement`)."""

    def __init__(self, *, namespace: str, timeout_s: float, placement: Mapping[str, Any] = {}) -> None:
        self._timeout_s = timeout_s
        self._actor = detached(PartitionActor, namespace, name=PARTITIONS, namespace=namespace, **placement)

    def call(self, method: Callable[Concatenate[Partitions, P], R], *arguments: P.args, **options: P.kwargs) -> R:
        """Calls a method of the run's `Partitions`, such as `Partitions.locate`. Raises its errors unchanged."""
        return cast(R, self.wait(0.0, method, *arguments, **options))

    def wait(
        self,
        wait_s: float,
        method: Callable[Concatenate[Partitions, P], R | None],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> R | None:
        """Repeats a call after each put until its result is not None. Returns None after `wait_s` seconds."""
        name = method.__name__
        ref = start(self._actor, PartitionActor.call, name, arguments, options, wait_s)
        result: R | None = answer(ref, timeout_s=self._timeout_s + wait_s, what=f"{name} in the data plane's index")
        return result
