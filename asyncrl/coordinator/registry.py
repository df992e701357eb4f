"""The registry of a run: its deployments, its state, its metrics endpoints, and its newest published version.

Pure: the clock is an argument. The first deployment sets the run's shared config and the versions of its packages. Each
later deployment must agree with the config key by key, and with the first two parts of each version. The check is
needed because Ray's get-or-create of an actor ignores the arguments of the second caller. A run has one learner. A
deployment that sends no heartbeat for the timeout counts as gone until its next heartbeat.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from asyncrl.buffer.fleet import Life, ReplicaState, replica_of
from asyncrl.buffer.records import Refusal, Reservation
from asyncrl.common.device_time import DeviceTime, added
from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Version
from asyncrl.config.load import first_difference
from asyncrl.config.schema import MOST_REPLICAS, AutoscaleSection
from asyncrl.errors import HandshakeError, RunEnded, RunError, RunLocked, RunMismatch, VersionRegression

OVER = (RunState.FINISHED, RunState.STOPPED, RunState.PREEMPTED, RunState.FAILED)
"""States of a run that trains no more steps. No other deployment enters it, except for a learner that continues a
preempted run: its generators may wait for it (`generator.wait_for_learner_s`)."""
GONE_TIMEOUTS = 4
"""Number of timeouts after which a silent deployment counts as dead when the last other one leaves a run that is not
over. After one timeout it may only be busy: a process whose event loop or machine stalls sends no heartbeats."""
GONE_MEMBERS = 1000
"""Number of silent deployments that are remembered, because they may send heartbeats again."""
KEPT_CHANGES = 1000
"""Number of changes of endpoints that are remembered. A caller that missed more gets all endpoints."""


class Attachment(StrEnum):
    """The answer to a heartbeat of a deployment."""

    ATTACHED = "attached"
    ASKED_TO_END = "asked to end"
    """The deployment is a learner, which shall end the run before its last step, as after Ctrl-C."""
    ASKED_TO_RESTART = "asked to restart"
    """The deployment is a learner, which shall save its weights, end, and start again: its node is about to end."""
    GONE = "gone"
    """The deployment is not attached, or another learner has replaced it."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """An attached deployment, with the host and the pid of its process. A learner has the `nonce` of its run, which
    distinguishes runs of the same name. `replicas` is the number of replicas with which a generator deployment
    starts. `versions` has the versions of the packages on whose agreement the run depends, by name, as far as they are
    installed."""

    id: str
    role: Role
    host: str
    pid: int
    nonce: str = ""
    replicas: int = 0
    versions: dict[str, str] = {}


class Endpoint(msgspec.Struct, frozen=True):
    """The metrics endpoint of a process: its `host:port`, and the host name of its node."""

    address: str
    node: str


class EndpointChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints that changed, by process name; None for a process that is gone. If `whole`, all endpoints.

    `serial` is the number that the caller passes to its next call of `Registry.endpoints_since`.
    """

    serial: int
    whole: bool
    endpoints: dict[str, Endpoint | None]

    def applied_to(self, known: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
        """Returns all endpoints, given those that were known before."""
        merged = self.endpoints if self.whole else {**known, **self.endpoints}
        return {name: endpoint for name, endpoint in merged.items() if endpoint is not None}


def _other_versions(deployment: Deployment, first_with: Mapping[str, Deployment]) -> Iterator[str]:
    """Yields the text of an error for each package whose version differs in its first two parts between `deployment`
    and the first deployment of the run that has the package. `first_with` has these first deployments by package. A
    learner may lack vLLM. A deployment that sends no version of asyncrl also gets an error."""
    if (first := first_with.get("asyncrl")) is not None and "asyncrl" not in deployment.versions:
        yield (
            f"{deployment.host} does not say its version of asyncrl, but the run was started on {first.host} with "
            f"asyncrl {first.versions['asyncrl']}: install this version on {deployment.host} with pip (a checkout in "
            "PYTHONPATH has no version)"
        )
    for package, version in deployment.versions.items():
        if (first := first_with.get(package)) is None:
            continue
        begun = first.versions[package]
        if version.split(".")[:2] != begun.split(".")[:2]:
            yield (
                f"{deployment.host} has {package} {version}, but the run was started on {first.host} with {package} "
                f"{begun}: the first two parts of the version must be equal; install {package} {begun} on "
                f"{deployment.host}, or end the run with `asyncrl down` and start it with one version on all nodes"
            )


class Registry:
    """The deployments and the state of one run.

    `timeout_s` is the time without a heartbeat after which a deployment counts as gone. `shared` is the run's shared
    config by dotted key. `learner` is the deployment that was the last to attach as a learner; it may be gone.
    `learner_state_seconds` are its seconds by state, from its last heartbeat. `endpoints` has the metrics endpoint of
    each process that has one, by the name of the process. `published` is the newest version that a learner published.
    `autoscale` limits the number of replicas; None if nothing but `asyncrl scale` changes it. `scalings` counts the
    calls of `scale` by a person, and `scaled_because` has the reason of the last call, by a person or the autoscaler.
    `given_up` says why deployments do not start replicas again, by replica, since the last call by a person.
    """

    def __init__(
        self,
        *,
        shared: Mapping[str, object],
        timeout_s: float,
        clock: Callable[[], float],
        autoscale: AutoscaleSection | None = None,
        gone_members: int = GONE_MEMBERS,
    ) -> None:
        self._gone_members = gone_members
        self._autoscale = autoscale
        self._shared = dict(shared)
        self._timeout_s = timeout_s
        self._clock = clock
        self._members: dict[str, tuple[Deployment, float]] = {}
        self._fingerprint: tuple[str, str] | None = None
        self._progress_at_s = clock()
        self.state, self.message = RunState.STARTING, ""
        self._first_with: dict[str, Deployment] = {}  # the first deployment with a package, by package
        self.learner: Deployment | None = None
        self.learner_state_seconds: dict[str, float] = {}
        self._request = Attachment.ATTACHED  # for the learner
        self.endpoints: dict[str, Endpoint] = {}
        self._endpoint_changes = 0
        self._changed_endpoints: deque[str] = deque(maxlen=KEPT_CHANGES)  # names, the newest change last
        self._closed_by = ""  # the deployment that was the last one to leave
        self._scaled: dict[str, int] = {}
        self.scalings, self.scaled_because = 0, ""
        self.given_up: dict[str, str] = {}
        self.published: Version | None = None

    def attach(self, deployment: Deployment) -> None:
        """Admits a deployment for which `check` raised no error. A learner replaces the earlier learner for good."""
        for package in deployment.versions:
            self._first_with.setdefault(package, deployment)
        if deployment.role is Role.LEARNER:
            if self.learner is not None:
                self._members.pop(self.learner.id, None)
            self.learner, self._request = deployment, Attachment.ATTACHED
        self._members[deployment.id] = (deployment, self._clock())
        self._forget_gone()

    def check(self, deployment: Deployment, *, shared: Mapping[str, object]) -> None:
        """Raises an error if the deployment may not attach, and changes nothing.

        RunMismatch names the first package or key whose value differs from the run's. RunLocked names the learner that
        the run has already, or says that the run has ended and its processes are ending: a generator that entered such
        a run would keep its processes alive, and the next learner could not start.
        """
        enters = deployment.role is Role.GENERATOR and deployment.id not in self._members
        if enters and self.state is RunState.PREEMPTED and not self._closed_by:
            raise RunLocked(
                "SIGTERM has ended the run's learner, and generators of the run are ending or wait for the next "
                "learner; start the learner first, and then this command"
            )
        if self._closed_by or (enters and self.state in OVER):
            raise RunLocked(
                "the earlier run of this name has ended, and its last deployment is ending the run's processes; start "
                "this command again in some seconds. If this message stays, end the run with `asyncrl down` first"
            )
        for mismatch in _other_versions(deployment, self._first_with):
            raise RunMismatch(mismatch)
        key = first_difference(self._shared, shared)
        if key is not None:
            raise RunMismatch(
                f"{key} = {shared.get(key)!r}, but the run was started with {self._shared.get(key)!r}; use the same "
                "config, or set another run.name for another run"
            )
        if deployment.role is Role.LEARNER:
            for other in self.live():
                if other.role is Role.LEARNER and other.id != deployment.id:
                    raise RunLocked(
                        f"the run has a learner already: pid {other.pid} on {other.host}; end that learner, or set "
                        "another run.name"
                    )

    def keep(self, deployment_id: str, *, state_seconds: Mapping[str, float] = {}) -> Attachment:
        """Records a heartbeat of the deployment, and returns how it is attached.

        `state_seconds` are the learner's seconds by state since its start. Raises RunEnded for a learner whose run
        `asyncrl down` ended.
        """
        member = self._members.get(deployment_id)
        if member is None:
            return Attachment.GONE
        self._members[deployment_id] = (member[0], self._clock())
        if member[0].role is Role.LEARNER:
            self.learner_state_seconds = dict(state_seconds)
            if self.state is RunState.FAILED:
                raise RunEnded(self.message)
            return self._request
        return Attachment.ATTACHED

    def ask_to_end(self, *, restart: bool = False) -> bool:
        """Asks the learner to end the run before its last step. With `restart`, the learner shall start again after its
        end, unless it was asked before to end for good. The learner receives the request with its next heartbeat.
        Returns whether a learner is attached."""
        if not self.learner_attached:
            return False
        if not restart:
            self._request = Attachment.ASKED_TO_END
        elif self._request is Attachment.ATTACHED:
            self._request = Attachment.ASKED_TO_RESTART
        return True

    def detach(self, deployment_id: str) -> bool:
        """Removes a deployment that leaves. Returns True if it was the last one: then it must end the run's actors, and
        no deployment can attach any more.

        While the run is not over, a deployment that was silent for less than `GONE_TIMEOUTS` timeouts still counts,
        because it may send heartbeats again. A deployment that is not attached, such as a replaced learner, is never
        the last one. A repeated call gets the same answer: even if the first answer was lost, the caller must end the
        run's actors.
        """
        timeouts = 1 if self.state in OVER else GONE_TIMEOUTS
        left = self._members.pop(deployment_id, None) is not None
        if left and not self._heard_within(self._timeout_s * timeouts):
            self._closed_by = deployment_id
        return deployment_id == self._closed_by

    @property
    def learner_attached(self) -> bool:
        """Whether the run has a learner that sent a heartbeat within the timeout."""
        member = self._members.get(self.learner.id) if self.learner is not None else None
        return member is not None and self._clock() - member[1] <= self._timeout_s

    def run_nonce(self) -> str:
        """Returns the nonce in run.json of the run, "" before its first learner attaches."""
        return "" if self.learner is None else self.learner.nonce

    def live(self) -> list[Deployment]:
        """Returns the deployments that sent a heartbeat within the timeout."""
        return self._heard_within(self._timeout_s)

    def _forget_gone(self) -> None:
        """Removes the deployments that have been silent for longest, so that at most `gone_members` silent ones are
        left. Without more than `gone_members` deployments in all, does nothing."""
        if len(self._members) <= self._gone_members:
            return
        live = {deployment.id for deployment in self.live()}
        gone = sorted((last_seen_s, name) for name, (_, last_seen_s) in self._members.items() if name not in live)
        for _, name in gone[: max(0, len(gone) - self._gone_members)]:
            del self._members[name]

    def _heard_within(self, seconds: float) -> list[Deployment]:
        now_s = self._clock()
        return [member for member, last_seen_s in self._members.values() if now_s - last_seen_s <= seconds]

    def wanted(self) -> dict[str, int]:
        """Returns the number of replicas that each generator deployment that sends heartbeats should have, by its
        id."""
        generators = [each for each in self.live() if each.role is Role.GENERATOR]
        return {each.id: self._scaled.get(each.id, each.replicas) for each in generators}

    def wanted_of(self, deployment_id: str) -> int | None:
        """Returns the number of replicas that a generator deployment should have; None if it is not attached."""
        member = self._members.get(deployment_id)
        return None if member is None else self._scaled.get(deployment_id, member[0].replicas)

    def scale(self, replicas: int, *, because: str, again: bool = True) -> dict[str, int]:
        """Sets the number of replicas of all generator deployments together, and the reason for it in words. Returns
        the new number of each deployment, by its id. The deployments poll their number. A deployment that sends no
        heartbeats now gets 0. With `again`, replicas that were given up before may be started again.

        The smallest deployment grows first, and the largest one shrinks first. Raises RunError if no generator
        deployment is attached, or if the number is outside `generator.autoscale`, and ValueError for a number that is
        not from 0 to `MOST_REPLICAS`.
        """
        if not 0 <= replicas <= MOST_REPLICAS:
            raise ValueError(f"the number of replicas is {replicas}, but must be from 0 to {MOST_REPLICAS}")
        if (limits := self._autoscale) is not None and not limits.min <= replicas <= limits.max:
            raise RunError(
                f"generators={replicas}: must be from {limits.min} to {limits.max}, between which the run changes the "
                "number itself (generator.autoscale.min and max); choose such a number, or start the run again with "
                "other limits"
            )
        if not (wanted := self.wanted()):
            raise RunError("the run has no generator deployment: start one with `asyncrl generator`")
        while (total := sum(wanted.values())) != replicas:
            change = min if total < replicas else max
            wanted[change(wanted, key=wanted.__getitem__)] += 1 if total < replicas else -1
        silent = [
            each.id for each, _ in self._members.values() if each.role is Role.GENERATOR and each.id not in wanted
        ]
        self._scaled |= wanted | dict.fromkeys(silent, 0)  # a silent deployment may come back with too many replicas
        self.scaled_because = because
        if again:
            self.scalings += 1
            self.given_up.clear()
        return wanted

    def gave_up(self, replica: str, why: str) -> None:
        """Records that a deployment does not start a replica again."""
        self.given_up[replica] = why

    def handshake(self, *, who: str, fingerprint: str) -> None:
        """Checks that learner and replicas have the same tokenizer and vocabulary (F25 in docs/faults.md). `who` names
        the caller, and `fingerprint` is the digest of its tokenizer and vocabulary.

        The first caller sets the fingerprint of the run. Raises HandshakeError if that of a later caller differs.
        """
        if self._fingerprint is None:
            self._fingerprint = (who, fingerprint)
        elif self._fingerprint[1] != fingerprint:
            first, expected = self._fingerprint
            raise HandshakeError(
                f"{who} has tokenizer and vocabulary {fingerprint}, but {first} has {expected}; make both pools read "
                "the same files at model.path"
            )

    def set_state(self, state: RunState, message: str = "") -> None:
        """Sets the state of the run. The learner and `asyncrl down` call it. A new state is progress."""
        self.state, self.message = state, message
        self.progressed()

    def progressed(self) -> None:
        """Records that the run made progress: a committed group, an acked step, or a new state."""
        self._progress_at_s = self._clock()

    @property
    def quiet_s(self) -> float:
        """The seconds since the last progress."""
        return self._clock() - self._progress_at_s

    def publish(self, version: Version, *, learner: Version) -> None:
        """Records that the learner, which is at the version `learner`, published `version`. A repeated call does
        nothing.

        Raises VersionRegression if `version` is older than the newest published version, and ValueError if the learner
        has not acked so many steps.
        """
        if version.step > learner.step:
            raise ValueError(f"version {version} was published, but the learner has acked only {learner.step} steps")
        if self.published is not None and version < self.published:
            raise VersionRegression(
                f"version {version} was published after {self.published}; versions must not decrease"
            )
        self.published = version

    def set_endpoint(self, process: str, address: str, *, node: str = "") -> None:
        """Sets the metrics endpoint of a process on the node with this host name; "" as the address if it has none."""
        endpoint = Endpoint(address, node) if address else None
        if endpoint == self.endpoints.get(process):
            return
        if endpoint is not None:
            self.endpoints[process] = endpoint
        else:
            del self.endpoints[process]
        self._endpoint_changes += 1
        self._changed_endpoints.append(process)

    def endpoints_since(self, serial: int) -> EndpointChanges:
        """Returns the endpoints that have changed since the answer with this serial number; all endpoints for 0, or if
        more than `KEPT_CHANGES` have changed.

        A process that polls the endpoints passes the serial number of its last answer.
        """
        missed = self._endpoint_changes - serial
        kept = [*self._changed_endpoints]
        whole = not serial or not 0 <= missed <= len(kept)
        changed = self.endpoints if whole else dict.fromkeys(kept[len(kept) - missed :])
        return EndpointChanges(
            serial=self._endpoint_changes,
            whole=whole,
            endpoints={process: self.endpoints.get(process) for process in changed},
        )


# The replicas of a run: their versions, their free concurrency slots, their last refusals, and their reports.
#
# A replica is known from its first message until its actor leaves or may not be used any more (`asyncrl.buffer.fleet`).
# Its last report is kept after that, because the run's totals need it. Beyond `gone_reports` reports of replicas that
# have ended for ever, the oldest are added up. The totals of all replicas are running sums, so reading them takes as
# long with 1,000 replicas as with one. This part is pure and makes no decisions. `Replicas.able` is the input of
# `asyncrl.weights.gate`, which decides when the learner publishes its weights.

GONE_REPORTS = 100
"""Number of replicas that have ended for ever and whose reports are kept one by one."""
SUM = "gone replicas"
"""Name of the report that has the sum of older ones."""

RefusalAt = Callable[[Version], Refusal | None]
"""Returns why a replica at a version would get no ticket now; None if it would get one."""


def added_states(seconds: Mapping[str, float], more: Mapping[str, float], *, sign: int = 1) -> dict[str, float]:
    """Returns the sums of two mappings of states to seconds; with `sign` -1, their differences."""
    return {state: seconds.get(state, 0.0) + sign * more.get(state, 0.0) for state in {**seconds, **more}}


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's report in each heartbeat. Totals count from the start of its `actor`, and in the coordinator from the
    first start of the replica.

    `metrics_address` is the `host:port` of its metrics endpoint, `node` the host name of its node, and `log` the path
    of its log there. `state_seconds` are seconds by state, averaged over the concurrency slots. `running_groups` is the
    number of rollouts that run now, `slots` their maximum. `prompt_tokens` count each sample of a group, and
    `cached_prompt_tokens` of them came from the engine's prefix cache. `parity_max_nats` is the largest difference
    between the learner's and the engine's log-probs when the replica verified new weights. `device_time` are the
    device-seconds since the start, one entry for each kind of device. `replicas` is 1; in a sum of reports, it is the
    number of replicas that are added up.
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
    device_time: tuple[DeviceTime, ...] = ()
    node: str = ""
    log: str = ""
    replicas: int = 1

    @property
    def log_place(self) -> str:
        """The node and the path of the log, as `scp` takes them; empty if the path is not known."""
        return f"{self.node}:{self.log}" if self.log else ""

    def plus(self, other: "ReplicaReport", *, sign: int = 1) -> "ReplicaReport":
        """Returns this report with the totals of `other` added to its own; with `sign` -1, subtracted from them.
        `parity_max_nats` is the larger one in both cases."""
        more, less = (other.device_time, ()) if sign > 0 else ((), other.device_time)
        return msgspec.structs.replace(
            self,
            state_seconds=added_states(self.state_seconds, other.state_seconds, sign=sign),
            samples=self.samples + sign * other.samples,
            completion_tokens=self.completion_tokens + sign * other.completion_tokens,
            weight_updates=self.weight_updates + sign * other.weight_updates,
            prompt_tokens=self.prompt_tokens + sign * other.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens + sign * other.cached_prompt_tokens,
            parity_max_nats=max(self.parity_max_nats, other.parity_max_nats),
            device_time=added(self.device_time + more, less=less),
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
    """Returns the seconds by state, averaged over the replicas whose reports are in `reports` or in a sum there."""
    states = {state for report in reports for state in report.state_seconds}
    replicas = sum(report.replicas for report in reports)
    return {state: sum(r.state_seconds.get(state, 0.0) for r in reports) / replicas for state in sorted(states)}


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's view of one replica. `version` is None if the replica has not completely loaded any version.

    `state` is that of its life (`asyncrl.buffer.fleet`). `cause` (a text) is why it was quarantined for the last time;
    "" if it never was. `restarts` is how often it was started again. `live` is False for a replica that gets no tickets
    until it sends a heartbeat again or is started again. `reserved_groups` is the number of tickets that it holds:
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
        """Why the replica gets no tickets until it sends a heartbeat or is started again, in words; "" otherwise."""
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
        """The key under which `Replicas` counts this replica: its version, whether it has a free slot, and whether its
        last reserve at this version got fewer tickets than it asked for."""
        return self.version, self.free_slots > 0, self.refused


_UNKNOWN = _Replica(None, 0)


class Replicas:
    """The replicas by the name of their actor. Tickets that an actor gets between two heartbeats reduce its free
    slots.

    `loaded` has the last version that each actor reported as loaded, by the name of the actor. `reports` has the last
    report of each replica by the replica's name, with the totals of its earlier actors, also of replicas that are gone;
    and under the name `SUM` the totals of those that have been gone for longest. `totals` is the sum of all reports.
    `may_come_back` returns False for the name of a replica that has ended for ever.
    """

    def __init__(
        self,
        *,
        may_come_back: Callable[[str], bool],
        clock: Callable[[], float],
        gone_reports: int = GONE_REPORTS,
    ) -> None:
        self._gone_reports = gone_reports
        self._may_come_back = may_come_back
        self._clock = clock
        self._by_actor: dict[str, _Replica] = {}
        # the number of replicas in `_by_actor` by `_Replica.standing`
        self._standings: Counter[tuple[Version | None, bool, bool]] = Counter()
        self._earlier: dict[str, ReplicaReport] = {}  # totals of the earlier actors of a replica
        self.loaded: dict[str, Version] = {}
        self.reports: dict[str, ReplicaReport] = {}
        self.totals = NO_REPORT

    def reported(self, report: ReplicaReport) -> None:
        """Records the report of an actor, with the totals of the earlier actors of its replica added."""
        name = replica_of(report.actor)
        last = self.reports.get(name)
        if last is not None and last.actor != report.actor:
            self._earlier[name] = last
        if (earlier := self._earlier.get(name)) is not None:
            report = msgspec.structs.replace(report.plus(earlier), replicas=report.replicas)
        self.totals = self.totals.plus(report).plus(last or NO_REPORT, sign=-1)
        self.reports[name] = report

    def heard(self, actor: str, *, version: Version | None, free_slots: int) -> bool:
        """Records a heartbeat. Returns True if the actor has loaded another version since its last heartbeat.

        If the version has changed, the earlier refusal is forgotten, because it no longer applies.
        """
        known = self._by_actor.get(actor)
        refused = known is not None and known.version == version and known.refused
        self._put(actor, _Replica(version, free_slots, refused))
        if version is None or self.loaded.get(actor) == version:
            return False
        self.loaded[actor] = version
        return True

    def reserved(self, actor: str, *, version: Version, asked: int, answer: Reservation) -> None:
        """Records the answer to a reserve. Before its first heartbeat, an actor counts as having `asked` free
        slots."""
        known = self._by_actor.get(actor)
        if answer.refusal is Refusal.QUARANTINED or (answer.refusal is Refusal.UNHEALTHY and known is None):
            return  # `forget` has removed the actor, because it may not be used
        free_slots = max(0, (asked if known is None else known.free_slots) - len(answer.tickets))
        self._put(actor, _Replica(version, free_slots, answer.refusal is not None))

    def forget(self, *actors: str) -> list[str]:
        """Removes actors that have ended, or must not be used. Returns those that were known.

        Adds up the oldest reports of replicas that are gone.
        """
        known = [actor for actor in actors if actor in self._by_actor]
        for actor in actors:
            self._put(actor, None)
            self.loaded.pop(actor, None)
            if (name := replica_of(actor)) in self.reports:
                # the reports of replicas that are gone are in the order in which they went
                self.reports[name] = self.reports.pop(name)
        gone = [name for name in self.reports if name != SUM and not self._may_come_back(name)]
        for name in gone[: max(0, len(gone) - self._gone_reports)]:
            report = self.reports.pop(name)
            self._earlier.pop(name, None)
            self.reports[SUM] = self.reports.get(SUM, NO_REPORT).plus(report)
        return known

    def forget_unless(self, may_be_used: Callable[[str], bool]) -> list[str]:
        """Removes the actors that may not be used any more. Returns their names."""
        gone = [actor for actor in self._by_actor if not may_be_used(actor)]
        return self.forget(*gone) if gone else []

    def _put(self, actor: str, replica: _Replica | None) -> None:
        """Replaces the entry of an actor, or removes it if `replica` is None, and updates the counts by version."""
        before = self._by_actor.pop(actor, None)
        if before is not None:
            self._standings -= {before.standing: 1}  # also removes a key whose count is now 0
        if replica is not None:
            self._by_actor[actor] = replica
            self._standings[replica.standing] += 1

    def able(self, refusal_at: RefusalAt) -> tuple[AbleReplicas, ...]:
        """Returns, for each version, the number of replicas that have loaded it and have a free slot. The work depends
        on the number of versions only."""
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
            known = self._by_actor.get(life.actor, _UNKNOWN)
            views.append(
                ReplicaView(
                    replica=name,
                    version=known.version,
                    free_slots=known.free_slots,
                    reserved_groups=reserved_groups.get(life.actor, 0),
                    live=life.may_be_used,
                    silent_s=now_s - life.last_seen_s,
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
            elif self._by_actor.get(life.actor, _UNKNOWN).version is None:
                states["without_weights"] += 1
            else:
                states["generating" if life.actor in holding else "waiting"] += 1
        return states

    def actor_at(self, version: Version, *, or_newer: bool = False, other_than: Collection[str]) -> str | None:
        """Returns the actor of a replica that has loaded `version` (with `or_newer`, or a newer one): the first such
        actor by name; None if there is none. Leaves out the actors `other_than`."""
        found = (
            actor
            for actor, replica in self._by_actor.items()
            if replica.version == version or (or_newer and replica.version is not None and replica.version > version)
        )
        return min((actor for actor in found if actor not in other_than), default=None)

    def _refusals(self, refusal_at: RefusalAt) -> dict[Version | None, Refusal | None]:
        return {version: refusal_at(version) for version, _, _ in self._standings if version is not None}
