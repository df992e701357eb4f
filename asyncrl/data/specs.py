"""Columns by name: what generation takes and gives, and what the stages of training read.

Legend: B rows, S tokens of the widest prompt, S' of the widest prompt with its response. Right padding; log-probs are
float32 nats. Column `c[b, i]` belongs to token `input_ids[b, i]` given its prefix, so `logprobs[b, 0]` is 0.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import torch

NO_VERSION = -1
"""In `weight_versions`: prompt or padding, which no policy sampled."""

LP_SEED_FIELDS = ("input_ids", "input_lengths", "token_mask", "sample_mask")
"""What a log-prob stage reads."""

DP_TRAIN_FIELDS = (
    "input_ids",
    "input_lengths",
    "generation_logprobs",
    "prev_logprobs",
    "reference_policy_logprobs",
    "advantages",
    "token_mask",
    "sample_mask",
)
"""What a training step reads, whichever stage wrote it."""

CRITIC_FIELDS = ("rewards", "values", "returns")
"""What the stages of a critic write: a reward a row [B], and per token what the critic says and what it should."""


class GenerationDatumSpec(TypedDict):
    """Prompts to be continued."""

    input_ids: torch.Tensor
    """int64 [B, S]"""
    input_lengths: torch.Tensor
    """int64 [B]"""
    stop_strings: NotRequired[list[list[str] | None]]
    """Per row, beyond the end-of-sequence token."""


class GenerationOutputSpec(TypedDict):
    """Prompts with their responses."""

    output_ids: torch.Tensor
    """int64 [B, S']: prompt, response, padding."""
    generation_lengths: torch.Tensor
    """int64 [B]: tokens of the response."""
    unpadded_sequence_lengths: torch.Tensor
    """int64 [B]: tokens of prompt and response."""
    logprobs: torch.Tensor
    """float32 [B, S'], as sampled; 0 on prompt and padding."""
    truncated: NotRequired[torch.Tensor]
    """bool [B]: the length limit ended the response."""
    weight_versions: NotRequired[torch.Tensor]
    """int64 [B, S']: the version that sampled each token; −1 on prompt and padding."""


class TrainDatumSpec(TypedDict):
    """Samples to be trained. The log-prob columns are there when the objective needs them."""

    input_ids: torch.Tensor
    """int64 [B, S]: prompt, response, padding."""
    input_lengths: torch.Tensor
    """int64 [B]"""
    generation_logprobs: torch.Tensor
    """float32 [B, S], under the weights that sampled."""
    prev_logprobs: NotRequired[torch.Tensor]
    """float32 [B, S], under the weights at the start of the step."""
    reference_policy_logprobs: NotRequired[torch.Tensor]
    """float32 [B, S], under the frozen initial weights."""
    advantages: torch.Tensor
    """float32 [B, S]"""
    token_mask: torch.Tensor
    """float32 [B, S]: 1 on tokens to be trained."""
    sample_mask: torch.Tensor
    """float32 [B]: 0 takes a row out."""
    group_ids: NotRequired[torch.Tensor]
    """int64 [B]: equal for the rows of one prompt; for the aggregation `prompt_mean`."""
    rewards: NotRequired[torch.Tensor]
    """float32 [B]: for the penalty `positive_nll`."""


def verify_right_padding(
    data: Mapping[str, Any], pad_value: int = 0, raise_error: bool = True
) -> tuple[bool, str | None]:
    """(True, None) when every row of ids is followed by nothing but `pad_value`; else ValueError, or (False, message).

    Reads `input_ids` and `input_lengths`, or `output_ids` and `unpadded_sequence_lengths`. A row's own tokens may
    equal the pad value: some models pad with their end-of-sequence token.
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
            "right padding is verified on input_ids and input_lengths, or output_ids and unpadded_sequence_lengths; "
            f"there are {sorted(data)}"
        )
    ids_BS: torch.Tensor = data[ids_key]
    if ids_BS.ndim != 2:
        return f"{ids_key} has shape {list(ids_BS.shape)}, not [rows, tokens]"
    lengths_B = torch.as_tensor(data[lengths_key], device=ids_BS.device)
    rows, width = ids_BS.shape
    if lengths_B.shape != (rows,):
        return f"{lengths_key} has shape {list(lengths_B.shape)}, {ids_key} has {rows} rows"
    impossible_B = (lengths_B < 0) | (lengths_B > width)
    if impossible_B.any():
        row = int(impossible_B.nonzero()[0])
        return f"row {row}: {lengths_key} is {int(lengths_B[row])}, {ids_key} is {width} wide"
    beyond_BS = torch.arange(width, device=ids_BS.device) >= lengths_B.unsqueeze(1)
    wrong_BS = beyond_BS & (ids_BS != pad_value)
    if wrong_BS.any():
        row, place = wrong_BS.nonzero()[0].tolist()
        return (
            f"row {row} of {ids_key} has token {int(ids_BS[row, place])} at {place}, beyond its length "
            f"{int(lengths_B[row])}: not right-padded with {pad_value}"
        )
    return None
