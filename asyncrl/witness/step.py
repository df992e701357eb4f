"""Computes from the metadata of a step's groups (its lease) which samples and how many tokens must be trained, and with
which advantages."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.witness.advantages import Scored, equal_groups, of_samples, shaped
from asyncrl.witness.objective import Axes, Counts

OF_TOTALS: Axes = {"baseline": "group_mean", "rewards": "total", "length_penalty": None}
"""The axes with which a group counts as equal if its total rewards are all equal. They are used if the estimator is the
user's own, which has no axes."""


class Completion(NamedTuple):
    """One sample of a step. `reward` is None if the reward could not be computed. `stale` is the number of its tokens
    that are too old to train. A reward component that is not in `components` counts as 0."""

    group: int
    reward: float | None
    tokens: int
    stale: int
    truncated: bool
    components: Mapping[str, float] = {}


def trained(completions: Sequence[Completion], *, axes: Axes | None, config: Config) -> list[bool]:
    """Returns True for each sample that is trained: it has a reward and a token that is not too old, and the filters of
    `algorithm` keep it. `axes` are the settings of the estimator of advantages. None means that the estimator is the
    user's own: the samples of a group then count as equal if their total rewards are equal."""
    algorithm, equal = config.algorithm, dict[int, bool]()
    if algorithm.zero_variance == "mask":
        known = _known(completions, config)
        equal = dict(zip(known, equal_groups(OF_TOTALS if axes is None else axes, [*known.values()]), strict=True))
    return [
        completion.reward is not None
        and completion.tokens > completion.stale
        and not (algorithm.overlong == "mask" and completion.truncated)
        and not equal.get(n, False)
        for n, completion in enumerate(completions)
    ]


def advantages(completions: Sequence[Completion], *, axes: Axes, config: Config) -> list[float]:
    """Returns the advantage of each sample, 0 for one whose reward failed."""
    known = _known(completions, config)
    found = dict(zip(known, of_samples(axes, [*known.values()]), strict=True))
    return [found.get(n, 0.0) for n in range(len(completions))]


def _known(completions: Sequence[Completion], config: Config) -> dict[int, Scored]:
    return {n: scored(each, config) for n, each in enumerate(completions) if each.reward is not None}


def scored(completion: Completion, config: Config) -> Scored:
    """Returns a sample as the formulas read it: with the reward after the penalty of `algorithm.overlong: penalise`.
    The reward of the sample must not have failed."""
    reward = completion.reward
    assert reward is not None, "the caller leaves failed rewards out"
    if config.algorithm.overlong == "penalise":
        limit, buffer = config.generator.max_completion_tokens, config.algorithm.overlong_buffer_tokens
        cut = completion.truncated
        reward = shaped(reward, tokens=completion.tokens, truncated=cut, limit_tokens=limit, buffer_tokens=buffer)
    # the learner compares and subtracts rewards in float32, where 0.1 + 0.2 and 0.3 are equal
    parts = {name: float(np.float32(value)) for name, value in completion.components.items()}
    return Scored(group=completion.group, reward=float(np.float32(reward)), tokens=completion.tokens, components=parts)


def counts(
    completions: Sequence[Completion], kept: Sequence[bool], *, rows_per_update: int, config: Config
) -> tuple[Counts, ...]:
    """Returns the counts of each update, which takes the next `rows_per_update` samples. `kept` says which of them are
    trained."""
    found = []
    for start in range(0, len(completions), rows_per_update):
        own = [completions[n] for n in range(len(completions))[start : start + rows_per_update] if kept[n]]
        by_group: dict[int, float] = defaultdict(float)
        for each in own:
            by_group[each.group] += each.tokens - each.stale
        positive = sum(each.tokens - each.stale for each in own if scored(each, config).reward > 0)
        tokens, n = sum(by_group.values()), len(own)
        found.append(Counts(tokens=tokens, sequences=n, tokens_by_group=dict(by_group), positive_tokens=positive))
    return tuple(found)
