"""What an objective does to every token, measured for any loss: from its slopes, with no code of its own.

κ_t = −(∂L/∂lp_t) / (a_t · A_t) is the weight with which a token's advantage pushes its log-prob: 1 for REINFORCE, u for
an unclipped ratio, 0 behind a clip or a gate. Here the factor a is left out, because nothing measured depends on a
common scale: shares and effective shares are the same.

Every measure is a pair of sums, so that micro-batches, updates and ranks add up before anything is divided.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

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
        """Sums over counts, and `kernel_ess_ratio`, (Σκ)² / (N · Σκ²) over tokens with A ≠ 0."""
        means = {name: value / count for name, (value, count) in self.pairs.items() if count > 0}
        first, second = means.pop("kernel", 0.0), means.pop("kernel_squared", 0.0)
        return means | ({"kernel_ess_ratio": first**2 / second} if second > 0 else {})


@torch.no_grad()
def kernel_sums(
    *,
    slopes_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    staleness_BT: torch.Tensor,
    log_rho_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> KernelSums:
    """Sums of one micro-batch. `slopes_BT` is ∂L/∂lp, `staleness_BT` versions, `log_rho_BT` proximal − behaviour."""
    slopes, advantages = slopes_BT[mask_BT].double(), advantages_BT[mask_BT].double()
    staleness, log_rho = staleness_BT[mask_BT], log_rho_BT[mask_BT].double()
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
    mean("silent_positive_ratio", silent, advantages > 0)
    mean("silent_negative_ratio", silent, advantages < 0)
    for low, high in zip(STALENESS_BUCKETS, [*STALENESS_BUCKETS[1:], None], strict=True):
        inside = (staleness >= low) & (staleness < high if high is not None else True)
        label = f"staleness_{low}" if high == low + 1 else f"staleness_{low}_to_{high - 1 if high else 'more'}"
        mean(f"silent_ratio_{label}", silent, inside & pushed)
        mean(f"abs_log_rho_nats_{label}", log_rho.abs(), inside)
        mean(f"advantage_{label}", advantages, inside)
    return KernelSums(pairs)
