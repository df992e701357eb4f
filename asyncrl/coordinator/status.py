"""The status of a run: one message with everything that the coordinator knows."""

import msgspec

from asyncrl.buffer.ledger import OPEN_FATES, Account, Fate
from asyncrl.buffer.records import Counts, FailureCount, FailureStreak
from asyncrl.common.roles import RunState
from asyncrl.common.version import Version
from asyncrl.coordinator.registry import Deployment
from asyncrl.coordinator.replicas import ReplicaReport, ReplicaView


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the run at one moment. `asyncrl status` and the live view read it.

    `learner_state_seconds` are the learner's seconds by state since its start; empty before its first heartbeat.
    `quiet_s` is the time since the last progress (a committed group, an acked step, a new state), seconds.
    `wanted_replicas` is the number of replicas that each generator deployment should have, by its id.
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
    failures: tuple[FailureCount, ...]
    failure_streak: FailureStreak | None
    replicas: tuple[ReplicaView, ...]
    reports: dict[str, ReplicaReport]
    deployments: tuple[Deployment, ...]
    learner_state_seconds: dict[str, float]
    quiet_s: float
    targets: dict[str, str]
    wanted_replicas: dict[str, int] = {}

    @property
    def groups_by_state(self) -> dict[str, int]:
        """The number of groups that hold a slot in the buffer, by state."""
        return {fate.value: getattr(self.counts, fate.value) for fate in Fate if fate in OPEN_FATES}
