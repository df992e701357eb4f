"""Sends weights by broadcast to the replicas of a run that wait for them, for `weights.transport: collective`.

The weight store keeps the membership (`asyncrl/weights/memberships.py`). Learner ranks and replicas of a membership are
one process group (`peers.py`). For each version:

    rank 0         asks which replicas wait, and announces the broadcast; if the members have changed, in a new group
    all members    join the group, unless they have joined it for an earlier version
    train ranks    describe their buckets with checksums, and send them
    replicas       verify the bytes, in a thread; one replica of each node puts them into the node's memory
    all members    wait until all replicas have verified all bytes

Then the manifest is offered, and a replica finds the bytes in its node's memory for staged weights. It asks for the
bytes that it lacks, and the ranks put them into the object store. So a replica that has just started, died or was late
holds up one broadcast at most, until `weights.load_timeout_s`, and no broadcast that fails delays training or loses a
version.

A group that has broken is not used again. A replica of this group takes part in broadcasts again only when it has the
whole version of the broken broadcast, so a replica that cannot receive in time stays out.

All members send and receive in the memory of their host, with gloo, also where ranks and engines have GPUs.
"""

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import ray
import torch

from asyncrl.common.version import Version
from asyncrl.data_plane.calls import answer, finished, patiently
from asyncrl.errors import (
    ActorGone,
    CallTimeout,
    CollectiveError,
    FetchFailed,
    UpdateRefused,
    WeightError,
    WeightsDamaged,
)
from asyncrl.weights.manifest import Bytes, checksum, place
from asyncrl.weights.memberships import Broadcast
from asyncrl.weights.node_memory import BroadcastRoom
from asyncrl.weights.transports.collective import descriptions, received_buckets, send_buckets
from asyncrl.weights.transports.interfaces import BroadcastEnd, Sender, Shipment, Transport
from asyncrl.weights.transports.object_store import ObjectStoreTransport
from asyncrl.weights.transports.peers import Peers, Rendezvous

logger = logging.getLogger(__name__)

PRESENCE_S = 2.0
"""Longest time that rank 0 waits for the replicas that it asks, seconds. A living replica answers within
milliseconds."""
WAIT_S = 20.0
"""Longest time that one call of the weight store waits, seconds: for a broadcast or for requests. The call is
repeated."""
PAUSE_S = 1.0
"""Seconds before a rank asks again for requests, after weights were not put into the object store."""
HELD_VERSIONS = 2
"""Number of versions that a rank can still put into the object store: those of its snapshots, until their memory is
reused."""
CPU = torch.device("cpu")


class SentBucket(msgspec.Struct, frozen=True, kw_only=True):
    """Handle of a bucket: number `index` (from 0 on) of those that learner rank `rank` has sent of `version`."""

    version: Version
    rank: int
    index: int


class Group:
    """This process's connection to the process group of a membership: a learner rank or a replica joins it when a
    broadcast needs it."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._peers: Peers | None = None
        self.epoch: int | None = None
        """The membership whose group this process has joined; None if it is in no group."""
        self.members: tuple[str, ...] = ()

    def exchange(
        self,
        function: Callable[[Peers], None],
        broadcast: Broadcast,
        *,
        rank: int,
        listener: socket.socket | None = None,
    ) -> None:
        """Runs `function` in the group of the broadcast. Joins it first if needed. Raises CollectiveError when a peer
        is dead, missing or late; then this process is in no group. After the other errors of `function`, UpdateRefused
        and WeightsDamaged, it stays in the group."""
        if broadcast.epoch != self.epoch or self._peers is None:
            self.leave()
            if not broadcast.port:
                raise CollectiveError(
                    f"this process has left the group of membership {broadcast.epoch}; it joins the next one"
                )
            rendezvous = Rendezvous(
                host=broadcast.host,
                port=broadcast.port,
                world_size=broadcast.ranks + len(broadcast.members),
                train_world_size=broadcast.ranks,
                timeout_s=self._timeout_s,
            )
            self._peers = Peers.join(rendezvous, rank=rank, device=CPU, listener=listener)
            self.epoch, self.members = broadcast.epoch, broadcast.members
        try:
            self._peers.exchange(function, what=f"the broadcast of weights {broadcast.version}")
        except (UpdateRefused, WeightsDamaged):
            raise  # all members have ended this exchange together, so the group stays usable
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leaves the group, if this process is in one."""
        peers, self._peers, self.epoch, self.members = self._peers, None, None, ()
        if peers is not None:
            peers.close()


