"""The one objective on tensors.

Legend: B rows, S tokens, V vocabulary, T = S − 1 (the first token of a row has no prefix and is never trained).

What must hold: only the current log-probs carry gradient; masked slots are replaced before any exp, so that NaN in
them changes nothing; weights and gates never change a denominator; exponents are bounded in log space; sequences are
told apart by segment ids, so that a packed row and padded ones give the same loss and gradient; all arithmetic is in
float32 or wider, whatever the dtype of the inputs.
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
"""A ratio and an unbounded weight beyond e^40 ≈ 2e17 are a broken log-prob (F22): they read as e^40, whose product
still fits float32, and the ratio carries no gradient."""

Sources = Mapping[str, torch.Tensor]
"""Log-probs [B, T] by whose they are: current, proximal, behaviour, reference."""

SOURCE_COLUMNS: Mapping[str, str] = {
    "proximal": "prev_logprobs",
    "behaviour": "generation_logprobs",
    "reference": "reference_policy_logprobs",
}
"""The columns [B, S] that other policies' log-probs are in."""


class Segments:
    """Which tokens belong to one sequence: `mask_BT` are the trained ones, `ids_BT` their sequences, counted anew in
    every row; without ids a row is one sequence."""

    def __init__(self, mask_BT: torch.Tensor, ids_BT: torch.Tensor | None = None) -> None:
        rows, tokens = mask_BT.shape
        # padding may have any id: what is masked is zero wherever it is added
        ids_BT = torch.zeros_like(mask_BT, dtype=torch.long) if ids_BT is None else ids_BT.long().clamp(min=0)
        row_B1 = torch.arange(rows, device=mask_BT.device).unsqueeze(1)
        width = int(ids_BT.max()) + 1 if ids_BT.numel() else 1
        self.mask_BT = mask_BT
        self._shape = (rows, tokens)
        self._index = (row_B1 * width + ids_BT).flatten()
        self._count = rows * width
        self.sizes_BT = self.pool(mask_BT.float(), "sum")

    def pool(self, values_BT: torch.Tensor, how: str) -> torch.Tensor:
        """`values_BT`, zero at masked tokens, shared by each sequence's trained tokens; differentiable."""
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
    """What the objective says of every token, zero and false at masked ones. `loss_BT` and `push_BT` carry gradient.

    `loss_BT` is what the aggregation sums: every term but `positive_nll`. `push_BT` is W · K · S alone: what the
    advantage asks for, without penalties and aggregation.
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
    """W · K · S + Σ β · P of every token, zero where it is masked. Everything but `logprobs_BT` and `entropy_BT` is
    detached here. `sources` has at least `objective.sources()`. Half precision is widened to float32 first."""
    mask_BT = segments.mask_BT

    def inside(values_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BT, _wide(values_BT), 0.0)

    lp_BT, adv_BT = inside(logprobs_BT), inside(advantages_BT.detach())
    fixed = {name: inside(values_BT.detach()) for name, values_BT in sources.items()} | {"current": lp_BT.detach()}
    # whoever looks at no ratio need not bring an anchor
    anchor_BT = fixed[objective.anchor if uses_ratio(objective.surrogate) else "current"]
    log_u_BT = _log_u(objective, lp_BT=lp_BT, anchor_BT=anchor_BT, adv_BT=adv_BT, segments=segments)
    push_BT, clipped_BT = _surrogate(objective.surrogate, lp_BT=lp_BT, log_u_BT=log_u_BT, adv_BT=adv_BT)
    gated_BT = torch.zeros_like(mask_BT)
    if objective.weight is not None:
        weight_BT, gated_BT = _weight(objective.weight, fixed=fixed, segments=segments)
        push_BT = weight_BT * push_BT
    for gate in objective.gates:
        gated_BT = gated_BT | _gated(gate, fixed=fixed, adv_BT=adv_BT, segments=segments)
    # where, not only a product with 0: the surrogate of a gated token may be inf
    push_BT = loss_BT = inside(torch.where(gated_BT, 0.0, push_BT))
    for penalty in objective.penalties:
        if penalty.kind == "positive_nll":
            continue  # has coefficients of its own: `ObjectiveLoss` adds it
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
    """log u of every token: its own, or its sequence's mean or sum, with lp's gradient. At `sequence_mean_token` the
    value is the mean's and the gradient that of the token's own lp."""
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
    """S and where a clip takes its gradient although A ≠ 0."""
    nowhere = torch.zeros_like(lp_BT, dtype=torch.bool)
    if isinstance(surrogate, Reinforce):
        return -adv_BT * lp_BT, nowhere
    if isinstance(surrogate, Regression):
        return (surrogate.beta * log_u_BT - adv_BT).square(), nowhere
    if isinstance(surrogate, Quadratic):
        # half of the limit: the square, times an unbounded weight, must fit float32
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
    """Bounded p/q and where it is zeroed."""
    log_w_BT = segments.pool(fixed[weight.p] - fixed[weight.q], weight.pool)
    bounded_BT = _ratio(log_w_BT, lo=weight.lo, hi=weight.hi)
    if weight.outside == "clamp":
        return bounded_BT, torch.zeros_like(segments.mask_BT)
    return bounded_BT, (log_w_BT < _log(weight.lo)) | (log_w_BT > _log(weight.hi))


def _ratio(log_ratio: torch.Tensor, *, lo: float, hi: float) -> torch.Tensor:
    """e^log_ratio in [lo, hi], and never beyond e^MAX_LOG_RATIO."""
    return log_ratio.clamp(_log(lo), min(_log(hi), MAX_LOG_RATIO)).exp()


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _wide(values: torch.Tensor) -> torch.Tensor:
    """`values`, in float32 if their dtype is narrower: bfloat16 differences would be rounded to bfloat16."""
    return values.float() if _is_half(values.dtype) else values


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _gated(gate: Gate, *, fixed: Mapping[str, torch.Tensor], adv_BT: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Where the gate takes a token out."""
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
    """A divergence of `Gate`, of every token."""
    difference = (log_p - log_q).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if stat == "k1":
        return -difference
    if stat == "k2":
        return difference.square() / 2
    if stat == "k3":
        return difference.exp() - 1 - difference
    if stat == "probability":
        return log_p.exp() - log_q.exp()
    # 1 − p through expm1, and never 0: the rest of the distribution may be smaller than a rounding
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
    """Proximal log-probs without a forward pass: behaviour + (1 − 1/d) · (sg lp − behaviour) for tokens that are d
    versions old, the current ones for d = 0 (A-3PO, 2512.06547)."""
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
    """a_t, [B, T]: what every token's loss is multiplied by before all are added; zero at masked tokens.

    Masks are weights: the global counts are their sums, and a row whose sample mask is ½ counts half. A count of zero
    divides by 1, because there is nothing to sum then (F24). `prompt_share_BT` [B, T] or [B, 1] is read by the prompt
    mean only (`asyncrl.algorithms.shares`).
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

    Reads the columns `advantages`, `token_mask` [B, S], `sample_mask` [B], those of `columns`, and `input_ids` [B, S]
    when it is given logits. `columns` are [B, S], but `group_ids` and `rewards` [B]; with them it also reads what
    `asyncrl.algorithms.shares` makes of them. If `segment_ids` [B, S] are there, they say which sequence of a packed
    row a token belongs to. RunError names a column that is missing.

    Its metrics are shares of the global batch's trained tokens. A micro-batch returns its part, and the parts add up.

    With an entropy penalty it takes logits, or log-probs and entropies.
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
            raise TypeError("a loss needs data, global_valid_seqs and global_valid_toks")
        given = {"next_token_logits": next_token_logits, "next_token_logprobs": next_token_logprobs}
        self.check_precision({**data, **{name: value for name, value in given.items() if value is not None}})
        if next_token_logits is not None:
            next_token_logprobs = gather_logprobs(next_token_logits, input_ids_BS=data["input_ids"])
            next_token_entropies = entropy(next_token_logits) if self.needs_entropy else None
        if next_token_logprobs is None or (self.needs_entropy and next_token_entropies is None):
            raise TypeError(f"this loss needs next_token_{self.input_type.value}s")
        # once: the gradients of several casts would be added up in half precision
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
        """ImpreciseColumns when a column in half precision reaches a ratio, weight or gate of whole sequences.

        The tokens' rounding errors add up there: with log-probs rounded to bfloat16, the gradient of a product of 4,096
        ratios is off by 0.4 of its norm, and widening does not restore them. What only reaches ratios of single tokens
        is widened and accepted.
        """
        for name in sorted(self._pooled_columns & set(columns)):
            if _is_half(columns[name].dtype):
                raise ImpreciseColumns(
                    f"{name} is {str(columns[name].dtype).removeprefix('torch.')}: the loss combines log-probs over "
                    "whole sequences, where the rounding errors of half precision add up; compute it in float32 "
                    "(logits.float() before log_softmax), or choose a loss whose level and pools are `token`"
                )

    def terms(
        self, data: BatchedDataDict, *, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor | None = None
    ) -> TokenTerms:
        """What the loss says of every token, before the aggregation."""
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
    """A column of `asyncrl.algorithms.shares`, [B, 1] or [B, T]."""
    if name not in data:
        raise RunError(
            f"the loss reads {name}, a coefficient that needs counts of the whole update, and the rows do not have it: "
            "Policy.train adds it; in a loop of your own call asyncrl.algorithms.shares.with_shares on the global batch"
        )
    column: torch.Tensor = data[name]
    return column.unsqueeze(1) if column.ndim == 1 else column[:, 1:]


def _columns(objective: Objective) -> frozenset[str]:
    """The columns that an objective reads beside advantages and masks: other policies' log-probs, what its proximal
    policy is made of, and what `asyncrl.algorithms.shares` counts by."""
    counted = {"group_ids"} if objective.aggregation is Aggregation.PROMPT_MEAN else set()
    if any(penalty.kind == "positive_nll" for penalty in objective.penalties):
        counted.add("rewards")
    sources = objective.sources()
    if objective.proximal == "interpolated":
        counted.add("staleness")
        sources = sources - {"proximal"} | {"behaviour"}
    return frozenset({SOURCE_COLUMNS[name] for name in sources} | counted)


_HINTS = {
    "staleness": "; `staleness` is made of `weight_versions` where a step is given",
    "group_ids": "; `group_ids` is an int a row [B], equal for the rows of one prompt",
    "rewards": "; `rewards` is a number a row [B]",
}


def missing_columns(names: Sequence[str]) -> RunError:
    """What to raise where rows lack columns that the loss reads."""
    hints = [hint for name, hint in _HINTS.items() if name in names]
    return RunError(f"algorithm.loss reads {', '.join(names)}, which the rows do not have{''.join(hints)}")


def gather_logprobs(logits_BSV: torch.Tensor, *, input_ids_BS: torch.Tensor) -> torch.Tensor:
    """log-probs [B, T] of the tokens that follow, float32."""
    logits_BTV = logits_BSV[:, :-1].float()
    chosen_BT = logits_BTV.gather(-1, input_ids_BS[:, 1:].unsqueeze(-1)).squeeze(-1)
    return chosen_BT - logits_BTV.logsumexp(dim=-1)


def entropy(logits_BSV: torch.Tensor) -> torch.Tensor:
    """Entropy of the next token's distribution, nats, [B, T]; differentiable."""
    logits_BTV = logits_BSV[:, :-1].float()
    # row by row: the probabilities of a whole micro-batch would double its logits' memory
    rows = [logits_TV.logsumexp(-1) - (logits_TV.softmax(-1) * logits_TV).sum(-1) for logits_TV in logits_BTV]
    return torch.stack(rows) if rows else logits_BTV.new_zeros(logits_BTV.shape[:2])


