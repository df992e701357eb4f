"""Other processes open a memory file by its path until its owner closes it."""

import os
from pathlib import Path

import pytest

from asyncrl.weights.memory_file import MemoryFile


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_the_parts_stand_one_after_the_other_until_the_file_is_closed() -> None:
    before = open_descriptors()
    with MemoryFile(memoryview(b"ab"), memoryview(b""), memoryview(b"cde")) as path:
        assert Path(path).read_bytes() == b"abcde"
    assert open_descriptors() == before


def test_a_write_that_takes_only_a_part_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:2]))
    with MemoryFile(memoryview(b"abcde"), memoryview(b"fgh")) as path:
        assert Path(path).read_bytes() == b"abcdefgh"


@pytest.mark.fault("F11")
def test_memory_that_ran_out_leaves_no_descriptor_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError("no space left")

    before = open_descriptors()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        MemoryFile(memoryview(b"a"))
    assert open_descriptors() == before
