"""The replicas of a run: their versions, their free concurrency slots, their last refusals, and their reports.

A replica is known from its first message until it leaves or sends no message for the timeout. Its last report is kept
after that, because the run's totals need it. Beyond `GONE_REPORTS` such reports, the oldest are added up. This module
makes no decisions and is pure. Its views are the input of the broadcast gate (`asyncrl.weights.gate`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from asyncrl.buffer.records import Refusal, Reservation
from asyncrl.common.version import Version

GONE_REPORTS = 100
"""Number of replicas that are gone whose reports are kept one by one, because a silent replica may come back."""
SUM = "gone replicas"
"""Name of the report that has the sum of older ones."""


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's report in each heartbeat. Totals count from the start of the replica.

    `state_seconds` are slot-seconds divided by the number of slots. `running_groups` is the number of rollouts that run
    now, `slots` their maximum. `replicas` is 1, or the number of replicas that are gone whose totals are added up here.
    """

    actor: str
    deployment: str
    metrics_address: str
    state_seconds: dict[str, float]
    slots: int
    running_groups: int
    samples: int
    completion_tokens: int
    weight_updates: int
    parity_max_nats: float
    replicas: int = 1

    def __add__(self, other: "ReplicaReport") -> "ReplicaReport":
        """Returns the sum of the totals, for replicas that are gone."""
        states = Counter(self.state_seconds)
        states.update(other.state_seconds)
        return ReplicaReport(
            actor="",
            deployment="",
            metrics_address="",
            state_seconds=dict(states),
            slots=0,
            running_groups=0,
            samples=self.samples + other.samples,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            weight_updates=self.weight_updates + other.weight_updates,
            parity_max_nats=max(self.parity_max_nats, other.parity_max_nats),
            replicas=self.replicas + other.replicas,
        )


def mean_states(reports: Collection[ReplicaReport]) -> dict[str, float]:
    """Returns the seconds by state, averaged over all replicas that have reported at least once."""
    states = {state for report in reports for state in report.state_seconds}
    replicas = sum(report.replicas for report in reports)
    return {state: sum(r.state_seconds.get(state, 0.0) for r in reports) / replicas for state in sorted(states)}


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's view of one replica. `version` is None if the replica has not completely loaded any version.

    `reserved_groups` is the number of tickets that it holds: rollouts that run, wait for their start, or wait for their
    commit. `free_slots` is the number of its concurrency slots without a ticket at its last heartbeat, less the tickets
    that it got since. `refused_for` is the refusal of its last reserve at this version.
    """

    replica: str
    version: Version | None
    free_slots: int
    reserved_groups: int
    live: bool
    silent_s: float
    refused_for: Refusal | None


@dataclass(slots=True)
class _Replica:
    version: Version | None
    free_slots: int
    heard_at_s: float
    refused_for: Refusal | None = None


class Replicas:
    """The replicas by name. Tickets that a replica gets between two heartbeats reduce its free slots.

    `clock` returns monotonic seconds. `reports` has the last report of each replica, also of those that are gone, and
    under the name `SUM` the totals of those that are gone for long.
    """

    def __init__(self, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._by_name: dict[str, _Replica] = {}
        self._loaded: dict[str, Version] = {}
        self.reports: dict[str, ReplicaReport] = {}

    def heard(self, name: str, *, version: Version | None, free_slots: int) -> bool:
        """Records a heartbeat. Returns True if the replica has loaded another version since its last heartbeat.

        If the version has changed, the earlier refusal is forgotten, because it no longer applies.
        """
        known = self._by_name.get(name)
        refused_for = known.refused_for if known is not None and known.version == version else None
        self._by_name[name] = _Replica(version, free_slots, self._clock(), refused_for)
        if version is None or self._loaded.get(name) == version:
            return False
        self._loaded[name] = version
        return True

    def loaded(self, name: str) -> Version | None:
        """Returns the last version that the replica reported as loaded; None if it reported none."""
        return self._loaded.get(name)

    def loaded_versions(self) -> Mapping[str, Version]:
        """Returns the last version that each replica reported as loaded."""
        return self._loaded

    def reserved(self, name: str, *, version: Version, asked: int, answer: Reservation) -> None:
        """Records the answer to a reserve. Before its first heartbeat, a replica counts as having `asked` free
        slots."""
        now_s = self._clock()
        known = self._by_name.get(name) or _Replica(None, asked, now_s)
        free_slots = max(0, known.free_slots - len(answer.tickets))
        self._by_name[name] = _Replica(version, free_slots, now_s, answer.refusal)

    def forget(self, name: str) -> None:
        """Removes a replica that left."""
        self._by_name.pop(name, None)
        self._gone([name])

    def forget_silent(self) -> int:
        """Removes the replicas that were silent for longer than the timeout. Returns their number."""
        now_s = self._clock()
        silent = [name for name, replica in self._by_name.items() if not self._live(replica, now_s)]
        for name in silent:
            del self._by_name[name]
        self._gone(silent)
        return len(silent)

    def _gone(self, names: Sequence[str]) -> None:
        """Forgets what the replicas `names` had loaded, and adds up the oldest reports of replicas that are gone."""
        for name in names:
            self._loaded.pop(name, None)
            if name in self.reports:  # the reports of replicas that are gone are in the order in which they went
                self.reports[name] = self.reports.pop(name)
        gone = [name for name in self.reports if name not in self._by_name and name != SUM]
        for name in gone[: max(0, len(gone) - GONE_REPORTS)]:
            report = self.reports.pop(name)
            self.reports[SUM] = self.reports[SUM] + report if SUM in self.reports else report

    def views(self, *, reserved_groups: Mapping[str, int]) -> tuple[ReplicaView, ...]:
        """Returns one view for each known replica, sorted by name. `reserved_groups` is the number of tickets that each
        replica holds."""
        now_s = self._clock()
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

    def targets(self) -> dict[str, str]:
        """Returns the metrics endpoints of the known replicas that have one, by name."""
        known = {name: report.metrics_address for name, report in self.reports.items() if name in self._by_name}
        return {name: address for name, address in known.items() if address}

    def _live(self, replica: _Replica, now_s: float) -> bool:
        return now_s - replica.heard_at_s <= self._timeout_s
