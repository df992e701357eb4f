"""Computes any `Objective` on tensors.

Legend: B rows, S tokens, V vocabulary, T = S − 1. The first token of a row has no prefix and is never trained.

Invariants:

- Only the current log-probs carry gradient.
- Values at masked positions are replaced before any exp, so NaN there has no effect.
- Weights and gates never change a denominator.
- Exponents are bounded in log space.
- Sequences are identified by segment ids, so a packed row and padded rows give the same loss and gradient.
- All arithmetic is in float32 or wider, for every dtype of the inputs.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch

from asyncrl.algorithms.interfaces import (
    LossFunction,
    LossInputType,
    LossType,
    MetricNormalization,
    input_type_of,
    masked_mean,
)
from asyncrl.algorithms.objective import (
    Aggregation,
    Clamp,
    Clipped,
    Gamma,
    Gate,
    Inverse,
    Linear,
    Objective,
    Penalty,
    Quadratic,
    Regression,
    Reinforce,
    SoftGate,
    Surrogate,
    Weight,
    pooled_sources,
    uses_ratio,
)
from asyncrl.algorithms.presets import is_own_loss, resolve_objective
from asyncrl.config.import_path import resolve
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError, ImpreciseColumns, RunError
from asyncrl.user_code import describe_error

MAX_LOG_RATIO = 40.0
"""Limit of a log-ratio, in nats. A ratio or an unbounded weight above e^40 ≈ 2e17 comes from a broken log-prob (F22).
It is replaced by e^40, so that a product of two of them still fits float32. A ratio at this limit carries no
gradient."""

Sources = Mapping[str, torch.Tensor]
"""Log-probs [B, T] by the name of their policy: current, proximal, behaviour, reference."""

SOURCE_COLUMNS: Mapping[str, str] = {
    "proximal": "prev_logprobs",
    "behaviour": "generation_logprobs",
    "reference": "reference_policy_logprobs",
}
"""The column [B, S] that contains each policy's log-probs."""


