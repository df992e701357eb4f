"""The replicas of a node stage a version once, in memory that they share. One that dies or is stuck does not block the
others."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.common.version import Version
from asyncrl.errors import FetchFailed
from asyncrl.weights import node_memory, staging
from asyncrl.weights.manifest import Bucket, Bytes, Manifest, Piece, Probe, TensorEntry, checksum
from asyncrl.weights.node_memory import Block, BroadcastRoom, shared_block
from asyncrl.weights.staging import Part, StagedWeights

BUCKETS, BUCKET_BYTES = 4, 1000
NBYTES = BUCKETS * BUCKET_BYTES
FORK = multiprocessing.get_context("fork")


def bytes_of(step: int) -> Bytes:
    return np.random.default_rng(step).integers(0, 256, NBYTES, np.uint8)


def bucket_of(step: int, index: int) -> Bytes:
    return bytes_of(step)[index * BUCKET_BYTES : (index + 1) * BUCKET_BYTES]


def manifest_of(step: int) -> Manifest:
    return Manifest(
        version=Version(1, step),
        tensors=(TensorEntry(name="a", shape=(NBYTES,), dtype="uint8", offset=0, nbytes=NBYTES),),
        buckets=tuple(
            Bucket(pieces=(Piece(index * BUCKET_BYTES, BUCKET_BYTES),), checksum=checksum([bucket_of(step, index)]))
            for index in range(BUCKETS)
        ),
        probe=Probe(tokens=(), logprobs=()),
    )


class Replica:
    """Stages versions, and notes the buckets that it fetches."""

    def __init__(self, pointer: Path | None) -> None:
        self.staged = StagedWeights(pointer)
        self.fetched: list[int] = []

    async def stage(self, step: int, *, before: Callable[[int], Awaitable[None]] | None = None) -> list[int]:
        """Returns the buckets that were fetched for the version. `before` is awaited before each of them."""
        self.fetched = []

        async def fetch(part: Part) -> Bytes:
            await asyncio.sleep(0)
            if before is not None:
                await before(part.bucket)
            self.fetched.append(part.bucket)
            return bucket_of(step, part.bucket)

        await self.staged.stage(manifest_of(step), fetch)
        assert np.array_equal(self.staged.flat, bytes_of(step))
        return self.fetched

    @property
    def memory(self) -> int:
        """The number of the memory, by which an engine's worker would map it."""
        return os.stat(self.staged.path).st_ino


async def waits(*tasks: "asyncio.Task[Any]") -> bool:
    done, _ = await asyncio.wait(tasks, timeout=10 * node_memory.POLL_S)
    return not done


@pytest.fixture
def pointer(tmp_path: Path) -> Path:
    return tmp_path / "pointer"


@pytest.mark.asyncio
async def test_replicas_of_a_node_fetch_a_version_once_and_load_it_from_one_memory_at_the_same_time(
    pointer: Path,
) -> None:
    replicas = [Replica(pointer) for _ in range(3)]
    for step in range(2):
        fetched = await asyncio.gather(*[replica.stage(step) for replica in replicas])
        assert sorted(map(len, fetched)) == [0, 0, BUCKETS], "one fetches, and none waits for the load of another one"
        assert len({replica.memory for replica in replicas}) == 1
        for replica in replicas:
            replica.staged.release()
    assert await Replica(pointer).stage(1) == []
    assert await Replica(None).stage(1) == [*range(BUCKETS)]


@pytest.mark.asyncio
async def test_a_version_stays_until_all_replicas_have_loaded_it(pointer: Path) -> None:
    slow, fast = Replica(pointer), Replica(pointer)
    await slow.stage(0)
    await fast.stage(0)
    fast.staged.release()
    following = asyncio.create_task(fast.stage(1))
    assert await waits(following)
    assert np.array_equal(slow.staged.flat, bytes_of(0))
    slow.staged.release()
    assert await following == [*range(BUCKETS)]
    back = asyncio.create_task(slow.stage(0))
    assert await waits(back), "the other replica loads now"
    fast.staged.release()
    assert await back == [*range(BUCKETS)], "its bytes were replaced, so it does not rely on having verified them"
    slow.staged.release()
    assert await slow.stage(0) == []


@pytest.mark.asyncio
async def test_what_a_replica_fetched_before_it_failed_is_not_fetched_again(pointer: Path) -> None:
    failing, other = Replica(pointer), Replica(pointer)

    async def fail(bucket: int) -> None:
        if bucket == 2:
            raise FetchFailed("no route")

    with pytest.raises(FetchFailed, match="no route"):
        await failing.stage(0, before=fail)
    assert await other.stage(0) == [2, 3]
    assert await failing.stage(0) == []


