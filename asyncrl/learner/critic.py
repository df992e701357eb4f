"""The critic's part of a step: the values of states, the token-level advantages from them, and the critic's training.

The values and advantages of a step come from the critic's weights at the start of the step. The critic's training and
the policy's training get separate metas (`KVBatchMeta`), so that each fetches only the columns that it reads.
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
from asyncrl.ranks.report import StepReport
from asyncrl.value.estimators import GAE, VTrace
from asyncrl.value.tq_value import TQValue


class CriticStages:
    """Runs the critic's stages with the settings of `config.critic`.

    Each stage returns when all ranks have completed it, and raises RowsLost when rows are lost.
    """

    def __init__(self, *, config: Config, critic: TQValue) -> None:
        if config.critic is None:
            raise ConfigError(
                "the learner got a critic, but the configuration has no section `critic`: add the section, or pass no "
                "critic",
                key="critic",
            )
        self._critic = critic
        self._section, self._learner = config.critic, config.learner
        self._loss: ValueLossFunction = ClippedValueLoss(
            clip=config.critic.value_clip, aggregation=config.critic.aggregation
        )
        self._estimator = build_estimator(config)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the advantage estimator reads."""
        return self._estimator.reads

    def policy_waits(self, step: int) -> bool:
        """Returns whether `step` trains only the critic.

        In the first `critic.warmup_steps` steps, its values are too inaccurate to train the policy with them.
        """
        return step < self._section.warmup_steps

    async def write_values(self, meta: KVBatchMeta) -> None:
        """Writes the column `values` of the rows: the critic's value of each token's state."""
        await asyncio.to_thread(self._critic.get_values_from_meta, meta)

    async def write_advantages(self, meta: KVBatchMeta) -> None:
        """Computes advantages and returns from the rows' `rewards` and `values`, and writes them as columns."""
        await asyncio.to_thread(self._critic.get_advantages_from_meta, meta, self._estimator)

    async def train(self, meta: KVBatchMeta) -> StepReport:
        """Trains the critic on the rows, with as many updates as the policy makes.

        When the rows cannot be divided evenly among updates and ranks, it makes one update with all rows.
        """
        updates = self._learner.updates_per_step
        gbs = meta.size if meta.size % (updates * self._section.ranks) else meta.size // updates
        result: dict[str, Any] = await asyncio.to_thread(self._critic.train_from_meta, meta, self._loss, gbs=gbs)
        report: StepReport = result["report"]
        return report


def build_estimator(config: Config) -> TokenEstimator:
    """Returns the token-level estimator for `algorithm.advantage` (or the preset's) and the section `critic`.

    Settings of `critic` that are unset take the values that the preset's paper published.
    """
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
