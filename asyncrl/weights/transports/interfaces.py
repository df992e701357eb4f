"""How the bytes of a version travel from the ranks that gathered them to the replicas that load them."""

from typing import Any, Protocol

import numpy as np


class Transport(Protocol):
    """`send` runs on a learner's rank, `receive` in a replica; handles travel in between, with the manifest."""

    def send(self, bucket: "np.ndarray[Any, np.dtype[np.uint8]]") -> Any:
        """Makes one bucket of bytes available and returns its handle."""
        ...

    async def receive(self, handles: list[Any], *, timeout_s: float) -> list[memoryview]:
        """Bytes of every bucket, in order. ManifestVoid when the process that sent one of them has died."""
        ...
