"""Advantages and returns for each token, computed on the critic's ranks from one reward for each row and the critic's
values.

Legend: B rows, S tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncrl.algorithms.baselines import CriticBased, Whitening, advantage_name, resolve_advantage
from asyncrl.algorithms.presets import advantage_of, published_critic
from asyncrl.algorithms.returns import TokenAdvantages, gae, length_adaptive_lambda, vtrace
from asyncrl.algorithms.token_estimators import TokenEstimator, token_rewards
from asyncrl.config.schema import Config, CriticSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError

_READS = ("input_lengths", "token_mask", "sample_mask", "rewards", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE(TokenEstimator):
    """Generalised advantage estimation (`gae`): advantages use `lam`, and returns use `value_lam` (VC-PPO, 2503.01491).
    Returns with λ = 1 give an unbiased critic over long sequences. Advantages with λ < 1 have less variance.

    If `length_alpha` is set, `length_adaptive_lambda` replaces `lam`. With `kl`, the rows must also have the columns
    `prev_logprobs` and `reference_policy_logprobs`.
    """

    columns: ClassVar[tuple[str, ...]] = _READS
    gamma: float
    lam: float
    value_lam: float
    length_alpha: float | None = None
    whitening: Whitening = CriticBased()  # noqa: RUF009 (frozen)

    def __call__(self, data: BatchedDataDict) -> TokenAdvantages:
        mask_BS = data["token_mask"]
        lam: float | torch.Tensor = (
            self.lam if self.length_alpha is None else length_adaptive_lambda(mask_BS, alpha=self.length_alpha)
        )
        rewards_BS = token_rewards(data, data["rewards"], kl=self.kl)
        of_policy = gae(rewards_BS, data["values"], mask_BS, gamma=self.gamma, lam=lam)
        of_value = gae(rewards_BS, data["values"], mask_BS, gamma=self.gamma, lam=self.value_lam)
        return TokenAdvantages(advantages_BS=of_policy.advantages_BS, returns_BS=of_value.returns_BS)


@dataclass(frozen=True, slots=True, kw_only=True)
class VTrace(TokenEstimator):
    """V-trace (`vtrace`) between the policy at the step's start and the sampler's policy. The advantages do not contain
    the importance weight ρ of the policy gradient: the objective must apply it. With `kl`, the rows must also have the
    column `reference_policy_logprobs`."""

    columns: ClassVar[tuple[str, ...]] = (*_READS, "prev_logprobs", "generation_logprobs")
    gamma: float
    whitening: Whitening = CriticBased()  # noqa: RUF009 (frozen)

    def __call__(self, data: BatchedDataDict) -> TokenAdvantages:
        return vtrace(
            token_rewards(data, data["rewards"], kl=self.kl),
            data["values"],
            data["token_mask"],
            log_ratios_BS=data["prev_logprobs"] - data["generation_logprobs"],
            gamma=self.gamma,
        )


def critic_section(config: Config) -> CriticSection:
    """Returns the section `critic`. Raises ConfigError if the configuration has none."""
    if config.critic is None:
        raise ConfigError(
            "the learner got a critic, but the configuration has no section `critic`: add the section, or pass no "
            "critic"
        )
    return config.critic


def critic_estimator(config: Config) -> TokenEstimator:
    """Returns the token-level estimator for `algorithm.advantage` (or the preset's) and the section `critic`.

    If `critic.value_lam` or `critic.length_alpha` is unset, it takes the value that the preset's paper published. If
    there is none, `value_lam` is `lam`, and λ does not depend on the length.
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
