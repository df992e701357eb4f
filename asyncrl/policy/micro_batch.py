"""One micro-batch through the live policy and the loss: something to differentiate, and what was measured.

Legend: B rows, S tokens, T = S − 1 next tokens, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from asyncrl.algorithms.diagnostics import OffPolicySums, off_policy_sums
from asyncrl.algorithms.interfaces import LossFunction, LossInputType
from asyncrl.algorithms.kernel import KernelSums, kernel_sums
from asyncrl.algorithms.loss import ObjectiveLoss, entropy, gather_logprobs
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.batching import trained_mask
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.policy.packed import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchOutcome:
    """`differentiable` has the loss's gradient by the weights, not always its value."""

    differentiable: torch.Tensor
    loss: float = 0.0
    sums: OffPolicySums = field(default_factory=OffPolicySums)
    kernel: KernelSums = field(default_factory=KernelSums)
    metrics: Mapping[str, float] = field(default_factory=dict)


def loss_of(
    data: BatchedDataDict,
    *,
    model: PreTrainedModel,
    loss_fn: LossFunction,
    counts: Mapping[str, torch.Tensor],
    temperature: float,
    packed: bool,
    step: int | None,
) -> MicroBatchOutcome:
    """Loss, diagnostics and the loss's own metrics; `counts` are the step's `global_valid_seqs` and `…_toks`.

    Without `step`, the version of the weights, no token counts as on-policy; without `generation_logprobs` there is
    nothing to tell how far the data is from the policy.
    """
    objective = loss_fn if isinstance(loss_fn, ObjectiveLoss) else None
    # an objective takes the chunked head's entropies where others would need logits
    input_type = getattr(loss_fn, "input_type", LossInputType.LOGIT)
    from_logprobs = objective is not None or input_type is LossInputType.LOGPROB
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
        # the graph stays, so that FSDP's hooks and collectives run as on the other ranks
        return MicroBatchOutcome(differentiable=0.0 * logprobs_BT.sum())
    if "prev_logprobs" not in data:
        # The weights at the step's start are the current ones in its only update; an interpolated proximal policy,
        # which the loss makes for itself, starts from the current ones in every update.
        data["prev_logprobs"] = aligned(logprobs_BT.detach())
    kernel = KernelSums()
    if from_logprobs:
        # The loss alone is differentiated first: its slopes are all that the model's own backward pass needs.
        columns_BT = {"next_token_logprobs": logprobs_BT}
        if objective is not None and objective.needs_entropy:
            columns_BT["next_token_entropies"] = entropy_BT
        leaves_BT = {name: column_BT.detach().requires_grad_() for name, column_BT in columns_BT.items()}
        with torch.enable_grad():  # the slopes are wanted in evaluation too
            loss, metrics = loss_fn(data=data, **counts, **leaves_BT)
            slopes_BT = _slopes(loss, *leaves_BT.values())
        parts = [(column * slopes).sum() for column, slopes in zip(columns_BT.values(), slopes_BT, strict=True)]
        differentiable = torch.stack(parts).sum()
    else:
        loss, metrics = loss_fn(logits_BSV, data, **counts)
        differentiable = loss
    sums = OffPolicySums()
    if "generation_logprobs" in data:
        # in float32: the difference of two bfloat16 columns would be rounded to bfloat16
        proximal_BT, behaviour_BT = data["prev_logprobs"][:, 1:].float(), data["generation_logprobs"][:, 1:].float()
        if from_logprobs and "advantages" in data:
            push_slopes_BT, shares_BT = (slopes_BT[0], {}) if objective is None else _push(objective, data, logprobs_BT)
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
    return MicroBatchOutcome(
        differentiable=differentiable,
        loss=float(loss.detach()),
        sums=sums,
        kernel=kernel,
        metrics={name: float(value) for name, value in metrics.items()},
    )


def aligned(logprobs_BT: torch.Tensor) -> torch.Tensor:
    """[B, S] from [B, S − 1]: entry i belongs to token i, entry 0 is 0."""
    return torch.nn.functional.pad(logprobs_BT, (1, 0))


def _logits(
    model: PreTrainedModel,
    input_ids_BS: torch.Tensor,
    *,
    temperature: float,
    packed_lengths_B: torch.Tensor | None,
) -> torch.Tensor:
    """[B, S, V] float32, divided by the temperature: for a loss that wants them all.

    No attention mask: padding is on the right, where causal attention never looks.
    """
    if packed_lengths_B is None:
        logits_BSV: torch.Tensor = model(input_ids=input_ids_BS, use_cache=False).logits.float()
    else:
        packed = PackedRows.of(input_ids_BS, lengths_B=packed_lengths_B)
        logits_1NV = model(**packed.model_inputs(), use_cache=False).logits.float()
        # logits of a row's last token predict nothing that is trained
        logits_BSV = torch.nn.functional.pad(packed.padded(logits_1NV, width=input_ids_BS.shape[1] - 1), (0, 0, 0, 1))
    return logits_BSV if temperature == 1.0 else logits_BSV / temperature


def _push(
    objective: ObjectiveLoss, data: BatchedDataDict, logprobs_BT: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The slopes of what the advantages ask for alone, and where the clip and the gates act."""
    leaf_BT = logprobs_BT.detach().requires_grad_()
    with torch.enable_grad():
        # entropies are in no push
        terms = objective.terms(data, logprobs_BT=leaf_BT, entropy_BT=torch.zeros_like(leaf_BT))
        [slopes_BT] = _slopes(terms.push_BT.sum(), leaf_BT)
    return slopes_BT, {"clipped": terms.clipped_BT, "gated": terms.gated_BT}


def _slopes(loss: torch.Tensor, *leaves_BT: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """∂loss/∂leaf of each; zeros for a loss that does not look at it."""
    if not loss.requires_grad:
        return tuple(torch.zeros_like(leaf_BT) for leaf_BT in leaves_BT)
    return torch.autograd.grad(loss, leaves_BT, allow_unused=True, materialize_grads=True)
