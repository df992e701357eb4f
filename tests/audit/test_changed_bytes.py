"""The audit finds a changed byte in every file that it covers (docs/guarantees.md), and a record that was cut off."""

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from audited_run import record, record_killed_run, state
from byte_changes import is_covered, is_found

from asyncrl.audit.audit import audit
from asyncrl.audit.history import Verdict
from asyncrl.learner.audit_records import records_path

CHANGES = 60


def verdicts(directory: Path) -> set[Verdict]:
    return {outcome.verdict for outcome in audit(directory)}


def frames(data: bytes) -> Iterator[int]:
    """Yields where each frame of a file of records begins, and where the last one ends."""
    place = 0
    while place < len(data):
        yield place
        place += 12 + struct.unpack_from("<I", data, place)[0]
    yield place


@pytest.mark.asyncio
async def test_a_changed_byte_in_a_covered_file_is_found(tmp_path: Path) -> None:
    directory = await record_killed_run(tmp_path)
    assert Verdict.FAILED not in verdicts(directory)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and is_covered(path, directory))
    assert {path.name for path in files} >= {"steps-1.msgpack", "steps-2.msgpack", "steps.jsonl", "buffer.msgpack"}
    chance = random.Random(20260101)
    for number in range(CHANGES):
        path = files[number % len(files)]
        if size := path.stat().st_size:
            place, flip = chance.randrange(size), chance.randrange(1, 256)
            assert is_found(directory, path, place=place, flip=flip), (path.name, place, flip)


@pytest.mark.asyncio
@pytest.mark.parametrize("number", range(4))
async def test_a_changed_byte_in_the_length_of_any_frame_is_found(number: int, tmp_path: Path) -> None:
    directory = await record_killed_run(tmp_path)
    state(directory, "running")  # then an incomplete last frame is allowed
    for incarnation in (1, 2):
        path = records_path(directory, incarnation)
        for place in list(frames(path.read_bytes()))[:-1]:
            assert is_found(directory, path, place=place + number, flip=0x41), (incarnation, place)


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "after the first step": lambda data: data[: list(frames(data))[3]],
    "in the head of the last step but one": lambda data: data[: list(frames(data))[-7] + 5],
    "to nothing but the start": lambda data: data[: list(frames(data))[1]],
    "zeros from the middle on": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CUTS)
async def test_records_that_were_cut_off_are_missed_although_the_rest_is_whole(name: str, tmp_path: Path) -> None:
    directory = await record_killed_run(tmp_path)
    state(directory, "running")
    path = records_path(directory, 2)
    os.truncate(path, 0)
    assert Verdict.FAILED in verdicts(directory)
    path = records_path(directory, 1)
    path.write_bytes(CUTS[name](path.read_bytes()))
    assert verdicts(directory) == {Verdict.FAILED}


@pytest.mark.asyncio
async def test_the_end_of_a_finished_run_is_missed(tmp_path: Path) -> None:
    directory = await record(tmp_path)
    state(directory, "finished")
    path = records_path(directory, 1)
    data = path.read_bytes()
    assert Verdict.FAILED not in verdicts(directory)
    for end in (list(frames(data))[-2], len(data) - 1):
        path.write_bytes(data[:end])
        assert verdicts(directory) == {Verdict.FAILED}


@pytest.mark.asyncio
async def test_only_the_last_step_of_a_killed_run_may_lack_its_record(tmp_path: Path) -> None:
    directory = await record(tmp_path, killed_at=3)
    state(directory, "running")
    path = records_path(directory, 1)
    data = path.read_bytes()
    last, before_last = list(frames(data))[-3], list(frames(data))[-5]
    path.write_bytes(data[: last + 20])
    assert Verdict.FAILED not in verdicts(directory)
    path.write_bytes(data[: before_last + 20])
    assert verdicts(directory) == {Verdict.FAILED}
