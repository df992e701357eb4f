"""Makes the audit's record of a step from what the step trained: its lease, its rows and the ranks' report."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from asyncrl.buffer.ledger import LedgerEntry
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.learner.audit_records import TrainedGroup, TrainedSample, TrainedStep
from asyncrl.learner.batch import StepSamples
from asyncrl.ranks.report import StepReport

ROW_COLUMNS = ("input_ids", "input_lengths", "generation_logprobs", "weight_versions", "token_mask")
"""The columns that the checksum of a row covers."""


def trained_step(
    lease: Lease, *, samples: StepSamples, report: StepReport, rows: BatchedDataDict, ledger: LedgerEntry
) -> TrainedStep:
    """Returns the record of a step. `rows` has the columns `ROW_COLUMNS` of all samples in the order of the lease."""
    checksums = iter(row_checksums(rows))
    masks = iter((samples.mask_B > 0).tolist())
    return TrainedStep(
        incarnation=lease.incarnation,
        step=lease.step,
        before=report.weights_before,
        after=report.weights_after,
        loss=report.loss,
        grad_norm=report.grad_norm,
        token_staleness=report.token_staleness,
        groups=tuple(_group(group, masks=masks, checksums=checksums) for group in lease.groups),
        ledger=ledger,
    )


def _group(group: LeasedGroup, *, masks: Iterator[bool], checksums: Iterator[int]) -> TrainedGroup:
    meta = group.meta
    return TrainedGroup(
        group=meta.group,
        attempt=meta.attempt,
        incarnation=meta.incarnation,
        deadline=group.deadline,
        max_staleness_versions=group.max_staleness_versions,
        extended=group.extended,
        samples=tuple(
            TrainedSample(tokens=tokens, spans=spans, reward=reward, trained=next(masks), row=next(checksums))
            for tokens, spans, reward in zip(meta.completion_tokens, meta.version_spans, meta.rewards, strict=True)
        ),
    )


def row_checksums(rows: BatchedDataDict) -> list[int]:
    """Returns the xxh3-64 of each row's real tokens: their ids, log-probs, versions and masks. Padding does not
    count."""
    columns = [rows[name].contiguous().numpy() for name in ROW_COLUMNS if name != "input_lengths"]
    return [_checksum([column[row, :length] for column in columns]) for row, length in enumerate(_lengths(rows))]


def _checksum(parts: Sequence[np.ndarray[Any, Any]]) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    return digest.intdigest()


def _lengths(rows: BatchedDataDict) -> list[int]:
    lengths: list[int] = rows["input_lengths"].tolist()
    return lengths
