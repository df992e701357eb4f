"""A data plane within one process, for tests without Ray. Rows are stored encoded, as for transport."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar
from uuid import uuid4

from asyncrl.data_plane.codec import Column, Picked, PickedFields
from asyncrl.data_plane.partitioned_client import PartitionedClient
from asyncrl.data_plane.partitions import Partitions, Places, StoredAt
from asyncrl.data_plane.row_store import Index

P = ParamSpec("P")
R = TypeVar("R")


class LocalIndex(Index):
    """`Partitions` under a lock. `objects` are the stored objects by key; the index drops the unused ones."""

    def __init__(self, objects: dict[str, Mapping[str, Column]]) -> None:
        self._partitions = Partitions()
        self._objects = objects
        self._produced = threading.Condition()

    def call(self, method: Callable[Concatenate[Partitions, P], R], *arguments: P.args, **options: P.kwargs) -> R:
        with self._produced:
            result = method(self._partitions, *arguments, **options)
            for keys in self._partitions.take_unused().values():
                for key in keys:
                    self._objects.pop(key, None)
            if method is Partitions.produce:
                self._produced.notify_all()
            return result

    def wait(
        self,
        wait_s: float,
        method: Callable[Concatenate[Partitions, P], R | None],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> R | None:
        with self._produced:
            return self._produced.wait_for(lambda: method(self._partitions, *arguments, **options), timeout=wait_s)


class MemoryClient(PartitionedClient):
    """Keeps all rows in this object, which several threads may share."""

    def __init__(self) -> None:
        self.objects: dict[str, Mapping[str, Column]] = {}
        super().__init__(LocalIndex(self.objects))

    def samples(self, partition_id: str) -> list[str]:
        """Returns the samples that were put and not cleared, oldest first."""
        return self._index.call(lambda partitions: list(partitions.sample_ids(partition_id)))

    def _store(self, partition_id: str, sample_ids: Sequence[str], columns: Mapping[str, Column]) -> list[StoredAt]:
        key = uuid4().hex
        if columns:
            self.objects[key] = columns
        return [StoredAt("memory", key, row) for row in range(len(sample_ids))]

    def _load(self, partition_id: str, sample_ids: Sequence[str], places: Mapping[str, Places]) -> PickedFields:
        return {
            name: [Picked(self.objects[key][name], *rows) for (_, key), rows in of_field.items()]
            for name, of_field in places.items()
        }
