"""Records each ended step, trained or skipped: metrics and a step record. Also records the run's totals.

Before the first step, `described_metrics` sets the metrics that describe the run and its limits.

A step whose rows were lost has not ended and is not recorded: its lease was given back, and its remaining groups are
leased again. The ledger counts the lost groups.
"""

import asyncio
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from asyncrl.algorithms.value_loss import explained_variance
from asyncrl.buffer.ledger import Event, Fate, LedgerEntry
from asyncrl.buffer.records import FailureCount, GroupMeta, Lease, LeasedGroup
from asyncrl.common.device_time import Devices, DeviceTime, Pool
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import added_states
from asyncrl.coordinator.status import BriefStatus, RunStatus
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.rows import Rows
from asyncrl.errors import RunError
from asyncrl.learner.audit_records import Record, TrainedGroup, TrainedSample, TrainedStep
from asyncrl.learner.costs import time_until_now
from asyncrl.learner.records import RecordSink, RunTotals, StepRecord, first_failure, groups_by_reason, in_words
from asyncrl.learner.sample_records import SAMPLE_COLUMNS, Texts, sample_record
from asyncrl.learner.saving import Checkpoints
from asyncrl.learner.step import Stages, StepSamples
from asyncrl.metrics.numbers import AGENT_NUMBERS
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.ranks.report import StepReport
from asyncrl.witness.judge import Finding

logger = logging.getLogger(__name__)

DISCARDED_FATES = (Fate.DROPPED, Fate.FILTERED, Fate.SKIPPED, Fate.ROWS_LOST, Fate.FAILED, Fate.RETURNED_ON_RESUME)


def described_metrics(config: Config) -> LearnerMetrics:
    """Returns a learner's metrics with the run's description and limits set, so that alerts work from the first
    scrape."""
    metrics = LearnerMetrics()
    metrics.run_info(config)
    metrics.limits(config)
    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedStep:
    """A step that was acked or skipped.

    `status` is the run's brief status right after the ack or skip. `published` is the newest version whose snapshot was
    taken. `duration_s` is the time since the lease was received. `critic_report` is None in a run without a critic.
    `parity_ratio` is the result of `StepChecks.parity`; None in a skipped step. `findings` are those of
    `StepChecks.witness`. `published_bits_ratio` is the share of the published elements whose bits changed; None if the
    step published nothing.
    """

    lease: Lease
    samples: StepSamples
    report: StepReport
    critic_report: StepReport | None
    status: BriefStatus
    published: Version | None
    duration_s: float
    parity_ratio: float | None = None
    findings: Mapping[str, Finding] = field(default_factory=dict)
    published_bits_ratio: float | None = None