# -- learner ranks ---------------------------------------------------------------------------------------------------


class CollectiveSender(Sender):
    """Sends a learner rank's shipments by broadcast, and keeps the process group between deliveries. A thread puts
    versions into the object store for replicas that lack bytes."""

    def __init__(self, store: Any, *, rank: int, ranks: int, timeout_s: float, call_timeout_s: float) -> None:
        self._store = store
        self._rank, self._ranks = rank, ranks
        self._timeout_s, self._call_timeout_s = timeout_s, call_timeout_s
        self._group = Group(timeout_s=timeout_s)
        self._number = 0  # of the last broadcast
        self._held: dict[Version, Shipment] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._answer_requests, name="requests for weights", daemon=True).start()

    def send(self, sent: Shipment) -> list[Any]:
        kept = [each for each in self._held if each != sent.version][1 - HELD_VERSIONS :]
        self._held = {each: self._held[each] for each in kept} | {sent.version: sent}
        try:
            self._broadcast(sent)
        except WeightError as error:
            logger.warning(
                "the broadcast of weights %s did not reach all replicas completely: %s; replicas that lack bytes get "
                "them through the object store",
                sent.version,
                error,
            )
        return [SentBucket(version=sent.version, rank=self._rank, index=index) for index in range(len(sent.parts))]

    def close(self) -> None:
        self._closed.set()
        self._group.leave()

    def _broadcast(self, sent: Shipment) -> None:
        """Broadcasts a shipment to the replicas of the membership, if it has any. Raises WeightError if a member is
        dead or late, or got damaged bytes."""
        started_s, version = time.monotonic(), sent.version
        broadcast, listener = self._announce(version) if self._rank == 0 else (self._announced(version), None)
        self._number = broadcast.number
        if not broadcast.members:
            self._group.leave()
            return

        def send(peers: Peers) -> None:
            _, by_rank = descriptions(peers, head=str(version).encode(), own=sent.described)
            send_buckets(peers, by_rank, sent.parts)
            peers.agree(None, what=f"the bytes of weights {version}")

        self._group.exchange(send, broadcast, rank=self._rank, listener=listener)
        logger.info(
            "weights %s were broadcast to %d replicas in %.2f s (membership %d)",
            version,
            len(broadcast.members),
            time.monotonic() - started_s,
            broadcast.epoch,
        )

    def _announce(self, version: Version) -> tuple[Broadcast, socket.socket | None]:
        """Asks which replicas wait for a broadcast, and announces it to them and to the ranks. Also returns the socket
        that listens for a new process group; None if no new group is needed."""
        there: dict[str, int | None] = self._asked(
            self._store.present.remote(self._group.members, PRESENCE_S), PRESENCE_S, "asking which replicas wait"
        )
        members = tuple(sorted(there))
        is_new = members != self._group.members or not {*there.values()} <= {self._group.epoch}
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        listener = socket.create_server((host, 0)) if is_new and members else None
        port = listener.getsockname()[1] if listener is not None else 0
        with contextlib.ExitStack() as closed_after_error:
            if listener is not None:
                closed_after_error.callback(listener.close)
            call = self._store.announce.remote(version, members, ranks=self._ranks, host=host, port=port, is_new=is_new)
            broadcast: Broadcast = self._asked(call, 0.0, "announcing a broadcast of weights")
            closed_after_error.pop_all()
        return broadcast, listener

    def _announced(self, version: Version) -> Broadcast:
        call = self._store.announced.remote(version, self._number, self._timeout_s)
        broadcast: Broadcast | None = self._asked(call, self._timeout_s, "waiting for a broadcast of weights")
        if broadcast is None:
            raise CollectiveError(
                f"rank 0 did not announce the broadcast of weights {version} to learner rank {self._rank} within "
                f"weights.load_timeout_s = {self._timeout_s:g} s"
            )
        return broadcast

    def _asked(self, ref: Any, wait_s: float, what: str) -> Any:
        return answer(ref, timeout_s=wait_s + self._call_timeout_s, what=what)

    # -- the thread that stores bytes for replicas that lack them ----------------------------------------------------

    def _answer_requests(self) -> None:
        """Puts versions for which replicas ask into the object store, until the weight store or this sender ends."""
        last = 0
        while not self._closed.is_set():
            try:
                ref = self._store.requests.remote(last, WAIT_S)
                for number, version in self._asked(ref, WAIT_S, "waiting for requests for weights"):
                    last = number
                    self._put(version)
            except ActorGone:
                return
            except Exception as error:
                if not self._closed.wait(PAUSE_S):
                    logger.error("weights were not put into the object store (%s: %s)", type(error).__name__, error)

    def _put(self, version: Version) -> None:
        if version not in self._held:
            return
        sent = self._held[version]
        handles = [ray.put(part) for part in sent.parts]
        if [bucket.checksum for bucket in sent.described] != [checksum([part]) for part in sent.parts]:
            return  # a newer snapshot has overwritten the memory; the replica gets the newer version
        self._asked(self._store.store_buckets.remote(version, self._rank, handles), 0.0, "offering stored weights")
        logger.info("weights %s were put into the object store, because a replica lacks bytes of them", version)


