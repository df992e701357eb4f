"""Broadcasts of a run when members die, are late or get damaged bytes: the others go on, and the lost one catches up.

Ranks and replicas are processes, over Ray, with real connections between them.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from local_ray import end_actor, local_ray

from asyncrl.common.version import Version
from asyncrl.weights.manifest import Bucket, Bytes, Manifest, Piece, Probe, TensorEntry, checksum
from asyncrl.weights.staging import Part, StagedWeights
from asyncrl.weights.store import WeightStore
from asyncrl.weights.transports import broadcast
from asyncrl.weights.transports.broadcast import CollectiveTransport
from asyncrl.weights.transports.interfaces import BroadcastEnd, Shipment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = 2
BUCKETS = 8
"""Buckets of each rank."""
BUCKET_BYTES = 2**20
LATE_S = 6.0
"""Deadline of a broadcast."""
FAR_S = 60.0
RANK_BYTES = BUCKETS * BUCKET_BYTES
ENTRY = TensorEntry(name="a", shape=(RANKS * RANK_BYTES,), dtype="uint8", offset=0, nbytes=RANKS * RANK_BYTES)


def transport(store: Any, *, staged_at: Path | None = None) -> CollectiveTransport:
    return CollectiveTransport(lambda: store, timeout_s=LATE_S, call_timeout_s=30.0, staged_at=staged_at)


def bytes_of(version: Version) -> Bytes:
    """Returns the flat buffer of a version."""
    return np.random.default_rng([version.incarnation, version.step]).integers(0, 256, RANKS * RANK_BYTES, np.uint8)


class Rank:
    """A learner rank in its own process."""

    def __init__(self, store: Any, rank: int) -> None:
        self.rank = rank
        self.sender = transport(store).sender(rank, RANKS)

    def send(self, version: Version) -> tuple[list[Bucket], list[Any]]:
        start = self.rank * RANK_BYTES
        own = bytes_of(version)[start : start + RANK_BYTES]
        parts = [own[at : at + BUCKET_BYTES] for at in range(0, RANK_BYTES, BUCKET_BYTES)]
        buckets = [
            Bucket(pieces=(Piece(start + index * BUCKET_BYTES, BUCKET_BYTES),), checksum=checksum([part]))
            for index, part in enumerate(parts)
        ]
        return buckets, self.sender.send(Shipment(version=version, parts=parts, described=buckets))

    def die_in_the_next_broadcast(self) -> None:
        send = broadcast.send_buckets

        def die_half_way(peers: Any, by_rank: Any, parts: Any) -> None:
            send(peers, [by_rank[0], by_rank[1][: BUCKETS // 2]], parts)
            os.kill(os.getpid(), signal.SIGKILL)

        broadcast.send_buckets = die_half_way


class Replica:
    """A replica's process, without an engine. `node` has the pointer to the memory of its node."""

    def __init__(self, store: Any, node: str) -> None:
        self.node = node
        self.transport = transport(store, staged_at=Path(node, "pointer"))
        self.staged = StagedWeights(Path(node, "pointer"))
        self.number = 0
        self.ends: list[BroadcastEnd] = []

    async def take_part(self) -> None:
        await self.transport.take_part("replica", ended=self.ends.append)

    async def last_ends(self, count: int) -> list[tuple[str, int]]:
        """Returns the outcome and the bytes of the last broadcasts, which must have taken a plausible time."""
        assert all((end.outcome == "absent") == (end.seconds == 0.0) for end in self.ends)
        assert all(end.seconds < 2 * LATE_S for end in self.ends)
        return [(end.outcome, end.nbytes) for end in self.ends[-count:]]

    async def fetch(self, manifest: Manifest, handles: list[Any]) -> tuple[str, int]:
        """Stages a version, as `WeightUpdates` does. Returns its digest, and how many buckets had to be fetched."""
        fetched = 0

        async def receive(part: Part) -> Bytes:
            nonlocal fetched
            fetched += 1
            return await self.transport.receive(handles[part.bucket], timeout_s=FAR_S)

        await self.staged.stage(manifest, receive)
        self.transport.staged(manifest.version)
        digest = checksum([self.staged.flat])
        self.staged.release()
        return digest, fetched

    async def where(self) -> tuple[str, int]:
        """Returns the node, and the number of the memory in which weights are staged."""
        return self.node, os.stat(self.staged.path).st_ino

    async def pid(self) -> int:
        return os.getpid()

    async def sabotage(self, what: str) -> None:
        """The third bucket of the next broadcast arrives damaged, or it kills or stops the process."""
        verify = broadcast.checksum
        self.number = 0

        def verify_third(parts: list[Bytes]) -> str:
            self.number += 1
            if self.number == 3:
                broadcast.checksum = verify
                if what == "damage":
                    parts[0][5] ^= 1
                else:
                    os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
            return verify(parts)

        broadcast.checksum = verify_third


