"""A process's way to rows: opens the data plane that the config names, and repeats calls that are late (`Rows`).

The training partition holds the rows of all future steps. A sample's id is `<group>.<attempt>_g<i>`, so that the late
put of an expired attempt can never overwrite the rows of the attempt that replaced it. Partial generations
(`asyncrl.generation.prefixes`) have the same ids in a partition of their own, so they are never taken for finished
groups. The module imports torch only when rows are used.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from asyncrl.config.schema import Config
from asyncrl.data_plane.calls import control_placement, patiently, patiently_in_thread, require_ray
from asyncrl.data_plane.row_store import Index
from asyncrl.data_plane.sample_ids import group_of, samples_of

if TYPE_CHECKING:
    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.data_plane.interfaces import DataPlaneClient, KVBatchMeta

Answer = TypeVar("Answer")

TRAIN_PARTITION = "train"
"""Name of the partition with the rows of all future steps."""
PREFIX_PARTITION = "prefixes"
"""Name of the partition with the partial generations of groups that are not finished."""
PADDED_TOKENS = 2**16
"""Groups with at most this many tokens together, padding included, are stored in one put even if their widths differ
much, because each put takes several calls."""
PADDING = 1.1


def open_client(config: Config, *, here: bool = False) -> DataPlaneClient:
    """Opens a client for the run. Each of its calls to another process ends within `buffer.call_timeout_s`. The first
    client starts the run's index: with `here` preferably on the node of this process (`control_placement`). Raises
    RunError if Ray is not initialized."""
    require_ray("open the data plane")
    namespace, timeout_s = config.run.name, config.buffer.call_timeout_s
    placement = control_placement(config, here=here)
    match config.data_plane.backend:
        case "object_store":
            from asyncrl.data_plane.object_store import ObjectStoreClient

            index = Index(namespace=namespace, timeout_s=timeout_s, placement=placement)
            return ObjectStoreClient(namespace=namespace, timeout_s=timeout_s, index=index)
        case "transfer_queue":
            from asyncrl.data_plane.transfer_queue import TransferQueueClient

            units = config.data_plane.transfer_queue_storage_units
            return TransferQueueClient(
                namespace=namespace, timeout_s=timeout_s, storage_units=units, placement=placement
            )


class Rows:
    """The access of a process to the rows of a partition, by default the rows of finished groups.

        rows = Rows(config)                              # in a process with an event loop:
        await rows.put({"7.0": rows_GS})
        rows = Rows(config, client=open_client(config))  # in a thread that may block:
        lengths = rows.patiently(lambda client: client.lengths_of(["7.0_g0"], TRAIN_PARTITION))

    A call whose answer is late is repeated until `run.stall_timeout_s` have passed. The async methods run each attempt
    in a thread. They work on the rows of whole groups with the keys `<group>.<attempt>`, or on the rows that a meta
    names. `client` is an open client of this process. Without `client`, the first use opens one. Before its first use,
    such a `Rows` can be sent to another process. Raises the client's RunError and TimeoutError.
    """

    def __init__(
        self, config: Config, *, partition: str = TRAIN_PARTITION, client: DataPlaneClient | None = None
    ) -> None:
        self._config = config
        self._partition = partition
        self._client = client

    @property
    def client(self) -> DataPlaneClient:
        """The data-plane client of this process. The first use opens it."""
        with _OPENING:
            if self._client is None:
                client = open_client(self._config)
                if self._partition != TRAIN_PARTITION:  # the policy registers the training partition
                    client.register_partition(self._partition, [], self._config.learner.group_size, [])
                self._client = client
        return self._client

    def close(self) -> None:
        """Closes the client if it was opened. Idempotent."""
        if self._client is not None:
            self._client.close()

    def patiently(self, call: Callable[[DataPlaneClient], Answer]) -> Answer:
        """Returns the answer of an idempotent call of the client, and blocks the thread meanwhile."""
        return patiently_in_thread(lambda: call(self.client), patience_s=self._config.run.stall_timeout_s)

    async def put(self, rows_by_key: Mapping[str, BatchedDataDict]) -> None:
        """Stores the rows [G, S] (G samples, S tokens) of the groups `<group>.<attempt>`. If it raises, it may have
        stored some of them."""
        await self._in_thread(lambda client: self._put(client, rows_by_key))

    async def clear(self, keys: Sequence[str]) -> None:
        """Drops the rows of these groups. Ignores rows that do not exist."""
        ids = [sample for key in keys for sample in samples_of(key, count=self._config.learner.group_size)]
        await self._in_thread(lambda client: client.clear_samples(ids, self._partition))

    async def keys(self) -> list[str]:
        """Returns the keys of the groups that have rows."""
        ids = await self._in_thread(lambda client: client.sample_ids(self._partition))
        return list(dict.fromkeys(map(group_of, ids)))

    async def get(self, key: str, columns: Sequence[str]) -> BatchedDataDict:
        """Returns these columns of a group's rows. Raises KeyError if a row or a column does not exist, and RowsLost if
        their row store has ended."""
        ids = samples_of(key, count=self._config.learner.group_size)
        return await self._in_thread(lambda client: client.get_samples(ids, self._partition, columns))

    async def read(self, meta: KVBatchMeta, columns: Sequence[str]) -> BatchedDataDict:
        """Returns these columns of the rows that `meta` names. Raises the errors of `get`."""
        return await self._in_thread(lambda client: client.get_data(meta, columns))

    async def outstanding(self) -> int:
        """Returns the number of rows of the partition that were put and not cleared; 0 if the client does not count."""
        return (await self._in_thread(lambda client: client.rows_outstanding())).get(self._partition, 0)

    async def _in_thread(self, call: Callable[[DataPlaneClient], Answer]) -> Answer:
        return await patiently(
            lambda: asyncio.to_thread(lambda: call(self.client)), patience_s=self._config.run.stall_timeout_s
        )

    def _put(self, client: DataPlaneClient, rows_by_key: Mapping[str, BatchedDataDict]) -> None:
        from asyncrl.data.batched_data_dict import BatchedDataDict
        from asyncrl.data_plane.codec import PAD_VALUES

        for keys in _alike(rows_by_key):
            ids = [sample for key in keys for sample in samples_of(key, count=rows_by_key[key].size)]
            rows = BatchedDataDict.from_batches([rows_by_key[key] for key in keys], pad_value_dict=dict(PAD_VALUES))
            client.put_samples(ids, self._partition, fields=rows)


def _alike(rows_by_key: Mapping[str, BatchedDataDict]) -> Iterator[list[str]]:
    """Yields the keys of groups to store together. They are padded to the widest group. A batch of more than
    `PADDED_TOKENS` tokens, padding included, has at most `PADDING` times as many tokens as its groups."""
    keys: list[str] = []
    samples = tokens = 0
    for key in sorted(rows_by_key, key=lambda key: rows_by_key[key]["input_ids"].shape[1]):
        count, width = rows_by_key[key]["input_ids"].shape
        padded = (samples + count) * width
        if keys and padded > max(PADDED_TOKENS, PADDING * (tokens + count * width)):
            yield keys
            keys, samples, tokens = [], 0, 0
        keys.append(key)
        samples, tokens = samples + count, tokens + count * width
    if keys:
        yield keys


_OPENING = threading.Lock()
"""Lock of this process: only one thread opens the client."""
