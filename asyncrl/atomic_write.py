"""Writes files atomically: a reader sees the complete old file or the complete new one, also after a machine crash."""

import contextlib
import fcntl
import glob
import os
import secrets
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces the file `path` by a file that contains `data`. Returns when the disk has the new file.

    Several processes may write the same path at once; the file of the last one stays. Each writes to a temporary file
    of its own in the same directory, and renames it. The function first removes the temporary files of writers that
    were killed.
    """
    _remove_leftovers(path)
    temporary, file = _temporary_file(path)
    with file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Returns when the disk has the contents of the file `path`, or the names of the entries of the folder `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_file(path: Path) -> tuple[Path, BinaryIO]:
    """Creates a temporary file beside `path` and locks it. Returns its path and the open file.

    The kernel releases the lock when the process ends in any way. So a temporary file without a lock is the leftover of
    a writer that was killed. On a file system without locks, leftovers stay.
    """
    while True:
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        file = temporary.open("xb")
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if temporary.exists():
            return temporary, file
        file.close()  # another writer has removed the file as a leftover before it was locked


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        # A live writer may hold the lock, or may have renamed the file meanwhile. Both cases raise an OSError, and the
        # file is then not a leftover.
        with contextlib.suppress(OSError), open(leftover, "rb", opener=_plain) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def _plain(path: str, flags: int) -> int:
    """Opens a file without following a link, and without waiting for the writer of a pipe: another program may have
    put a link or a pipe there."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
