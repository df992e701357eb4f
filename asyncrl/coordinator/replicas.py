"""The replicas of a run: their versions, their free concurrency slots, their last refusals, and their reports.

A replica is known from its first message until its actor leaves or may not be used any more (`asyncrl.buffer.fleet`).
Its last report is kept after that, because the run's totals need it. Beyond `GONE_REPORTS` reports of replicas that do
not come back, the oldest are added up. The totals of all replicas are running sums, so reading them takes as long with
1,000 replicas as with one. This module makes no decisions and is pure. It gives the broadcast gate
(`asyncrl.weights.gate`) its input.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass

import msgspec

from asyncrl.buffer.fleet import Life, ReplicaState, replica_of
from asyncrl.buffer.records import Refusal, Reservation
from asyncrl.common.version import Version

GONE_REPORTS = 100
"""Number of replicas that do not come back whose reports are kept one by one."""
SUM = "gone replicas"
"""Name of the report that has the sum of older ones."""

RefusalAt = Callable[[Version], Refusal | None]
"""Returns why a replica at a version would get no ticket now; None if it would get one."""


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's report in each heartbeat. Totals count from the start of its `actor`, and in the coordinator from the
    first start of the replica.

    `state_seconds` are slot-seconds divided by the number of slots. `running_groups` is the number of rollouts that run
    now, `slots` their maximum. `prompt_tokens` count each sample of a group, and `cached_prompt_tokens` are those of
    them that came from the engine's prefix cache. `replicas` is 1, or the number of replicas whose totals are added up
    here.
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
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    replicas: int = 1

    def plus(self, other: "ReplicaReport", *, sign: int = 1) -> "ReplicaReport":
        """Returns this report with the totals of `other` added to its own; with `sign` -1, subtracted from them."""
        states = dict(self.state_seconds)
        for state, seconds in other.state_seconds.items():
            states[state] = states.get(state, 0.0) + sign * seconds
        return msgspec.structs.replace(
            self,
            state_seconds=states,
            samples=self.samples + sign * other.samples,
            completion_tokens=self.completion_tokens + sign * other.completion_tokens,
            weight_updates=self.weight_updates + sign * other.weight_updates,
            prompt_tokens=self.prompt_tokens + sign * other.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens + sign * other.cached_prompt_tokens,
            parity_max_nats=max(self.parity_max_nats, other.parity_max_nats),
            replicas=self.replicas + sign * other.replicas,
        )


NO_REPORT = ReplicaReport(
    actor="",
    deployment="",
    metrics_address="",
    state_seconds={},
    slots=0,
    running_groups=0,
    samples=0,
    completion_tokens=0,
    weight_updates=0,
    parity_max_nats=0.0,
    replicas=0,
)
"""The sum of no reports."""


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
    slots without a ticket at its last heartbeat, less the tickets that it got since. `refused_for` is the reason why it
    would get no ticket now, if its last reserve at this version got fewer than it asked for.
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


class AbleReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas with a free concurrency slot that have loaded `version`.

    `replicas` is their number, and `stale` the number of those that get no ticket because of staleness: only newer
    weights let them go on.
    """

    version: Version
    replicas: int
    stale: int


@dataclass(slots=True, frozen=True)
class _Replica:
    version: Version | None
    free_slots: int
    refused: bool = False

    @property
    def standing(self) -> tuple[Version | None, bool, bool]:
        """What the numbers by version depend on: the version, whether a slot is free, and whether it was refused."""
        return self.version, self.free_slots > 0, self.refused


_UNKNOWN = _Replica(None, 0)


