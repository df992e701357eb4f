"""Checks, counts and makes rows of micro-batches. Also makes the last check of staleness before training.

Legend: B rows, S tokens, T = S − 1. Column entry `c[b, i]` belongs to token `input_ids[b, i]`. Padding is on the right.
"""

import copy
from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from asyncrl.algorithms.loss import SOURCE_COLUMNS
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import NO_VERSION, trained_mask
from asyncrl.errors import StalenessViolation
from asyncrl.ranks.model_rows import MIN_WIDTH, branches_as_rows, wide_columns
from asyncrl.ranks.prefixes import shared_prefixes

_NUMBERS = (*SOURCE_COLUMNS.values(), "advantages")


def check_token_staleness(
    batch: BatchedDataDict, *, step: int, limits: Sequence[int], sample_ids: Sequence[str]
) -> None:
    """Raises StalenessViolation for a trained token that is newer than the weights of version `step`, or older than its
    row's entry in `limits` (the staleness limit of its group, in versions). This is the last check before training."""
    if batch.size == 0:
        return
    staleness_BS = (step - batch["weight_versions"]).where(trained_mask(batch), 0)
    wrong_B = (staleness_BS > torch.tensor(limits).unsqueeze(1)).any(1) | (staleness_BS < 0).any(1)
    if wrong_B.any():
        row = int(wrong_B.nonzero()[0])
        newest, oldest = staleness_BS[row].aminmax()
        raise StalenessViolation(
            f"sample {sample_ids[row]}: a token to be trained is {int(newest if newest < 0 else oldest)} versions old; "
            f"it must be from 0 to the limit of its ticket (staleness.max_versions), which is {limits[row]}; in a run "
            "this is a bug of asyncrl, in a loop of your own discard the sample"
        )


def without_stale(
    batch: BatchedDataDict, *, step: int, limits: Sequence[int], masks: Sequence[bool]
) -> BatchedDataDict:
    """Returns the batch with the tokens masked that are older than their row's limit, in the rows where `masks` is
    True."""
    if not any(masks):
        return batch
    stale_BS = step - batch["weight_versions"] > torch.tensor(limits).unsqueeze(1)
    stale_BS &= torch.tensor(masks).unsqueeze(1)
    batch = copy.copy(batch)
    batch["token_mask"] = batch["token_mask"].masked_fill(stale_BS, 0)
    return batch


def without_nonfinite(batch: BatchedDataDict) -> tuple[BatchedDataDict, int]:
    """Masks the trained tokens that have a non-finite log-prob or advantage [B, S]. Returns the batch and their number.

    These values are also set to 0, because a loss may multiply a value by its mask, and NaN · 0 is NaN.
    """
    columns = {name: batch[name] for name in _NUMBERS if name in batch}
    if not columns:
        return batch, 0
    broken_BS = trained_mask(batch) & ~torch.stack([column.isfinite() for column in columns.values()]).all(dim=0)
    count = int(broken_BS.sum())
    if count:
        batch = copy.copy(batch)
        for name, column in {**columns, "token_mask": batch["token_mask"]}.items():
            batch[name] = column.masked_fill(broken_BS, 0)
    return batch, count


def staleness_counts(batch: BatchedDataDict, *, step: int) -> dict[int, int]:
    """Returns the number of trained tokens for each staleness, in versions."""
    if batch.size == 0:
        return {}
    values, counts = (step - batch["weight_versions"][trained_mask(batch)]).unique(return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def tokens_passed(parts: Sequence[BatchedDataDict], *, packed: bool, wide: Sequence[str] = ()) -> tuple[int, int]:
    """Returns the number of tokens of all rows, and the number of tokens that pass through the model for them.

    Padded rows pass with their padding, so the second number is not smaller. Packed rows pass without padding, and a
    prefix that rows of a micro-batch share passes once, so the second number is not larger. Each branch of an episode
    passes as a row. `wide` names the columns in `WIDE_FIELDS` that the pass reads (`ModelRows.of`).
    """
    parts = [branches_as_rows(part)[0] for part in parts]
    real = sum(int(part["input_lengths"].sum()) for part in parts)
    if not packed:
        return real, sum(part["input_ids"].numel() for part in parts)
    shared = (shared_prefixes(part["input_ids"], part["input_lengths"], wide_columns(part, wide)) for part in parts)
    return real, real - sum(sum(prefixes.tokens) for prefixes in shared)


def row_lengths(parts: Sequence[BatchedDataDict]) -> list[int]:
    """Returns the number of real tokens of every sequence that the model sees."""
    return [length for part in parts for length in branches_as_rows(part)[0]["input_lengths"].tolist()]


def empty_micro_batch() -> BatchedDataDict:
    """Returns one row without a trained token. A rank that has no micro-batches left runs it while other ranks still
    have some, because all ranks must make the same collective calls."""
    shape = (1, MIN_WIDTH)
    return BatchedDataDict(
        {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "input_lengths": torch.full((1,), MIN_WIDTH),
            "weight_versions": torch.full(shape, NO_VERSION),
            "generation_logprobs": torch.zeros(shape),
            "advantages": torch.zeros(shape),
            "token_mask": torch.zeros(shape),
            "sample_mask": torch.zeros(1),
        }
    )


def token_batch(sequences: Sequence[Sequence[int]]) -> BatchedDataDict:
    """Returns token sequences to be scored, padded on the right: `input_ids` [B, S] and `input_lengths` [B]."""
    rows = [torch.as_tensor(tokens, dtype=torch.int64) for tokens in sequences]
    narrowest = torch.zeros(MIN_WIDTH, dtype=torch.int64)  # so that no batch is narrower
    input_ids_BS = pad_sequence([*rows, narrowest], batch_first=True)[:-1]
    return BatchedDataDict(input_ids=input_ids_BS, input_lengths=torch.tensor([len(row) for row in rows]))
