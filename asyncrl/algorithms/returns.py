"""Token-level advantages and returns: GAE and V-trace from a critic, discounted returns without one, whitening.

A masked token (prompt, environment, padding) is not a step of the process: accumulators are carried across it, its
reward, value and ratio are never read, not even a NaN, and it gets 0. A discount is one trained token's. Nothing here
carries gradient.

Alignment: `values_BS[b, t]` is V(before token t), `rewards_BS[b, t]` what token t earned; an environment's reward
belongs on the last token of the action that earned it. The first token of a row has no prefix and is never trained. A
sequence ends with its last trained token: the value after it is 0, also of a truncated one.

Legend: B rows, S tokens. Sums are float64, results have the values' dtype.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.algorithms.baselines import Whitening
from asyncrl.errors import RunError

ROUNDING = 1e-12
"""A variance below this share of the mean square is the rounding of equal values: a spread of 1e-6 of their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """What the policy and what the critic is trained on, 0 at masked tokens."""

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
    """Generalised advantage estimates (1506.02438): Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ·V_{t+1} − V_t, over trained
    tokens; returns are advantages + values. `lam` is one for all rows, or [B] (`length_adaptive_lambda`).

    >>> rewards, values = torch.tensor([[0.0, 0.0, 9.0, 1.0]]), torch.tensor([[0.0, 0.5, 9.0, 0.75]])
    >>> found = gae(rewards, values, torch.tensor([[0, 1, 0, 1]]), gamma=1.0, lam=0.5)
    >>> found.advantages_BS.tolist()  # δ = 0.75 − 0.5 and 1 − 0.75
    [[0.0, 0.375, 0.0, 0.25]]
    """
    steps = _TrainedSteps(rewards_BS, values_BS, token_mask_BS)
    lam_B1 = torch.as_tensor(lam, dtype=torch.float64, device=values_BS.device).reshape(-1, 1)
    if len(lam_B1) not in (1, len(values_BS)):
        raise RunError(f"lam has {len(lam_B1)} entries for {len(values_BS)} rows")
    deltas_BS = steps.rewards_BS + gamma * steps.following(steps.values_BS) - steps.values_BS
    advantages_BS = steps.accumulate(deltas_BS, decay_BS=(gamma * lam_B1).expand_as(deltas_BS))
    return steps.result(advantages_BS=advantages_BS, returns_BS=advantages_BS + steps.values_BS)


def decoupled_gae(
    rewards_BS: torch.Tensor,
    values_BS: torch.Tensor,
    token_mask_BS: torch.Tensor,
    *,
    gamma: float,
    policy_lam: float | torch.Tensor,
    value_lam: float | torch.Tensor,
) -> TokenAdvantages:
    """Advantages by `policy_lam`, returns by `value_lam` (VC-PPO, 2503.01491): a critic trained with λ = 1 is unbiased
    over long sequences, while a policy with λ < 1 has less variance."""
    policy = gae(rewards_BS, values_BS, token_mask_BS, gamma=gamma, lam=policy_lam)
    value = gae(rewards_BS, values_BS, token_mask_BS, gamma=gamma, lam=value_lam)
    return TokenAdvantages(advantages_BS=policy.advantages_BS, returns_BS=value.returns_BS)