# -- replicas --------------------------------------------------------------------------------------------------------


class CollectiveTransport(Transport):
    """The transport by broadcast, in a learner rank or a replica. `store` returns the handle of the weight store. A
    broadcast, and joining a group for it, take `timeout_s` at most each. `staged_at` leads to the memory in which the
    replicas of the node stage weights. Ranks have none."""

    def __init__(
        self, store: Callable[[], Any], *, timeout_s: float, call_timeout_s: float, staged_at: Path | None = None
    ) -> None:
        self._open_store = store
        self._room = None if staged_at is None else BroadcastRoom(staged_at)
        self._timeout_s, self._call_timeout_s = timeout_s, call_timeout_s
        self._group = Group(timeout_s=timeout_s)
        self._arrived_bytes = 0  # of the last broadcast
        self._whole: Version | None = None
        """The newest version of which the replica has all bytes."""
        self._staged = asyncio.Event()

    @cached_property
    def _store(self) -> Any:
        """The handle of the weight store, looked up at the first use: before a run begins, there is no weight store."""
        return self._open_store()

    def sender(self, rank: int, ranks: int) -> CollectiveSender:
        return CollectiveSender(
            self._store, rank=rank, ranks=ranks, timeout_s=self._timeout_s, call_timeout_s=self._call_timeout_s
        )

    async def receive(self, handle: SentBucket, *, timeout_s: float) -> Bytes:
        """Fetches a bucket that did not arrive at this node by broadcast: asks the ranks to put it into the object
        store, and gets it from there."""
        deadline_s = time.monotonic() + timeout_s
        try:
            stored: list[Any] | None = await finished(
                self._store.stored_buckets.remote(handle.version, handle.rank, timeout_s),
                timeout_s=timeout_s + self._call_timeout_s,
                what="asking for weights",
            )
        except CallTimeout as error:
            raise FetchFailed(str(error)) from error
        if stored is None:
            raise FetchFailed(
                f"learner rank {handle.rank} did not put its bytes of weights {handle.version}, which were not "
                f"broadcast to this replica, into the object store within {timeout_s:.0f} s, or newer weights came"
            )
        left_s = max(0.0, deadline_s - time.monotonic())
        return await ObjectStoreTransport().receive(stored[handle.index], timeout_s=left_s)

    def staged(self, version: Version) -> None:
        self._whole = version
        self._staged.set()

    async def take_part(self, replica: str, *, ended: Callable[[BroadcastEnd], None]) -> None:
        assert self._room is not None, "ranks do not receive"
        own, number, room = f"{replica}-{uuid.uuid4().hex[:8]}", 0, self._room
        try:
            while True:
                broadcast = await self._next_broadcast(own, after=number)
                if broadcast is None:
                    continue
                number = broadcast.number
                if own not in broadcast.members:
                    self._group.leave()
                    ended(BroadcastEnd(outcome="absent"))
                    continue
                rank = broadcast.ranks + broadcast.members.index(own)
                started_s, outcome = time.monotonic(), "received"
                try:
                    await asyncio.to_thread(self._take, broadcast, rank, room)
                except WeightError as error:
                    outcome = "missed"
                    logger.warning("replica %s: %s; it gets the weights through the object store", replica, error)
                    self._group.leave()
                else:
                    epoch, came = broadcast.epoch, "came by broadcast"
                    if room.dropped:
                        outcome, came = "missed", "are fetched later, because engines of this node load others"
                    logger.info("replica %s: weights %s %s, membership %d", replica, broadcast.version, came, epoch)
                seconds = time.monotonic() - started_s
                ended(BroadcastEnd(outcome=outcome, nbytes=self._arrived_bytes, seconds=seconds))
                if self._group.epoch is None:
                    await self._until_whole(broadcast.version)
        except ActorGone:
            return  # the weight store has ended, and other calls of the replica notice it
        finally:
            self._group.leave()

    async def _next_broadcast(self, own: str, *, after: int) -> Broadcast | None:
        broadcast: Broadcast | None = await patiently(
            lambda: finished(
                self._store.next_broadcast.remote(own, self._group.epoch, after, WAIT_S),
                timeout_s=WAIT_S + self._call_timeout_s,
                what="waiting for a broadcast of weights",
            ),
            patience_s=math.inf,
        )
        return broadcast

    def _take(self, broadcast: Broadcast, rank: int, room: BroadcastRoom) -> None:
        """Receives and verifies a broadcast. Puts the bytes into the node's memory, unless another replica of the node
        does, or this memory is in use or missing (`room.dropped`)."""
        version = broadcast.version
        self._arrived_bytes = 0

        def take(peers: Peers) -> None:
            head, by_rank = descriptions(peers)
            if head != str(version).encode():
                raise CollectiveError(f"weights {head.decode()} arrived instead of {version}")
            expected = [(rank, index, bucket) for rank, each in enumerate(by_rank) for index, bucket in enumerate(each)]
            nbytes = max((piece.offset + piece.nbytes for _, _, each in expected for piece in each.pieces), default=0)
            damaged: WeightsDamaged | None = None
            with room.held(version, nbytes) as block:
                for (sender, index, bucket), data in zip(expected, received_buckets(peers, by_rank), strict=True):
                    if checksum([data]) != bucket.checksum:
                        damaged = WeightsDamaged(
                            f"bucket {index} of learner rank {sender} of weights {version} arrived damaged by broadcast"
                        )
                        continue
                    self._arrived_bytes += data.nbytes
                    if block is not None:
                        block.will_change()
                        place(bucket, data, flat=block.flat)
            peers.agree(damaged, what=f"the bytes of weights {version}")

        with contextlib.suppress(UpdateRefused):  # another replica got damaged bytes, and this one has all of them
            self._group.exchange(take, broadcast, rank=rank)

    async def _until_whole(self, version: Version) -> None:
        """Waits until the replica has all bytes of this version, or of a newer one."""
        while self._whole is None or self._whole < version:
            self._staged.clear()
            await self._staged.wait()