def stage_two_buckets(pointer: Path, ready: Any) -> None:
    """Stages two buckets of a version, and hangs in the third one with half of its bytes written."""

    async def hang(bucket: int) -> None:
        if bucket == 2:
            replica.staged._memory.will_change()
            replica.staged.flat[2 * BUCKET_BYTES : 2 * BUCKET_BYTES + 500] = 7
            ready.set()
            signal.pause()

    replica = Replica(pointer)
    asyncio.run(replica.stage(0, before=hang))


@pytest.mark.asyncio
@pytest.mark.parametrize("joined", ["before", "after"])
async def test_a_replica_that_is_killed_while_it_fetches_leaves_what_it_has_verified_and_blocks_no_other(
    pointer: Path, joined: str
) -> None:
    ready = FORK.Event()
    dies = FORK.Process(target=stage_two_buckets, args=(pointer, ready))
    dies.start()
    assert await asyncio.to_thread(ready.wait, 30.0)
    survivor = Replica(pointer)
    if joined == "before":
        staging_it = asyncio.create_task(survivor.stage(0))
        assert await waits(staging_it)
    dies.kill()
    await asyncio.to_thread(dies.join)
    if joined == "before":
        assert await staging_it == [2, 3]
    else:
        assert await survivor.stage(0) == [*range(BUCKETS)], "the memory has gone with its last replica"
    newcomer = Replica(pointer)
    assert await newcomer.stage(0) == []
    assert newcomer.memory == survivor.memory


@pytest.mark.asyncio
async def test_replicas_meet_again_after_their_pointer_was_removed(pointer: Path) -> None:
    first, second = Replica(pointer), Replica(pointer)
    await first.stage(0)
    first.staged.release()
    await asyncio.to_thread(pointer.unlink)
    await second.stage(1)
    assert second.memory != first.memory
    second.staged.release()
    assert await first.stage(1) == []
    assert second.memory == first.memory


@pytest.mark.asyncio
async def test_a_replica_that_is_stuck_with_the_memory_delays_the_others_for_a_moment_only(
    pointer: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(staging, "BLOCKED_S", 0.2)
    stuck, other = Replica(pointer), Replica(pointer)
    await stuck.stage(0)
    with monkeypatch.context() as patched:
        patched.setattr(staging.psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * NBYTES - 1))
        with pytest.raises(FetchFailed, match="too few for another"):
            await other.stage(1)
    assert await other.stage(1) == [*range(BUCKETS)]
    assert "staged in memory of this replica's own" in caplog.text
    assert other.memory != stuck.memory
    assert np.array_equal(stuck.staged.flat, bytes_of(0))
    for replica in (stuck, other):
        replica.staged.release()
    assert await other.stage(0) == [], "it has joined the others again"
    assert other.memory == stuck.memory


