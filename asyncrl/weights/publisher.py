"""A learner rank's part of a publication: takes a snapshot at a step boundary and delivers it during the next step.

`own_buckets` exhausts the gather of the weights, which is a collective (on every rank, in the same order), and copies
them. `deliver` runs no collective and has a thread of its own. Rank b mod N keeps and delivers bucket b, so that no
process carries all bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from asyncrl.weights.manifest import Bucket, Probe, TensorEntry, bucket_sizes, checksum
from asyncrl.weights.transports.interfaces import Transport

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


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


def own_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], entries: Sequence[TensorEntry], *, rank: int, world_size: int
) -> dict[int, Bytes]:
    """Copies the buckets of this rank, by index, from the gathered weights. Exhausts the iterator."""
    by_name = {entry.name: entry for entry in entries}
    # New memory for every snapshot, because the previous one may still be in delivery.
    buckets = {
        index: np.zeros(nbytes, dtype=np.uint8)
        for index, nbytes in bucket_sizes(entries).items()
        if index % world_size == rank
    }
    for name, tensor in weights:
        entry = by_name[name]
        bucket = buckets.get(entry.bucket)
        if bucket is not None:
            flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            bucket[entry.offset : entry.offset + entry.nbytes] = flat
    return buckets


def deliver(snapshot: Snapshot, transport: Transport) -> list[DeliveredBucket]:
    """Computes checksums of this rank's buckets, and sends the buckets."""
    return [
        DeliveredBucket(
            index=index,
            bucket=Bucket(nbytes=data.nbytes, checksum=checksum(data.data)),
            handle=transport.send(data),
        )
        for index, data in snapshot.buckets.items()
    ]
