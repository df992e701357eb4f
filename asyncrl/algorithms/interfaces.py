"""Interfaces of loss functions: how the policy calls a loss, what the loss returns, and how its metrics are combined.

Legend: B rows, S tokens, V vocabulary. Rows are padded on the right. Log-probs are float32, in nats. Column entry
`c[b, i]` belongs to token `input_ids[b, i]`. The model's next-token log-probs have shape [B, S − 1], so a loss slices
`[:, 1:]` of every column to align it with them.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
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
    """Returns Σ values · mask / factor, summed over `dim`, or over all dimensions if `dim` is None.

    The factor is a count over all ranks, as a tensor or a Python number. If no factor is given, it is Σ mask over
    `dim`. The result is 0 where the factor is 0. Values where the mask is 0 are ignored, even if they are NaN. Values
    in half precision are summed in float32, because a bfloat16 sum of 4,096 tokens has only two correct digits.

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
    # the inner `where` keeps 0/0, whose gradient is NaN, out of the graph
    return torch.where(factor == 0, 0.0, total / torch.where(factor == 0, 1, factor))


class LossType(StrEnum):
    """Says whether the loss is normalised by the number of tokens or by the number of sequences."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(StrEnum):
    """Says which output of the model the loss reads."""

    LOGIT = "logit"
    """`next_token_logits` [B, S, V], float32, already divided by the sampling temperature."""
    LOGPROB = "logprob"
    """`next_token_logprobs` [B, S − 1]: entry t is the log-prob of token t + 1."""


class MetricNormalization(StrEnum):
    """The global count by which a loss has divided a metric. It is a description: no caller divides the metric
    again."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


@runtime_checkable
class LossFunction(Protocol):
    """Computes the loss and the metrics of one micro-batch.

    There are two calls: `loss_fn(next_token_logits, data, global_valid_seqs, global_valid_toks)` and
    `loss_fn(data=…, global_valid_seqs=…, global_valid_toks=…, next_token_logprobs=…)`. The policy uses the call that
    matches the loss's `input_type`. If the loss has no attribute `input_type`, the policy uses the first call. The
    policy passes logits by keyword to a loss that names an argument `next_token_logits` or `logits`. It passes them
    under both names to a loss that takes them in `**kwargs`. It passes them by position to every other loss.

    The counts are float32 scalars, summed over the whole global batch and all ranks: `global_valid_seqs` is
    Σ sample_mask, and `global_valid_toks` is Σ token_mask[:, 1:] · sample_mask. A loss is a sum that is divided by
    these counts. It never divides by a count of its own micro-batch, so every split into micro-batches and ranks gives
    the same gradient.

    The call returns the scalar to minimise, and the metrics. The loss divides its metrics by global counts, too. The
    policy adds the metrics of all micro-batches and ranks, and averages these sums over the updates of a `train` call.
    There are two exceptions. If `min` or `max` is a word of the name after an underscore (`ratio_max`), the policy
    takes the minimum or maximum. The metrics in `diagnostics.AVERAGED_METRICS` are averaged.

    Optional attributes:

    - `columns`: the names of the columns that the loss reads besides the masks. A batch without one of them is refused
      before any rank is called (MissingColumns). In a call with one update, the policy computes `prev_logprobs` itself
      if the batch lacks them.
    - `metric_normalizations`: a `MetricNormalization` for each metric.
    - `statistics`: numbers of the whole step, by name (`asyncrl.algorithms.step_statistics`). Every call then has the
      argument `statistics`, a dict of name and number. They are computed once a step, before the first gradient.
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
    """Returns the model output that a loss reads, from the loss's `input_type`. Without that attribute it is logits.

    The attribute is compared by value, so the string "logprob" or another library's enum also works. Raises ValueError
    for an unknown value.
    """
    found = getattr(loss_fn, "input_type", LossInputType.LOGIT)
    value = getattr(found, "value", found)
    try:
        return LossInputType(value)
    except ValueError:
        known = ", ".join(repr(str(kind)) for kind in LossInputType)
        raise ValueError(f"the loss's input_type is {found!r}; it must be one of {known}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the rows that a loss of the user gets in a run. `meaning` says what the column contains, and when the
    rows have it, if they do not always."""

    name: str
    shape: str
    dtype: str
    meaning: str


