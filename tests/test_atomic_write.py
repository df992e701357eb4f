"""A file is written whole by any number of writers, and a writer that fails or is killed leaves nothing for long."""

import fcntl
import os
import signal
from pathlib import Path
from typing import BinaryIO

import pytest

from asyncrl import atomic_write
from asyncrl.atomic_write import write_atomically

KILLED = -signal.SIGKILL


def killed_while_writing(path: Path, data: bytes) -> None:
    """Writes `path` in a child process that ends right before it renames its temporary file."""
    child = os.fork()
    if child == 0:
        Path.replace = lambda *_: signal.raise_signal(signal.SIGKILL)  # type: ignore[assignment, method-assign]
        try:
            write_atomically(path, data)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def test_two_writers_at_once_both_write_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename = tmp_path / "report.html", Path.replace

    def after_another_writer(temporary: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", rename)
        write_atomically(path, b"second")
        assert path.read_bytes() == b"second"
        return rename(temporary, target)

    monkeypatch.setattr(Path, "replace", after_another_writer)
    write_atomically(path, b"first")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_left_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    path, other = tmp_path / "report.html", tmp_path / "run.json.12345678.tmp"
    other.touch()
    write_atomically(path, b"old")
    for _ in range(3):
        killed_while_writing(path, b"half")
        assert path.read_bytes() == b"old"
        assert len(list(tmp_path.iterdir())) == 3, "one writer leaves one temporary file"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [path, other], "temporary files of other paths are left alone"


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "run.json"
    write_atomically(path, b"old")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_whose_file_another_one_removed_before_it_was_locked_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, removed = tmp_path / "run.json", fcntl.flock, list[str]()

    def late(file: BinaryIO, operation: int) -> None:
        if not removed:
            removed.append(file.name)
            Path(file.name).unlink()
        lock(file, operation)

    monkeypatch.setattr(atomic_write.fcntl, "flock", late)
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert len(removed) == 1


def test_a_file_system_without_locks_is_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(atomic_write.fcntl, "flock", unsupported)
    write_atomically(tmp_path / "run.json", b"new")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"new"]
