"""Takes the directory of a run for this process: locks it, and moves the directory of an earlier run aside.

The kernel releases the lock (flock) when the process dies, so a dead holder needs no cleanup.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from asyncrl.atomic_write import sync
from asyncrl.deployment.resuming import SAMPLES, Resumed
from asyncrl.errors import RunLocked
from asyncrl.learner.audit_records import AUDIT
from asyncrl.learner.records import RunInfo
from asyncrl.run_files import check_plain, opened_to_append

OF_EVERY_START = {
    "config.yaml",
    "run.json",
    "lock",
    "logs",
    "metrics",
    SAMPLES,
    "failures.json",
    "data.json",
    "report.html",
    AUDIT,
}
"""Entries that every start creates. A directory with only these entries has no records of a run."""


OF_TRACKERS = ("wandb",)
"""Folders of experiment trackers that make links there themselves."""


class Taken(NamedTuple):
    """The lock on a run's directory, the new path of an ended run's directory if it was moved, and the checkpoint of
    an ended run that continues."""

    lock: BinaryIO
    previous: Path | None
    resumed: Resumed | None


def take(path: Path, info: RunInfo, *, checkpoint: Callable[[], Resumed | None]) -> Taken:
    """Locks `path`. If an ended run has records there and is not resumed, first moves its directory aside. `checkpoint`
    returns the checkpoint from which the run there is resumed; None if it is not.

    Raises RunLocked if the run in `path` is alive, and FileRefused if `path` has a link or a pipe,
    through which the run would write.
    """
    previous: Path | None = None
    while True:
        path.mkdir(parents=True, exist_ok=True)
        lock = opened_to_append(path / "lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().decode(errors="replace").strip() or "a process that has not written its pid yet"
            lock.close()
            raise RunLocked(
                f"run.name: {path} is in use by {holder}; wait until that run ends, end it, or choose another run.name"
            ) from None
        # Another process may have moved the directory aside between our open and our flock. Our lock is then on a file
        # in the moved directory and does not protect `path`, so try again.
        try:
            current = os.path.samestat(os.fstat(lock.fileno()), (path / "lock").stat())
        except FileNotFoundError:
            current = False
        if not current:
            lock.close()
            continue
        try:
            records = (path / "run.json").exists() and _has_records(path)
            resumed = checkpoint() if records else None
            if resumed is not None or not records:
                check_plain(path, except_for=OF_TRACKERS)
        except BaseException:
            lock.close()  # otherwise the traceback would hold the lock, e.g. in a notebook
            raise
        if records and resumed is None:
            previous = path.rename(_free_name(path))
            lock.close()
        else:
            lock.truncate(0)
            lock.write(f"pid {info.pid} on {info.host} since {info.started}\n".encode())
            lock.flush()
            sync(path.parent)  # the directory's own name
            return Taken(lock, previous, resumed)


def _has_records(path: Path) -> bool:
    entries = [entry.name for entry in path.iterdir() if entry.suffix != ".tmp"]  # of a writer that was killed
    return not OF_EVERY_START.issuperset(entries) or any((path / SAMPLES).glob("*"))


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside
