"""The weight store knows which replicas are there for a broadcast, and who lacks bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import pytest
from test_store import manifest

from asyncrl.common.version import Version
from asyncrl.weights.memberships import Broadcast
from asyncrl.weights.store import WeightStore

FAR_S = 60.0
SOON_S = 0.05


class Replica:
    """Waits for broadcasts, like `CollectiveTransport.take_part`."""

    def __init__(self, store: WeightStore, name: str) -> None:
        self.store, self.name = store, name
        self.epoch: int | None = None
        self.found: list[Broadcast] = []
        self.is_stuck = False

    async def run(self) -> None:
        number = 0
        while not self.is_stuck:
            broadcast = await self.store.next_broadcast(self.name, self.epoch, number, FAR_S)
            if broadcast is not None:
                number = broadcast.number
                self.found.append(broadcast)


@asynccontextmanager
async def waiting(*replicas: Replica) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(replica.run()) for replica in replicas]
    await asyncio.sleep(0)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def announce(store: WeightStore, step: int, *members: str, is_new: bool = True) -> Broadcast:
    return await store.announce(Version(1, step), members, ranks=2, host="localhost", port=1, is_new=is_new)


@pytest.mark.asyncio
async def test_replicas_that_wait_are_there_with_the_group_that_they_have_joined() -> None:
    store = WeightStore()
    a, b = Replica(store, "a"), Replica(store, "b")
    b.epoch = 7
    async with waiting(a, b):
        assert await store.present((), FAR_S) == {"a": None, "b": 7}
        assert await store.present((), FAR_S) == {"a": None, "b": 7}, "they wait again"


@pytest.mark.asyncio
async def test_a_replica_that_has_died_while_it_waited_is_not_there() -> None:
    """Its call to the weight store goes on until its deadline."""
    store = WeightStore()
    a, dead = Replica(store, "a"), Replica(store, "dead")
    async with waiting(a, dead):
        dead.is_stuck = True
        assert await store.present((), SOON_S) == {"a": None}
        async with asyncio.timeout(FAR_S / 2):
            assert await store.present((), FAR_S) == {"a": None}, "it is not waited for again"


@pytest.mark.asyncio
async def test_a_member_that_still_takes_the_last_broadcast_is_waited_for() -> None:
    store = WeightStore()
    a, late = Replica(store, "a"), Replica(store, "late")
    async with waiting(a):
        asking = asyncio.create_task(store.present(("a", "late"), FAR_S))
        for _ in range(20):  # `a` answers
            await asyncio.sleep(0)
        assert not asking.done()
        async with waiting(late):
            assert await asking == {"a": None, "late": None}


@pytest.mark.asyncio
async def test_a_broadcast_is_announced_to_replicas_and_ranks_and_only_new_memberships_get_a_number() -> None:
    store = WeightStore()
    a = Replica(store, "a")
    async with waiting(a):
        rank = asyncio.create_task(store.announced(Version(1, 0), 0, FAR_S))
        await asyncio.sleep(0)
        first = await announce(store, 0, "a")
        assert await rank == first
        await store.present((), FAR_S)
        second = await announce(store, 1, "a", is_new=False)
        await store.present((), FAR_S)
        third = await announce(store, 1, "a", "b")
        await store.present((), FAR_S)
    assert a.found == [first, second, third]
    assert [(each.number, each.epoch) for each in a.found] == [(1, 1), (2, 1), (3, 2)]
    assert await store.announced(Version(1, 1), second.number, FAR_S) == third, "a repeated delivery"
    assert await store.announced(Version(1, 1), third.number, SOON_S) is None
    assert await store.announced(Version(1, 2), 0, SOON_S) is None


@pytest.mark.asyncio
async def test_bytes_are_stored_only_for_replicas_that_ask() -> None:
    store = WeightStore()
    await store.publish(manifest(1), [])
    assert await store.requests(0, SOON_S) == []
    ranks = [asyncio.create_task(store.requests(0, FAR_S)) for _ in range(2)]
    replicas = [asyncio.create_task(store.stored_buckets(Version(1, 1), rank, FAR_S)) for rank in (0, 1, 1)]
    assert await asyncio.gather(*ranks) == [[(1, Version(1, 1))]] * 2
    for rank in (0, 1):
        await store.store_buckets(Version(1, 1), rank, [f"handle of {rank}"])
    assert await asyncio.gather(*replicas) == [["handle of 0"], ["handle of 1"], ["handle of 1"]]
    assert await store.requests(1, SOON_S) == [], "the bytes are there"
    assert await store.stored_buckets(Version(1, 1), 0, FAR_S) == ["handle of 0"]
    assert await store.requests(1, SOON_S) == []


@pytest.mark.asyncio
@pytest.mark.fault("F38")
async def test_bytes_of_ranks_that_have_died_are_not_waited_for_when_newer_weights_are_there() -> None:
    store = WeightStore()
    await store.publish(manifest(1), [])
    assert await store.stored_buckets(Version(1, 1), 0, SOON_S) is None
    assert await store.requests(0, SOON_S) == [], "it is not wanted any more"
    asking = asyncio.create_task(store.stored_buckets(Version(1, 1), 0, FAR_S))
    assert await store.requests(0, FAR_S) == [(2, Version(1, 1))], "asked again"
    await store.publish(manifest(2), [])
    assert await asking is None


class Handle:
    """Stands for a reference to bytes of Ray's object store."""


@pytest.mark.asyncio
async def test_handles_are_kept_as_long_as_their_version_is_offered() -> None:
    store = WeightStore()
    kept: WeakValueDictionary[int, Handle] = WeakValueDictionary()

    def handle(step: int) -> Handle:
        kept[step] = found = Handle()
        return found

    await store.store_buckets(Version(1, 0), 0, [handle(0)])
    assert not kept, "it was never offered"
    for step in (1, 2, 3):
        await store.publish(manifest(step), [])
        await store.store_buckets(Version(1, step), 0, [handle(step)])
    assert set(kept) == {2, 3}
