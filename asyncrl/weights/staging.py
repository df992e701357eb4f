"""The staged weights of a replica: a version's flat buffer, complete and verified before the engine pauses.

The engine's workers map the buffer by its path, so all of them use the same bytes. The memory is used again for the
next version of the same size.
"""

from asyncrl.weights.manifest import Bytes, Manifest
from asyncrl.weights.memory_file import MemoryFile


class StagedWeights:
    """Memory for the flat buffer of one version at a time. Call `begin` first."""

    def __init__(self) -> None:
        self._file: MemoryFile | None = None

    @property
    def path(self) -> str:
        """The path by which every process of this node maps the flat buffer."""
        assert self._file is not None, "call begin() first"
        return self._file.path

    @property
    def flat(self) -> Bytes:
        """The flat buffer, to write to."""
        assert self._file is not None, "call begin() first"
        return self._file.data

    def begin(self, manifest: Manifest) -> None:
        """Provides memory for a version. The bytes of the version before are lost."""
        if self._file is None or self._file.data.nbytes != manifest.flat_bytes:
            self.close()
            self._file = MemoryFile(manifest.flat_bytes)

    def close(self) -> None:
        """Frees the memory. It may be called again."""
        if self._file is not None:
            self._file.close()
            self._file = None
