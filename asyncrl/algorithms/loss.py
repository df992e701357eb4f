"""The one objective on tensors.

Legend: B rows, S tokens, V vocabulary, T = S − 1 (the first token of a row has no prefix and is never trained).

What must hold: only the current log-probs carry gradient; masked slots are replaced before any exp, so that NaN in
them changes nothing; importance weights never change a denominator; exponents are bounded in log space.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from asyncrl.algorithms.interfaces import LossFunction, LossInputType, LossType, MetricNormalization
from asyncrl.algorithms.objective import Aggregation, Clipped, Objective, Reinforce, Weight
from asyncrl.algorithms.presets import PRESETS, resolve_objective
from asyncrl.config.import_path import is_import_path, resolve
from asyncrl.config.schema import AlgorithmSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError

MAX_LOG_RATIO = 40.0
"""A ratio and an unbounded weight beyond e^40 ≈ 2e17 are a broken log-prob (F22): they read as e^40, whose product
still fits float32, and the ratio carries no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """What the objective says of every token, zero and false at masked ones. `loss_BT` carries gradient."""

    loss_BT: torch.Tensor
    clipped_BT: torch.Tensor
    gated_BT: torch.Tensor


def token_terms(
    objective: Objective,
    *,
    logprobs_BT: torch.Tensor,
    proximal_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> TokenTerms:
    """W · S of every token, zero where `mask_BT` is false. Everything but `logprobs_BT` is detached here."""

    def inside(values_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BT, values_BT, 0.0)

    lp_BT, prox_BT = inside(logprobs_BT), inside(proximal_BT.detach())
    beh_BT, adv_BT = inside(behaviour_BT.detach()), inside(advantages_BT.detach())
    surrogate_BT, clipped_BT = _surrogate(objective.surrogate, lp_BT=lp_BT, prox_BT=prox_BT, adv_BT=adv_BT)
    if objective.weight is None:
        return TokenTerms(loss_BT=surrogate_BT, clipped_BT=clipped_BT, gated_BT=torch.zeros_like(mask_BT))
    weight_BT, gated_BT = _weight(objective.weight, log_rho_BT=prox_BT - beh_BT)
    # where, not only a product with 0: the surrogate of a gated token may be inf
    loss_BT = torch.where(gated_BT, 0.0, weight_BT * surrogate_BT)
    return TokenTerms(loss_BT=loss_BT, clipped_BT=clipped_BT, gated_BT=gated_BT)


def _surrogate(
    surrogate: Reinforce | Clipped, *, lp_BT: torch.Tensor, prox_BT: torch.Tensor, adv_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """S and where it has no gradient although A ≠ 0."""
    if isinstance(surrogate, Reinforce):
        return -adv_BT * lp_BT, torch.zeros_like(lp_BT, dtype=torch.bool)
    ratio_BT = (lp_BT - prox_BT).clamp(max=MAX_LOG_RATIO).exp()
    loss_BT = torch.maximum(-adv_BT * ratio_BT, -adv_BT * ratio_BT.clamp(surrogate.lo, surrogate.hi))
    clipped_BT = ((adv_BT > 0) & (ratio_BT > surrogate.hi)) | ((adv_BT < 0) & (ratio_BT < surrogate.lo))
    if surrogate.dual is not None:
        dual_BT = (adv_BT < 0) & (ratio_BT > surrogate.dual)
        loss_BT = torch.where(dual_BT, -adv_BT * surrogate.dual, loss_BT)
        clipped_BT = clipped_BT | dual_BT
    return loss_BT, clipped_BT


def _weight(weight: Weight, *, log_rho_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounded ρ and where it was zeroed."""
    log_lo = math.log(weight.lo) if weight.lo > 0 else -math.inf
    log_hi = min(math.log(weight.hi), MAX_LOG_RATIO)
    bounded_BT = log_rho_BT.clamp(log_lo, log_hi).exp()
    if weight.outside == "clamp":
        return bounded_BT, torch.zeros_like(log_rho_BT, dtype=torch.bool)
    gated_BT = (log_rho_BT < log_lo) | (log_rho_BT > math.log(weight.hi))
    return torch.where(gated_BT, 0.0, bounded_BT), gated_BT


def aggregate(
    aggregation: Aggregation,
    *,
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    global_valid_seqs: torch.Tensor,
    global_valid_toks: torch.Tensor,
) -> torch.Tensor:
    """This micro-batch's part of the step's loss: a sum over the masked tokens, divided by global counts.

    A count of zero divides by 1: then there is nothing to sum either (F24).
    """
    if aggregation is Aggregation.TOKEN_MEAN:
        return loss_BT.sum() / global_valid_toks.clamp(min=1)
    if aggregation is Aggregation.SEQUENCE_SUM:
        return loss_BT.sum() / global_valid_seqs.clamp(min=1)
    per_sequence_B = loss_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)
    return per_sequence_B.sum() / global_valid_seqs.clamp(min=1)


class ObjectiveLoss:
    """An `Objective` as a `LossFunction`.

    Reads the columns `input_ids`, `generation_logprobs`, `prev_logprobs`, `advantages`, `token_mask` [B, S] and
    `sample_mask` [B].
    """

    input_type = LossInputType.LOGPROB
    metric_normalizations: Mapping[str, MetricNormalization] = {
        "clipped_ratio": MetricNormalization.TOKENS,
        "gated_ratio": MetricNormalization.TOKENS,
    }

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        token_level = objective.aggregation is Aggregation.TOKEN_MEAN
        self.loss_type = LossType.TOKEN_LEVEL if token_level else LossType.SEQUENCE_LEVEL

    def __call__(
        self,
        next_token_logits: torch.Tensor | None = None,
        data: BatchedDataDict | None = None,
        global_valid_seqs: torch.Tensor | None = None,
        global_valid_toks: torch.Tensor | None = None,
        *,
        next_token_logprobs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if data is None or global_valid_seqs is None or global_valid_toks is None:
            raise TypeError("a loss needs data, global_valid_seqs and global_valid_toks")
        if next_token_logprobs is None:
            if next_token_logits is None:
                raise TypeError("a loss needs next_token_logits or next_token_logprobs")
            next_token_logprobs = gather_logprobs(next_token_logits, input_ids_BS=data["input_ids"])
        mask_BT = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)) > 0
        terms = token_terms(
            self.objective,
            logprobs_BT=next_token_logprobs,
            proximal_BT=data["prev_logprobs"][:, 1:],
            behaviour_BT=data["generation_logprobs"][:, 1:],
            advantages_BT=data["advantages"][:, 1:],
            mask_BT=mask_BT,
        )
        loss = aggregate(
            self.objective.aggregation,
            loss_BT=terms.loss_BT,
            mask_BT=mask_BT,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
        )
        return loss, {
            "clipped_ratio": float(terms.clipped_BT.sum()),
            "gated_ratio": float(terms.gated_BT.sum()),
        }


def gather_logprobs(logits_BSV: torch.Tensor, *, input_ids_BS: torch.Tensor) -> torch.Tensor:
    """log-probs [B, T] of the tokens that follow, float32."""
    logits_BTV = logits_BSV[:, :-1].float()
    chosen_BT = logits_BTV.gather(-1, input_ids_BS[:, 1:].unsqueeze(-1)).squeeze(-1)
    return chosen_BT - logits_BTV.logsumexp(dim=-1)


def build_loss(section: AlgorithmSection) -> LossFunction:
    """The loss that the config names: a preset with its overrides, or an import path.

    What an import path names is a LossFunction, or a class or factory that makes one without arguments.
    """
    if section.loss in PRESETS or not is_import_path(section.loss):
        return ObjectiveLoss(resolve_objective(section.loss, section.overrides))
    if section.overrides:
        raise ConfigError(
            f"algorithm.overrides: {sorted(section.overrides)} replace axes of a preset, but algorithm.loss is the "
            f"import path {section.loss!r}: remove them",
            key="algorithm.overrides",
        )
    found = resolve(section.loss, key="algorithm.loss")
    loss: Any = found if _is_loss(found) else found()
    if not _is_loss(loss):
        raise ConfigError(
            f"algorithm.loss: {section.loss!r} gives a {type(loss).__name__} without the attributes loss_type and "
            f"input_type of a LossFunction (asyncrl.algorithms.interfaces)",
            key="algorithm.loss",
        )
    return cast(LossFunction, loss)


def _is_loss(value: Any) -> bool:
    return (
        callable(value) and not isinstance(value, type) and hasattr(value, "loss_type") and hasattr(value, "input_type")
    )
