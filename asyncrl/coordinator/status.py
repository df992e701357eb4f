"""The status of a run: a brief one of constant size for the processes that poll it, and a whole one for commands."""

import msgspec

from asyncrl.buffer.ledger import OPEN_FATES, Account, Fate
from asyncrl.buffer.records import Counts, FailureCount, FailureStreak
from asyncrl.buffer.snapshot import BufferSnapshot
from asyncrl.common.device_time import DeviceTime, added
from asyncrl.common.roles import RunState
from asyncrl.common.version import Lineage, Version
from asyncrl.coordinator.registry import (
    AbleReplicas,
    Deployment,
    ReplicaReport,
    ReplicaView,
    added_states,
    mean_states,
)
from asyncrl.data.prompts import PromptCursor


class GeneratorTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of all generators since the run began, for the step records.

    `samples` is the number of generated samples, and `weight_updates` that of loaded versions, summed over the
    replicas. `state_seconds` are averaged over the replicas. `device_time` are the device-seconds, one entry for each
    kind of device.

    A coordinator has the reports of all replicas since its own start, also of those that are gone, and outlives
    learners. So only the first learner that attaches to a coordinator brings the totals from before its start. A later
    learner would bring totals from the run's records that the coordinator's reports contain already.
    """

    samples: int = 0
    weight_updates: int = 0
    state_seconds: dict[str, float] = {}
    device_time: tuple[DeviceTime, ...] = ()

    def plus(self, reports: ReplicaReport) -> "GeneratorTotals":
        """Returns these totals plus those of `reports`, which is the sum of the replicas' reports."""
        return GeneratorTotals(
            samples=self.samples + reports.samples,
            weight_updates=self.weight_updates + reports.weight_updates,
            state_seconds=added_states(mean_states([reports]), self.state_seconds),
            device_time=added([*self.device_time, *reports.device_time]),
        )


class BriefStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of the run at one moment. Neither its size nor the time to make it grows with the number of groups,
    replicas or deployments.

    `quiet_s` is the time since the last progress (a committed group, an acked step, a new state), seconds. `totals` is
    the sum over the reports of all replicas, also of those that are gone. `able` are the replicas with a free slot by
    version, `oldest_replica_step` the smallest step of a version that a replica has loaded. `totals` count from the
    start of the coordinator, and `generators` from the first start of the run.
    """

    run: str
    state: RunState
    message: str
    version: Version
    published: Version | None
    total_steps: int
    max_staleness_versions: int
    capacity_groups: int
    counts: Counts
    account: Account
    learner_attached: bool
    quiet_s: float
    totals: ReplicaReport
    able: tuple[AbleReplicas, ...]
    oldest_replica_step: int | None
    generators: GeneratorTotals = GeneratorTotals()

    @property
    def groups_by_state(self) -> dict[str, int]:
        """The number of groups that hold a slot in the buffer, by state."""
        return {fate.value: getattr(self.counts, fate.value) for fate in Fate if fate in OPEN_FATES}


class RunStatus(BriefStatus, frozen=True, kw_only=True):
    """Everything that the coordinator knows. `asyncrl status` and the live view read it.

    `learner_state_seconds` are the learner's seconds by state since its start; empty before its first heartbeat.
    `targets` has the address (`host:port`) of each process's metrics endpoint, by the name of the process.
    `wanted_replicas` is the number of replicas that each generator deployment should have, by its id, and
    `scaled_because` the reason of its last change in words; "" before the first one. `given_up` says why replicas are
    not started again, by replica, since the last `asyncrl scale`.
    """

    failures: tuple[FailureCount, ...]
    failure_streak: FailureStreak | None
    replicas: tuple[ReplicaView, ...]
    reports: dict[str, ReplicaReport]
    deployments: tuple[Deployment, ...]
    learner_state_seconds: dict[str, float]
    targets: dict[str, str]
    wanted_replicas: dict[str, int] = {}
    scaled_because: str = ""
    given_up: dict[str, str] = {}


class OwnReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas that one generator deployment has started. `views` and `reports` have a replica's name as key.
    `wanted` is the number of replicas that the deployment should have; None if the coordinator does not know the
    deployment. `scalings` counts how often a person has changed the number of replicas of the run (`asyncrl scale`).
    `scaled_because` has the reason of the last change in words, also of one by the autoscaler."""

    wanted: int | None
    scalings: int
    scaled_because: str
    views: dict[str, ReplicaView]
    reports: dict[str, ReplicaReport]


# The coordinator's part of a checkpoint, and what a learner that restores one tells the coordinator.


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The buffer and the position in the order of the prompts, at one moment."""

    buffer: BufferSnapshot
    prompts: PromptCursor

    @property
    def version(self) -> Version:
        """The version of the learner at the snapshot."""
        return self.buffer.version


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """The restored state of a learner: the snapshot of its checkpoint, and the lineage in which this learner is the
    live incarnation.

    The lineage has all incarnations of the run, also those that began after the checkpoint was written. `generators`
    are the totals of the generators in the records of the run. Only a new coordinator uses them.
    """

    snapshot: RunSnapshot
    lineage: Lineage
    generators: GeneratorTotals = GeneratorTotals()
