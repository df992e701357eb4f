"""The replicas that send heartbeats: when the last one came, its number, and the newest weights that it reported.

A heartbeat renews all confirmed tickets of its replica at once. So it takes as long for a replica with many tickets as
for one with few. A heartbeat that is overtaken by a newer one is late: all that it reports is in the newer one too, or
was answered before.
"""

from collections.abc import Iterator
from dataclasses import dataclass

NO_STEP = -1


@dataclass(slots=True)
class Holder:
    """A replica. `step` is the step of the newest weights that it has reported as loaded; NO_STEP if it has none."""

    heard_at_s: float
    number: int
    step: int = NO_STEP


class Holders:
    """The replicas by name, the one with the oldest heartbeat first."""

    def __init__(self) -> None:
        self._by_name: dict[str, Holder] = {}

    def __contains__(self, replica: str) -> bool:
        return replica in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def heard(self, replica: str, *, number: int, now_s: float) -> Holder | None:
        """Records a heartbeat and returns its replica. Returns None if the heartbeat is late."""
        holder = self._by_name.get(replica)
        if holder is None:
            holder = Holder(now_s, number)
        elif number <= holder.number:
            return None
        else:
            holder.heard_at_s, holder.number = now_s, number
            del self._by_name[replica]  # it moves to the end
        self._by_name[replica] = holder
        return holder

    def forget(self, replica: str) -> None:
        """Removes a replica that left."""
        self._by_name.pop(replica, None)

    def take_silent(self, *, before_s: float) -> list[str]:
        """Removes and returns the replicas whose last heartbeat is before `before_s`. Takes O(their number)."""
        silent: list[str] = []
        for name, holder in self._by_name.items():
            if holder.heard_at_s >= before_s:
                break
            silent.append(name)
        for name in silent:
            del self._by_name[name]
        return silent

    def restored(self) -> None:
        """Forgets the reported weights, because the run goes back to a checkpoint, and they may be lost ones."""
        for holder in self._by_name.values():
            holder.step = NO_STEP
