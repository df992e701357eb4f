"""Measures what an objective does to each token, from the slope of the loss, with the same code for all surrogates.

κ_t = −(∂/∂lp_t Σ W · K · S) / A_t is the weight with which a token's advantage A pushes its log-prob lp. W is the
importance weight, K the gates and S the surrogate of the objective (`objective.py`). κ is 1 for REINFORCE, u for an
unclipped ratio u, and 0 for a clipped or gated token. Three parts of the loss are not in the slopes of an `Objective`:
the centering, because it is an input of its own; penalties, because they do not depend on the advantage; and the
coefficient of the token in the aggregation, because it is equal for all tokens of a sequence and cancels.

For a loss that is named by import path, these parts are unknown. Its slopes are ∂L/∂lp of the whole loss L. They
contain the penalties and the numbers by which the loss divides tokens, so its effective share also depends on how
unequal the sequences are.

Every measure is a pair (sum, count), so that micro-batches, updates and ranks can be added before the division. A
measure without a pair was not measured and has no mean.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from asyncrl.algorithms.diagnostics import MetricSums

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16)
"""Lower ends of the staleness buckets, in versions."""


@torch.no_grad()
def kernel_sums(
    *,
    slopes_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    staleness_BT: torch.Tensor | None,
    log_rho_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    shares_BT: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> MetricSums:
    """Returns sums over one micro-batch: of κ and κ², the number of tokens whose advantage is not 0 but whose slope
    is 0 ("silent"), and, with `staleness_BT`, measures for each bucket of staleness. Only tokens in `mask_BT` count.

    `slopes_BT` is the derivative of the loss by each token's log-prob; κ is −slope / advantage. `staleness_BT` is in
    versions; None if it is not known. `log_rho_BT` is proximal − behaviour, in nats. `shares_BT` holds masks by name.
    For each mask, `NAME_positive_ratio` is the share of the tokens with A > 0 at which the mask is True, and
    `NAME_negative_ratio` that of the tokens with A < 0.
    """
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
        return MetricSums(pairs)
    staleness = staleness_BT[mask_BT]
    for low, high in zip(STALENESS_BUCKETS, [*STALENESS_BUCKETS[1:], None], strict=True):
        inside = (staleness >= low) & (staleness < high if high is not None else True)
        label = f"staleness_{low}" if high == low + 1 else f"staleness_{low}_to_{high - 1 if high else 'more'}"
        mean(f"silent_ratio_{label}", silent, inside & pushed)
        mean(f"abs_log_rho_nats_{label}", log_rho.abs(), inside)
        mean(f"advantage_{label}", advantages, inside)
    return MetricSums(pairs)
