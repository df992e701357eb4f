"""From one number a row to an advantage a token: on the ranks, which hold the rows, where the driver holds only names.

A row's last trained token earns its reward. With a KL to the reference in the reward, every trained token pays it.
Advantages are whitened over the whole step, for which the ranks exchange three sums and nothing else. The estimators
of a critic are in `asyncrl.value.estimators`.

Legend: B rows, S tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from asyncrl.algorithms.advantages import Estimator, OutcomeEstimator, resolve_estimator
from asyncrl.algorithms.baselines import DiscountedOutcome, RewardKL, Whitening, resolve_advantage
from asyncrl.algorithms.returns import TokenAdvantages, discounted_returns, kl_estimate, masked_moments, whiten
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.masks import trained_mask
from asyncrl.errors import CallRefused

OUTCOME = "outcome_advantages"
"""Column [B]: the advantage of a sample as a whole, which `DiscountedReturns` puts at its last trained token."""
KL_COLUMNS = ("prev_logprobs", "reference_policy_logprobs")
"""Columns that a KL in the reward reads: the policy at the step's start, and the reference."""


class TokenEstimator(Protocol):
    """Advantages and returns [B, S] of a rank's rows, which have the columns `reads`; and how the advantages are
    whitened over the step."""

    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def whitening(self) -> Whitening: ...
    def __call__(self, data: BatchedDataDict) -> TokenAdvantages: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscountedReturns:
    """REINFORCE++ (2501.03262, eqs. 8 to 10): Σ_k γ^k · r_{t+k} over trained tokens. r_t is −β · KL_t, and at the last
    trained token the column `outcome_advantages` [B] besides, which is the sample's reward less its baseline."""

    gamma: float = 1.0
    kl: RewardKL | None = None
    whitening: Whitening = Whitening(whiten="tokens")  # noqa: RUF009 (frozen)

    @property
    def reads(self) -> tuple[str, ...]:
        return ("input_lengths", "token_mask", "sample_mask", OUTCOME, *(() if self.kl is None else KL_COLUMNS))

    def __call__(self, data: BatchedDataDict) -> TokenAdvantages:
        rewards_BS = token_rewards(data, data[OUTCOME], kl=self.kl)
        returns_BS = discounted_returns(rewards_BS, data["token_mask"], gamma=self.gamma)
        return TokenAdvantages(advantages_BS=returns_BS, returns_BS=returns_BS)


def resolve_estimators(advantage: str | Mapping[str, Any]) -> tuple[Estimator, DiscountedReturns | None]:
    """The two parts of `algorithm.advantage` without a critic. The first is of samples and runs where their rewards
    are. The second is of tokens and runs on the ranks; it reads the answer of the first as `outcome_advantages`. None
    where all tokens of a sample have the first's answer. ConfigError as `resolve_estimator`.

    >>> estimator, by_token = resolve_estimators({"name": "reinforce_pp", "kl": {"beta": 0.01}, "gamma": 0.99})
    >>> by_token.kl, by_token.gamma, by_token.whitening.whiten
    (RewardKL(beta=0.01, kind='k1'), 0.99, 'tokens')
    >>> resolve_estimators("reinforce_pp")[1] is None
    True
    """
    axes = resolve_advantage(advantage)
    if not (isinstance(axes, DiscountedOutcome) and axes.by_token):
        return resolve_estimator(advantage), None
    return OutcomeEstimator(axes.outcome()), DiscountedReturns(gamma=axes.gamma, kl=axes.kl, whitening=axes.whitening())


def token_rewards(data: BatchedDataDict, rewards_B: torch.Tensor, *, kl: RewardKL | None = None) -> torch.Tensor:
    """[B, S]: the row's entry of `rewards_B` at its last trained token, 0 elsewhere; nothing in a row without one. With
    `kl`, every token pays beta times its `kl_estimate`; tokens that are not trained have no meaning then.

    >>> rows = BatchedDataDict(token_mask=torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    >>> token_rewards(rows, torch.tensor([2.0, 3.0])).tolist()
    [[0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """
    mask_BS = data["token_mask"] > 0
    left_BS = mask_BS.flip(1).cumsum(1).flip(1)
    rewards_BS = torch.where(mask_BS & (left_BS == 1), rewards_B.unsqueeze(1), 0.0)
    if kl is None:
        return rewards_BS
    policy_BS, reference_BS = (data[name] for name in KL_COLUMNS)
    return rewards_BS - kl.beta * kl_estimate(policy_BS, reference_BS, kind=kl.kind)


def check_estimate(data: BatchedDataDict, found: TokenAdvantages) -> None:
    """CallRefused when an estimator's answer is not [B, S], or not finite at a trained token. Whitening would make such
    an advantage 0 like all others, in a run that looks healthy and learns nothing."""
    mask_BS = trained_mask(data)
    for name, column_BS in (("advantages", found.advantages_BS), ("returns", found.returns_BS)):
        if column_BS.shape != mask_BS.shape:
            raise CallRefused(
                f"an estimator gave {name} of shape {tuple(column_BS.shape)} for rows of shape {tuple(mask_BS.shape)}"
            )
        broken_BS = mask_BS & ~column_BS.isfinite()
        if broken_BS.any():
            row, token = broken_BS.nonzero()[0].tolist()
            raise CallRefused(
                f"an estimator gave {int(broken_BS.sum())} {name} that are not finite, the first at row {row}, token "
                f"{token}: {column_BS[row, token].item()}; look at the rewards, values and log-probs of that row"
            )


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
        raise CallRefused("the sum of the step's advantages is not finite: look at its rewards, values and log-probs")
    if found is None:
        return None
    if rule.whiten == "none":
        advantages_BS = torch.where(trained_mask(data), found.advantages_BS, 0.0)
    else:
        advantages_BS = whiten(found.advantages_BS, trained_mask(data), moments=moments, rule=rule)
    return TokenAdvantages(advantages_BS=advantages_BS, returns_BS=found.returns_BS)
