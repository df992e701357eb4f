"""The learner's loop: lease, advantages, train, ack, publish; held-out evaluation at both ends.

What must hold: a lease ends by ack, skip or give-back, whatever happens in between; a version is published only after
its ack; the last version is published and evaluated before the run ends. Every stage is timed into the learner's
state-seconds.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from asyncrl.algorithms.advantages import resolve_estimator
from asyncrl.buffer.actor import BufferClient, RunStatus
from asyncrl.buffer.ledger import Fate
from asyncrl.buffer.membership import RunState
from asyncrl.buffer.records import Lease, LeasedGroup, LeaseWait, Version
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data_plane.calls import finished
from asyncrl.data_plane.object_store import RowClient
from asyncrl.errors import NonFiniteError, ParityError, RunError, StallError
from asyncrl.learner.batch import (
    check_staleness,
    counts_by_staleness,
    group_advantages,
    sample_record,
    train_groups,
    zero_variance_share,
)
from asyncrl.learner.publication import Publisher
from asyncrl.learner.records import EvalRecord, RunTotals, SampleRecord, StepRecord
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.states import StateClock
from asyncrl.policy.interfaces import StepReport, TrainGroup
from asyncrl.weights.gate import should_publish
from asyncrl.weights.parity import parity_tolerance_nats

logger = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
REPLICA_POLL_S = 0.1
DISCARDED_FATES = (Fate.DROPPED, Fate.FILTERED, Fate.SKIPPED, Fate.ROWS_LOST, Fate.FAILED, Fate.RETURNED_ON_RESUME)


class Trainer(Protocol):
    """The policy as the loop needs it."""

    async def train_step(self, groups: Sequence[TrainGroup], *, step: int) -> StepReport: ...


class RunLog(Protocol):
    """Where records go."""

    def append_step(self, record: StepRecord) -> None: ...
    def append_eval(self, record: EvalRecord) -> None: ...
    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None: ...


@dataclass(kw_only=True)
class _Totals:
    """What adds up over the run on the learner's side."""

    mid_sequence_updates: int = 0
    nonfinite_in_a_row: int = 0
    published: int = 0