def build_loss(config: Config) -> LossFunction:
    """The loss that the config names: a preset with its overrides, axes spelled out, or an import path.

    What an import path names is a LossFunction, which takes arguments, or a class or factory that makes one without.
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
            f"import path {section.loss!r}: remove them",
            key="algorithm.overrides",
        )
    found = resolve(str(section.loss), key="algorithm.loss")
    try:
        loss: Any = found if _is_loss(found) else found()
    except Exception as error:  # a factory of the user's may raise anything
        raise ConfigError(
            f"algorithm.loss: {section.loss!r} was called to make a loss, and raised {describe_error(error)}",
            key="algorithm.loss",
        ) from error
    if not _is_loss(loss):
        raise ConfigError(
            f"algorithm.loss: {section.loss!r} gives a {type(loss).__name__}, which is no LossFunction "
            f"(asyncrl.algorithms.interfaces): a call with logits or log-probs, data and the global counts",
            key="algorithm.loss",
        )
    if problem := _call_problem(loss):
        raise ConfigError(
            f"algorithm.loss: {section.loss!r} cannot be called as a loss: {problem}", key="algorithm.loss"
        )
    return cast(LossFunction, loss)


def _call_problem(loss: Any) -> str | None:
    """Why neither call of `interfaces.LossFunction` that the policy would make fits the loss's signature."""
    try:
        kind = input_type_of(loss)
        signature = inspect.signature(loss)
    except ValueError as error:  # an unknown input_type; a callable written in C may have no signature
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
    return f"{problem}; it must take ({takes}), and its parameters are {signature}"


def _is_loss(value: Any) -> bool:
    if isinstance(value, type) or not callable(value):
        return False
    if hasattr(value, "input_type"):
        return True
    arguments = inspect.signature(value).parameters.values()
    return any(a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments)
