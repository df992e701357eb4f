"""The weight store keeps the manifests of the newest two published versions, and the handles of their bytes.

Body and client of one detached Ray actor. The actor holds handles, never the bytes.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from asyncrl.common.version import Version
from asyncrl.data_plane.calls import finished, patiently, start
from asyncrl.errors import VersionConflict
from asyncrl.weights.manifest import Manifest, is_news
from asyncrl.weights.memberships import Memberships

P = ParamSpec("P")
Answer = TypeVar("Answer")

KEPT_VERSIONS = 2
"""Number of publications that are kept. Dropping an older one also drops the store's references to its bytes."""


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest, one transport handle for each bucket, and its serial number: the count of versions so far. `delivery`
    is the count of deliveries so far: the bytes of a version may be delivered again."""

    serial: int
    delivery: int
    manifest: Manifest
    handles: list[Any]


class WeightStore(Memberships):
    """The class of the weight-store actor, one for each run: the learner publishes to it, and replicas ask it."""

    def __init__(self) -> None:
        super().__init__()
        self._publications: list[Publication] = []
        self._serial = self._delivery = 0
        self._refused = 0
        """The number of the last delivery of which a replica got lost or damaged bytes; 0 before the first one."""

    async def publish(self, manifest: Manifest, handles: list[Any], again: bool = False) -> int:
        """Offers a version and returns its serial number. Ignores a repeated version, unless its bytes were delivered
        `again`: then the newest version has these handles.

        Raises VersionRegression for an older version, and VersionConflict for the newest version with other bytes.
        """
        newest = self._publications[-1] if self._publications else None
        if newest is not None and not is_news(manifest.version, newest.manifest.version):
            if _content(manifest) != _content(newest.manifest):
                raise VersionConflict(
                    f"version {manifest.version} was published before with other bytes (checksums "
                    f"{_checksums(newest.manifest)}, now {_checksums(manifest)}); two learners use one version. This "
                    "is a bug of asyncrl: report it with the run's directory"
                )
            if not again:
                return newest.serial
        async with self._changed:
            if again and newest is not None:
                self._publications.remove(newest)
            else:
                self._serial += 1
            self._delivery += 1
            self._publications.append(
                Publication(serial=self._serial, delivery=self._delivery, manifest=manifest, handles=handles)
            )
            del self._publications[:-KEPT_VERSIONS]
            self._offers({publication.manifest.version for publication in self._publications})
            self._changed.notify_all()
        return self._serial

    async def newer_than(
        self, version: Version | None, timeout_s: float, besides: Version | None = None
    ) -> Publication | None:
        """Waits for a publication newer than `version` and returns the newest one; None after `timeout_s`. `besides` is
        a version that the replica could not load: it is returned only if no other publication is newer."""

        def newest() -> Publication | None:
            newer = [each for each in self._publications if version is None or each.manifest.version > version]
            others = [each for each in newer if each.manifest.version != besides]
            return next(reversed(others or newer), None)

        async with self._changed:
            await self._reached(lambda: newest() is not None, timeout_s)
            return newest()

    async def refuse(self, delivery: int) -> None:
        """Asks the learner to deliver the newest version again, because a replica got lost or damaged bytes from this
        delivery. Does nothing if there is a newer delivery."""
        async with self._changed:
            if self._publications and delivery == self._publications[-1].delivery:
                self._refused = delivery
                self._changed.notify_all()

    async def refused(self, after: int, timeout_s: float) -> int | None:
        """Waits until a delivery after the one with the number `after` is refused, and returns its number; None after
        `timeout_s`."""
        async with self._changed:
            return self._refused if await self._reached(lambda: self._refused > after, timeout_s) else None


def _content(manifest: Manifest) -> tuple[Any, ...]:
    """Returns the parts of a manifest that must be equal in two manifests of one version: the tensors, and pieces and
    checksum of each bucket. The links by which the bytes travel may differ."""
    return manifest.tensors, [(bucket.pieces, bucket.checksum) for bucket in manifest.buckets]


def _checksums(manifest: Manifest) -> str:
    return ", ".join(bucket.checksum for bucket in manifest.buckets[:3]) or "none"


class WeightClient:
    """Calls the weight store. A call is late after `timeout_s` seconds, and is repeated for `patience_s` seconds."""

    def __init__(self, handle: Any, *, timeout_s: float, patience_s: float = 0.0) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._patience_s = patience_s

    async def publish(self, manifest: Manifest, handles: list[Any], *, again: bool = False) -> int:
        return await self._call("publishing weights", 0.0, WeightStore.publish, manifest, handles, again)

    async def newer_than(
        self, version: Version | None, *, wait_s: float, besides: Version | None = None
    ) -> Publication | None:
        return await self._call("asking for newer weights", wait_s, WeightStore.newer_than, version, wait_s, besides)

    async def refuse(self, delivery: int) -> None:
        await self._call("asking for weights again", 0.0, WeightStore.refuse, delivery)

    async def refused(self, after: int, *, wait_s: float) -> int | None:
        return await self._call("waiting for refused weights", wait_s, WeightStore.refused, after, wait_s)

    async def _call(
        self,
        what: str,
        wait_s: float,
        method: Callable[Concatenate[WeightStore, P], Awaitable[Answer]],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> Answer:
        """Calls a method of the store's actor. `wait_s` is how long the method itself may wait before it answers."""
        limit_s = self._timeout_s + wait_s
        answer: Answer = await patiently(
            lambda: finished(start(self._handle, method, *arguments, **options), timeout_s=limit_s, what=what),
            patience_s=self._patience_s,
        )
        return answer
