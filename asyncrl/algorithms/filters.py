"""Filters before the loss, for groups whose rewards are all equal and for samples that were cut at their length limit.

A filter changes a sample's reward or masks the sample. It never drops a group. A masked sample has weight 0 in the loss
and does not count in the loss's denominators. It still counts in its group's baseline, because its reward is real.

Legend: N samples of the step, in any order.
"""

import torch

from asyncrl.config.schema import Config


def shaped_rewards(
    rewards_N: torch.Tensor, *, truncated_N: torch.Tensor, completion_tokens_N: torch.Tensor, config: Config
) -> torch.Tensor:
    """Returns the rewards [N] from which the advantages are computed (`algorithm.overlong`)."""
    if config.algorithm.overlong != "penalise":
        return rewards_N
    return rewards_N + overlong_penalty(
        completion_tokens_N,
        truncated_N=truncated_N,
        max_completion_tokens=config.generator.max_completion_tokens,
        buffer_tokens=config.algorithm.overlong_buffer_tokens,
    )


def masked_samples(*, zero_variance_N: torch.Tensor, truncated_N: torch.Tensor, config: Config) -> torch.Tensor:
    """Returns the samples that `algorithm.zero_variance` and `algorithm.overlong` exclude from the loss, bool [N]."""
    masked_N = torch.zeros_like(truncated_N)
    if config.algorithm.zero_variance == "mask":
        masked_N = masked_N | zero_variance_N
    if config.algorithm.overlong == "mask":
        masked_N = masked_N | truncated_N
    return masked_N


def overlong_penalty(
    completion_tokens_N: torch.Tensor, *, truncated_N: torch.Tensor, max_completion_tokens: int, buffer_tokens: int
) -> torch.Tensor:
    """Returns the soft overlong penalty [N] of DAPO (2503.14476, eq. 13).

    It is 0 until `buffer_tokens` tokens before the limit, and falls linearly to −1 at the limit. A truncated sample
    gets −1 at any length, because the model's maximum length may have cut it before `max_completion_tokens`.

    >>> overlong_penalty(torch.tensor([6, 7, 8, 10, 3]), truncated_N=torch.tensor([0, 0, 0, 0, 1]).bool(),
    ...     max_completion_tokens=10, buffer_tokens=4).tolist()
    [0.0, -0.25, -0.5, -1.0, -1.0]
    """
    over_N = completion_tokens_N.float() - (max_completion_tokens - buffer_tokens)
    return torch.where(truncated_N, -1.0, 0.0 - (over_N / buffer_tokens).clamp(0.0, 1.0))
