"""Writes the directory of a checkpoint or of an export atomically. The file `COMPLETE` is written last and lists all
other files.

    prepare(path)                       # creates an empty `unfinished(path)` to write in
    finish(path, save_id="…")           # marks it as complete
    publish(path)                       # moves it to `path`, in place of the old directory
    discard(path)                       # removes the directory at `path`

Invariants: a directory at `path` is complete. If the process is killed at any point, `complete(path)` still finds the
last directory that was published and not discarded, if there is one.
"""

import shutil
from pathlib import Path

import msgspec

from asyncrl.atomic_write import sync, write_atomically
from asyncrl.errors import CheckpointDamaged, CheckpointError, CheckpointIncomplete, FileRefused
from asyncrl.run_files import UNREADABLE, read, sizes_below

COMPLETE = "COMPLETE"
"""Name of the file that is written last."""


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `COMPLETE`: the size of each file in bytes, and an id that all directories of one save share."""

    save_id: str
    files: dict[str, int]


def unfinished(path: Path) -> Path:
    """Returns the path at which the directory is written that `publish` moves to `path`."""
    return path.with_name(path.name + ".tmp")


def _replaced(path: Path) -> Path:
    """Returns the path to which the old checkpoint at `path` is moved while `publish` replaces it."""
    return path.with_name(path.name + ".replaced")


def published(path: Path) -> Path:
    """Returns the directory that was last published for `path`. It is `_replaced(path)` if a save was killed while it
    replaced that directory, else `path`, which need not exist."""
    return _replaced(path) if not (path / COMPLETE).exists() and (_replaced(path) / COMPLETE).exists() else path


def prepare(path: Path) -> None:
    """Creates the empty directory `unfinished(path)` to write in, and removes the leftover of a killed save there.
    Raises CheckpointError if `path` exists and is neither a directory with `COMPLETE` nor an empty one: `publish` must
    not replace anything else."""
    if path.exists() and not (path / COMPLETE).exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists, but it is not a checkpoint, because it has no file {COMPLETE}; name another path"
        )
    shutil.rmtree(unfinished(path), ignore_errors=True)
    unfinished(path).mkdir(parents=True)


def finish(path: Path, *, save_id: str) -> None:
    """Marks `unfinished(path)` as complete. Before it writes the mark, waits until the disk has all files and their
    names, so that a marked directory is complete also after a crash of the machine."""
    marker = Marker(save_id=save_id, files=sizes_below(unfinished(path)))
    for entry in (unfinished(path), *unfinished(path).rglob("*")):
        sync(entry)
    write_atomically(unfinished(path) / COMPLETE, msgspec.json.encode(marker))


def publish(path: Path) -> None:
    """Moves the finished directory to `path`, and returns when the disk has it there. If there was a checkpoint at
    `path` before, there is a complete one at `path` or at `_replaced(path)` at each moment."""
    if (path / COMPLETE).exists():
        shutil.rmtree(_replaced(path), ignore_errors=True)
        path.rename(_replaced(path))
    unfinished(path).rename(path)
    sync(path.parent)
    shutil.rmtree(_replaced(path), ignore_errors=True)


def discard(path: Path) -> None:
    """Removes the directory at `path`. It is renamed before the first file is deleted, so `path` is never
    incomplete."""
    shutil.rmtree(unfinished(path), ignore_errors=True)
    path.rename(unfinished(path))
    shutil.rmtree(unfinished(path))


def put_back(path: Path) -> None:
    """Moves the old directory from `_replaced(path)` back to `path`, if a save was killed while it replaced that
    directory. No other process may save to `path` at the same time."""
    if published(path) != path:
        published(path).rename(path)


def complete(path: Path) -> tuple[Path, Marker]:
    """Returns the directory of the complete checkpoint for `path`, and its marker. It is `path` itself, or the
    directory that was being replaced when a save was killed.

    Raises CheckpointIncomplete if the directory has no `COMPLETE`, and CheckpointDamaged if `COMPLETE` cannot be read,
    if a file that it lists is missing or has another size, or if an entry is not a regular file or a folder. Files that
    it does not list are ignored.
    """
    path = published(path)
    try:
        marker = msgspec.json.decode(read(path / COMPLETE), type=Marker)
    except FileNotFoundError:
        raise CheckpointIncomplete(
            f"{path} is not a complete checkpoint: it has no file {COMPLETE}, so its save did not finish; load an "
            "earlier checkpoint"
        ) from None
    except UNREADABLE as error:
        raise CheckpointDamaged(f"{path / COMPLETE} cannot be read ({error}); load an earlier checkpoint") from error
    try:
        found = sizes_below(path)
    except FileRefused as error:
        raise CheckpointDamaged(f"{error}; or load an earlier checkpoint") from error
    for name, nbytes in marker.files.items():
        if found.get(name) != nbytes:
            raise CheckpointDamaged(
                f"{path}: {name!a} has {found.get(name, 'no')} bytes, but {COMPLETE} lists {nbytes}; load an earlier "
                "checkpoint"
            )
    return path, marker
