"""The common part of all clients: the index says where rows are, a store keeps them, and the codec encodes them.

A client consists of an index and of two methods, `_store` and `_load`. The index is updated after the rows are stored,
so that every row in the index can be read. The codec, which imports torch, is imported when rows are put or read: the
coordinator only lists and clears them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.data_plane.interfaces import LENGTHS_FIELD, PAD_SEQLEN, DataPlaneClient, KVBatchMeta
from asyncrl.data_plane.partitions import Claim, Partitions, Places, StoredAt
from asyncrl.data_plane.row_store import Index
from asyncrl.errors import RowsLost, RunError

if TYPE_CHECKING:
    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.data_plane.codec import Column, PickedFields

READ_ATTEMPTS = 3
"""Attempts to read rows. Rows may be cleared or replaced between the look into the index and the fetch."""


class PartitionedClient(DataPlaneClient):
    """Implements `DataPlaneClient` with an index and a store."""

    def __init__(self, index: Index) -> None:
        self._index_when_open = index
        self._closed = False
        self._registered: set[str] = set()

    @abstractmethod
    def _store(self, partition_id: str, sample_ids: Sequence[str], columns: Mapping[str, Column]) -> Sequence[StoredAt]:
        """Stores the columns. Returns for each sample where its row is stored."""

    @abstractmethod
    def _load(self, partition_id: str, sample_ids: Sequence[str], places: Mapping[str, Places]) -> PickedFields:
        """Fetches the stored columns at `places`. Returns them by field, with the rows of the samples in each column.

        Raises RowsLost for rows whose store has ended, and KeyError for rows that were cleared.
        """

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
    ) -> None:
        tasks = list(consumer_tasks)
        self._index.call(Partitions.register, partition_id, list(fields), num_samples, tasks, grpo_group_size)

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        from asyncrl.data_plane.codec import encode, row_lengths

        index = self._index  # raises RunError if the client is closed, before any row is stored
        ids = list(sample_ids)
        columns = encode({} if fields is None else fields)  # `fields or {}` would raise for a TensorDict
        given_tags = None if tags is None else [dict(tag) for tag in tags]
        _check_put(ids, columns, given_tags)
        if partition_id not in self._registered:  # a partition stays registered, so one check for each is enough
            index.call(Partitions.fields_of, partition_id, [])  # raises KeyError before any row is stored
            self._registered.add(partition_id)
        lengths: list[int] | None = []
        if ids:
            where = self._store(partition_id, ids, columns)
            lengths = index.call(
                Partitions.produce,
                partition_id,
                ids,
                fields=list(columns),
                where=where,
                lengths=row_lengths(columns[LENGTHS_FIELD]) if LENGTHS_FIELD in columns else None,
                tags=given_tags,
            )
        return KVBatchMeta(partition_id, None, ids, list(columns), lengths, tags=given_tags)

    def get_data(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        from asyncrl.data_plane.codec import decode

        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise ValueError("get_data: neither select_fields nor the meta's fields name a field; give one of them")
        names = list(dict.fromkeys(fields))
        for attempt in range(1, READ_ATTEMPTS + 1):
            located = self._index.call(Partitions.locate, meta.partition_id, meta.sample_ids, fields=names)
            try:
                rows = self._load(meta.partition_id, meta.sample_ids, located.places)
                break
            except (KeyError, RowsLost):
                if attempt == READ_ATTEMPTS:
                    raise
        width = meta.extra_info.get(PAD_SEQLEN)
        return decode(rows, lengths=located.lengths, width=width, pad_value_dict=pad_value_dict)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        fields = list(required_fields)
        wait_s = timeout_s if blocking else 0.0
        claim = self._index.wait(
            wait_s, Partitions.claim, partition_id, task_name, fields=fields, batch_size=batch_size
        )
        if claim is None:
            if blocking:
                ready = self._index.call(Partitions.ready, partition_id, task_name, fields=fields)
                registered = self._index.call(Partitions.fields_of, partition_id, [])
                unknown = sorted(set(fields) - registered)
                raise TimeoutError(
                    f"task {task_name!r} waited {timeout_s:g} s (timeout_s) for {batch_size} rows of partition "
                    f"{partition_id!r} with {fields}, but only {ready} are ready"
                    + (f"; the columns {unknown} were neither registered nor put: check their names" if unknown else "")
                )
            claim = Claim(sample_ids=[], sequence_lengths=[], tags=[])
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=task_name,
            sample_ids=claim.sample_ids,
            fields=fields,
            sequence_lengths=claim.sequence_lengths,
            extra_info={} if dp_rank is None else {"dp_rank": dp_rank},
            tags=claim.tags,
        )

    def fields_of(self, sample_ids: Sequence[str], partition_id: str) -> set[str] | None:
        return self._index.call(Partitions.fields_of, partition_id, list(sample_ids))

    def lengths_of(self, sample_ids: Sequence[str], partition_id: str) -> list[int] | None:
        return self._index.call(Partitions.lengths_of, partition_id, list(sample_ids))

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        return self._index.call(Partitions.consumed, partition_id, list(task_names))

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        self._index.call(Partitions.clear, partition_id, None if sample_ids is None else list(sample_ids))

    def sample_ids(self, partition_id: str) -> list[str]:
        return self._index.call(Partitions.sample_ids, partition_id)

    def rows_outstanding(self) -> dict[str, int]:
        return self._index.call(Partitions.rows_outstanding)

    def close(self) -> None:
        self._closed = True

    @property
    def _index(self) -> Index:
        if self._closed:
            raise RunError("this data-plane client is closed; open a new one")
        return self._index_when_open


def _check_put(ids: Sequence[str], columns: Mapping[str, Column], tags: Sequence[Mapping[str, Any]] | None) -> None:
    if not columns and tags is None:
        raise ValueError("put_samples: neither fields nor tags were given; give at least one of them")
    if len(set(ids)) != len(ids):
        repeated = sorted({sample_id for sample_id in ids if ids.count(sample_id) > 1})
        raise ValueError(f"put_samples: samples {repeated[:5]} are named more than once; give each sample once")
    rows = {name: len(column) for name, column in columns.items()}
    if tags is not None:
        rows["tags"] = len(tags)
    unequal = {name: count for name, count in rows.items() if count != len(ids)}
    if unequal:
        raise ValueError(
            f"put_samples: {len(ids)} samples were given, but other numbers of rows in {unequal}; give one row for "
            "each sample"
        )
