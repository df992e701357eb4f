"""The end of a step: writes its records and samples and clears its rows, while the next step is leased and trained."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from asyncrl.buffer.ledger import LedgerEntry
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.learner.audit_records import TrainedGroup, TrainedSample, TrainedStep
from asyncrl.learner.batch import StepSamples, sample_record
from asyncrl.learner.recording import EndedStep, StepRecorder
from asyncrl.learner.run_log import RunLog
from asyncrl.learner.sample_texts import Texts
from asyncrl.learner.step_rows import StepRows
from asyncrl.ranks.report import StepReport

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class StepEnd:
    """Ends the steps of a run in order, one at a time. `logged_columns` are the columns of a logged sample."""

    recorder: StepRecorder
    log: RunLog
    rows: StepRows
    logged_columns: Sequence[str]
    texts: Texts
    _running: asyncio.Task[None] | None = field(default=None, init=False)

    async def begin(
        self, step: EndedStep, over: Sequence[str], *, meta: KVBatchMeta, ledger: LedgerEntry | None
    ) -> None:
        """Begins the end of a step: records it, writes samples of its rows `meta`, and clears the rows of the groups
        `over`. `ledger` is the entry of its ack; None if the step was skipped.

        Raises the error of the step before it.
        """
        await self.settle()
        ending = self._end(step, over, meta, ledger)
        self._running = asyncio.create_task(ending, name=f"end of step {step.lease.step}")

    async def settle(self) -> None:
        """Waits until the step that ends has ended. Raises its error."""
        running, self._running = self._running, None
        if running is not None:
            await running

    async def settle_after_error(self) -> None:
        """Like `settle`, but logs the error of the step that ends, because the run ends with another one."""
        try:
            await self.settle()
        except Exception as error:
            logger.error("the end of the step before it failed too: %s: %s", type(error).__name__, error)

    async def _end(self, step: EndedStep, over: Sequence[str], meta: KVBatchMeta, ledger: LedgerEntry | None) -> None:
        record = self.recorder.record(step)
        if ledger is not None:
            line = msgspec.json.encode(record)
            self.log.append_audit(
                trained_step(step.lease, samples=step.samples, report=step.report, ledger=ledger, line=line)
            )
            await self._write_samples(step.lease, meta)
        await self.rows.clear(over)
        await self.rows.outstanding()

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
            rows = await self.rows.read(meta.slice(0, len(logged)), self.logged_columns)
            records = [
                sample_record(group, task, rows, step=lease.step, row=row, sample=sample, texts=self.texts)
                for row, (group, task, sample) in enumerate(logged)
            ]
            self.log.write_samples(lease.step, records)
        except Exception as error:
            logger.warning("the samples of step %d were not logged: %s: %s", lease.step, type(error).__name__, error)


def trained_step(
    lease: Lease, *, samples: StepSamples, report: StepReport, ledger: LedgerEntry, line: bytes
) -> TrainedStep:
    """Returns the audit's record of a step, from what it trained. `ledger` is the entry of its ack, `line` its line in
    steps.jsonl."""
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
        samples=tuple(
            TrainedSample(tokens=tokens, spans=spans, reward=reward, trained=next(masks), row=row)
            for tokens, spans, reward, row in zip(
                meta.completion_tokens, meta.version_spans, meta.rewards, meta.row_checksums, strict=True
            )
        ),
    )
