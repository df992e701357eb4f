"""Other processes open a memory file by its path until its owner closes it."""

import mmap
import os
from pathlib import Path

import pytest
from scarce_memory import no_memory

from asyncrl.weights.memory_file import MemoryFile


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_what_its_owner_writes_is_read_by_its_path_until_the_file_is_closed(size: int) -> None:
    before = open_descriptors()
    file = MemoryFile(size)
    file.data[:] = 7
    assert Path(file.path).read_bytes() == bytes([7]) * size
    file.close()
    assert open_descriptors() == before


def test_a_mapping_stays_readable_after_the_file_is_closed() -> None:
    file = MemoryFile(4)
    file.data[:] = range(4)
    with open(file.path, "rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 4, access=mmap.ACCESS_COPY)
    file.close()
    assert mapping[:] == bytes(range(4))


@pytest.mark.fault("F11")
def test_memory_that_ran_out_leaves_no_descriptor_behind() -> None:
    before = open_descriptors()
    with no_memory(100), pytest.raises(OSError, match="too large") as failure:
        MemoryFile(101)
    assert open_descriptors() == before
    del failure  # until here its traceback keeps the object, whose end would close the descriptor, too
