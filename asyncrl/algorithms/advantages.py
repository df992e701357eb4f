"""Advantages from rewards: computed by the driver, which sees rewards and group ids but no tokens.

The driver computes them once a step over all of its samples, before anything is dealt to ranks, updates or
micro-batches: what is called the batch here is the whole step, and its statistics are global by construction. They
weigh samples, so that a long completion counts no more than a short one.

What must hold: groups are found by id, never by position or by equal prompts; an incomplete group uses the members
that are present; what says nothing (one sample, or all rewards equal, in a group or, without a group baseline, in the
batch) gives exactly 0, never 0/0 and never amplified rounding. Standard deviations are divided by n − 1.

| estimator | baseline | scale |
|---|---|---|
| `group_norm` | group mean | group std |
| `group_mean` | group mean | – |
| `leave_one_out` | mean of the others | – |
| `batch_std` | group mean | batch std |
| `reinforce_pp` | batch mean | batch std |
| `reinforce_pp_baseline` | group mean, then batch mean | batch std of what is left |

Token-level ones, which need a critic, are in `returns.py`. Legend: N samples of the step, in any order.
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
    """(r − mean) / std of its group (GRPO, 2402.03300).

    >>> group_norm(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 8])).round(decimals=3).tolist()
    [0.707, -0.707, 0.0]
    """
    groups = Groups(rewards, group_ids)
    return groups.where_informative((groups.rewards_N - groups.mean_N) / (groups.std_N + STD_EPSILON))


def group_mean(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """r − mean of its group (Dr. GRPO, 2503.20783)."""
    groups = Groups(rewards, group_ids)
    return groups.where_informative(groups.rewards_N - groups.mean_N)


def leave_one_out(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """r − mean of the others (RLOO, 2402.14740), which equals n / (n − 1) · (r − mean): a baseline without the sample
    itself does not bias the gradient, and nothing else is divided.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([7, 7, 7])).tolist()
    [1.0, -0.5, -0.5]
    """
    groups = Groups(rewards, group_ids)
    others_mean_N = (groups.sum_N - groups.rewards_N) / (groups.size_N - 1).clamp(min=1)
    return groups.where_informative(groups.rewards_N - others_mean_N)


def batch_std(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """(r − mean of its group) / std of the batch's rewards (2508.08221): nearly equal rewards are not blown up.

    A group of one is 0, and its reward counts in the std.
    """
    groups = Groups(rewards, group_ids)
    std = groups.rewards_N.std() if len(rewards) > 1 else groups.rewards_N.new_zeros(())
    return groups.where_informative((groups.rewards_N - groups.mean_N) / (std + STD_EPSILON))


def reinforce_pp(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """(r − mean) / std, both of the batch (REINFORCE++, 2501.03262): no group baseline, so that groups of one learn and
    groups of equal rewards still say how hard their prompt is."""
    return _whitened(Groups(rewards, group_ids).rewards_N)


def reinforce_pp_baseline(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """r − mean of its group, whitened over the batch (REINFORCE++ with baseline, 2501.03262).

    Groups that say nothing stay exactly 0, and count in the std: the more of them, the larger the others' advantages.
    """
    centred_N = group_mean(rewards, group_ids)
    return Groups(rewards, group_ids).where_informative(_whitened(centred_N))


def _whitened(values_N: torch.Tensor) -> torch.Tensor:
    """Mean 0 and std 1 over all samples; 0 when all are equal."""
    if len(values_N) == 0 or values_N.max() == values_N.min():
        return torch.zeros_like(values_N)
    return (values_N - values_N.mean()) / (values_N.std() + STD_EPSILON)


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "group_norm": group_norm,
        "group_mean": group_mean,
        "leave_one_out": leave_one_out,
        "batch_std": batch_std,
        "reinforce_pp": reinforce_pp,
        "reinforce_pp_baseline": reinforce_pp_baseline,
    }
)


class Groups:
    """Statistics of every sample's group, float64, gathered back to the samples.

    `informative_N` is false in groups whose rewards are all equal, groups of one among them.
    """

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
        self.informative_N = per_sample(self.rewards_N, "amax") > per_sample(self.rewards_N, "amin")

    def where_informative(self, advantages_N: torch.Tensor) -> torch.Tensor:
        return torch.where(self.informative_N, advantages_N, 0.0)


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


def check_rewards(rewards: torch.Tensor) -> None:
    """RunError when one is not finite."""
    if not bool(torch.isfinite(rewards).all()):
        raise RunError(f"{int((~torch.isfinite(rewards)).sum())} of {len(rewards)} rewards are not finite")


def compute_advantages(estimator: Estimator, *, rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """float32 advantages [N]. RunError when a reward or an advantage is not finite in float32, or an estimator gives
    anything but one number a reward: a NaN would otherwise become a loss of 0 and a run that looks well and learns
    nothing."""
    check_rewards(rewards)
    found: object = estimator(rewards, group_ids)
    if not isinstance(found, torch.Tensor):
        raise RunError(
            f"algorithm.advantage gave a {type(found).__name__} instead of a tensor of {len(rewards)} values"
        )
    advantages_N = found.float()
    if advantages_N.shape != rewards.shape or not bool(torch.isfinite(advantages_N).all()):
        raise RunError(
            f"algorithm.advantage gave {tuple(advantages_N.shape)} values for {tuple(rewards.shape)} rewards, "
            f"{int((~torch.isfinite(advantages_N)).sum())} of them not finite in float32"
        )
    return advantages_N
