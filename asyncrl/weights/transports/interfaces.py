"""The interface of a transport, which moves the bytes of a version from the learner's ranks to the replicas."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncrl.common.version import Version
from asyncrl.weights.manifest import Bucket, Bytes
from asyncrl.weights.memory_file import MemoryFile


class Transport(Protocol):
    """`send` runs on a learner's rank, `receive` in a replica. The handles travel between them with the manifest."""

    def send(
        self, parts: Sequence[Bytes], described: Sequence[Bucket], version: Version, *, shared: MemoryFile | None
    ) -> list[Any]:
        """Makes what a rank sends of `version` available: the bytes of its buckets, or deltas. Returns a handle for
        each part, in order. `described` are the buckets as the manifest has them. `shared` has the parts, one after the
        other, if other processes of the node may map them."""
        ...

    async def receive(self, handle: Any, *, timeout_s: float) -> Bytes:
        """Returns the bytes of a bucket. Raises ManifestVoid when they are lost, and FetchFailed after `timeout_s`."""
        ...

    def delete(self, which: Callable[[Version], bool]) -> None:
        """Deletes what the transport keeps of these versions outside of the learner's processes."""
        ...