RUN_COLUMNS = (
    Column(name="input_ids", shape="[B, S]", dtype="int64", meaning="The tokens of prompt and completion."),
    Column(name="input_lengths", shape="[B]", dtype="int64", meaning="The number of tokens of the row."),
    Column(
        name="token_mask",
        shape="[B, S]",
        dtype="float32",
        meaning="1 for tokens that are trained: those that the policy has sampled. 0 for the prompt, "
        "the tokens of an environment and padding.",
    ),
    Column(
        name="sample_mask",
        shape="[B]",
        dtype="float32",
        meaning="1 for rows that are trained, 0 for rows that a filter leaves out.",
    ),
    Column(
        name="advantages",
        shape="[B, S]",
        dtype="float32",
        meaning="The advantage of each token; equal for all tokens of a row if the estimator has one for each sample.",
    ),
    Column(
        name="generation_logprobs",
        shape="[B, S]",
        dtype="float32",
        meaning="The log-prob of each token that the sampler recorded (`behaviour`), in nats.",
    ),
    Column(
        name="prev_logprobs",
        shape="[B, S]",
        dtype="float32",
        meaning="The log-prob of each token under the weights at the step's start (`proximal`), in nats.",
    ),
    Column(
        name="reference_policy_logprobs",
        shape="[B, S]",
        dtype="float32",
        meaning="The log-prob of each token under the initial weights (`reference`), in nats. Only if the advantage "
        "estimator has a `kl`.",
    ),
    Column(
        name="weight_versions",
        shape="[B, S]",
        dtype="int64",
        meaning="The version of the weights that sampled each token; −1 for tokens that the policy did not sample.",
    ),
    Column(
        name="staleness",
        shape="[B, S]",
        dtype="float32",
        meaning="The age of each token: the step's version minus that of the weights that sampled it.",
    ),
    Column(name="rewards", shape="[B]", dtype="float32", meaning="The reward of the row. Only if the loss names it."),
    Column(
        name="group_ids",
        shape="[B]",
        dtype="int64",
        meaning="A number that is equal for the samples of one prompt. Only if the loss names it.",
    ),
    Column(
        name="branch_ids",
        shape="[B, S]",
        dtype="int64",
        meaning="The branch of an episode to which the token belongs. Only with `environment.max_branches` above 1.",
    ),
    Column(
        name="support_ids",
        shape="[B, S, K]",
        dtype="int32",
        meaning="The tokens among which the token was sampled. Only with `generator.top_k`.",
    ),
    Column(
        name="top_ids",
        shape="[B, S, L]",
        dtype="int32",
        meaning="The tokens that were most likely when the token was sampled, the most likely one first; −1 beyond "
        "them. Only with `generator.logprobs`.",
    ),
    Column(
        name="top_logprobs",
        shape="[B, S, L]",
        dtype="float32",
        meaning="The log-probs of `top_ids` under the distribution from which the token was sampled, in nats; 0 where "
        "`top_ids` is −1. Only with `generator.logprobs`.",
    ),
)
"""The columns that a loss of the user can read in a run. A loop of your own may have others."""

_LOGITS = ("next_token_logits", "logits")
MODEL_OUTPUTS = (*_LOGITS, "next_token_logprobs")
"""Names of a loss's argument for the model's outputs."""
LOSS_ARGUMENTS = frozenset({*MODEL_OUTPUTS, "data", "global_valid_seqs", "global_valid_toks", "statistics"})
"""Names of the arguments that the policy passes to a loss. Other parameters of a user's loss are its options."""
LOSS_ATTRIBUTES = ("loss_type", "input_type", "columns", "metric_normalizations", "statistics")
"""Attributes of a loss that the policy reads."""


def with_arguments(loss_fn: Callable[..., Any], **arguments: Any) -> Any:
    """Returns a user's loss that gets these keyword arguments in every call, and that has the attributes of `loss_fn`
    in `LOSS_ATTRIBUTES`."""
    bound = partial(loss_fn, **arguments)
    for name in LOSS_ATTRIBUTES:
        if hasattr(loss_fn, name):
            setattr(bound, name, getattr(loss_fn, name))
    return bound


def of_outputs(
    loss_fn: Callable[..., Any], outputs: Collection[str], data: BatchedDataDict, counts: Mapping[str, torch.Tensor]
) -> Callable[..., Any]:
    """Returns `loss_fn` with the columns `data` and the global `counts` filled in. The result takes the model's
    `outputs` as keyword arguments: `next_token_logits`, or `next_token_logprobs` and perhaps `next_token_entropies` and
    `next_token_centering`."""
    if "next_token_logits" in outputs:
        return partial(call_with_logits, loss_fn, data=data, counts=counts)
    return partial(loss_fn, data=data, **counts)


def call_with_logits(
    loss_fn: Callable[..., Any],
    next_token_logits: torch.Tensor,
    data: BatchedDataDict,
    counts: Mapping[str, torch.Tensor],
) -> Any:
    """Calls the loss with logits [B, S, V]: by keyword if its signature has `next_token_logits` or `logits`, under both
    names if it takes them only in `**kwargs`, else as the first argument."""
    signature = inspect.signature(loss_fn)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    names = [name for name in _LOGITS if name in signature.parameters]
    any_keyword = inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds
    if not names and any_keyword and misfit(signature, data=data, **counts) is None:
        names = [*_LOGITS]
    if not names:
        return loss_fn(next_token_logits, data, **counts)
    return loss_fn(data=data, **counts, **dict.fromkeys(names, next_token_logits))


def misfit(signature: inspect.Signature, *values: Any, **keywords: Any) -> str | None:
    """Returns why a call with exactly these arguments does not fit the signature, or None if it fits."""
    try:
        signature.bind(*values, **keywords)
    except TypeError as error:
        return str(error)
    return None


@runtime_checkable
class ValueLossFunction(Protocol):
    """Computes the loss and the metrics of one micro-batch for a critic.

    It is called like a `LossFunction`, but with the critic's values [B, S] in place of logits. Entry t is
    V(before token t): the value of the state before token t.
    """

    loss_type: LossType

    def __call__(
        self,
        values_BS: torch.Tensor,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]: ...
