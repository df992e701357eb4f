"""Computes the terms of an `Objective` for every token: the ratio, the surrogate, the weight, the gates and the
penalties.

Legend: B rows, T next tokens.

Invariants:

- Only the current log-probs, the entropy and the centering carry gradient.
- Values at masked positions are replaced before any exp, so NaN there has no effect.
- Exponents are bounded in log space.
- Sequences are identified by segment ids, so a packed row and padded rows give the same terms and gradient.
- All arithmetic is in float32 or wider, for every dtype of the inputs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncrl.algorithms.objective import (
    ByCovariance,
    ChosenByCovariance,
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
    uses_ratio,
)

MAX_FLOAT32_LOG_RATIO = 40.0
"""Limit of a log-ratio in the loss, in nats. A ratio or an unbounded weight above e^40 ≈ 2e17 comes from a broken
log-prob (F22 in docs/faults.md). It is replaced by e^40, so that a product of two of them still fits float32. A ratio
at this limit carries no gradient."""
ROUNDING_NATS = 1e-5
"""A difference of two log-probs up to this size may be rounding of float32: a log-prob that two passes compute for the
same weights differs by about 1e-6. The sign of such a difference says nothing about the policies."""

Sources = Mapping[str, torch.Tensor]
"""Log-probs [B, T] by the name of their policy: current, proximal, behaviour, reference."""


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
    """The loss of every token before the aggregation; zero or False at masked tokens. `loss_BT` and `push_BT` carry
    gradient.

    `loss_BT` is the value that the aggregation sums: surrogate, centering and penalties, except `positive_nll`.
    `push_BT` is the part of it that the advantage multiplies: importance weight · gates · surrogate, and centering.
    `clipped_BT` marks tokens whose gradient a clip removes, and `gated_BT` those whose surrogate a gate, `dropped` or
    the weight's bounds zero.
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
    centering_BT: torch.Tensor | None = None,
) -> TokenTerms:
    """Returns W · K · S + A · C + Σ β · P of every token, zero at masked tokens: importance weight W, gates K,
    surrogate S, advantage A, centering C, and penalties P.

    All inputs except `logprobs_BT`, `entropy_BT` and `centering_BT` are detached here. `sources` must contain at least
    `objective.sources()`. Values in half precision are first converted to float32.
    """
    mask_BT = segments.mask_BT

    def inside(values_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BT, wide(values_BT), 0.0)

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
    if objective.dropped is not None:
        gated_BT = gated_BT | _is_chosen(objective.dropped, fixed=fixed, adv_BT=adv_BT)
    # torch.where instead of a product with 0: the surrogate of a gated token may be inf, and inf · 0 is NaN
    push_BT = inside(torch.where(gated_BT, 0.0, push_BT))
    if objective.centering is not None:
        assert centering_BT is not None, "an objective with centering needs the centering of each token"
        push_BT = push_BT + adv_BT * inside(centering_BT)
    loss_BT = push_BT
    for penalty in objective.penalties:
        if penalty.kind == "positive_nll":
            continue  # this penalty has its own coefficients: `ObjectiveLoss` adds it
        value_BT = _penalty(penalty, lp_BT=lp_BT, fixed=fixed, entropy_BT=entropy_BT)
        if penalty.tokens is not None:
            value_BT = torch.where(_is_chosen(penalty.tokens, fixed=fixed, adv_BT=adv_BT), value_BT, 0.0)
        loss_BT = loss_BT + penalty.beta * inside(value_BT)
    return TokenTerms(loss_BT=loss_BT, push_BT=push_BT, clipped_BT=clipped_BT & mask_BT, gated_BT=gated_BT & mask_BT)


