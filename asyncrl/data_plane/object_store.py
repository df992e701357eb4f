"""The data plane on Ray's object store: nothing to install or to start beyond Ray itself.

A put hands its rows to the row store of the writer's node, which owns them from then on: one object a group and put.
Then it enters them in the books (`partition_actor.py`). A read asks the books where rows are, the stores for
references, and fetches in the reader's process: bulk passes no third one.

Puts. A put has a key of its own, so that a repeated one never writes over bytes that someone reads: the books point to
the last put that was entered, and objects that nobody points to any more are dropped. A put whose answer was lost may
have been entered or not; repeating it is right in both cases. If its writer does not come back, what it stored and did
not enter stays until the partition is cleared as a whole.
"""

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
from asyncrl.errors import ActorGone

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
        rows_by_key: dict[str, list[int]] = {}
        where: list[StoredAt] = []
        for i, sample_id in enumerate(sample_ids):
            key = f"{partition_id}/{group_of(sample_id)}/{put}"
            rows = rows_by_key.setdefault(key, [])
            where.append(StoredAt(store, key, len(rows)))
            rows.append(i)
        if columns:
            objects = {
                key: {name: column.rows(rows).wire() for name, column in columns.items()}
                for key, rows in rows_by_key.items()
            }
            try:
                answer(
                    self._handle(store).put.remote(objects),
                    timeout_s=self._timeout_s,
                    what=f"storing rows of {len(objects)} groups in {store}",
                )
            except ActorGone:
                self._own_store = None  # the next put makes this node's store anew
                self._handles.pop(store, None)
                raise
        return where

    def _load(
        self, partition_id: str, sample_ids: Sequence[str], places: Mapping[str, Sequence[StoredAt]]
    ) -> dict[str, list[tuple[Column, int]]]:
        addresses = list(dict.fromkeys((place.store, place.key) for of_field in places.values() for place in of_field))
        objects = dict(zip(addresses, self._fetch(self._references(addresses)), strict=True))
        columns: dict[tuple[Address, str], Column] = {}

        def column(place: StoredAt, name: str) -> Column:
            address = (place.store, place.key)
            if (address, name) not in columns:
                columns[address, name] = Column.from_wire(objects[address][name])
            return columns[address, name]

        return {name: [(column(place, name), place.row) for place in of_field] for name, of_field in places.items()}

    def _release(self, partition_id: str, sample_ids: Sequence[str] | None, places: Sequence[StoredAt]) -> None:
        """The books tell the stores."""

    def _references(self, addresses: Sequence[Address]) -> list[Any]:
        """A reference an address; all stores are asked at once."""
        keys: dict[str, list[str]] = {}
        for store, key in addresses:
            keys.setdefault(store, []).append(key)
        asked = {store: self._handle(store).refs.remote(of_store) for store, of_store in keys.items()}
        found: dict[Address, Any] = {}
        for store, ref in asked.items():
            what = f"finding {len(keys[store])} objects in {store}"
            refs = answer(ref, timeout_s=self._timeout_s, what=what)
            found.update({(store, key): ref for key, ref in zip(keys[store], refs, strict=True)})
        return [found[address] for address in addresses]

    def _fetch(self, refs: list[Any]) -> list[dict[str, WireColumn]]:
        try:
            objects: list[dict[str, WireColumn]] = ray.get(refs, timeout=self._timeout_s)
        except GetTimeoutError:
            raise TimeoutError(f"fetching {len(refs)} objects took longer than {self._timeout_s:g} s") from None
        except ObjectLostError as error:  # OwnerDiedError is one
            raise ActorGone(f"rows are lost with the row store that kept them ({error})") from error
        return objects

    def _handle(self, store: str) -> Any:
        if store not in self._handles:
            try:
                self._handles[store] = ray.get_actor(store, namespace=self._namespace)
            except ValueError as error:
                raise ActorGone(f"rows are lost with the row store {store}, which is gone") from error
        return self._handles[store]