@dataclass(kw_only=True)
class StepRecorder:
    """Makes the records of the steps of a run in order, and shows them in the metrics.

    `elapsed_s` returns the seconds since the start of the run, `state_seconds` the learner's seconds by state. `before`
    is the last record before the run was resumed: totals that the learner's process counts from its start continue from
    it. The totals of the generators are in the coordinator's status, and count from the start of the run
    (`GeneratorTotals`). `ranks` are the devices of the learner and the critic, and `earlier` the device-seconds before
    the run was resumed; None if these are not known, and then the records have no device-seconds.
    """

    metrics: LearnerMetrics
    elapsed_s: Callable[[], float]
    state_seconds: Callable[[], dict[str, float]]
    before: StepRecord | None = None
    ranks: Mapping[Pool, Devices] = field(default_factory=dict)
    earlier: Sequence[DeviceTime] | None = ()
    _mid_sequence_updates: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._mid_sequence_updates = self.before.mid_sequence_updates if self.before else 0

    def record(self, step: EndedStep) -> StepRecord:
        """Returns the record of a step that was acked, or that did not change the policy's weights because a loss or a
        gradient was not finite. Shows it in the metrics."""
        if not step.report.skipped:
            self._mid_sequence_updates += sum(group.meta.mid_sequence_updates for group in step.lease.groups)
        record = self._record(step)
        self._show(step, record)
        return record

    def run_totals(self, status: RunStatus, *, rows_outstanding: int, stop_reason: str | None = None) -> RunTotals:
        """Returns the totals of a run that has ended. `status` is the coordinator's status after the last step.
        `rows_outstanding` is the number of rows that are still stored. `stop_reason` is None unless `run.stop_when`
        ended the run."""
        fates = status.account.fates
        return RunTotals(
            wall_s=self.elapsed_s(),
            generated_tokens=status.account.issued.tokens,
            groups_discarded=sum(fates[fate].groups for fate in DISCARDED_FATES),
            groups_failed=_groups_failed(status),
            ledger_closed=status.account.closed,
            rows_outstanding=rows_outstanding,
            weight_updates=status.generators.weight_updates,
            mid_sequence_updates=self._mid_sequence_updates,
            parity_max_nats=status.totals.parity_max_nats if status.totals.replicas else None,
            tokens_continued=status.account.events[Event.TOKENS_CONTINUED],
            tokens_dropped=status.account.events[Event.TOKENS_DROPPED],
            tokens_thrown_away=status.account.events[Event.TOKENS_THROWN_AWAY],
            stop_reason=stop_reason,
        )

    def _show(self, step: EndedStep, record: StepRecord) -> None:
        """Shows the step in the metrics."""
        self.metrics.heartbeat()
        self.metrics.versions(learner=step.status.version.step, published=record.published_version)
        self.metrics.device_time(record.device_time)
        self.metrics.step(
            outcome="trained" if record.trained else "skipped",
            duration_s=record.duration_s,
            tokens=record.trained_tokens,
            model_flops=record.model_flops,
            peak_flops_per_s=step.report.peak_flops_per_s,
        )
        if record.trained:
            self.metrics.staleness(tokens=record.token_staleness, **counts_by_staleness(step.lease))
            self.metrics.numbers(_diagnostics(step) | _measured(step))
            self.metrics.rewards(components=record.reward_components, parts=record.reward_parts)

    def _record(self, step: EndedStep) -> StepRecord:
        report, status, before = step.report, step.status, self.before
        trained = not report.skipped
        tokens_by_staleness = {age: count for age, count in enumerate(report.token_staleness) if count}
        measured = {name: _finite(value) for name, value in _measured(step).items()}
        state_seconds = self.state_seconds()
        own: dict[str, Any] = {name: measured.pop(name) for name in StepRecord.__struct_fields__ if name in measured}
        return StepRecord(
            step=step.lease.step,
            wall_s=self.elapsed_s(),
            duration_s=step.duration_s,
            trained=trained,
            **own,
            group_staleness=counts_by_staleness(step.lease)["groups"] if trained else {},
            token_staleness=tokens_by_staleness if trained else {},
            trained_samples=report.trained_samples if trained else 0,
            trained_tokens=report.trained_tokens if trained else 0,
            model_flops=report.model_flops,
            mfu_ratio=_mfu_ratio(step),
            generated_samples=status.generators.samples,
            generated_tokens=status.account.issued.tokens,
            learner_state_s=added_states(state_seconds, before.learner_state_s if before else {}),
            generator_state_s=status.generators.state_seconds,
            buffer_groups=status.groups_by_state,
            ledger_groups={fate.value: amount.groups for fate, amount in status.account.fates.items()},
            published_version=0 if step.published is None else step.published.step,
            oldest_replica_version=status.oldest_replica_step,
            weight_updates=status.generators.weight_updates,
            mid_sequence_updates=self._mid_sequence_updates,
            reward_components=_components(step),
            reward_parts=_parts(step),
            part_groups=_part_groups(step) if trained else {},
            witness={
                name: step.findings[name].kind for name in ("advantages", "coefficients") if name in step.findings
            },
            diagnostics={name: _finite(value) for name, value in _diagnostics(step).items()} | measured,
            device_time=()
            if self.earlier is None
            else time_until_now(
                self.ranks, state_seconds, earlier=self.earlier, generators=status.generators.device_time
            ),
        )


def _groups_failed(status: RunStatus) -> dict[str, int]:
    """Returns the number of groups that failed for good, by the reason of their last attempt.

    The reason `expired` counts groups whose last attempt had no failed rollout, but an expired ticket: for example, its
    replica stopped sending heartbeats.
    """
    by_reason = groups_by_reason(status.failures)
    expired = status.account.fates[Fate.FAILED].groups - sum(by_reason.values())
    return by_reason | ({"expired": expired} if expired > 0 else {})


