"""The columns of batches by name: for generation, and for the stages of training.

Shape letters: B rows, S tokens of the longest row, S' tokens of the longest prompt with its response, K tokens of the
largest support, L most likely tokens (`generator.logprobs`). The support of a token is the tokens among which it was
sampled (`generator.top_k`). Padding is on the right. Log-probs are float32 nats. Entry `c[b, i]` of a column belongs to
token `input_ids[b, i]` given its prefix, so `logprobs[b, 0]` is 0.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import torch

from asyncrl.data.batched_data_dict import BatchedDataDict

NO_VERSION = -1
"""Value of `weight_versions` for tokens that no policy has sampled: of prompts, of environments, and of padding."""

SUPPORT = "support_ids"
"""Column of the supports, with `generator.top_k`: the ids of the tokens among which each token was sampled."""
TOP_IDS, TOP_LOGPROBS = "top_ids", "top_logprobs"
"""Columns with `generator.logprobs`: the ids of the tokens that were most likely when each token was sampled, the most
likely one first, and their log-probs under the distribution from which it was sampled."""
NO_TOKEN = -1
"""Value of `support_ids` and `top_ids` in the unused places behind the last token of a list, and in all places of
tokens that were not sampled, which have no list. `top_logprobs` is 0 in these places."""
WIDE_FIELDS = (SUPPORT, TOP_IDS, TOP_LOGPROBS)
"""The columns that have several numbers for each token (`Config.widths`)."""

BRANCH = "branch_ids"
"""Column of the branches of episodes, with `environment.max_branches` above 1. A row then has several sequences of one
episode, its branches, one after the other. The column has for each token the number of its branch."""
NO_BRANCH = -1
"""Value of `branch_ids` for padding."""

EXTRA_FIELDS = (*WIDE_FIELDS, BRANCH)
"""The columns of a finished group's rows that only some runs have (`Config.extra_columns`)."""

GENERATED_FIELDS = ("input_ids", "input_lengths", "generation_logprobs", "weight_versions", "token_mask")
"""The columns of a finished group's rows. Columns that training adds later for these samples are stored under the same
row keys."""

LP_SEED_FIELDS = ("input_ids", "input_lengths", "token_mask", "sample_mask")
"""The columns that each pass of a model over the rows reads: for log-probs, for a critic's values, and for training."""

CRITIC_FIELDS = ("rewards", "values", "returns")
"""The columns that the stages of a critic write: a reward for each row [B], and for each token [B, S] the critic's
value and its target (the return)."""


