"""The replicas that the buffer has heard of: their versions, their concurrency slots, what they were refused for.

A replica is known from its first word until it leaves or stays silent for the timeout. Nothing here decides anything:
the views feed the broadcast gate. The time is handed in, monotonic seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.buffer.records import Refusal, ReplicaView, Reservation, Version


@dataclass(slots=True)
class _Replica:
    version: Version | None
    free_slots: int
    heard_at_s: float
    refused_for: Refusal | None = None


class Replicas:
    """Registry by name. Between heartbeats, the tickets that a replica got take slots that were free."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._by_name: dict[str, _Replica] = {}

    def heard(self, name: str, *, version: Version | None, free_slots: int, now_s: float) -> None:
        """A heartbeat. With another version, an earlier refusal says nothing about the replica any more."""
        known = self._by_name.get(name)
        refused_for = known.refused_for if known is not None and known.version == version else None
        self._by_name[name] = _Replica(version, free_slots, now_s, refused_for)

    def reserved(self, name: str, *, version: Version, asked: int, answer: Reservation, now_s: float) -> None:
        """A reserve was answered. A replica that asks without ever having sent a heartbeat has that many free slots."""
        known = self._by_name.get(name) or _Replica(None, asked, now_s)
        free_slots = max(0, known.free_slots - len(answer.tickets))
        self._by_name[name] = _Replica(version, free_slots, now_s, answer.refusal)

    def forget(self, name: str) -> bool:
        """The replica left. False when it was not known."""
        return self._by_name.pop(name, None) is not None

    def forget_silent(self, *, now_s: float) -> int:
        """Forgets the replicas that were silent for longer than the timeout; how many they were."""
        silent = [name for name, replica in self._by_name.items() if not self._live(replica, now_s)]
        for name in silent:
            del self._by_name[name]
        return len(silent)

    def views(self, *, reserved_groups: Mapping[str, int], now_s: float) -> tuple[ReplicaView, ...]:
        """One view a known replica, by name; `reserved_groups` of those that hold any."""
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
