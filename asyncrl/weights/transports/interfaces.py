"""The interface of a transport, which moves the bytes of a version from the learner's ranks to the replicas."""

from collections.abc import Callable
from typing import Any, Protocol

from asyncrl.common.version import Version
from asyncrl.weights.manifest import Bucket, Bytes
from asyncrl.weights.publisher import Snapshot


class Transport(Protocol):
    """`send` runs on a learner's rank, `receive` in a replica. The handles travel between them with the manifest."""

    def send(self, snapshot: Snapshot, described: tuple[Bucket, ...], version: Version) -> list[Any]:
        """Makes the buckets of a rank's snapshot available as `version`. Returns a handle for each bucket, in order.
        `described` are the snapshot's buckets as the manifest has them."""
        ...

    async def receive(self, handle: Any, *, timeout_s: float) -> Bytes:
        """Returns the bytes of a bucket. Raises ManifestVoid when they are lost, and FetchFailed after `timeout_s`."""
        ...

    def delete(self, which: Callable[[Version], bool]) -> None:
        """Deletes what the transport keeps of these versions outside of the learner's processes."""
        ...
