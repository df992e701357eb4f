"""Runs one micro-batch through the live policy and the loss. The result can be differentiated and has measurements.

Legend: B rows, S tokens, T = S − 1 next tokens, V vocabulary.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from asyncrl.algorithms.diagnostics import OffPolicySums, off_policy_sums
from asyncrl.algorithms.interfaces import LossFunction, LossInputType, call_with_logits, input_type_of
from asyncrl.algorithms.kernel import KernelSums, kernel_sums
from asyncrl.algorithms.loss import ObjectiveLoss, entropy, gather_logprobs
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.masks import trained_mask
from asyncrl.errors import LossFailed
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.policy.packed import PackedRows
from asyncrl.user_code import describe_error


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchOutcome:
    """The result of one micro-batch.

    `differentiable` is a scalar whose gradient with respect to the weights is the loss's gradient. Its value may differ
    from the loss. If the loss failed, `failure` is set and this gradient is 0.
    """

    differentiable: torch.Tensor
    loss: float = 0.0
    sums: OffPolicySums = field(default_factory=OffPolicySums)
    kernel: KernelSums = field(default_factory=KernelSums)
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: LossFailed | None = None


def loss_of(
    data: BatchedDataDict,
    *,
    model: PreTrainedModel,
    loss_fn: LossFunction,
    counts: Mapping[str, torch.Tensor],
    temperature: float,
    packed: bool,
    step: int | None,
    sole_update: bool,
) -> MicroBatchOutcome:
    """Computes the loss, diagnostics and the loss's own metrics. `counts` are the step's `global_valid_seqs` and
    `global_valid_toks`.

    `step` is the version of the weights. Without it, no token counts as on-policy. Without the column
    `generation_logprobs`, the distance between data and policy is not measured. With `sole_update`, the loss reads the
    log-probs of this pass as `prev_logprobs` if the rows have none.
    """
    objective = loss_fn if isinstance(loss_fn, ObjectiveLoss) else None
    # for an objective, the chunked head computes entropies; other losses that need entropies get logits
    from_logprobs = objective is not None or input_type_of(loss_fn) == LossInputType.LOGPROB
    lengths_B = data["input_lengths"] if packed else None
    if from_logprobs:
        logprobs_BT, entropy_BT = model_logprobs(
            model, data["input_ids"], temperature=temperature, with_entropy=True, packed_lengths_B=lengths_B
        )
        assert entropy_BT is not None
    else:
        logits_BSV = _logits(model, data["input_ids"], temperature=temperature, packed_lengths_B=lengths_B)
        logprobs_BT = gather_logprobs(logits_BSV, input_ids_BS=data["input_ids"])
        entropy_BT = entropy(logits_BSV.detach())
    mask_BT = trained_mask(data)[:, 1:]
    if not bool(mask_BT.any()):
        # the result keeps the graph, so that FSDP's hooks and collectives run as on the other ranks
        return MicroBatchOutcome(differentiable=0.0 * logprobs_BT.sum())
    proximal_BS = data["prev_logprobs"] if "prev_logprobs" in data else aligned(logprobs_BT.detach())
    if sole_update:
        # before the first update, the current weights are those of the step's start
        data["prev_logprobs"] = proximal_BS
    columns = {"next_token_logprobs": logprobs_BT} if from_logprobs else {"next_token_logits": logits_BSV}
    if objective is not None and objective.needs_entropy:
        columns["next_token_entropies"] = entropy_BT
    # The loss is first differentiated only with respect to the model's outputs. The model's backward pass needs nothing
    # but these slopes, and a loss that fails does not interrupt the collectives of that pass.
    leaves = {name: column.detach().requires_grad_() for name, column in columns.items()}
    try:
        # a copy, because the loss may change its columns, and the diagnostics read them afterwards
        loss, metrics, slopes = _differentiated(loss_fn, copy.copy(data), counts=counts, leaves=leaves)
        sums, kernel = OffPolicySums(), KernelSums()
        if "generation_logprobs" in data:
            sums, kernel = _diagnosed(
                data,
                objective=objective,
                slopes_BT=slopes[0] if from_logprobs else None,
                logprobs_BT=logprobs_BT,
                proximal_BT=proximal_BS[:, 1:].float(),
                entropy_BT=entropy_BT,
                mask_BT=mask_BT,
                step=step,
            )
    except Exception as error:
        return MicroBatchOutcome(differentiable=0.0 * logprobs_BT.sum(), failure=loss_failed(error))
    parts = [with_slopes(column, slope) for column, slope in zip(columns.values(), slopes, strict=True)]
    return MicroBatchOutcome(
        differentiable=torch.stack(parts).sum(), loss=loss, sums=sums, kernel=kernel, metrics=metrics
    )


def _differentiated(
    loss_fn: LossFunction,
    data: BatchedDataDict,
    *,
    counts: Mapping[str, torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
) -> tuple[float, dict[str, float], tuple[torch.Tensor, ...]]:
    """Returns the loss, its metrics, and its slopes with respect to `leaves`. The slopes are also measured in eval
    mode."""
    with torch.enable_grad():
        if "next_token_logits" in leaves:
            returned = call_with_logits(loss_fn, leaves["next_token_logits"], data, counts)
        else:
            returned = loss_fn(data=data, **counts, **leaves)
        loss, metrics = checked_loss(returned)
        return float(loss.detach()), metrics, slopes_of(loss, *leaves.values())


def _diagnosed(
    data: BatchedDataDict,
    *,
    objective: ObjectiveLoss | None,
    slopes_BT: torch.Tensor | None,
    logprobs_BT: torch.Tensor,
    proximal_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    step: int | None,
) -> tuple[OffPolicySums, KernelSums]:
    """Returns how far the data is from the policy, and how a loss of log-probs pushes its tokens."""
    # in float32, because the difference of two bfloat16 columns would be rounded to bfloat16
    behaviour_BT = data["generation_logprobs"][:, 1:].float()
    kernel = KernelSums()
    if slopes_BT is not None and "advantages" in data:
        push_slopes_BT, shares_BT = (slopes_BT, {}) if objective is None else _push(objective, data, logprobs_BT)
        kernel = kernel_sums(
            slopes_BT=push_slopes_BT,
            advantages_BT=data["advantages"][:, 1:],
            staleness_BT=data["staleness"][:, 1:] if "staleness" in data else None,
            log_rho_BT=proximal_BT - behaviour_BT,
            mask_BT=mask_BT,
            shares_BT=shares_BT,
        )
    sums = off_policy_sums(
        proximal_BT=proximal_BT,
        behaviour_BT=behaviour_BT,
        entropy_BT=entropy_BT,
        mask_BT=mask_BT,
        reference_BT=data["reference_policy_logprobs"][:, 1:] if "reference_policy_logprobs" in data else None,
        on_policy_BT=data["weight_versions"][:, 1:] == step if step is not None else torch.zeros_like(mask_BT),
    )
    return sums, kernel


def checked_loss(returned: object) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns a loss's result with metrics as floats. Raises TypeError unless it is a scalar tensor and a dict of
    numbers."""
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(f"a loss must return (scalar, metrics), but this one returned a {type(returned).__name__}")
    loss, metrics = returned
    if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and isinstance(metrics, Mapping)):
        found = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(
            f"a loss must return a scalar tensor and a dict, but this one returned {found} and {type(metrics).__name__}"
        )
    return loss.squeeze(), {str(name): float(value) for name, value in metrics.items()}