class World:
    """Two ranks, two replicas and their weight store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = ray.remote(WeightStore).options(num_cpus=0, max_concurrency=1000).remote()
        self.step, self.incarnation = 0, 1
        self.ranks = [self.new_rank(rank) for rank in range(RANKS)]
        self.replicas = [self.new_replica() for _ in range(2)]

    def new_rank(self, rank: int) -> Any:
        return ray.remote(Rank).options(num_cpus=0).remote(self.store, rank)

    def new_replica(self, node: str | None = None) -> Any:
        """Starts a replica, by default on a node of its own."""
        node = node or tempfile.mkdtemp(dir=self.folder)
        replica = ray.remote(Replica).options(num_cpus=0, max_concurrency=100).remote(self.store, node)
        replica.take_part.remote()
        return replica

    def there(self) -> dict[str, int | None]:
        found: dict[str, int | None] = ray.get(self.store.present.remote((), 1.0))
        return found

    def wait_for(self, replicas: int) -> None:
        """Waits until this many replicas are there."""
        deadline_s = time.monotonic() + FAR_S
        while len(self.there()) != replicas:
            assert time.monotonic() < deadline_s, self.there()
            time.sleep(0.05)

    def send(self) -> tuple[Version, list[Any]]:
        """Begins to send the next version. Returns the references of the ranks' answers."""
        self.step += 1
        version = Version(self.incarnation, self.step)
        return version, [rank.send.remote(version) for rank in self.ranks]

    def publish(self) -> tuple[Manifest, list[Any]]:
        """Sends the next version and offers it."""
        version, answers = self.send()
        by_rank = ray.get(answers, timeout=FAR_S)
        manifest = Manifest(
            version=version,
            tensors=(ENTRY,),
            buckets=tuple(bucket for buckets, _ in by_rank for bucket in buckets),
            probe=Probe(tokens=(), logprobs=()),
        )
        handles = [handle for _, each in by_rank for handle in each]
        ray.get(self.store.publish.remote(manifest, handles))
        return manifest, handles

    def fetched(self, published: tuple[Manifest, list[Any]], *replicas: Any) -> list[int]:
        """Lets replicas stage a version. Returns how many buckets each of them had to fetch."""
        manifest, handles = published
        outcomes: list[tuple[str, int]] = ray.get(
            [each.fetch.remote(manifest, handles) for each in replicas], timeout=FAR_S
        )
        assert {digest for digest, _ in outcomes} == {checksum([bytes_of(manifest.version)])}, "the learner's bytes"
        return [fetched for _, fetched in outcomes]

    def epoch(self) -> int:
        """Returns the number of the membership, in which two replicas must be."""
        self.wait_for(2)
        [epoch] = {*self.there().values()}
        assert epoch is not None
        return epoch


@pytest.fixture(scope="module")
def running_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import a test module
    with local_ray(cpus=2, object_store_mb=300):
        yield World(tmp_path_factory.mktemp("nodes"))


@pytest.fixture
def world(running_world: World) -> World:
    """The world, with both replicas in one membership."""
    running_world.wait_for(2)
    assert running_world.fetched(running_world.publish(), *running_world.replicas) == [0, 0]
    return running_world


def test_a_broadcast_needs_no_object_store_and_a_membership_stays_as_long_as_its_members(world: World) -> None:
    epoch = world.epoch()
    for _ in range(2):
        assert world.fetched(world.publish(), *world.replicas) == [0, 0]
    assert world.epoch() == epoch
    node, memory = ray.get(world.replicas[1].where.remote())
    third = world.new_replica(node)
    try:
        world.wait_for(3)
        assert world.fetched(world.publish(), *world.replicas, third) == [0, 0, 0], "it joins the next membership"
        assert ray.get(third.where.remote()) == (node, memory), "both replicas of a node receive into one memory"
        assert {*world.there().values()} == {epoch + 1}
    finally:
        end_actor(third)
    assert world.fetched(world.publish(), *world.replicas) == [0, 0]
    assert world.epoch() == epoch + 2


