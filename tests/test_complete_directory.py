"""A checkpoint's directory under kill -9. A child process does the work and is killed before its first, second, …
change of a file."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from asyncrl.complete_directory import COMPLETE, complete, discard, finish, prepare, publish, unfinished
from asyncrl.errors import CheckpointError

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
SURVIVED, KILLED = 0, -signal.SIGKILL


def save(path: Path, save_id: str) -> None:
    prepare(path)
    for name in ("model.safetensors", "config.json"):
        (unfinished(path) / name).write_text(save_id)
    finish(path, save_id=save_id)
    publish(path)


def exit_code(work: Callable[[], object], *, changes: int) -> int:
    """Returns the exit code of a child that does `work` and is killed after this number of file changes."""
    left = changes

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in CHANGES and (event != "open" or int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR)):
            if left == 0:
                signal.raise_signal(signal.SIGKILL)
            left -= 1

    child = os.fork()
    if child == 0:
        sys.addaudithook(count)
        try:
            work()
        finally:
            os._exit(1 if sys.exc_info()[0] else SURVIVED)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def whole(path: Path) -> str | None:
    """Returns the id of the save that `complete` finds, after checking all its files; None if there is none."""
    try:
        found, marker = complete(path)
    except CheckpointError:
        return None
    assert {(found / name).read_text() for name in ("model.safetensors", "config.json")} == {marker.save_id}
    return marker.save_id


@pytest.mark.parametrize("before", [None, "old"])
@pytest.mark.fault("F7")
def test_a_save_that_is_killed_leaves_the_one_before_and_is_in_the_way_of_nothing(
    before: str | None, tmp_path: Path
) -> None:
    code, changes, found = KILLED, 0, []
    while code == KILLED:
        path = tmp_path / str(changes) / "hf"
        if before is not None:
            save(path, before)
        code = exit_code(partial(save, path, "new"), changes=changes)
        found.append(whole(path))
        assert not path.exists() or (path / COMPLETE).exists(), (
            "a reader that does not check COMPLETE must be safe, too"
        )
        save(path, "next")
        assert whole(path) == "next"
        assert [left.name for left in path.parent.iterdir()] == ["hf"]
        changes += 1
    assert code == SURVIVED
    assert changes > 6
    assert found == sorted(found, key=lambda save_id: save_id == "new"), "after the new save is visible, it stays"
    assert set(found) == {before, "new"}


@pytest.mark.fault("F7")
def test_a_directory_whose_removal_is_killed_is_whole_or_not_there(tmp_path: Path) -> None:
    code, changes, found = KILLED, 0, []
    while code == KILLED:
        path = tmp_path / str(changes) / "hf"
        save(path, "old")
        code = exit_code(partial(discard, path), changes=changes)
        found.append(whole(path))
        assert path.exists() == (found[-1] is not None)
        changes += 1
    assert code == SURVIVED
    assert set(found) == {"old", None}
    assert list(path.parent.iterdir()) == []


def test_all_files_and_their_names_are_on_the_disk_before_the_marker_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "hf", list[str]()
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save(path, "new")
    [marker] = [place for place, name in enumerate(synced) if name.startswith(f"{COMPLETE}.")]
    assert sorted(synced[:marker]) == ["config.json", "hf.tmp", "model.safetensors"]
    assert synced[marker + 1 :] == ["hf.tmp", path.parent.name], "the names of the marker and of the directory"
