"""Sends weights by broadcast in a process group of learner ranks and engine workers.

Broadcast uses the fastest links, but the members of the group are fixed. An update is one exchange, in which every rank
makes the same calls:

    say         rank 0 sends version, layout and probe; every worker compares them with its model
    agree       if any rank refuses, no byte is sent
    broadcast   train rank b mod N sends bucket b with its checksum; every worker keeps a copy
    agree       if any copy is damaged, no worker applies anything

Invariants: all gathers are over before the first send (`publisher.own_buckets`). A worker changes its model only
after all workers of all engines hold the whole version, so that a rank's death during the exchange leaves every replica
with its old weights. For this, each worker needs host memory for one copy of the weights until they are applied.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from asyncrl.common.version import Version
from asyncrl.errors import ManifestMismatch
from asyncrl.weights.manifest import Bucket, Manifest, Parameters, bucket_sizes, check_buckets, check_parameters
from asyncrl.weights.publisher import Snapshot
from asyncrl.weights.transports.peers import Peers, Rendezvous

CHECKSUM_BYTES = 16
"""Size of an xxh3-128 checksum, which is sent after the bytes of its bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A whole version in host memory. Its layout fits the model and its checksums are right; it is not yet applied."""

    manifest: Manifest
    buckets: list[torch.Tensor]


# -- learner ranks ---------------------------------------------------------------------------------------------------


class Broadcasts:
    """One learner rank's side. `peers` is the group that the rank has joined, None at first."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.peers: Peers | None = None

    def join(self, rendezvous: Rendezvous, device: str = "cpu") -> None:
        """Joins a new group with this rank, and leaves the old one if there is one. Returns when all ranks have joined.

        Call it on every learner rank, and `init_weight_transfer_engine` on every engine, at the same time. The bytes
        are sent from `device`. Raises CollectiveError after `rendezvous.timeout_s`.
        """
        self.leave()
        self.peers = Peers.join(rendezvous, rank=self._rank, device=torch.device(device))

    def leave(self) -> None:
        """Leaves the group. Does nothing without one. Ranks that are in an exchange get CollectiveError."""
        peers, self.peers = self.peers, None
        if peers is not None:
            peers.close()

    def send(self, snapshot: Snapshot, version: Version) -> None:
        """Sends the snapshot as `version`. Returns when every engine worker holds all of it.

        Call it on every learner rank after each has its snapshot. On CPUs it may run at the same time as the rank's
        steps. On GPUs it may not: two NCCL groups of one process deadlock when two ranks interleave their calls
        differently. Raises CollectiveError when a peer is dead, missing or late. Raises UpdateRefused when an engine
        has another model; the group stays usable then.
        """
        assert self.peers is not None, "call join() first"
        self.peers.exchange(lambda peers: _send(peers, snapshot, version), what=f"broadcasting weights {version}")


def _send(peers: Peers, snapshot: Snapshot, version: Version) -> None:
    # The checksums of the buckets follow with the bytes, because a rank knows only those of its own buckets.
    manifest = Manifest(version=version, previous=None, tensors=snapshot.entries, buckets=(), probe=snapshot.probe)
    peers.say(msgspec.msgpack.encode(manifest))
    peers.agree(None, what=f"weights {version}")
    for index, nbytes in bucket_sizes(snapshot.entries).items():
        message = torch.empty(nbytes + CHECKSUM_BYTES, dtype=torch.uint8, device=peers.device)
        own = snapshot.buckets.get(index)
        if own is not None:
            message[:nbytes].copy_(torch.from_numpy(own))
            checksum = bytearray(xxhash.xxh3_128_digest(own.data))
            message[nbytes:].copy_(torch.frombuffer(checksum, dtype=torch.uint8))
        peers.broadcast(message, root=index % peers.train_world_size)
    peers.agree(None, what=f"the bytes of weights {version}")


# -- engine workers --------------------------------------------------------------------------------------------------


def receive_snapshot(peers: Peers, *, expected: Parameters) -> Received:
    """Receives one version on one engine worker, whole and checked. It is the counterpart of `Broadcasts.send`.

    Raises ManifestMismatch when the version does not fit `expected` (before any byte is sent), or when bytes arrive
    damaged. Raises UpdateRefused when another worker has found such a mismatch, and CollectiveError when a peer is
    dead, missing or late. The model is unchanged in all cases.
    """

    return peers.exchange(lambda peers: _receive(peers, expected), what="receiving weights")


def _receive(peers: Peers, expected: Parameters) -> Received:
    manifest = msgspec.msgpack.decode(peers.say(b""), type=Manifest)
    peers.agree(_refusal(lambda: check_parameters(manifest, expected)), what=f"weights {manifest.version}")
    buckets: list[torch.Tensor] = []
    described: list[Bucket] = []
    for index, nbytes in bucket_sizes(manifest.tensors).items():
        message = torch.empty(nbytes + CHECKSUM_BYTES, dtype=torch.uint8, device=peers.device)
        peers.broadcast(message, root=index % peers.train_world_size)
        message = message.cpu()
        buckets.append(message[:nbytes])
        described.append(Bucket(nbytes=nbytes, checksum=message[nbytes:].numpy().tobytes().hex()))
    whole = msgspec.structs.replace(manifest, buckets=tuple(described))
    damaged = _refusal(lambda: check_buckets(whole, [bucket.numpy().data for bucket in buckets]))
    peers.agree(damaged, what=f"the bytes of weights {manifest.version}")
    return Received(manifest=whole, buckets=buckets)


def _refusal(check: Callable[[], None]) -> ManifestMismatch | None:
    try:
        check()
    except ManifestMismatch as error:
        return error
    return None
