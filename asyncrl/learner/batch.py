"""Turns a lease into the input of the ranks: filters, advantages from rewards, masks and the names of rows.

The functions use only the metadata of the groups. The rows stay in the data plane.

`check_staleness` checks the staleness bound a last time before training. A group whose oldest token is older than the
limit η of its ticket is a bug of asyncrl, unless the buffer has extended its deadline (`staleness.on_deadline: mask`).
The ranks then mask the tokens that are too old, and check the ages of those that are left.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from asyncrl.algorithms.advantages import Estimator, compute_advantages, varied
from asyncrl.algorithms.filters import masked_samples, scored_samples
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.specs import BRANCH, GENERATED_FIELDS, NO_VERSION
from asyncrl.data_plane.clients import TRAIN_PARTITION
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.sample_ids import samples_of
from asyncrl.errors import StalenessViolation
from asyncrl.learner.records import SampleRecord
from asyncrl.learner.sample_texts import Texts
from asyncrl.ranks.named_rows import LIMIT, MASKS_STALE, STEP

SAMPLE_COLUMNS = ("input_ids", "weight_versions", "token_mask", "sample_mask", "advantages")
"""The columns of rows that `sample_record` needs. It also reads `branch_ids`, if the rows have it."""


def check_staleness(lease: Lease) -> None:
    """Raises StalenessViolation when a leased group is staler than the limit of its ticket, or later than its
    deadline."""
    for group in lease.groups:
        staleness = lease.step - group.meta.oldest
        if lease.step > group.deadline:
            raise StalenessViolation(
                f"group {group.meta.key} is leased at step {lease.step}, but its deadline was step {group.deadline}. "
                "This is a bug of asyncrl in the lease rule: report it with the run's directory"
            )
        if staleness > group.max_staleness_versions and not group.extended:
            raise StalenessViolation(
                f"group {group.meta.key} is {staleness} versions old at step {lease.step}, but its ticket allows at "
                f"most {group.max_staleness_versions} versions. This is a bug of asyncrl in the admission rule or the "
                "lease rule: report it with the run's directory"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """The result of the filters and the advantage estimator for one step.

    Tensors have the shape [B], one value per sample. Groups are in the order of the lease, and the samples of a group
    are next to each other.

    - `rewards_B`: rewards after the filters, such as the penalty on overlong samples; 0 for a sample whose reward
      failed.
    - `advantages_B`: advantages per sample. None when the run has a critic: the critic computes one advantage per token
      from `rewards_B`. When the policy's ranks compute token-level advantages, they read `advantages_B` as the column
      `outcome_advantages`.
    - `mask_B`: 1.0 for a sample that is trained, else 0.0.

    `numbers` has the step's numbers by their names in `asyncrl.metrics.numbers`:

    - `zero_variance_ratio`: the share of groups whose rewards, as the estimator compares them, are all equal; 0 for a
      critic, and for a built-in estimator that does not compare the samples of a group.
    - `all_right_ratio`: the share of groups whose scored rewards (before the filters) are all equal and above 0.
    - `all_wrong_ratio`: the share of groups whose scored rewards are all equal and not above 0.
    - `truncated_ratio`: the share of samples that were truncated at their length limit.
    - `masked_samples_ratio`: the share of samples with a mask of 0, because a filter masks them, because they have no
      token that may be trained, or because their reward failed.
    - `failed_samples_ratio`: the share of samples whose reward failed (`environment.on_error: mask`).
    - `stale_tokens`: the number of tokens that are masked because they are older than η.
    - `stale_samples`: the number of samples that have no token that is not older than η.

    The three ratios over groups are NaN when every group has one sample only: its reward has nothing to differ from.
    """

    rewards_B: torch.Tensor
    group_ids_B: torch.Tensor
    advantages_B: torch.Tensor | None
    mask_B: torch.Tensor
    numbers: dict[str, float]


def judge_samples(lease: Lease, *, estimator: Estimator | None, config: Config) -> StepSamples:
    """Computes the advantages and masks of all samples of a step.

    A sample whose tokens are all too old to train is masked, but its reward still counts in the advantages. A sample
    whose reward failed is masked, and the estimator does not see it: it counts in no baseline and no statistic.

    The whole step is computed in one call, so that batch statistics cover the samples of all ranks. `estimator` is None
    when the run has a critic, because then the critic's ranks compute the advantages. Raises RunError when a reward or
    an advantage is not finite.

    Legend: N samples of the step, K of them have a reward.
    """
    groups = lease.groups
    rewards = [reward for group in groups for reward in group.meta.rewards]
    agreed = [known[0] for known in (group.meta.known_rewards for group in groups) if len(set(known)) == 1]
    scored_N = torch.tensor([reward is not None for reward in rewards])
    ids_N = torch.tensor([group.meta.group for group in groups for _ in group.meta.rewards])
    tokens_N = torch.tensor([tokens for group in groups for tokens in group.meta.completion_tokens])
    stale_N = torch.tensor([tokens for group in groups for tokens in group.stale_tokens(lease.step)])
    truncated_N = torch.tensor([truncated for group in groups for truncated in group.meta.truncated])
    samples = scored_samples(
        rewards,
        group_ids=ids_N.tolist(),
        completion_tokens=tokens_N.tolist(),
        truncated=truncated_N.tolist(),
        components=_components(groups),
        config=config,
    )
    rewards_N = torch.zeros(len(rewards)).masked_scatter(scored_N, samples.rewards_N)
    advantages_N = None
    if estimator is not None:
        advantages_N = torch.zeros(len(rewards)).masked_scatter(scored_N, compute_advantages(estimator, samples))
    # A sample without a reward must not hide that all others of its group are equal.
    zero_variance_N = torch.ones_like(scored_N).masked_scatter(scored_N, ~varied(estimator, samples))
    compared = len(groups) if max(len(group.meta.known_rewards) for group in groups) > 1 else math.nan
    mask_N = scored_N & (tokens_N > stale_N)
    mask_N &= ~masked_samples(zero_variance_N=zero_variance_N, truncated_N=truncated_N, config=config)
    sizes = [len(group.meta.rewards) for group in groups]
    return StepSamples(
        rewards_B=rewards_N,
        group_ids_B=ids_N,
        advantages_B=advantages_N,
        mask_B=mask_N.float(),
        numbers={
            "zero_variance_ratio": sum(bool(part.all()) for part in torch.split(zero_variance_N, sizes)) / compared,
            "all_right_ratio": sum(reward > 0 for reward in agreed) / compared,
            "all_wrong_ratio": sum(reward <= 0 for reward in agreed) / compared,
            "truncated_ratio": float(truncated_N.float().mean()),
            "masked_samples_ratio": float((~mask_N).float().mean()),
            "failed_samples_ratio": float((~scored_N).float().mean()),
            "stale_tokens": int(stale_N.sum()),
            "stale_samples": int(((stale_N > 0) & (stale_N == tokens_N)).sum()),
        },
    )


def _components(groups: Sequence[LeasedGroup]) -> dict[str, list[float | None]]:
    """Returns the components of the rewards by name, each with N values; None for one that a sample lacks."""
    names = dict.fromkeys(name for group in groups for name in group.meta.components)
    return {
        name: [
            value for group in groups for value in group.meta.components.get(name, (None,) * len(group.meta.rewards))
        ]
        for name in names
    }


def sample_ids(group: LeasedGroup) -> list[str]:
    """Returns the keys of a group's rows in the data plane, one per sample."""
    return samples_of(group.meta.key, count=len(group.meta.rewards))


