"""The weight store keeps the newest two versions, and wakes callers that wait for a newer one."""

import asyncio
from weakref import WeakSet

import msgspec
import pytest

from asyncrl.common.version import Version
from asyncrl.errors import VersionConflict, VersionRegression
from asyncrl.weights.manifest import Bucket, Link, Manifest, Probe
from asyncrl.weights.store import WeightStore

FAR_S = 60.0


class Handle:
    """Stands for a reference to bytes of Ray's object store."""


def manifest(step: int) -> Manifest:
    return Manifest(version=Version(1, step), tensors=(), buckets=(), probe=Probe(tokens=(), logprobs=()))


@pytest.mark.asyncio
async def test_a_waiter_gets_the_version_that_is_published_while_it_waits() -> None:
    store = WeightStore()
    waiting = asyncio.create_task(store.newer_than(None, FAR_S))
    await asyncio.sleep(0)
    await store.publish(manifest(0), ["handle"])
    publication = await waiting
    assert publication is not None
    assert (publication.manifest.version, publication.handles, publication.serial) == (Version(1, 0), ["handle"], 1)


@pytest.mark.asyncio
async def test_a_slow_replica_gets_the_newest_and_skips_what_lies_between() -> None:
    store = WeightStore()
    kept: WeakSet[Handle] = WeakSet()
    for step in range(5):
        handle = Handle()
        kept.add(handle)
        await store.publish(manifest(step), [handle])
        del handle
    publication = await store.newer_than(Version(1, 1), FAR_S)
    assert publication is not None
    assert publication.manifest.version == Version(1, 4)
    assert len(kept) == 2, "the store keeps the newest two versions"


@pytest.mark.asyncio
@pytest.mark.fault("F12")
async def test_a_replica_that_could_not_load_the_newest_gets_the_other_version_if_that_is_news() -> None:
    store = WeightStore()
    for step in (1, 2):
        await store.publish(manifest(step), [])

    async def offered(loaded: Version | None, besides: Version) -> Version:
        publication = await store.newer_than(loaded, FAR_S, besides)
        assert publication is not None
        return publication.manifest.version

    assert await offered(None, Version(1, 2)) == Version(1, 1)
    assert await offered(None, Version(1, 1)) == Version(1, 2)
    assert await offered(Version(1, 1), Version(1, 2)) == Version(1, 2), "it is tried again"


@pytest.mark.asyncio
async def test_without_news_the_wait_ends_at_its_deadline() -> None:
    store = WeightStore()
    await store.publish(manifest(3), [])
    assert await store.newer_than(Version(1, 3), 0.0) is None


@pytest.mark.asyncio
@pytest.mark.fault("F13")
async def test_a_repeated_publication_changes_nothing_and_an_older_one_is_refused() -> None:
    store = WeightStore()
    await store.publish(manifest(3), ["first"])
    assert await store.publish(manifest(3), ["second"]) == 1
    newest = await store.newer_than(None, FAR_S)
    assert newest is not None
    assert newest.handles == ["first"]
    with pytest.raises(VersionRegression):
        await store.publish(manifest(2), [])


@pytest.mark.asyncio
@pytest.mark.fault("F12")
async def test_a_refused_version_is_replaced_by_another_delivery_of_it_and_lag_does_not_grow() -> None:
    store = WeightStore()
    for step in (1, 2):
        await store.publish(manifest(step), [f"first {step}"])
    await store.refuse(1)
    assert await store.refused(0, 0.0) is None, "a newer delivery may reach the replica"
    waiting = asyncio.create_task(store.refused(0, FAR_S))
    await asyncio.sleep(0)
    await store.refuse(2)
    assert await waiting == 2
    assert await store.refused(2, 0.0) is None, "it was answered"
    assert await store.publish(manifest(2), ["second 2"], True) == 2
    newest = await store.newer_than(Version(1, 1), FAR_S)
    assert newest is not None
    assert (newest.serial, newest.delivery, newest.handles) == (2, 3, ["second 2"])
    assert [each.manifest.version.step for each in store._publications] == [1, 2]
    await store.refuse(2)
    assert await store.refused(2, 0.0) is None, "another delivery has followed it"
    links = (Link(Version(1, 2), "", 9, False), Link(Version(1, 3), "aaaa", 1, True))
    first, whole, other = (
        msgspec.structs.replace(manifest(3), buckets=(Bucket(pieces=(), checksum=checksum, links=chain),))
        for checksum, chain in (("aaaa", links), ("aaaa", links[1:]), ("bbbb", links))
    )
    await store.publish(first, ["first 3"])
    assert await store.publish(whole, ["second 3"], True) == 3, "the same bytes on another way"
    with pytest.raises(VersionConflict):
        await store.publish(other, ["third 3"], True)


@pytest.mark.asyncio
@pytest.mark.fault("F13")
async def test_a_version_that_is_published_again_with_other_bytes_is_refused_with_both_checksums() -> None:
    store = WeightStore()
    first, other = (
        msgspec.structs.replace(manifest(3), buckets=(Bucket(pieces=(), checksum=checksum),))
        for checksum in ("aaaa", "bbbb")
    )
    await store.publish(first, ["first"])
    assert await store.publish(first, ["again"]) == 1
    with pytest.raises(VersionConflict, match=r"1\.3.*aaaa.*bbbb"):
        await store.publish(other, ["second"])
    newest = await store.newer_than(None, FAR_S)
    assert newest is not None
    assert newest.handles == ["first"]
