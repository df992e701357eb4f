"""The replicas of a node stage a version once, in memory that they share. One that dies or is stuck does not block the
others."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scarce_memory import no_memory

from asyncrl.common.version import Version
from asyncrl.errors import FetchFailed
from asyncrl.weights import node_memory, staging
from asyncrl.weights.manifest import Bucket, Bytes, Manifest, Piece, Probe, TensorEntry, checksum
from asyncrl.weights.node_memory import Block, BroadcastRoom, shared_block
from asyncrl.weights.staging import Part, StagedWeights

BUCKETS, BUCKET_BYTES = 4, 1000
NBYTES = BUCKETS * BUCKET_BYTES
IN_A_THREAD = 2 * staging.LOOP_BYTES
"""Bytes of a bucket that is not handled by the event loop."""
FORK = multiprocessing.get_context("fork")


def bytes_of(step: int, bucket_bytes: int = BUCKET_BYTES) -> Bytes:
    return np.random.default_rng(step).integers(0, 256, BUCKETS * bucket_bytes, np.uint8)


def manifest_of(step: int, bucket_bytes: int = BUCKET_BYTES) -> Manifest:
    parts = np.split(bytes_of(step, bucket_bytes), BUCKETS)
    nbytes = BUCKETS * bucket_bytes
    return Manifest(
        version=Version(1, step),
        tensors=(TensorEntry(name="a", shape=(nbytes,), dtype="uint8", offset=0, nbytes=nbytes),),
        buckets=tuple(
            Bucket(pieces=(Piece(index * bucket_bytes, bucket_bytes),), checksum=checksum([part]))
            for index, part in enumerate(parts)
        ),
        probe=Probe(tokens=(), logprobs=()),
    )


class Replica:
    """Stages versions, and notes the buckets that it fetches."""

    def __init__(self, pointer: Path | None, *, kind: type[StagedWeights] = StagedWeights, **options: Any) -> None:
        self.staged = kind(pointer, **options)
        self.fetched: list[int] = []

    async def stage(
        self,
        step: int,
        *,
        before: Callable[[int], Awaitable[None]] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> list[int]:
        """Returns the buckets that were fetched for the version. `before` is awaited before each of them."""
        self.fetched = []
        whole = bytes_of(step, bucket_bytes)

        async def fetch(part: Part) -> Bytes:
            await asyncio.sleep(0)
            if before is not None:
                await before(part.bucket)
            self.fetched.append(part.bucket)
            return whole[part.bucket * bucket_bytes : (part.bucket + 1) * bucket_bytes]

        await self.staged.stage(manifest_of(step, bucket_bytes), fetch)
        assert np.array_equal(self.staged.flat, whole)
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
            block = shared_block(pointer, NBYTES, held=None)  # the pointer leads to it, so it must stay
            block.will_change()
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
    pointer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = [2 * NBYTES, 2 * NBYTES - 1]
    stuck, other = Replica(pointer), Replica(pointer, blocked_s=0.2, available_bytes=free.pop)
    await stuck.stage(0)
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


def blocks() -> set[int]:
    """Returns the inodes of the memory files that this process keeps open."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            if "asyncrl-weights" in os.readlink(descriptor):
                inodes.add(descriptor.stat().st_ino)
    return inodes


def test_replicas_take_memory_of_their_own_one_after_the_other(pointer: Path) -> None:
    """The node has room for one of them, so the second one must see the memory of the first one as used."""
    stuck = Replica(pointer)
    asyncio.run(stuck.stage(0))
    before = blocks()

    def available_bytes() -> int:
        free = 3 * NBYTES - len(blocks() - before) * (NBYTES + 1)
        time.sleep(0.05)
        return free

    replicas = [Replica(pointer, blocked_s=0.0, available_bytes=available_bytes) for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        stages = [threads.submit(asyncio.run, replica.stage(1)) for replica in replicas]
    assert [type(stage.exception()) for stage in stages].count(FetchFailed) == 2
    assert len(blocks() - before) == 1


@pytest.mark.asyncio
async def test_a_replica_that_is_cancelled_twice_keeps_the_memory_until_it_has_written(pointer: Path) -> None:
    writing, may_end = threading.Event(), threading.Event()

    class Slow(StagedWeights):
        def put(self, part: Part, data: Bytes) -> None:
            writing.set()
            may_end.wait(10)
            super().put(part, data)

    first, second = Replica(pointer, kind=Slow), shared_block(pointer, BUCKETS * IN_A_THREAD, held=None)
    staged = asyncio.create_task(first.stage(0, bucket_bytes=IN_A_THREAD))
    await asyncio.to_thread(writing.wait, 10)
    for _ in range(2):
        staged.cancel()
        assert await waits(staged)
        assert not second.lock(alone=True), "the thread writes"
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await staged
    assert second.lock(alone=True)


@pytest.mark.asyncio
async def test_a_replica_that_fetches_slowly_is_not_stuck(pointer: Path) -> None:
    slow, other = Replica(pointer), Replica(pointer, blocked_s=0.3)

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


def test_a_pointer_that_another_process_keeps_has_a_deadline(pointer: Path) -> None:
    with node_memory.pointer_held(pointer), pytest.raises(FetchFailed, match="look for a process that is stuck"):
        StagedWeights(pointer, pointer_s=0.05).begin(manifest_of(0))


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


def test_a_broadcast_waits_for_replicas_that_load_and_is_then_dropped(pointer: Path) -> None:
    room, loads = BroadcastRoom(pointer, room_s=0.1), shared_block(pointer, NBYTES, held=None)
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


def test_a_broadcast_without_memory_is_dropped(pointer: Path) -> None:
    room = BroadcastRoom(pointer)
    with no_memory(NBYTES // 2):
        with room.held(Version(1, 0), NBYTES) as block:
            assert block is None
        assert room.dropped
        with pytest.raises(FetchFailed, match="there is no memory for the"):
            StagedWeights(pointer).begin(manifest_of(0))