class Replicas:
    """The replicas by the name of their actor. Tickets that a replica gets between two heartbeats reduce its free
    slots.

    `loaded` has the last version that each replica reported as loaded, by the name of its actor. `reports` has the last
    report of each replica by the replica's name, with the totals of its earlier actors, also of replicas that are gone;
    and under the name `SUM` the totals of those that are gone for long. `totals` is the sum of all reports.
    `may_come_back` returns False for the name of a replica that is gone for good.
    """

    def __init__(self, *, may_come_back: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._may_come_back = may_come_back
        self._clock = clock
        self._by_name: dict[str, _Replica] = {}
        self._standings: Counter[tuple[Version | None, bool, bool]] = Counter()  # of the replicas in `_by_name`
        self._earlier: dict[str, ReplicaReport] = {}  # totals of the earlier actors of a replica
        self.loaded: dict[str, Version] = {}
        self.reports: dict[str, ReplicaReport] = {}
        self.totals = NO_REPORT

    def reported(self, report: ReplicaReport) -> None:
        """Records the report of an actor."""
        name = replica_of(report.actor)
        last = self.reports.get(name)
        if last is not None and last.actor != report.actor:
            self._earlier[name] = last
        if (earlier := self._earlier.get(name)) is not None:
            report = msgspec.structs.replace(report.plus(earlier), replicas=report.replicas)
        self.totals = self.totals.plus(report).plus(last or NO_REPORT, sign=-1)
        self.reports[name] = report

    def heard(self, name: str, *, version: Version | None, free_slots: int) -> bool:
        """Records a heartbeat. Returns True if the replica has loaded another version since its last heartbeat.

        If the version has changed, the earlier refusal is forgotten, because it no longer applies.
        """
        known = self._by_name.get(name)
        refused = known is not None and known.version == version and known.refused
        self._put(name, _Replica(version, free_slots, refused))
        if version is None or self.loaded.get(name) == version:
            return False
        self.loaded[name] = version
        return True

    def reserved(self, name: str, *, version: Version, asked: int, answer: Reservation) -> None:
        """Records the answer to a reserve. Before its first heartbeat, a replica counts as having `asked` free
        slots."""
        known = self._by_name.get(name)
        if answer.refusal is Refusal.QUARANTINED or (answer.refusal is Refusal.UNHEALTHY and known is None):
            return  # it was forgotten, because it may not be used
        free_slots = max(0, (asked if known is None else known.free_slots) - len(answer.tickets))
        self._put(name, _Replica(version, free_slots, answer.refusal is not None))

    def forget(self, *names: str) -> list[str]:
        """Removes replicas that have ended, or must not be used. Returns those of `names` that were known.

        Adds up the oldest reports of replicas that are gone.
        """
        known = [name for name in names if name in self._by_name]
        for actor in names:
            self._put(actor, None)
            self.loaded.pop(actor, None)
            if (name := replica_of(actor)) in self.reports:
                # the reports of replicas that are gone are in the order in which they went
                self.reports[name] = self.reports.pop(name)
        gone = [name for name in self.reports if name != SUM and not self._may_come_back(name)]
        for name in gone[: max(0, len(gone) - GONE_REPORTS)]:
            report = self.reports.pop(name)
            self._earlier.pop(name, None)
            self.reports[SUM] = self.reports.get(SUM, NO_REPORT).plus(report)
        return known

    def forget_unless(self, may_be_used: Callable[[str], bool]) -> list[str]:
        """Removes the replicas whose actor may not be used any more. Returns the names of these actors."""
        gone = [name for name in self._by_name if not may_be_used(name)]
        return self.forget(*gone) if gone else []

    def _put(self, name: str, replica: _Replica | None) -> None:
        """Replaces a replica, or removes it, and keeps the numbers by version."""
        before = self._by_name.pop(name, None)
        if before is not None:
            self._standings -= {before.standing: 1}  # forgets what no replica has any more
        if replica is not None:
            self._by_name[name] = replica
            self._standings[replica.standing] += 1

    def able(self, refusal_at: RefusalAt) -> tuple[AbleReplicas, ...]:
        """Returns the replicas with a free slot by version, without those that have none. The work depends on the
        number of versions only."""
        refusals = self._refusals(refusal_at)
        replicas: Counter[Version] = Counter()
        stale: Counter[Version] = Counter()
        for (version, free, refused), number in self._standings.items():
            if free and version is not None:
                replicas[version] += number
                stale[version] += number * (refused and refusals.get(version) is Refusal.STALENESS)
        return tuple(
            AbleReplicas(version=version, replicas=number, stale=stale[version]) for version, number in replicas.items()
        )

    def oldest_step(self) -> int | None:
        """Returns the smallest step of a version that a known replica has loaded; None if there is none."""
        return min((version.step for version, _, _ in self._standings if version is not None), default=None)

    def views(
        self, lives: Mapping[str, Life], *, reserved_groups: Mapping[str, int], refusal_at: RefusalAt
    ) -> tuple[ReplicaView, ...]:
        """Returns one view for each replica, sorted by name. `lives` are the lives of the replicas by name.
        `reserved_groups` is the number of tickets that each actor holds."""
        now_s = self._clock()
        refusals = self._refusals(refusal_at)
        views = []
        for name, life in sorted(lives.items()):
            known = self._by_name.get(life.actor, _UNKNOWN)
            views.append(
                ReplicaView(
                    replica=name,
                    version=known.version,
                    free_slots=known.free_slots,
                    reserved_groups=reserved_groups.get(life.actor, 0),
                    live=life.may_be_used,
                    silent_s=now_s - life.heard_at_s,
                    refused_for=refusals.get(known.version) if known.refused else None,
                    state=life.state,
                    actor=life.actor,
                    cause=life.reason,
                    restarts=life.restarts,
                )
            )
        return tuple(views)

    def by_state(self, lives: Mapping[str, Life], *, holding: Container[str]) -> Counter[str]:
        """Returns the number of replicas in each state of the metric `asyncrl_replicas`. `lives` are the lives of the
        replicas by name. The actors `holding` have a ticket."""
        states: Counter[str] = Counter()
        for life in lives.values():
            if not life.may_be_used:
                states[life.state.value] += 1
            elif life.state is ReplicaState.SUSPECT:
                states["silent"] += 1
            elif self._by_name.get(life.actor, _UNKNOWN).version is None:
                states["without_weights"] += 1
            else:
                states["generating" if life.actor in holding else "waiting"] += 1
        return states

    def actor_at(self, version: Version, *, or_newer: bool = False, other_than: Collection[str]) -> str | None:
        """Returns the actor of a replica that has loaded `version`, or a newer one if that will do, the first one by
        name; None if there is none. Leaves out the actors `other_than`."""
        found = (
            name
            for name, replica in self._by_name.items()
            if replica.version == version or (or_newer and replica.version is not None and replica.version > version)
        )
        return min((name for name in found if name not in other_than), default=None)

    def _refusals(self, refusal_at: RefusalAt) -> dict[Version | None, Refusal | None]:
        return {version: refusal_at(version) for version, _, _ in self._standings if version is not None}
