"""Runs one micro-batch through the live policy and the loss. The result can be differentiated and has measurements.

Legend: B rows, S tokens, T = S − 1 next tokens, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from asyncrl.algorithms.diagnostics import MetricSums, off_policy_sums
from asyncrl.algorithms.interfaces import LossFunction, LossInputType, input_type_of, of_outputs
from asyncrl.algorithms.kernel import kernel_sums
from asyncrl.algorithms.loss import ObjectiveLoss, entropy, gather_logprobs
from asyncrl.algorithms.objective import centered_kernel
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import NO_VERSION, SUPPORT, TOP_IDS, WIDE_FIELDS, trained_mask
from asyncrl.errors import CallRefused
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.ranks.loss_pass import (
    MicroBatchOutcome,
    UpdateContext,
    aligned,
    checked_loss,
    outcome_of,
    slopes_of,
    without_slopes,
)
from asyncrl.ranks.model_rows import ModelRows
from asyncrl.ranks.plan import check_columns
from asyncrl.ranks.witnessed import WITNESS


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicy:
    """Which tokens were sampled with the weights of the step's start, so that engine and learner must agree on their
    log-probs.

    With `whole_samples`, only the tokens of samples that these weights have generated completely: other samples also
    had keys and values of older weights in their KV cache (`weights.kv_cache: keep`).
    """

    whole_samples: bool

    def mask(self, data: BatchedDataDict, *, step: int | None) -> torch.Tensor:
        """Returns True for the on-policy tokens, bool [B, T]. `step` is the version of the weights at the step's start.
        If it is None, no token is on-policy, and the rows need no column `weight_versions`."""
        if step is None:
            return torch.zeros_like(data["input_ids"][:, 1:], dtype=torch.bool)
        versions_BT: torch.Tensor = data["weight_versions"][:, 1:]
        other_BT = versions_BT != step
        if self.whole_samples:  # a token of other weights excludes its row, also if it is masked because it is too old
            other_BT = other_BT | (other_BT & (versions_BT != NO_VERSION)).any(dim=1, keepdim=True)
        return ~other_BT


def loss_of(
    data: BatchedDataDict,
    *,
    model: PreTrainedModel,
    context: UpdateContext[LossFunction],
    temperature: float,
    packed: bool,
    on_policy: OnPolicy,
) -> MicroBatchOutcome:
    """Computes the loss of a micro-batch, diagnostics, and the loss's own metrics. `on_policy` says which tokens count
    as on-policy.

    If no token is trained, the loss is not called: it is 0, without diagnostics and metrics. Without the column
    `generation_logprobs`, there are no diagnostics. With `context.sole_update`, the loss reads the log-probs of this
    pass as `prev_logprobs` if the rows have none.
    """
    outputs = _outputs(data, model=model, loss_fn=context.loss_fn, temperature=temperature, packed=packed)
    logprobs_BT = outputs.logprobs_BT
    if not bool(trained_mask(data).any()):
        return MicroBatchOutcome(differentiable=without_slopes(logprobs_BT))
    proximal_BS = data["prev_logprobs"] if "prev_logprobs" in data else aligned(logprobs_BT.detach())
    if context.sole_update:
        # before the first update, the current weights are those of the step's start
        data["prev_logprobs"] = proximal_BS
    if context.watched is not None:
        context.watched.watch(data, outputs.columns)
        if context.watched.own is not None and WITNESS in data:
            [output] = outputs.columns.values()
            alone = partial(_slopes_of_rows, data=data, outputs=outputs, context=context)
            context.watched.own.watch(data, output, alone, numbers=data[WITNESS].tolist())

    # the loss may change its columns, and the diagnostics read them afterwards
    loss = of_outputs(context.loss_fn, outputs.columns, copy.copy(data), context.counts)
    measured = partial(
        _diagnosed,
        data=data,
        outputs=outputs,
        context=context,
        proximal_BT=proximal_BS[:, 1:].float(),
        on_policy=on_policy,
    )
    return outcome_of(outputs.columns, loss, measure=measured)


def passed_columns(loss_fn: LossFunction) -> tuple[str, ...]:
    """Returns the columns in `WIDE_FIELDS` that a training pass reads if the rows have them. The most likely tokens do
    not change log-probs, so the pass reads them for `centering` only."""
    return WIDE_FIELDS if isinstance(loss_fn, ObjectiveLoss) and loss_fn.needs_centering else (SUPPORT,)


def check_supports(data: BatchedDataDict, loss_fn: LossFunction, *, has_supports: bool) -> None:
    """Checks that rows have supports if, and only if, the configuration says so (`Config.has_supports`). Raises
    CallRefused or MissingColumns otherwise.

    With supports (the tokens among which each token was sampled), it also raises CallRefused for a user's loss that
    reads logits: tokens outside their support have no probability.
    """
    if not has_supports:
        if SUPPORT in data:
            raise CallRefused(
                f"the rows have the column {SUPPORT}, but generator.top_k is unset; set it to the value with which the "
                "rows were sampled"
            )
        return
    if not isinstance(loss_fn, ObjectiveLoss) and input_type_of(loss_fn) != LossInputType.LOGPROB:
        raise CallRefused(
            f"the loss {type(loss_fn).__name__} reads the logits of all tokens, but the rows were sampled with "
            "generator.top_k, among the tokens of their supports only; use a loss with input_type "
            f"{LossInputType.LOGPROB.value}, or sample without generator.top_k"
        )
    if data.size:
        check_columns(data, (SUPPORT,), reader="training with generator.top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """The model's outputs with their autograd graph. `columns` are the outputs that the loss reads, by the names of its
    arguments. The entropies of logits have no graph, because they are only reported."""

    columns: dict[str, torch.Tensor]
    logprobs_BT: torch.Tensor
    entropy_BT: torch.Tensor


def _outputs(
    data: BatchedDataDict, *, model: PreTrainedModel, loss_fn: LossFunction, temperature: float, packed: bool
) -> _Outputs:
    rows = ModelRows.of(data, packed=packed, wide=passed_columns(loss_fn))
    # for an objective, the chunked head computes entropies; other losses that need entropies get logits
    if not isinstance(loss_fn, ObjectiveLoss) and input_type_of(loss_fn) != LossInputType.LOGPROB:
        assert SUPPORT not in rows.wide, "refused by check_supports"
        logits_BSV = _logits(model, rows, temperature=temperature)
        return _Outputs(
            columns={"next_token_logits": logits_BSV},
            logprobs_BT=gather_logprobs(logits_BSV, input_ids_BS=data["input_ids"]),
            entropy_BT=entropy(logits_BSV.detach()),
        )
    kernel = None
    if isinstance(loss_fn, ObjectiveLoss) and loss_fn.needs_centering:
        # without a trained token, the rows may lack the columns, and no loss is computed
        kernel = centered_kernel(loss_fn.objective) if TOP_IDS in rows.wide else None
    logprobs_BT, entropy_BT, centering_BT = model_logprobs(
        model, rows, temperature=temperature, with_entropy=True, centered_kernel=kernel
    )
    assert entropy_BT is not None
    columns = {"next_token_logprobs": logprobs_BT}
    if centering_BT is not None:
        columns["next_token_centering"] = centering_BT
    if isinstance(loss_fn, ObjectiveLoss) and loss_fn.needs_entropy:
        columns["next_token_entropies"] = entropy_BT
    return _Outputs(columns=columns, logprobs_BT=logprobs_BT, entropy_BT=entropy_BT)


def _slopes_of_rows(
    rows: Sequence[int], *, data: BatchedDataDict, outputs: _Outputs, context: UpdateContext[LossFunction]
) -> torch.Tensor:
    """Returns the derivatives of the loss by the model's output for these rows, as if the micro-batch had no other
    rows. The loss must read one output only. The witness (`asyncrl.witness`) uses this for a user's own loss."""
    leaves = {name: output[rows].detach().requires_grad_() for name, output in outputs.columns.items()}
    loss = of_outputs(context.loss_fn, leaves, data.select_indices(rows), context.counts)
    with torch.enable_grad():
        scalar, _ = checked_loss(loss(**leaves))
        [slopes] = slopes_of(scalar, *leaves.values())
    return slopes