def test_replicas_take_memory_of_their_own_one_after_the_other(pointer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has room for one of them, so the second one must see the memory of the first one as used."""
    taken: list[int] = []

    def available() -> SimpleNamespace:
        free = 3 * NBYTES - sum(taken)
        time.sleep(0.05)
        return SimpleNamespace(available=free)

    class Counted(Block):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            taken.append(nbytes + 1)

    replicas = [StagedWeights(pointer) for _ in range(3)]
    for replica in replicas:
        replica.begin(manifest_of(0))
    monkeypatch.setattr(staging.psutil, "virtual_memory", available)
    monkeypatch.setattr(staging, "Block", Counted)
    with ThreadPoolExecutor() as threads:
        moves = [threads.submit(replica._move_apart) for replica in replicas]
    assert [type(move.exception()) for move in moves].count(FetchFailed) == 2
    assert len(taken) == 1


@pytest.mark.asyncio
async def test_a_replica_that_is_cancelled_twice_keeps_the_memory_until_it_has_written(
    pointer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_end = threading.Event(), threading.Event()
    put = StagedWeights.put

    def slow_put(self: StagedWeights, part: Part, data: Bytes) -> None:
        writing.set()
        may_end.wait(10)
        put(self, part, data)

    monkeypatch.setattr(StagedWeights, "put", slow_put)
    monkeypatch.setattr(staging, "LOOP_BYTES", 0)
    first, second = Replica(pointer), StagedWeights(pointer)
    second.begin(manifest_of(0))
    staged = asyncio.create_task(first.stage(0))
    await asyncio.to_thread(writing.wait, 10)
    for _ in range(2):
        staged.cancel()
        assert await waits(staged)
        assert not second._memory.lock(alone=True), "the thread writes"
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await staged
    assert second._memory.lock(alone=True)


@pytest.mark.asyncio
async def test_a_replica_that_fetches_slowly_is_not_stuck(pointer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BLOCKED_S", 0.3)
    slow, other = Replica(pointer), Replica(pointer)

    async def slowly(bucket: int) -> None:
        await asyncio.sleep(0.15)

    fetching = asyncio.create_task(slow.stage(0, before=slowly))
    while not slow.fetched:
        await asyncio.sleep(0)
    assert await other.stage(0) == []
    assert await fetching == [*range(BUCKETS)]


@pytest.mark.parametrize("text", ["", "no address", f"{os.devnull} {'0' * 32} 100", "/proc/1/fd/x 00 100"])
def test_a_pointer_that_leads_nowhere_is_replaced(pointer: Path, text: str) -> None:
    pointer.write_text(text)
    block = shared_block(pointer, 100, held=None)
    assert (block.address.nbytes, block.changes) == (100, 0)
    assert shared_block(pointer, 100, held=block) is block
    assert shared_block(pointer, 100, held=None).address.token == block.address.token
    assert shared_block(pointer, 200, held=None).address.token != block.address.token, "another size"


@pytest.mark.parametrize("text", ["", "address", "no address"])
def test_a_pointer_of_another_user_is_not_used(pointer: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Block(100)
    written = " ".join(map(str, theirs.address)) if text == "address" else text
    pointer.write_text(written)
    own = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: own + 1)
    with pytest.raises(PermissionError, match="another user has made it"):
        shared_block(pointer, 100, held=None)
    assert pointer.read_text() == written


def test_a_later_file_with_the_path_of_a_block_is_not_taken_for_it(pointer: Path) -> None:
    block, later = Block(100), Block(100)
    pointer.write_text(" ".join((later.address.path, block.address.token, "100")))
    found = shared_block(pointer, 100, held=None)
    assert found.address.token not in (block.address.token, later.address.token)


def test_a_pointer_that_another_process_keeps_has_a_deadline(pointer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "POINTER_S", 0.05)
    with node_memory.pointer_held(pointer), pytest.raises(FetchFailed, match="look for a process that is stuck"):
        StagedWeights(pointer).begin(manifest_of(0))


def test_a_block_frees_its_memory_and_its_descriptors(pointer: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    blocks = [shared_block(pointer, 100, held=None) for _ in range(2)]
    assert blocks[0].lock(alone=True)
    assert not blocks[1].lock(alone=False)
    view = blocks[0].flat
    blocks[0].close()
    assert blocks[1].lock(alone=True), "a closed block is not locked, although something still maps it"
    del view
    blocks[1].close()
    blocks[1].close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_one_replica_of_a_node_puts_a_broadcast_into_its_memory(pointer: Path) -> None:
    rooms, started_s = [BroadcastRoom(pointer) for _ in range(2)], time.monotonic()
    for step in range(2):
        with rooms[0].held(Version(1, step), NBYTES) as block, rooms[1].held(Version(1, step), NBYTES) as other:
            assert block is not None
            assert other is None
            assert not rooms[1].dropped
    assert time.monotonic() - started_s < node_memory.ROOM_S, "nothing waits until the other one has put it there"
    reader = shared_block(pointer, NBYTES, held=None)
    assert reader.broadcast == 0
    assert reader.lock(alone=True)


def test_a_broadcast_waits_for_replicas_that_load_and_is_then_dropped(
    pointer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_memory, "ROOM_S", 0.1)
    room, loads = BroadcastRoom(pointer), shared_block(pointer, NBYTES, held=None)
    assert loads.lock(alone=False)
    with room.held(Version(1, 0), NBYTES) as block:
        assert block is None
        assert room.dropped
    soon = threading.Timer(0.02, loads.unlock)
    soon.start()
    with room.held(Version(1, 1), NBYTES) as block:
        assert block is not None
        assert not room.dropped
    soon.join()


def test_a_broadcast_without_memory_is_dropped(pointer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    room = BroadcastRoom(pointer)
    with room.held(Version(1, 0), NBYTES) as block:
        assert block is None
    assert room.dropped
    with pytest.raises(FetchFailed, match="there is no memory for the"):
        StagedWeights(pointer).begin(manifest_of(0))
