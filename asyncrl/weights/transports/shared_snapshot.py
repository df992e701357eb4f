"""Sends weights through the memory of the learner's ranks, to generators on the same node. No byte is copied to send.

A rank's snapshot is in a memory file, which a replica maps by its path. A newer snapshot may overwrite it while it is
read. The bytes then do not have the manifest's checksum, and the replica fetches the newest version.
"""

import asyncio
import platform
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from asyncrl.common.version import Version
from asyncrl.errors import FetchFailed, ManifestVoid, WeightError
from asyncrl.weights.manifest import Bucket, Bytes
from asyncrl.weights.memory_file import MemoryFile
from asyncrl.weights.transports.interfaces import StoresBytes


class SharedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A range of bytes of a memory file on a node."""

    node: str
    path: str
    start: int
    nbytes: int


class SharedSnapshotTransport(StoresBytes):
    """Implements `Transport`. Learner ranks and generators must be on one node."""

    def send(
        self, parts: Sequence[Bytes], described: Sequence[Bucket], version: Version, *, shared: MemoryFile | None
    ) -> list[Any]:
        assert shared is not None, "take the snapshot in shared memory"
        handles, start = [], 0
        for part in parts:
            handles.append(SharedBytes(node=platform.node(), path=shared.path, start=start, nbytes=part.nbytes))
            start += part.nbytes
        return handles

    async def receive(self, handle: SharedBytes, *, timeout_s: float) -> Bytes:
        if handle.node != platform.node():
            raise WeightError(
                f"weights.transport = ipc needs learner and generators on one node, but the learner's rank is on "
                f"{handle.node} and this replica on {platform.node()}; use object_store or filesystem"
            )
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(_copied, handle)
        except TimeoutError as error:
            raise FetchFailed("reading weights in memory took longer than weights.load_timeout_s") from error
        except (OSError, ValueError) as error:
            raise ManifestVoid(
                f"the process that published these weights has ended, so their bytes are lost: {error}"
            ) from error


def _copied(handle: SharedBytes) -> Bytes:
    return np.fromfile(handle.path, dtype=np.uint8, offset=handle.start, count=handle.nbytes)
