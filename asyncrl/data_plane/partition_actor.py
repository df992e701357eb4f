"""The index of a run's data plane: one small actor with `Partitions`, and a process's access to it (`ActorBooks`).

Rows do not pass through the actor. It also counts the references to each object of a row store, and tells the store to
drop an object without references. The actor does both, because a client could die between the two and leave rows
behind.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import ray

from asyncrl.data_plane.calls import answer
from asyncrl.data_plane.partitions import Claim, Located, Partitions

PARTITIONS = "partitions"
"""Name of the actor in the run's namespace."""

W = TypeVar("W")


class StoredAt(NamedTuple):
    """The place of a row: row number `row` of object `key` in the row store `store`."""

    store: str
    key: str
    row: int


class PartitionActor:
    """Body of the actor. It releases objects only for places of the type `StoredAt`. It stores other places as they
    are.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._partitions: Partitions[Any] = Partitions()
        self._changed = asyncio.Condition()
        self._references: Counter[tuple[str, str]] = Counter()
        self._stores: set[str] = set()

    async def register(self, partition_id: str, **declaration: Any) -> None:
        self._partitions.register(partition_id, **declaration)

    async def check_registered(self, partition_id: str) -> None:
        self._partitions.check_registered(partition_id)

    async def produce(self, partition_id: str, sample_ids: Sequence[str], **put: Any) -> list[int] | None:
        replaced = self._partitions.produce(partition_id, sample_ids, **put)
        for place in put["where"]:
            if isinstance(place, StoredAt):
                self._references[place.store, place.key] += len(put["fields"])
                self._stores.add(place.store)
        self._release(replaced)
        lengths = self._partitions.lengths_of(partition_id, sample_ids)
        async with self._changed:
            self._changed.notify_all()
        return lengths

    async def claim(
        self, partition_id: str, task: str, *, fields: Sequence[str], batch_size: int, wait_s: float
    ) -> Claim | None:
        try:
            async with asyncio.timeout(wait_s), self._changed:
                while True:
                    claim = self._partitions.claim(partition_id, task, fields=fields, batch_size=batch_size)
                    if claim is not None:
                        return claim
                    await self._changed.wait()
        except TimeoutError:
            return None

    async def ready(self, partition_id: str, task: str, *, fields: Sequence[str]) -> int:
        return self._partitions.ready(partition_id, task, fields=fields)

    async def locate(self, partition_id: str, sample_ids: Sequence[str], *, fields: Sequence[str]) -> Located[Any]:
        return self._partitions.locate(partition_id, sample_ids, fields=fields)

    async def fields_of(self, partition_id: str, sample_ids: Sequence[str]) -> set[str]:
        return self._partitions.fields_of(partition_id, sample_ids)

    async def lengths_of(self, partition_id: str, sample_ids: Sequence[str]) -> list[int] | None:
        return self._partitions.lengths_of(partition_id, sample_ids)

    async def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        return self._partitions.consumed(partition_id, tasks)

    async def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> list[Any]:
        places = self._partitions.clear(partition_id, sample_ids)
        self._release(places)
        if sample_ids is None:
            # Also drops objects that a writer stored and did not enter before it died.
            for store in self._stores:
                self._tell(store, lambda handle: handle.clear_prefix.remote(f"{partition_id}/"))
        return places

    async def rows_outstanding(self) -> dict[str, int]:
        return self._partitions.rows_outstanding()

    def _release(self, places: Iterable[Any]) -> None:
        unused: dict[str, list[str]] = {}
        for place in places:
            if isinstance(place, StoredAt):
                self._references[place.store, place.key] -= 1
                if not self._references[place.store, place.key]:
                    del self._references[place.store, place.key]
                    unused.setdefault(place.store, []).append(place.key)
        for store, keys in unused.items():
            self._tell(store, lambda handle, keys=keys: handle.clear.remote(keys))  # type: ignore[misc]

    def _tell(self, store: str, call: Callable[[Any], object]) -> None:
        """Calls the row store without waiting. A dead store has dropped its rows already."""
        try:
            call(ray.get_actor(store, namespace=self._namespace))
        except ValueError:
            self._stores.discard(store)


class ActorBooks(Generic[W]):
    """Implements `Bookkeeping` with calls to the actor. Each call has the deadline `timeout_s`."""

    def __init__(self, *, namespace: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._actor = ensure_partition_actor(namespace=namespace)
        self._registered: set[str] = set()

    def register(
        self,
        partition_id: str,
        *,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        group_size: int | None,
    ) -> None:
        self._call(
            "register",
            partition_id,
            fields=fields,
            num_samples=num_samples,
            consumer_tasks=consumer_tasks,
            group_size=group_size,
        )

    def check_registered(self, partition_id: str) -> None:
        """Asks the actor only once for each partition, because a partition stays registered."""
        if partition_id not in self._registered:
            self._call("check_registered", partition_id)
            self._registered.add(partition_id)

    def produce(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        *,
        fields: Sequence[str],
        where: Sequence[W],
        lengths: Sequence[int] | None,
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> list[int] | None:
        known: list[int] | None = self._call(
            "produce", partition_id, sample_ids, fields=fields, where=where, lengths=lengths, tags=tags
        )
        return known

    def claim(
        self, partition_id: str, task: str, *, fields: Sequence[str], batch_size: int, wait_s: float
    ) -> Claim | None:
        claim: Claim | None = self._call(
            "claim", partition_id, task, fields=fields, batch_size=batch_size, wait_s=wait_s, extra_s=wait_s
        )
        return claim

    def ready(self, partition_id: str, task: str, *, fields: Sequence[str]) -> int:
        return int(self._call("ready", partition_id, task, fields=fields))

    def locate(self, partition_id: str, sample_ids: Sequence[str], *, fields: Sequence[str]) -> Located[W]:
        located: Located[W] = self._call("locate", partition_id, sample_ids, fields=fields)
        return located

    def fields_of(self, partition_id: str, sample_ids: Sequence[str]) -> set[str]:
        fields: set[str] = self._call("fields_of", partition_id, sample_ids)
        return fields

    def lengths_of(self, partition_id: str, sample_ids: Sequence[str]) -> list[int] | None:
        lengths: list[int] | None = self._call("lengths_of", partition_id, sample_ids)
        return lengths

    def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        return bool(self._call("consumed", partition_id, tasks))

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> list[W]:
        places: list[W] = self._call("clear", partition_id, sample_ids)
        return places

    def rows_outstanding(self) -> dict[str, int]:
        rows: dict[str, int] = self._call("rows_outstanding")
        return rows

    def _call(self, method: str, *arguments: Any, extra_s: float = 0.0, **options: Any) -> Any:
        ref = getattr(self._actor, method).remote(*arguments, **options)
        what = f"{method} in the data plane's index"
        return answer(ref, timeout_s=self._timeout_s + extra_s, what=what)


def ensure_partition_actor(*, namespace: str) -> Any:
    """Returns the handle of the run's only partition actor, and starts it if needed. The actor outlives the process
    that started it."""
    return (
        ray.remote(PartitionActor)
        .options(name=PARTITIONS, namespace=namespace, lifetime="detached", get_if_exists=True, num_cpus=0)
        .remote(namespace)
    )
