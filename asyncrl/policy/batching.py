"""From a rank's groups to padded micro-batches; the last place where staleness is checked.

Legend: B rows, S tokens, T = S − 1. Column `c[b, i]` belongs to token `input_ids[b, i]`; right padding.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.config.schema import LearnerSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import RunError, StalenessViolation
from asyncrl.policy.interfaces import TrainGroup

NO_VERSION = -1
"""In `weight_versions`: this token is prompt or padding."""
MIN_WIDTH = 2
"""Tokens of the narrowest batch: one to predict from and one to predict."""


def rank_batch(groups: Sequence[TrainGroup], *, step: int) -> BatchedDataDict:
    """All samples of a rank's groups, [B, S]; empty without groups.

    Columns: `input_ids`, `weight_versions` int64 [B, S], `generation_logprobs`, `advantages`, `token_mask` float32
    [B, S], `input_lengths` int64 [B], `sample_mask` float32 [B].

    StalenessViolation for a trained token that is older than its group's limit, or newer than the weights.
    """
    return BatchedDataDict.from_batches(
        [_group_batch(group, step=step) for group in groups], pad_value_dict={"weight_versions": NO_VERSION}
    )


def _group_batch(group: TrainGroup, *, step: int) -> BatchedDataDict:
    rows = group.rows
    prompt_length = len(rows["prompt_ids"])
    lengths = np.asarray(rows["output_lengths"], dtype=np.int64)
    _check_lengths(group, total=int(lengths.sum()))
    width = max(prompt_length + int(lengths.max(initial=0)), MIN_WIDTH)
    columns: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.zeros((len(lengths), width), dtype=np.int64),
        "weight_versions": np.full((len(lengths), width), NO_VERSION, dtype=np.int64),
        "generation_logprobs": np.zeros((len(lengths), width), dtype=np.float32),
        "token_mask": np.zeros((len(lengths), width), dtype=np.float32),
    }
    columns["input_ids"][:, :prompt_length] = rows["prompt_ids"]
    ends = lengths.cumsum()
    for i, (start, end) in enumerate(zip(ends - lengths, ends, strict=True)):
        completion = slice(prompt_length, prompt_length + end - start)
        columns["input_ids"][i, completion] = rows["output_ids"][start:end]
        columns["weight_versions"][i, completion] = rows["weight_versions"][start:end]
        columns["generation_logprobs"][i, completion] = rows["logprobs"][start:end]
        columns["token_mask"][i, completion] = 1.0
    batch = BatchedDataDict({name: torch.from_numpy(column) for name, column in columns.items()})
    batch["input_lengths"] = torch.from_numpy(prompt_length + lengths)
    batch["sample_mask"] = torch.tensor(group.sample_mask_G, dtype=torch.float32)
    advantages_B = torch.tensor(group.advantages_G, dtype=torch.float32)
    batch["advantages"] = advantages_B.unsqueeze(1).expand(-1, width).clone()
    _check_staleness(group, staleness=step - batch["weight_versions"][trained_mask(batch)])
    return batch


def _check_lengths(group: TrainGroup, *, total: int) -> None:
    sizes = {name: len(group.rows[name]) for name in ("output_ids", "logprobs", "weight_versions")}
    samples = {
        "output_lengths": len(group.rows["output_lengths"]),
        "advantages": len(group.advantages_G),
        "sample_mask": len(group.sample_mask_G),
    }
    if set(sizes.values()) != {total} or len(set(samples.values())) != 1:
        raise RunError(f"group {group.key}: columns disagree: {total} tokens by length, {sizes}; samples: {samples}")


def _check_staleness(group: TrainGroup, *, staleness: torch.Tensor) -> None:
    if staleness.numel() == 0:
        return
    oldest, newest = int(staleness.max()), int(staleness.min())
    if oldest > group.max_staleness_versions or newest < 0:
        raise StalenessViolation(
            f"group {group.key}: a token to be trained is {oldest if newest >= 0 else newest} versions old; the limit "
            f"of its ticket (staleness.max_versions) is {group.max_staleness_versions}"
        )


def trained_mask(batch: BatchedDataDict) -> torch.Tensor:
    """Tokens that are trained, bool [B, S]. The first token of a row has no prefix and never is."""
    mask_BS: torch.Tensor = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) > 0
    mask_BS[:, 0] = False
    return mask_BS


def count_trained(batch: BatchedDataDict) -> tuple[int, int]:
    """(tokens, samples) that are trained. An empty completion of a trained sample is a sample of no tokens."""
    if batch.size == 0:
        return 0, 0
    return int(trained_mask(batch).sum()), int((batch["sample_mask"] > 0).sum())


def staleness_counts(batch: BatchedDataDict, *, step: int) -> dict[int, int]:
    """Trained tokens by their staleness."""
    if batch.size == 0:
        return {}
    values, counts = (step - batch["weight_versions"][trained_mask(batch)]).unique(return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def micro_batches(batch: BatchedDataDict, learner: LearnerSection) -> list[BatchedDataDict]:
    """What `learner.batching` makes of the rows, each part cut to its longest row.

    Long rows come first, where rows are sorted: a batch that is too big for memory fails at once.
    """
    if batch.size == 0:
        return []
    parts: list[BatchedDataDict]
    match learner.batching:
        case "padded":
            size = learner.micro_batch_size
            order = batch["input_lengths"].argsort(descending=True, stable=True)
            parts = [batch.select_indices(order[start : start + size]) for start in range(0, batch.size, size)]
        case "dynamic":
            [shard], _ = batch.shard_by_batch_size(
                1,
                dynamic_batching_args={
                    "max_tokens_per_microbatch": learner.micro_batch_tokens,
                    "sequence_length_round": MIN_WIDTH,
                    "input_key": "input_ids",
                    "input_lengths_key": "input_lengths",
                },
            )
            parts = [*reversed(list(shard.make_microbatch_iterator_with_dynamic_shapes()))]
        case "packed":
            [shard], _ = batch.shard_by_batch_size(
                1,
                sequence_packing_args={
                    "max_tokens_per_microbatch": learner.micro_batch_tokens,
                    "input_key": "input_ids",
                    "input_lengths_key": "input_lengths",
                    "algorithm": "modified_first_fit_decreasing",
                    "sequence_length_pad_multiple": 1,
                },
            )
            parts = [*shard.make_microbatch_iterator_for_packable_sequences()]
    for part in parts:
        part.truncate_tensors(1, max(int(part["input_lengths"].max()), MIN_WIDTH))
    return parts


def empty_micro_batch() -> BatchedDataDict:
    """One row that trains nothing, for a rank that has run out while others have not: collectives must line up."""
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
    """Token sequences to be scored, right-padded: `input_ids` [B, S] and `input_lengths` [B]."""
    width = max([MIN_WIDTH, *(len(tokens) for tokens in sequences)])
    input_ids_BS = torch.zeros((len(sequences), width), dtype=torch.int64)
    for i, tokens in enumerate(sequences):
        input_ids_BS[i, : len(tokens)] = torch.as_tensor(tokens, dtype=torch.int64)
    return BatchedDataDict(
        {"input_ids": input_ids_BS, "input_lengths": torch.tensor([len(tokens) for tokens in sequences])}
    )
