"""A critic's part of a step: what states are worth, token-level advantages from it, and its own training.

What must hold: values and advantages of a step are those of the critic as the step found it; a critic's columns and the
policy's are named by metas of their own, so that neither fetches what only the other reads.
"""

import asyncio
from typing import Any

from asyncrl.algorithms.interfaces import ValueLossFunction
from asyncrl.algorithms.presets import baseline_of
from asyncrl.algorithms.value_loss import ClippedValueLoss, explained_variance
from asyncrl.config.schema import Config
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.errors import ConfigError
from asyncrl.learner.interfaces import Critic
from asyncrl.policy.interfaces import StepReport
from asyncrl.value.estimators import GAE, TokenEstimator, VTrace


class CriticStages:
    """The stages of `critic` as `config.critic` wants them; each returns when the ranks have done it. RowsLost when
    rows are gone."""

    def __init__(self, *, config: Config, critic: Critic) -> None:
        if config.critic is None:
            raise ConfigError("there is a critic, and the configuration has no section `critic`", key="critic")
        self._critic = critic
        self._section, self._learner = config.critic, config.learner
        self._loss: ValueLossFunction = ClippedValueLoss(clip=config.critic.value_clip)
        self._estimator = build_estimator(config)

    @property
    def reads_proximal(self) -> bool:
        """Whether advantages need the log-probs of the step's start."""
        return "prev_logprobs" in self._estimator.reads

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
    """What `algorithm.advantage`, or the preset, and `critic` say."""
    section = config.critic
    assert section is not None
    if baseline_of(config.algorithm) == "vtrace":
        return VTrace(gamma=section.gamma)
    return GAE(
        gamma=section.gamma,
        lam=section.lam,
        value_lam=section.lam if section.value_lam is None else section.value_lam,
        length_alpha=section.length_alpha,
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
