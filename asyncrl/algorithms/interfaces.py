"""What a loss is to the policy: the call, its inputs' kind, and how its metrics add up.

B rows, S tokens, V vocabulary; right padding; log-probs float32 in nats. Column `c[b, i]` belongs to token
`input_ids[b, i]`, so a loss slices `[:, 1:]` of every column to meet the model's [B, S − 1] next-token log-probs.
"""

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import torch

from asyncrl.data.batched_data_dict import BatchedDataDict


def masked_mean(
    values: torch.Tensor,
    mask: torch.Tensor,
    global_normalization_factor: torch.Tensor | float | None = None,
    *,
    dim: int | tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Σ values · mask / factor, over `dim`, or over all dimensions when it is None.

    The factor is a count over all ranks, a tensor or a Python number; without one it is Σ mask over `dim`. The result
    is 0 where the factor is 0. Values that are masked with 0 are ignored, even NaN. Sums of half-precision values are
    float32: a bfloat16 sum of 4,096 tokens would have two digits.

    >>> masked_mean(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.5]), 0.5)
    tensor(5.)
    >>> masked_mean(torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]), dim=1)
    tensor([2., 5.])
    """
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    weighted = torch.where(mask != 0, values * mask, 0.0)
    total = weighted.sum() if dim is None else weighted.sum(dim=dim)
    if global_normalization_factor is None:
        mask = mask.expand_as(weighted)
        global_normalization_factor = mask.sum() if dim is None else mask.sum(dim=dim)
    factor = torch.as_tensor(global_normalization_factor, device=total.device)
    return torch.where(factor == 0, 0.0, total / torch.where(factor == 0, 1, factor))


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
    """The global count that a loss has divided a metric by. It describes the metric; no caller divides again."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


@runtime_checkable
class LossFunction(Protocol):
    """Loss and metrics of one micro-batch.

    Both calls work: `loss_fn(next_token_logits, data, global_valid_seqs, global_valid_toks)` and
    `loss_fn(data=…, global_valid_seqs=…, global_valid_toks=…, next_token_logprobs=…)`. The policy makes the one that
    `input_type` asks for, and the first if the loss has no such attribute. Logits are passed by keyword to a loss
    that names an argument `next_token_logits` or `logits`; by both names to one that takes them in `**kwargs`; by
    position otherwise.

    The counts are float32 scalars, sums of masks over the whole global batch and all ranks: `global_valid_seqs` is
    Σ sample_mask, `global_valid_toks` is Σ token_mask[:, 1:] · sample_mask. A loss is a sum that is divided by them,
    and by no count of its own, so that any split into micro-batches and ranks gives the same gradient.

    Returns the scalar to minimise and metrics, which the loss has divided by global counts too. The policy adds metrics
    over micro-batches and ranks and averages them over the global batches of a call. Two kinds of names are different:
    those that contain `_min` or `_max` are extremes, and `diagnostics.AVERAGED_METRICS` are averaged.

    Optional attributes: `columns`, the names of the columns that the loss reads beside the masks, so that a batch
    without them is refused before a rank is called (MissingColumns); `metric_normalizations`, a `MetricNormalization`
    for each metric.
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


def input_type_of(loss_fn: object) -> LossInputType:
    """What a loss wants of the model: its `input_type`, compared by value, so that the text "logprob" and another
    library's enum are understood; logits when it has none. ValueError for another value."""
    found = getattr(loss_fn, "input_type", LossInputType.LOGIT)
    value = getattr(found, "value", found)
    try:
        return LossInputType(value)
    except ValueError:
        known = ", ".join(repr(str(kind)) for kind in LossInputType)
        raise ValueError(f"the loss's input_type is {found!r}; it must be one of {known}") from None


_LOGITS = ("next_token_logits", "logits")


def call_with_logits(
    loss_fn: Callable[..., Any], logits: torch.Tensor, data: BatchedDataDict, counts: Mapping[str, torch.Tensor]
) -> Any:
    """Calls the loss with logits [B, S, V], by the keyword that its signature has, else as the first argument."""
    signature = inspect.signature(loss_fn)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    names = [name for name in _LOGITS if name in signature.parameters]
    any_keyword = inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds
    if not names and any_keyword and _binds(signature, data=data, **counts):
        names = [*_LOGITS]
    if not names:
        return loss_fn(logits, data, **counts)
    return loss_fn(data=data, **counts, **dict.fromkeys(names, logits))


def _binds(signature: inspect.Signature, **arguments: Any) -> bool:
    """Whether these arguments are all that a call must have."""
    try:
        signature.bind(**arguments)
    except TypeError:
        return False
    return True


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
