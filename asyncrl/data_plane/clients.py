"""Opens the data plane that the config names, and moves the rows of finished groups into and out of it.

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
from asyncrl.data_plane.calls import patiently, require_ray
from asyncrl.data_plane.sample_ids import group_of, samples_of

if TYPE_CHECKING:
    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.data_plane.interfaces import DataPlaneClient

Answer = TypeVar("Answer")

TRAIN_PARTITION = "train"
"""Name of the partition with the rows of all future steps."""
PREFIX_PARTITION = "prefixes"
"""Name of the partition with the partial generations of groups that are not finished."""
PADDED_TOKENS = 2**16
"""Groups with fewer tokens are stored together however they differ in width, because a put takes several calls."""
PADDING = 1.1


def open_client(config: Config) -> DataPlaneClient:
    """Opens a client for the run. Each of its calls to another process ends within `buffer.call_timeout_s`. Raises
    RunError if Ray is not initialized."""
    require_ray("open the data plane")
    namespace, timeout_s = config.run.name, config.buffer.call_timeout_s
    match config.data_plane.backend:
        case "object_store":
            from asyncrl.data_plane.object_store import ObjectStoreClient

            return ObjectStoreClient(namespace=namespace, timeout_s=timeout_s)
        case "transfer_queue":
            from asyncrl.data_plane.transfer_queue import TransferQueueClient

            units = config.data_plane.transfer_queue_storage_units
            return TransferQueueClient(namespace=namespace, timeout_s=timeout_s, storage_units=units)


class GroupRows:
    """Stores and drops the rows of whole groups, for processes with an event loop: each call runs in a thread.

    The groups are finished groups, unless another `partition` is named. Without an open `client` of this process, it
    opens one on first use, so that it can be sent to another process before. A late call is repeated until
    `run.stall_timeout_s`. Raises the client's RunError and TimeoutError.
    """

    def __init__(
        self, config: Config, *, partition: str = TRAIN_PARTITION, client: DataPlaneClient | None = None
    ) -> None:
        self._config = config
        self._partition = partition
        self._client = client

    async def put(self, rows_by_key: Mapping[str, BatchedDataDict]) -> None:
        """Stores the rows [G, S] (G samples, S tokens) of the groups `<group>.<attempt>`. If it raises, it may have
        stored some of them."""
        await self._in_thread(lambda: self._put(rows_by_key))

    async def clear(self, keys: Sequence[str]) -> None:
        """Drops the rows of these groups. Ignores rows that do not exist."""
        ids = [sample for key in keys for sample in samples_of(key, count=self._config.learner.group_size)]
        await self._in_thread(lambda: self._opened().clear_samples(ids, self._partition))

    async def keys(self) -> list[str]:
        """Returns the keys of the groups that have rows."""
        ids = await self._in_thread(lambda: self._opened().sample_ids(self._partition))
        return list(dict.fromkeys(map(group_of, ids)))

    async def get(self, key: str, columns: Sequence[str]) -> BatchedDataDict:
        """Returns these columns of a group's rows. Raises KeyError if there are none, and RowsLost if their row store
        has ended."""
        ids = samples_of(key, count=self._config.learner.group_size)
        return await self._in_thread(lambda: self._opened().get_samples(ids, self._partition, columns))

    async def _in_thread(self, call: Callable[[], Answer]) -> Answer:
        return await patiently(lambda: asyncio.to_thread(call), patience_s=self._config.run.stall_timeout_s)

    def _put(self, rows_by_key: Mapping[str, BatchedDataDict]) -> None:
        from asyncrl.data.batched_data_dict import BatchedDataDict
        from asyncrl.data_plane.codec import PAD_VALUES

        for keys in _alike(rows_by_key):
            ids = [sample for key in keys for sample in samples_of(key, count=rows_by_key[key].size)]
            rows = BatchedDataDict.from_batches([rows_by_key[key] for key in keys], pad_value_dict=dict(PAD_VALUES))
            self._opened().put_samples(ids, self._partition, fields=rows)

    def _opened(self) -> DataPlaneClient:
        with _OPENING:
            if self._client is None:
                client = open_client(self._config)
                if self._partition != TRAIN_PARTITION:  # the policy registers that one, with its tasks
                    client.register_partition(self._partition, [], self._config.learner.group_size, [])
                self._client = client
        return self._client


def _alike(rows_by_key: Mapping[str, BatchedDataDict]) -> Iterator[list[str]]:
    """Yields the keys of groups to store together. They are padded to the widest one, so a batch of more than
    `PADDED_TOKENS` has at most `PADDING` times as many tokens as its groups."""
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
