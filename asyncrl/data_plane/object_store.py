"""The data plane on Ray's object store: nothing to install or to start beyond Ray itself.

A put hands its rows to the row store of the writer's node, which owns them from then on: one object a group and put,
or one a put of what has a single number a row. Then it enters them in the books (`partition_actor.py`). A read asks the
books where rows are, the stores for references, and fetches in the reader's process: bulk passes no third one.

Puts. A put has a key of its own, so that a repeated one never writes over bytes that someone reads: the books point to
the last put that was entered, and objects that nobody points to any more are dropped. A put whose answer was lost may
have been entered or not; repeating it is right in both cases. If its writer does not come back, what it stored and did
not enter stays until the partition is cleared as a whole.
"""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from asyncrl.data_plane.calls import answer
from asyncrl.data_plane.codec import Column, WireColumn
from asyncrl.data_plane.partition_actor import ActorBooks, StoredAt
from asyncrl.data_plane.partitioned_client import PartitionedClient
from asyncrl.data_plane.partitions import group_of
from asyncrl.data_plane.row_store import ensure_row_store
from asyncrl.errors import ActorGone, RowsLost

Address = tuple[str, str]
"""(store, key) of an object."""


class ObjectStoreClient(PartitionedClient[StoredAt]):
    """A process's access to the rows of the run `namespace`; every call of an actor has the deadline `timeout_s`."""

    def __init__(self, *, namespace: str, timeout_s: float) -> None:
        super().__init__(ActorBooks(namespace=namespace, timeout_s=timeout_s))
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._own_store: str | None = None
        self._handles: dict[str, Any] = {}

    def _store(self, partition_id: str, sample_ids: Sequence[str], columns: Mapping[str, Column]) -> list[StoredAt]:
        if self._own_store is None:
            self._own_store = ensure_row_store(namespace=self._namespace)
        store, put = self._own_store, uuid.uuid4().hex
        # A number a row is less than its own bookkeeping: in an object a group it costs six times as much to write.
        small = all(column.dtype is not None and not column.per_token for column in columns.values())
        rows_by_key: dict[str, list[int]] = {}
        where: list[StoredAt] = []
        for i, sample_id in enumerate(sample_ids):
            key = f"{partition_id}/{'rows' if small else group_of(sample_id)}/{put}"
            rows = rows_by_key.setdefault(key, [])
            where.append(StoredAt(store, key, len(rows)))
            rows.append(i)
        if columns:
            objects = {
                key: {name: column.rows(rows).wire() for name, column in columns.items()}
                for key, rows in rows_by_key.items()
            }
            self._put(store, objects)
        return where

    def _put(self, store: str, objects: Mapping[str, Mapping[str, WireColumn]]) -> None:
        """When the store has died since it was last used, it is made anew, once."""
        what = f"storing {len(objects)} objects of rows in {store}"
        try:
            answer(self._handle(store).put.remote(objects), timeout_s=self._timeout_s, what=what)
        except ActorGone:
            self._handles.pop(store, None)
            ensure_row_store(namespace=self._namespace)
            answer(self._handle(store).put.remote(objects), timeout_s=self._timeout_s, what=what)

    def _load(
        self, partition_id: str, sample_ids: Sequence[str], places: Mapping[str, Sequence[StoredAt]]
    ) -> dict[str, list[tuple[Column, int]]]:
        addresses = list(dict.fromkeys((place.store, place.key) for of_field in places.values() for place in of_field))
        objects = self._fetch(addresses)
        lost = [
            sample_id
            for i, sample_id in enumerate(sample_ids)
            if any((of_field[i].store, of_field[i].key) not in objects for of_field in places.values())
        ]
        if lost:
            raise RowsLost(
                f"{len(lost)} of {len(sample_ids)} rows are lost with the row store that kept them, or out of reach "
                f"for {self._timeout_s:g} s (buffer.call_timeout_s): {', '.join(lost[:5])}",
                sample_ids=lost,
            )
        columns: dict[tuple[Address, str], Column] = {}

        def column(place: StoredAt, name: str) -> Column:
            address = (place.store, place.key)
            if (address, name) not in columns:
                columns[address, name] = Column.from_wire(objects[address][name])
            return columns[address, name]

        return {name: [(column(place, name), place.row) for place in of_field] for name, of_field in places.items()}

    def _release(self, partition_id: str, sample_ids: Sequence[str] | None, places: Sequence[StoredAt]) -> None:
        """The books tell the stores."""

    def _references(self, addresses: Sequence[Address]) -> dict[Address, Any]:
        """References of what the stores that live have; all of them are asked at once. A store that was made anew has
        nothing of the one before it."""
        keys: dict[str, list[str]] = {}
        for store, key in addresses:
            keys.setdefault(store, []).append(key)
        asked: dict[str, Any] = {}
        found: dict[Address, Any] = {}
        for store, of_store in keys.items():
            with contextlib.suppress(ActorGone):
                asked[store] = self._handle(store).refs.remote(of_store)
        for store, ref in asked.items():
            what = f"finding {len(keys[store])} objects in {store}"
            try:
                refs: dict[str, Any] = answer(ref, timeout_s=self._timeout_s, what=what)
            except ActorGone:
                self._handles.pop(store, None)  # another may have taken its name since
            else:
                found.update({(store, key): ref for key, ref in refs.items()})
        return found

    def _fetch(self, addresses: Sequence[Address]) -> dict[Address, dict[str, WireColumn]]:
        """The objects that can be had within the deadline."""
        refs = self._references(addresses)
        if not refs:
            return {}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._timeout_s)
        try:
            return dict(zip(refs, ray.get(list(refs.values()), timeout=0), strict=True))
        except (GetTimeoutError, ObjectLostError):  # OwnerDiedError is one
            objects: dict[Address, dict[str, WireColumn]] = {}
            for address, ref in refs.items():
                with contextlib.suppress(GetTimeoutError, ObjectLostError):
                    objects[address] = ray.get(ref, timeout=0)
            return objects

    def _handle(self, store: str) -> Any:
        if store not in self._handles:
            try:
                self._handles[store] = ray.get_actor(store, namespace=self._namespace)
            except ValueError as error:
                raise ActorGone(f"rows are lost with the row store {store}, which is gone") from error
        return self._handles[store]
