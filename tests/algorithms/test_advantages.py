"""Advantages: groups are found by id, and a group or batch without differences gets advantages of exactly 0."""

from statistics import mean, stdev

import pytest
import torch

from asyncrl.algorithms.advantages import Estimator, Samples, compute_advantages, resolve_estimator
from asyncrl.errors import ConfigError, RunError

REWARDS = torch.tensor([1.0, 0.0, 0.0, 5.0, 3.0, 2.0, 2.0])
IDS = torch.tensor([4, 4, 4, 9, 9, 1, 1])
CENTRED = [2 / 3, -1 / 3, -1 / 3, 1, -1, 0, 0]
"""Rewards less the mean of their group."""

WITHIN_GROUPS = ["group_norm", "group_mean", "leave_one_out", "leave_one_out_std"]
WITH_GROUP_BASELINE = [*WITHIN_GROUPS, "batch_std", "reinforce_pp_baseline"]
OF_REWARDS = [*WITH_GROUP_BASELINE, "batch_mean", "reinforce_pp", "gpg"]
"""Estimators that read only rewards, of any sign. `test_estimators_by_hand.py` tests the others."""


def advantages(name: str, rewards: torch.Tensor, ids: torch.Tensor) -> list[float]:
    return compute_advantages(resolve_estimator(name), Samples(rewards_N=rewards, group_ids_N=ids)).tolist()


def test_group_mean_by_hand() -> None:
    assert advantages("group_mean", REWARDS, IDS) == pytest.approx(CENTRED)


def test_group_norm_divides_by_the_sample_standard_deviation() -> None:
    std = (2 / 3) ** 0.5 / 2**0.5  # squares 4/9 + 1/9 + 1/9, over n − 1 = 2
    expected = [2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 1 / 2**0.5, -1 / 2**0.5, 0, 0]
    assert advantages("group_norm", REWARDS, IDS) == pytest.approx(expected, rel=1e-5)