def loss_failed(error: Exception) -> LossFailed:
    """Turns an error of a loss function into an error of the call."""
    return LossFailed(f"the loss failed: {describe_error(error)}")


def aligned(logprobs_BT: torch.Tensor) -> torch.Tensor:
    """Returns [B, S] from [B, S − 1]: entry i belongs to token i, and entry 0 is 0."""
    return torch.nn.functional.pad(logprobs_BT, (1, 0))


def _logits(
    model: PreTrainedModel,
    input_ids_BS: torch.Tensor,
    *,
    temperature: float,
    packed_lengths_B: torch.Tensor | None,
) -> torch.Tensor:
    """Returns float32 logits [B, S, V], divided by the temperature, for a loss that needs all of them.

    No attention mask is needed: padding is on the right, where causal attention does not look.
    """
    if packed_lengths_B is None:
        logits_BSV: torch.Tensor = model(input_ids=input_ids_BS, use_cache=False).logits.float()
    else:
        packed = PackedRows.of(input_ids_BS, lengths_B=packed_lengths_B)
        logits_1NV = model(**packed.model_inputs(), use_cache=False).logits.float()
        # the logits after a row's last token predict no trained token, so they are filled with 0
        logits_BSV = torch.nn.functional.pad(packed.padded(logits_1NV, width=input_ids_BS.shape[1] - 1), (0, 0, 0, 1))
    return logits_BSV if temperature == 1.0 else logits_BSV / temperature


def _push(
    objective: ObjectiveLoss, data: BatchedDataDict, logprobs_BT: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the slopes of the part that the advantages multiply, and where the clip and the gates act."""
    leaf_BT = logprobs_BT.detach().requires_grad_()
    with torch.enable_grad():
        # the push contains no entropy term, so any entropies will do
        terms = objective.terms(data, logprobs_BT=leaf_BT, entropy_BT=torch.zeros_like(leaf_BT))
        [slopes_BT] = slopes_of(terms.push_BT.sum(), leaf_BT)
    return slopes_BT, {"clipped": terms.clipped_BT, "gated": terms.gated_BT}


def slopes_of(loss: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns ∂loss/∂leaf for each leaf; zeros for a leaf that the loss does not read."""
    if not loss.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def with_slopes(tensor: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """Returns a scalar 0 whose gradient with respect to `tensor` is `slopes`.

    It replaces Σ tensor · slopes, whose product would be another copy of the logits.
    """
    return cast(torch.Tensor, _WithSlopes.apply(tensor, slopes))  # type: ignore[no-untyped-call]


class _WithSlopes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slopes)
        return slopes.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slopes,) = ctx.saved_tensors
        return grads[0] * slopes, None