def _diagnosed(
    slopes: dict[str, torch.Tensor],
    *,
    data: BatchedDataDict,
    outputs: _Outputs,
    context: UpdateContext[LossFunction],
    proximal_BT: torch.Tensor,
    on_policy: OnPolicy,
) -> MetricSums:
    """Returns how far the data is from the policy, and how a loss of log-probs pushes its tokens. `slopes` are the
    derivatives of the loss by its arguments. Without the column `generation_logprobs`, nothing is measured."""
    if "generation_logprobs" not in data:
        return MetricSums()
    slopes_BT, mask_BT = slopes.get("next_token_logprobs"), trained_mask(data)[:, 1:]
    # in float32, because the difference of two bfloat16 columns would be rounded to bfloat16
    behaviour_BT = data["generation_logprobs"][:, 1:].float()
    kernel = MetricSums()
    if slopes_BT is not None and "advantages" in data:
        shares_BT: dict[str, torch.Tensor] = {}
        if isinstance(context.loss_fn, ObjectiveLoss):
            slopes_BT, shares_BT = _push(context.loss_fn, data, outputs.logprobs_BT)
        kernel = kernel_sums(
            slopes_BT=slopes_BT,
            advantages_BT=data["advantages"][:, 1:],
            staleness_BT=data["staleness"][:, 1:] if "staleness" in data else None,
            log_rho_BT=proximal_BT - behaviour_BT,
            mask_BT=mask_BT,
            shares_BT=shares_BT,
        )
    return kernel + off_policy_sums(
        proximal_BT=proximal_BT,
        behaviour_BT=behaviour_BT,
        entropy_BT=outputs.entropy_BT,
        mask_BT=mask_BT,
        reference_BT=data["reference_policy_logprobs"][:, 1:] if "reference_policy_logprobs" in data else None,
        on_policy_BT=on_policy.mask(data, step=context.step),
    )


def _logits(model: PreTrainedModel, rows: ModelRows, *, temperature: float) -> torch.Tensor:
    """Returns float32 logits [B, S, V], divided by the temperature, for a loss that needs all of them."""
    logits: torch.Tensor = model(**rows.inputs, use_cache=False).logits.float()
    if rows.packed is not None:
        # the logits after a row's last token predict no trained token, so they are filled with 0
        logits = torch.nn.functional.pad(rows.packed.at_tokens(logits), (0, 0, 0, 1))
    logits_BSV = rows.joined(logits)
    return logits_BSV if temperature == 1.0 else logits_BSV / temperature


def _push(
    objective: ObjectiveLoss, data: BatchedDataDict, logprobs_BT: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the derivatives of the objective's advantage term by the log-prob of each token, and masks of the tokens
    that the clip and the gates remove."""
    leaf_BT = logprobs_BT.detach().requires_grad_()
    with torch.enable_grad():
        # the push contains no entropy term, and the centering is an input of its own, without a graph to the leaf
        none_BT = torch.zeros_like(leaf_BT)
        terms = objective.terms(data, logprobs_BT=leaf_BT, entropy_BT=none_BT, centering_BT=none_BT)
        [slopes_BT] = slopes_of(terms.push_BT.sum(), leaf_BT)
    return slopes_BT, {"clipped": terms.clipped_BT, "gated": terms.gated_BT}
