"""The stages of one step, between its lease and its ack: advantages, columns, log-probs, critic and policy training.

They depend on the algorithm:

- advantages per sample: filters and advantages, train;
- advantages per token: filters, log-probs, advantages, train;
- a critic: filters, values, log-probs, advantages, train the critic, train the policy.
"""

import asyncio
from collections.abc import Awaitable, Callable

from asyncrl.algorithms.advantages import Estimator
from asyncrl.algorithms.filters import build_filters
from asyncrl.algorithms.loss import build_loss
from asyncrl.algorithms.presets import advantage_of
from asyncrl.algorithms.token_estimators import OUTCOME, DiscountedReturns, resolve_estimators
from asyncrl.buffer.records import Lease
from asyncrl.config.schema import Config
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.learner.batch import StepSamples, judge_samples
from asyncrl.learner.critic import CriticStages
from asyncrl.metrics.states import StateClock
from asyncrl.policy.step_loss import needs_proximal, needs_reference
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.ranks.report import StepReport
from asyncrl.value.tq_value import TQValue


class Stages:
    """Runs the stages of the steps, with the loss, filters and estimators of the configuration.

    `states` counts the seconds of the learner's process by state.
    """

    def __init__(
        self,
        *,
        config: Config,
        policy: TQPolicy,
        critic: TQValue | None,
        states: StateClock,
        clock: Callable[[], float],
    ) -> None:
        self._learner = config.learner
        self._policy = policy
        self._critic = None if critic is None else CriticStages(config=config, critic=critic)
        self._states = states
        self._clock = clock
        self._loss = build_loss(config)
        self._filters = build_filters(config)
        self._estimator: Estimator | None = None
        self._by_token: DiscountedReturns | None = None
        if critic is None:  # with a critic, `CriticStages` has the estimator
            self._estimator, self._by_token = resolve_estimators(advantage_of(config.algorithm))

    @property
    def writes_logprobs(self) -> bool:
        """Whether the objective needs the column `prev_logprobs`, which a stage then writes."""
        return needs_proximal(self._loss, updates=self._learner.updates_per_step)

    def policy_waits(self, step: int) -> bool:
        """Returns whether `step` trains only the critic."""
        return self._critic is not None and self._critic.policy_waits(step)

    def judge(self, lease: Lease) -> StepSamples:
        """Returns the filtered samples of a step, with their advantages if these are per sample."""
        return judge_samples(lease, estimator=self._estimator, filters=self._filters)

    async def train(
        self, meta: KVBatchMeta, samples: StepSamples, *, step: int
    ) -> tuple[StepReport, StepReport | None]:
        """Runs the stages of a step in order and returns the reports of the policy and the critic.

        Raises RowsLost when rows are lost; the policy is then not trained. The critic is trained before the policy, so
        it may be trained already. The remaining rows are then leased again: the critic trains on them a second time,
        and their advantages are computed again.
        """
        policy, critic = self._policy, self._critic
        # A second meta for the same rows. It names the columns that only the estimator and the critic read, so that the
        # policy's training does not fetch them.
        aside = meta.slice(0, meta.size)
        read: frozenset[str] = getattr(self._loss, "columns", frozenset())
        columns = {"sample_mask": samples.mask_B}
        # Some objectives average over prompts (`group_ids`) or imitate rows with a high reward (`rewards`).
        columns |= {"rewards": samples.rewards_B} if "rewards" in read else {}
        columns |= {"group_ids": samples.group_ids_B} if "group_ids" in read else {}
        if critic is None and self._by_token is None:
            await asyncio.to_thread(policy.write_to_dataplane, meta, {"advantages": samples.advantages_B, **columns})
        else:
            made_of = {OUTCOME: samples.advantages_B} if critic is None else {"rewards": samples.rewards_B}
            await asyncio.to_thread(policy.write_to_dataplane, aside, columns | made_of)
            meta = meta.with_fields(["advantages", *columns])
        with self._states.within("log_probs"):
            await self._score(meta, aside)
        critic_report = None
        if critic is not None:
            critic_report = await self._timed(critic.train(aside))
        return await self._timed(self._train_policy(meta, eval_mode=self.policy_waits(step))), critic_report

    async def _score(self, meta: KVBatchMeta, aside: KVBatchMeta) -> None:
        """Writes the columns that the objective reads for each token, and the advantages if they are per token.

        The log-probs come before the advantages, because an estimator may read them.
        """
        policy, critic = self._policy, self._critic
        reads: tuple[str, ...] = ()
        if critic is not None:
            reads = critic.reads
            await critic.write_values(aside)
        elif self._by_token is not None:
            reads = self._by_token.reads
        if needs_reference(self._loss) or "reference_policy_logprobs" in reads:
            await asyncio.to_thread(policy.get_reference_policy_logprobs_from_meta, meta)
        if self.writes_logprobs or "prev_logprobs" in reads:
            await asyncio.to_thread(policy.get_logprobs_from_meta, meta)
        if critic is not None:
            await critic.write_advantages(aside)
        elif self._by_token is not None:
            await asyncio.to_thread(policy.get_advantages_from_meta, aside, self._by_token)

    async def _train_policy(self, meta: KVBatchMeta, *, eval_mode: bool) -> StepReport:
        """Trains the policy on the rows. In eval mode it computes the same report but changes no weights."""
        updates = self._learner.updates_per_step
        # A last, short step whose rows cannot be divided evenly among updates and ranks is trained in one update.
        gbs = meta.size if meta.size % (updates * self._learner.ranks) else meta.size // updates
        result = await asyncio.to_thread(self._policy.train_from_meta, meta, self._loss, eval_mode=eval_mode, gbs=gbs)
        report: StepReport = result["report"]
        return report

    async def _timed(self, training: Awaitable[StepReport]) -> StepReport:
        """Awaits a training call and divides its time among the learner's states. Returns the report of the call.

        The report has the seconds of each stage as the ranks measured them. The rest of the call's time is `other`.
        """
        self._states.enter("forward_backward")
        started_s = self._clock()
        report = await training
        elsewhere = {name: report.seconds.get(name, 0.0) for name in ("log_probs", "optimizer")}
        elsewhere["other"] = max(0.0, self._clock() - started_s - sum(report.seconds.values()))
        self._states.enter("other")
        self._states.reattribute("forward_backward", elsewhere)
        return report
