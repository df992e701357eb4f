"""From a lease to what the ranks train: advantages from rewards, references to rows, masks. Metadata only.

The bound is checked once more here: a group whose oldest token is beyond the η of its ticket is our bug.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.algorithms.advantages import Estimator, compute_advantages
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.data_plane.object_store import Rows
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


def group_advantages(estimator: Estimator, groups: Sequence[LeasedGroup]) -> list["np.ndarray[Any, Any]"]:
    """One float32 array [G] a group."""
    rewards = torch.tensor([reward for group in groups for reward in group.meta.rewards], dtype=torch.float32)
    ids = torch.tensor([group.meta.group for group in groups for _ in group.meta.rewards])
    advantages = compute_advantages(estimator, rewards=rewards, group_ids=ids)
    sizes = [len(group.meta.rewards) for group in groups]
    return [part.numpy() for part in torch.split(advantages, sizes)]


def train_groups(
    groups: Sequence[LeasedGroup], *, advantages: Sequence["np.ndarray[Any, Any]"], rows: Sequence[Any]
) -> list[TrainGroup]:
    """What the ranks get: `rows` are references that only the rank that trains the group resolves."""
    return [
        TrainGroup(
            key=group.meta.key,
            rows=ref,
            advantages_G=group_advantages_G,
            sample_mask_G=np.asarray([tokens > 0 for tokens in group.meta.completion_tokens], dtype=np.float32),
            max_staleness_versions=group.max_staleness_versions,
        )
        for group, group_advantages_G, ref in zip(groups, advantages, rows, strict=True)
    ]


def keys_by_store(groups: Sequence[LeasedGroup]) -> dict[str, list[str]]:
    """Keys of the groups' rows by the row store that keeps them."""
    keys: dict[str, list[str]] = {}
    for group in groups:
        keys.setdefault(group.meta.store, []).append(group.meta.key)
    return keys


def zero_variance_share(groups: Sequence[LeasedGroup]) -> float:
    """Share of groups whose rewards are all equal: they teach nothing to a group-relative advantage."""
    return sum(len(set(group.meta.rewards)) == 1 for group in groups) / max(len(groups), 1)


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
