"""The data plane within one process, for tests and single-process runs. Rows are stored encoded, as for transport."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.data_plane.codec import Column
from asyncrl.data_plane.partitioned_client import PartitionedClient
from asyncrl.data_plane.partitions import Claim, Located, Partitions

Place = tuple[Column, int]
"""The place of a row: an encoded column, and the row's number in it."""


class MemoryClient(PartitionedClient[dict[str, Place]]):
    """Keeps all rows in this object, which several threads may share."""

    def __init__(self) -> None:
        super().__init__(LocalBooks())

    def _store(
        self, partition_id: str, sample_ids: Sequence[str], columns: Mapping[str, Column]
    ) -> list[dict[str, Place]]:
        return [{name: (column, row) for name, column in columns.items()} for row in range(len(sample_ids))]

    def _load(
        self, partition_id: str, sample_ids: Sequence[str], places: Mapping[str, Sequence[dict[str, Place]]]
    ) -> dict[str, list[Place]]:
        return {name: [place[name] for place in of_field] for name, of_field in places.items()}

    def _release(self, partition_id: str, sample_ids: Sequence[str] | None, places: Sequence[dict[str, Place]]) -> None:
        """Does nothing, because the index held the only references to the rows."""


class LocalBooks:
    """Implements `Bookkeeping`: `Partitions` under a lock. A claim waits for the next put."""

    def __init__(self) -> None:
        self._partitions: Partitions[dict[str, Place]] = Partitions()
        self._changed = threading.Condition()

    def register(
        self,
        partition_id: str,
        *,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        group_size: int | None,
    ) -> None:
        with self._changed:
            self._partitions.register(
                partition_id,
                fields=fields,
                num_samples=num_samples,
                consumer_tasks=consumer_tasks,
                group_size=group_size,
            )

    def check_registered(self, partition_id: str) -> None:
        with self._changed:
            self._partitions.check_registered(partition_id)

    def produce(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        *,
        fields: Sequence[str],
        where: Sequence[dict[str, Place]],
        lengths: Sequence[int] | None,
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> list[int] | None:
        with self._changed:
            self._partitions.produce(partition_id, sample_ids, fields=fields, where=where, lengths=lengths, tags=tags)
            self._changed.notify_all()
            return self._partitions.lengths_of(partition_id, sample_ids)

    def claim(
        self, partition_id: str, task: str, *, fields: Sequence[str], batch_size: int, wait_s: float
    ) -> Claim | None:
        def claimed() -> Claim | None:
            return self._partitions.claim(partition_id, task, fields=fields, batch_size=batch_size)

        with self._changed:
            return self._changed.wait_for(claimed, timeout=wait_s)

    def ready(self, partition_id: str, task: str, *, fields: Sequence[str]) -> int:
        with self._changed:
            return self._partitions.ready(partition_id, task, fields=fields)

    def locate(
        self, partition_id: str, sample_ids: Sequence[str], *, fields: Sequence[str]
    ) -> Located[dict[str, Place]]:
        with self._changed:
            return self._partitions.locate(partition_id, sample_ids, fields=fields)

    def fields_of(self, partition_id: str, sample_ids: Sequence[str]) -> set[str]:
        with self._changed:
            return self._partitions.fields_of(partition_id, sample_ids)

    def lengths_of(self, partition_id: str, sample_ids: Sequence[str]) -> list[int] | None:
        with self._changed:
            return self._partitions.lengths_of(partition_id, sample_ids)

    def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        with self._changed:
            return self._partitions.consumed(partition_id, tasks)

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> list[dict[str, Place]]:
        with self._changed:
            return self._partitions.clear(partition_id, sample_ids)

    def rows_outstanding(self) -> dict[str, int]:
        with self._changed:
            return self._partitions.rows_outstanding()
