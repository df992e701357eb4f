"""Filters before the loss: what becomes of groups without variance and of samples that were cut at their limit.

A filter shapes a sample's reward or masks the sample; it never drops a group: a masked sample is a trained one that
weighs nothing, leaves every denominator of the loss and still counts in its group's baseline, for its reward is real.

Legend: N samples of the step, in any order.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilters:
    """What `algorithm.zero_variance` and `algorithm.overlong` ask for."""

    zero_variance: Literal["keep", "mask"] = "keep"
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    max_completion_tokens: int
    overlong_buffer_tokens: int

    def shaped_rewards(
        self, rewards_N: torch.Tensor, *, truncated_N: torch.Tensor, completion_tokens_N: torch.Tensor
    ) -> torch.Tensor:
        """The rewards that advantages are made of."""
        if self.overlong != "penalise":
            return rewards_N
        return rewards_N + overlong_penalty(
            completion_tokens_N,
            truncated_N=truncated_N,
            max_completion_tokens=self.max_completion_tokens,
            buffer_tokens=self.overlong_buffer_tokens,
        )

    def masked(self, *, zero_variance_N: torch.Tensor, truncated_N: torch.Tensor) -> torch.Tensor:
        """Samples that are not to be trained, bool [N]."""
        masked_N = torch.zeros_like(truncated_N)
        if self.zero_variance == "mask":
            masked_N = masked_N | zero_variance_N
        if self.overlong == "mask":
            masked_N = masked_N | truncated_N
        return masked_N


def overlong_penalty(
    completion_tokens_N: torch.Tensor, *, truncated_N: torch.Tensor, max_completion_tokens: int, buffer_tokens: int
) -> torch.Tensor:
    """0 up to the last `buffer_tokens` of the limit, then falling linearly to −1 at the limit (DAPO, 2503.14476, eq.
    13). A truncated sample is at its limit wherever it was cut: the model's length may have ended it earlier.

    >>> overlong_penalty(torch.tensor([6, 7, 8, 10, 3]), truncated_N=torch.tensor([0, 0, 0, 0, 1]).bool(),
    ...     max_completion_tokens=10, buffer_tokens=4).tolist()
    [0.0, -0.25, -0.5, -1.0, -1.0]
    """
    over_N = completion_tokens_N.float() - (max_completion_tokens - buffer_tokens)
    return torch.where(truncated_N, -1.0, 0.0 - (over_N / buffer_tokens).clamp(0.0, 1.0))


def build_filters(config: Config) -> SampleFilters:
    """The filters of a run."""
    section = config.algorithm
    return SampleFilters(
        zero_variance=section.zero_variance,
        overlong=section.overlong,
        max_completion_tokens=config.generator.max_completion_tokens,
        overlong_buffer_tokens=section.overlong_buffer_tokens,
    )
