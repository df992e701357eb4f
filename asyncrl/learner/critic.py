"""A critic's part of a step: the values of states, token-level advantages from it, and its own training.

Values and advantages of a step come from the critic as it was at the step's start. The critic's columns and the
policy's are named by metas of their own, so that neither fetches what only the other reads.
"""

import asyncio
from typing import Any

from asyncrl.algorithms.baselines import CriticBased, advantage_name, resolve_advantage
from asyncrl.algorithms.interfaces import ValueLossFunction
from asyncrl.algorithms.presets import advantage_of, published_critic
from asyncrl.algorithms.token_estimators import TokenEstimator
from asyncrl.algorithms.value_loss import ClippedValueLoss, explained_variance
from asyncrl.config.schema import Config
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.errors import ConfigError
from asyncrl.learner.interfaces import Critic
from asyncrl.policy.interfaces import StepReport
from asyncrl.value.estimators import GAE, VTrace


class CriticStages:
    """The stages of `critic` as `config.critic` wants them; each returns when the ranks have done it. RowsLost when
    rows are gone."""

    def __init__(self, *, config: Config, critic: Critic) -> None:
        if config.critic is None:
            raise ConfigError("there is a critic, and the configuration has no section `critic`", key="critic")
        self._critic = critic
        self._section, self._learner = config.critic, config.learner
        self._loss: ValueLossFunction = ClippedValueLoss(
            clip=config.critic.value_clip, aggregation=config.critic.aggregation
        )
        self._estimator = build_estimator(config)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that advantages are made of."""
        return self._estimator.reads

    def policy_waits(self, step: int) -> bool:
        """Whether the policy is not trained at `step`, for the critic has too little to say yet."""
        return step < self._section.warmup_steps

    async def write_values(self, meta: KVBatchMeta) -> None:
        await asyncio.to_thread(self._critic.get_values_from_meta, meta)

    async def write_advantages(self, meta: KVBatchMeta) -> None:
        """Advantages and returns from the rows' `rewards` and `values`."""
        await asyncio.to_thread(self._critic.get_advantages_from_meta, meta, self._estimator)

    async def train(self, meta: KVBatchMeta) -> StepReport:
        """As many updates as the policy makes; one of all rows when they cannot be shared evenly."""
        updates = self._learner.updates_per_step
        gbs = meta.size if meta.size % (updates * self._section.ranks) else meta.size // updates
        result: dict[str, Any] = await asyncio.to_thread(self._critic.train_from_meta, meta, self._loss, gbs=gbs)
        report: StepReport = result["report"]
        return report


def build_estimator(config: Config) -> TokenEstimator:
    """The estimator that `algorithm.advantage`, or the preset, and `critic` ask for."""
    section, advantage = config.critic, advantage_of(config.algorithm)
    assert section is not None
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
    """A trained step's `value_loss`, `explained_variance` and `value_clipped_ratio`; nothing of a step without a
    trained token. Variance is explained by the values that a token's update begins with: in a step of one update those
    that its advantages were made of."""
    if not report.loss_metrics:
        return {}
    return {
        "value_loss": report.loss,
        "explained_variance": explained_variance(report.loss_metrics),
        "value_clipped_ratio": report.loss_metrics["value_clipped_ratio"],
    }
