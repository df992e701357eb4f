"""The data plane on Ray's object store. It needs nothing beyond Ray.

A put gives its rows to the row store of the writer's node, which owns them from then on. Groups share an object up to
`OBJECT_BYTES`, because each object costs CPU time. The memory of an object is free when the last of its groups is
cleared. After the row store has the rows, the put enters them into the index (`row_store.py`). A read gets the places
from the index and the references from the row stores, and fetches the objects in the reader's process. Bulk data passes
through no third process.

Each put has its own key, so that a repeated put never overwrites bytes that another process reads. The index points to
the last put that was entered. Objects that the index no longer points to are dropped. If the answer to a put is lost,
the put may have been entered or not; repeating it is correct in both cases. If a writer dies between storing and
entering, its objects stay until the whole partition is cleared.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from asyncrl.data_plane.calls import answer, named_actor, start
from asyncrl.data_plane.partitioned_client import PartitionedClient
from asyncrl.data_plane.partitions import Address, Places, StoredAt
from asyncrl.data_plane.row_store import Index, RowStore, ensure_row_store
from asyncrl.data_plane.sample_ids import group_of
from asyncrl.errors import ActorGone, RowsLost

if TYPE_CHECKING:
    from asyncrl.data_plane.codec import Column, PickedFields, WireColumn

OBJECT_BYTES = 2**20
"""Groups share an object up to this size, bytes. A larger group has an object of its own."""


class ObjectStoreClient(PartitionedClient):
    """A process's access to the rows of the run `namespace`. Every call to an actor has the deadline `timeout_s`.
    `index` is the process's access to the run's index; without it, one is opened."""

    def __init__(self, *, namespace: str, timeout_s: float, index: Index | None = None) -> None:
        super().__init__(index or Index(namespace=namespace, timeout_s=timeout_s))
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._own_store: str | None = None
        self._handles: dict[str, Any] = {}

    def _store(self, partition_id: str, sample_ids: Sequence[str], columns: Mapping[str, Column]) -> list[StoredAt]:
        if self._own_store is None:
            self._own_store = ensure_row_store(namespace=self._namespace)
        store, put = self._own_store, uuid.uuid4().hex
        objects: dict[str, dict[str, WireColumn]] = {}
        where: list[StoredAt] = []
        for number, rows in enumerate(_objects(sample_ids, columns)):
            key = f"{partition_id}/{number}/{put}"
            objects[key] = {name: column.rows(rows).wire() for name, column in columns.items()}
            where += [StoredAt(store, key, row) for row in range(len(rows))]
        if columns:
            self._put(store, objects)
        return where

    def _put(self, store: str, objects: Mapping[str, Mapping[str, WireColumn]]) -> None:
        """Stores the objects in the row store. If the store has died since its last use, starts a new one and tries
        once more."""
        try:
            put_objects(self._handle(store), objects, store=store, timeout_s=self._timeout_s)
        except ActorGone:
            self._handles.pop(store, None)
            ensure_row_store(namespace=self._namespace)
            put_objects(self._handle(store), objects, store=store, timeout_s=self._timeout_s)

    def _load(self, partition_id: str, sample_ids: Sequence[str], places: Mapping[str, Places]) -> PickedFields:
        from asyncrl.data_plane.codec import Column, Picked  # imports torch

        addresses = list(dict.fromkeys(address for of_field in places.values() for address in of_field))
        objects = self._fetch(addresses)
        if gone := set(addresses).difference(objects):
            numbers = {
                number
                for of_field in places.values()
                for address in gone.intersection(of_field)
                for number in of_field[address].samples
            }
            lost = [sample_ids[number] for number in sorted(numbers)]
            raise RowsLost(
                f"{len(lost)} of {len(sample_ids)} rows are lost: their row store has ended, or was out of reach for "
                f"{self._timeout_s:g} s (buffer.call_timeout_s): {', '.join(lost[:5])}",
                sample_ids=lost,
            )
        return {
            name: [Picked(Column.from_wire(objects[address][name]), *rows) for address, rows in of_field.items()]
            for name, of_field in places.items()
        }

    def _references(self, addresses: Sequence[Address]) -> dict[Address, Any]:
        """Returns references to the objects that the living row stores have. All stores are asked at once. A restarted
        store has no objects of its predecessor."""
        keys: dict[str, list[str]] = {}
        for store, key in addresses:
            keys.setdefault(store, []).append(key)
        asked: dict[str, Any] = {}
        found: dict[Address, Any] = {}
        for store, of_store in keys.items():
            with contextlib.suppress(ActorGone):
                asked[store] = start(self._handle(store), RowStore.refs, of_store)
        for store, ref in asked.items():
            what = f"finding {len(keys[store])} objects in {store}"
            try:
                refs: dict[str, Any] = answer(ref, timeout_s=self._timeout_s, what=what)
            except ActorGone:
                # A store that was started again has the same name. The next call looks it up again.
                self._handles.pop(store, None)
            else:
                found.update({(store, key): ref for key, ref in refs.items()})
        return found

    def _fetch(self, addresses: Sequence[Address]) -> dict[Address, dict[str, WireColumn]]:
        """Returns the objects that can be fetched within the deadline."""
        refs = self._references(addresses)
        if not refs:
            return {}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._timeout_s)
        try:
            return dict(zip(refs, ray.get(list(refs.values()), timeout=0), strict=True))
        except (GetTimeoutError, ObjectLostError):  # OwnerDiedError is an ObjectLostError
            objects: dict[Address, dict[str, WireColumn]] = {}
            for address, ref in refs.items():
                with contextlib.suppress(GetTimeoutError, ObjectLostError):
                    objects[address] = ray.get(ref, timeout=0)
            return objects

    def _handle(self, store: str) -> Any:
        if store not in self._handles:
            handle = named_actor(store, namespace=self._namespace)
            if handle is None:
                raise ActorGone(f"the row store {store} has ended, and the rows that it kept are lost")
            self._handles[store] = handle
        return self._handles[store]


def put_objects(handle: Any, objects: Mapping[str, Mapping[str, WireColumn]], *, store: str, timeout_s: float) -> None:
    """Gives objects to the row store `store`. After `timeout_s`, makes the store drop them and raises CallTimeout."""
    what = f"storing {len(objects)} objects of rows in {store}"
    try:
        answer(start(handle, RowStore.put, objects), timeout_s=timeout_s, what=what)
    except TimeoutError:
        # The put may still be performed. The index will never name these objects, so the store drops them afterwards.
        start(handle, RowStore.clear, list(objects))
        raise


def _objects(sample_ids: Sequence[str], columns: Mapping[str, Column]) -> list[list[int]]:
    """Divides the rows of a put among objects of at most `OBJECT_BYTES`; a larger group has an object of its own.
    Returns the indices of each object's rows, in order. Neighbouring rows of one group are in the same object."""
    none = np.zeros(len(sample_ids), dtype=np.int64)
    row_bytes: list[int] = sum((column.row_bytes for column in columns.values()), none).tolist()
    objects: list[list[int]] = [[]]
    size = 0
    for _, rows in groupby(range(len(sample_ids)), key=lambda i: group_of(sample_ids[i])):
        of_group = list(rows)
        nbytes = sum(row_bytes[row] for row in of_group)
        if objects[-1] and size + nbytes > OBJECT_BYTES:
            objects.append([])
            size = 0
        objects[-1] += of_group
        size += nbytes
    return objects
