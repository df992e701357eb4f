"""Makes the audit's record of a step from what the step trained: its lease and the ranks' report."""

from collections.abc import Iterator

from asyncrl.buffer.ledger import LedgerEntry
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.learner.audit_records import TrainedGroup, TrainedSample, TrainedStep
from asyncrl.learner.batch import StepSamples
from asyncrl.ranks.report import StepReport


def trained_step(lease: Lease, *, samples: StepSamples, report: StepReport, ledger: LedgerEntry) -> TrainedStep:
    """Returns the record of a step. `ledger` is the entry of its ack."""
    masks = iter((samples.mask_B > 0).tolist())
    return TrainedStep(
        incarnation=lease.incarnation,
        step=lease.step,
        before=report.weights_before,
        after=report.weights_after,
        loss=report.loss,
        grad_norm=report.grad_norm,
        token_staleness=report.token_staleness,
        groups=tuple(_group(group, masks=masks) for group in lease.groups),
        ledger=ledger,
        filtered=lease.filtered,
    )


def _group(group: LeasedGroup, *, masks: Iterator[bool]) -> TrainedGroup:
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
