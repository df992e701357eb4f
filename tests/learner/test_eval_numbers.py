"""The numbers of a held-out evaluation."""

import itertools
import statistics

import pytest

from asyncrl.learner.records import mean_and_error, pass_at


def test_the_error_is_that_of_the_mean_over_prompts() -> None:
    mean, error = mean_and_error([(1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)])
    assert mean == 0.5
    assert error == pytest.approx(statistics.stdev([0.5, 1.0, 0.0, 0.5]) / 2)
    assert mean_and_error([(0.25,)]) == (0.25, None)
    assert mean_and_error([]) == (None, None)


@pytest.mark.parametrize("passing", range(6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_of_which_one_passes(passing: int) -> None:
    rewards = [1.0] * passing + [0.5] * (5 - passing)
    expected = {
        k: statistics.fmean(max(chosen) >= 1.0 for chosen in itertools.combinations(rewards, k)) for k in (1, 2, 4, 5)
    }
    assert pass_at([rewards], pass_reward=1.0) == pytest.approx(expected)


def test_pass_at_k_is_a_mean_over_prompts_and_depends_on_the_reward_that_passes() -> None:
    assert pass_at([(1.0, 0.0), (0.5, 0.5)], pass_reward=1.0) == {1: 0.25, 2: 0.5}
    assert pass_at([(1.0, 0.0), (0.5, 0.5)], pass_reward=0.5) == {1: 0.75, 2: 1.0}
    assert pass_at([], pass_reward=1.0) == {}
