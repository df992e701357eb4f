"""Measures how far the training data is from the policy that is trained. All measures are sums over tokens, so the sums
of micro-batches and ranks can be added.

They work for every objective. Legend: B rows, T next tokens. beh: the sampler's log-probs. prox: log-probs under the
weights at the start of the step. ρ = e^(prox − beh). ρ is not truncated here: with a truncated ρ, the effective share
of samples would always look healthy.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

MAX_FLOAT64_LOG_RATIO = 300.0
"""Limit of |log ρ| in nats, for sums in float64: e^600 still fits, so the square of every ρ up to this limit can be
summed (F22). The loss itself is computed in float32 and has the limit `token_terms.MAX_FLOAT32_LOG_RATIO`."""

AVERAGED_METRICS = frozenset({"lr", "wd", "reward", "global_valid_seqs", "global_valid_toks", "mean_prompt_length"})
"""Metrics of a loss that have the same meaning in every micro-batch and are not parts of a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicySums:
    """Sums over the trained tokens of one micro-batch, rank or step. `+` adds two of them; of fields with `max` in
    their name it takes the maximum.

    The `on_policy_*` fields cover only tokens that were sampled with the weight version of the step. For these tokens
    sampler and trainer are the same policy, so their log-probs must agree. A difference shows an error in a cache, a
    temperature or a tokenizer between the two.
    """

    tokens: int = 0
    weight: float = 0.0
    weight_squared: float = 0.0
    weight_max: float = 0.0
    exp_abs_log_rho: float = 0.0
    abs_log_rho_max_nats: float = 0.0
    k1_nats: float = 0.0
    k3_nats: float = 0.0
    entropy_nats: float = 0.0
    reference_tokens: int = 0
    reference_k3_nats: float = 0.0
    on_policy_tokens: int = 0
    on_policy_parity_max_nats: float = 0.0

    def __add__(self, other: "OffPolicySums") -> "OffPolicySums":
        total: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            ours, theirs = getattr(self, name), getattr(other, name)
            total[name] = max(ours, theirs) if _extreme(name) else ours + theirs
        return OffPolicySums(**total)

    @property
    def ess(self) -> float:
        """Effective share of the tokens, (Σρ)² / (N · Σρ²), from 1/N to 1. It is NaN if there are no tokens."""
        if self.weight_squared == 0.0:
            return math.nan
        return self.weight / self.tokens * (self.weight / self.weight_squared)

    def extremes(self) -> dict[str, float]:
        """Returns the mean e^|log ρ|, the largest |log ρ|, and the mean KL to the reference if reference log-probs were
        given. Returns an empty dict if there are no tokens."""
        if not self.tokens:
            return {}
        extremes = {
            "exp_abs_log_rho_mean": self.exp_abs_log_rho / self.tokens,
            "abs_log_rho_max_nats": self.abs_log_rho_max_nats,
        }
        if self.reference_tokens:
            extremes["kl_to_reference_nats"] = self.reference_k3_nats / self.reference_tokens
        return extremes

    def mean(self, total: float) -> float:
        """Returns `total` divided by the number of tokens, or 0 if there are none."""
        return total / max(self.tokens, 1)


@torch.no_grad()
def off_policy_sums(
    *,
    proximal_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    on_policy_BT: torch.Tensor,
    reference_BT: torch.Tensor | None = None,
) -> OffPolicySums:
    """Returns the sums of one micro-batch.

    k1 and k3 estimate KL(behaviour ‖ proximal), http://joschu.net/blog/kl-approx.html. The reference's k3 estimates
    KL(proximal ‖ reference) at the sampled tokens.
    """
    log_rho = (proximal_BT.double() - behaviour_BT.double())[mask_BT]
    if log_rho.numel() == 0:
        return OffPolicySums()
    bounded = log_rho.clamp(-MAX_FLOAT64_LOG_RATIO, MAX_FLOAT64_LOG_RATIO)
    rho = bounded.exp()
    reference_k3 = 0.0
    if reference_BT is not None:
        log_ratio = (reference_BT.double() - proximal_BT.double())[mask_BT].clamp(
            -MAX_FLOAT64_LOG_RATIO, MAX_FLOAT64_LOG_RATIO
        )
        reference_k3 = float((log_ratio.exp() - 1 - log_ratio).sum())
    # max() ignores NaN, so a NaN is replaced by inf
    parity = log_rho[on_policy_BT[mask_BT]].abs().nan_to_num(nan=torch.inf)
    return OffPolicySums(
        tokens=log_rho.numel(),
        weight=float(rho.sum()),
        weight_squared=float(rho.square().sum()),
        weight_max=float(rho.max()),
        exp_abs_log_rho=float(bounded.abs().exp().sum()),
        abs_log_rho_max_nats=float(log_rho.abs().max()),
        k1_nats=float(-log_rho.sum()),
        k3_nats=float((rho - 1 - bounded).sum()),
        entropy_nats=float(entropy_BT.double()[mask_BT].sum()),
        reference_tokens=log_rho.numel() if reference_BT is not None else 0,
        reference_k3_nats=reference_k3,
        on_policy_tokens=parity.numel(),
        on_policy_parity_max_nats=float(parity.max()) if parity.numel() else 0.0,
    )


def adds_up(name: str) -> bool:
    """Returns True if a metric's values of the micro-batches are parts of a sum: it is neither an extreme nor
    averaged."""
    return _extreme(name) is None and name not in AVERAGED_METRICS


def merge_metrics(parts: Iterable[Mapping[str, float]], *, updates: int) -> dict[str, float]:
    """Combines the loss metrics of all micro-batches, ranks and `updates` of a call into one value for each metric.

    If `max` or `min` is a word of the name after an underscore, the result is the maximum or minimum.
    `AVERAGED_METRICS` are averaged over the micro-batches. All others are summed over an update's micro-batches and
    averaged over the updates.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            values[name].append(float(value))
    return {name: _merged(name, found, updates=updates) for name, found in values.items()}


def _merged(name: str, values: Sequence[float], *, updates: int) -> float:
    extreme = _extreme(name)
    if extreme is not None:
        return extreme(values)
    return sum(values) / (updates if adds_up(name) else len(values))


def _extreme(name: str) -> Callable[[Sequence[float]], float] | None:
    words = name.split("_")[1:]
    if "max" in words:
        return max
    return min if "min" in words else None
