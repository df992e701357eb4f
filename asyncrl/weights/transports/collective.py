"""Sends weights by broadcast in a process group of learner ranks and engine workers, for a synchronous loop.
`broadcast.py` uses the parts of an exchange in an asynchronous run.

Broadcast uses the fastest links, but the members of the group are fixed. An update is one exchange, in which every rank
makes the same calls:

    say         each train rank describes its buckets, with their checksums; rank 0 also sends version and layout
    agree       every worker compares them with its model; if any rank refuses, no byte is sent
    broadcast   each train rank sends its buckets; every worker keeps a copy
    agree       if any copy is damaged, no worker applies anything

Invariants: the snapshots are taken before the first send. A worker changes its model only after all workers of all
engines hold the whole version, so that a rank's death during the exchange leaves every replica with its old weights.
For this, each worker needs host memory for one copy of the weights until they are applied.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from asyncrl.common.version import Version
from asyncrl.errors import ManifestMismatch
from asyncrl.weights.manifest import Bucket, Bytes, Manifest, Parameters, Probe, check_manifest, put_bucket
from asyncrl.weights.publisher import Snapshot
from asyncrl.weights.transports.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The flat buffer of a version in host memory. Its layout fits the model and its checksums are right; it is not yet
    applied."""

    manifest: Manifest
    flat: torch.Tensor


# -- learner ranks ---------------------------------------------------------------------------------------------------


def send_snapshot(peers: Peers, snapshot: Snapshot, version: Version) -> None:
    """Sends one learner rank's snapshot as `version`. Returns when every engine worker holds all of it.

    Call it on every learner rank after each has its snapshot. On CPUs it may run at the same time as the rank's steps.
    On GPUs it may not: two NCCL groups of one process deadlock when two ranks interleave their calls differently.
    Raises CollectiveError when a peer is dead, missing or late. Raises UpdateRefused when an engine has another model
    or got damaged bytes; the group stays usable then.
    """
    peers.exchange(lambda peers: _send(peers, snapshot, version), what=f"broadcasting weights {version}")


def _send(peers: Peers, snapshot: Snapshot, version: Version) -> None:
    own = snapshot.described()
    no_probe = Probe(tokens=(), logprobs=())  # the caller of a synchronous loop compares log-probs itself
    empty = Manifest(version=version, tensors=snapshot.entries, buckets=(), probe=no_probe)
    _, by_rank = descriptions(peers, head=msgspec.msgpack.encode(empty), own=own)
    peers.agree(None, what=f"weights {version}")
    send_buckets(peers, by_rank, snapshot.buckets)
    peers.agree(None, what=f"the bytes of weights {version}")


# -- the parts of an exchange, in their order ------------------------------------------------------------------------


def descriptions(
    peers: Peers, *, head: bytes = b"", own: Sequence[Bucket] = ()
) -> tuple[bytes, list[tuple[Bucket, ...]]]:
    """Tells all members what will be sent. Rank 0 gives `head` (version and layout), and each train rank describes its
    `own` buckets. Returns the head, and the buckets of each train rank."""
    head = peers.say(head, root=0)
    return head, [
        msgspec.msgpack.decode(peers.say(msgspec.msgpack.encode(own), root=rank), type=tuple[Bucket, ...])
        for rank in range(peers.train_world_size)
    ]


def send_buckets(peers: Peers, by_rank: Sequence[Sequence[Bucket]], parts: Sequence[Bytes]) -> None:
    """Broadcasts this train rank's `parts`, and takes part in the broadcasts of the others if the group needs it."""
    for rank, buckets in enumerate(by_rank):
        if not peers.receives(rank):
            continue
        for index, bucket in enumerate(buckets):
            if rank == peers.rank:
                message = torch.from_numpy(parts[index]).to(peers.device)
            else:
                message = torch.empty(bucket.nbytes, dtype=torch.uint8, device=peers.device)
            peers.broadcast(message, root=rank)


def received_buckets(peers: Peers, by_rank: Sequence[Sequence[Bucket]]) -> Iterator[Bytes]:
    """Yields the bytes of each bucket, in the order in which the train ranks send them."""
    for rank, buckets in enumerate(by_rank):
        for bucket in buckets:
            message = torch.empty(bucket.nbytes, dtype=torch.uint8, device=peers.device)
            peers.broadcast(message, root=rank)
            yield message.cpu().numpy()


# -- engine workers --------------------------------------------------------------------------------------------------


def receive_snapshot(peers: Peers, *, expected: Parameters) -> Received:
    """Receives one version on one engine worker, whole and checked. It is the counterpart of `send_snapshot`.

    Raises ManifestMismatch when the version does not fit `expected` (before any byte is sent), or when bytes arrive
    damaged. Raises UpdateRefused when another worker has found such a mismatch, and CollectiveError when a peer is
    dead, missing or late. The model is unchanged in all cases.
    """

    return peers.exchange(lambda peers: _receive(peers, expected), what="receiving weights")


def _receive(peers: Peers, expected: Parameters) -> Received:
    head, by_rank = descriptions(peers)
    buckets = tuple(bucket for buckets in by_rank for bucket in buckets)
    manifest = msgspec.structs.replace(msgspec.msgpack.decode(head, type=Manifest), buckets=buckets)
    peers.agree(_refusal(lambda: check_manifest(manifest, expected)), what=f"weights {manifest.version}")
    flat = torch.empty(manifest.flat_bytes, dtype=torch.uint8)
    damaged: ManifestMismatch | None = None
    for index, data in enumerate(received_buckets(peers, by_rank)):
        damaged = damaged or _refusal(partial(put_bucket, manifest, index, data, flat=flat.numpy()))
    peers.agree(damaged, what=f"the bytes of weights {manifest.version}")
    return Received(manifest=manifest, flat=flat)


def _refusal(check: Callable[[], None]) -> ManifestMismatch | None:
    try:
        check()
    except ManifestMismatch as error:
        return error
    return None
