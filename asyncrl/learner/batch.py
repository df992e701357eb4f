"""From a lease to what the ranks train: filters, advantages from rewards, references to rows, masks. Metadata only.

The bound is checked once more here: a group whose oldest token is beyond the η of its ticket is our bug.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.algorithms.advantages import Estimator, Groups, compute_advantages
from asyncrl.algorithms.filters import SampleFilters
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.data_plane.row_store import Rows
from asyncrl.errors import StalenessViolation
from asyncrl.learner.records import SampleRecord
from asyncrl.policy.interfaces import TrainGroup


def check_staleness(lease: Lease) -> None:
    """Raises StalenessViolation when a leased group is beyond its ticket's limit."""
    for group in lease.groups:
        staleness = lease.step - group.meta.oldest
        if staleness > group.max_staleness_versions:
            raise StalenessViolation(
                f"group {group.meta.key} is {staleness} versions old at step {lease.step}, its ticket allows "
                f"{group.max_staleness_versions}: this is a bug in admission or in the lease rule"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """What filters and estimator make of a step: one array [G] a group, in the lease's order.

    `zero_variance_ratio` is the share of groups whose rewards, as the estimator sees them, are all equal;
    `overlong_ratio` that of samples cut at their limit; `masked_ratio` that of samples with a mask of 0, by a filter or
    because they have no token.
    """

    advantages: Sequence[npt.NDArray[np.float32]]
    masks: Sequence[npt.NDArray[np.float32]]
    zero_variance_ratio: float
    overlong_ratio: float
    masked_ratio: float


def judge_samples(groups: Sequence[LeasedGroup], *, estimator: Estimator, filters: SampleFilters) -> StepSamples:
    """Advantages and masks of the whole step at once, so that batch statistics are those of all ranks."""
    sizes = [len(group.meta.rewards) for group in groups]
    ids_N = torch.tensor([group.meta.group for group in groups for _ in group.meta.rewards])
    tokens_N = torch.tensor([tokens for group in groups for tokens in group.meta.completion_tokens])
    truncated_N = torch.tensor([truncated for group in groups for truncated in group.meta.truncated])
    rewards_N = filters.shaped_rewards(
        torch.tensor([reward for group in groups for reward in group.meta.rewards], dtype=torch.float32),
        truncated_N=truncated_N,
        completion_tokens_N=tokens_N,
    )
    advantages_N = compute_advantages(estimator, rewards=rewards_N, group_ids=ids_N)
    zero_variance_N = ~Groups(rewards_N, ids_N).informative_N
    mask_N = (tokens_N > 0) & ~filters.masked(zero_variance_N=zero_variance_N, truncated_N=truncated_N)
    return StepSamples(
        advantages=[part.numpy() for part in torch.split(advantages_N, sizes)],
        masks=[part.numpy() for part in torch.split(mask_N.float(), sizes)],
        zero_variance_ratio=sum(bool(part.all()) for part in torch.split(zero_variance_N, sizes)) / len(groups),
        overlong_ratio=float(truncated_N.float().mean()),
        masked_ratio=float((~mask_N).float().mean()),
    )


def train_groups(groups: Sequence[LeasedGroup], *, samples: StepSamples, rows: Sequence[Any]) -> list[TrainGroup]:
    """What the ranks get: `rows` are references that only the rank that trains the group resolves."""
    return [
        TrainGroup(
            key=group.meta.key,
            rows=ref,
            advantages_G=advantages_G,
            sample_mask_G=mask_G,
            max_staleness_versions=group.max_staleness_versions,
        )
        for group, advantages_G, mask_G, ref in zip(groups, samples.advantages, samples.masks, rows, strict=True)
    ]


def keys_by_store(groups: Sequence[LeasedGroup]) -> dict[str, list[str]]:
    """Keys of the groups' rows by the row store that keeps them."""
    keys: dict[str, list[str]] = {}
    for group in groups:
        keys.setdefault(group.meta.store, []).append(group.meta.key)
    return keys


def counts_by_staleness(lease: Lease) -> dict[str, dict[int, int]]:
    """Groups by versions: `groups` at this step, split into `in_flight` (until ready) and `in_buffer` (since)."""
    histograms: dict[str, dict[int, int]] = {"groups": {}, "in_flight": {}, "in_buffer": {}}
    for group in lease.groups:
        for name, versions in (
            ("groups", lease.step - group.meta.oldest),
            ("in_flight", group.ready_step - group.meta.oldest),
            ("in_buffer", lease.step - group.ready_step),
        ):
            histogram = histograms[name]
            histogram[versions] = histogram.get(versions, 0) + 1
    return histograms


def sample_record(
    leased: LeasedGroup, group: TrainGroup, rows: Rows, *, sample: int, decode: Callable[[Sequence[int]], str]
) -> SampleRecord:
    """One rollout of a group in full."""
    start = int(rows["output_lengths"][:sample].sum())
    cut = slice(start, start + int(rows["output_lengths"][sample]))
    return SampleRecord(
        group=leased.meta.group,
        prompt=leased.task.prompt,
        completion=decode(rows["output_ids"][cut].tolist()),
        answer=leased.task.answer,
        reward=leased.meta.rewards[sample],
        advantage=float(group.advantages_G[sample]),
        version_spans=tuple(sorted(Counter(rows["weight_versions"][cut].tolist()).items())),
        truncated=leased.meta.truncated[sample],
    )
