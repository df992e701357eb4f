"""Token-level advantages and returns: GAE and V-trace with a critic, discounted returns without one, and whitening.

A masked token (of a prompt, an environment or padding) is not a step of the decision process. Accumulators are carried
across it. Its reward, value and ratio are never read, so they may be NaN. Its result is 0. A discount applies once for
each trained token. No result carries gradient.

Alignment: `values_BS[b, t]` is V(before token t). `rewards_BS[b, t]` is the reward for token t; a reward from an
environment belongs at the last token of the action that earned it. The first token of a row has no prefix and is never
trained. A sequence ends with its last trained token. The value after that token is 0, also for a truncated sequence.

Legend: B rows, S tokens. Sums are float64. Advantages, returns and whitened values have the dtype of the values, or of
the rewards if there are no values. Moments and λ are float64.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.algorithms.baselines import Whitening
from asyncrl.errors import RunError

ROUNDING = 1e-12
"""A variance below this share of the mean square is treated as the rounding error of equal values. At this limit, the
standard deviation is 1e-6 of the size of the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """Advantages for the policy's loss and returns for the critic's loss; 0 at masked tokens."""

    advantages_BS: torch.Tensor
    returns_BS: torch.Tensor


@torch.no_grad()
def gae(
    rewards_BS: torch.Tensor,
    values_BS: torch.Tensor,
    token_mask_BS: torch.Tensor,
    *,
    gamma: float,
    lam: float | torch.Tensor,
) -> TokenAdvantages:
    """Returns generalised advantage estimates (1506.02438) and returns.

    The advantage is Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ·V_{t+1} − V_t, over trained tokens. The returns are
    advantages + values. `lam` is one number for all rows, or a tensor [B] (see `length_adaptive_lambda`).

    >>> rewards, values = torch.tensor([[0.0, 0.0, 9.0, 1.0]]), torch.tensor([[0.0, 0.5, 9.0, 0.75]])
    >>> found = gae(rewards, values, torch.tensor([[0, 1, 0, 1]]), gamma=1.0, lam=0.5)
    >>> found.advantages_BS.tolist()  # δ = 0.75 − 0.5 and 1 − 0.75
    [[0.0, 0.375, 0.0, 0.25]]
    """
    steps = _TrainedSteps(rewards_BS, values_BS, token_mask_BS)
    lam_B1 = torch.as_tensor(lam, dtype=torch.float64, device=values_BS.device).reshape(-1, 1)
    if len(lam_B1) not in (1, len(values_BS)):
        raise RunError(
            f"lam has {len(lam_B1)} entries for {len(values_BS)} rows: give one number, or one entry for each row"
        )
    deltas_BS = steps.rewards_BS + gamma * steps.following(steps.values_BS) - steps.values_BS
    advantages_BS = steps.accumulate(deltas_BS, decay_BS=(gamma * lam_B1).expand_as(deltas_BS))
    return steps.result(advantages_BS=advantages_BS, returns_BS=advantages_BS + steps.values_BS)


def length_adaptive_lambda(token_mask_BS: torch.Tensor, *, alpha: float) -> torch.Tensor:
    """Returns λ [B] = 1 − 1/(α·l) for l trained tokens (VAPO, 2504.05118, α = 0.05).

    Then Σ_k λ^k ≈ α·l grows with the length. λ is 0 where l ≤ 1/α.

    >>> length_adaptive_lambda(torch.tensor([[0, 1, 1, 1, 1], [0, 1, 0, 0, 0]]), alpha=0.5).tolist()
    [0.5, 0.0]
    """
    scaled_B = alpha * _trained(token_mask_BS).sum(dim=1).double()
    return torch.where(scaled_B > 1, 1 - 1 / scaled_B.clamp(min=1), 0.0)


