"""The staged weights of a replica: a version's flat buffer, complete and verified before the engine pauses.

The engine's workers map the buffer by its path, so all of them use the same bytes. The memory is used again for the
next version of the same size.
"""

from asyncrl.errors import FetchFailed
from asyncrl.weights.manifest import Bytes, Manifest, put_bucket
from asyncrl.weights.memory_file import MemoryFile


class StagedWeights:
    """Memory for the flat buffer of one version at a time. Call `begin` first, and `put` for each `missing` bucket."""

    def __init__(self) -> None:
        self._file: MemoryFile | None = None
        self._manifest: Manifest | None = None
        self._verified: set[int] = set()

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
    def missing(self) -> list[int]:
        """The buckets that are not verified in the buffer yet."""
        assert self._manifest is not None, "call begin() first"
        return [index for index in range(len(self._manifest.buckets)) if index not in self._verified]

    def begin(self, manifest: Manifest) -> None:
        """Provides memory for a version. What an earlier attempt has staged of the same version stays. Raises
        FetchFailed if there is no memory."""
        if manifest != self._manifest:
            self._manifest, self._verified = manifest, set()
        if self._file is not None and self._file.data.nbytes == manifest.flat_bytes:
            return
        self.close()
        self._verified.clear()
        try:
            self._file = MemoryFile(manifest.flat_bytes)
        except OSError as error:
            raise FetchFailed(
                f"there is no memory for the {manifest.flat_bytes / 2**20:.0f} MiB of weights {manifest.version} "
                f"({error}); a replica needs this much besides its engine"
            ) from error

    def put(self, index: int, data: Bytes) -> None:
        """Puts the bytes of bucket `index` into their places, and verifies them there. Raises WeightsDamaged."""
        assert self._manifest is not None, "call begin() first"
        put_bucket(self._manifest, index, data, flat=self.flat)
        self._verified.add(index)

    def close(self) -> None:
        """Frees the memory. It may be called again."""
        if self._file is not None:
            self._file.close()
            self._file = None
