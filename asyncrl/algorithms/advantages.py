"""Advantages from rewards, by group: computed by the driver, which sees rewards and group ids but no tokens.

What must hold: groups are found by id, never by position or by equal prompts; an incomplete group uses the members
that are present; a group that says nothing (one member, or all rewards equal) gives exactly 0, never 0/0 and never
amplified rounding.

Legend: N samples of the step, in any order.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from asyncrl.config.import_path import is_import_path, resolve, suggest
from asyncrl.errors import ConfigError, RunError

Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rewards [N], group ids [N]) → advantages [N]."""

STD_EPSILON = 1e-6
"""Keeps near-equal rewards from becoming large advantages; equal ones are caught exactly, before it."""


def group_norm(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """(r − mean) / std of its group (GRPO, 2402.03300); the sample standard deviation, divided by n − 1.

    >>> group_norm(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 8])).round(decimals=3).tolist()
    [0.707, -0.707, 0.0]
    """
    groups = _Groups(rewards, group_ids)
    return groups.where_informative((groups.rewards_N - groups.mean_N) / (groups.std_N + STD_EPSILON))


def group_mean(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """r − mean of its group (Dr. GRPO, 2503.20783)."""
    groups = _Groups(rewards, group_ids)
    return groups.where_informative(groups.rewards_N - groups.mean_N)


def leave_one_out(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """(r − mean of the others) / std, the std being that of the whole group about its plain mean.

    A baseline without the sample itself is unbiased (RLOO, 2402.14740); it equals n / (n − 1) · (r − mean).
    """
    groups = _Groups(rewards, group_ids)
    others_mean_N = (groups.sum_N - groups.rewards_N) / (groups.size_N - 1).clamp(min=1)
    return groups.where_informative((groups.rewards_N - others_mean_N) / (groups.std_N + STD_EPSILON))


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {"group_norm": group_norm, "group_mean": group_mean, "leave_one_out": leave_one_out}
)


class _Groups:
    """Statistics of every sample's group, float64, gathered back to the samples."""

    def __init__(self, rewards: torch.Tensor, group_ids: torch.Tensor) -> None:
        if rewards.ndim != 1 or rewards.shape != group_ids.shape:
            raise RunError(f"rewards {tuple(rewards.shape)} and group ids {tuple(group_ids.shape)} must both be [N]")
        self.rewards_N = rewards.double()
        ids, index_N = torch.unique(group_ids, return_inverse=True)

        def per_sample(values_N: torch.Tensor, reduce: str) -> torch.Tensor:
            empty = torch.zeros(len(ids), dtype=torch.float64)
            return empty.scatter_reduce(0, index_N, values_N, reduce, include_self=False)[index_N]

        self.size_N = per_sample(torch.ones_like(self.rewards_N), "sum")
        self.sum_N = per_sample(self.rewards_N, "sum")
        self.mean_N = self.sum_N / self.size_N
        squares_N = per_sample((self.rewards_N - self.mean_N) ** 2, "sum")
        self.std_N = (squares_N / (self.size_N - 1).clamp(min=1)).sqrt()
        # max > min, not std > 0: the mean of equal rewards may differ from them by a rounding
        self._informative_N = per_sample(self.rewards_N, "amax") > per_sample(self.rewards_N, "amin")

    def where_informative(self, advantages_N: torch.Tensor) -> torch.Tensor:
        return torch.where(self._informative_N, advantages_N, 0.0)


def resolve_estimator(name: str) -> Estimator:
    """The estimator that `algorithm.advantage` names: a built-in, or an import path."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if not is_import_path(name):
        raise ConfigError(
            f"algorithm.advantage: {name!r} is neither one of {', '.join(ESTIMATORS)} nor an import path "
            f"'package.module:callable'{suggest(name, list(ESTIMATORS))}",
            key="algorithm.advantage",
        )
    return resolve(name, key="algorithm.advantage")


def compute_advantages(estimator: Estimator, *, rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """float32 advantages [N]. RunError when a reward or an advantage is not finite or the shape is wrong: a NaN would
    otherwise become a loss of 0 and a run that looks well and learns nothing."""
    if not bool(torch.isfinite(rewards).all()):
        raise RunError(f"{int((~torch.isfinite(rewards)).sum())} of {len(rewards)} rewards are not finite")
    advantages_N = estimator(rewards, group_ids)
    if advantages_N.shape != rewards.shape or not bool(torch.isfinite(advantages_N).all()):
        raise RunError(
            f"algorithm.advantage gave {tuple(advantages_N.shape)} values for {tuple(rewards.shape)} rewards, "
            f"{int((~torch.isfinite(advantages_N)).sum())} of them not finite"
        )
    return advantages_N.float()