def _log_u(
    objective: Objective,
    *,
    lp_BT: torch.Tensor,
    anchor_BT: torch.Tensor,
    adv_BT: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Returns the logarithm of the ratio u of every token: the token's own log-ratio (after `pre_clip`), or the mean or
    sum over its sequence, with the gradient of the log-probs. At level `sequence_mean_token`, the value is the mean,
    and the gradient is that of the token's own log-prob."""
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
    """Returns the surrogate S of every token, and True where a clip removes the gradient of a token whose advantage is
    not 0."""
    nowhere = torch.zeros_like(lp_BT, dtype=torch.bool)
    if isinstance(surrogate, Reinforce):
        return -adv_BT * lp_BT, nowhere
    if isinstance(surrogate, Regression):
        return (surrogate.beta * log_u_BT - adv_BT).square(), nowhere
    if isinstance(surrogate, Quadratic):
        # Half of the limit of other ratios: the loss has u squared, and multiplies it by a weight of up to
        # e^MAX_FLOAT32_LOG_RATIO.
        u_BT = log_u_BT.clamp(max=MAX_FLOAT32_LOG_RATIO / 2).exp()
        return -adv_BT * u_BT + adv_BT.abs() * (u_BT - 1).square() / (2 * surrogate.width), nowhere
    u_BT = log_u_BT.clamp(max=MAX_FLOAT32_LOG_RATIO).exp()
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
    """Returns the bounded weight p/q, and True where the weight zeroes the token's surrogate."""
    log_w_BT = segments.pool(fixed[weight.p] - fixed[weight.q], weight.pool)
    bounded_BT = _ratio(log_w_BT, lo=weight.lo, hi=weight.hi)
    if weight.outside == "clamp":
        return bounded_BT, torch.zeros_like(segments.mask_BT)
    return bounded_BT, (log_w_BT < _log(weight.lo)) | (log_w_BT > _log(weight.hi))


LEAST_REST = 1e-6
"""Lower limit, in centering, of the total probability of the tokens outside the most likely ones. This total is 1 minus
the sum of the other probabilities. Their log-probs are float32, so the sum has an error of about 1e-7."""


@torch.no_grad()
def centering_slopes(
    *,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    listed: torch.Tensor,
    has_rest: torch.Tensor,
    kernel: tuple[float, float],
) -> torch.Tensor:
    """Returns [..., L]: the coefficient q_v · w(p_v/q_v) − α · p_v of log p_v for each of the L most likely tokens v of
    the sampler (`Objective.centering`), with w(u) = clamp(u, lo, hi) for the `kernel` (lo, hi). It is 0 where `listed`
    [..., L] is False, which marks padding. `has_rest` [...] says whether the sampler could have sampled a token that
    is not listed.
    """
    lo, hi = kernel
    p, q = (torch.where(listed, wide(each), -math.inf).double().exp() for each in (log_p, log_q))
    rest_p, rest_q = ((1 - each.sum(-1, keepdim=True)).clamp(min=LEAST_REST) for each in (p, q))
    rho = rest_q / rest_p
    # ρ · w(1/ρ) and q · w(p/q) without the division by what may be 0
    alpha = torch.where(has_rest.unsqueeze(-1), torch.ones_like(rho).clamp(lo * rho, hi * rho), 0.0)
    return (p.clamp(lo * q, hi * q) - alpha * p).to(wide(log_p).dtype)


def _ratio(log_ratio: torch.Tensor, *, lo: float, hi: float) -> torch.Tensor:
    """Returns e^log_ratio, clamped to [lo, hi] and to at most e^MAX_FLOAT32_LOG_RATIO."""
    return log_ratio.clamp(_log(lo), min(_log(hi), MAX_FLOAT32_LOG_RATIO)).exp()


def is_half(dtype: torch.dtype) -> bool:
    """Returns True for floating-point types of fewer than 4 bytes."""
    return dtype.is_floating_point and dtype.itemsize < 4


def wide(values: torch.Tensor) -> torch.Tensor:
    """Converts half precision to float32, because a difference of bfloat16 values would be rounded to bfloat16."""
    return values.float() if is_half(values.dtype) else values


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _gated(gate: Gate, *, fixed: Mapping[str, torch.Tensor], adv_BT: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Returns True where the gate zeroes the token's surrogate."""
    log_p_BT, log_q_BT = fixed[gate.p], fixed[gate.q]
    difference_BT = log_p_BT - log_q_BT
    if gate.stat in ("ratio", "log_ratio"):
        stat_BT = segments.pool(difference_BT, gate.pool)
        lo, hi = (_log(gate.lo), _log(gate.hi)) if gate.stat == "ratio" else (gate.lo, gate.hi)
    else:
        stat_BT = segments.pool(gate_stat(gate.stat, log_p=log_p_BT, log_q=log_q_BT), gate.pool)
        lo, hi = gate.lo, gate.hi
    out_BT = (stat_BT < lo) | (stat_BT > hi)
    return out_BT & acts_on(gate, advantages=adv_BT, log_ratio=difference_BT)


def _is_chosen(choice: ByCovariance, *, fixed: Mapping[str, torch.Tensor], adv_BT: torch.Tensor) -> torch.Tensor:
    """Returns True for the tokens that are chosen. No token is chosen before `calibration.py` has added the numbers of
    the step."""
    if not isinstance(choice, ChosenByCovariance):
        return torch.zeros_like(adv_BT, dtype=torch.bool)
    means = (choice.mean_logprob, choice.mean_advantage)
    return covariance_ranks(choice, sources=fixed, advantages=adv_BT, means=means) > choice.above


def covariance_ranks(
    choice: ByCovariance,
    *,
    sources: Mapping[str, torch.Tensor],
    advantages: torch.Tensor,
    means: tuple[float, float],
) -> torch.Tensor:
    """Returns the rank of each token, float64: tokens with larger ranks are chosen first. The rank is −inf if the
    token's covariance is outside [lo, hi]. `means` are the means of the step's proximal log-probs and of its
    advantages. All passes compute the ranks from the same columns, so they get the same bits."""
    covariance = (sources["proximal"].double() - means[0]) * (advantages.double() - means[1])
    ranks = covariance if choice.order == "largest" else _hash(sources["behaviour"])
    return torch.where((covariance >= choice.lo) & (covariance <= choice.hi), ranks, -math.inf)


def _hash(values: torch.Tensor) -> torch.Tensor:
    """Returns a number from 0 to 2³² − 1 that looks random for each value: an invertible hash of the 32 bits of its
    float32, in which each bit of the result depends on all of them (https://github.com/skeeto/hash-prospector)."""
    bits = (values.float() + 0.0).view(torch.int32).long() & 0xFFFFFFFF  # + 0.0: zero has one sign
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):  # below 2³¹, so that a product fits int64
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return (bits ^ (bits >> 15)).double()


def acts_on(gate: Gate, *, advantages: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """Returns True for the tokens on which the gate acts (`when`). `log_ratio` is log p − log q."""
    if gate.when == "negative_advantage":
        return advantages < 0
    if gate.when == "moving_away":
        return advantages * log_ratio > 0
    return torch.ones_like(log_ratio, dtype=torch.bool)


def gate_stat(stat: str, *, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Returns the divergence `stat` of `Gate` for every token: k1, k2, k3, probability or binary_kl."""
    difference = (log_p - log_q).clamp(-MAX_FLOAT32_LOG_RATIO, MAX_FLOAT32_LOG_RATIO)
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
        far_BT = difference_BT.abs() > ROUNDING_NATS
        k2_BT = difference_BT.square() / 2
        k3_BT = (-difference_BT).clamp(max=MAX_FLOAT32_LOG_RATIO).exp() - 1 + difference_BT
        value_BT = {
            "k1": difference_BT,
            "k2": k2_BT,
            "k3": k3_BT,
            "k3+": k2_BT + (k3_BT - k2_BT).detach(),
            "abs": torch.where(far_BT, difference_BT.abs(), 0.0),
        }[penalty.kind]
    if penalty.corrected_by == "none":
        return value_BT
    return value_BT * (lp_BT - fixed[penalty.corrected_by]).clamp(max=MAX_FLOAT32_LOG_RATIO).exp()
