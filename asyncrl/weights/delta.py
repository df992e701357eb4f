"""Differences between two versions of a rank's weights, for `weights.delta`.

In bfloat16 most weights do not change in a step, because a change of the float32 master weights is smaller than the
distance to the next bfloat16 number (PULSE, arXiv:2602.03839). A delta of a bucket has the elements that changed: for
each, the number of equal elements before it and its new bits.

Each bucket has a chain of links: the whole bucket, and then deltas. A replica applies the links that it lacks, and
verifies the bucket after each one. So a replica that skipped versions, or has just started, needs nothing but the
newest manifest and its handles. If the bytes of a link are lost or damaged, the learner sends the buckets whole again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncrl.common.version import Version
from asyncrl.weights.manifest import Bytes, Link
from asyncrl.weights.transports.interfaces import Sender, Shipment

if TYPE_CHECKING:
    from asyncrl.weights.publisher import DeliveredBucket, Snapshot

SKIP = 255
"""A count of this value stands for as many equal elements, without a changed one after them."""
ELEMENT = np.dtype(np.uint16)
"""The bits of an element: weights that travel as deltas are in bfloat16."""


def encode(base: Bytes, new: Bytes) -> Bytes:
    """Returns the delta from `base` to `new`: the number of changed elements, their new bits, and the counts.

    >>> base = np.zeros(8, dtype=np.uint8)
    >>> new = base.copy()
    >>> new[4] = 7
    >>> decode(base, encode(base, new)).tolist()
    [0, 0, 0, 0, 7, 0, 0, 0]
    """
    before, after = base.view(ELEMENT), new.view(ELEMENT)
    changed = np.flatnonzero(before != after)
    gaps = np.diff(changed, prepend=-1) - 1
    skips, rests = np.divmod(gaps, SKIP)
    counts = np.full(len(changed) + int(skips.sum()), SKIP, dtype=np.uint8)
    counts[np.cumsum(skips + 1) - 1] = rests
    length = np.array([len(changed)], dtype=np.uint64)
    return np.concatenate([length.view(np.uint8), after[changed].view(np.uint8), counts])


def decode(base: Bytes, delta: Bytes) -> Bytes:
    """Returns `base` with the changed elements of a delta by `encode`. Raises ValueError if the delta does not fit to
    the base."""
    if delta.nbytes < 8:
        raise ValueError(f"a delta has at least 8 bytes, not {delta.nbytes}")
    length = int(delta[:8].view(np.uint64)[0])
    end = 8 + length * ELEMENT.itemsize
    if end > delta.nbytes:
        raise ValueError(f"a delta of {delta.nbytes} bytes is too short for its {length} elements")
    counts = delta[end:]
    is_element = counts != SKIP
    if int(is_element.sum()) != length:
        raise ValueError(f"a delta of {length} elements has {int(is_element.sum())} counts")
    steps = counts.astype(np.int64) + is_element
    positions = np.cumsum(steps)[is_element] - 1
    new = base.copy()
    if length and positions[-1] >= len(new.view(ELEMENT)):
        raise ValueError("a delta has an element beyond the end of its bucket")
    new.view(ELEMENT)[positions] = delta[8:end].copy().view(ELEMENT)
    return new


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delivery:
    """A version that was sent, and that the weight store may have: the sent bytes of each bucket, and its chain."""

    version: Version
    parts: tuple[Bytes, ...]
    chains: "list[DeliveredBucket]"


class DeltaSender:
    """Sends a rank's snapshots as deltas from the last version that the weight store has. Keeps one copy of that
    version's bytes.

    A bucket travels whole at first, after `anchor_every` links, when the deltas of its chain would be as large as the
    bucket, and when a delivery must be `whole`.
    """

    def __init__(self, *, anchor_every: int) -> None:
        self._anchor_every = anchor_every
        self._base: list[Bytes] = []
        self._chains: list[DeliveredBucket] = []
        """The buckets of the base, each with the links and handles of its chain."""
        self._last: _Delivery | None = None

    def deliver(
        self, snapshot: "Snapshot", sender: Sender, version: Version, *, previous: Version | None, whole: bool = False
    ) -> "list[DeliveredBucket]":
        """Sends a snapshot. `previous` is the newest version that the weight store has. If `version` was sent last, it
        is sent again only if it must be `whole`; otherwise its buckets and handles are returned again."""
        from asyncrl.weights.publisher import DeliveredBucket

        if self._last is not None and self._last.version == version and not whole:
            return self._last.chains
        self._settle(previous)
        described = snapshot.described()
        if [len(data) for data in self._base] != [bucket.nbytes for bucket in described]:
            self._base = []
            self._chains = [DeliveredBucket(bucket=bucket, handle=()) for bucket in described]
        parts, deltas = self._parts(snapshot.buckets, whole=whole)
        handles = sender.send(Shipment(version=version, parts=parts, described=described))
        chains: list[DeliveredBucket] = []
        for chain, bucket, part, delta, handle in zip(self._chains, described, parts, deltas, handles, strict=True):
            links: tuple[Link, ...] = (Link(version, bucket.checksum, part.nbytes, delta),)
            chained: tuple[Any, ...] = (handle,)
            if delta:
                links, chained = (*chain.bucket.links, *links), (*chain.handle, *chained)
            chains.append(DeliveredBucket(bucket=msgspec.structs.replace(bucket, links=links), handle=chained))
        # The memory of the snapshot is used again, so buckets that were sent whole are copied.
        kept = tuple(part if delta else part.copy() for part, delta in zip(parts, deltas, strict=True))
        self._last = _Delivery(version=version, parts=kept, chains=chains)
        return chains

    def _settle(self, previous: Version | None) -> None:
        """Makes the version that was sent last the base of later deltas, if the weight store has it: if it is
        `previous`."""
        last, self._last = self._last, None
        if last is None or last.version != previous:
            return
        self._base = [
            decode(self._base[index], part) if chain.bucket.links[-1].delta else part
            for index, (part, chain) in enumerate(zip(last.parts, last.chains, strict=True))
        ]
        self._chains = last.chains

    def _parts(self, buckets: Sequence[Bytes], *, whole: bool) -> tuple[list[Bytes], list[bool]]:
        """Returns the bytes to send for each bucket, and whether they are a delta."""
        parts, deltas = [], []
        for index, data in enumerate(buckets):
            links = self._chains[index].bucket.links
            linked = links and len(links) < self._anchor_every and not whole
            delta = encode(self._base[index], data) if linked else None
            # A replica that starts fetches all deltas of a chain, so together they must be smaller than the bucket.
            small = delta is not None and delta.nbytes + sum(link.nbytes for link in links if link.delta) < data.nbytes
            parts.append(delta if delta is not None and small else data)
            deltas.append(small)
        return parts, deltas