@torch.no_grad()
def vtrace(
    rewards_BS: torch.Tensor,
    values_BS: torch.Tensor,
    token_mask_BS: torch.Tensor,
    *,
    log_ratios_BS: torch.Tensor,
    gamma: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> TokenAdvantages:
    """Returns V-trace advantages and targets (1802.01561).

    The targets are v_t = V_t + δ_t + γ·c_t·(v_{t+1} − V_{t+1}) with δ_t = ρ_t·(r_t + γ·V_{t+1} − V_t). They are the
    `returns_BS`. The advantages are r_t + γ·v_{t+1} − V_t. Here ρ = min(ρ̄, π/μ) and c = min(c̄, π/μ).

    `log_ratios_BS` is log π − log μ, where π is the current and μ the behaviour policy. The paper's policy gradient
    multiplies the advantages by ρ once more. This function does not: the objective does it, and the preset `vtrace` has
    this weight with ρ̄ = 1.
    """
    if not math.inf > rho_bar >= c_bar > 0:
        raise RunError(f"V-trace needs ∞ > rho_bar ≥ c_bar > 0, but rho_bar is {rho_bar:g} and c_bar is {c_bar:g}")
    steps = _TrainedSteps(rewards_BS, values_BS, token_mask_BS)
    rho_BS, c_BS = (steps.inside(log_ratios_BS).clamp(max=math.log(bar)).exp() for bar in (rho_bar, c_bar))
    deltas_BS = rho_BS * (steps.rewards_BS + gamma * steps.following(steps.values_BS) - steps.values_BS)
    targets_BS = steps.values_BS + steps.accumulate(deltas_BS, decay_BS=gamma * c_BS)
    advantages_BS = steps.rewards_BS + gamma * steps.following(targets_BS) - steps.values_BS
    return steps.result(advantages_BS=advantages_BS, returns_BS=targets_BS)


@torch.no_grad()
def discounted_returns(rewards_BS: torch.Tensor, token_mask_BS: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Returns Σ_k γ^k r_{t+k} over trained tokens, [B, S], 0 at masked tokens.

    These are the advantages of REINFORCE++ (2501.03262, eq. 8) before they are whitened over the step's tokens. For
    them, `rewards_BS` must be −β · `kl_estimate` at every token. At the last trained token it also contains the
    sample's reward; in the variant with a baseline, this is the reward less the mean of its group.

    >>> discounted_returns(torch.tensor([[0.0, -0.5, 9.0, 1.0]]), torch.tensor([[0, 1, 0, 1]]), gamma=0.5).tolist()
    [[0.0, 0.0, 0.0, 1.0]]
    """
    steps = _TrainedSteps(rewards_BS, rewards_BS, token_mask_BS)
    decay_BS = torch.full_like(steps.rewards_BS, gamma)
    return steps.accumulate(steps.rewards_BS, decay_BS=decay_BS).to(rewards_BS.dtype)


@torch.no_grad()
def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, kind: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Returns estimates of KL(policy ‖ reference) at tokens that the policy sampled, in nats.

    k1 = d, k2 = d²/2, k3 = e^−d − 1 + d, with d = log policy − log reference
    (http://joschu.net/blog/kl-approx.html). Both tensors must have the same shape, which may be any shape.
    """
    difference = logprobs - reference_logprobs
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return (-difference).exp() - 1 + difference
    raise ValueError(f"kind is {kind!r}: a KL estimate must be one of k1, k2, k3")


def deviation(squares: torch.Tensor, count: torch.Tensor, rule: Whitening) -> torch.Tensor:
    """Returns the standard deviation of `count` values, as a divisor with the eps and the n or n − 1 of `rule`.

    `squares` is the sum of the squares of `count` values about their mean. The variance of a single value is 0.
    """
    variance = squares / (count - 1 if rule.divisor == "n-1" else count).clamp(min=1)
    if rule.eps_in == "variance":
        return (variance + rule.eps).sqrt()
    return variance.sqrt() + rule.eps


@torch.no_grad()
def masked_moments(values: torch.Tensor, mask: torch.Tensor, *, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Returns [3] float64: the sum, the sum of squares and the count of the values where `mask` is not 0.

    With `weights`, value i counts `weights[i]` times. Moments of micro-batches and ranks can be added, with `+` or with
    an all-reduce of this tensor.
    """
    counts = mask.bool().double() if weights is None else torch.where(mask.bool(), weights.double(), 0.0)
    inside = torch.where(mask.bool(), values.double(), 0.0)
    return torch.stack([(counts * inside).sum(), (counts * inside.square()).sum(), counts.sum()])


@torch.no_grad()
def whiten(
    values: torch.Tensor, mask: torch.Tensor, *, moments: torch.Tensor, rule: Whitening | None = None
) -> torch.Tensor:
    """Returns (v − mean) / std with the global `moments`, and with the eps, divisor and `keep_mean` of `rule`.

    `moments` come from `masked_moments`, summed over all micro-batches and ranks of the step. The result is 0 at masked
    positions. If all values are equal, the result is 0, or the mean if `rule.keep_mean`. `values` and `mask` must have
    the same shape, which may be any shape.
    """
    rule = Whitening() if rule is None else rule
    total, squares, count = moments.double().unbind()
    mean, mean_square = total / count.clamp(min=1), squares / count.clamp(min=1)
    variance = (mean_square - mean.square()).clamp(min=0)
    centred = torch.where(variance > ROUNDING * mean_square, values.double() - mean, 0.0)
    whitened = torch.where(centred != 0, centred / deviation(variance * count, count, rule), 0.0)
    return torch.where(mask.bool(), whitened + mean * rule.keep_mean, 0.0).to(values.dtype)


def _trained(token_mask_BS: torch.Tensor) -> torch.Tensor:
    mask_BS = token_mask_BS.bool().clone()
    mask_BS[:, 0] = False
    return mask_BS


class _TrainedSteps:
    """The trained tokens of each row as steps of a decision process. All columns are float64, and 0 at masked
    tokens."""

    def __init__(self, rewards_BS: torch.Tensor, values_BS: torch.Tensor, token_mask_BS: torch.Tensor) -> None:
        self._mask_BS = _trained(token_mask_BS)
        self._dtype = values_BS.dtype
        self.rewards_BS = self.inside(rewards_BS)
        self.values_BS = self.inside(values_BS)
        width = token_mask_BS.shape[1]
        # `_next_BS` has the smallest trained index after t, or `width` if there is none. `following` appends a column
        # of zeros, which has the index `width`.
        index_BS = torch.where(self._mask_BS, torch.arange(width, device=values_BS.device), width)
        nearest_BS = index_BS.flip(1).cummin(dim=1).values.flip(1)
        self._next_BS = torch.nn.functional.pad(nearest_BS[:, 1:], (0, 1), value=width)

    def inside(self, column_BS: torch.Tensor) -> torch.Tensor:
        if column_BS.shape != self._mask_BS.shape:
            raise RunError(
                f"a column has shape {tuple(column_BS.shape)}, but the token mask has shape "
                f"{tuple(self._mask_BS.shape)}: both must be [B, S]"
            )
        return torch.where(self._mask_BS, column_BS.double(), 0.0)

    def following(self, column_BS: torch.Tensor) -> torch.Tensor:
        """Returns the column's value at the next trained token; 0 after the last one."""
        return torch.nn.functional.pad(column_BS, (0, 1)).gather(1, self._next_BS)

    def accumulate(self, terms_BS: torch.Tensor, *, decay_BS: torch.Tensor) -> torch.Tensor:
        """Returns a_t = term_t + decay_t · a_{t+1} over trained tokens."""
        terms_SB = torch.where(self._mask_BS, terms_BS, 0.0).T.contiguous()
        # at a masked token, term 0 and decay 1 carry the accumulator across the token unchanged
        decay_SB = torch.where(self._mask_BS, decay_BS, 1.0).T.contiguous()
        sums_SB = torch.empty_like(terms_SB)
        running_B = torch.zeros_like(terms_SB[0])
        for t in reversed(range(len(terms_SB))):
            running_B = terms_SB[t] + decay_SB[t] * running_B
            sums_SB[t] = running_B
        return torch.where(self._mask_BS, sums_SB.T, 0.0)

    def result(self, *, advantages_BS: torch.Tensor, returns_BS: torch.Tensor) -> TokenAdvantages:
        return TokenAdvantages(
            advantages_BS=torch.where(self._mask_BS, advantages_BS, 0.0).to(self._dtype),
            returns_BS=torch.where(self._mask_BS, returns_BS, 0.0).to(self._dtype),
        )
