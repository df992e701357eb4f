"""Weights by broadcast in a process group of learner ranks and engine workers: the fastest wires, fixed membership.

An update is one exchange, the same calls on every rank:

    say         rank 0: version, layout, probe; every worker compares them with its model
    agree       all, or no byte is sent
    broadcast   bucket b with its checksum, from train rank b mod N; every worker keeps a copy
    agree       all copies are whole, or nobody applies anything

What must hold: gathers are over before the first send (`publisher.take_snapshot`); a worker touches its model only
after all workers of all engines hold the whole version, so that a death on the way leaves each replica with its old
weights. The price is one copy of the weights in each worker's host memory while it is received and applied.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
import xxhash

from asyncrl.buffer.records import Version
from asyncrl.errors import ManifestMismatch
from asyncrl.weights.manifest import (
    Bucket,
    Manifest,
    Parameters,
    Probe,
    TensorEntry,
    bucket_sizes,
    check_buckets,
    check_parameters,
)
from asyncrl.weights.publisher import Snapshot
from asyncrl.weights.transports.peers import Peers, Rendezvous

CHECKSUM_BYTES = 16


class CollectiveRank(Protocol):
    """One learner rank. `snapshot` is the newest that `publisher.take_snapshot` left, `peers` what `join` made; None at
    first."""

    rank: int
    snapshot: Snapshot | None
    peers: Peers | None


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says before the bytes; together with the checksums that travel with them, the manifest."""

    version: Version
    tensors: tuple[TensorEntry, ...]
    probe: Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A whole version in host memory, checked against the model and its checksums, and not yet applied."""

    manifest: Manifest
    buckets: list[torch.Tensor]


# -- learner ranks ---------------------------------------------------------------------------------------------------


def join_collective(worker: CollectiveRank, rendezvous: Rendezvous, device: str = "cpu") -> None:
    """Takes this rank's place in a new group; the old one, if any, is left. Returns when all are there.

    Call it on every learner rank, and `init_weight_transfer_engine` on every engine, at the same time; `device` is
    where the bytes are sent from. CollectiveError after `rendezvous.timeout_s`.
    """
    leave_collective(worker)
    worker.peers = Peers.join(rendezvous, rank=worker.rank, device=torch.device(device))


def leave_collective(worker: CollectiveRank) -> None:
    """Leaves the group; idempotent. An exchange that another rank is in ends with CollectiveError there."""
    peers, worker.peers = worker.peers, None
    if peers is not None:
        peers.close()


def broadcast_snapshot(worker: CollectiveRank, version: Version) -> None:
    """Sends the newest snapshot as `version`; returns when every engine worker holds it whole.

    After `take_snapshot` has returned, on every learner rank; on CPUs it may run beside the rank's steps, on GPUs not:
    two NCCL groups of one process whose calls interleave differently on two ranks wait for each other. CollectiveError
    when a peer is dead, missing or late; UpdateRefused when an engine's model is another, and the group stays usable.
    """
    peers, snapshot = worker.peers, worker.snapshot
    assert peers is not None, "join_collective() comes first"
    assert snapshot is not None, "take_snapshot() comes first"
    announcement = Announcement(version=version, tensors=snapshot.entries, probe=snapshot.probe)
    peers.exchange(lambda peers: _send(peers, announcement, snapshot), what=f"broadcasting weights {version}")


def _send(peers: Peers, announcement: Announcement, snapshot: Snapshot) -> None:
    peers.say(msgspec.msgpack.encode(announcement))
    peers.agree(None, what=f"weights {announcement.version}")
    for index, nbytes in bucket_sizes(snapshot.entries).items():
        message = torch.empty(nbytes + CHECKSUM_BYTES, dtype=torch.uint8, device=peers.device)
        own = snapshot.buckets.get(index)
        if own is not None:
            message[:nbytes].copy_(torch.from_numpy(own))
            checksum = bytearray(xxhash.xxh3_128_digest(own.data))
            message[nbytes:].copy_(torch.frombuffer(checksum, dtype=torch.uint8))
        peers.broadcast(message, root=index % peers.train_world_size)
    peers.agree(None, what=f"the bytes of weights {announcement.version}")


# -- engine workers --------------------------------------------------------------------------------------------------


def receive_snapshot(peers: Peers, *, expected: Parameters) -> Received:
    """One version, whole and checked, on one engine worker; the counterpart of `broadcast_snapshot`.

    ManifestMismatch when the version does not fit `expected`, before a byte is sent, or when bytes arrive damaged;
    UpdateRefused when another worker found that; CollectiveError when a peer is dead, missing or late. Whatever is
    raised, the model was not touched.
    """
    return peers.exchange(lambda peers: _receive(peers, expected), what="receiving weights")


def _receive(peers: Peers, expected: Parameters) -> Received:
    announcement = msgspec.msgpack.decode(peers.say(b""), type=Announcement)
    manifest = Manifest(
        version=announcement.version, previous=None, tensors=announcement.tensors, buckets=(), probe=announcement.probe
    )
    peers.agree(_refusal(lambda: check_parameters(manifest, expected)), what=f"weights {manifest.version}")
    buckets: list[torch.Tensor] = []
    checksums: list[str] = []
    for index, nbytes in bucket_sizes(manifest.tensors).items():
        message = torch.empty(nbytes + CHECKSUM_BYTES, dtype=torch.uint8, device=peers.device)
        peers.broadcast(message, root=index % peers.train_world_size)
        message = message.cpu()
        buckets.append(message[:nbytes])
        checksums.append(message[nbytes:].numpy().tobytes().hex())
    whole = Manifest(
        version=manifest.version,
        previous=None,
        tensors=manifest.tensors,
        buckets=tuple(
            Bucket(nbytes=bucket.nbytes, checksum=checksum) for bucket, checksum in zip(buckets, checksums, strict=True)
        ),
        probe=manifest.probe,
    )
    damaged = _refusal(lambda: check_buckets(whole, [bucket.numpy().data for bucket in buckets]))
    peers.agree(damaged, what=f"the bytes of weights {manifest.version}")
    return Received(manifest=whole, buckets=buckets)


def _refusal(check: Callable[[], None]) -> ManifestMismatch | None:
    try:
        check()
    except ManifestMismatch as error:
        return error
    return None
