"""The learner's loop: lease, filters and advantages, train, ack, publish; held-out evaluation at both ends.

With token-level advantages: lease, filters, log-probs, advantages, train. With a critic: lease, filters, values,
log-probs, token-level advantages, train the critic, train the policy.

What must hold: a lease ends by ack, skip or give-back, whatever happens in between; a version is published only after
its ack; the last version is published, evaluated and saved before the run ends. Every stage is timed into the learner's
state-seconds.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from asyncrl.algorithms.advantages import Estimator
from asyncrl.algorithms.filters import build_filters
from asyncrl.algorithms.loss import build_loss
from asyncrl.algorithms.presets import advantage_of
from asyncrl.algorithms.token_estimators import OUTCOME, DiscountedReturns, resolve_estimators
from asyncrl.buffer.actor import RunStatus
from asyncrl.buffer.membership import RunState
from asyncrl.buffer.records import Lease, LeaseWait, Version
from asyncrl.config.schema import Config
from asyncrl.data_plane.clients import TRAIN_PARTITION
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.partitions import group_of
from asyncrl.errors import NonFiniteError, ParityError, RowsLost
from asyncrl.learner.batch import Decode, StepSamples, check_staleness, judge_samples, sample_ids, step_meta
from asyncrl.learner.critic import CriticStages
from asyncrl.learner.heldout import HeldoutEvaluation
from asyncrl.learner.interfaces import Buffer, Critic, Publications, RunLog, Saves, Trainer
from asyncrl.learner.progress import check_progress
from asyncrl.learner.recording import EndedStep, StepRecorder
from asyncrl.learner.records import RunTotals
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.states import StateClock
from asyncrl.policy.interfaces import StepReport
from asyncrl.policy.step_plan import needs_proximal, needs_reference
from asyncrl.weights.gate import should_publish
from asyncrl.weights.parity import parity_tolerance_nats

logger = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
ROWS_SETTLE_S = 5.0
ROWS_POLL_S = 0.1


class LearnerLoop:
    """One run's loop over `learner.total_steps` steps. `states` times the learner's process, which is starting until
    `run`; `started_s` is the run's start on the monotonic clock."""

    def __init__(
        self,
        *,
        config: Config,
        policy: Trainer,
        critic: Critic | None = None,
        publisher: Publications,
        buffer: Buffer,
        heldout: HeldoutEvaluation,
        checkpoints: Saves,
        log: RunLog,
        metrics: LearnerMetrics,
        states: StateClock,
        decode: Decode,
        started_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._policy = policy
        self._publisher = publisher
        self._buffer = buffer
        self._heldout = heldout
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._clock = clock
        self._loss = build_loss(config)
        self._critic = None if critic is None else CriticStages(config=config, critic=critic)
        self._estimator: Estimator | None = None
        self._by_token: DiscountedReturns | None = None
        if critic is None:  # else its ranks have an estimator
            self._estimator, self._by_token = resolve_estimators(advantage_of(config.algorithm))
        self._filters = build_filters(config)
        self._states = states
        self._recorder = StepRecorder(
            log=log,
            metrics=metrics,
            groups_logged=config.learner.groups_logged,
            decode=decode,
            elapsed_s=lambda: clock() - started_s,
            state_seconds=states.seconds,
        )
        self._nonfinite_in_a_row = 0
        self.phase = "publishing the first weights"

    async def run(self, stop: asyncio.Event) -> RunTotals:
        """Trains until the last step, the last prompt or `stop`."""
        self._states.enter("other")
        learner = self._config.learner
        samples = learner.groups_per_step * learner.group_size
        await asyncio.to_thread(self._policy.prepare_step, samples, learner.group_size)
        await self._buffer.call("pause")
        first = version = (await self._buffer.status()).version
        await self._publish(version)
        await self._evaluate(version, stop)
        await self._buffer.call("resume")
        await self._buffer.call("set_state", RunState.RUNNING)
        self.phase = "training"
        while not stop.is_set():
            lease = await self._lease(stop)
            if lease is None:
                break
            try:
                version = await self._step(lease)
            except BaseException:
                # Refused and counted when the lease has already ended; what is raised is the first cause.
                with contextlib.suppress(Exception):
                    await self._buffer.call("give_back", lease.incarnation, lease.step)
                raise
            if self._checkpoints.due(version.step):
                await self._while_saving(self._checkpoints.save_or_go_on(version.step), version)
        self.phase = "closing"
        self._states.enter("other")
        await self._buffer.call("set_state", RunState.CLOSING)
        if not stop.is_set():
            if self._publisher.published != version:
                await self._publish(version)
            await self._evaluate(version, stop)
        await self._publisher.settle()
        if version != first:
            await self._while_saving(self._checkpoints.save_last(version.step), version)
        rows = await self._rows_outstanding(until_none=not stop.is_set())
        return self._recorder.run_totals(await self._buffer.status(), rows_outstanding=rows)

    # --- one step -----------------------------------------------------------------------------------------------

    async def _lease(self, stop: asyncio.Event) -> Lease | None:
        """The next step's groups; None when the run is over. StallError when nothing moves."""
        self._states.enter("waiting_for_groups")
        while not stop.is_set():
            answer = await self._buffer.lease(wait_s=min(LEASE_WAIT_S, self._config.run.stall_timeout_s))
            if isinstance(answer, Lease):
                self._states.enter("other")
                return answer
            if answer is LeaseWait.FINISHED:
                return None
            check_progress(await self._buffer.status(), waits=answer, config=self._config)
        return None

    async def _step(self, lease: Lease) -> Version:
        """Trains one lease and ends it; the learner's version after it."""
        started_s = self._clock()
        check_staleness(lease)
        samples = judge_samples(lease.groups, estimator=self._estimator, filters=self._filters)
        meta = step_meta(lease)
        try:
            report, critic_report = await self._train(meta, samples, step=lease.step)
        except RowsLost as lost:
            return await self._give_back(lease, lost)
        if not report.skipped:  # NaN log-probs skip the step; they say nothing of two models' agreement
            self._check_parity(report, step=lease.step)
        status = await (self._skip(lease) if report.skipped else self._ack(lease))
        ended = EndedStep(
            lease=lease,
            samples=samples,
            report=report,
            critic_report=critic_report,
            status=status,
            published=self._publisher.published,
            duration_s=self._clock() - started_s,
        )
        if report.skipped:
            self._recorder.skipped(ended)
        else:
            self._recorder.trained(ended)
            await self._write_samples(lease, meta)
        await asyncio.to_thread(self._policy.finish_step, meta)
        await self._rows_outstanding()
        self._check_nonfinite([report, critic_report], lease)
        return status.version

    async def _train(
        self, meta: KVBatchMeta, samples: StepSamples, *, step: int
    ) -> tuple[StepReport, StepReport | None]:
        """The step's stages, in order; the reports of policy and critic. RowsLost when rows are gone; then the policy
        was not trained. The critic, which is trained before it, may have been: what is left of the rows teaches it once
        more, and its advantages are made anew."""
        policy, critic = self._policy, self._critic
        # names what advantages and the critic are made of, which the policy's training does not fetch
        aside = meta.slice(0, meta.size)
        read: frozenset[str] = getattr(self._loss, "columns", frozenset())
        columns = {"sample_mask": samples.mask_B}
        # some objectives count tokens by prompt, or those of good rows
        columns |= {"rewards": samples.rewards_B} if "rewards" in read else {}
        columns |= {"group_ids": samples.group_ids_B} if "group_ids" in read else {}
        if critic is None and self._by_token is None:
            await asyncio.to_thread(policy.write_to_dataplane, meta, {"advantages": samples.advantages_B, **columns})
        else:
            made_of = {OUTCOME: samples.advantages_B} if critic is None else {"rewards": samples.rewards_B}
            await asyncio.to_thread(policy.write_to_dataplane, aside, columns | made_of)
            meta = meta.with_fields(["advantages", *columns])
        with self._states.within("log_probs"):
            await self._score(meta, aside)
        critic_report = None
        if critic is not None:
            critic_report = await self._timed(critic.train(aside))
        waits = critic is not None and critic.policy_waits(step)
        self.phase = "training the critic alone (critic.warmup_steps)" if waits else "training"
        return await self._timed(self._train_policy(meta, eval_mode=waits)), critic_report

    async def _score(self, meta: KVBatchMeta, aside: KVBatchMeta) -> None:
        """What the objective reads of each token, and the advantages where tokens have their own, which may be made of
        it too."""
        policy, critic, updates = self._policy, self._critic, self._config.learner.updates_per_step
        reads: tuple[str, ...] = ()
        if critic is not None:
            reads = critic.reads
            await critic.write_values(aside)
        elif self._by_token is not None:
            reads = self._by_token.reads
        if needs_reference(self._loss) or "reference_policy_logprobs" in reads:
            await asyncio.to_thread(policy.get_reference_policy_logprobs_from_meta, meta)
        if needs_proximal(self._loss, updates=updates) or "prev_logprobs" in reads:
            await asyncio.to_thread(policy.get_logprobs_from_meta, meta)
        if critic is not None:
            await critic.write_advantages(aside)
        elif self._by_token is not None:
            await asyncio.to_thread(policy.get_advantages_from_meta, aside, self._by_token)

    async def _train_policy(self, meta: KVBatchMeta, *, eval_mode: bool) -> StepReport:
        """In eval mode the step is only looked at."""
        updates = self._config.learner.updates_per_step
        # a last short step that cannot be shared evenly is one update
        gbs = meta.size if meta.size % (updates * self._config.learner.ranks) else meta.size // updates
        result = await asyncio.to_thread(self._policy.train_from_meta, meta, self._loss, eval_mode=eval_mode, gbs=gbs)
        report: StepReport = result["report"]
        return report

    async def _timed(self, training: Awaitable[StepReport]) -> StepReport:
        """Its report. The ranks know best how long they took for what: what the call took beyond that is `other`."""
        self._states.enter("forward_backward")
        started_s = self._clock()
        report = await training
        elsewhere = {name: report.seconds.get(name, 0.0) for name in ("log_probs", "optimizer")}
        elsewhere["other"] = max(0.0, self._clock() - started_s - sum(report.seconds.values()))
        self._states.enter("other")
        self._states.reattribute("forward_backward", elsewhere)
        return report

    async def _give_back(self, lease: Lease, lost: RowsLost) -> Version:
        """Nothing was trained: what is left of the step is leased again, with others in the place of what is lost."""
        logger.warning("step %d is given back: %s", lease.step, lost)
        keys = {group_of(sample): None for sample in lost.sample_ids}
        await self._buffer.call("give_back", lease.incarnation, lease.step)
        await self._buffer.call("rows_lost", list(keys))
        samples = [name for g in lease.groups if g.meta.key in keys for name in sample_ids(g)]
        await asyncio.to_thread(self._policy.discard_samples, samples, TRAIN_PARTITION)
        return Version(lease.incarnation, lease.step)

    async def _rows_outstanding(self, *, until_none: bool = False) -> int:
        """Rows in the data plane. At the run's end others may still be clearing what nobody trained: for a while, what
        is left is looked at again."""
        deadline_s = self._clock() + ROWS_SETTLE_S
        while True:
            rows = sum((await asyncio.to_thread(self._policy.rows_outstanding)).values())
            self._metrics.rows_outstanding(rows)
            if not (until_none and rows) or self._clock() > deadline_s:
                return rows
            await asyncio.sleep(ROWS_POLL_S)

    async def _write_samples(self, lease: Lease, meta: KVBatchMeta) -> None:
        """The first `learner.groups_logged` groups in full."""
        places = self._recorder.logged_samples(lease)
        if places:
            row_of = {name: row for row, name in enumerate(meta.sample_ids)}
            names = [sample_ids(lease.groups[group])[sample] for group, sample in places]
            rows = await asyncio.to_thread(
                self._policy.read_from_dataplane,
                meta.subset([row_of[name] for name in names]),
                select_fields=["input_ids", "weight_versions", "advantages", *self._logged_logprobs()],
            )
            self._recorder.write_samples(lease, places, rows)

    def _logged_logprobs(self) -> list[str]:
        if not self._config.learner.logprobs_logged:
            return []
        computed = needs_proximal(self._loss, updates=self._config.learner.updates_per_step)
        return ["generation_logprobs", *(["prev_logprobs"] if computed else [])]

    async def _ack(self, lease: Lease) -> RunStatus:
        """The step is trained: the version grows, and is published if the gate says so."""
        status: RunStatus = await self._buffer.call("ack", lease.incarnation, lease.step)
        if should_publish(
            version=status.version,
            published=self._publisher.published,
            publish_every_steps=self._config.weights.publish_every_steps,
            replicas=status.replicas,
        ):
            await self._publish(status.version)
        return status

    async def _skip(self, lease: Lease) -> RunStatus:
        """Nothing was applied: the version stays, other prompts take the groups' places."""
        logger.error("step %d was skipped: a loss or gradient is not finite; groups %s", lease.step, _names(lease))
        await self._buffer.call("skip", lease.incarnation, lease.step)
        return await self._buffer.status()

    def _check_parity(self, report: StepReport, *, step: int) -> None:
        """On-policy tokens must have the log-probs that they were sampled with."""
        self._metrics.parity(report.on_policy_parity_max_nats)
        tolerance = parity_tolerance_nats(self._config)
        if report.on_policy_parity_max_nats <= tolerance:
            return
        message = (
            f"step {step}: log-probs of {report.on_policy_tokens} on-policy tokens differ by up to "
            f"{report.on_policy_parity_max_nats:.3g} nats from those they were sampled with "
            f"(weights.parity_tolerance_nats = {tolerance:g})"
        )
        if self._config.weights.on_parity_failure == "stop":
            raise ParityError(message)
        logger.error("%s", message)

    def _check_nonfinite(self, reports: Sequence[StepReport | None], lease: Lease) -> None:
        """Steps in a row that policy or critic skipped must end (F21)."""
        skipped = any(report is not None and report.skipped for report in reports)
        self._nonfinite_in_a_row = self._nonfinite_in_a_row + 1 if skipped else 0
        limit = self._config.learner.max_nonfinite_steps
        if self._nonfinite_in_a_row >= limit:
            raise NonFiniteError(
                f"{limit} steps in a row had a non-finite loss or gradient (learner.max_nonfinite_steps); the last one "
                f"trained groups {_names(lease, most=8)}"
            )

    # --- weights and evaluation ---------------------------------------------------------------------------------

    async def _while_saving(self, saving: Awaitable[None], version: Version) -> None:
        before, self.phase = self.phase, f"saving the weights of {version.words}"
        with self._states.within("checkpoint"):
            await saving
        self.phase = before

    async def _publish(self, version: Version) -> None:
        with self._states.within("publish"):
            await self._publisher.publish(version)

    async def _evaluate(self, version: Version, stop: asyncio.Event) -> None:
        """Held-out evaluation of `version`, given up at `stop`: the generators may be on their way out as well."""
        await self._publisher.settle()
        if not self._heldout.wanted:
            return
        await self._buffer.call("pause")
        evaluation = asyncio.create_task(self._heldout_reward(version), name=f"evaluation of {version}")
        stopping = asyncio.create_task(stop.wait(), name="stopping")
        try:
            await asyncio.wait([evaluation, stopping], return_when=asyncio.FIRST_COMPLETED)
            if evaluation.done():
                evaluation.result()
        finally:
            for task in (evaluation, stopping):
                task.cancel()
            await asyncio.gather(evaluation, stopping, return_exceptions=True)

    async def _heldout_reward(self, version: Version) -> None:
        """Greedy, by whichever replica has loaded `version` first."""
        self.phase = f"waiting for a generator to load the weights of {version.words}"
        actor = await self._heldout.replica_at(version)
        self.phase = f"evaluating the weights of {version.words}"
        await self._heldout.evaluate(version, actor=actor)


def _names(lease: Lease, *, most: int | None = None) -> str:
    return ", ".join(group.meta.key for group in lease.groups[:most])