def test_leave_one_out_has_the_others_baseline_and_nothing_else() -> None:
    """2402.14740: rewards 1, 0, 0, 0 give 1 and three times −1/3."""
    assert advantages("leave_one_out", REWARDS, IDS) == pytest.approx([1, -0.5, -0.5, 2, -2, 0, 0])
    four = advantages("leave_one_out", torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    assert four == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_batch_std_has_the_group_baseline_and_the_std_of_all_rewards() -> None:
    std = stdev(REWARDS.tolist())
    assert advantages("batch_std", REWARDS, IDS) == pytest.approx([value / std for value in CENTRED], rel=1e-5)


def test_reinforce_pp_has_the_batch_for_baseline_and_for_scale() -> None:
    rewards = REWARDS.tolist()
    expected = [(reward - mean(rewards)) / stdev(rewards) for reward in rewards]
    assert advantages("reinforce_pp", REWARDS, IDS) == pytest.approx(expected, rel=1e-5)


def test_reinforce_pp_baseline_whitens_what_the_group_baseline_leaves() -> None:
    expected = [value / stdev(CENTRED) for value in CENTRED]
    assert advantages("reinforce_pp_baseline", REWARDS, IDS) == pytest.approx(expected, rel=1e-5)
    assert stdev(CENTRED) != pytest.approx(stdev(REWARDS.tolist()), rel=0.1), "otherwise batch_std would also pass"


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitened_advantages_have_mean_0_and_std_1_over_samples(name: str) -> None:
    found = advantages(name, REWARDS, IDS)
    assert mean(found) == pytest.approx(0, abs=1e-6)
    assert stdev(found) == pytest.approx(1, rel=1e-5)


def test_groups_of_one_and_groups_of_equal_rewards_learn_from_the_batch_only_without_a_group_baseline() -> None:
    rewards, ids = torch.tensor([1.0, 1.0, 0.0, 3.0]), torch.tensor([0, 0, 1, 2])
    std = stdev(rewards.tolist())
    found = advantages("reinforce_pp", rewards, ids)
    assert found == pytest.approx([-0.25 / std, -0.25 / std, -1.25 / std, 1.75 / std], rel=1e-5)
    for name in WITH_GROUP_BASELINE:
        assert advantages(name, rewards, ids) == [0.0] * 4


@pytest.mark.parametrize("name", WITH_GROUP_BASELINE)
@pytest.mark.parametrize("reward", [0.1, -1 / 3, 1e6])
@pytest.mark.fault("F20")
def test_a_group_that_says_nothing_is_exactly_zero_beside_groups_that_do(name: str, reward: float) -> None:
    """Rounding errors of the group's mean or the batch's mean must not become advantages. One group has equal rewards,
    and one group has a single member."""
    rewards = torch.tensor([reward, 1.0, reward, 0.25, reward, 0.0, 7.0], dtype=torch.float64)
    found = advantages(name, rewards, torch.tensor([0, 1, 0, 1, 0, 1, 2]))
    assert [found[i] for i in (0, 2, 4, 6)] == [0.0] * 4
    assert 0.0 not in [found[i] for i in (1, 3, 5)]


@pytest.mark.parametrize("name", OF_REWARDS)
def test_groups_are_found_by_id_not_by_position(name: str) -> None:
    order = torch.tensor([6, 0, 3, 5, 1, 4, 2])
    shuffled = advantages(name, REWARDS[order], IDS[order])
    assert shuffled == pytest.approx([advantages(name, REWARDS, IDS)[i] for i in order.tolist()])


@pytest.mark.parametrize("name", OF_REWARDS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("reward", [0.0, 0.1, -1 / 3, 1e6])
@pytest.mark.fault("F20")
def test_equal_rewards_and_single_members_give_exactly_zero(name: str, size: int, reward: float) -> None:
    """0.1 added three times and divided by 3 is not 0.1, so a check `std > 0` would let this rounding error through."""
    rewards = torch.full((size,), reward, dtype=torch.float64)
    assert advantages(name, rewards, torch.zeros(size, dtype=torch.int64)) == [0.0] * size


@pytest.mark.parametrize("name", OF_REWARDS)
def test_a_step_without_samples_has_no_advantages(name: str) -> None:
    assert advantages(name, REWARDS[:0], IDS[:0]) == []


@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_an_incomplete_group_uses_the_members_that_are_present(name: str) -> None:
    alone = advantages(name, REWARDS[:2], IDS[:2])
    assert advantages(name, REWARDS[[0, 1, 3, 4]], IDS[[0, 1, 3, 4]])[:2] == pytest.approx(alone)


@pytest.mark.parametrize("name", WITH_GROUP_BASELINE)
def test_the_baseline_of_an_incomplete_group_is_the_mean_of_who_is_present(name: str) -> None:
    """The groups have three members and two. For every scale, the member with the mean reward gets 0, and the others
    are symmetric about it."""
    found = advantages(name, torch.tensor([1.0, 3.0, 5.0, 0.0, 0.5]), torch.tensor([3, 3, 3, 8, 8]))
    assert found[1] == pytest.approx(0, abs=1e-6)
    assert found[2] == pytest.approx(-found[0])
    assert found[3] == pytest.approx(-found[4])


@pytest.mark.parametrize("name", [name for name in WITH_GROUP_BASELINE if name != "leave_one_out_std"])
def test_advantages_of_a_group_add_up_to_zero_and_have_the_rewards_order(name: str) -> None:
    found = advantages(name, REWARDS, IDS)
    assert sum(found[:3]) == pytest.approx(0, abs=1e-6)
    assert found[0] > found[1]
    assert found[3] > found[4]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_reward_that_is_not_finite_stops_the_run_instead_of_training_on_zeros(bad: float) -> None:
    with pytest.raises(RunError, match="1 of 7 rewards"):
        advantages("group_norm", REWARDS.clone().index_fill_(0, IDS[5], bad), IDS)


def own_estimator(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    return rewards * 2


def short_estimator(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    return rewards[1:]


def test_an_import_path_names_an_estimator_of_rewards_and_group_ids() -> None:
    assert advantages(f"{__name__}:own_estimator", REWARDS, IDS) == (REWARDS * 2).tolist()


def test_an_estimator_of_the_wrong_length_is_named() -> None:
    with pytest.raises(
        RunError, match=r"algorithm.advantage returned values of shape \(6,\) for rewards of shape \(7,\)"
    ):
        advantages(f"{__name__}:short_estimator", REWARDS, IDS)


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (lambda samples: samples.rewards_N.tolist(), "returned a list; it must return a tensor of 7 values"),
        (lambda samples: None, "returned a NoneType"),
        (lambda samples: samples.rewards_N.double() * 1e300, "5 of the values are not finite in float32"),
    ],
)
def test_an_estimator_that_gives_no_float32_numbers_is_refused(estimator: Estimator, words: str) -> None:
    with pytest.raises(RunError, match=words):
        compute_advantages(estimator, Samples(rewards_N=REWARDS, group_ids_N=IDS))


def test_an_unknown_estimator_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'group_norm'"):
        resolve_estimator("group_nrom")


def broken(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    raise KeyError("beta")


def test_what_an_own_advantage_raises_is_said_with_its_line() -> None:
    estimator = resolve_estimator("test_advantages:broken")
    with pytest.raises(
        RunError, match=r"algorithm\.advantage = test_advantages:broken raised KeyError: 'beta' \(.*:\d+\)"
    ):
        compute_advantages(estimator, Samples(rewards_N=torch.ones(2), group_ids_N=torch.zeros(2)))


def test_a_loop_of_ones_own_may_give_the_callable_itself() -> None:
    def doubled(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
        return 2 * rewards

    samples = Samples(rewards_N=torch.tensor([1.0, 3.0]), group_ids_N=torch.zeros(2))
    assert compute_advantages(resolve_estimator(doubled), samples).tolist() == [2.0, 6.0]
    assert compute_advantages(resolve_estimator({"name": doubled}), samples).tolist() == [2.0, 6.0]

    class Scaled:
        def __call__(self, samples: Samples, *, scale: float = 1.0) -> torch.Tensor:
            return scale * samples.rewards_N

    for given in (Scaled(), Scaled().__call__):
        named = resolve_estimator({"name": given, "scale": 3.0})
        assert compute_advantages(named, samples).tolist() == [3.0, 9.0]
    with pytest.raises(ConfigError, match="doubled has no such option; its options are none"):
        resolve_estimator({"name": doubled, "factor": 2})
    with pytest.raises(ConfigError, match=r"it cannot be called with \(rewards, group_ids\)"):
        resolve_estimator(lambda rewards: rewards)
