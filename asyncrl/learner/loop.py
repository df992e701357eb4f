"""The learner's loop: lease a step's groups, train on them (`step.py`), acknowledge, publish the weights, and end the
step (`recording.py`).

Who waits for whom in a step, and the state that counts the time:

    generators ──▶ `Coordinator.commit` ──▶ `Coordinator.lease`           waiting_for_groups
                                                    │
                      ranks ◀── `Stages.train` ◀────┤                     log_probs, forward_backward, optimizer
                                                    │
             coordinator ◀── `Coordinator.ack` ◀────┤                     other
                                                    │
           weight store ◀── `Publisher.publish` ◀───┤                     publish: until the ranks have a copy
                                                    │
             records, rows ◀── `StepEnd.begin` ◀────┤                     other: until the step before is recorded; this
                                                    │                     one is recorded while the next step runs
                                                    │
                 files ◀── `Checkpoints.begin` ◀────┘                     other: until this step is recorded;
                                                                          checkpoint: until the ranks have a copy

A group that is committed, or ends in another way, wakes the lease call that waits. Engines fetch the weights from the
store while training goes on. The state is `starting` until `LearnerLoop.run` is called. A held-out evaluation runs
before the first and after the last step, and those in between run at the same time as the steps
(`HeldoutEvaluation.begin`). A run that is asked to end first saves its last version, and then publishes and evaluates
it if its grace allows it (`HeldoutEvaluation.evaluate_in_grace`). The loop keeps these invariants:

- every lease ends by ack, skip or give-back, also when a stage fails;
- a version is published only after the ack of its step;
- a run that has trained a step and ends without an error saves its last version; unless it was stopped, it also
  publishes and evaluates it;
- no version is published after the record of the run's end was written for the audit.

The time of every stage is counted in the learner's state-seconds.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial

from asyncrl.buffer.records import Lease, LeaseWait
from asyncrl.common.roles import TRAINING, RunState
from asyncrl.common.tasks import Stopped, unless_stopped
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Acked, Coordinator
from asyncrl.coordinator.status import BriefStatus, RunSnapshot
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.sample_ids import group_of
from asyncrl.errors import RowsLost, StallError
from asyncrl.learner.audit_records import Ended
from asyncrl.learner.heldout import HeldoutEvaluation
from asyncrl.learner.progress import check_progress, must_look
from asyncrl.learner.publication import Publisher
from asyncrl.learner.recording import EndedStep, StepEnd
from asyncrl.learner.records import RunTotals
from asyncrl.learner.saving import Checkpoints, KeptSteps, kept_columns
from asyncrl.learner.step import Stages, check_staleness, step_meta
from asyncrl.learner.step_checks import StepChecks, names_of
from asyncrl.learner.trained_prompts import TrainedPrompts
from asyncrl.weights.gate import should_publish

logger = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
"""Longest wait of one lease call, so that the loop checks `stop` and the run's progress in between."""
UNPUBLISHED_WAIT_S = 0.5
"""Longest wait of one lease call while the newest version is not published: generators may need it, and the loop then
publishes it between two calls."""


