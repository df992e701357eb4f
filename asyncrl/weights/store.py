"""The weight store keeps the manifests of the newest two published versions, and the handles of their bytes.

Body and client of one detached Ray actor. The actor holds handles, never the bytes.
"""

from typing import Any

import msgspec

from asyncrl.common.version import Version
from asyncrl.data_plane.calls import finished, patiently
from asyncrl.errors import VersionConflict
from asyncrl.weights.manifest import Manifest, is_news
from asyncrl.weights.memberships import Memberships

KEPT_VERSIONS = 2
"""Publications that are kept. Dropping an older one also drops the store's references to its bytes."""


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest, one transport handle for each bucket, and its serial number: the count of publications so far."""

    serial: int
    manifest: Manifest
    handles: list[Any]


class WeightStore(Memberships):
    """Body of the weight-store actor."""

    def __init__(self) -> None:
        super().__init__()
        self._publications: list[Publication] = []
        self._serial = 0

    async def publish(self, manifest: Manifest, handles: list[Any]) -> int:
        """Offers a version and returns its serial number. Ignores a repeated version.

        Raises VersionRegression for an older version, and VersionConflict for the newest version with other bytes.
        """
        newest = self._publications[-1] if self._publications else None
        if newest is not None and not is_news(manifest.version, newest.manifest.version):
            if (manifest.tensors, manifest.buckets) != (newest.manifest.tensors, newest.manifest.buckets):
                raise VersionConflict(
                    f"version {manifest.version} was published before with other bytes (checksums "
                    f"{_checksums(newest.manifest)}, now {_checksums(manifest)}); two learners use one version. This "
                    "is a bug of asyncrl: report it with the run's directory"
                )
            return newest.serial
        async with self._changed:
            self._serial += 1
            self._publications.append(Publication(serial=self._serial, manifest=manifest, handles=handles))
            del self._publications[:-KEPT_VERSIONS]
            self._offers({publication.manifest.version for publication in self._publications})
            self._changed.notify_all()
        return self._serial

    async def newer_than(
        self, version: Version | None, timeout_s: float, besides: Version | None = None
    ) -> Publication | None:
        """Waits for a publication newer than `version` and returns the newest one; None after `timeout_s`. If there is
        another one that is newer, `besides` is left out: a replica could not load it."""

        def newest() -> Publication | None:
            newer = [each for each in self._publications if version is None or each.manifest.version > version]
            others = [each for each in newer if each.manifest.version != besides]
            return next(reversed(others or newer), None)

        async with self._changed:
            await self._reached(lambda: newest() is not None, timeout_s)
            return newest()


def _checksums(manifest: Manifest) -> str:
    return ", ".join(bucket.checksum for bucket in manifest.buckets[:3]) or "none"


class WeightClient:
    """Calls the weight store. A call is late after `timeout_s` seconds, and is repeated for `patience_s` seconds."""

    def __init__(self, handle: Any, *, timeout_s: float, patience_s: float = 0.0) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._patience_s = patience_s

    async def publish(self, manifest: Manifest, handles: list[Any]) -> int:
        async def once() -> int:
            serial: int = await finished(
                self._handle.publish.remote(manifest, handles), timeout_s=self._timeout_s, what="publishing weights"
            )
            return serial

        return await patiently(once, patience_s=self._patience_s)

    async def newer_than(
        self, version: Version | None, *, wait_s: float, besides: Version | None = None
    ) -> Publication | None:
        async def once() -> Publication | None:
            publication: Publication | None = await finished(
                self._handle.newer_than.remote(version, wait_s, besides),
                timeout_s=self._timeout_s + wait_s,
                what="asking for newer weights",
            )
            return publication

        return await patiently(once, patience_s=self._patience_s)