def extra_fields(rows: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the columns in `EXTRA_FIELDS` that the rows have.

    >>> extra_fields({"input_ids": ..., "support_ids": ...})
    ('support_ids',)
    """
    return tuple(name for name in EXTRA_FIELDS if name in rows)


class GenerationDatumSpec(TypedDict):
    """Prompts to continue."""

    input_ids: torch.Tensor
    """int64 [B, S]"""
    input_lengths: torch.Tensor
    """int64 [B]"""
    stop_strings: NotRequired[list[list[str] | None]]
    """For each row: strings that end the response, in addition to the end-of-sequence token."""


class GenerationOutputSpec(TypedDict):
    """Prompts with their responses."""

    output_ids: torch.Tensor
    """int64 [B, S']: prompt, response, padding."""
    generation_lengths: torch.Tensor
    """int64 [B]: tokens of the response."""
    unpadded_sequence_lengths: torch.Tensor
    """int64 [B]: tokens of prompt and response."""
    logprobs: torch.Tensor
    """float32 [B, S'], as sampled; 0 for prompt and padding."""
    truncated: NotRequired[torch.Tensor]
    """bool [B]: True if the length limit ended the response."""
    weight_versions: NotRequired[torch.Tensor]
    """int64 [B, S']: the version that sampled each token; −1 for prompt and padding."""
    support_ids: NotRequired[torch.Tensor]
    """int32 [B, S', K]: the ids of the tokens among which each token was sampled, −1 beyond them."""
    top_ids: NotRequired[torch.Tensor]
    """int32 [B, S', L]: the ids of the most likely tokens, −1 beyond them."""
    top_logprobs: NotRequired[torch.Tensor]
    """float32 [B, S', L]: the log-probs of `top_ids`, as sampled; 0 beyond them."""


class _StepColumns(TypedDict):
    """The columns of samples that a training step reads."""

    input_ids: torch.Tensor
    """int64 [B, S]: prompt, response, padding."""
    input_lengths: torch.Tensor
    """int64 [B]"""
    generation_logprobs: torch.Tensor
    """float32 [B, S], under the weights that sampled the tokens."""
    prev_logprobs: NotRequired[torch.Tensor]
    """float32 [B, S], under the weights at the start of the step."""
    reference_policy_logprobs: NotRequired[torch.Tensor]
    """float32 [B, S], under the frozen initial weights."""
    advantages: torch.Tensor
    """float32 [B, S]"""
    token_mask: torch.Tensor
    """float32 [B, S]: 1 for tokens to train."""
    sample_mask: torch.Tensor
    """float32 [B]: 0 excludes the row from training."""


DP_TRAIN_FIELDS = tuple(_StepColumns.__annotations__)
"""The columns that a training step reads, by name."""


class TrainDatumSpec(_StepColumns):
    """Samples to train on. Some log-prob columns exist only when the objective needs them."""

    group_ids: NotRequired[torch.Tensor]
    """int64 [B]: equal for all rows of one prompt; used by the aggregation `prompt_mean` of a loss."""
    rewards: NotRequired[torch.Tensor]
    """float32 [B]: used by the penalty `positive_nll` of a loss."""
    support_ids: NotRequired[torch.Tensor]
    """int32 [B, S, K]: the ids of the tokens among which each token was sampled, −1 beyond them. Log-probs and
    entropies are those of the distribution over these tokens."""
    top_ids: NotRequired[torch.Tensor]
    """int32 [B, S, L]: the ids of the tokens that were most likely when the token was sampled, −1 beyond them; used by
    the setting `centering` of a loss."""
    top_logprobs: NotRequired[torch.Tensor]
    """float32 [B, S, L]: the log-probs of `top_ids` under the weights that sampled the token; 0 beyond them."""
    branch_ids: NotRequired[torch.Tensor]
    """int32 [B, S]: the number of each token's branch, −1 for padding. A branch is a sequence of its own: its tokens do
    not see those of other branches of the row."""


def verify_right_padding(
    data: Mapping[str, Any], pad_value: int = 0, raise_error: bool = True
) -> tuple[bool, str | None]:
    """Returns (True, None) if only `pad_value` follows each row of ids. Otherwise raises ValueError, or returns (False,
    message) with `raise_error=False`.

    Reads `input_ids` and `input_lengths`, or `output_ids` and `unpadded_sequence_lengths`. A row's own tokens may equal
    the pad value, because some models pad with their end-of-sequence token.
    """
    message = _padding_fault(data, pad_value)
    if message is not None and raise_error:
        raise ValueError(message)
    return message is None, message


def _padding_fault(data: Mapping[str, Any], pad_value: int) -> str | None:
    for ids_key, lengths_key in (("input_ids", "input_lengths"), ("output_ids", "unpadded_sequence_lengths")):
        if ids_key in data and lengths_key in data:
            break
    else:
        return (
            "right padding can be verified for input_ids with input_lengths, or output_ids with "
            f"unpadded_sequence_lengths, but the columns are {sorted(data)}"
        )
    ids_BS: torch.Tensor = data[ids_key]
    if ids_BS.ndim != 2:
        return f"{ids_key} has shape {list(ids_BS.shape)}, but must have two dimensions: [rows, tokens]"
    lengths_B = torch.as_tensor(data[lengths_key], device=ids_BS.device)
    rows, width = ids_BS.shape
    if lengths_B.shape != (rows,):
        return f"{lengths_key} has shape {list(lengths_B.shape)}, but {ids_key} has {rows} rows; give one length a row"
    impossible_B = (lengths_B < 0) | (lengths_B > width)
    if impossible_B.any():
        row = int(impossible_B.nonzero()[0])
        return f"row {row}: {lengths_key} is {int(lengths_B[row])}, but must be 0 to {width}, the width of {ids_key}"
    beyond_BS = torch.arange(width, device=ids_BS.device) >= lengths_B.unsqueeze(1)
    wrong_BS = beyond_BS & (ids_BS != pad_value)
    if wrong_BS.any():
        row, place = wrong_BS.nonzero()[0].tolist()
        return (
            f"row {row} of {ids_key} has token {int(ids_BS[row, place])} at {place}, beyond its length "
            f"{int(lengths_B[row])}: it is not right-padded with {pad_value}"
        )
    return None


# Tells which tokens of a batch are trained, and which tokens were most likely in their places.


def trained_mask(batch: BatchedDataDict) -> torch.Tensor:
    """Returns the tokens that are trained, bool [B, S] (B rows, S tokens): those with a positive `token_mask` [B, S] in
    rows with a positive `sample_mask` [B]. The first token of a row has no prefix and is never trained."""
    mask_BS: torch.Tensor = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) > 0
    mask_BS[:, 0] = False
    return mask_BS


def listed_tops(row: Mapping[str, torch.Tensor], places: slice) -> list[dict[int, float]]:
    """Returns a dict {id: log-prob} for each of these places of a row: the tokens that were most likely for the sampler
    in this place. Returns an empty list if the row does not have the columns."""
    if TOP_IDS not in row or TOP_LOGPROBS not in row:
        return []
    pairs = zip(row[TOP_IDS][places].tolist(), row[TOP_LOGPROBS][places].tolist(), strict=True)
    return [{token: logprob for token, logprob in zip(*each, strict=True) if token != NO_TOKEN} for each in pairs]
