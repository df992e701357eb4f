"""The common part of all clients. An index ("books") says where rows are, a store keeps them, and the codec encodes
them.

A client consists of three methods (`_store`, `_load` and `_release`) and an index. `Bookkeeping` is the interface of
`Partitions` for a process: under a lock, or behind an actor. The index is updated after the rows are stored, so that
every row in the index can be read.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.codec import Column, decode, encode, row_lengths
from asyncrl.data_plane.interfaces import LENGTHS_FIELD, PAD_SEQLEN, DataPlaneClient, KVBatchMeta
from asyncrl.data_plane.partitions import Claim, Located
from asyncrl.errors import RowsLost, RunError

T = TypeVar("T")
W = TypeVar("W")

READ_ATTEMPTS = 3
"""Attempts to read rows. Rows may be cleared or replaced between the look into the index and the fetch."""


class Bookkeeping(Protocol[W]):
    """The methods of `Partitions`, usable from several threads."""

    def register(
        self,
        partition_id: str,
        *,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        group_size: int | None,
    ) -> None: ...

    def check_registered(self, partition_id: str) -> None: ...

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
        """Enters a put. Returns the lengths of these samples, known from this put or an earlier one, as `lengths_of`
        does."""

    def claim(
        self, partition_id: str, task: str, *, fields: Sequence[str], batch_size: int, wait_s: float
    ) -> Claim | None:
        """Waits up to `wait_s` seconds for enough rows. Returns None if there are not enough."""

    def ready(self, partition_id: str, task: str, *, fields: Sequence[str]) -> int: ...

    def locate(self, partition_id: str, sample_ids: Sequence[str], *, fields: Sequence[str]) -> Located[W]: ...

    def fields_of(self, partition_id: str, sample_ids: Sequence[str]) -> set[str]: ...

    def lengths_of(self, partition_id: str, sample_ids: Sequence[str]) -> list[int] | None: ...

    def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool: ...

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> list[W]: ...

    def rows_outstanding(self) -> dict[str, int]: ...


class PartitionedClient(DataPlaneClient, Generic[W]):
    """Implements `DataPlaneClient` with an index and a store."""

    def __init__(self, books: Bookkeeping[W]) -> None:
        self._books_when_open = books
        self._closed = False

    @abstractmethod
    def _store(self, partition_id: str, sample_ids: Sequence[str], columns: Mapping[str, Column]) -> Sequence[W]:
        """Stores the columns. Returns the place of each sample's rows."""

    @abstractmethod
    def _load(
        self, partition_id: str, sample_ids: Sequence[str], places: Mapping[str, Sequence[W]]
    ) -> Mapping[str, Sequence[tuple[Column, int]]]:
        """Returns column and row of each sample, by field. Raises KeyError or RowsLost for rows that are gone."""

    @abstractmethod
    def _release(self, partition_id: str, sample_ids: Sequence[str] | None, places: Sequence[W]) -> None:
        """Releases rows that have been removed from the index."""

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
    ) -> None:
        self._books.register(
            partition_id,
            fields=list(fields),
            num_samples=num_samples,
            consumer_tasks=list(consumer_tasks),
            group_size=grpo_group_size,
        )

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        ids = list(sample_ids)
        columns = encode({} if fields is None else fields)  # `fields or {}` would raise for a TensorDict
        _check_put(ids, columns, tags)
        self._books.check_registered(partition_id)  # check before any row is stored
        lengths: list[int] | None = []
        if ids:
            where = self._store(partition_id, ids, columns)
            lengths = self._books.produce(
                partition_id,
                ids,
                fields=list(columns),
                where=where,
                lengths=row_lengths(columns[LENGTHS_FIELD]) if LENGTHS_FIELD in columns else None,
                tags=None if tags is None else [dict(tag) for tag in tags],
            )
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=None,
            sample_ids=ids,
            fields=list(columns),
            sequence_lengths=lengths,
            tags=None if tags is None else [dict(tag) for tag in tags],
        )

    def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        return self._read(partition_id, sample_ids, select_fields, width=None, pad_value_dict=pad_value_dict)

    def get_data(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise ValueError("get_data: neither select_fields nor the meta's fields name a field; give one of them")
        width = meta.extra_info.get(PAD_SEQLEN)
        return self._read(meta.partition_id, meta.sample_ids, fields, width=width, pad_value_dict=pad_value_dict)

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
        claim = self._books.claim(
            partition_id, task_name, fields=fields, batch_size=batch_size, wait_s=timeout_s if blocking else 0.0
        )
        if claim is None:
            if blocking:
                ready = self._books.ready(partition_id, task_name, fields=fields)
                unknown = sorted(set(fields) - self._books.fields_of(partition_id, []))
                raise TimeoutError(
                    f"task {task_name!r} waited {timeout_s:g} s (timeout_s) for {batch_size} rows of partition "
                    f"{partition_id!r} with {fields}, but only {ready} are ready"
                    + (f"; {unknown} were neither registered nor put: check their names" if unknown else "")
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
        return self._books.fields_of(partition_id, list(sample_ids))

    def lengths_of(self, sample_ids: Sequence[str], partition_id: str) -> list[int] | None:
        return self._books.lengths_of(partition_id, list(sample_ids))

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        return self._books.consumed(partition_id, list(task_names))

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        ids = None if sample_ids is None else list(sample_ids)
        self._release(partition_id, ids, self._books.clear(partition_id, ids))

    def rows_outstanding(self) -> dict[str, int]:
        return self._books.rows_outstanding()

    def close(self) -> None:
        self._closed = True

    @property
    def _books(self) -> Bookkeeping[W]:
        if self._closed:
            raise RunError("this data-plane client is closed; open a new one")
        return self._books_when_open

    def _read(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: Sequence[str],
        *,
        width: int | None,
        pad_value_dict: Mapping[str, float] | None,
    ) -> BatchedDataDict:
        ids, names = list(sample_ids), list(dict.fromkeys(fields))

        def load() -> tuple[Mapping[str, Sequence[tuple[Column, int]]], Sequence[int | None]]:
            located = self._books.locate(partition_id, ids, fields=names)
            return self._load(partition_id, ids, located.places), located.lengths

        rows, lengths = _again_when_missing(load)
        return decode(rows, lengths=lengths, width=width, pad_value_dict=pad_value_dict)


def _again_when_missing(load: Callable[[], T]) -> T:
    for _ in range(READ_ATTEMPTS - 1):
        try:
            return load()
        except (KeyError, RowsLost):
            continue
    return load()


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
