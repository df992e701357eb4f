"""A learner rank's part of a publication: takes a snapshot at a step boundary and delivers it during the next step.

`take_snapshot` runs the collectives (on every rank, in the same order) and copies the weights. `deliver` runs no
collective and has a thread of its own. Rank b mod N keeps and delivers bucket b, so that no process carries all bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from asyncrl.weights.manifest import Bucket, Probe, TensorEntry, bucket_sizes, checksum
from asyncrl.weights.transports.interfaces import Transport

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class RankModel(Protocol):
    """One rank's model. `snapshot` is the newest snapshot; it is kept until the next one replaces it."""

    rank: int
    world_size: int
    snapshot: "Snapshot | None"

    def gather_weights(self) -> Iterable[tuple[str, torch.Tensor]]: ...
    def probe(self, sequences: Sequence[Sequence[int]]) -> list[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Whole weights at a step boundary: the buckets that this rank keeps, by index. Layout and probe are the same on
    every rank."""

    entries: tuple[TensorEntry, ...]
    buckets: dict[int, Bytes]
    probe: Probe


class DeliveredBucket(msgspec.Struct, frozen=True, kw_only=True):
    """One delivered bucket: its index, its description for the manifest, and the transport's handle."""

    index: int
    bucket: Bucket
    handle: Any


def take_snapshot(
    model: RankModel, entries: Sequence[TensorEntry], probe_tokens: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Copies this rank's buckets from the gathered weights. Returns the probe's log-probs (nats) under them."""
    by_name = {entry.name: entry for entry in entries}
    # New memory for every snapshot, because the previous one may still be in delivery.
    buckets = {
        index: np.zeros(nbytes, dtype=np.uint8)
        for index, nbytes in bucket_sizes(entries).items()
        if index % model.world_size == model.rank
    }
    for name, tensor in model.gather_weights():
        entry = by_name[name]
        bucket = buckets.get(entry.bucket)
        if bucket is not None:
            flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            bucket[entry.offset : entry.offset + entry.nbytes] = flat
    logprobs = [row.tolist() for row in model.probe(probe_tokens)]
    probe = Probe(tokens=tuple(map(tuple, probe_tokens)), logprobs=tuple(map(tuple, logprobs)))
    model.snapshot = Snapshot(entries=tuple(entries), buckets=buckets, probe=probe)
    return logprobs


def deliver(model: RankModel, transport: Transport) -> list[DeliveredBucket]:
    """Computes checksums of this rank's buckets of the newest snapshot, and sends the buckets."""
    snapshot = model.snapshot
    assert snapshot is not None, "call take_snapshot() first"
    return [
        DeliveredBucket(
            index=index,
            bucket=Bucket(nbytes=data.nbytes, checksum=checksum(data.data)),
            handle=transport.send(data),
        )
        for index, data in snapshot.buckets.items()
    ]
