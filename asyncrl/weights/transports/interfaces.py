"""The interface of a transport, which moves the bytes of a version from the learner's ranks to the replicas."""

from typing import Any, Protocol

import numpy as np


class Transport(Protocol):
    """`send` runs on a learner's rank, `receive` in a replica. The handles travel between them with the manifest."""

    def send(self, bucket: "np.ndarray[Any, np.dtype[np.uint8]]") -> Any:
        """Makes one bucket of bytes available and returns its handle."""
        ...

    async def receive(self, handles: list[Any], *, timeout_s: float) -> list[memoryview]:
        """Returns the bytes of every bucket, in order. Raises ManifestVoid when a process that sent one of them has
        died."""
        ...
