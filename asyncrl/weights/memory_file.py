"""Bytes in an anonymous file. Every process of the same node and user can open it by its path.

Unlike a file in /dev/shm, it disappears when its owner ends, even when the owner is killed.
"""

import mmap
import os
import weakref

import numpy as np

from asyncrl.weights.manifest import Bytes

NOTHING: Bytes = np.empty(0, dtype=np.uint8)


class MemoryFile:
    """A file of `nbytes` bytes, which this process may write in place: `data`. Other processes map it by its `path`,
    which is valid until `close`, or until this object is freed. Mappings stay readable afterwards.

    Raises OSError if there is no memory for it.
    """

    def __init__(self, nbytes: int) -> None:
        self._fd = os.memfd_create("asyncrl-weights")
        self._closed = weakref.finalize(self, os.close, self._fd)
        try:
            if nbytes:
                # otherwise a lack of memory would show as a SIGBUS at the first write
                os.posix_fallocate(self._fd, 0, nbytes)
            self.data = np.frombuffer(mmap.mmap(self._fd, nbytes), dtype=np.uint8) if nbytes else NOTHING
        except OSError:
            self._closed()
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Frees the memory, unless a part of `data` is still in use."""
        self.data = NOTHING  # a mapping of Python has a descriptor of its own
        self._closed()
