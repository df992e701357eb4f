"""A learner rank's side of publication: a snapshot at the step boundary, its delivery beside the next step.

Gather first, send after: `take_snapshot` runs the collectives (every rank, the same order) and copies; `deliver` has
none and runs in a thread of its own. Bucket b is kept and delivered by rank b mod N, so no process carries all bytes.
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
    """One rank's model. `snapshot` keeps the newest one between its making and its delivery."""

    rank: int
    world_size: int
    snapshot: "Snapshot | None"

    def gather_weights(self) -> Iterable[tuple[str, torch.Tensor]]: ...
    def probe(self, sequences: Sequence[Sequence[int]]) -> list[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Whole weights at a step boundary: the buckets that this rank keeps, by index, and what every rank knows."""

    entries: tuple[TensorEntry, ...]
    buckets: dict[int, Bytes]
    probe: Probe


class DeliveredBucket(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket under way: its index, its description for the manifest, and the transport's handle."""

    index: int
    bucket: Bucket
    handle: Any


def take_snapshot(
    model: RankModel, entries: Sequence[TensorEntry], probe_tokens: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Copies this rank's buckets out of the full weights; the probe's log-probs under those very weights."""
    by_name = {entry.name: entry for entry in entries}
    # Fresh memory every time: the previous snapshot may still be on its way.
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
    """Checksums and sends this rank's buckets of the newest snapshot."""
    snapshot = model.snapshot
    assert snapshot is not None, "take_snapshot() comes first"
    return [
        DeliveredBucket(
            index=index,
            bucket=Bucket(nbytes=data.nbytes, checksum=checksum(data.data)),
            handle=transport.send(data),
        )
        for index, data in snapshot.buckets.items()
    ]
