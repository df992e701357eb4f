"""The stages of one step, between its lease and its ack: advantages, columns, log-probs, critic and policy training.

They depend on the algorithm:

- advantages per sample: filters and advantages, train;
- advantages per token: filters, log-probs, advantages, train;
- a critic: filters, values, log-probs, advantages, train the critic, train the policy.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.algorithms.advantages import Estimator
from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction
from asyncrl.algorithms.loss import build_loss
from asyncrl.algorithms.presets import advantage_of
from asyncrl.algorithms.token_estimators import OUTCOME, TokenEstimator, resolve_estimators
from asyncrl.algorithms.value_loss import ClippedValueLoss
from asyncrl.buffer.records import Lease
from asyncrl.config.schema import Config
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.learner.batch import StepSamples, judge_samples
from asyncrl.learner.critic import build_estimator, critic_section
from asyncrl.metrics.states import StateClock
from asyncrl.policy.step_loss import needs_proximal, needs_reference
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.ranks.report import StepReport
from asyncrl.value.tq_value import TQValue


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
