"""A checkpoint's directory, which readers see whole or not at all: its last file, `COMPLETE`, names what is in it.

    prepare(path)                       # an empty `unfinished(path)` to write in
    finish(path, save_id="…")           # that is whole now
    publish(path)                       # and has the place of what was at `path`
    discard(path)                       # when nobody needs it any more

What must hold: killed at any point, `complete(path)` still finds the last directory that was published, if there ever
was one and it was not discarded; and what is at `path` is whole.
"""

import os
import shutil
from pathlib import Path

import msgspec

from asyncrl.atomic_write import write_atomically
from asyncrl.errors import CheckpointError, CheckpointIncomplete

COMPLETE = "COMPLETE"
"""The file that is written last."""


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """`COMPLETE`: bytes by file, and an id that the directories of one save share."""

    save_id: str
    files: dict[str, int]


def unfinished(path: Path) -> Path:
    """Where the directory that will be at `path` is written."""
    return path.with_name(path.name + ".tmp")


def _replaced(path: Path) -> Path:
    """Where the complete checkpoint at `path` stays while another takes its place."""
    return path.with_name(path.name + ".replaced")


def prepare(path: Path) -> None:
    """An empty directory to write in, without what a killed save left; nothing that is no checkpoint is deleted."""
    if path.exists() and not (path / COMPLETE).exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is no checkpoint: it has no {COMPLETE}; name another path")
    shutil.rmtree(unfinished(path), ignore_errors=True)
    unfinished(path).mkdir(parents=True)


def finish(path: Path, *, save_id: str) -> None:
    """What is in `unfinished(path)` is all of it. It is on the disk first: a machine that dies keeps it too."""
    marker = Marker(save_id=save_id, files=sizes(unfinished(path)))
    for name in marker.files:
        with (unfinished(path) / name).open("rb") as file:
            os.fsync(file.fileno())
    write_atomically(unfinished(path) / COMPLETE, msgspec.json.encode(marker))


def publish(path: Path) -> None:
    """At each point a complete checkpoint is at `path` or at `_replaced(path)`, if there ever was one."""
    if (path / COMPLETE).exists():
        shutil.rmtree(_replaced(path), ignore_errors=True)
        path.rename(_replaced(path))
    unfinished(path).rename(path)
    shutil.rmtree(_replaced(path), ignore_errors=True)


def discard(path: Path) -> None:
    """Removes the directory at `path`, which is not there any more before its first file is gone."""
    shutil.rmtree(unfinished(path), ignore_errors=True)
    path.rename(unfinished(path))
    shutil.rmtree(unfinished(path))


def complete(path: Path) -> tuple[Path, Marker]:
    """The directory of the complete checkpoint at `path`: that, or the one that was being replaced when a save died.

    CheckpointIncomplete when it has no `COMPLETE`, or not the files that it speaks of.
    """
    if not (path / COMPLETE).exists() and (_replaced(path) / COMPLETE).exists():
        path = _replaced(path)
    try:
        marker = msgspec.json.decode((path / COMPLETE).read_bytes(), type=Marker)
    except FileNotFoundError:
        raise CheckpointIncomplete(
            f"{path} is no complete checkpoint: it has no {COMPLETE}, so its save did not end; load an earlier one"
        ) from None
    except msgspec.DecodeError as error:
        raise CheckpointIncomplete(f"{path / COMPLETE} cannot be read ({error}); load an earlier checkpoint") from error
    found = sizes(path)
    for name, nbytes in marker.files.items():
        if found.get(name) != nbytes:
            raise CheckpointIncomplete(
                f"{path / name} has {found.get(name, 'no')} bytes, {COMPLETE} says {nbytes}; load an earlier checkpoint"
            )
    return path, marker


def sizes(path: Path) -> dict[str, int]:
    """Bytes by file, in all folders below `path`."""
    return {str(file.relative_to(path)): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()}
