"""Bytes as an anonymous file that processes of the same node and user, Ray's or not, open by path.

Unlike a file in /dev/shm it dies with its owner, however that ends.
"""

import os


class MemoryFile:
    """`parts`, one after the other; `path` is good until `close`, and what is mapped by then stays readable."""

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
