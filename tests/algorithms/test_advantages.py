"""Advantages: groups by id, and exactly 0 where a group says nothing."""

import pytest
import torch

from asyncrl.algorithms.advantages import ESTIMATORS, compute_advantages, resolve_estimator
from asyncrl.errors import ConfigError, RunError

REWARDS = torch.tensor([1.0, 0.0, 0.0, 5.0, 3.0, 2.0, 2.0])
IDS = torch.tensor([4, 4, 4, 9, 9, 1, 1])


def advantages(name: str, rewards: torch.Tensor, ids: torch.Tensor) -> list[float]:
    return compute_advantages(resolve_estimator(name), rewards=rewards, group_ids=ids).tolist()


def test_group_mean_by_hand() -> None:
    assert advantages("group_mean", REWARDS, IDS) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1, -1, 0, 0])


def test_group_norm_divides_by_the_sample_standard_deviation() -> None:
    std = (2 / 3) ** 0.5 / 2**0.5  # squares 4/9 + 1/9 + 1/9, over n − 1 = 2
    expected = [2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 1 / 2**0.5, -1 / 2**0.5, 0, 0]
    assert advantages("group_norm", REWARDS, IDS) == pytest.approx(expected, rel=1e-5)


def test_leave_one_out_has_the_others_baseline_and_the_std_about_the_plain_mean() -> None:
    std = (2 / 3) ** 0.5 / 2**0.5
    expected = [1 / std, -0.5 / std, -0.5 / std, 2 / 2**0.5, -2 / 2**0.5, 0, 0]
    assert advantages("leave_one_out", REWARDS, IDS) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_groups_are_found_by_id_not_by_position(name: str) -> None:
    order = torch.tensor([6, 0, 3, 5, 1, 4, 2])
    shuffled = advantages(name, REWARDS[order], IDS[order])
    assert shuffled == pytest.approx([advantages(name, REWARDS, IDS)[i] for i in order.tolist()])


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("reward", [0.0, 0.1, -1 / 3, 1e6])
def test_f20_equal_rewards_and_single_members_give_exactly_zero(name: str, size: int, reward: float) -> None:
    """0.1 added three times and divided by 3 is not 0.1: a guard of std > 0 would let the rounding through."""
    rewards = torch.full((size,), reward, dtype=torch.float64)
    assert advantages(name, rewards, torch.zeros(size, dtype=torch.int64)) == [0.0] * size


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_an_incomplete_group_uses_the_members_that_are_present(name: str) -> None:
    alone = advantages(name, REWARDS[:2], IDS[:2])
    assert advantages(name, REWARDS[[0, 1, 3, 4]], IDS[[0, 1, 3, 4]])[:2] == pytest.approx(alone)


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_advantages_of_a_group_add_up_to_zero_and_have_the_rewards_order(name: str) -> None:
    found = advantages(name, REWARDS, IDS)
    assert sum(found[:3]) == pytest.approx(0, abs=1e-6)
    assert found[0] > found[1]
    assert found[3] > found[4]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_reward_that_is_not_finite_stops_the_run_instead_of_training_on_zeros(bad: float) -> None:
    with pytest.raises(RunError, match="1 of 7 rewards"):
        compute_advantages(ESTIMATORS["group_norm"], rewards=REWARDS.clone().index_fill_(0, IDS[5], bad), group_ids=IDS)


def own_estimator(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    return rewards * 2


def short_estimator(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    return rewards[1:]


def test_an_import_path_names_an_estimator_of_rewards_and_group_ids() -> None:
    assert advantages(f"{__name__}:own_estimator", REWARDS, IDS) == (REWARDS * 2).tolist()


def test_an_estimator_of_the_wrong_length_is_named() -> None:
    with pytest.raises(RunError, match=r"algorithm.advantage gave \(6,\) values for \(7,\)"):
        advantages(f"{__name__}:short_estimator", REWARDS, IDS)


def test_an_unknown_estimator_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'group_norm'"):
        resolve_estimator("group_nrom")
