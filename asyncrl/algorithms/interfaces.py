"""What a loss is to the policy: the call, its inputs' kind, and how its metrics add up.

B rows, S tokens, V vocabulary; right padding; log-probs float32 in nats. Column `c[b, i]` belongs to token
`input_ids[b, i]`, so a loss slices `[:, 1:]` of every column to meet the model's [B, S − 1] next-token log-probs.
"""

from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import torch

from asyncrl.data.batched_data_dict import BatchedDataDict


def masked_mean(values: torch.Tensor, mask: torch.Tensor, global_normalization_factor: torch.Tensor) -> torch.Tensor:
    """Σ values · mask / factor, a scalar; 0 where the factor, a count over all ranks, is 0.

    What is masked with 0 is not looked at: it may be NaN.
    """
    return torch.where(mask != 0, values * mask, 0.0).sum() / global_normalization_factor.clamp(min=1)


class LossType(StrEnum):
    """Whether the loss is normalised by tokens or by sequences."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(StrEnum):
    """What the loss wants of the model."""

    LOGIT = "logit"
    """`next_token_logits` [B, S, V], already divided by the sampling temperature, float32."""
    LOGPROB = "logprob"
    """`next_token_logprobs` [B, S − 1], of the tokens that follow."""


class MetricNormalization(StrEnum):
    """What a metric's sum over micro-batches and ranks is divided by."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


@runtime_checkable
class LossFunction(Protocol):
    """Loss and metrics of one micro-batch.

    Both calls work: `loss_fn(next_token_logits, data, global_valid_seqs, global_valid_toks)` and
    `loss_fn(data=…, global_valid_seqs=…, global_valid_toks=…, next_token_logprobs=…)`; the policy makes the one that
    `input_type` asks for, and the first of a loss that has no such attribute. The counts are those of the whole global
    batch over all ranks: a loss is a sum divided by them, never by a count of its own, so that any split into
    micro-batches and ranks gives the same gradient.

    Returns the scalar to minimise and metrics. Metrics are added over micro-batches and ranks, except names ending in
    `_min` / `_max` and the few that are averaged (`diagnostics.AVERAGED_METRICS`); then divided as the optional
    attribute `metric_normalizations` says (`NONE`: not).
    """

    loss_type: LossType
    input_type: LossInputType

    def __call__(
        self,
        next_token_logits: torch.Tensor | None = None,
        data: BatchedDataDict | None = None,
        global_valid_seqs: torch.Tensor | None = None,
        global_valid_toks: torch.Tensor | None = None,
        *,
        next_token_logprobs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]: ...


@runtime_checkable
class ValueLossFunction(Protocol):
    """As a `LossFunction`, of a critic: it is called with the critic's values [B, S], entry t being V(before token t),
    in the place of logits."""

    loss_type: LossType

    def __call__(
        self,
        values_BS: torch.Tensor,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]: ...
