"""What the witness finds in a lease, samples, tokens and advantages, is what the filters and the estimators leave."""

import random
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.algorithms.advantages import OutcomeEstimator, compute_advantages, varied
from asyncrl.algorithms.baselines import OUTCOMES
from asyncrl.algorithms.filters import masked_samples, scored_samples
from asyncrl.config.schema import Config
from asyncrl.witness.step import Completion, advantages, counts, trained

SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "equal groups are masked": {"zero_variance": "mask"},
    "truncated samples are masked": {"overlong": "mask"},
    "long samples lose reward": {"overlong": "penalise", "overlong_buffer_tokens": 4},
}


def completions(seed: int) -> list[Completion]:
    """Returns groups of one to five samples. Some rewards failed, some groups are equal in float32, and some tokens are
    stale."""
    draw, found = random.Random(seed), []
    for group in range(6):
        values = [0.1, 0.2, 1.0] if group % 2 else [0.3, 0.1 + 0.2]
        for _ in range(draw.randint(1, 5)):
            tokens = draw.randint(1, 10)
            reward = draw.choice([*values, None])
            found.append(
                Completion(
                    group=group,
                    reward=reward,
                    tokens=tokens,
                    stale=draw.choice([0, 0, tokens // 2, tokens]),
                    truncated=draw.random() < 0.2,
                    components={} if reward is None else {"right": reward, "short": draw.random()},
                )
            )
    return found


@pytest.mark.parametrize("name", ["group_norm", "leave_one_out", "gdpo", "opo"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_samples_and_advantages_are_those_of_the_filters(name: str, settings: str) -> None:
    algorithm = {**SETTINGS[settings], "advantage": name}
    config = Config.model_validate({"algorithm": algorithm, "generator": {"max_completion_tokens": 10}})
    estimator = OutcomeEstimator(OUTCOMES[name])
    for seed in range(8):
        found = completions(seed)
        samples = scored_samples(
            [each.reward for each in found],
            group_ids=[each.group for each in found],
            completion_tokens=[each.tokens for each in found],
            truncated=[each.truncated for each in found],
            components={name: [each.components.get(name) for each in found] for name in ("right", "short")},
            config=config,
        )
        scored_N = torch.tensor([each.reward is not None for each in found])
        expected_N = torch.zeros(len(found)).masked_scatter(scored_N, compute_advantages(estimator, samples))
        equal_N = torch.ones_like(scored_N).masked_scatter(scored_N, ~varied(estimator, samples))
        truncated_N = torch.tensor([each.truncated for each in found])
        mask_N = scored_N & torch.tensor([each.tokens > each.stale for each in found])
        mask_N &= ~masked_samples(zero_variance_N=equal_N, truncated_N=truncated_N, config=config)

        axes = msgspec.to_builtins(OUTCOMES[name])
        assert advantages(found, axes=axes, config=config) == pytest.approx(expected_N.tolist(), rel=1e-5, abs=1e-6)
        assert trained(found, axes=axes, config=config) == mask_N.tolist(), seed


def test_counts_are_those_of_the_trained_tokens_of_each_update() -> None:
    rows = [(0, 1.0, 5, 2), (0, -1.0, 4, 0), (1, 0.5, 3, 0), (1, 1.0, 9, 0)]
    found = [
        Completion(group=group, reward=reward, tokens=tokens, stale=stale, truncated=False)
        for group, reward, tokens, stale in rows
    ]
    first, second = counts(found, [True, True, True, False], rows_per_update=2, config=Config())
    assert (first.tokens, first.sequences, first.positive_tokens, first.tokens_by_group) == (7, 2, 3, {0: 7})
    assert (second.tokens, second.sequences, second.positive_tokens, second.tokens_by_group) == (3, 1, 3, {1: 3})
