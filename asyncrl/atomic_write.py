"""Files that readers see whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by a file with `data`, through a temporary file beside it and a rename.

    Readers see the old bytes or the new ones. One writer a path: the temporary file's name is fixed, so that leftovers
    of a killed writer are overwritten by the next.
    """
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
