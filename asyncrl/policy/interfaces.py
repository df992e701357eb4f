"""What the driver hands to the ranks of a policy and gets back. Torch-free: plain arrays, numbers and tuples.

Legend: G samples of one prompt, P its tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainGroup:
    """One group of a step, as a rank trains it.

    `rows` is a mapping of arrays (or, between driver and rank, the Ray ObjectRef of one, which only the rank that
    trains the group fetches): `prompt_ids` int32 [P], `output_lengths` int32 [G], and flat over the G completions, in
    order, `output_ids` int32, `logprobs` float32 (nats, as sampled), `weight_versions` int64 (steps).
    A sample with `sample_mask_G` 0 is not trained. `max_staleness_versions` is the η of the group's ticket.
    """

    key: str
    rows: Any
    advantages_G: npt.NDArray[np.float32]
    sample_mask_G: npt.NDArray[np.float32]
    max_staleness_versions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did, over all ranks.

    `skipped`: nothing was applied because every update was non-finite on some rank (F21). A step without a trained
    token applies no update either, but is not skipped. `rows_lost`: some rank could not fetch the rows of `lost_keys`;
    then nothing was trained and nothing else is set (F37).
    """

    skipped: bool = False
    updates_applied: int = 0
    updates_nonfinite: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    trained_tokens: int = 0
    trained_samples: int = 0
    entropy_nats: float = 0.0
    ess: float = 1.0
    importance_weight_mean: float = 1.0
    importance_weight_max: float = 1.0
    kl_behaviour_k1_nats: float = 0.0
    kl_behaviour_k3_nats: float = 0.0
    on_policy_tokens: int = 0
    on_policy_parity_max_nats: float = 0.0
    token_staleness: tuple[int, ...] = ()
    """Trained tokens by staleness: entry s counts those that are s versions old."""
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """What `asyncrl.algorithms.kernel` measured, by name; empty for a loss that takes logits."""
    loss_metrics: Mapping[str, float] = field(default_factory=dict)
    """The loss's own metrics, normalised: `clipped_ratio` and `gated_ratio` for the presets."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds of rank 0 in `log_probs`, `forward_backward` and `optimizer`."""
    rows_lost: bool = False
    lost_keys: tuple[str, ...] = ()


class ParameterSpec(NamedTuple):
    """One parameter as the engine gets it: Hugging Face name, shape, torch dtype without `torch.`, bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def deal_groups(
    groups: Sequence[TrainGroup], *, ranks: int, updates: int
) -> tuple[tuple[tuple[TrainGroup, ...], ...], ...]:
    """Groups by [rank][update]: equal contiguous shares to the updates, each share dealt in turn to the ranks.

    The shares are cut first, so that every update sees the same groups with any number of ranks. A last short step
    has uneven shares, some of them empty.

    >>> groups = [TrainGroup(key=str(i), rows={}, advantages_G=np.zeros(1, np.float32),
    ...     sample_mask_G=np.ones(1, np.float32), max_staleness_versions=0) for i in range(5)]
    >>> [[[g.key for g in share] for share in rank] for rank in deal_groups(groups, ranks=2, updates=2)]
    [[['0', '2'], ['3']], [['1'], ['4']]]
    """
    cuts = [-(-len(groups) * update // updates) for update in range(updates + 1)]
    shares = [groups[start:end] for start, end in pairwise(cuts)]
    return tuple(tuple(tuple(share[rank::ranks]) for share in shares) for rank in range(ranks))
