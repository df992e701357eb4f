"""The stages of one step, between its lease and its ack: advantages, columns, log-probs, critic and policy training.

They depend on the algorithm:

- advantages per sample: filters and advantages, train;
- advantages per token: filters, log-probs, advantages, train;
- a critic: filters, values, log-probs, advantages, train the critic, train the policy.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from asyncrl.algorithms.advantages import Estimator, compute_advantages, varied
from asyncrl.algorithms.filters import masked_samples, scored_samples
from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction
from asyncrl.algorithms.presets import advantage_of
from asyncrl.algorithms.token_estimators import OUTCOME, TokenEstimator, resolve_estimators
from asyncrl.algorithms.value_loss import ClippedValueLoss
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.config.schema import Config
from asyncrl.data.specs import GENERATED_FIELDS
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.rows import TRAIN_PARTITION
from asyncrl.data_plane.sample_ids import samples_of
from asyncrl.errors import StalenessViolation
from asyncrl.learner.penalty_control import next_loss
from asyncrl.learner.witnessed_step import Witnessed, is_witnessed, read_token_findings, without_formula, witnessed
from asyncrl.metrics.states import StateClock
from asyncrl.policy.step_loss import needs_proximal, needs_reference
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.ranks.named_rows import LIMIT, MASKS_STALE, STEP
from asyncrl.ranks.report import StepReport
from asyncrl.ranks.witnessed import WITNESS
from asyncrl.value.estimators import critic_estimator, critic_section
from asyncrl.value.tq_value import TQValue
from asyncrl.witness.judge import worst

logger = logging.getLogger(__name__)

# Turns a lease into the input of the ranks: filters, advantages from rewards, masks and the names of rows.
#
# The functions use only the metadata of the groups. The rows stay in the data plane.
#
# `check_staleness` checks the staleness bound of each group, and the ranks later that of each token. A group whose
# oldest token is older than the limit η of its ticket is a bug of asyncrl, unless the buffer has extended its deadline
# (`staleness.on_deadline: mask`; with the default, the learner waits instead). In such a group, the ranks mask the
# tokens that are too old.


def check_staleness(lease: Lease) -> None:
    """Raises StalenessViolation when a group is staler than the limit of its ticket, or leased after its deadline."""
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
    - `group_ids_B`: the number of each sample's group.
    - `advantages_B`: advantages per sample. None when the run has a critic: the critic computes one advantage per token
      from `rewards_B`. When the policy's ranks compute token-level advantages, they read `advantages_B` as the column
      `outcome_advantages`.
    - `mask_B`: 1.0 for a sample that is trained, else 0.0.
    - `witnessed`: the drawn group, which is computed a second time; None in a step that is not witnessed.

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
    - `stale_samples`: the number of samples of which all tokens are older than η.

    The three ratios over groups are NaN when no group has two samples with a reward, because a single reward has
    nothing to differ from.
    """

    rewards_B: torch.Tensor
    group_ids_B: torch.Tensor
    advantages_B: torch.Tensor | None
    mask_B: torch.Tensor
    numbers: dict[str, float]
    witnessed: Witnessed | None = None


