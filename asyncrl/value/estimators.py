"""From one reward a row and the critic's values to advantages and returns a token, on the critic's ranks.

The row's last trained token earns the reward. Advantages are whitened over the whole step, for which the ranks exchange
three sums and nothing else.

Legend: B rows, S tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from asyncrl.algorithms.baselines import CriticBased, Whitening
from asyncrl.algorithms.returns import (
    TokenAdvantages,
    decoupled_gae,
    kl_estimate,
    length_adaptive_lambda,
    masked_moments,
    vtrace,
    whiten,
)
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import CallRefused
from asyncrl.policy.batching import trained_mask


class TokenEstimator(Protocol):
    """Advantages and returns [B, S] of a rank's rows, which have the columns `reads`; and how the advantages are
    whitened over the step."""

    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def whitening(self) -> Whitening: ...
    def __call__(self, data: BatchedDataDict) -> TokenAdvantages: ...


_READS = ("input_lengths", "token_mask", "sample_mask", "rewards", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKL:
    """A pull to the reference inside the reward: every trained token earns −beta · `kl_estimate` (InstructGPT,
    2203.02155)."""

    beta: float
    kind: Literal["k1", "k2", "k3"] = "k1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE:
    """`decoupled_gae`: advantages by `lam`, returns by `value_lam`. `length_alpha` replaces `lam` by
    `length_adaptive_lambda` of it. With `kl`, rows have `prev_logprobs` and `reference_policy_logprobs` as well."""

    gamma: float
    lam: float
    value_lam: float
    length_alpha: float | None = None
    kl: RewardKL | None = None
    whitening: Whitening = CriticBased()  # noqa: RUF009 (frozen)

    @property
    def reads(self) -> tuple[str, ...]:
        return _READS if self.kl is None else (*_READS, "prev_logprobs", "reference_policy_logprobs")

    def __call__(self, data: BatchedDataDict) -> TokenAdvantages:
        mask_BS = data["token_mask"]
        lam: float | torch.Tensor = (
            self.lam if self.length_alpha is None else length_adaptive_lambda(mask_BS, alpha=self.length_alpha)
        )
        rewards_BS = token_rewards(data)
        if self.kl is not None:
            estimates_BS = kl_estimate(data["prev_logprobs"], data["reference_policy_logprobs"], kind=self.kl.kind)
            rewards_BS = rewards_BS - self.kl.beta * estimates_BS
        return decoupled_gae(
            rewards_BS, data["values"], mask_BS, gamma=self.gamma, policy_lam=lam, value_lam=self.value_lam
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VTrace:
    """`vtrace` between the weights at the step's start and those that sampled, for an objective that weights by their
    ratio itself."""

    gamma: float
    whitening: Whitening = CriticBased()  # noqa: RUF009 (frozen)

    @property
    def reads(self) -> tuple[str, ...]:
        return (*_READS, "prev_logprobs", "generation_logprobs")

    def __call__(self, data: BatchedDataDict) -> TokenAdvantages:
        return vtrace(
            token_rewards(data),
            data["values"],
            data["token_mask"],
            log_ratios_BS=data["prev_logprobs"] - data["generation_logprobs"],
            gamma=self.gamma,
        )


def token_rewards(data: BatchedDataDict) -> torch.Tensor:
    """[B, S]: the row's reward at its last trained token, 0 elsewhere; nothing in a row without one.

    >>> rows = {"token_mask": torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])}
    >>> token_rewards(BatchedDataDict(**rows, rewards=torch.tensor([2.0, 3.0]))).tolist()
    [[0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """
    mask_BS = data["token_mask"] > 0
    left_BS = mask_BS.flip(1).cumsum(1).flip(1)
    return torch.where(mask_BS & (left_BS == 1), data["rewards"].unsqueeze(1), 0.0)


def whitened_advantages(
    data: BatchedDataDict,
    found: TokenAdvantages | None,
    *,
    rule: Whitening,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> TokenAdvantages | None:
    """An estimator's answer for a rank's rows, with advantages whitened over all ranks as `rule` says; None without
    rows. A collective.

    CallRefused on all ranks when a trained token's advantage is not finite. Whitening would make it 0 like all others,
    in a run that looks healthy and learns nothing.
    """
    moments = torch.zeros(3, dtype=torch.float64)
    if found is not None:
        mask_BS, weights_BS = trained_mask(data), None
        if rule.whiten == "samples":  # the tokens of a completion count once, all together
            weights_BS = (1 / mask_BS.sum(1, keepdim=True).clamp(min=1)).expand_as(mask_BS)
        moments = masked_moments(found.advantages_BS, mask_BS, weights=weights_BS)
    moments = add_up(moments)
    if not bool(torch.isfinite(moments).all()):
        raise CallRefused("advantages of the step are not finite: a reward, value or log-prob that they are made of is")
    if found is None:
        return None
    if rule.whiten == "none":
        advantages_BS = torch.where(trained_mask(data), found.advantages_BS, 0.0)
    else:
        advantages_BS = whiten(found.advantages_BS, trained_mask(data), moments=moments, rule=rule)
    return TokenAdvantages(advantages_BS=advantages_BS, returns_BS=found.returns_BS)