def step_meta(lease: Lease, *, extra: Sequence[str] = ()) -> KVBatchMeta:
    """Returns the names of a lease's rows, with each row's length in tokens and the staleness limit of its ticket. The
    rows of extended groups are marked: the ranks mask their tokens beyond the limit. `extra` are the columns that only
    the rows of some runs have (`Config.extra_columns`)."""
    samples = [(group, tokens) for group in lease.groups for tokens in group.meta.row_tokens]
    return KVBatchMeta(
        partition_id=TRAIN_PARTITION,
        task_name="train",
        sample_ids=[sample for group in lease.groups for sample in sample_ids(group)],
        fields=[*GENERATED_FIELDS, *extra],
        sequence_lengths=[tokens for _, tokens in samples],
        extra_info={STEP: lease.step},
        tags=[
            {LIMIT: group.max_staleness_versions} | ({MASKS_STALE: True} if group.extended else {})
            for group, _ in samples
        ],
    )


def counts_by_staleness(lease: Lease) -> dict[str, dict[int, int]]:
    """Returns three histograms that map a number of versions to a number of groups.

    `groups` is the staleness at this step, without tokens that are masked because they are older than η. Apart from
    these, it is the sum of `in_flight` (from the oldest token until the group was committed) and `in_buffer` (from the
    commit until this step).
    """
    groups = lease.groups
    return {
        "groups": Counter(min(lease.step - group.meta.oldest, group.max_staleness_versions) for group in groups),
        "in_flight": Counter(group.ready_step - group.meta.oldest for group in groups),
        "in_buffer": Counter(lease.step - group.ready_step for group in groups),
    }


