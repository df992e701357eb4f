"""From one reward a row and the critic's values to advantages and returns a token, on the critic's ranks.

What must hold: the reward is earned by the row's last trained token; advantages are whitened over the trained tokens
of the whole step, of which ranks exchange three sums and nothing else.

Legend: B rows, S tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.algorithms.returns import (
    TokenAdvantages,
    decoupled_gae,
    length_adaptive_lambda,
    masked_moments,
    vtrace,
    whiten,
)
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import CallRefused
from asyncrl.policy.batching import trained_mask


class TokenEstimator(Protocol):
    """Advantages and returns [B, S] of a rank's rows, which have the columns `reads`."""

    @property
    def reads(self) -> tuple[str, ...]: ...
    def __call__(self, data: BatchedDataDict) -> TokenAdvantages: ...


_READS = ("input_lengths", "token_mask", "sample_mask", "rewards", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE:
    """`decoupled_gae`: advantages by `lam`, returns by `value_lam`. `length_alpha` replaces `lam` by
    `length_adaptive_lambda` of it."""

    gamma: float
    lam: float
    value_lam: float
    length_alpha: float | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return _READS

    def __call__(self, data: BatchedDataDict) -> TokenAdvantages:
        mask_BS = data["token_mask"]
        lam: float | torch.Tensor = (
            self.lam if self.length_alpha is None else length_adaptive_lambda(mask_BS, alpha=self.length_alpha)
        )
        return decoupled_gae(
            token_rewards(data), data["values"], mask_BS, gamma=self.gamma, policy_lam=lam, value_lam=self.value_lam
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VTrace:
    """`vtrace` between the weights at the step's start and those that sampled, for an objective that weights by their
    ratio itself."""

    gamma: float

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
    data: BatchedDataDict, found: TokenAdvantages | None, *, add_up: Callable[[torch.Tensor], torch.Tensor]
) -> TokenAdvantages | None:
    """An estimator's answer for a rank's rows, with advantages of mean 0 and std 1 over all ranks; None without rows.
    A collective.

    CallRefused on all ranks when a trained token's advantage is not finite. Whitening would make it 0 like all others,
    in a run that looks healthy and learns nothing.
    """
    moments = torch.zeros(3, dtype=torch.float64)
    if found is not None:
        moments = masked_moments(found.advantages_BS, trained_mask(data))
    moments = add_up(moments)
    if not bool(torch.isfinite(moments).all()):
        raise CallRefused("advantages of the step are not finite: a reward, value or log-prob that they are made of is")
    if found is None:
        return None
    advantages_BS = whiten(found.advantages_BS, trained_mask(data), moments=moments)
    return TokenAdvantages(advantages_BS=advantages_BS, returns_BS=found.returns_BS)
