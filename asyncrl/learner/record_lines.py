"""Reads the records of a run that may still write them: `run.json`, `config.yaml` and the JSON lines files.

The run may be of another person: `asyncrl.run_files` says what is refused.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import FileRefused, RunError
from asyncrl.learner.records import DATA, DataRecord, RunInfo
from asyncrl.run_files import FILE_BYTES, RECORD_BYTES, UNREADABLE, opened, read

Line = TypeVar("Line", bound=msgspec.Struct)


class GrowingLines(Generic[Line]):
    """The records of a JSON lines file to which a run may still append. `inside` is the run's directory; default: the
    folder of the file."""

    def __init__(self, path: Path, kind: type[Line], *, inside: Path | None = None) -> None:
        self._path = path
        self._kind = kind
        self._inside = inside
        self._decoder = msgspec.json.Decoder(kind)
        self._read_bytes = 0
        self._records: list[Line] = []

    def read(self) -> Sequence[Line]:
        """Returns all records so far; none when the file does not exist. Reads only the lines that are new.

        Ignores a last line without a newline. Raises RunError with the line number when a line is not a record or has
        more than `RECORD_BYTES`, and RunError when the file cannot be opened or has more than `FILE_BYTES`.
        """
        try:
            file = opened(self._path, inside=self._inside)
        except FileNotFoundError:
            return self._records
        except FileRefused:
            raise
        except OSError as error:
            raise RunError(f"{self._path} cannot be read ({error}): check its permissions") from error
        with file:
            if (size := os.fstat(file.fileno()).st_size) > FILE_BYTES:
                raise FileRefused(
                    f"{self._path} has {size:,} bytes, and at most {FILE_BYTES:,} are read: it has the records of many "
                    "runs, or was not written by asyncrl"
                )
            file.seek(self._read_bytes)
            while (line := file.readline(RECORD_BYTES + 1)).endswith(b"\n"):
                self._records.append(self._decoded(line))
                self._read_bytes += len(line)
        if len(line) > RECORD_BYTES:
            raise self._unusable(f"has more than {RECORD_BYTES:,} bytes")
        return self._records

    def _decoded(self, line: bytes) -> Line:
        try:
            return self._decoder.decode(line)
        except UNREADABLE as error:
            raise self._unusable(f"is not a {self._kind.__name__}: {error}") from error

    def _unusable(self, problem: str) -> RunError:
        return RunError(
            f"{self._path}, line {len(self._records) + 1} {problem}. The file was edited or written by another version "
            "of asyncrl: repair or delete the line"
        )


def read_lines(path: Path, kind: type[Line], *, inside: Path | None = None) -> list[Line]:
    """Returns the records of a JSON lines file, as `GrowingLines.read` does."""
    return list(GrowingLines(path, kind, inside=inside).read())


def read_info(run_dir: Path) -> RunInfo:
    """Returns `run.json` of a run directory. Raises RunError if there is none, or if it cannot be read."""
    path = run_dir / "run.json"
    try:
        return msgspec.json.decode(read(path), type=RunInfo)
    except UNREADABLE as error:
        raise RunError(
            f"cannot read {path}: {error}. The run writes this file when it starts: check the directory, and that this "
            "version of asyncrl wrote it"
        ) from error


def saved_config(run_dir: Path) -> Path:
    """Returns the file with the configuration of a run. Raises RunError if `run_dir` has none, or if it is refused."""
    saved = run_dir / "config.yaml"
    try:
        opened(saved).close()
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{run_dir} is not the directory of a run: it has no config.yaml") from None
    except FileRefused:
        raise
    except OSError as error:
        raise RunError(f"{saved} cannot be read ({error}): check its permissions") from error
    return saved


def read_config(run_dir: Path) -> Config:
    """Returns the configuration of a run. Raises the errors of `saved_config`, and ConfigError for values that this
    version of asyncrl does not accept."""
    return load_config([saved_config(run_dir)], [])


def known_info(run_dir: Path) -> RunInfo | None:
    """Returns `run.json` of a run directory. None if it does not exist or disappears now, or if another version of
    asyncrl wrote it."""
    with contextlib.suppress(RunError):
        return read_info(run_dir)
    return None


def known_data(run_dir: Path) -> DataRecord | None:
    """Returns `data.json` of a run directory; None if the run did not write it."""
    try:
        return msgspec.json.decode(read(run_dir / DATA), type=DataRecord)
    except UNREADABLE:
        return None