def sample_record(
    leased: LeasedGroup,
    task: Task,
    rows: BatchedDataDict,
    *,
    step: int,
    row: int,
    sample: int,
    texts: Texts,
) -> SampleRecord:
    """Returns the full record of sample `sample` of a group with this task. Its data is row `row` of `rows`.

    `rows` needs `SAMPLE_COLUMNS`. When there is one advantage per token, the record keeps their mean over the
    completion. Tokens of an extended group that are older than its limit are not trained: the ranks mask them
    (`asyncrl.ranks.batching`). The record contains `generation_logprobs` and `prev_logprobs` when
    `rows` has these columns.
    """
    prompt, tokens = leased.meta.prompt_tokens, leased.meta.completion_tokens[sample]
    cut = slice(prompt, leased.meta.row_tokens[sample])
    advantage = rows["advantages"][row]
    if advantage.ndim:
        advantage = advantage[cut].sum() / max(tokens, 1)
    versions_S = rows["weight_versions"][row, cut]
    trained_S = (rows["token_mask"][row, cut] > 0) & (rows["sample_mask"][row] > 0)
    if leased.extended:
        trained_S &= versions_S >= step - leased.max_staleness_versions
    versions = versions_S.tolist()
    sampled = [version for version in versions if version != NO_VERSION]
    answered = turns(versions)
    last_S = rows["input_ids"][row, cut][-answered[-1][1] :] if answered and answered[-1][1] else []
    spans = tuple((version, len([*run])) for version, run in groupby(sampled))
    logprobs = {
        name: tuple(rows[name][row, cut].tolist()) for name in ("generation_logprobs", "prev_logprobs") if name in rows
    }
    return SampleRecord(
        step=step,
        group=leased.meta.group,
        row=task.row,
        part=task.part,
        prompt=task.prompt,
        metadata=task.metadata,
        rendered_prompt=texts.tokens(rows["input_ids"][row, :prompt].tolist()),
        completion=texts.answer(rows["input_ids"][row, cut].tolist(), task.part),
        tokens=tuple(texts.tokens([token]) for token in rows["input_ids"][row, cut].tolist()),
        answer=task.answer,
        reward=leased.meta.rewards[sample],
        components={name: values[sample] for name, values in leased.meta.components.items()},
        advantage=float(advantage),
        version_spans=spans,
        scored=texts.last_answer([int(token) for token in last_S], task.part),
        turns=answered if leased.meta.read_tokens else (),
        forks=forks(rows[BRANCH][row, cut]) if BRANCH in rows else (),
        trained_spans=tuple((trained, len([*run])) for trained, run in groupby(trained_S.tolist())),
        staleness_versions=step - min(sampled, default=step),
        truncated=leased.meta.truncated[sample],
        **logprobs,
    )


def forks(branch_ids_S: torch.Tensor) -> tuple[int, ...]:
    """Returns the places at which a branch begins, without the first one.

    >>> forks(torch.tensor([0, 0, 1, 1]))
    (2,)
    """
    return tuple(((branch_ids_S.diff() != 0).nonzero().flatten() + 1).tolist())


def turns(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the turns of an episode after its prompt: pairs of the number of tokens that it read, and the number that
    the model then sampled. A token that was read has no version.

    >>> turns([3, 3, NO_VERSION, 4])
    ((0, 2), (1, 1))
    """
    found: list[tuple[int, int]] = []
    for sampled, run in groupby(version != NO_VERSION for version in versions):
        length = len([*run])
        if sampled and found and not found[-1][1]:
            found[-1] = (found[-1][0], length)
        else:
            found.append((0, length) if sampled else (length, 0))
    return tuple(found)
