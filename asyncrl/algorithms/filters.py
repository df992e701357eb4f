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
    """Returns the rewards [N] from which the advantages are computed.

    With `algorithm.overlong: penalise`, they contain the soft overlong penalty of DAPO (2503.14476, eq. 13). It is 0
    until `overlong_buffer_tokens` tokens before the limit, and falls linearly to −1 at the limit. A truncated sample
    gets −1 at any length, because the model's maximum length may have cut it before `max_completion_tokens`.

    >>> settings = {"algorithm": {"overlong": "penalise", "overlong_buffer_tokens": 4}}
    >>> config = Config.model_validate({**settings, "generator": {"max_completion_tokens": 10}})
    >>> lengths, truncated = torch.tensor([6, 7, 8, 10, 3]), torch.tensor([0, 0, 0, 0, 1]).bool()
    >>> shaped_rewards(torch.zeros(5), truncated_N=truncated, completion_tokens_N=lengths, config=config).tolist()
    [0.0, -0.25, -0.5, -1.0, -1.0]
    """
    if config.algorithm.overlong != "penalise":
        return rewards_N
    buffer_tokens = config.algorithm.overlong_buffer_tokens
    over_N = completion_tokens_N.float() - (config.generator.max_completion_tokens - buffer_tokens)
    return rewards_N + torch.where(truncated_N, -1.0, 0.0 - (over_N / buffer_tokens).clamp(0.0, 1.0))


def masked_samples(*, zero_variance_N: torch.Tensor, truncated_N: torch.Tensor, config: Config) -> torch.Tensor:
    """Returns the samples that `algorithm.zero_variance` and `algorithm.overlong` exclude from the loss, bool [N]."""
    masked_N = torch.zeros_like(truncated_N)
    if config.algorithm.zero_variance == "mask":
        masked_N = masked_N | zero_variance_N
    if config.algorithm.overlong == "mask":
        masked_N = masked_N | truncated_N
    return masked_N
