"""The stages of one step, between its lease and its ack: advantages, columns, log-probs, critic and policy training.

They depend on the algorithm:

- advantages per sample: filters and advantages, train;
- advantages per token: filters, log-probs, advantages, train;
- a critic: filters, values, log-probs, advantages, train the critic, train the policy.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from asyncrl.algorithms.advantages import Estimator, compute_advantages, varied
from asyncrl.algorithms.baselines import CriticBased, advantage_name, resolve_advantage
from asyncrl.algorithms.filters import masked_samples, scored_samples
from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction
from asyncrl.algorithms.loss import build_loss
from asyncrl.algorithms.presets import advantage_of, published_critic
from asyncrl.algorithms.token_estimators import OUTCOME, TokenEstimator, resolve_estimators
from asyncrl.algorithms.value_loss import ClippedValueLoss, explained_variance
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.config.schema import Config, CriticSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.specs import BRANCH, GENERATED_FIELDS, NO_VERSION
from asyncrl.data_plane.clients import TRAIN_PARTITION
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.sample_ids import samples_of
from asyncrl.errors import ConfigError, StalenessViolation
from asyncrl.learner.records import SampleRecord
from asyncrl.learner.sample_texts import Texts
from asyncrl.metrics.states import StateClock
from asyncrl.policy.step_loss import needs_proximal, needs_reference
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.ranks.named_rows import LIMIT, MASKS_STALE, STEP
from asyncrl.ranks.report import StepReport
from asyncrl.value.estimators import GAE, VTrace
from asyncrl.value.tq_value import TQValue

# Turns a lease into the input of the ranks: filters, advantages from rewards, masks and the names of rows.
#
# The functions use only the metadata of the groups. The rows stay in the data plane.
#
# `check_staleness` checks the staleness bound a last time before training. A group whose oldest token is older than the
# limit η of its ticket is a bug of asyncrl, unless the buffer has extended its deadline (`staleness.on_deadline:
# mask`). The ranks then mask the tokens that are too old, and check the ages of those that are left.

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


@dataclass(kw_only=True)
class Stages:
    """Runs the stages of the steps, with the loss, filters and estimators of the configuration.

    `states` counts the seconds of the learner's process by state. Raises ConfigError if there is a critic, but no
    section `critic` of the configuration.
    """

    config: Config
    policy: TQPolicy
    critic: TQValue | None
    states: StateClock
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._loss = build_loss(self.config)
        self._estimator: Estimator | None = None
        self._by_token: TokenEstimator | None
        if self.critic is None:
            self._estimator, self._by_token = resolve_estimators(advantage_of(self.config.algorithm))
        else:
            section = critic_section(self.config)
            self._by_token = build_estimator(self.config)
            self._value_loss = ClippedValueLoss(clip=section.value_clip, aggregation=section.aggregation)

    @property
    def writes_logprobs(self) -> bool:
        """Whether the objective needs the column `prev_logprobs`, which a stage then writes."""
        return needs_proximal(self._loss, updates=self.config.learner.updates_per_step)

    def policy_waits(self, step: int) -> bool:
        """Returns whether `step` trains only the critic.

        In the first `critic.warmup_steps` steps, its values are too inaccurate to train the policy with them.
        """
        return self.critic is not None and step < critic_section(self.config).warmup_steps

    def judge(self, lease: Lease) -> StepSamples:
        """Returns the filtered samples of a step, with their advantages if these are per sample."""
        return judge_samples(lease, estimator=self._estimator, config=self.config)

    async def train(
        self, meta: KVBatchMeta, samples: StepSamples, *, step: int
    ) -> tuple[StepReport, StepReport | None]:
        """Runs the stages of a step in order and returns the reports of the policy and the critic. While the policy
        waits for the critic, its report has the same numbers, but its weights do not change.

        Raises RowsLost when rows are lost; the policy is then not trained. The critic is trained before the policy, so
        it may be trained already. The remaining rows are then leased again: the critic trains on them a second time,
        and their advantages are computed again.
        """
        policy, critic = self.policy, self.critic
        # A second meta for the same rows. It names the columns that only the estimator and the critic read, so that the
        # policy's training does not fetch them.
        aside = meta.slice(0, meta.size)
        read: frozenset[str] = getattr(self._loss, "columns", frozenset())
        columns = {"sample_mask": samples.mask_B}
        # Some objectives average over prompts (`group_ids`) or imitate rows with a high reward (`rewards`).
        columns |= {"rewards": samples.rewards_B} if "rewards" in read else {}
        columns |= {"group_ids": samples.group_ids_B} if "group_ids" in read else {}
        if self._by_token is None:
            await asyncio.to_thread(policy.write_to_dataplane, meta, {"advantages": samples.advantages_B, **columns})
        else:
            made_of = {OUTCOME: samples.advantages_B} if critic is None else {"rewards": samples.rewards_B}
            await asyncio.to_thread(policy.write_to_dataplane, aside, columns | made_of)
            meta = meta.with_fields(["advantages", *columns])
        with self.states.within("log_probs"):
            await self._score(meta, aside)
        critic_report = None
        if critic is not None:
            ranks = critic_section(self.config).ranks
            critic_report = await self._train(critic.train_from_meta, aside, self._value_loss, ranks=ranks)
        ranks, eval_mode = self.config.learner.ranks, self.policy_waits(step)
        report = await self._train(policy.train_from_meta, meta, self._loss, ranks=ranks, eval_mode=eval_mode)
        return report, critic_report

    async def _score(self, meta: KVBatchMeta, aside: KVBatchMeta) -> None:
        """Writes the columns that the objective reads for each token, and the advantages if they are per token.

        The log-probs come before the advantages, because an estimator may read them.
        """
        policy, critic, by_token = self.policy, self.critic, self._by_token
        reads = () if by_token is None else by_token.reads
        if critic is not None:
            await asyncio.to_thread(critic.get_values_from_meta, aside)
        if needs_reference(self._loss) or "reference_policy_logprobs" in reads:
            await asyncio.to_thread(policy.get_reference_policy_logprobs_from_meta, meta)
        if self.writes_logprobs or "prev_logprobs" in reads:
            await asyncio.to_thread(policy.get_logprobs_from_meta, meta)
        if by_token is not None:
            model: TQPolicy | TQValue = policy if critic is None else critic
            await asyncio.to_thread(model.get_advantages_from_meta, aside, by_token)

    async def _train(
        self,
        train_from_meta: Callable[..., dict[str, Any]],
        meta: KVBatchMeta,
        loss: LossFunction | ValueLossFunction,
        *,
        ranks: int,
        **options: bool,
    ) -> StepReport:
        """Trains the policy or the critic on the rows, and divides the time of the call among the learner's states.

        The report has the seconds of each stage as the ranks measured them. The rest of the call's time is `other`.
        """
        # A last, short step whose rows cannot be divided evenly among updates and ranks is trained in one update.
        updates = self.config.learner.updates_per_step
        gbs = meta.size if meta.size % (updates * ranks) else meta.size // updates
        self.states.enter("forward_backward")
        started_s = self.clock()
        result = await asyncio.to_thread(train_from_meta, meta, loss, gbs=gbs, **options)
        report: StepReport = result["report"]
        elsewhere = {name: report.seconds.get(name, 0.0) for name in ("log_probs", "optimizer")}
        elsewhere["other"] = max(0.0, self.clock() - started_s - sum(report.seconds.values()))
        self.states.enter("other")
        self.states.reattribute("forward_backward", elsewhere)
        return report


# The critic's part of a step: its settings, the estimator of token-level advantages from its values, and its numbers.
#
# `Stages` runs the critic's stages. The values and advantages of a step come from the critic's weights at the start of
# the step. The critic's training and the policy's training get separate metas (`KVBatchMeta`), so that each fetches
# only the columns that it reads.


def critic_section(config: Config) -> CriticSection:
    """Returns the section `critic`. Raises ConfigError if the configuration has none."""
    if config.critic is None:
        raise ConfigError(
            "the learner got a critic, but the configuration has no section `critic`: add the section, or pass no "
            "critic"
        )
    return config.critic


def build_estimator(config: Config) -> TokenEstimator:
    """Returns the token-level estimator for `algorithm.advantage` (or the preset's) and the section `critic`.

    Settings of `critic` that are unset take the values that the preset's paper published.
    """
    section, advantage = critic_section(config), advantage_of(config.algorithm)
    axes = resolve_advantage(advantage)
    assert isinstance(axes, CriticBased)
    if advantage_name(advantage) == "vtrace":
        return VTrace(gamma=section.gamma, kl=axes.kl, whitening=axes)
    published = published_critic(config.algorithm)
    value_lam, length_alpha = section.value_lam, section.length_alpha
    if value_lam is None:
        value_lam = section.lam if published is None else published.value_lam
    if length_alpha is None and published is not None:
        length_alpha = published.length_alpha
    return GAE(
        gamma=section.gamma,
        lam=section.lam,
        value_lam=value_lam,
        length_alpha=length_alpha or None,
        kl=axes.kl,
        whitening=axes,
    )


def critic_numbers(report: StepReport) -> dict[str, float]:
    """Returns `value_loss`, `explained_variance` and `value_clipped_ratio` of a step; empty without a trained token.

    The explained variance uses the values at the start of each token's update. In a step with one update, these are the
    values from which the advantages were computed.
    """
    if not report.loss_metrics:
        return {}
    return {
        "value_loss": report.loss,
        "explained_variance": explained_variance(report.loss_metrics),
        "value_clipped_ratio": report.loss_metrics["value_clipped_ratio"],
    }
