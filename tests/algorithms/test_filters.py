"""Filters for groups with equal rewards and for overlong samples."""

import doctest

import pytest
import torch

from asyncrl.algorithms import filters
from asyncrl.algorithms.filters import masked_samples, shaped_rewards
from asyncrl.config.schema import Config

REWARDS = torch.tensor([1.0, 0.5, 0.0])
TRUNCATED = torch.tensor([False, False, True])
TOKENS = torch.tensor([3, 9, 10])
EQUAL = torch.tensor([True, False, False])


def config_of(**settings: object) -> Config:
    algorithm = {"overlong_buffer_tokens": 4} | settings
    return Config.model_validate({"algorithm": algorithm, "generator": {"max_completion_tokens": 10}})


def masked(config: Config) -> list[bool]:
    found: list[bool] = masked_samples(zero_variance_N=EQUAL, truncated_N=TRUNCATED, config=config).tolist()
    return found


def shaped(config: Config) -> torch.Tensor:
    return shaped_rewards(REWARDS, truncated_N=TRUNCATED, completion_tokens_N=TOKENS, config=config)


def test_by_default_nothing_is_masked_and_rewards_stay_as_they_are() -> None:
    assert torch.equal(shaped(Config()), REWARDS)
    assert not any(masked(Config()))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"zero_variance": "mask"}, [True, False, False]),
        ({"overlong": "mask"}, [False, False, True]),
        ({"zero_variance": "mask", "overlong": "mask"}, [True, False, True]),
        ({"overlong": "penalise"}, [False, False, False]),
    ],
)
def test_each_filter_masks_its_own_samples_and_no_others(settings: dict[str, str], expected: list[bool]) -> None:
    assert masked(config_of(**settings)) == expected


@pytest.mark.parametrize("overlong", ["keep", "mask"])
def test_only_penalise_touches_rewards(overlong: str) -> None:
    assert torch.equal(shaped(config_of(overlong=overlong)), REWARDS)


def test_the_penalty_is_taken_off_rewards() -> None:
    assert shaped(config_of(overlong="penalise")).tolist() == pytest.approx([1.0, 0.5 - 0.75, -1.0])


def penalties(lengths: torch.Tensor, truncated: torch.Tensor) -> list[float]:
    algorithm = {"overlong": "penalise", "overlong_buffer_tokens": 5}
    config = Config.model_validate({"algorithm": algorithm, "generator": {"max_completion_tokens": 20}})
    none = torch.zeros(len(lengths))
    found: list[float] = shaped_rewards(
        none, truncated_N=truncated, completion_tokens_N=lengths, config=config
    ).tolist()
    return found


def test_the_penalty_is_dapos_equation_13() -> None:
    """L_max = 20 and L_cache = 5: 0 up to 15 tokens, then ((L_max − L_cache) − |y|) / L_cache, and −1 at 20 tokens."""
    expected = [0.0] * 16 + [(15 - length) / 5 for length in range(16, 21)]
    assert penalties(torch.arange(21), torch.zeros(21, dtype=torch.bool)) == pytest.approx(expected)


def test_a_sample_cut_by_the_models_length_is_at_its_limit_however_short() -> None:
    assert penalties(torch.tensor([2, 2]), torch.tensor([True, False])) == [-1.0, 0.0]


def test_examples_in_docstrings_of_filters_are_true() -> None:
    results = doctest.testmod(filters)
    assert results.attempted > 0
    assert results.failed == 0
