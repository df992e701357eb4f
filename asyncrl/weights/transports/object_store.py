"""Sends weights through Ray's object store: each rank puts its buckets once, and each node fetches them once."""

import asyncio
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError

from asyncrl.errors import FetchFailed, ManifestVoid
from asyncrl.weights.manifest import Bytes
from asyncrl.weights.transports.interfaces import Shipment, StoresBytes


class ObjectStoreTransport(StoresBytes):
    """The handle of a bucket is a reference to its bytes in Ray's object store. They are lost when the rank that put
    them ends."""

    def send(self, sent: Shipment) -> list[Any]:
        return [ray.put(part) for part in sent.parts]

    async def receive(self, handle: Any, *, timeout_s: float) -> Bytes:
        try:
            bucket: Bytes = await asyncio.to_thread(ray.get, handle, timeout=timeout_s)
        # ObjectLostError has the subclass OwnerDiedError, which Ray raises if the rank has died. Ray may raise
        # RayActorError instead if the rank died before the bytes were complete.
        except (ObjectLostError, RayActorError) as error:
            raise ManifestVoid(
                f"the process that published these weights has ended, so their bytes are lost: {error}"
            ) from error
        except GetTimeoutError as error:
            raise FetchFailed(
                "fetching weights took longer than weights.load_timeout_s; raise it if the network needs more time"
            ) from error
        return bucket
