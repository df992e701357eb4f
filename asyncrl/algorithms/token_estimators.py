"""Computes an advantage for each token from one number for each row.

The ranks compute it, because they hold the rows; the driver holds only the names of the rows. The last trained token of
a row gets the row's number, its reward less a baseline. With a KL to the reference in the reward, every trained token
also gets −beta · KL. Advantages are whitened over the whole step, unless `whiten` is `none`. For this, the ranks
exchange three sums and nothing else. The estimators that need a critic are in `asyncrl.value.estimators`.

Legend: B rows, S tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch

from asyncrl.algorithms.advantages import Estimator, OutcomeEstimator, resolve_estimator
from asyncrl.algorithms.baselines import DiscountedOutcome, RewardKL, Whitening, resolve_advantage
from asyncrl.algorithms.returns import TokenAdvantages, discounted_returns, kl_estimate, masked_moments, whiten
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import trained_mask
from asyncrl.errors import CallRefused

OUTCOME = "outcome_advantages"
"""Column [B]: the advantage of a whole sample. `DiscountedReturns` puts it at the sample's last trained token."""
KL_COLUMNS = ("prev_logprobs", "reference_policy_logprobs")
"""Columns that a KL in the reward reads: log-probs of the policy at the step's start, and of the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimator:
    """Base class of the estimators that compute advantages and returns [B, S] of a rank's rows.

    `kl` is a KL to the reference in the reward. `whitening` says how the advantages are whitened over the step. A
    subclass sets `columns`, the columns that it always reads, and implements the call.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    kl: RewardKL | None = None
    whitening: Whitening = Whitening(whiten="tokens")  # noqa: RUF009 (frozen)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the rows must have: `columns`, and with `kl` the log-probs of policy and reference."""
        return tuple(dict.fromkeys((*self.columns, *(() if self.kl is None else KL_COLUMNS))))

    def __call__(self, data: BatchedDataDict) -> TokenAdvantages:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscountedReturns(TokenEstimator):
    """REINFORCE++ (2501.03262, eqs. 8 to 10): the advantage is Σ_k γ^k · r_{t+k} over trained tokens.

    r_t is −β · KL_t. At the last trained token, r_t also contains the column `outcome_advantages` [B], which is the
    sample's reward less its baseline.
    """

    columns: ClassVar[tuple[str, ...]] = ("input_lengths", "token_mask", "sample_mask", OUTCOME)
    gamma: float = 1.0

    def __call__(self, data: BatchedDataDict) -> TokenAdvantages:
        rewards_BS = token_rewards(data, data[OUTCOME], kl=self.kl)
        returns_BS = discounted_returns(rewards_BS, data["token_mask"], gamma=self.gamma)
        return TokenAdvantages(advantages_BS=returns_BS, returns_BS=returns_BS)


def resolve_estimators(advantage: str | Mapping[str, Any]) -> tuple[Estimator, DiscountedReturns | None]:
    """Returns the two parts of `algorithm.advantage` for an estimator without a critic.

    The first part works on samples and runs on the driver, which has their rewards. The second part works on tokens and
    runs on the ranks. It reads the result of the first part as the column `outcome_advantages`. The second part is None
    if all tokens of a sample have the same advantage. Raises ConfigError like `resolve_estimator`.

    >>> estimator, by_token = resolve_estimators({"name": "reinforce_pp", "kl": {"beta": 0.01}, "gamma": 0.99})
    >>> by_token.kl, by_token.gamma, by_token.whitening.whiten
    (RewardKL(beta=0.01, kind='k1'), 0.99, 'tokens')
    >>> resolve_estimators("reinforce_pp")[1] is None
    True
    """
    axes = resolve_advantage(advantage)
    if not (isinstance(axes, DiscountedOutcome) and axes.by_token):
        return resolve_estimator(advantage), None
    # not whitened: the ranks read the samples' advantages as rewards less baselines, and whiten those of the tokens
    of_samples = OutcomeEstimator(msgspec.structs.replace(axes, whiten="none", keep_mean=False))
    return of_samples, DiscountedReturns(gamma=axes.gamma, kl=axes.kl, whitening=axes)


def token_rewards(data: BatchedDataDict, rewards_B: torch.Tensor, *, kl: RewardKL | None = None) -> torch.Tensor:
    """Returns [B, S]: each row's entry of `rewards_B` at the row's last trained token, and 0 elsewhere.

    A row without a trained token gets only zeros. With `kl`, every token also gets −beta · `kl_estimate`; the values at
    tokens that are not trained are then meaningless.

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
    """Raises CallRefused if an estimator's result is not [B, S], or not finite at a trained token.

    `whitened_advantages` also refuses advantages that are not finite, but it sees only their sum. This check names the
    first such token, and includes the returns.
    """
    mask_BS = trained_mask(data)
    for name, column_BS in (("advantages", found.advantages_BS), ("returns", found.returns_BS)):
        if column_BS.shape != mask_BS.shape:
            raise CallRefused(
                f"the advantage estimator returned {name} of shape {tuple(column_BS.shape)} for rows of shape "
                f"{tuple(mask_BS.shape)}: it must return one value for each token"
            )
        broken_BS = mask_BS & ~column_BS.isfinite()
        if broken_BS.any():
            row, token = broken_BS.nonzero()[0].tolist()
            raise CallRefused(
                f"the advantage estimator returned {int(broken_BS.sum())} {name} that are not finite, the first at row "
                f"{row}, token {token}: {column_BS[row, token].item()}; check the rewards, values and log-probs of "
                "this row"
            )


def whitened_advantages(
    data: BatchedDataDict,
    found: TokenAdvantages | None,
    *,
    rule: Whitening,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> TokenAdvantages | None:
    """Returns an estimator's result for a rank's rows, with the advantages whitened over all ranks as `rule` says.
    `add_up` returns the sum of a tensor over all ranks.

    Returns None on a rank without rows. This is a collective call: every rank must make it.

    Raises CallRefused on all ranks if an advantage of a trained token is not finite. Without this check, whitening
    would turn all advantages into 0, in a run that looks healthy and learns nothing.
    """
    moments = torch.zeros(3, dtype=torch.float64)
    if found is not None:
        mask_BS, weights_BS = trained_mask(data), None
        if rule.whiten == "samples":  # the weights of one completion's tokens add up to 1
            weights_BS = (1 / mask_BS.sum(1, keepdim=True).clamp(min=1).double()).expand_as(mask_BS)
        moments = masked_moments(found.advantages_BS, mask_BS, weights=weights_BS)
    moments = add_up(moments)
    if not bool(torch.isfinite(moments).all()):
        raise CallRefused(
            "the sum of the step's advantages is not finite: check the rewards, values and log-probs of the step"
        )
    if found is None:
        return None
    if rule.whiten == "none":
        advantages_BS = torch.where(trained_mask(data), found.advantages_BS, 0.0)
    else:
        advantages_BS = whiten(found.advantages_BS, trained_mask(data), moments=moments, rule=rule)
    return TokenAdvantages(advantages_BS=advantages_BS, returns_BS=found.returns_BS)
