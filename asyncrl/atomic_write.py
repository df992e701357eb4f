"""Writes files atomically: a reader sees the complete old file or the complete new one, also after a machine crash."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces the file `path` by a file that contains `data`.

    Writes to a temporary file in the same directory and renames it. A path may have only one writer at a time. The name
    of the temporary file is fixed, so the next writer overwrites the leftover of a writer that was killed. It returns
    when the disk has the new file.
    """
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Returns when the disk has the contents of the file `path`, or the names of the entries of the folder `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
