"""The critic's part of a step: its settings, the estimator of token-level advantages from its values, and its numbers.

`Stages` runs the critic's stages. The values and advantages of a step come from the critic's weights at the start of
the step. The critic's training and the policy's training get separate metas (`KVBatchMeta`), so that each fetches only
the columns that it reads.
"""

from asyncrl.algorithms.baselines import CriticBased, advantage_name, resolve_advantage
from asyncrl.algorithms.presets import advantage_of, published_critic
from asyncrl.algorithms.token_estimators import TokenEstimator
from asyncrl.algorithms.value_loss import explained_variance
from asyncrl.config.schema import Config, CriticSection
from asyncrl.errors import ConfigError
from asyncrl.ranks.report import StepReport
from asyncrl.value.estimators import GAE, VTrace


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
