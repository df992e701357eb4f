"""The data plane on the TransferQueue package, for users who already operate it: the extra `transfer-queue`.

TransferQueue only stores rows and returns them by key. Its own queueing is not a bounded buffer, so claims, waits and
the index are asyncrl's (`row_store.py`), as on Ray's object store.

- Its controller and storage units are Ray actors with one logical CPU each. Without room for them its `init` waits
  forever without a message. Therefore this module checks the room first, and `init` has a deadline.
- One controller serves a cluster and dies with the process that started it. Later processes attach to it.
- Its calls have deadlines of minutes. Therefore each call runs in a thread of its own that is abandoned after
  `timeout_s`. The thread is a daemon, so that a call that hangs does not keep the process alive.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import ray
import torch

from asyncrl.common.tasks import in_daemon
from asyncrl.data_plane.calls import named_actor
from asyncrl.data_plane.codec import Column, Picked, PickedFields, encode
from asyncrl.data_plane.partitioned_client import PartitionedClient
from asyncrl.data_plane.partitions import Partitions, Places, StoredAt
from asyncrl.data_plane.row_store import Index
from asyncrl.errors import ConfigError, PlacementError

T = TypeVar("T")

CONTROLLER_CPUS = 1
STORAGE_UNIT_CPUS = 1
POLL_S = 0.2
"""Seconds between two checks for free CPUs."""
THREAD = "transfer-queue"
"""Name of the threads that run calls of TransferQueue."""


class TransferQueueClient(PartitionedClient):
    """A process's access to the rows of the run `namespace`. Every call has the deadline `timeout_s`.

    It attaches to the cluster's TransferQueue, or starts one with `storage_units` within `start_timeout_s`. Raises
    ConfigError without the package, and PlacementError when there is no room for it, or it does not start in time.
    `placement` is for the run's index (`Index`).
    """

    def __init__(
        self,
        *,
        namespace: str,
        timeout_s: float,
        storage_units: int = 2,
        start_timeout_s: float = 60.0,
        placement: Mapping[str, Any] = {},
    ) -> None:
        self._package = _package()
        self._timeout_s = timeout_s
        self._started_it = _start(self._package, storage_units=storage_units, timeout_s=start_timeout_s)
        super().__init__(Index(namespace=namespace, timeout_s=timeout_s, placement=placement))

    def close(self) -> None:
        """Ends TransferQueue if this client started it. A client that only attached to it does not call TransferQueue's
        `close`, which would end the controller for all processes. Its connection ends with its process."""
        if self._closed:
            return
        super().close()
        if self._started_it:
            self._call(self._package.close, what="closing TransferQueue")

    def _store(self, partition_id: str, sample_ids: Sequence[str], columns: Mapping[str, Column]) -> list[StoredAt]:
        if columns:
            from tensordict import TensorDict

            fields = {name: _for_tensordict(column) for name, column in columns.items()}
            batch = TensorDict(fields, batch_size=len(sample_ids))
            self._call(
                lambda: self._package.kv_batch_put(keys=list(sample_ids), partition_id=partition_id, fields=batch),
                what=f"storing {len(sample_ids)} rows in TransferQueue",
            )
        return [StoredAt(store="", key=sample_id, row=0) for sample_id in sample_ids]

    def _load(self, partition_id: str, sample_ids: Sequence[str], places: Mapping[str, Places]) -> PickedFields:
        keys, names = list(dict.fromkeys(sample_ids)), list(places)
        if not keys or not names:
            return {name: [] for name in names}
        batch = self._call(
            lambda: _found(self._package, keys=keys, partition_id=partition_id, names=names),
            what=f"fetching {len(keys)} rows from TransferQueue",
        )
        row_of = {key: row for row, key in enumerate(keys)}
        rows = [row_of[sample_id] for sample_id in sample_ids]
        # Each column is encoded by itself. A put may have stored more tokens than the row's length: decoding cuts them.
        columns = {name: encode({name: batch.get(name)})[name] for name in names}
        return {name: [Picked(columns[name], range(len(rows)), rows)] for name in names}

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        ids = None if sample_ids is None else list(sample_ids)
        keys = self._index.call(Partitions.clear, partition_id, ids)
        if keys:
            self._call(
                lambda: self._package.kv_clear(keys=keys, partition_id=partition_id),
                what=f"clearing {len(keys)} rows in TransferQueue",
            )

    def _call(self, call: Callable[[], T], *, what: str) -> T:
        try:
            return in_daemon(call, name=THREAD).result(timeout=self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{what} took longer than {self._timeout_s:g} s") from None


def _package() -> Any:
    try:
        import transfer_queue
    except ImportError as error:
        raise ConfigError(
            f"the data plane transfer_queue needs the TransferQueue package ({error}); run `pip install "
            '"asyncrl[transfer-queue]"`, or set data_plane.backend: object_store'
        ) from error
    return transfer_queue


def _start(package: Any, *, storage_units: int, timeout_s: float) -> bool:
    """Attaches to TransferQueue or starts it. Returns True if it started it."""
    deadline_s = time.monotonic() + timeout_s
    started = named_actor("TransferQueueController", namespace="transfer_queue") is None
    cpus = CONTROLLER_CPUS + storage_units * STORAGE_UNIT_CPUS
    while started and (free := _free_cpus()) < cpus:
        if time.monotonic() > deadline_s:
            raise PlacementError(
                f"TransferQueue needs {cpus} logical CPUs (a controller and {storage_units} storage units), but only "
                f"{free:g} are free after {timeout_s:g} s; give Ray more (--num-cpus), or use fewer storage units"
            )
        time.sleep(POLL_S)
    settings = {"backend": {"SimpleStorage": {"num_data_storage_units": storage_units}}}
    try:
        in_daemon(lambda: package.init(settings), name=THREAD).result(timeout=max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        raise PlacementError(
            f"TransferQueue did not start within {timeout_s:g} s; check that the cluster has room for {cpus} CPUs"
        ) from None
    return started


def _free_cpus() -> float:
    resources: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return resources.get("CPU", 0.0)


def _found(package: Any, *, keys: list[str], partition_id: str, names: list[str]) -> Any:
    """Returns rows of TransferQueue. Raises KeyError where TransferQueue raises ValueError, or omits missing rows."""
    try:
        batch = package.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=names)
    except (ValueError, package.StorageKeyNotFoundError) as error:
        raise KeyError(f"rows of partition {partition_id!r} are not in TransferQueue ({error})") from error
    if batch.batch_size[0] != len(keys):
        raise KeyError(
            f"TransferQueue has only {batch.batch_size[0]} of {len(keys)} rows of partition {partition_id!r}"
        )

    return batch


def _for_tensordict(column: Column) -> Any:
    from tensordict.tensorclass import NonTensorStack

    if column.dtype is None:
        return NonTensorStack(*column.values)
    flat = torch.from_numpy(np.asarray(column.values)).view(column.dtype)
    if column.ends is None:
        return flat
    lengths = np.diff(column.ends, prepend=0).tolist()
    return torch.nested.as_nested_tensor(list(torch.split(flat, lengths)), layout=torch.jagged)
