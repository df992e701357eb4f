"""The interface of a transport, which moves the bytes of a version from the learner's ranks to the replicas.

A transport either stores the bytes, and replicas fetch them at any time, or it broadcasts them to the replicas that
wait for them when a rank sends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from asyncrl.common.version import Version
from asyncrl.weights.manifest import Bucket, Bytes
from asyncrl.weights.memory_file import MemoryFile


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastEnd:
    """How a broadcast ended for a replica.

    received    it has all bytes
    missed      it was a member, and lacks bytes: they were damaged, or a member (also itself) was late or died, or
                engines of its node were loading other weights from the memory for the bytes
    absent      it was not a member, because it had just started, or lacked bytes of an earlier broadcast, or did not
                answer rank 0 in time

    `nbytes` are the verified bytes that arrived. `seconds` is the time from the announcement on, including the time to
    join a group.
    """

    outcome: str
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """The part of a version that a rank sends. `parts` are the bytes of its buckets, or deltas. `described` are the
    buckets as the manifest has them. `shared` has the parts, one after the other, if other processes of
    the node may map them."""

    version: Version
    parts: Sequence[Bytes]
    described: Sequence[Bucket]
    shared: MemoryFile | None = None


class Sender(ABC):
    """The sending side of a transport on one of the learner's ranks, for all deliveries of the rank."""

    @abstractmethod
    def send(self, sent: Shipment) -> list[Any]:
        """Makes a shipment available to the replicas. Returns a handle for each of its parts, in order. All ranks send
        at the same time. A slow or dead replica does not make the call fail."""

    def close(self) -> None:
        """Ends the threads and connections that the sender keeps between its calls, if it has any."""


class Transport(ABC):
    """`sender` is called on each of the learner's ranks, `take_part`, `receive` and `staged` in a replica, and `delete`
    in the learner's process. The handles travel from rank to replica with the manifest."""

    @abstractmethod
    def sender(self, rank: int, ranks: int) -> Sender:
        """Returns the sender for learner rank `rank` of `ranks`."""

    async def take_part(self, replica: str, *, ended: Callable[[BroadcastEnd], None]) -> None:
        """Receives broadcasts until it is cancelled or the weight store ends, and calls `ended` after each. The default
        returns at once, for a transport that only stores bytes."""

    @abstractmethod
    async def receive(self, handle: Any, *, timeout_s: float) -> Bytes:
        """Returns the bytes of a handle: of a bucket, or with `weights.delta` of a link. Raises ManifestVoid when they
        are lost, and FetchFailed after `timeout_s`."""

    def staged(self, version: Version) -> None:
        """Called when the replica has all bytes of a version in its memory. It did not `receive` the bytes that another
        replica of its node has staged."""

    def delete(self, which: Callable[[Version], bool]) -> None:
        """Deletes what the transport keeps outside of the learner's processes, such as files, of the versions for which
        `which` returns True."""


class StoresBytes(Transport, Sender):
    """A transport that stores bytes: the same object sends on all ranks, and replicas only fetch."""

    def sender(self, rank: int, ranks: int) -> Self:
        return self
