"""Bytes in an anonymous file. Every process of the same node and user can open it by its path.

Unlike a file in /dev/shm, it disappears when the last process that has it open ends, even when that one is killed.
"""

import fcntl
import mmap
import os
import weakref

import numpy as np

from asyncrl.weights.manifest import Bytes

NOTHING: Bytes = np.empty(0, dtype=np.uint8)


class MemoryFile:
    """A file of `nbytes` bytes with the descriptor `fd`, which this process may write in place: `data`. Other processes
    map it by its `path`, which is valid until `close`, or until this object is freed. Mappings stay readable
    afterwards.

    `of` is the path of a memory file of another process: then this object has the same memory, and keeps it alive after
    that process has ended.

    Raises OSError if there is no memory for a new file. If there is nothing at `of`, or a smaller file, raises OSError
    or ValueError.
    """

    def __init__(self, nbytes: int, *, of: str | None = None) -> None:
        self.fd = os.memfd_create("asyncrl-weights") if of is None else _opened(of)
        self._closed = weakref.finalize(self, os.close, self.fd)
        try:
            if of is None and nbytes:
                # otherwise a lack of memory would show as a SIGBUS at the first write
                os.posix_fallocate(self.fd, 0, nbytes)
            self.data = np.frombuffer(mmap.mmap(self.fd, nbytes), dtype=np.uint8) if nbytes else NOTHING
        except (OSError, ValueError):
            self._closed()
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Frees the memory, unless a part of `data` or another process still uses it."""
        self.data = NOTHING  # drops the mapping, for which Python's mmap keeps a descriptor of its own
        self._closed()


def try_lock(fd: int, *, alone: bool) -> bool:
    """Locks an open file without waiting: for this descriptor alone, or together with others. The lock replaces an
    earlier one of the descriptor.

    Returns False if locks of other descriptors prevent it; the descriptor may then have lost its earlier lock. The
    kernel unlocks the file when the process ends."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _opened(path: str) -> int:
    # By now, the path /proc/<pid>/fd/<n> may lead to another file. If this is a terminal, it must not become the
    # controlling terminal of this process (O_NOCTTY). If it is a pipe, opening must not wait (O_NONBLOCK).
    return os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