@pytest.mark.fault("F4")
def test_a_replica_that_starts_after_a_broadcast_gets_its_version_through_the_object_store(world: World) -> None:
    published = world.publish()
    newcomer = world.new_replica()
    try:
        assert world.fetched(published, newcomer, *world.replicas) == [RANKS * BUCKETS, 0, 0]
        world.wait_for(3)
        assert ray.get(newcomer.last_ends.remote(9)) == [("absent", 0)]
    finally:
        end_actor(newcomer)


@pytest.mark.fault("F11")
def test_a_replica_that_is_killed_in_a_broadcast_leaves_and_the_others_get_the_version(world: World) -> None:
    epoch = world.epoch()
    survivor, dies = world.replicas
    ray.get(dies.sabotage.remote("die"))
    started_s = time.monotonic()
    published = world.publish()
    assert time.monotonic() - started_s < LATE_S, "its death ends the broadcast before the deadline"
    assert 0 < world.fetched(published, survivor)[0] < RANKS * BUCKETS, "what had arrived is not fetched"
    world.wait_for(1)
    assert world.fetched(world.publish(), survivor) == [0], "a membership without it"
    world.replicas[1] = world.new_replica()
    assert world.fetched(published, world.replicas[1]) == [RANKS * BUCKETS]
    world.wait_for(2)
    assert world.fetched(world.publish(), *world.replicas) == [0, 0]
    assert world.epoch() == epoch + 2


@pytest.mark.fault("F12")
def test_a_replica_that_gets_a_damaged_bucket_fetches_only_that_one(world: World) -> None:
    epoch = world.epoch()
    ray.get(world.replicas[1].sabotage.remote("damage"))
    published = world.publish()
    there = ray.get(world.store.present.remote(("a replica that never comes",), 2.0))
    assert list(there.values()) == [epoch], "the other one stays, and this one first gets the bytes"
    assert world.fetched(published, *world.replicas) == [0, 1]
    world.wait_for(2)
    assert world.fetched(world.publish(), *world.replicas) == [0, 0]
    whole = ("received", RANKS * RANK_BYTES)
    assert ray.get([each.last_ends.remote(2) for each in world.replicas]) == [
        [whole, whole],
        [("missed", RANKS * RANK_BYTES - BUCKET_BYTES), whole],
    ]
    assert world.epoch() == epoch + 1


@pytest.mark.fault("F11")
def test_a_replica_that_is_late_leaves_at_the_deadline_and_joins_again_when_it_has_caught_up(world: World) -> None:
    epoch = world.epoch()
    prompt, slow = world.replicas
    pid = ray.get(slow.pid.remote())
    ray.get(slow.sabotage.remote("stop"))
    try:
        started_s = time.monotonic()
        published = world.publish()
        assert time.monotonic() - started_s > LATE_S / 2, "the ranks wait for it"
        assert 0 < world.fetched(published, prompt)[0] < RANKS * BUCKETS
        world.wait_for(1)
        published = world.publish()
        assert world.fetched(published, prompt) == [0], "a membership without it"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert world.fetched(published, slow) == [RANKS * BUCKETS]
    world.wait_for(2)
    assert world.fetched(world.publish(), *world.replicas) == [0, 0]
    assert world.epoch() == epoch + 2


@pytest.mark.fault("F11")
def test_a_replica_that_does_not_answer_is_no_member(world: World) -> None:
    epoch = world.epoch()
    prompt, stopped = world.replicas
    pid = ray.get(stopped.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        assert world.fetched(world.publish(), prompt) == [0]
        assert time.monotonic() - started_s < LATE_S, "the broadcast does not wait for it"
        assert world.there() == dict.fromkeys(world.there(), epoch + 1)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.fault("F38")
def test_a_rank_that_is_killed_in_a_broadcast_holds_up_no_replica_and_the_next_ranks_begin_a_membership(
    world: World,
) -> None:
    epoch = world.epoch()
    ray.get(world.ranks[1].die_in_the_next_broadcast.remote())
    started_s = time.monotonic()
    _, [survivor, dead] = world.send()
    ray.get(survivor, timeout=FAR_S)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(dead, timeout=FAR_S)
    assert time.monotonic() - started_s < LATE_S, "its death ends the broadcast before the deadline"
    end_actor(world.ranks[0])
    world.incarnation += 1
    world.ranks = [world.new_rank(rank) for rank in range(RANKS)]
    assert world.fetched(world.publish(), *world.replicas) == [RANKS * BUCKETS] * 2
    world.wait_for(2)
    assert world.fetched(world.publish(), *world.replicas) == [0, 0]
    assert world.epoch() > epoch
