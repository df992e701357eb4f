"""Reads the records of a run that may still write them: `run.json`, and the JSON lines files."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from asyncrl.errors import RunError
from asyncrl.learner.records import RunInfo

Line = TypeVar("Line", bound=msgspec.Struct)


class GrowingLines(Generic[Line]):
    """The records of a JSON lines file to which a run may still append."""

    def __init__(self, path: Path, kind: type[Line]) -> None:
        self._path = path
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._read_bytes = 0
        self._records: list[Line] = []

    def read(self) -> Sequence[Line]:
        """Returns all records so far; none when the file does not exist. Reads only the lines that are new.

        Ignores a last line without a newline. Raises RunError with the line number when a line is not a record.
        """
        if not self._path.exists():
            return self._records
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            complete, newline, _ = file.read().rpartition(b"\n")
        for line in complete.splitlines():
            try:
                self._records.append(self._decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise RunError(
                    f"{self._path}, line {len(self._records) + 1} is not a {self._kind.__name__}: {error}. The file "
                    "was edited or written by another version of asyncrl: repair or delete the line"
                ) from error
        self._read_bytes += len(complete) + len(newline)
        return self._records


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """Returns the records of a JSON lines file, as `GrowingLines.read` does."""
    return list(GrowingLines(path, kind).read())


def read_info(run_dir: Path) -> RunInfo:
    """Returns `run.json` of a run directory. Raises RunError if there is none, or if it cannot be read."""
    path = run_dir / "run.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(
            f"cannot read {path}: {error}. The run writes this file when it starts: check the directory, and that this "
            "version of asyncrl wrote it"
        ) from error


def known_info(run_dir: Path) -> RunInfo | None:
    """Returns `run.json` of a run directory. None if it does not exist or disappears now, or if another version of
    asyncrl wrote it."""
    with contextlib.suppress(RunError):
        return read_info(run_dir)
    return None
