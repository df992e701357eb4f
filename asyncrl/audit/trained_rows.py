"""The rows of a kept batch that a step trained, as a model reads them: one sequence, or one for each branch of an
agent's episode.

Legend: S tokens of a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncrl.audit.plain_model import sequences_of
from asyncrl.buffer.records import Lease
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import BRANCH, NO_TOKEN, SUPPORT, WIDE_FIELDS, listed_tops
from asyncrl.learner.audit_records import TrainedStep
from asyncrl.learner.saving import PREV_LOGPROBS
from asyncrl.learner.witnessed_step import completions_of
from asyncrl.witness.step import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSequence:
    """A sequence as a model sees it: a row, or a branch of one. For each token but the first, `supports` has the ids
    among which it was sampled (None if the batch has none), and `tops` the ids and log-probs of the sampler's most
    likely tokens. `start` is the position of the sequence's first token in the row."""

    start: int
    tokens: list[int]
    supports: list[list[int]] | None
    tops: list[dict[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRow:
    """A trained row. `places` are the positions of its trained tokens in the row, and the columns have one entry for
    each of them. `unusable` is the number of further tokens with a log-prob or advantage that is not finite: the ranks
    mask them."""

    name: str
    unusable: int
    completion: Completion
    sequences: list[RowSequence]
    places: list[int]
    columns: Mapping[str, list[float]]

    def column(self, name: str) -> list[float]:
        return self.columns.get(name, [])


def trained_rows(step: TrainedStep, lease: Lease, rows: BatchedDataDict, kept: Sequence[bool]) -> dict[int, TrainedRow]:
    """Returns the rows that the step trained. The key is the row's index in the batch `rows`. `kept` says for each row
    whether the filters of `algorithm` keep it."""
    found: dict[int, TrainedRow] = {}
    completions = completions_of(lease)
    groups = [(group, place) for group in lease.groups for place in range(len(group.meta.rewards))]
    for n, (group, place) in enumerate(groups):
        if not kept[n]:
            continue
        row = {name: column[n] for name, column in rows.items()}
        mask_S = row["token_mask"] > 0
        mask_S[0] = False
        if group.extended:  # its deadline was extended, and tokens that are older than its limit were masked
            mask_S &= step.step - row["weight_versions"] <= group.max_staleness_versions
        usable_S = mask_S.clone()
        for column in (PREV_LOGPROBS, "generation_logprobs", "advantages"):
            if column in row:
                usable_S &= row[column].isfinite()
        places = usable_S.nonzero().flatten().tolist()
        columns = {
            name: column[places].double().tolist() if column.ndim else [float(column)] * len(places)
            for name, column in row.items()
            if name not in (*WIDE_FIELDS, BRANCH, "input_ids", "input_lengths")
        }
        found[n] = TrainedRow(
            name=f"sample {place} of group {group.meta.group} in step {step.step}",
            unusable=int(mask_S.sum()) - len(places),
            completion=completions[n],
            sequences=list(_sequences(row)),
            places=places,
            columns=columns,
        )
    return found


def _sequences(row: Mapping[str, torch.Tensor]) -> Iterator[RowSequence]:
    for start, stop in sequences_of(row, branches=BRANCH):
        supports = None
        if SUPPORT in row:
            listed = row[SUPPORT][start + 1 : stop].tolist()
            supports = [[token for token in support if token != NO_TOKEN] for support in listed]
        if stop - start > 1:
            yield RowSequence(
                start=start,
                tokens=row["input_ids"][start:stop].tolist(),
                supports=supports,
                tops=listed_tops(row, slice(start + 1, stop)),
            )
