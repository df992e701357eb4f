"""Deployments enter the run: who may, and from which state the run goes on when a learner restores a checkpoint."""

import logging
from collections.abc import Mapping

from asyncrl.common.lineage import Lineage
from asyncrl.common.roles import Role, RunState
from asyncrl.coordinator.parts import CoordinatorParts
from asyncrl.coordinator.registry import OVER, Deployment
from asyncrl.coordinator.snapshot import Restored
from asyncrl.data.prompts import PromptData
from asyncrl.errors import LearnerNotRestored

logger = logging.getLogger(__name__)


class Attachments:
    """Admits deployments to the run."""

    def __init__(self, parts: CoordinatorParts) -> None:
        self._parts = parts

    def check(self, deployment: Deployment, *, shared: Mapping[str, object], restores: bool = False) -> None:
        """Raises an error if the deployment may not attach, and changes nothing. `restores` says whether a learner
        restores a checkpoint of the run.

        Raises the errors of `Registry.check`. Raises LearnerNotRestored for a learner that would continue a run which
        has ended, or whose trained weights it does not restore: it would train other weights under their numbers. Its
        checkpoint may be of another run.
        """
        self._parts.registry.check(deployment, shared=shared)
        if deployment.role is not Role.LEARNER or deployment == self._parts.registry.learner:
            return
        name, step, state = self._parts.config.run.name, self._parts.buffer.version.step, self._parts.registry.state
        again = f"end the run with `asyncrl down {name}`, then start it again"
        if state in OVER or (state is RunState.CLOSING and not restores):
            why = f": {self._parts.registry.message}" if self._parts.registry.message else ""
            raise LearnerNotRestored(f"run {name!r} is {state}{why}; {again}")
        if restores and (before := self._parts.registry.learner) is not None and before.nonce != deployment.nonce:
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
            self._parts.prompts.check_same(prompts)
        replaced, repeated = self._parts.registry.learner, deployment == self._parts.registry.learner
        lived_on = not self._untouched
        if restored is not None and not repeated:
            self._check_same_run(restored)
            self._parts.prompts.restore(restored.snapshot.prompts)
        self._parts.registry.attach(deployment, shared=shared)
        if restored is not None and not repeated:
            self._restore(restored, lived_on=lived_on)
            self._parts.waiting.groups_changed()
        elif deployment.role is Role.LEARNER and replaced is not None and not repeated:
            incarnation = self._parts.buffer.leases.succeed()
            logger.warning("learner %s replaces %s as incarnation %d", deployment.id, replaced.id, incarnation)
            self._parts.waiting.groups_changed()
        return self._parts.buffer.lineage

    def _check_same_run(self, restored: Restored) -> None:
        """Raises LearnerNotRestored if the lineage of a restored checkpoint does not continue that of this run.

        The same if the checkpoint is of an incarnation that did not train here, but on another cluster: the numbers of
        its attempts may be those of other attempts that generators of this cluster still make.
        """
        known = restored.snapshot.version.incarnation <= self._parts.buffer.lineage.incarnation
        if self._untouched or (known and restored.lineage.continues(self._parts.buffer.lineage)):
            return
        name, at = self._parts.config.run.name, self._parts.buffer.version.words
        raise LearnerNotRestored(
            f"run {name!r} has trained {at}, but the checkpoint is of another run with this "
            "name, or of a learner on another cluster; set run.dir to the directory of this run, or end the run with "
            f"`asyncrl down {name}`, then start it again"
        )

    def _restore(self, restored: Restored, *, lived_on: bool) -> None:
        """Brings the buffer to the state of a checkpoint. If groups were issued since, keeps those that only surviving
        weights made, and the generators go on with their tickets."""
        left = self._parts.buffer.version
        split_tokens = self._parts.buffer.restore(
            restored.snapshot.buffer, lineage=restored.lineage, loaded=self._parts.replicas.loaded
        )
        self._parts.clearing.rows_without_slot()  # the data plane may be older than this buffer
        if not lived_on:
            return
        self._parts.registry.set_state(RunState.STARTING)
        kept = self._parts.buffer.account.issued.tokens
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
        return self._parts.registry.learner is None and self._parts.buffer.account.issued.groups == 0
