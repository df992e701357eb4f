"""The registry of replicas: their versions, their free concurrency slots, and their last refusals.

A replica is known from its first message until it leaves or sends no message for the timeout. This module makes no
decisions. Its views are the input of the broadcast gate (`asyncrl.weights.gate`). The time is an argument, in monotonic
seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.buffer.records import Refusal, ReplicaView, Reservation
from asyncrl.run.version import Version


@dataclass(slots=True)
class _Replica:
    version: Version | None
    free_slots: int
    heard_at_s: float
    refused_for: Refusal | None = None


class Replicas:
    """The replicas by name. Tickets that a replica gets between two heartbeats reduce its free slots."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._by_name: dict[str, _Replica] = {}

    def heard(self, name: str, *, version: Version | None, free_slots: int, now_s: float) -> None:
        """Records a heartbeat. If the version has changed, the earlier refusal is forgotten, because it no longer
        applies."""
        known = self._by_name.get(name)
        refused_for = known.refused_for if known is not None and known.version == version else None
        self._by_name[name] = _Replica(version, free_slots, now_s, refused_for)

    def reserved(self, name: str, *, version: Version, asked: int, answer: Reservation, now_s: float) -> None:
        """Records the answer to a reserve. Before its first heartbeat, a replica counts as having `asked` free
        slots."""
        known = self._by_name.get(name) or _Replica(None, asked, now_s)
        free_slots = max(0, known.free_slots - len(answer.tickets))
        self._by_name[name] = _Replica(version, free_slots, now_s, answer.refusal)

    def forget(self, name: str) -> bool:
        """Removes a replica that left. Returns False if it was not known."""
        return self._by_name.pop(name, None) is not None

    def forget_silent(self, *, now_s: float) -> int:
        """Removes the replicas that were silent for longer than the timeout. Returns their number."""
        silent = [name for name, replica in self._by_name.items() if not self._live(replica, now_s)]
        for name in silent:
            del self._by_name[name]
        return len(silent)

    def views(self, *, reserved_groups: Mapping[str, int], now_s: float) -> tuple[ReplicaView, ...]:
        """Returns one view for each known replica, sorted by name. `reserved_groups` maps names to held tickets."""
        return tuple(
            ReplicaView(
                replica=name,
                version=replica.version,
                free_slots=replica.free_slots,
                reserved_groups=reserved_groups.get(name, 0),
                live=self._live(replica, now_s),
                silent_s=now_s - replica.heard_at_s,
                refused_for=replica.refused_for,
            )
            for name, replica in sorted(self._by_name.items())
        )

    def _live(self, replica: _Replica, now_s: float) -> bool:
        return now_s - replica.heard_at_s <= self._timeout_s