def prepare_samples(lease: Lease, *, estimator: Estimator | None, config: Config) -> StepSamples:
    """Computes the advantages and masks of all samples of a step.

    A sample whose tokens are all too old to train is masked, but its reward still counts in the advantages. A sample
    whose reward failed is masked, and the estimator does not see it: it counts in no baseline and no statistic.

    The whole step is computed in one call, so that batch statistics cover the samples of all ranks. `estimator` is None
    when the run has a critic, because then the critic's ranks compute the advantages. Raises RunError when a reward or
    an advantage is not finite.

    Legend: N samples of the step. `scored_samples` leaves out those without a reward.
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


@dataclass(kw_only=True)
class Stages:
    """Runs the stages of the steps, with the filters and estimators of the configuration.

    `loss` is the loss of the next step (`asyncrl.learner.penalty_control`). `states` counts the seconds of the
    learner's process by state. Raises ConfigError if there is a critic, but no section `critic` of the configuration.
    """

    config: Config
    policy: TQPolicy
    critic: TQValue | None
    states: StateClock
    loss: LossFunction
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._estimator: Estimator | None = None
        self._by_token: TokenEstimator | None
        self._is_first = True
        self._passes_parts = True
        if self.critic is None:
            self._estimator, self._by_token = resolve_estimators(advantage_of(self.config.algorithm))
        else:
            self._critic = critic_section(self.config)
            self._by_token = critic_estimator(self.config)
            self._value_loss = ClippedValueLoss(clip=self._critic.value_clip, aggregation=self._critic.aggregation)
        if self.config.witness.every_steps:
            for words in without_formula(self.loss, self.config):
                logger.info("%s", words)

    @property
    def writes_logprobs(self) -> bool:
        """Whether the objective needs the column `prev_logprobs`, the policy's log-probs before the step. The stage
        `log_probs` then writes this column."""
        return needs_proximal(self.loss, updates=self.config.learner.updates_per_step)

    def trains_only_critic(self, step: int) -> bool:
        """Returns whether `step` trains only the critic.

        In the first `critic.warmup_steps` steps, the critic's values are too inaccurate to train the policy with them.
        """
        return self.critic is not None and step < self._critic.warmup_steps

    def prepare(self, lease: Lease) -> StepSamples:
        """Returns the samples of a step after the filters, with their advantages if these are per sample. In a step
        that is witnessed, also draws the group that is computed a second time."""
        samples = prepare_samples(lease, estimator=self._estimator, config=self.config)
        only_critic = self.trains_only_critic(lease.step)
        if only_critic or not is_witnessed(lease.step, first=self._is_first, config=self.config):
            return samples
        rows = self._rows_per_update(len(samples.mask_B), ranks=self.config.learner.ranks)
        drawn = witnessed(
            lease, every_part=self._passes_parts, estimator=self._estimator, config=self.config, rows_per_update=rows
        )
        return replace(samples, witnessed=drawn)

    async def train(
        self, meta: KVBatchMeta, samples: StepSamples, *, step: int
    ) -> tuple[StepReport, StepReport | None]:
        """Runs the stages of a step in order and returns the reports of the policy and the critic. During
        `critic.warmup_steps`, the policy's report has the numbers of any other step, but its weights do not change.

        Raises RowsLost when rows are lost; the policy is then not trained. The critic is trained before the policy, so
        it may be trained already. The groups whose rows remain are leased again: the critic trains on them a second
        time, and their advantages are computed again.
        """
        policy, critic = self.policy, self.critic
        # A second meta for the same rows. Columns that only the estimator and the critic read are added to
        # `scoring_meta` and not to `meta`, so that the policy's training does not fetch them.
        scoring_meta = meta.slice(0, meta.size)
        read: frozenset[str] = getattr(self.loss, "columns", frozenset())
        columns = {"sample_mask": samples.mask_B}
        # Some objectives average over prompts (`group_ids`) or imitate rows with a high reward (`rewards`).
        columns |= {"rewards": samples.rewards_B} if "rewards" in read else {}
        columns |= {"group_ids": samples.group_ids_B} if "group_ids" in read else {}
        columns |= {} if samples.witnessed is None else {WITNESS: samples.witnessed.numbers_B}
        if self._by_token is None:
            await asyncio.to_thread(policy.write_to_dataplane, meta, {"advantages": samples.advantages_B, **columns})
        else:
            outcome = {OUTCOME: samples.advantages_B} if critic is None else {"rewards": samples.rewards_B}
            await asyncio.to_thread(policy.write_to_dataplane, scoring_meta, columns | outcome)
            meta = meta.with_fields(["advantages", *columns])
        with self.states.within("log_probs"):
            await self._score(meta, scoring_meta)
        findings = await asyncio.to_thread(
            read_token_findings, samples.witnessed, scoring_meta, self._by_token, read=policy.read_from_dataplane
        )
        critic_report = None
        if critic is not None:
            critic_report = await self._train(
                critic.train_from_meta, scoring_meta, self._value_loss, ranks=self._critic.ranks
            )
        report = await self._train(
            policy.train_from_meta,
            meta,
            self.loss,
            ranks=self.config.learner.ranks,
            eval_mode=self.trains_only_critic(step),
            witness=None if samples.witnessed is None else samples.witnessed.request,
        )
        self._is_first = self._is_first and self.trains_only_critic(step)
        self.loss = next_loss(self.loss, report.kl_nats, step=step, config=self.config)
        self._passes_parts = self._passes_parts and "gradient" not in report.findings
        return replace(report, findings=worst([*report.findings.values(), *findings])), critic_report

    async def _score(self, meta: KVBatchMeta, scoring_meta: KVBatchMeta) -> None:
        """Writes the columns that the objective reads for each token, and the advantages if they are per token.

        The log-probs come before the advantages, because an estimator may read them.
        """
        policy, critic, by_token = self.policy, self.critic, self._by_token
        reads = () if by_token is None else by_token.reads
        if critic is not None:
            await asyncio.to_thread(critic.get_values_from_meta, scoring_meta)
        if needs_reference(self.loss) or "reference_policy_logprobs" in reads:
            await asyncio.to_thread(policy.get_reference_policy_logprobs_from_meta, meta)
        if self.writes_logprobs or "prev_logprobs" in reads:
            await asyncio.to_thread(policy.get_logprobs_from_meta, meta)
        if by_token is not None:
            model: TQPolicy | TQValue = policy if critic is None else critic
            await asyncio.to_thread(model.get_advantages_from_meta, scoring_meta, by_token)

    async def _train(
        self,
        train_from_meta: Callable[..., dict[str, Any]],
        meta: KVBatchMeta,
        loss: LossFunction | ValueLossFunction,
        *,
        ranks: int,
        **options: Any,
    ) -> StepReport:
        """Trains the policy or the critic on the rows, and divides the time of the call among the learner's states.

        The report has the seconds of each stage as the ranks measured them. The rest of the call's time is `other`.
        """
        gbs = self._rows_per_update(meta.size, ranks=ranks)
        self.states.enter("forward_backward")
        started_s = self.clock()
        result = await asyncio.to_thread(train_from_meta, meta, loss, gbs=gbs, **options)
        report: StepReport = result["report"]
        elsewhere = {name: report.seconds.get(name, 0.0) for name in ("log_probs", "optimizer")}
        elsewhere["other"] = max(0.0, self.clock() - started_s - sum(report.seconds.values()))
        self.states.enter("other")
        self.states.reattribute("forward_backward", elsewhere)
        return report

    def _rows_per_update(self, rows: int, *, ranks: int) -> int:
        # A last, short step whose rows cannot be divided evenly among updates and ranks is trained in one update.
        updates = self.config.learner.updates_per_step
        return rows if rows % (updates * ranks) else rows // updates
