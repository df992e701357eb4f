"""The parts of a run that the doors of the coordinator share, and what the coordinator tells of them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.config.schema import Config
from asyncrl.coordinator.clearing import Clearing
from asyncrl.coordinator.registry import Registry
from asyncrl.coordinator.replicas import Replicas
from asyncrl.coordinator.snapshot import RunSnapshot
from asyncrl.coordinator.status import BriefStatus
from asyncrl.coordinator.waiting import Waiting
from asyncrl.data.prompts import PromptSource
from asyncrl.metrics.recorders import BufferMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorParts:
    """The parts of a run that a `Coordinator` holds. `clock` returns monotonic seconds."""

    config: Config
    clock: Callable[[], float]
    prompts: PromptSource
    buffer: ReplayBuffer
    registry: Registry
    replicas: Replicas
    waiting: Waiting
    clearing: Clearing
    metrics: BufferMetrics

    def brief_status(self) -> BriefStatus:
        """Returns the numbers of the run, for processes that poll them."""
        buffer, registry, replicas = self.buffer, self.registry, self.replicas
        return BriefStatus(
            run=self.config.run.name,
            state=registry.state,
            message=registry.message,
            version=buffer.version,
            published=registry.published,
            total_steps=buffer.limits.total_steps,
            max_staleness_versions=buffer.limits.max_staleness_versions,
            capacity_groups=buffer.limits.capacity_groups,
            counts=buffer.counts(),
            account=buffer.account,
            learner_attached=registry.learner_attached,
            quiet_s=registry.quiet_s,
            totals=replicas.totals,
            able=replicas.able(buffer.tickets.refusal),
            oldest_replica_step=replicas.oldest_step(),
        )

    def snapshot(self) -> RunSnapshot:
        """Returns the present state of the groups and the prompts, for a checkpoint."""
        if (recount := self.buffer.recount()) != (account := self.buffer.account):
            logger.error("the ledger has %s, but its groups add up to %s: this is a bug of asyncrl", account, recount)
        return RunSnapshot(buffer=self.buffer.snapshot(), prompts=self.prompts.state())
