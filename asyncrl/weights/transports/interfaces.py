"""The interface of a transport, which moves the bytes of a version from the learner's ranks to the replicas."""

from typing import Any, Protocol

from asyncrl.weights.manifest import Bytes


class Transport(Protocol):
    """`send` runs on a learner's rank, `receive` in a replica. The handles travel between them with the manifest."""

    def send(self, bucket: Bytes) -> Any:
        """Makes one bucket of bytes available and returns its handle."""
        ...

    async def receive(self, handle: Any, *, timeout_s: float) -> Bytes:
        """Returns the bytes of a bucket. Raises ManifestVoid when the process that sent it has died, and
        FetchTimeout after `timeout_s`."""
        ...