def length_adaptive_lambda(token_mask_BS: torch.Tensor, *, alpha: float) -> torch.Tensor:
    """λ [B] = 1 − 1/(α·l) for l trained tokens (VAPO, 2504.05118, α = 0.05), so that Σ_k λ^k ≈ α·l grows with the
    length; 0 where l ≤ 1/α.

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
    """V-trace (1802.01561): targets v_t = V_t + δ_t + γ·c_t·(v_{t+1} − V_{t+1}), δ_t = ρ_t·(r_t + γ·V_{t+1} − V_t), as
    returns, and r_t + γ·v_{t+1} − V_t as advantages, with ρ = min(ρ̄, π/μ) and c = min(c̄, π/μ).

    `log_ratios_BS` is log π − log μ, of the current and the behaviour policy. The paper's policy gradient weighs the
    advantages by ρ once more: that is the objective's part, which the preset `vtrace` does with ρ̄ = 1.
    """
    if not math.inf > rho_bar >= c_bar > 0:
        raise RunError(f"V-trace needs ∞ > rho_bar ≥ c_bar > 0: rho_bar is {rho_bar:g}, c_bar {c_bar:g}")
    steps = _TrainedSteps(rewards_BS, values_BS, token_mask_BS)
    rho_BS, c_BS = (steps.inside(log_ratios_BS).clamp(max=math.log(bar)).exp() for bar in (rho_bar, c_bar))
    deltas_BS = rho_BS * (steps.rewards_BS + gamma * steps.following(steps.values_BS) - steps.values_BS)
    targets_BS = steps.values_BS + steps.accumulate(deltas_BS, decay_BS=gamma * c_BS)
    advantages_BS = steps.rewards_BS + gamma * steps.following(targets_BS) - steps.values_BS
    return steps.result(advantages_BS=advantages_BS, returns_BS=targets_BS)


@torch.no_grad()
def discounted_returns(rewards_BS: torch.Tensor, token_mask_BS: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Σ_k γ^k r_{t+k} over trained tokens, [B, S], 0 at masked ones: the advantages of REINFORCE++ (2501.03262, eq. 8)
    before they are whitened over the step's tokens, where `rewards_BS` is −β · `kl_estimate` at every token and the
    sample's reward, less its group's mean in the variant with a baseline, at the last.

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
    """Estimates of KL(policy ‖ reference) at tokens that the policy sampled, of any one shape, in nats
    (http://joschu.net/blog/kl-approx.html): k1 = d, k2 = d²/2, k3 = e^−d − 1 + d, with d = log policy − log reference.
    """
    difference = logprobs - reference_logprobs
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return (-difference).exp() - 1 + difference
    raise ValueError(f"kind is {kind!r}; a KL estimate is one of k1, k2, k3")


def deviation(squares: torch.Tensor, count: torch.Tensor, rule: Whitening) -> torch.Tensor:
    """The divisor of a whitening: the standard deviation of `count` values whose squares about their mean add up to
    `squares`, with the rule's eps and divisor. A variance of one value is 0."""
    variance = squares / (count - 1 if rule.divisor == "n-1" else count).clamp(min=1)
    if rule.eps_in == "variance":
        return (variance + rule.eps).sqrt()
    return variance.sqrt() + rule.eps


@torch.no_grad()
def masked_moments(values: torch.Tensor, mask: torch.Tensor, *, weights: torch.Tensor | None = None) -> torch.Tensor:
    """[3] float64: sum, sum of squares and count of the values where `mask` is not 0, each value counting `weights`
    times (once without).

    Moments of micro-batches and ranks add up, by `+` or by an all-reduce of the tensor as it is.
    """
    counts = mask.bool().double() if weights is None else torch.where(mask.bool(), weights.double(), 0.0)
    inside = torch.where(mask.bool(), values.double(), 0.0)
    return torch.stack([(counts * inside).sum(), (counts * inside.square()).sum(), counts.sum()])


@torch.no_grad()
def whiten(
    values: torch.Tensor, mask: torch.Tensor, *, moments: torch.Tensor, rule: Whitening | None = None
) -> torch.Tensor:
    """(v − mean) / std by the global `moments` (`masked_moments`, added up before anything is split), with the eps, the
    divisor and the mean of `rule`; 0 at masked slots. All are 0, or the mean if `rule` keeps it, when all values are
    equal. `values` and `mask` have any one shape."""
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
    """The trained tokens of each row as steps of a process; float64, 0 at all other tokens."""

    def __init__(self, rewards_BS: torch.Tensor, values_BS: torch.Tensor, token_mask_BS: torch.Tensor) -> None:
        self._mask_BS = _trained(token_mask_BS)
        self._dtype = values_BS.dtype
        self.rewards_BS = self.inside(rewards_BS)
        self.values_BS = self.inside(values_BS)
        width = token_mask_BS.shape[1]
        # the smallest trained index after t; `width`, where a column of zeros is put, when there is none
        index_BS = torch.where(self._mask_BS, torch.arange(width, device=values_BS.device), width)
        nearest_BS = index_BS.flip(1).cummin(dim=1).values.flip(1)
        self._next_BS = torch.nn.functional.pad(nearest_BS[:, 1:], (0, 1), value=width)

    def inside(self, column_BS: torch.Tensor) -> torch.Tensor:
        if column_BS.shape != self._mask_BS.shape:
            raise RunError(f"a column is {tuple(column_BS.shape)}, the token mask {tuple(self._mask_BS.shape)}")
        return torch.where(self._mask_BS, column_BS.double(), 0.0)

    def following(self, column_BS: torch.Tensor) -> torch.Tensor:
        """The column's value at the next trained token; 0 after the last."""
        return torch.nn.functional.pad(column_BS, (0, 1)).gather(1, self._next_BS)

    def accumulate(self, terms_BS: torch.Tensor, *, decay_BS: torch.Tensor) -> torch.Tensor:
        """a_t = term_t + decay_t · a_{t+1} over trained tokens."""
        terms_SB = torch.where(self._mask_BS, terms_BS, 0.0).T.contiguous()
        decay_SB = torch.where(self._mask_BS, decay_BS, 1.0).T.contiguous()  # 0 + 1 · a carries a across
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
