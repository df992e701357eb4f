"""The replicas of a run: their versions, their free concurrency slots, their last refusals, and their reports.

A replica is known from its first message until it leaves or sends no message for the timeout. Its last report is kept
after that, because the run's totals need it. Beyond `GONE_REPORTS` such reports, the oldest are added up. This module
makes no decisions and is pure. Its views are the input of the broadcast gate (`asyncrl.weights.gate`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from asyncrl.buffer.fleet import Life, ReplicaState, replica_of
from asyncrl.buffer.records import Refusal, Reservation
from asyncrl.common.version import Version

GONE_REPORTS = 100
"""Number of replicas that are gone whose reports are kept one by one, because a silent replica may come back."""
SUM = "gone replicas"
"""Name of the report that has the sum of older ones."""


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's report in each heartbeat. Totals count from the start of its `actor`, and in the coordinator from the
    first start of the replica.

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
        both = other.after(self)
        return msgspec.structs.replace(
            both, actor="", deployment="", metrics_address="", slots=0, running_groups=0,
            replicas=self.replicas + other.replicas,
        )  # fmt: skip

    def after(self, earlier: "ReplicaReport") -> "ReplicaReport":
        """Returns this report with the totals of an `earlier` actor of the replica added."""
        states = Counter(earlier.state_seconds)
        states.update(self.state_seconds)
        return msgspec.structs.replace(
            self,
            state_seconds=dict(states),
            samples=self.samples + earlier.samples,
            completion_tokens=self.completion_tokens + earlier.completion_tokens,
            weight_updates=self.weight_updates + earlier.weight_updates,
            parity_max_nats=max(self.parity_max_nats, earlier.parity_max_nats),
        )


def mean_states(reports: Collection[ReplicaReport]) -> dict[str, float]:
    """Returns the seconds by state, averaged over all replicas that have reported at least once."""
    states = {state for report in reports for state in report.state_seconds}
    replicas = sum(report.replicas for report in reports)
    return {state: sum(r.state_seconds.get(state, 0.0) for r in reports) / replicas for state in sorted(states)}


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's view of one replica. `version` is None if the replica has not completely loaded any version.

    `state` is that of its life (`asyncrl.buffer.fleet`). `cause` (a text) is why it was quarantined for the last time;
    "" if it never was. `restarts` is how often it was started again. `live` is False for a replica that may get no
    tickets before it is heard again or started again. `reserved_groups` is the number of tickets that it holds:
    rollouts that run, wait for their start, or wait for their commit. `free_slots` is the number of its concurrency
    slots without a ticket at its last heartbeat, less the tickets that it got since. `refused_for` is the refusal of
    its last reserve at this version.
    """

    replica: str
    version: Version | None
    free_slots: int
    reserved_groups: int
    live: bool
    silent_s: float
    refused_for: Refusal | None
    state: ReplicaState = ReplicaState.HEALTHY
    actor: str = ""
    cause: str = ""
    restarts: int = 0

    @property
    def trouble(self) -> str:
        """Why the replica gets no tickets now, in words; "" if it may get some."""
        if self.state in (ReplicaState.QUARANTINED, ReplicaState.RESTARTING):
            return f"{self.state.value} ({self.cause})"
        return "" if self.live and self.state is not ReplicaState.SUSPECT else "no heartbeats"


@dataclass(slots=True)
class _Replica:
    version: Version | None
    free_slots: int
    heard_at_s: float
    refused_for: Refusal | None = None


class Replicas:
    """The replicas by the name of their actor. Tickets that a replica gets between two heartbeats reduce its free
    slots.

    `clock` returns monotonic seconds. `reports` has the last report of each replica by the replica's name, with the
    totals of its earlier actors, also of replicas that are gone; and under the name `SUM` the totals of those that are
    gone for long.
    """

    def __init__(self, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._by_name: dict[str, _Replica] = {}
        self._loaded: dict[str, Version] = {}
        self._earlier: dict[str, ReplicaReport] = {}  # totals of the earlier actors of a replica
        self.reports: dict[str, ReplicaReport] = {}

    def reported(self, report: ReplicaReport) -> None:
        """Records the report of an actor."""
        name = replica_of(report.actor)
        last = self.reports.get(name)
        if last is not None and last.actor != report.actor:
            self._earlier[name] = last
        earlier = self._earlier.get(name)
        self.reports[name] = report if earlier is None else report.after(earlier)

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
        if silent:
            self._gone(silent)
        return len(silent)

    def _gone(self, names: Sequence[str]) -> None:
        """Forgets what the replicas `names` had loaded, and adds up the oldest reports of replicas that are gone."""
        for actor in names:
            self._loaded.pop(actor, None)
            if (name := replica_of(actor)) in self.reports:
                # the reports of replicas that are gone are in the order in which they went
                self.reports[name] = self.reports.pop(name)
        known = {replica_of(actor) for actor in self._by_name}
        gone = [name for name in self.reports if name not in known and name != SUM]
        for name in gone[: max(0, len(gone) - GONE_REPORTS)]:
            report = self.reports.pop(name)
            self._earlier.pop(name, None)
            self.reports[SUM] = self.reports[SUM] + report if SUM in self.reports else report

    def views(self, lives: Mapping[str, Life], *, reserved_groups: Mapping[str, int]) -> tuple[ReplicaView, ...]:
        """Returns one view for each replica, sorted by name. `lives` are the lives of the replicas by name.
        `reserved_groups` is the number of tickets that each actor holds."""
        now_s = self._clock()
        views = []
        for name, life in sorted(lives.items()):
            known = self._by_name.get(life.actor) or _Replica(None, 0, life.heard_at_s)
            views.append(
                ReplicaView(
                    replica=name,
                    version=known.version,
                    free_slots=known.free_slots,
                    reserved_groups=reserved_groups.get(life.actor, 0),
                    live=life.may_be_used and self._live(known, now_s),
                    silent_s=now_s - known.heard_at_s,
                    refused_for=known.refused_for,
                    state=life.state,
                    actor=life.actor,
                    cause=life.reason,
                    restarts=life.restarts,
                )
            )
        return tuple(views)

    def targets(self) -> dict[str, str]:
        """Returns the metrics endpoints of the known replicas that have one, by name."""
        known = {name: report.metrics_address for name, report in self.reports.items() if report.actor in self._by_name}
        return {name: address for name, address in known.items() if address}

    def _live(self, replica: _Replica, now_s: float) -> bool:
        return now_s - replica.heard_at_s <= self._timeout_s
