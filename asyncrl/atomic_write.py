"""Writes files atomically: a reader sees the complete old file or the complete new file."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces the file `path` by a file that contains `data`.

    Writes to a temporary file in the same directory and renames it. A path may have only one writer at a time. The name
    of the temporary file is fixed, so the next writer overwrites the leftover of a writer that was killed.
    """
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
