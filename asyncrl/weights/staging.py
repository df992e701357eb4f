"""The staged weights of a replica: a version's flat buffer, complete and verified before the engine pauses.

The engine's workers map the buffer by its path, so all of them use the same bytes. The memory is used again for the
next version of the same size.
"""

from typing import NamedTuple

import numpy as np

from asyncrl.errors import FetchFailed, WeightsDamaged
from asyncrl.weights.delta import decode
from asyncrl.weights.manifest import Bytes, Link, Manifest, Piece, put_bucket
from asyncrl.weights.memory_file import MemoryFile


class Part(NamedTuple):
    """Bytes that a replica lacks: a whole bucket, or one link of it."""

    bucket: int
    link: int | None


class StagedWeights:
    """Memory for the flat buffer of one version at a time. Call `begin` first, and `put` for each `missing` part, in
    order."""

    def __init__(self) -> None:
        self._file: MemoryFile | None = None
        self._manifest: Manifest | None = None
        self._held: dict[tuple[Piece, ...], str] = {}
        """The checksum of the verified bytes that stand in the places of a bucket."""

    @property
    def path(self) -> str:
        """The path by which every process of this node maps the flat buffer."""
        assert self._file is not None, "call begin() first"
        return self._file.path

    @property
    def flat(self) -> Bytes:
        """The flat buffer."""
        assert self._file is not None, "call begin() first"
        return self._file.data

    @property
    def missing(self) -> list[Part]:
        """What is not verified in the buffer yet."""
        assert self._manifest is not None, "call begin() first"
        parts = []
        for index, bucket in enumerate(self._manifest.buckets):
            held = self._held.get(bucket.pieces)
            if held == bucket.checksum:
                continue
            if not bucket.links:
                parts.append(Part(index, None))
                continue
            known = [number for number, link in enumerate(bucket.links) if link.checksum == held]
            first = known[-1] + 1 if known else 0
            parts += [Part(index, number) for number in range(first, len(bucket.links))]
        return parts

    def begin(self, manifest: Manifest) -> None:
        """Provides memory for a version. What an earlier attempt has staged of the same version stays, and so do bytes
        to which the version's deltas can be applied. Raises FetchFailed if there is no memory."""
        if manifest != self._manifest:
            linked = {bucket.pieces for bucket in manifest.buckets if bucket.links}
            self._held = {pieces: checksum for pieces, checksum in self._held.items() if pieces in linked}
        self._manifest = manifest
        if self._file is not None and self._file.data.nbytes == manifest.flat_bytes:
            return
        self.close()
        self._held.clear()
        try:
            self._file = MemoryFile(manifest.flat_bytes)
        except OSError as error:
            raise FetchFailed(
                f"there is no memory for the {manifest.flat_bytes / 2**20:.0f} MiB of weights {manifest.version} "
                f"({error}); a replica needs this much besides its engine"
            ) from error

    def put(self, part: Part, data: Bytes) -> None:
        """Puts the bytes of a bucket into their places, or changes those that stand there by a delta, and verifies them
        there. Raises WeightsDamaged. Then nothing of the bucket is verified any more."""
        assert self._manifest is not None, "call begin() first"
        bucket = self._manifest.buckets[part.bucket]
        link = None if part.link is None else bucket.links[part.link]
        self._held.pop(bucket.pieces, None)
        if link is not None and link.delta:
            data = self._changed(bucket.pieces, data, link)
        put_bucket(self._manifest, part.bucket, data, flat=self.flat, link=link)
        self._held[bucket.pieces] = bucket.checksum if link is None else link.checksum

    def _changed(self, pieces: tuple[Piece, ...], delta: Bytes, link: Link) -> Bytes:
        before = np.concatenate([self.flat[piece.offset : piece.offset + piece.nbytes] for piece in pieces])
        try:
            return decode(before, delta)
        except ValueError as error:
            raise WeightsDamaged(
                f"the delta to weights {link.version} is damaged: {error}; the replica fetches the whole bucket again"
            ) from error

    def close(self) -> None:
        """Frees the memory. It may be called again."""
        if self._file is not None:
            self._file.close()
            self._file = None
