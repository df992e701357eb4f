"""Deployments enter the run: who may, and from which state the run goes on when a learner restores a checkpoint."""

import logging
from collections.abc import Mapping

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.common.lineage import Lineage
from asyncrl.common.roles import Role, RunState
from asyncrl.coordinator.clearing import Clearing
from asyncrl.coordinator.registry import OVER, Deployment, Registry
from asyncrl.coordinator.replicas import Replicas
from asyncrl.coordinator.snapshot import Restored
from asyncrl.coordinator.waiting import Waiting
from asyncrl.data.prompts import PromptData, PromptSource
from asyncrl.errors import LearnerNotRestored

logger = logging.getLogger(__name__)


class Attachments:
    """Admits deployments to the run `run`."""

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        run: str,
        prompts: PromptSource,
        registry: Registry,
        waiting: Waiting,
        replicas: Replicas,
        clearing: Clearing,
    ) -> None:
        self._buffer = buffer
        self._run = run
        self._prompts = prompts
        self._registry = registry
        self._waiting = waiting
        self._replicas = replicas
        self._clearing = clearing

    def check(self, deployment: Deployment, *, shared: Mapping[str, object], restores: bool = False) -> None:
        """Raises an error if the deployment may not attach, and changes nothing. `restores` says whether a learner
        restores a checkpoint of the run.

        Raises the errors of `Registry.check`. Raises LearnerNotRestored for a learner that would continue a run which
        has ended, or whose trained weights it does not restore: it would train other weights under their numbers. Its
        checkpoint may be of another run.
        """
        self._registry.check(deployment, shared=shared)
        if deployment.role is not Role.LEARNER or deployment == self._registry.learner:
            return
        name, step, state = self._run, self._buffer.version.step, self._registry.state
        again = f"end the run with `asyncrl down {name}`, then start it again"
        if state in OVER or (state is RunState.CLOSING and not restores):
            why = f": {self._registry.message}" if self._registry.message else ""
            raise LearnerNotRestored(f"run {name!r} is {state}{why}; {again}")
        if restores and (before := self._registry.learner) is not None and before.nonce != deployment.nonce:
            raise LearnerNotRestored(
                f"the run {name!r} on this cluster has the nonce {before.nonce!r} in its run.json, but the checkpoint "
                f"is of another run with this name, which has the nonce {deployment.nonce!r}; set run.dir to the "
                f"directory of the first learner, or {again}"
            )
        if step and not restores:
            raise LearnerNotRestored(
                f"run {name!r} has trained {step} steps, and their weights ended with its learner; this learner would "
                f"begin again with the weights of model.path; {again}. Set model.path to saved weights, e.g. in the "
                "folder checkpoints/ of the run's directory, to begin with these"
            )

    async def attach(
        self,
        deployment: Deployment,
        *,
        shared: Mapping[str, object],
        prompts: PromptData | None = None,
        restored: Restored | None = None,
    ) -> Lineage:
        """Admits a deployment. Returns the run's lineage. Raises the errors of `check`, and RunMismatch if the
        deployment has other `prompts` than the run.

        A learner that replaces another one gets a new incarnation: the live one of the lineage. All of a learner's
        calls carry its incarnation. Those of a replaced learner raise Fenced.

        The buffer continues from what a learner `restored`, also if it is ahead of it. What the generators have made
        with surviving weights stays. The learner puts the rows of the groups that were ready at its checkpoint into the
        data plane before its first lease. Raises LearnerNotRestored for a checkpoint of another run.
        """
        self.check(deployment, shared=shared, restores=restored is not None)
        if prompts is not None:
            self._prompts.check_same(prompts)
        replaced, repeated = self._registry.learner, deployment == self._registry.learner
        lived_on = not self._untouched
        if restored is not None and not repeated:
            self._check_same_run(restored)
            self._prompts.restore(restored.snapshot.prompts)
        self._registry.attach(deployment, shared=shared)
        if restored is not None and not repeated:
            self._restore(restored, lived_on=lived_on)
            self._waiting.groups_changed()
        elif deployment.role is Role.LEARNER and replaced is not None and not repeated:
            incarnation = self._buffer.leases.succeed()
            logger.warning("learner %s replaces %s as incarnation %d", deployment.id, replaced.id, incarnation)
            self._waiting.groups_changed()
        return self._buffer.lineage

    def _check_same_run(self, restored: Restored) -> None:
        """Raises LearnerNotRestored if the lineage of a restored checkpoint does not continue that of this run.

        The same if the checkpoint is of an incarnation that did not train here, but on another cluster: the numbers of
        its attempts may be those of other attempts that generators of this cluster still make.
        """
        known = restored.snapshot.version.incarnation <= self._buffer.lineage.incarnation
        if self._untouched or (known and restored.lineage.continues(self._buffer.lineage)):
            return
        raise LearnerNotRestored(
            f"run {self._run!r} has trained {self._buffer.version.words}, but the checkpoint is of another "
            "run with this name, or of a learner on another cluster; set run.dir to the directory of this run, "
            f"or end the run with `asyncrl down {self._run}`, then start it again"
        )

    def _restore(self, restored: Restored, *, lived_on: bool) -> None:
        """Brings the buffer to the state of a checkpoint. If groups were issued since, keeps those that only surviving
        weights made, and the generators go on with their tickets."""
        left = self._buffer.version
        split_tokens = self._buffer.restore(
            restored.snapshot.buffer, lineage=restored.lineage, loaded=self._replicas.loaded_versions()
        )
        self._clearing.rows_without_slot()  # the data plane may be older than this buffer
        if not lived_on:
            return
        self._registry.set_state(RunState.STARTING)
        kept = self._buffer.account.issued.tokens
        logger.warning(
            "the learner goes back from %s to %s: %d tokens of finished groups stay, and %d tokens of groups that lost "
            "weights finished can be continued, if they were stored (generator.persist_every_tokens)",
            left,
            restored.snapshot.version,
            kept - restored.snapshot.buffer.ledger.issued.tokens,
            split_tokens,
        )

    @property
    def _untouched(self) -> bool:
        """Whether no group was ever issued, and no learner has attached."""
        return self._registry.learner is None and self._buffer.account.issued.groups == 0