def _measured(step: EndedStep) -> dict[str, float]:
    """Returns the numbers of the step's samples and update, by their names in `asyncrl.metrics.numbers`.

    The loss, a gradient or a mean over no token may be NaN.
    """
    report = step.report
    metas = [group.meta for group in step.lease.groups]
    rewards = [reward for meta in metas for reward in meta.known_rewards]
    rewards += [group.reward for group in step.lease.filtered for _ in range(group.samples)]
    tokens = [count for meta in metas for count in meta.completion_tokens]
    return {
        "reward_mean": sum(rewards) / len(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "completion_tokens_mean": statistics.fmean(tokens),
        "completion_tokens_max": max(tokens),
        **step.samples.numbers,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "entropy_nats": report.entropy_nats,
        "ess_ratio": report.ess,
        "importance_weight_mean": report.importance_weight_mean,
        "importance_weight_max": report.importance_weight_max,
        "kl_to_behaviour_nats": report.kl_behaviour_k3_nats,
        "learning_rate": report.learning_rate,
        "parity_nats": report.on_policy_parity_max_nats if report.on_policy_tokens else math.nan,
    }


def _components(step: EndedStep) -> dict[str, float]:
    """Returns the mean of each component of the rewards over the samples that have it."""
    values: dict[str, list[float]] = {}
    for group in step.lease.groups:
        for name, found in group.meta.components.items():
            values.setdefault(name, []).extend(value for value in found if value is not None)
    return {name: statistics.fmean(found) for name, found in values.items() if found}


def _parts(step: EndedStep) -> dict[str, float]:
    """Returns the mean reward of each part of a mixture; empty without a mixture."""
    rewards: dict[str, list[float]] = {}
    for group in step.lease.groups:
        rewards.setdefault(group.meta.part, []).extend(group.meta.known_rewards)
    for filtered in step.lease.filtered:
        rewards.setdefault(filtered.part, []).extend([filtered.reward] * filtered.samples)
    return {name: statistics.fmean(found) for name, found in rewards.items() if name and found}


def _part_groups(step: EndedStep) -> dict[str, int]:
    """Returns the number of trained groups of each part of a mixture; empty without a mixture."""
    return dict(Counter(group.meta.part for group in step.lease.groups if group.meta.part))


def _diagnostics(step: EndedStep) -> dict[str, float]:
    """Returns the record's `diagnostics`: the numbers whose names depend on the objective, the critic and the loss."""
    totals = step.status.totals
    return {
        **step.report.diagnostics,
        **step.report.loss_metrics,
        **({} if step.critic_report is None else critic_numbers(step.critic_report)),
        **({} if step.parity_ratio is None else {"parity_ratio": step.parity_ratio}),
        **_witnessed(step),
        **({} if step.published_bits_ratio is None else {"published_bits_ratio": step.published_bits_ratio}),
        "parity_mean_nats": step.report.on_policy_parity_mean_nats if step.report.on_policy_tokens else math.nan,
        "parity_tokens": step.report.on_policy_tokens,
        "parity_probe_nats": totals.parity_max_nats if totals.replicas else math.nan,
        "length_ratio": _length_ratio(step.status),
        "cached_prompt_ratio": _cached_prompt_ratio(step.status),
        "filtered_groups": len(step.lease.filtered),
        **agent_numbers([group.meta for group in step.lease.groups]),
    }


LARGEST_RATIO = 1e9
"""Larger ratios of the witness's checks are recorded as this number."""


def _witnessed(step: EndedStep) -> dict[str, float]:
    """Returns the largest difference of each check of the witness, as a share of what is accepted, and the seconds that
    rank 0 spent in the witness's computation."""
    # JSON has no infinity: the ratio of a failed check that accepts no difference at all would be null
    found = {f"witness_{check}_ratio": min(finding.ratio, LARGEST_RATIO) for check, finding in step.findings.items()}
    seconds = step.report.seconds.get("witness")
    return found if seconds is None else {**found, "witness_s": seconds}


def agent_numbers(metas: Sequence[GroupMeta]) -> dict[str, float]:
    """Returns the means of `AGENT_NUMBERS` over the episodes of agents; empty if there are no episodes."""
    played = [meta for meta in metas if meta.turns]
    episodes = sum(len(meta.turns) for meta in played)
    if not episodes:
        return {}
    totals = (
        sum(sum(meta.turns) for meta in played),
        sum(meta.tool_calls for meta in played),
        sum(meta.failed_tool_calls for meta in played),
    )
    return {name: total / episodes for name, total in zip(AGENT_NUMBERS, totals, strict=True)}


def _mfu_ratio(step: EndedStep) -> float | None:
    """Returns the model FLOPs of the step divided by those that the devices can do in its duration; None if unknown."""
    flops, peak = step.report.model_flops, step.report.peak_flops_per_s
    return None if flops is None or peak is None else flops / (peak * step.duration_s)


def _length_ratio(status: BriefStatus) -> float:
    """Returns the mean completion length of trained samples divided by that of all samples with counted tokens.

    Samples of reserved and failed groups have no counted tokens. Returns NaN until there is a trained sample.
    """
    fates, issued = status.account.fates, status.account.issued
    trained = fates[Fate.TRAINED]
    samples = issued.samples - fates[Fate.RESERVED].samples - fates[Fate.FAILED].samples
    if not (trained.samples and samples and issued.tokens):
        return math.nan
    return (trained.tokens / trained.samples) / (issued.tokens / samples)


def _cached_prompt_ratio(status: BriefStatus) -> float:
    """Returns the share of the prompt tokens that came from the engines' prefix caches. NaN before the first one."""
    totals = status.totals
    return totals.cached_prompt_tokens / totals.prompt_tokens if totals.prompt_tokens else math.nan


def _finite(value: float) -> float | None:
    """Returns `value`, or None when it is not finite, because reports use NaN for what was not measured."""
    return value if math.isfinite(value) else None


def counts_by_staleness(lease: Lease) -> dict[str, dict[int, int]]:
    """Returns three histograms that map a number of versions to a number of groups.

    `groups` is the staleness at this step, without tokens that are masked because they are older than η. For a group
    without such tokens, it is the sum of `in_flight` (from the oldest token until the group was committed) and
    `in_buffer` (from the commit until this step).
    """
    groups = lease.groups
    return {
        "groups": Counter(min(lease.step - group.meta.oldest, group.max_staleness_versions) for group in groups),
        "in_flight": Counter(group.ready_step - group.meta.oldest for group in groups),
        "in_buffer": Counter(lease.step - group.ready_step for group in groups),
    }


def critic_numbers(report: StepReport) -> dict[str, float]:
    """Returns `value_loss`, `explained_variance` and `value_clipped_ratio` of a step; empty without a trained token.

    The explained variance uses the values at the start of each token's update. In a step with one update, these are the
    values from which the advantages were computed.
    """
    if not report.loss_metrics:
        return {}
    return {
        "value_loss": report.loss,
        "explained_variance": explained_variance(report.loss_metrics),
        "value_clipped_ratio": report.loss_metrics["value_clipped_ratio"],
    }


# The end of a step: writes its records and samples and clears its rows, while the next step is leased and trained.

SETTLE_S = 5.0
"""Longest time that the end of a run waits until other processes have cleared their rows, seconds."""
POLL_S = 0.1


@dataclass(kw_only=True)
class StepEnd:
    """Ends the steps of a run in order, one at a time: gives their records to `sinks` and `append_audit`, reads and
    clears rows, and counts the rows that are left."""

    stages: Stages
    rows: Rows
    incarnation: int
    coordinator: CoordinatorClient
    checkpoints: Checkpoints
    recorder: StepRecorder
    sinks: Sequence[RecordSink]
    append_audit: Callable[[Record], None]
    texts: Texts
    _running: asyncio.Task[None] | None = field(default=None, init=False)
    _released: int = field(default=0, init=False)
    """The value of `Checkpoints.saves_ended` when retained rows were released last."""

    async def begin(
        self, step: EndedStep, clearable: Sequence[str], *, meta: KVBatchMeta, ledger: LedgerEntry | None
    ) -> None:
        """Begins a task that ends a step: it records the step, writes samples of its rows, which `meta` names, and
        clears the rows of the groups `clearable`. `ledger` is the ledger's entry in the answer to the step's ack; None
        if the step was skipped.

        First waits for the end of the step before, and raises its error.
        """
        await self.settle()
        ending = self._end(step, clearable, meta, ledger)
        self._running = asyncio.create_task(ending, name=f"end of step {step.lease.step}")

    async def settle(self) -> None:
        """Waits until the last step is recorded and its rows are cleared. Raises the error of that work."""
        running, self._running = self._running, None
        if running is not None:
            await running

    async def settle_after_error(self) -> None:
        """Like `settle`, but logs the error and does not raise it, because the run already ends with another error."""
        try:
            await self.settle()
        except Exception as error:
            logger.error(
                "recording the step before and clearing its rows failed too: %s: %s", type(error).__name__, error
            )

    async def _end(
        self, step: EndedStep, clearable: Sequence[str], meta: KVBatchMeta, ledger: LedgerEntry | None
    ) -> None:
        record = self.recorder.record(step)
        for sink in self.sinks:
            sink.append_step(record)
        if ledger is not None:
            line = msgspec.json.encode(record)
            self.append_audit(
                trained_step(step.lease, samples=step.samples, report=step.report, ledger=ledger, line=line)
            )
            await self._write_samples(step.lease, meta)
        await self.clear(clearable)
        await self.outstanding()

    def _logged_columns(self) -> list[str]:
        config = self.stages.config
        logprobs = ["generation_logprobs", *(["prev_logprobs"] if self.stages.writes_logprobs else [])]
        return [*SAMPLE_COLUMNS, *config.extra_columns, *(logprobs if config.learner.logprobs_logged else [])]

    async def _write_samples(self, lease: Lease, meta: KVBatchMeta) -> None:
        """Writes all samples of the first `learner.groups_logged` groups to the run's sample file, so that a reader can
        compare the samples of a group.

        An error is logged and not raised: the step is trained, and a sample that cannot be read must not end the run.
        """
        logged = [
            (group, task, sample)
            for group, task in zip(lease.groups, lease.logged_tasks, strict=False)
            for sample in range(len(group.meta.rewards))
        ]
        if not logged:
            return
        try:
            # the rows have the order of the lease, so the first ones are those of the logged groups
            rows = await self.rows.read(meta.slice(0, len(logged)), self._logged_columns())
            records = [
                sample_record(group, task, rows, step=lease.step, row=row, sample=sample, texts=self.texts)
                for row, (group, task, sample) in enumerate(logged)
            ]
            for sink in self.sinks:
                sink.write_samples(lease.step, records)
        except Exception as error:
            logger.warning("the samples of step %d were not logged: %s: %s", lease.step, type(error).__name__, error)

    async def clear(self, keys: Sequence[str]) -> None:
        """Clears the rows under `keys`, whose groups will not be trained any more. If a save has ended since the last
        call, also clears the rows that were retained only for earlier checkpoints."""
        if self.checkpoints.saves_ended != self._released:
            self._released = self.checkpoints.saves_ended
            complete = self.checkpoints.saved
            keys = [*keys, *await self.coordinator.call(Coordinator.release, self.incarnation, complete)]
        await self.rows.clear(keys)

    async def outstanding(self, *, until_none: bool = False) -> int:
        """Returns the number of rows of finished groups in the data plane.

        At the end of a run, generators may still be clearing rows that will not be trained. With `until_none`, the
        number is therefore read again until it is 0 or `SETTLE_S` have passed.
        """
        deadline_s = self.stages.clock() + SETTLE_S
        while True:
            rows = await self.rows.outstanding()
            self.recorder.metrics.rows_outstanding(rows)
            if not (until_none and rows) or self.stages.clock() > deadline_s:
                return rows
            await asyncio.sleep(POLL_S)


def trained_step(
    lease: Lease, *, samples: StepSamples, report: StepReport, ledger: LedgerEntry, line: bytes
) -> TrainedStep:
    """Returns the audit's record of a trained step. `ledger` is the ledger's entry in the answer to the step's ack, and
    `line` the step's line in steps.jsonl."""
    masks = iter((samples.mask_B > 0).tolist())
    return TrainedStep(
        incarnation=lease.incarnation,
        step=lease.step,
        before=report.weights_before,
        after=report.weights_after,
        loss=report.loss,
        grad_norm=report.grad_norm,
        token_staleness=report.token_staleness,
        groups=tuple(_trained_group(group, masks=masks) for group in lease.groups),
        ledger=ledger,
        filtered=lease.filtered,
        line=xxhash.xxh3_64_intdigest(line),
        digest_kind=report.digest_kind,
        before_by_kind=dict(report.weights_before_by_kind),
    )


def _trained_group(group: LeasedGroup, *, masks: Iterator[bool]) -> TrainedGroup:
    meta = group.meta
    return TrainedGroup(
        group=meta.group,
        attempt=meta.attempt,
        incarnation=meta.incarnation,
        deadline=group.deadline,
        max_staleness_versions=group.max_staleness_versions,
        extended=group.extended,
        prompt=meta.prompt,
        part=meta.part,
        samples=tuple(
            TrainedSample(tokens=tokens, spans=spans, reward=reward, trained=next(masks), row=row)
            for tokens, spans, reward, row in zip(
                meta.completion_tokens, meta.version_spans, meta.rewards, meta.row_checksums, strict=True
            )
        ),
    )


# Shows failed rollouts, rewards and tools on the learner's terminal and in its log during the run.
#
# The first failure of each kind (class, reason, tool and type of error) is shown in full. After that, one line with
# counts follows every `COUNTS_EVERY_S` seconds if there were more failures since the last line. The call to the
# coordinator returns when there are new failures, or after `WAIT_S` seconds. A run without failures therefore makes one
# call every `WAIT_S` seconds.

WAIT_S = 10.0
COUNTS_EVERY_S = 10.0
PAUSE_S = 0.5
"""Seconds between two calls, so that many failures in a row do not become as many calls."""


@dataclass(kw_only=True)
class FailureWatch:
    """Polls the coordinator for failures and logs them.

    `run` polls until it is cancelled. `finish` then logs the failures that were not shown yet. `keep` is called with
    all counts each time something was logged.
    """

    coordinator: CoordinatorClient
    keep: Callable[[Sequence[FailureCount]], None]
    clock: Callable[[], float] = time.monotonic
    counts: tuple[FailureCount, ...] = field(default=(), init=False)
    _seen: set[str] = field(default_factory=set, init=False)
    _shown_failures: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._shown_s = self.clock()

    @property
    def failures(self) -> int:
        """The number of failures at the last answer of the coordinator."""
        return sum(count.failures for count in self.counts)

    async def run(self) -> None:
        """Shows failures until it is cancelled. When the coordinator does not answer, it tries again after `WAIT_S`
        seconds."""
        while True:
            try:
                counts = await self.coordinator.call(Coordinator.failure_counts, self.failures, wait_s=WAIT_S)
            except (RunError, TimeoutError) as error:
                logger.warning("failures cannot be shown until the buffer answers again: %s", error)
                await asyncio.sleep(WAIT_S)
                continue
            self.show(counts)
            await asyncio.sleep(PAUSE_S)

    async def finish(self) -> None:
        """Reads the counts a last time and shows all failures that were not shown yet."""
        counts = await self.coordinator.call(Coordinator.failure_counts, -1, wait_s=0.0)
        self.show(counts, at_once=True)

    def show(self, counts: Sequence[FailureCount], *, at_once: bool = False) -> None:
        """Shows the new failures of `counts`.

        The line with counts is shown at most every `COUNTS_EVERY_S` seconds, unless `at_once` is set.
        """
        self.counts = tuple(counts)
        new = [count for count in counts if count.first.label not in self._seen]
        for count in new:
            self._seen.add(count.first.label)
            logger.warning("%s", first_failure(count))
        if new and self.failures == self._shown_failures + len(new):
            # Each new failure is the only one of its kind and was just shown in full: a line of counts adds nothing.
            self._shown_failures = self.failures
            self._shown_s = self.clock()
        due = at_once or self.clock() - self._shown_s >= COUNTS_EVERY_S
        more = self.failures > self._shown_failures
        if due and more:
            self._shown_failures, self._shown_s = self.failures, self.clock()
            logger.warning("failures so far: %s", in_words(counts))
        if new or (due and more):
            self.keep(self.counts)