class LearnerLoop:
    """One run's loop over `learner.total_steps` steps. `started_s` is the run's start on the monotonic clock."""

    def __init__(
        self,
        *,
        config: Config,
        policy: Trainer,
        publisher: Publisher,
        buffer: BufferClient,
        rows: RowClient,
        log: RunLog,
        metrics: LearnerMetrics,
        heldout: Sequence[Task],
        decode: Callable[[Sequence[int]], str],
        started_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._policy = policy
        self._publisher = publisher
        self._buffer = buffer
        self._rows = rows
        self._log = log
        self._metrics = metrics
        self._heldout = list(heldout[: config.eval.prompts])
        self._decode = decode
        self._started_s = started_s
        self._clock = clock
        self._estimator = resolve_estimator(config.algorithm.advantage)
        self._states = StateClock(states=LEARNER_STATES, initial="other", clock=clock)
        metrics.states_from(self._states.seconds)
        self._totals = _Totals()
        self.phase = "starting"

    async def run(self, stop: asyncio.Event) -> RunTotals:
        """Trains until the last step, the last prompt or `stop`."""
        await self._buffer.call("pause")
        version = (await self._buffer.status()).version
        await self._publish(version)
        await self._evaluate(version)
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
                await self._buffer.call("give_back", lease.incarnation, lease.step)
                raise
        self.phase = "closing"
        if not stop.is_set():
            if self._publisher.published != version:
                await self._publish(version)
            await self._evaluate(version)
        await self._publisher.settle()
        return self._run_totals(await self._buffer.status())

    # --- one step -----------------------------------------------------------------------------------------------

    async def _lease(self, stop: asyncio.Event) -> Lease | None:
        """The next step's groups; None when the run is over. StallError when nothing moves."""
        self._states.enter("waiting_for_groups")
        limit_s = self._config.run.stall_timeout_s
        while not stop.is_set():
            answer = await self._buffer.lease(wait_s=min(LEASE_WAIT_S, limit_s))
            if isinstance(answer, Lease):
                self._states.enter("other")
                return answer
            if answer is LeaseWait.FINISHED:
                return None
            status = await self._buffer.status()
            if status.counts.data_failures_in_a_row >= self._config.generator.max_data_failures:
                raise RunError(
                    f"{status.counts.data_failures_in_a_row} rollouts in a row failed for a reason that another "
                    f"attempt does not mend ({_most_common(status.account.failures)}); "
                    "generator.max_data_failures is the limit"
                )
            if status.quiet_s > limit_s:
                raise StallError(
                    f"nothing was committed or trained for {status.quiet_s:.0f} s (run.stall_timeout_s = {limit_s:g}): "
                    f"the learner waits ({answer.value}); {_replicas_in_words(status)}"
                )
        return None

    async def _step(self, lease: Lease) -> Version:
        """Trains one lease and ends it; the learner's version after it."""
        started_s = self._clock()
        check_staleness(lease)
        advantages = group_advantages(self._estimator, lease.groups)
        groups = train_groups(lease.groups, advantages=advantages, rows=await self._refs(lease.groups))
        report = await self._train(groups, step=lease.step)
        version = Version(lease.incarnation, lease.step)
        if report.rows_lost:
            await self._buffer.call("give_back", lease.incarnation, lease.step)
            await self._buffer.call("rows_lost", list(report.lost_keys))
            return version
        self._check_parity(report, step=lease.step)
        if report.skipped:
            await self._skipped(lease)
            return version
        self._totals.nonfinite_in_a_row = 0
        self._totals.mid_sequence_updates += sum(group.meta.mid_sequence_updates for group in lease.groups)
        status: RunStatus = await self._buffer.call("ack", lease.incarnation, lease.step)
        version = status.version
        if should_publish(
            version=version,
            published=self._publisher.published,
            publish_every_steps=self._config.weights.publish_every_steps,
            replicas=status.replicas,
        ):
            await self._publish(version)
        await self._record(lease, groups, report, status, duration_s=self._clock() - started_s)
        for store, keys in _keys_by_store(lease.groups).items():
            await self._rows.clear(store, keys)
        return version

    async def _refs(self, groups: Sequence[LeasedGroup]) -> list[Any]:
        found: dict[str, Any] = {}
        for store, keys in _keys_by_store(groups).items():
            found |= dict(zip(keys, await self._rows.refs(store, keys), strict=True))
        return [found[group.meta.key] for group in groups]

    async def _train(self, groups: Sequence[TrainGroup], *, step: int) -> StepReport:
        self._states.enter("forward_backward")
        started_s = self._clock()
        report = await self._policy.train_step(groups, step=step)
        # The ranks know best: what the call took beyond their own stages is `other`.
        elsewhere = {name: report.seconds.get(name, 0.0) for name in ("log_probs", "optimizer")}
        inside_s = sum(report.seconds.values())
        elsewhere["other"] = max(0.0, self._clock() - started_s - inside_s)
        self._states.enter("other")
        self._states.reattribute("forward_backward", elsewhere)
        return report

    async def _skipped(self, lease: Lease) -> None:
        self._totals.nonfinite_in_a_row += 1
        keys = [group.meta.key for group in lease.groups]
        logger.error("step %d was skipped: a loss or gradient is not finite; groups %s", lease.step, ", ".join(keys))
        self._metrics.step(outcome="skipped", duration_s=0.0, tokens=0)
        await self._buffer.call("skip", lease.incarnation, lease.step)
        for store, cleared in _keys_by_store(lease.groups).items():
            await self._rows.clear(store, cleared)
        limit = self._config.learner.max_nonfinite_steps
        if self._totals.nonfinite_in_a_row >= limit:
            raise NonFiniteError(
                f"{limit} steps in a row had a non-finite loss or gradient (learner.max_nonfinite_steps); the last one "
                f"trained groups {', '.join(keys[:8])}"
            )

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

    # --- weights and evaluation ---------------------------------------------------------------------------------

    async def _publish(self, version: Version) -> None:
        with self._states.within("publish"):
            await self._publisher.publish(version)

    async def _evaluate(self, version: Version) -> None:
        """Greedy held-out reward of `version`, by whichever replica has loaded it first."""
        await self._publisher.settle()
        if not self._heldout:
            return
        await self._buffer.call("pause")
        self.phase = f"waiting for a generator at version {version}"
        actor = await self._replica_at(version)
        self.phase = f"evaluating version {version}"
        handle = ray.get_actor(actor, namespace=self._config.run.name)
        at, rewards = await finished(
            handle.evaluate.remote(self._heldout), timeout_s=self._config.eval.timeout_s, what="held-out evaluation"
        )
        if at != version:
            raise RunError(f"replica {actor} evaluated version {at} instead of {version}")
        mean = sum(rewards) / len(rewards)
        self._metrics.heldout(mean)
        self._log.append_eval(
            EvalRecord(
                version=version.step,
                wall_s=self._clock() - self._started_s,
                prompts=len(rewards),
                reward_mean=mean,
            )
        )
        logger.info("held-out reward of version %s over %d prompts: %.3f", version, len(rewards), mean)

    async def _replica_at(self, version: Version) -> str:
        """Actor of a live replica that has loaded `version`."""
        deadline_s = self._clock() + self._config.run.stall_timeout_s
        while True:
            status = await self._buffer.status()
            for view in status.replicas:
                if view.live and view.version == version and view.replica in status.reports:
                    return status.reports[view.replica].actor
            if self._clock() > deadline_s:
                raise StallError(
                    f"no replica has loaded version {version} within run.stall_timeout_s = "
                    f"{self._config.run.stall_timeout_s:g}; {_replicas_in_words(status)}"
                )
            await asyncio.sleep(REPLICA_POLL_S)

    # --- records ------------------------------------------------------------------------------------------------

    async def _record(
        self, lease: Lease, groups: Sequence[TrainGroup], report: StepReport, status: RunStatus, *, duration_s: float
    ) -> None:
        histograms = counts_by_staleness(lease)
        tokens_by_staleness = {age: count for age, count in enumerate(report.token_staleness) if count}
        rewards = [reward for group in lease.groups for reward in group.meta.rewards]
        reward_mean = sum(rewards) / max(len(rewards), 1)
        published = self._publisher.published
        self._metrics.heartbeat(unix_time_s=time.time())
        self._metrics.versions(learner=status.version.step, published=published.step if published is not None else 0)
        self._metrics.step(outcome="trained", duration_s=duration_s, tokens=report.trained_tokens)
        self._metrics.staleness(
            groups=histograms["groups"],
            tokens=tokens_by_staleness,
            in_flight=histograms["in_flight"],
            in_buffer=histograms["in_buffer"],
        )
        self._metrics.diagnostics(
            reward_mean=reward_mean,
            loss=report.loss,
            grad_norm=report.grad_norm,
            entropy_nats=report.entropy_nats,
            ess_ratio=report.ess,
            importance_weight_mean=report.importance_weight_mean,
            importance_weight_max=report.importance_weight_max,
            clipped_ratio=report.loss_metrics.get("clipped_ratio", 0.0),
            gated_ratio=report.loss_metrics.get("gated_ratio", 0.0),
            kl_to_behaviour_nats=report.kl_behaviour_k3_nats,
            learning_rate=report.learning_rate,
            zero_variance_ratio=zero_variance_share(lease.groups),
        )
        trained, issued = status.account.fates[Fate.TRAINED], status.account.issued
        finished_samples = issued.samples - status.account.fates[Fate.RESERVED].samples
        if trained.samples and finished_samples and issued.tokens:
            self._metrics.length_ratio((trained.tokens / trained.samples) / (issued.tokens / finished_samples))
        self._log.append_step(
            StepRecord(
                step=lease.step,
                wall_s=self._clock() - self._started_s,
                duration_s=duration_s,
                trained=True,
                reward_mean=reward_mean,
                loss=report.loss,
                grad_norm=report.grad_norm,
                entropy_nats=report.entropy_nats,
                ess_ratio=report.ess,
                learning_rate=report.learning_rate,
                parity_nats=report.on_policy_parity_max_nats,
                group_staleness=histograms["groups"],
                token_staleness=tokens_by_staleness,
                trained_samples=report.trained_samples,
                trained_tokens=report.trained_tokens,
                generated_samples=sum(entry.samples for entry in status.reports.values()),
                generated_tokens=issued.tokens,
                learner_state_s=self._states.seconds(),
                generator_state_s=_mean_states(status),
                buffer_groups={
                    "reserved": status.counts.reserved,
                    "ready": status.counts.ready,
                    "leased": status.counts.leased,
                },
                ledger_groups={fate.value: amount.groups for fate, amount in status.account.fates.items()},
                published_version=published.step if published is not None else 0,
                oldest_replica_version=min(
                    (view.version.step for view in status.replicas if view.version is not None), default=0
                ),
                weight_updates=sum(entry.weight_updates for entry in status.reports.values()),
                mid_sequence_updates=self._totals.mid_sequence_updates,
            )
        )
        await self._write_samples(lease, groups)

    async def _write_samples(self, lease: Lease, groups: Sequence[TrainGroup]) -> None:
        """The first `learner.samples_logged` rollouts in full: one of each group before a second of any."""
        pairs = [(index, sample) for sample in range(self._config.learner.group_size) for index in range(len(groups))]
        pairs = pairs[: self._config.learner.samples_logged]
        rows = {index: await groups[index].rows for index in sorted({index for index, _ in pairs})}
        self._log.write_samples(
            lease.step,
            [
                sample_record(lease.groups[index], groups[index], rows[index], sample=sample, decode=self._decode)
                for index, sample in pairs
            ],
        )

    def _run_totals(self, status: RunStatus) -> RunTotals:
        fates = status.account.fates
        return RunTotals(
            wall_s=self._clock() - self._started_s,
            generated_tokens=status.account.issued.tokens,
            groups_discarded=sum(fates[fate].groups for fate in DISCARDED_FATES),
            ledger_closed=status.account.closed,
            weight_updates=sum(report.weight_updates for report in status.reports.values()),
            mid_sequence_updates=self._totals.mid_sequence_updates,
            probe_parity_max_nats=max((report.parity_max_nats for report in status.reports.values()), default=None),
        )


def _keys_by_store(groups: Sequence[LeasedGroup]) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for group in groups:
        keys.setdefault(group.meta.store, []).append(group.meta.key)
    return keys


def _mean_states(status: RunStatus) -> dict[str, float]:
    """State-seconds averaged over the replicas that ever reported."""
    reports = list(status.reports.values())
    states = {state for report in reports for state in report.state_seconds}
    return {state: sum(r.state_seconds.get(state, 0.0) for r in reports) / len(reports) for state in sorted(states)}


def _most_common(failures: dict[str, int]) -> str:
    return max(failures, key=lambda label: failures[label]) if failures else "unknown"


def _replicas_in_words(status: RunStatus) -> str:
    if not status.replicas:
        return "no generator has joined: start one with `asyncrl generator`"
    words = [
        f"{view.replica} at {view.version}, {view.busy_slots} busy"
        + (f", refused for {view.refused_for.value}" if view.refused_for else "")
        + ("" if view.live else ", silent")
        for view in status.replicas
    ]
    return "generators: " + "; ".join(words)
