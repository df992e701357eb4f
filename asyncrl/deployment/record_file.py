"""A file that a run appends its records to, and that loses no record when the disk is full for a while (F27)."""

import logging
import os
import threading
from pathlib import Path

from asyncrl.atomic_write import sync
from asyncrl.run_files import opened_to_append

logger = logging.getLogger(__name__)


class RecordFile:
    """Appends records to the file `path`, which `append` creates.

    Records that cannot be written wait in memory, in order, until the file can be written again. Training goes on
    meanwhile. All methods may be called in any thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = b""
        self._failing = False
        self._writing = threading.Lock()

    def append(self, record: bytes) -> None:
        """Writes the waiting records and `record`. Logs the first failure of a row of failures."""
        with self._writing:
            self._waiting += record
            try:
                self._write()
            except OSError as error:
                if not self._failing:
                    logger.error(
                        "cannot write %s (%s); its records wait in memory until the file can be written again",
                        self._path,
                        error,
                    )
                self._failing = True

    def sync(self) -> None:
        """Returns when all records so far are on the disk, so that they survive a crash of the machine. Raises OSError
        if they cannot be written."""
        with self._writing:
            self._write()
            if self._path.exists():
                sync(self._path)
                sync(self._path.parent)

    def close(self) -> None:
        """Writes the records that wait. Logs that they are lost if they cannot be written."""
        with self._writing:
            try:
                self._write()
            except OSError as error:
                logger.error("the last records of %s are lost, because they cannot be written: %s", self._path, error)

    def _write(self) -> None:
        if self._waiting:
            append_whole(self._path, self._waiting)
            self._waiting, self._failing = b"", False


def append_whole(path: Path, data: bytes) -> None:
    """Appends all of `data` or nothing, because a partial record would corrupt the next one. Raises OSError if it
    cannot be written."""
    with opened_to_append(path, buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) != len(data):
                raise OSError("only a part was written: the disk is full")
        except OSError:
            file.truncate(size)
            raise
