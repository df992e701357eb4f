"""From a lease to what the ranks train: filters, advantages from rewards, masks, names of rows. Metadata only.

The bound is checked once more here: a group whose oldest token is beyond the η of its ticket is our bug.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.algorithms.advantages import Estimator, Samples, check_rewards, compute_advantages, varied
from asyncrl.algorithms.filters import SampleFilters
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.clients import TRAIN_PARTITION
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.partitions import samples_of
from asyncrl.errors import StalenessViolation
from asyncrl.generation.rollout import GENERATED_FIELDS
from asyncrl.learner.records import SampleRecord
from asyncrl.policy.meta_rank import LIMIT, STEP


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
    """What filters and estimator make of a step: one value a sample [B], group after group in the lease's order.

    `rewards_B` are the filters'; without `advantages_B` a critic makes some of them, a value a token. Where the
    policy's ranks make token-level advantages, `advantages_B` is their column `outcome_advantages`.
    `zero_variance_ratio` is the share of groups whose rewards, as the estimator sees them, are all equal; of those with
    equal rewards as they were scored, `all_right_ratio` is the share above 0 and `all_wrong_ratio` that of the others;
    all three are NaN when no group has two samples that could differ;
    `overlong_ratio` that of samples cut at their limit; `masked_ratio` that of samples with a mask of 0, by a filter or
    because they have no token.
    """

    rewards_B: torch.Tensor
    group_ids_B: torch.Tensor
    advantages_B: torch.Tensor | None
    mask_B: torch.Tensor
    zero_variance_ratio: float
    all_right_ratio: float
    all_wrong_ratio: float
    overlong_ratio: float
    masked_ratio: float


def judge_samples(groups: Sequence[LeasedGroup], *, estimator: Estimator | None, filters: SampleFilters) -> StepSamples:
    """Advantages and masks of the whole step at once, so that batch statistics are those of all ranks. No estimator: a
    critic's ranks have one. RunError when a reward or an advantage is not finite."""
    sizes = [len(group.meta.rewards) for group in groups]
    agreed = [group.meta.rewards[0] for group in groups if len(set(group.meta.rewards)) == 1]
    ids_N = torch.tensor([group.meta.group for group in groups for _ in group.meta.rewards])
    tokens_N = torch.tensor([tokens for group in groups for tokens in group.meta.completion_tokens])
    truncated_N = torch.tensor([truncated for group in groups for truncated in group.meta.truncated])
    rewards_N = filters.shaped_rewards(
        torch.tensor([reward for group in groups for reward in group.meta.rewards], dtype=torch.float32),
        truncated_N=truncated_N,
        completion_tokens_N=tokens_N,
    )
    check_rewards(rewards_N)
    samples = Samples(rewards_N=rewards_N, group_ids_N=ids_N, completion_tokens_N=tokens_N)
    advantages_N = None if estimator is None else compute_advantages(estimator, samples)
    zero_variance_N = ~varied(estimator, samples)
    compared = len(groups) if max(sizes) > 1 else math.nan
    mask_N = (tokens_N > 0) & ~filters.masked(zero_variance_N=zero_variance_N, truncated_N=truncated_N)
    return StepSamples(
        rewards_B=rewards_N,
        group_ids_B=ids_N,
        advantages_B=advantages_N,
        mask_B=mask_N.float(),
        zero_variance_ratio=sum(bool(part.all()) for part in torch.split(zero_variance_N, sizes)) / compared,
        all_right_ratio=sum(reward > 0 for reward in agreed) / compared,
        all_wrong_ratio=sum(reward <= 0 for reward in agreed) / compared,
        overlong_ratio=float(truncated_N.float().mean()),
        masked_ratio=float((~mask_N).float().mean()),
    )


def sample_ids(group: LeasedGroup) -> list[str]:
    """Keys of a group's rows in the data plane."""
    return samples_of(group.meta.key, count=len(group.meta.rewards))


def step_meta(lease: Lease) -> KVBatchMeta:
    """Names the rows of a lease, with all that the ranks must know of each: its length, and the limit of its ticket."""
    samples = [(group, i) for group in lease.groups for i in range(len(group.meta.rewards))]
    return KVBatchMeta(
        partition_id=TRAIN_PARTITION,
        task_name="train",
        sample_ids=[sample for group in lease.groups for sample in sample_ids(group)],
        fields=list(GENERATED_FIELDS),
        sequence_lengths=[group.meta.prompt_tokens + group.meta.completion_tokens[i] for group, i in samples],
        extra_info={STEP: lease.step},
        tags=[{LIMIT: group.max_staleness_versions} for group, _ in samples],
    )


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


class Decode(Protocol):
    """The text of token ids; `special`: with special tokens."""

    def __call__(self, ids: Sequence[int], special: bool = False) -> str: ...


def sample_record(
    leased: LeasedGroup,
    rows: BatchedDataDict,
    *,
    step: int,
    row: int,
    sample: int,
    decode: Decode,
) -> SampleRecord:
    """One rollout of a group in full, from row `row` of `rows`: `input_ids`, `weight_versions`, `advantages`, of which
    the mean over the completion is kept when there is one a token, and the log-probs that are among them."""
    prompt, tokens = leased.meta.prompt_tokens, leased.meta.completion_tokens[sample]
    cut = slice(prompt, prompt + tokens)
    advantage = rows["advantages"][row]
    if advantage.ndim:
        advantage = advantage[cut].sum() / max(tokens, 1)
    spans = tuple(sorted(Counter(rows["weight_versions"][row, cut].tolist()).items()))
    logprobs = {
        name: tuple(rows[name][row, cut].tolist()) for name in ("generation_logprobs", "prev_logprobs") if name in rows
    }
    return SampleRecord(
        step=step,
        group=leased.meta.group,
        prompt=leased.task.prompt,
        rendered_prompt=decode(rows["input_ids"][row, :prompt].tolist(), special=True),
        completion=decode(rows["input_ids"][row, cut].tolist()),
        answer=leased.task.answer,
        reward=leased.meta.rewards[sample],
        advantage=float(advantage),
        version_spans=spans,
        staleness_versions=step - spans[0][0] if spans else 0,
        truncated=leased.meta.truncated[sample],
        **logprobs,
    )