class Segments:
    """Says which tokens belong to one sequence.

    `mask_BT` marks the trained tokens. `ids_BT` is the number of a token's sequence within its row. Without ids, each
    row is one sequence.
    """

    def __init__(self, mask_BT: torch.Tensor, ids_BT: torch.Tensor | None = None) -> None:
        rows, tokens = mask_BT.shape
        # padding may have any id, because the values of masked tokens are zero wherever they are added
        ids_BT = torch.zeros_like(mask_BT, dtype=torch.long) if ids_BT is None else ids_BT.long().clamp(min=0)
        row_B1 = torch.arange(rows, device=mask_BT.device).unsqueeze(1)
        width = int(ids_BT.max()) + 1 if ids_BT.numel() else 1
        self.mask_BT = mask_BT
        self._shape = (rows, tokens)
        self._index = (row_B1 * width + ids_BT).flatten()
        self._count = rows * width
        self.sizes_BT = self.pool(mask_BT.float(), "sum")

    def pool(self, values_BT: torch.Tensor, how: str) -> torch.Tensor:
        """Pools `values_BT` over the trained tokens of each sequence, and gives every token its sequence's result.

        `values_BT` must be zero at masked tokens. `how` is token (no pooling), sum, mean, min or max. Differentiable.
        """
        if how == "token":
            return values_BT
        flat = values_BT.flatten()
        if how in ("sum", "mean"):
            pooled = flat.new_zeros(self._count).index_add(0, self._index, flat)[self._index].view(self._shape)
            return pooled / self.sizes_BT.clamp(min=1) if how == "mean" else pooled
        limit = math.inf if how == "min" else -math.inf
        filled = torch.where(self.mask_BT.flatten(), flat, limit)
        pooled = flat.new_full((self._count,), limit).scatter_reduce(0, self._index, filled, f"a{how}")
        return torch.where(self.mask_BT, pooled[self._index].view(self._shape), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """The terms of the objective for every token; zero or False at masked tokens. `loss_BT` and `push_BT` carry
    gradient.

    `loss_BT` is the value that the aggregation sums: all terms except `positive_nll`. `push_BT` is W · K · S: the part
    that the advantage multiplies, without penalties and aggregation.
    """

    loss_BT: torch.Tensor
    push_BT: torch.Tensor
    clipped_BT: torch.Tensor
    gated_BT: torch.Tensor


def token_terms(
    objective: Objective,
    *,
    logprobs_BT: torch.Tensor,
    sources: Sources,
    advantages_BT: torch.Tensor,
    segments: Segments,
    entropy_BT: torch.Tensor | None = None,
) -> TokenTerms:
    """Returns W · K · S + Σ β · P of every token, zero at masked tokens.

    All inputs except `logprobs_BT` and `entropy_BT` are detached here. `sources` must contain at least
    `objective.sources()`. Values in half precision are first converted to float32.
    """
    mask_BT = segments.mask_BT

    def inside(values_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BT, _wide(values_BT), 0.0)

    lp_BT, adv_BT = inside(logprobs_BT), inside(advantages_BT.detach())
    fixed = {name: inside(values_BT.detach()) for name, values_BT in sources.items()} | {"current": lp_BT.detach()}
    # a surrogate without a ratio does not read the anchor, so `sources` may lack it
    anchor_BT = fixed[objective.anchor if uses_ratio(objective.surrogate) else "current"]
    log_u_BT = _log_u(objective, lp_BT=lp_BT, anchor_BT=anchor_BT, adv_BT=adv_BT, segments=segments)
    push_BT, clipped_BT = _surrogate(objective.surrogate, lp_BT=lp_BT, log_u_BT=log_u_BT, adv_BT=adv_BT)
    gated_BT = torch.zeros_like(mask_BT)
    if objective.weight is not None:
        weight_BT, gated_BT = _weight(objective.weight, fixed=fixed, segments=segments)
        push_BT = weight_BT * push_BT
    for gate in objective.gates:
        gated_BT = gated_BT | _gated(gate, fixed=fixed, adv_BT=adv_BT, segments=segments)
    # torch.where instead of a product with 0: the surrogate of a gated token may be inf, and inf · 0 is NaN
    push_BT = loss_BT = inside(torch.where(gated_BT, 0.0, push_BT))
    for penalty in objective.penalties:
        if penalty.kind == "positive_nll":
            continue  # this penalty has its own coefficients: `ObjectiveLoss` adds it
        loss_BT = loss_BT + penalty.beta * inside(_penalty(penalty, lp_BT=lp_BT, fixed=fixed, entropy_BT=entropy_BT))
    return TokenTerms(loss_BT=loss_BT, push_BT=push_BT, clipped_BT=clipped_BT & mask_BT, gated_BT=gated_BT & mask_BT)


def _log_u(
    objective: Objective,
    *,
    lp_BT: torch.Tensor,
    anchor_BT: torch.Tensor,
    adv_BT: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Returns log u of every token: the token's own log-ratio, or the mean or sum over its sequence, with the gradient
    of lp. At level `sequence_mean_token`, the value is the mean, and the gradient is that of the token's own lp."""
    log_u_BT = lp_BT - anchor_BT
    if objective.pre_clip is not None:
        above_BT = log_u_BT.clamp(max=math.log(objective.pre_clip.hi))
        below_BT = log_u_BT.clamp(min=math.log(objective.pre_clip.lo))
        log_u_BT = torch.where(adv_BT > 0, above_BT, torch.where(adv_BT < 0, below_BT, log_u_BT))
    if objective.level == "sequence_mean_token":
        return segments.pool(log_u_BT, "mean").detach() + (lp_BT - lp_BT.detach())
    how = {"token": "token", "sequence_mean": "mean", "sequence_sum": "sum"}[objective.level]
    return segments.pool(log_u_BT, how)


def _surrogate(
    surrogate: Surrogate, *, lp_BT: torch.Tensor, log_u_BT: torch.Tensor, adv_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns S, and where a clip removes the gradient of a token with A ≠ 0."""
    nowhere = torch.zeros_like(lp_BT, dtype=torch.bool)
    if isinstance(surrogate, Reinforce):
        return -adv_BT * lp_BT, nowhere
    if isinstance(surrogate, Regression):
        return (surrogate.beta * log_u_BT - adv_BT).square(), nowhere
    if isinstance(surrogate, Quadratic):
        # half of the limit, because the square of u times an unbounded weight must fit float32
        u_BT = log_u_BT.clamp(max=MAX_LOG_RATIO / 2).exp()
        return -adv_BT * u_BT + adv_BT.abs() * (u_BT - 1).square() / (2 * surrogate.width), nowhere
    u_BT = log_u_BT.clamp(max=MAX_LOG_RATIO).exp()
    if isinstance(surrogate, Linear):
        return -adv_BT * u_BT, nowhere
    if isinstance(surrogate, SoftGate):
        tau_BT = torch.where(adv_BT > 0, surrogate.positive, surrogate.negative)
        return -adv_BT * (4 / tau_BT) * torch.sigmoid(tau_BT * (u_BT - 1)), nowhere
    if isinstance(surrogate, Clipped):
        return _clipped(surrogate, u_BT=u_BT, adv_BT=adv_BT)
    log_u_BT = log_u_BT.detach()
    k_BT = torch.where(adv_BT > 0, _kernel(surrogate.positive, log_u_BT), _kernel(surrogate.negative, log_u_BT))
    return -adv_BT * k_BT * lp_BT, nowhere


def _clipped(surrogate: Clipped, *, u_BT: torch.Tensor, adv_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss_BT = torch.maximum(-adv_BT * u_BT, -adv_BT * u_BT.clamp(surrogate.lo, surrogate.hi))
    clipped_BT = ((adv_BT > 0) & (u_BT > surrogate.hi)) | ((adv_BT < 0) & (u_BT < surrogate.lo))
    if surrogate.dual is not None:
        dual_BT = (adv_BT < 0) & (u_BT > surrogate.dual)
        loss_BT = torch.where(dual_BT, -adv_BT * surrogate.dual, loss_BT)
        clipped_BT = clipped_BT | dual_BT
    return loss_BT, clipped_BT


def _kernel(kernel: Clamp | Inverse | Gamma, log_u_BT: torch.Tensor) -> torch.Tensor:
    if isinstance(kernel, Clamp):
        return _ratio(log_u_BT, lo=kernel.lo, hi=kernel.hi)
    if isinstance(kernel, Inverse):
        return _ratio(-log_u_BT, lo=0.0, hi=kernel.hi)
    u_BT = _ratio(log_u_BT, lo=0.0, hi=math.inf)
    return (kernel.shape * log_u_BT + kernel.rate * (1 - u_BT)).exp()


def _weight(
    weight: Weight, *, fixed: Mapping[str, torch.Tensor], segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bounded weight p/q, and where the weight zeroes the token's loss."""
    log_w_BT = segments.pool(fixed[weight.p] - fixed[weight.q], weight.pool)
    bounded_BT = _ratio(log_w_BT, lo=weight.lo, hi=weight.hi)
    if weight.outside == "clamp":
        return bounded_BT, torch.zeros_like(segments.mask_BT)
    return bounded_BT, (log_w_BT < _log(weight.lo)) | (log_w_BT > _log(weight.hi))


def _ratio(log_ratio: torch.Tensor, *, lo: float, hi: float) -> torch.Tensor:
    """Returns e^log_ratio, clamped to [lo, hi] and to at most e^MAX_LOG_RATIO."""
    return log_ratio.clamp(_log(lo), min(_log(hi), MAX_LOG_RATIO)).exp()


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Converts half precision to float32, because a difference of bfloat16 values would be rounded to bfloat16."""
    return values.float() if _is_half(values.dtype) else values


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _gated(gate: Gate, *, fixed: Mapping[str, torch.Tensor], adv_BT: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Returns True where the gate zeroes the token's loss."""
    log_p_BT, log_q_BT = fixed[gate.p], fixed[gate.q]
    difference_BT = log_p_BT - log_q_BT
    if gate.stat in ("ratio", "log_ratio"):
        stat_BT = segments.pool(difference_BT, gate.pool)
        lo, hi = (_log(gate.lo), _log(gate.hi)) if gate.stat == "ratio" else (gate.lo, gate.hi)
    else:
        stat_BT = segments.pool(gate_stat(gate.stat, log_p=log_p_BT, log_q=log_q_BT), gate.pool)
        lo, hi = gate.lo, gate.hi
    out_BT = (stat_BT < lo) | (stat_BT > hi)
    if gate.when == "negative_advantage":
        return out_BT & (adv_BT < 0)
    if gate.when == "moving_away":
        return out_BT & (adv_BT * difference_BT > 0)
    return out_BT


def gate_stat(stat: str, *, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Returns one of the divergences of `Gate`, for every token."""
    difference = (log_p - log_q).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if stat == "k1":
        return -difference
    if stat == "k2":
        return difference.square() / 2
    if stat == "k3":
        return difference.exp() - 1 - difference
    if stat == "probability":
        return log_p.exp() - log_q.exp()
    # 1 − p is computed with expm1 and clamped above 0: the remaining probability may be smaller than a rounding error
    tiny = torch.finfo(log_p.dtype).tiny
    rest_p, rest_q = (-torch.expm1(log_p)).clamp(min=tiny), (-torch.expm1(log_q)).clamp(min=tiny)
    return -log_q.exp() * difference + rest_q * (rest_q.log() - rest_p.log())


def _penalty(
    penalty: Penalty, *, lp_BT: torch.Tensor, fixed: Mapping[str, torch.Tensor], entropy_BT: torch.Tensor | None
) -> torch.Tensor:
    if penalty.kind == "entropy":
        assert entropy_BT is not None, "an entropy penalty needs entropies"
        value_BT = -entropy_BT
    else:
        difference_BT = lp_BT - fixed[penalty.q]
        k2_BT = difference_BT.square() / 2
        k3_BT = (-difference_BT).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference_BT
        value_BT = {
            "k1": difference_BT,
            "k2": k2_BT,
            "k3": k3_BT,
            "k3+": k2_BT + (k3_BT - k2_BT).detach(),
        }[penalty.kind]
    if penalty.corrected_by == "none":
        return value_BT
    return value_BT * (lp_BT - fixed[penalty.corrected_by]).clamp(max=MAX_LOG_RATIO).exp()


def interpolated_proximal(
    *, logprobs_BT: torch.Tensor, behaviour_BT: torch.Tensor, staleness_BT: torch.Tensor
) -> torch.Tensor:
    """Returns proximal log-probs without a forward pass (A-3PO, 2512.06547).

    For a token that is d versions old, it is behaviour + (1 − 1/d) · (sg lp − behaviour), where sg is stop-gradient.
    For d = 0 it is sg lp, the current log-probs.
    """
    behaviour_BT, staleness_BT = _wide(behaviour_BT), _wide(staleness_BT)
    share_BT = torch.where(staleness_BT > 0, 1 - 1 / staleness_BT.clamp(min=1), 1.0)
    return behaviour_BT + share_BT * (_wide(logprobs_BT.detach()) - behaviour_BT)


def coefficients(
    objective: Objective,
    *,
    segments: Segments,
    token_mask_BT: torch.Tensor,
    sample_mask_B1: torch.Tensor,
    global_valid_seqs: torch.Tensor,
    global_valid_toks: torch.Tensor,
    prompt_share_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a_t [B, T], the coefficient by which each token's loss is multiplied before the sum; zero at masked
    tokens.

    Masks are weights: the global counts are their sums, and a row whose sample mask is ½ counts half. If a count is 0,
    the divisor is 1, because there is nothing to sum (F24). `prompt_share_BT` is [B, T] or [B, 1]; only the prompt mean
    reads it (`asyncrl.algorithms.shares`).
    """
    token_BT = torch.where(segments.mask_BT, token_mask_BT.float(), 0.0)
    share_BT = token_BT * sample_mask_B1.float()
    if objective.aggregation is Aggregation.PROMPT_MEAN:
        assert prompt_share_BT is not None, "the prompt mean needs a coefficient of every token"
        return share_BT * prompt_share_BT
    sequences, tokens = _divisor(global_valid_seqs), _divisor(global_valid_toks)
    if objective.aggregation is Aggregation.TOKEN_MEAN:
        return share_BT / tokens
    if objective.aggregation is Aggregation.SEQUENCE_MEAN:
        return share_BT / _divisor(segments.pool(token_BT, "sum")) / sequences
    if objective.aggregation is Aggregation.SEQUENCE_SUM:
        return share_BT / sequences
    if objective.aggregation is Aggregation.SEQUENCE_SUM_CONSTANT:
        assert objective.constant is not None, "build_loss sets it"
        return share_BT / (sequences * objective.constant)
    return share_BT


def _divisor(count: torch.Tensor) -> torch.Tensor:
    return torch.where(count > 0, count, 1)


class ObjectiveLoss:
    """An `Objective` as a `LossFunction`.

    It reads the columns `advantages` and `token_mask` [B, S], `sample_mask` [B], and the columns in `columns`. If it
    gets logits, it also reads `input_ids` [B, S]. The columns in `columns` are [B, S], except `group_ids` and
    `rewards`, which are [B]. If one of these two is needed, it also reads the column that `asyncrl.algorithms.shares`
    makes of it. The optional column `segment_ids` [B, S] gives the sequence of each token in a packed row. Raises
    RunError with the name of a missing column.

    Its metrics are shares of the trained tokens of the global batch. A micro-batch returns its part of each share, and
    the parts are added.

    With an entropy penalty, it needs logits, or log-probs and entropies.
    """

    metric_normalizations: Mapping[str, MetricNormalization] = {
        "clipped_ratio": MetricNormalization.TOKENS,
        "gated_ratio": MetricNormalization.TOKENS,
    }

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        by_sequence = objective.aggregation not in (Aggregation.TOKEN_MEAN, Aggregation.SUM)
        self.loss_type = LossType.SEQUENCE_LEVEL if by_sequence else LossType.TOKEN_LEVEL
        self.needs_entropy = any(penalty.kind == "entropy" for penalty in objective.penalties)
        self.columns = _columns(objective)
        pooled = pooled_sources(objective)
        self._pooled_columns = {SOURCE_COLUMNS[source] for source in pooled - {"current"}} | (
            {"next_token_logits", "next_token_logprobs"} if "current" in pooled else set()
        )
        self.input_type = LossInputType.LOGIT if self.needs_entropy else LossInputType.LOGPROB

    def __call__(
        self,
        next_token_logits: torch.Tensor | None = None,
        data: BatchedDataDict | None = None,
        global_valid_seqs: torch.Tensor | None = None,
        global_valid_toks: torch.Tensor | None = None,
        *,
        next_token_logprobs: torch.Tensor | None = None,
        next_token_entropies: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if data is None or global_valid_seqs is None or global_valid_toks is None:
            raise TypeError(
                "a loss was called without data, global_valid_seqs or global_valid_toks: pass all three, as "
                "asyncrl.algorithms.interfaces.LossFunction describes"
            )
        given = {"next_token_logits": next_token_logits, "next_token_logprobs": next_token_logprobs}
        self.check_precision({**data, **{name: value for name, value in given.items() if value is not None}})
        if next_token_logits is not None:
            next_token_logprobs = gather_logprobs(next_token_logits, input_ids_BS=data["input_ids"])
            next_token_entropies = entropy(next_token_logits) if self.needs_entropy else None
        if next_token_logprobs is None or (self.needs_entropy and next_token_entropies is None):
            raise TypeError(
                f"this loss was called without next_token_{self.input_type.value}s: pass them, as "
                "asyncrl.algorithms.interfaces.LossFunction describes"
            )
        # converted once here: if each use converted it, the gradients of the uses would be added in half precision
        next_token_logprobs = _wide(next_token_logprobs)
        terms = self.terms(data, logprobs_BT=next_token_logprobs, entropy_BT=next_token_entropies)
        segments = _segments(data)
        token_mask_BT, sample_mask_B1 = data["token_mask"][:, 1:], data["sample_mask"].unsqueeze(1)
        prompt_mean = self.objective.aggregation is Aggregation.PROMPT_MEAN
        a_BT = coefficients(
            self.objective,
            segments=segments,
            token_mask_BT=token_mask_BT,
            sample_mask_B1=sample_mask_B1,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            prompt_share_BT=_share(data, "prompt_share") if prompt_mean else None,
        )
        weight_BT = token_mask_BT.float() * sample_mask_B1.float()
        loss = (a_BT * terms.loss_BT).sum()
        for penalty in self.objective.penalties:
            if penalty.kind == "positive_nll":
                lp_BT = torch.where(segments.mask_BT, next_token_logprobs, 0.0)
                loss = loss - penalty.beta * (_share(data, "positive_share") * weight_BT * lp_BT).sum()
        return loss, {
            "clipped_ratio": float(masked_mean(terms.clipped_BT, weight_BT, global_valid_toks)),
            "gated_ratio": float(masked_mean(terms.gated_BT, weight_BT, global_valid_toks)),
        }

    def check_precision(self, columns: Mapping[str, Any]) -> None:
        """Raises ImpreciseColumns if a column in half precision is used in a ratio, weight or gate of whole sequences.

        The rounding errors of the tokens add up there. With log-probs rounded to bfloat16, the gradient of a product of
        4,096 ratios has an error of 0.4 of its norm. Converting the rounded values to float32 does not remove the
        error. A column that is only used in ratios of single tokens is converted and accepted.
        """
        for name in sorted(self._pooled_columns & set(columns)):
            if _is_half(columns[name].dtype):
                raise ImpreciseColumns(
                    f"{name} is {str(columns[name].dtype).removeprefix('torch.')}: this loss combines log-probs over "
                    "whole sequences, where the rounding errors of half precision add up; compute the column in "
                    "float32 (logits.float() before log_softmax), or choose a loss whose level and pools are `token`"
                )

    def terms(
        self, data: BatchedDataDict, *, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor | None = None
    ) -> TokenTerms:
        """Returns the terms of every token, before the aggregation."""
        return token_terms(
            self.objective,
            logprobs_BT=logprobs_BT,
            sources=self._sources(data, logprobs_BT=logprobs_BT),
            advantages_BT=data["advantages"][:, 1:],
            segments=_segments(data),
            entropy_BT=entropy_BT,
        )

    def _sources(self, data: BatchedDataDict, *, logprobs_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        missing = sorted(self.columns - set(data))
        if missing:
            raise missing_columns(missing)
        sources = {name: data[column][:, 1:] for name, column in SOURCE_COLUMNS.items() if column in self.columns}
        if "staleness" in self.columns:
            sources["proximal"] = interpolated_proximal(
                logprobs_BT=logprobs_BT, behaviour_BT=sources["behaviour"], staleness_BT=data["staleness"][:, 1:]
            )
        return sources


def _segments(data: BatchedDataDict) -> Segments:
    mask_BT = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)) > 0
    return Segments(mask_BT, data["segment_ids"][:, 1:] if "segment_ids" in data else None)


def _share(data: BatchedDataDict, name: str) -> torch.Tensor:
    """Returns a column of `asyncrl.algorithms.shares`, [B, 1] or [B, T]."""
    if name not in data:
        raise RunError(
            f"the loss reads {name}, a coefficient that depends on counts of the whole update, but the rows do not "
            "have it: call Policy.train, which adds it, or call asyncrl.algorithms.shares.with_shares on the global "
            "batch in your own loop"
        )
    column: torch.Tensor = data[name]
    return column.unsqueeze(1) if column.ndim == 1 else column[:, 1:]


def _columns(objective: Objective) -> frozenset[str]:
    """Returns the columns that an objective reads besides advantages and masks.

    These are the log-probs of other policies, the columns from which its proximal policy is interpolated, and the
    columns by which `asyncrl.algorithms.shares` counts.
    """
    counted = {"group_ids"} if objective.aggregation is Aggregation.PROMPT_MEAN else set()
    if any(penalty.kind == "positive_nll" for penalty in objective.penalties):
        counted.add("rewards")
    sources = objective.sources()
    if objective.proximal == "interpolated":
        counted.add("staleness")
        sources = sources - {"proximal"} | {"behaviour"}
    return frozenset({SOURCE_COLUMNS[name] for name in sources} | counted)


_HINTS = {
    "staleness": "; `staleness` is computed from `weight_versions` if a step is passed to train",
    "group_ids": "; `group_ids` has one int for each row [B], equal for the rows of one prompt",
    "rewards": "; `rewards` has one number for each row [B]",
}


def missing_columns(names: Sequence[str]) -> RunError:
    """Returns the error for rows that lack columns which the loss reads."""
    hints = [hint for name, hint in _HINTS.items() if name in names]
    return RunError(
        f"algorithm.loss reads {', '.join(names)}, but the rows do not have them; add these columns{''.join(hints)}"
    )


def gather_logprobs(logits_BSV: torch.Tensor, *, input_ids_BS: torch.Tensor) -> torch.Tensor:
    """Returns the log-probs [B, T] of the tokens 1 to S − 1, float32."""
    logits_BTV = logits_BSV[:, :-1].float()
    chosen_BT = logits_BTV.gather(-1, input_ids_BS[:, 1:].unsqueeze(-1)).squeeze(-1)
    return chosen_BT - logits_BTV.logsumexp(dim=-1)


def entropy(logits_BSV: torch.Tensor) -> torch.Tensor:
    """Returns the entropy of each next token's distribution, in nats, [B, T]. Differentiable."""
    logits_BTV = logits_BSV[:, :-1].float()
    # row by row, because the probabilities of a whole micro-batch would need as much memory again as its logits
    rows = [logits_TV.logsumexp(-1) - (logits_TV.softmax(-1) * logits_TV).sum(-1) for logits_TV in logits_BTV]
    return torch.stack(rows) if rows else logits_BTV.new_zeros(logits_BTV.shape[:2])


def build_loss(config: Config) -> LossFunction:
    """Returns the loss that the config names: a preset with its overrides, axes that the user wrote, or an import path.

    An import path must name either a LossFunction, which is callable with arguments, or a class or factory that returns
    a LossFunction and is callable without arguments.
    """
    section = config.algorithm
    if not is_own_loss(section):
        objective = resolve_objective(section.loss, section.overrides)
        if objective.aggregation is Aggregation.SEQUENCE_SUM_CONSTANT and objective.constant is None:
            objective = msgspec.structs.replace(objective, constant=float(config.generator.max_completion_tokens))
        return ObjectiveLoss(objective)
    if section.overrides:
        raise ConfigError(
            f"algorithm.overrides: {sorted(section.overrides)} replace axes of a preset, but algorithm.loss is the "
            f"import path {section.loss!r}, which has no axes: remove algorithm.overrides",
            key="algorithm.overrides",
        )
    found = resolve(str(section.loss), key="algorithm.loss")
    try:
        loss: Any = found if _is_loss(found) else found()
    except Exception as error:  # a factory that the user wrote may raise anything
        raise ConfigError(
            f"algorithm.loss: {section.loss!r} was called without arguments to make a loss, and it raised "
            f"{describe_error(error)}; fix it, or name a LossFunction",
            key="algorithm.loss",
        ) from error
    if not _is_loss(loss):
        raise ConfigError(
            f"algorithm.loss: {section.loss!r} gives a {type(loss).__name__}, which is not a LossFunction; it must be "
            f"callable with logits or log-probs, data and the global counts (see asyncrl.algorithms.interfaces)",
            key="algorithm.loss",
        )
    if problem := _call_problem(loss):
        raise ConfigError(
            f"algorithm.loss: {section.loss!r} cannot be called as a loss: {problem}", key="algorithm.loss"
        )
    return cast(LossFunction, loss)


def _call_problem(loss: Any) -> str | None:
    """Returns why the loss's signature fits none of the calls that the policy may make, or None if it fits one."""
    try:
        kind = input_type_of(loss)
        signature = inspect.signature(loss)
    except ValueError as error:  # an unknown input_type, or a callable that is written in C and has no signature
        return str(error) if hasattr(loss, "input_type") else None
    counts: dict[str, None] = dict.fromkeys(("global_valid_seqs", "global_valid_toks"))
    logits = (["next_token_logits"], ["logits"], ["next_token_logits", "logits"])
    calls: list[tuple[list[None], dict[str, None]]] = [([], {"data": None, **dict.fromkeys(names)}) for names in logits]
    calls.append(([None, None], {}))
    if kind == LossInputType.LOGPROB:
        calls = [([], {"data": None, "next_token_logprobs": None})]
    problem = ""
    for values, keywords in calls:
        try:
            signature.bind(*values, **keywords, **counts)
        except TypeError as error:
            problem = str(error)
        else:
            return None
    takes = "data, global_valid_seqs, global_valid_toks, next_token_logprobs"
    if kind == LossInputType.LOGIT:
        takes = "next_token_logits, data, global_valid_seqs, global_valid_toks"
    return f"{problem}; it must take ({takes}), but its parameters are {signature}"


def _is_loss(value: Any) -> bool:
    if isinstance(value, type) or not callable(value):
        return False
    if hasattr(value, "input_type"):
        return True
    arguments = inspect.signature(value).parameters.values()
    return any(a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments)
