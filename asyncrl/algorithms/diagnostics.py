"""How far the data is from the policy that trains on it: sums that add up over micro-batches and ranks.

For any objective, with no code of its own. Legend: B rows, T next tokens. beh: the sampler's log-probs; prox: those
of the weights at the start of the step; ρ = e^(prox − beh), never truncated here, or the effective sample share would
always read healthy.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 300.0
"""e^600 still fits float64, so that the square of any ρ up to here adds up (F22)."""

AVERAGED_METRICS = frozenset({"lr", "wd", "reward", "global_valid_seqs", "global_valid_toks", "mean_prompt_length"})
"""Metrics that every micro-batch repeats and that are part of none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicySums:
    """Sums over the trained tokens of one micro-batch, rank or step; `+` adds two of them.

    `on_policy_*` are over tokens whose weight version equals the step's own: there the sampler and the trainer are
    the same policy, so that their log-probs must agree, whatever caches, temperatures and tokenizers lie between.
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
        return OffPolicySums(
            tokens=self.tokens + other.tokens,
            weight=self.weight + other.weight,
            weight_squared=self.weight_squared + other.weight_squared,
            weight_max=max(self.weight_max, other.weight_max),
            exp_abs_log_rho=self.exp_abs_log_rho + other.exp_abs_log_rho,
            abs_log_rho_max_nats=max(self.abs_log_rho_max_nats, other.abs_log_rho_max_nats),
            k1_nats=self.k1_nats + other.k1_nats,
            k3_nats=self.k3_nats + other.k3_nats,
            entropy_nats=self.entropy_nats + other.entropy_nats,
            reference_tokens=self.reference_tokens + other.reference_tokens,
            reference_k3_nats=self.reference_k3_nats + other.reference_k3_nats,
            on_policy_tokens=self.on_policy_tokens + other.on_policy_tokens,
            on_policy_parity_max_nats=max(self.on_policy_parity_max_nats, other.on_policy_parity_max_nats),
        )

    @property
    def ess(self) -> float:
        """Effective share of the tokens, (Σρ)² / (N · Σρ²), from 1/N to 1; NaN when there are none."""
        if self.weight_squared == 0.0:
            return math.nan
        return self.weight / self.tokens * (self.weight / self.weight_squared)

    def extremes(self) -> dict[str, float]:
        """Mean e^|log ρ| and the largest |log ρ|, and where the reference was looked at its KL; nothing when there are
        no tokens."""
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
        """`total` over the tokens; 0 when there are none."""
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
    """Sums of one micro-batch. k1 and k3 estimate KL(behaviour ‖ proximal), http://joschu.net/blog/kl-approx.html; the
    reference's k3 is that of KL(proximal ‖ reference), over the tokens as they were sampled."""
    log_rho = (proximal_BT.double() - behaviour_BT.double())[mask_BT]
    if log_rho.numel() == 0:
        return OffPolicySums()
    bounded = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = bounded.exp()
    reference_k3 = 0.0
    if reference_BT is not None:
        log_ratio = (reference_BT.double() - proximal_BT.double())[mask_BT].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        reference_k3 = float((log_ratio.exp() - 1 - log_ratio).sum())
    # max() would drop a NaN in silence
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
    """Whether micro-batches' values of a metric are parts of a sum: not an extreme, and not averaged."""
    return _extreme(name) is None and name not in AVERAGED_METRICS


def merge_metrics(parts: Iterable[Mapping[str, float]], *, updates: int) -> dict[str, float]:
    """A loss's metrics of all micro-batches, ranks and `updates` of a call as one value each.

    Names with the word `max` or `min` after an underscore are extremes. `AVERAGED_METRICS` are averaged over the
    micro-batches. All others are added over an update's micro-batches and averaged over the updates.
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
