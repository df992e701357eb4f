"""A learner rank's part of a publication: takes a snapshot of its own shards, and delivers it during the next steps.

A snapshot copies the bytes that this rank sends, and no others: its shards of every parameter. It needs no collective
and no other rank. `deliver` runs in a thread of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch

from asyncrl.common.version import Version
from asyncrl.weights.manifest import (
    Bucket,
    Bytes,
    Piece,
    TensorEntry,
    aligned,
    checksum,
    flat_bytes,
    into_buckets,
)
from asyncrl.weights.memory_file import MemoryFile
from asyncrl.weights.tensor_views import dtype_of
from asyncrl.weights.transports.interfaces import Sender, Shipment

MOST_BUCKETS = 256
"""About the largest number of buckets of a version. Each bucket has a reference that the weight store keeps and every
node fetches, so larger models have larger buckets."""

OwnShard = tuple[str, int, torch.Tensor]
"""A rank's shard of a parameter: the parameter's name, the index of its first element, and the elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A rank's copy of the bytes that it sends of the weights after a step. The bytes are in buckets. `pieces` has the
    places of each bucket's bytes in the version's flat buffer. `memory` has the bytes, one bucket after the other.
    `entries` describe all tensors, and are the same on every rank. `shards` has for each shard the number of its bytes,
    and the number of bytes of one element. `shared` has the memory if other processes of the node may map it."""

    entries: tuple[TensorEntry, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    memory: Bytes
    shards: tuple[tuple[int, int], ...] = ()
    shared: MemoryFile | None = None

    @property
    def buckets(self) -> list[Bytes]:
        """The bytes of each bucket."""
        buckets, start = [], 0
        for pieces in self.pieces:
            nbytes = sum(piece.nbytes for piece in pieces)
            buckets.append(self.memory[start : start + nbytes])
            start += nbytes
        return buckets

    def described(self) -> tuple[Bucket, ...]:
        """Returns the buckets for the manifest. Computes the checksums."""
        return tuple(
            Bucket(pieces=pieces, checksum=checksum([data]))
            for pieces, data in zip(self.pieces, self.buckets, strict=True)
        )


class DeliveredBucket(msgspec.Struct, frozen=True, kw_only=True):
    """One delivered bucket: its description for the manifest, and the transport's handle."""

    bucket: Bucket
    handle: Any


def snapshot_of(
    shards: Iterable[OwnShard],
    entries: Sequence[TensorEntry],
    *,
    bucket_bytes: int,
    shared: bool = False,
    last: Snapshot | None = None,
) -> Snapshot:
    """Copies a rank's shards, in the precision of the entries. If `last`, an earlier snapshot, has as many bytes, its
    memory is overwritten, so that no new memory is needed. `shared` memory can be mapped by other processes of the
    node."""
    by_name = {entry.name: entry for entry in entries}
    found = [(by_name[name], first, shard) for name, first, shard in shards]
    sizes = [shard.numel() * dtype_of(entry).itemsize for entry, _, shard in found]
    on_gpu = any(shard.is_cuda for _, _, shard in found)
    if last is not None and last.memory.nbytes == sum(sizes):
        memory, file = last.memory, last.shared
    else:
        file = MemoryFile(sum(sizes)) if shared else None
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_gpu).numpy() if file is None else file.data
    pieces: list[Piece] = []
    start = 0
    for (entry, first, shard), nbytes in zip(found, sizes, strict=True):
        if not nbytes:
            continue
        room = torch.from_numpy(memory[start : start + nbytes]).view(dtype_of(entry)).view(shard.shape)
        room.copy_(shard.detach(), non_blocking=True)
        pieces.append(Piece(entry.offset + first * dtype_of(entry).itemsize, nbytes))
        start += nbytes
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return Snapshot(
        entries=tuple(entries),
        pieces=tuple(into_buckets(pieces, _bucket_bytes(entries, least=bucket_bytes))),
        memory=memory,
        shards=tuple((nbytes, dtype_of(entry).itemsize) for (entry, _, _), nbytes in zip(found, sizes, strict=True)),
        shared=file,
    )


DRAWN_ELEMENTS = 1024
"""About the number of elements of each shard whose bits are compared between two snapshots. In a model of a billion
parameters this takes about 30 ms."""


class ChangedElements(NamedTuple):
    """The number of elements whose bits changed between two snapshots, estimated from those that were compared, and the
    number of all elements."""

    changed: float
    elements: int


def changed_elements(new: Snapshot, before: Snapshot) -> ChangedElements | None:
    """Compares the bits of some elements of each shard in two snapshots. Returns None if the snapshots are not of the
    same shards."""
    if new.shards != before.shards:
        return None
    changed, elements, start = 0.0, 0, 0
    for nbytes, itemsize in new.shards:
        number = nbytes // itemsize
        # An odd distance goes through all columns of a matrix, whose width is even.
        every = number // DRAWN_ELEMENTS | 1
        bits = [each.memory[start : start + nbytes].view(f"u{itemsize}")[::every] for each in (new, before)]
        if number:
            changed += float((bits[0] != bits[1]).mean()) * number
        elements, start = elements + number, start + nbytes
    return ChangedElements(changed, elements)


def deliver(snapshot: Snapshot, sender: Sender, version: Version) -> list[DeliveredBucket]:
    """Computes checksums of this rank's buckets, and sends the buckets."""
    described = snapshot.described()
    sent = Shipment(version=version, parts=snapshot.buckets, described=described, shared=snapshot.shared)
    handles = sender.send(sent)
    return [DeliveredBucket(bucket=bucket, handle=handle) for bucket, handle in zip(described, handles, strict=True)]


def _bucket_bytes(entries: Sequence[TensorEntry], *, least: int) -> int:
    """Returns the size of a bucket: `least`, or more if a version would have more than `MOST_BUCKETS`."""
    needed = flat_bytes(entries) // MOST_BUCKETS
    return aligned(needed) if needed > least else least
