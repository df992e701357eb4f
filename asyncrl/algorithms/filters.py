"""Filters before the loss, for groups whose rewards are all equal and for samples that were cut at their length limit.

A filter changes a sample's reward or masks the sample. A masked sample has weight 0 in the loss and does not count in
the loss's denominators. It still counts in its group's baseline, because its reward is real. Only
`algorithm.zero_variance: resample` leaves whole groups out, before the step: `is_equal_group` finds them, and the
buffer replaces at most `algorithm.max_resamples_per_step` of them before each step.

Legend: N samples, in any order; K of them have a reward.
"""

from collections.abc import Mapping, Sequence

import torch

from asyncrl.algorithms.advantages import Groups, OutcomeEstimator, Samples, check_rewards
from asyncrl.algorithms.baselines import Outcome, OwnEstimator, resolve_advantage
from asyncrl.algorithms.presets import advantage_of
from asyncrl.config.schema import Config


def shaped_rewards(
    rewards_N: torch.Tensor, *, truncated_N: torch.Tensor, completion_tokens_N: torch.Tensor, config: Config
) -> torch.Tensor:
    """Returns the rewards [N] from which the advantages are computed.

    With `algorithm.overlong: penalise`, they contain the soft overlong penalty of DAPO (2503.14476, eq. 13). It is 0
    until `overlong_buffer_tokens` tokens before the length limit, and falls linearly to −1 at the limit. A truncated
    sample has a penalty of −1 at any length, because the model's maximum length may have cut it before
    `max_completion_tokens`.

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


def scored_samples(
    rewards: Sequence[float | None],
    *,
    group_ids: Sequence[int],
    completion_tokens: Sequence[int],
    truncated: Sequence[bool],
    components: Mapping[str, Sequence[float | None]],
    config: Config,
) -> Samples:
    """Returns the samples that have a reward, as the advantage estimator gets them: K entries, with shaped rewards.

    Each list, also each one in `components`, has N entries. A component that a sample lacks counts as 0: the reward
    function did not return it, or failed and `environment.on_error` is `zero`. Raises RunError if a reward is not
    finite.
    """
    scored_N = torch.tensor([reward is not None for reward in rewards])
    tokens_K = torch.tensor(completion_tokens)[scored_N]
    shaped_K = shaped_rewards(
        torch.tensor([reward for reward in rewards if reward is not None], dtype=torch.float32),
        truncated_N=torch.tensor(truncated)[scored_N],
        completion_tokens_N=tokens_K,
        config=config,
    )
    check_rewards(shaped_K)
    found = {name: torch.tensor([value or 0.0 for value in values])[scored_N] for name, values in components.items()}
    return Samples(
        rewards_N=shaped_K,
        group_ids_N=torch.tensor(group_ids)[scored_N],
        completion_tokens_N=tokens_K,
        components=found or None,
    )


def is_equal_group(samples: Samples, *, config: Config) -> bool:
    """Returns True if `algorithm.zero_variance: resample` may leave this group out: all of its rewards, as the
    advantage estimator compares them, are equal. Returns False for estimators that do not compare the samples of a
    group. `samples` are the scored samples of this group. The setting itself is not read."""
    axes = resolve_advantage(advantage_of(config.algorithm))
    if isinstance(axes, Outcome):
        return not bool(OutcomeEstimator(axes).varied(samples).any())
    # A critic does not compare the samples of a group. An estimator of the user's own may do so, but its code is not
    # imported here: the rewards themselves are compared.
    return isinstance(axes, OwnEstimator) and not bool(Groups(samples.group_ids_N).varied(samples.rewards_N).any())


def masked_samples(*, zero_variance_N: torch.Tensor, truncated_N: torch.Tensor, config: Config) -> torch.Tensor:
    """Returns the samples that `algorithm.zero_variance` and `algorithm.overlong` exclude from the loss, bool [N]."""
    masked_N = torch.zeros_like(truncated_N)
    if config.algorithm.zero_variance == "mask":
        masked_N = masked_N | zero_variance_N
    if config.algorithm.overlong == "mask":
        masked_N = masked_N | truncated_N
    return masked_N
