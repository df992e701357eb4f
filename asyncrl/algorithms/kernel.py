"""What an objective does to every token, measured from its slopes, with no code for any one surrogate.

κ_t = −(∂/∂lp_t Σ W · K · S) / A_t is the weight with which a token's advantage pushes its log-prob: 1 for REINFORCE, u
for an unclipped ratio, 0 behind a clip or a gate. Penalties are no push of the advantage, and the aggregation's a_t is
the same for all tokens of a sequence and so divides out: neither is in the slopes of an `Objective`.

A loss by import path knows no such parts. Its slopes are ∂L/∂lp of the whole loss: penalties are in them, and so is
what it divides tokens by, so that its effective share is that of unequal sequences too.

Every measure is a pair of sums, so that micro-batches, updates and ranks add up before anything is divided. What was
not measured has no pair, and no mean.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16)
"""Lower ends, in versions."""


@dataclass(frozen=True, slots=True)
class KernelSums:
    """(sum, count) by name; `+` adds two."""

    pairs: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: "KernelSums") -> "KernelSums":
        total: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for part in (self.pairs, other.pairs):
            for name, (value, count) in part.items():
                total[name] = (total[name][0] + value, total[name][1] + count)
        return KernelSums(dict(total))

    def means(self) -> dict[str, float]:
        """Sums over counts, and `kernel_ess_ratio`, (Σκ)² / (N · Σκ²) over tokens with A ≠ 0; 0 if all are silent."""
        means = {name: value / count for name, (value, count) in self.pairs.items() if count > 0}
        if "kernel" not in means:
            return means
        first, second = means.pop("kernel"), means.pop("kernel_squared")
        return means | {"kernel_ess_ratio": first**2 / second if second > 0 else 0.0}


@torch.no_grad()
def kernel_sums(
    *,
    slopes_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    staleness_BT: torch.Tensor | None,
    log_rho_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    shares_BT: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> KernelSums:
    """Sums of one micro-batch. `slopes_BT` is what κ is made of, `staleness_BT` versions (None: not known),
    `log_rho_BT` proximal − behaviour; of `shares_BT`, masks by name, the shares by sign of A are measured, as
    `NAME_positive_ratio` and `NAME_negative_ratio`."""
    slopes, advantages = slopes_BT[mask_BT].double(), advantages_BT[mask_BT].double()
    log_rho = log_rho_BT[mask_BT].double()
    pushed = advantages != 0
    silent = (slopes == 0).double()
    pairs: dict[str, tuple[float, float]] = {}

    def mean(name: str, values: torch.Tensor, where: torch.Tensor) -> None:
        count = int(where.sum())
        if count:
            pairs[name] = (float(values[where].sum()), float(count))

    kernel = torch.where(pushed, -slopes / torch.where(pushed, advantages, 1.0), 0.0)
    mean("kernel", kernel, pushed)
    mean("kernel_squared", kernel.square(), pushed)
    mean("silent_ratio", silent, pushed)
    for name, share in {
        "silent": silent,
        **{name: where[mask_BT].double() for name, where in shares_BT.items()},
    }.items():
        mean(f"{name}_positive_ratio", share, advantages > 0)
        mean(f"{name}_negative_ratio", share, advantages < 0)
    if staleness_BT is None:
        return KernelSums(pairs)
    staleness = staleness_BT[mask_BT]
    for low, high in zip(STALENESS_BUCKETS, [*STALENESS_BUCKETS[1:], None], strict=True):
        inside = (staleness >= low) & (staleness < high if high is not None else True)
        label = f"staleness_{low}" if high == low + 1 else f"staleness_{low}_to_{high - 1 if high else 'more'}"
        mean(f"silent_ratio_{label}", silent, inside & pushed)
        mean(f"abs_log_rho_nats_{label}", log_rho.abs(), inside)
        mean(f"advantage_{label}", advantages, inside)
    return KernelSums(pairs)
