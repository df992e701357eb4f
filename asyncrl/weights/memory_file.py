"""Bytes in an anonymous file. Every process of the same node and user can open it by its path.

Unlike a file in /dev/shm, it disappears when its owner ends, even when the owner is killed.
"""

import os


class MemoryFile:
    """A file with `parts` one after the other. `path` is valid until `close`; mappings made before stay readable."""

    def __init__(self, *parts: memoryview) -> None:
        self._fd = os.memfd_create("asyncrl-weights")
        try:
            for part in parts:
                written = 0
                while written < part.nbytes:
                    written += os.write(self._fd, part[written:])
        except OSError:
            os.close(self._fd)
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()
