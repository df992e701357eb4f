"""Weights through Ray's object store: put once by the ranks, fetched once by each node, read in place."""

import asyncio
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from asyncrl.errors import ManifestVoid, WeightError


class ObjectStoreTransport:
    """Implements `Transport`; a bucket lives as long as the rank that put it."""

    def send(self, bucket: "np.ndarray[Any, np.dtype[np.uint8]]") -> Any:
        return ray.put(bucket)

    async def receive(self, handles: list[Any], *, timeout_s: float) -> list[memoryview]:
        try:
            buckets = await asyncio.to_thread(ray.get, handles, timeout=timeout_s)
        except ObjectLostError as error:  # OwnerDiedError is one
            raise ManifestVoid(f"the process that published these weights is gone: {error}") from error
        except GetTimeoutError as error:
            raise WeightError(f"fetching weights took longer than weights.load_timeout_s = {timeout_s:g} s") from error
        return [memoryview(bucket) for bucket in buckets]