@dataclass(kw_only=True)
class LearnerLoop:
    """Runs the `learner.total_steps` steps of a run.

    `incarnation` is the number that the learner got from the coordinator when it attached. All calls of the learner
    carry it. `stages` has the policy and the critic, and counts the seconds of the learner's process by state; its
    state is `starting` until `run` is called. `prompts` counts the trained prompts. `kept` keeps all weights and
    batches, for `audit.keep_weights: all`.
    """

    config: Config
    incarnation: int
    coordinator: CoordinatorClient
    stages: Stages
    step_end: StepEnd
    publisher: Publisher
    heldout: HeldoutEvaluation
    checkpoints: Checkpoints
    prompts: TrainedPrompts
    kept: KeptSteps | None = None
    phase: str = field(default="publishing the first weights", init=False)
    _unpublished: bool = field(default=False, init=False)
    """True if the learner has a newer version than the published one."""

    def __post_init__(self) -> None:
        self._checks = StepChecks(config=self.config, recorder=self.step_end.recorder, prompts=self.prompts)

    async def run(self, stop: asyncio.Event) -> RunTotals:
        """Trains until `learner.total_steps`, the last prompt, `run.stop_when` or `stop`, and returns the run's totals.

        Raises CheckpointError before the first step if the run's checkpoints cannot be written.
        """
        try:
            return await self._run(stop)
        finally:
            await self.heldout.cancel()
            await self.publisher.stop()

    async def _run(self, stop: asyncio.Event) -> RunTotals:
        self.stages.states.enter("other")
        await self.checkpoints.check()
        learner = self.config.learner
        samples = learner.groups_per_step * learner.group_size
        await asyncio.to_thread(self.stages.policy.prepare_step, samples, learner.group_size)
        # Admission stays paused until the first version is published and evaluated: see `asyncrl.learner.heldout`.
        await self.coordinator.call(Coordinator.pause, self.incarnation)
        first = version = (await self.coordinator.call(Coordinator.brief_status)).version
        await self._publish(version)
        await self._keep_weights(version)
        if self.step_end.recorder.before is None:
            await self._evaluate(version, stop)
            self.heldout.check()
        else:  # a resumed run had its first evaluation in an earlier process
            await self.publisher.settle()
        if not stop.is_set():  # no group is begun after a request to end
            await self.coordinator.call(Coordinator.resume, self.incarnation)
        await self.coordinator.call(Coordinator.set_state, self.incarnation, RunState.RUNNING)
        self.phase = TRAINING
        try:
            while (lease := await self._lease(stop)) is not None:
                before, (version, snapshot) = version, await self._step_and_end_lease(lease)
                if version != before:
                    self.heldout.begin(version)
                if snapshot is not None:
                    await self._save(snapshot)
                self.heldout.check()
        except BaseException:
            await self.step_end.settle_after_error()
            raise
        await self.step_end.settle()
        if not stop.is_set():
            with contextlib.suppress(Stopped):
                await unless_stopped(stop, self.heldout.settle())
        self.phase = "closing"
        self.stages.states.enter("other")
        await self.coordinator.call(Coordinator.set_state, self.incarnation, RunState.CLOSING)
        if not stop.is_set():
            try:
                await self._evaluate_last(version, stop)
            except StallError as error:
                logger.error("held-out evaluation of %s is left out: %s", version.words, error)
        if version != first:  # a run that trained no step has no new weights to save
            snapshot = await self.coordinator.call(Coordinator.snapshot, self.incarnation)
            await self._while_saving(self.checkpoints.save_last(snapshot), version)
            if stop.is_set():  # only the end of the grace ends this evaluation, so it gets an event that is not set
                await self.heldout.evaluate_in_grace(version, partial(self._evaluate_last, version, asyncio.Event()))
        await self.publisher.stop()  # no record of a published version may follow that of the end, which must be last
        ledger = await self.coordinator.call(Coordinator.ledger_entry, self.incarnation)
        self.step_end.append_audit(Ended(version, ledger))
        retained = await self.coordinator.call(Coordinator.release, self.incarnation, None)
        await self.step_end.clear(retained)
        await self.coordinator.call(Coordinator.clear_dropped, self.incarnation)
        stop_reason = self.heldout.stop_reason(version)
        rows = await self.step_end.outstanding(until_none=stop_reason is None and not stop.is_set())
        status = await self.coordinator.call(Coordinator.status)
        self.heldout.check()  # last, because it may raise: the trained weights are correct, and are saved by now
        return self.step_end.recorder.run_totals(status, rows_outstanding=rows, stop_reason=stop_reason)

    # --- one step -----------------------------------------------------------------------------------------------

    async def _lease(self, stop: asyncio.Event) -> Lease | None:
        """Waits for the groups of the next step; returns None when there are no more steps, `stop` is set, or an
        evaluation has reached the reward of `run.stop_when`.

        Raises StallError when no group was committed for too long, RunError after too many failures
        (`check_progress`), and ActorGone when the index of the data plane has died. Also raises an error of the
        delivery of weights after which no delivery can succeed (`Publisher.check`).
        """
        self.stages.states.enter("waiting_for_groups")
        while not stop.is_set() and self.heldout.reached is None:
            wait_s = min(LEASE_WAIT_S, self.config.run.stall_timeout_s)
            if self._unpublished:
                wait_s = min(wait_s, UNPUBLISHED_WAIT_S)
            answer = await self.coordinator.call(Coordinator.lease, self.incarnation, wait_s=wait_s)
            if isinstance(answer, Lease):
                self.stages.states.enter("other")
                return answer
            if answer is LeaseWait.FINISHED:
                return None
            # Raises if the index of the data plane has died. This check comes first: a dead index makes rollouts fail,
            # so `check_progress` would name another cause.
            await self.step_end.outstanding()
            self.publisher.check()
            status = await self.coordinator.call(Coordinator.brief_status)
            await self._publish_if_due(status)
            if must_look(status, waits=answer, config=self.config):
                check_progress(
                    await self.coordinator.call(Coordinator.status),
                    waits=answer,
                    config=self.config,
                    delivery=self.publisher.trouble,
                )
            if self.checkpoints.due(status.version.step):
                await self._save(await self.coordinator.call(Coordinator.snapshot, self.incarnation))
        return None

    async def _step_and_end_lease(self, lease: Lease) -> tuple[Version, RunSnapshot | None]:
        """Runs `_step`, which ends its lease. If `_step` raises, gives the lease back and raises the error, which ends
        the run.

        After a failed parity check, or a check of the witness that fails after the optimizer's step, the policy is
        already trained on the groups that are given back.
        """
        try:
            return await self._step(lease)
        except BaseException:
            # The coordinator refuses and counts a give-back of a lease that has already ended. An error of the
            # give-back is suppressed, so that the caller gets the error that ended the step.
            with contextlib.suppress(Exception):
                await self.coordinator.call(Coordinator.give_back, lease.incarnation, lease.step)
            raise

    async def _step(self, lease: Lease) -> tuple[Version, RunSnapshot | None]:
        """Trains the groups of one lease and ends the lease.

        Returns the learner's version afterwards, and the snapshot of the run if a checkpoint is due.
        """
        started_s = self.stages.clock()
        check_staleness(lease)
        samples = self.stages.prepare(lease)
        meta = step_meta(lease, extra=self.config.extra_columns)
        only_critic = self.stages.trains_only_critic(lease.step)
        self.phase = "training only the critic (critic.warmup_steps)" if only_critic else TRAINING
        try:
            report, critic_report = await self.stages.train(meta, samples, step=lease.step)
        except RowsLost as lost:
            return await self._repeat_without(lost, lease), None
        # A skipped step may have NaN log-probs, which say nothing about parity.
        parity_ratio = None if report.skipped else self._checks.parity(report, step=lease.step)
        findings = self._checks.witness([report, critic_report], lease)
        if report.skipped:
            acked, published_bits, (status, clearable) = None, None, await self._skip(lease)
        else:
            acked = await self._ack(lease)
            status, clearable = acked.status, acked.clearable
            published_bits = await self._publish_if_due(status)
            self._checks.published(published_bits, report, step=lease.step)
        ended = EndedStep(
            lease=lease,
            samples=samples,
            report=report,
            critic_report=critic_report,
            status=status,
            published=self.publisher.published,
            duration_s=self.stages.clock() - started_s,
            parity_ratio=parity_ratio,
            findings=findings,
            published_bits_ratio=published_bits,
        )
        if acked is not None:
            await self._keep_batch(lease, meta)
            await self._keep_weights(status.version)
        await self.step_end.begin(ended, clearable, meta=meta, ledger=None if acked is None else acked.ledger)
        self._checks.nonfinite([report, critic_report], lease)
        return status.version, None if acked is None else acked.snapshot

    async def _repeat_without(self, lost: RowsLost, lease: Lease) -> Version:
        """Gives back a lease of which rows are lost, and reports the lost groups to the coordinator.

        The policy was not trained. The prompts of the lost groups are generated again, as new attempts. The other
        groups are leased again. Returns the learner's unchanged version.
        """
        logger.warning("step %d is repeated, and its lost groups are generated again: %s", lease.step, lost)
        keys = {group_of(sample): None for sample in lost.sample_ids}
        await self.coordinator.call(Coordinator.give_back, lease.incarnation, lease.step)
        await self.coordinator.call(Coordinator.rows_lost, lease.incarnation, list(keys))
        await self.step_end.rows.clear(list(keys))
        return Version(lease.incarnation, lease.step)

    async def _keep_batch(self, lease: Lease, meta: KVBatchMeta) -> None:
        """Keeps the rows of a trained step, for `audit.keep_weights: all`."""
        if self.kept is not None:
            columns = kept_columns(with_logprobs=self.stages.writes_logprobs, extra=self.config.extra_columns)
            await self.kept.keep_batch(lease, self.step_end.rows.read(meta, columns))

    async def _keep_weights(self, version: Version) -> None:
        """Keeps the weights of a version, for `audit.keep_weights: all`."""
        if self.kept is not None:
            # The ranks write from a single copy of their weights, and a running save still reads this copy.
            await self.checkpoints.settle()
            await asyncio.to_thread(self.stages.policy.save_checkpoint, self.kept.weights_path(version))

    async def _ack(self, lease: Lease) -> Acked:
        """Acknowledges a trained step, which increments the version."""
        due = self.checkpoints.due(lease.step + 1)
        return await self.coordinator.call(Coordinator.ack, lease.incarnation, lease.step, snapshot=due)

    async def _skip(self, lease: Lease) -> tuple[BriefStatus, tuple[str, ...]]:
        """Ends the lease of a step in which no update of the policy was finite, so that the policy's weights did not
        change. A critic may have been trained. The version stays, and other prompts replace the groups.

        Returns the state of the run, and the keys of the groups whose rows may be cleared.
        """
        logger.error(
            "step %d was skipped because a loss or a gradient is not finite: the policy's weights stay; the groups of "
            "the step are discarded: %s",
            lease.step,
            names_of(lease),
        )
        clearable = await self.coordinator.call(Coordinator.skip, lease.incarnation, lease.step)
        return await self.coordinator.call(Coordinator.brief_status), clearable

    # --- checkpoints, weights and evaluation --------------------------------------------------------------------

    async def _save(self, snapshot: RunSnapshot) -> None:
        """Begins a save. Returns when the state is copied, and training can go on."""
        await self.step_end.settle()
        last_step = snapshot.version.step >= self.config.learner.total_steps
        await self._while_saving(self.checkpoints.begin(snapshot, last_step=last_step), snapshot.version)

    async def _while_saving(self, saving: Awaitable[None], version: Version) -> None:
        """Awaits `saving` with the phase and the state that show that training waits for a checkpoint."""
        before, self.phase = self.phase, f"saving the weights of {version.words}"
        with self.stages.states.within("checkpoint"):
            await saving
        self.phase = before

    async def _publish(self, version: Version) -> float | None:
        """Publishes `version`, and returns the share of the elements whose bits changed (`Publisher.publish`). The time
        until its snapshot is taken counts as the state `publish`."""
        with self.stages.states.within("publish"):
            return await self.publisher.publish(version)

    async def _evaluate_last(self, version: Version, stop: asyncio.Event) -> None:
        """Publishes and evaluates the last version, as far as this has not happened yet. `stop` ends the wait for the
        delivery and cancels the evaluation. Raises StallError if the weights cannot be delivered, or if no replica
        loads or evaluates them."""
        if self.publisher.published != version:
            await self._publish(version)
        await self._evaluate(version, stop)

    async def _publish_if_due(self, status: BriefStatus) -> float | None:
        """Publishes the learner's version if it is due, or if no replica with a free slot gets a ticket without it
        (`should_publish`). Returns the share of the elements whose bits changed; None if it publishes nothing."""
        changed = None
        if should_publish(
            version=status.version,
            published=self.publisher.published,
            publish_every_steps=self.config.weights.publish_every_steps,
            able=status.able,
        ):
            changed = await self._publish(status.version)
        self._unpublished = self.publisher.published != status.version
        return changed

    async def _evaluate(self, version: Version, stop: asyncio.Event) -> None:
        """Waits until `version` is delivered, and evaluates it on held-out tasks unless it was evaluated already.
        `stop` ends the wait and the evaluation: the generators may be shutting down, so neither might ever end."""
        with contextlib.suppress(Stopped):
            await unless_stopped(stop, self.publisher.settle())
            if self.heldout.wanted and not self.heldout.has_evaluated(version):
                await self.coordinator.call(Coordinator.pause, self.incarnation)
                await unless_stopped(stop, self._evaluate_on_a_replica(version))

    async def _evaluate_on_a_replica(self, version: Version) -> None:
        """Waits for the first replica that has loaded `version`, and evaluates the version on it. Raises StallError if
        no replica loads or evaluates it."""
        self.phase = f"waiting for a generator to load the weights of {version.words}"
        actor = await self.heldout.replica_at(version)
        self.phase = f"evaluating the weights of {version.words}"
        await self.heldout.evaluate(version, actor=actor)
