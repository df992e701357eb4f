"""Compares every estimator of one advantage a sample with a plain float64 loop over groups, written from its paper.
Also tests the options of all estimators."""

import math
from collections.abc import Callable
from statistics import mean, pstdev, stdev
from typing import Any

import pytest
import torch

from asyncrl.algorithms.advantages import Samples, compute_advantages, resolve_estimator, varied
from asyncrl.algorithms.baselines import OUTCOMES
from asyncrl.errors import ConfigError, RunError

REWARDS = [1.0, 0.0, 0.25, 0.5, 0.75, 0.5, 1.0, 0.0, 1.0]
IDS = [4, 9, 4, 1, 9, 1, 4, 7, 4]
TOKENS = [3, 5, 8, 2, 1, 6, 4, 7, 2]
"""Group ids: group 4 has four samples, group 9 has two, group 1 has two with equal rewards, and group 7 has one."""
OTHER = [0.0, 2.0, 1.0, 3.0, 2.0, 1.0, 0.0, 5.0, 1.0]
"""A second reward: its values differ in group 1 and are equal in group 9."""
GREEDY = [0.5, 1.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.5]

EPS = 1e-6
CLOSE = 1e-6
"""Relative tolerance: results are float32, which rounds numbers of about 1 by 2^-24."""


def samples(**changed: Any) -> Samples:
    columns: dict[str, Any] = {
        "rewards_N": torch.tensor(REWARDS),
        "group_ids_N": torch.tensor(IDS),
        "completion_tokens_N": torch.tensor(TOKENS),
        "components": {"right": torch.tensor(REWARDS), "style": torch.tensor(OTHER)},
        "greedy_rewards_N": torch.tensor(GREEDY),
    }
    return Samples(**(columns | changed))


def found(advantage: Any, of: Samples | None = None) -> list[float]:
    return compute_advantages(resolve_estimator(advantage), of or samples()).tolist()


def by_group(one: Callable[[list[float], list[int], int], float], rewards: list[float] = REWARDS) -> list[float]:
    """Returns `one(rewards, tokens, place)` for every sample in its group, in the order of the samples."""
    answers = []
    for i, group in enumerate(IDS):
        members = [j for j, other in enumerate(IDS) if other == group]
        answers.append(one([rewards[j] for j in members], [TOKENS[j] for j in members], members.index(i)))
    return answers


def informative() -> list[bool]:
    return [len({REWARDS[j] for j, other in enumerate(IDS) if other == group}) > 1 for group in IDS]


def normed(r: list[float], _: list[int], i: int) -> float:
    return 0.0 if len(set(r)) == 1 else (r[i] - mean(r)) / (stdev(r) + EPS)


def centred(r: list[float], _: list[int], i: int) -> float:
    return r[i] - mean(r)


def others(r: list[float], i: int) -> list[float]:
    return r[:i] + r[i + 1 :]


def leave_one_out(r: list[float], _: list[int], i: int) -> float:
    return 0.0 if len(set(r)) == 1 else r[i] - mean(others(r, i))


def leave_one_out_std(r: list[float], tokens: list[int], i: int) -> float:
    rest = others(r, i)
    divides = len(rest) > 1 and len(set(rest)) > 1
    return leave_one_out(r, tokens, i) / ((stdev(rest) + EPS) if divides else 1)


def maxrl(r: list[float], _: list[int], i: int) -> float:
    """2602.02710: for rewards of 0 and 1 with k of n right, it is n/k − 1 and −1. If none is right, it is 0."""
    return 0.0 if len(set(r)) == 1 else (r[i] - mean(r)) / (mean(r) + EPS)


def opo(r: list[float], tokens: list[int], i: int) -> float:
    """2505.23585: the baseline is Σ l·r / Σ l."""
    return r[i] - sum(length * reward for length, reward in zip(tokens, r, strict=True)) / sum(tokens)


def oapl(r: list[float], _: list[int], i: int) -> float:
    """2602.19362: the baseline is log mean e^r."""
    return 0.0 if len(set(r)) == 1 else r[i] - math.log(mean(math.exp(reward) for reward in r))


def gr3_rewards(r: list[float], tokens: list[int]) -> list[float]:
    return [reward / (1 + 0.33 * length / mean(tokens)) for reward, length in zip(r, tokens, strict=True)]


def gr3(r: list[float], tokens: list[int], i: int) -> float:
    """2603.10535: the rewards are first rescaled by their relative lengths."""
    return 0.0 if len(r) == 1 else gr3_rewards(r, tokens)[i] - mean(gr3_rewards(r, tokens))


def whitened(values: list[float]) -> list[float]:
    return [(value - mean(values)) / (stdev(values) + EPS) for value in values]


def gpg() -> list[float]:
    """2504.02546, eq. 7: the group-centred reward times B / (B − M), where M samples are in groups with equal
    rewards."""
    scale = len(REWARDS) / sum(informative())
    return [scale * value for value in by_group(centred)]


def gdpo(weights: tuple[float, float] = (1.0, 1.0)) -> list[float]:
    """2601.05242: normalise each reward in its group, add the results, and normalise the sums over the batch."""
    first, second = by_group(normed, REWARDS), by_group(normed, OTHER)
    sums = [weights[0] * a + weights[1] * b for a, b in zip(first, second, strict=True)]
    return [0.0 if group == 7 else value for group, value in zip(IDS, whitened(sums), strict=True)]


BY_HAND: dict[str, list[float]] = {
    "group_norm": by_group(normed),
    "group_mean": by_group(centred),
    "leave_one_out": by_group(leave_one_out),
    "leave_one_out_std": by_group(leave_one_out_std),
    "batch_std": [value / (stdev(REWARDS) + EPS) for value in by_group(centred)],
    "batch_mean": [reward - mean(REWARDS) for reward in REWARDS],
    "reinforce_pp": whitened(REWARDS),
    "reinforce_pp_baseline": [
        value if teaches else 0.0 for value, teaches in zip(whitened(by_group(centred)), informative(), strict=True)
    ],
    "maxrl": by_group(maxrl),
    "gpg": gpg(),
    "opo": by_group(opo),
    "oapl": by_group(oapl),
    "gr3": by_group(gr3),
    "gdpo": gdpo(),
    "remax": [reward - greedy for reward, greedy in zip(REWARDS, GREEDY, strict=True)],
}


@pytest.mark.parametrize("name", list(OUTCOMES))
def test_an_estimator_is_the_papers(name: str) -> None:
    assert found(name) == pytest.approx(BY_HAND[name], rel=CLOSE, abs=CLOSE)


def test_no_two_estimators_agree_on_these_samples() -> None:
    """If two agreed, a test above would pass with the wrong one."""
    rounded = {name: tuple(round(value, 3) for value in values) for name, values in BY_HAND.items()}
    assert len(set(rounded.values())) == len(BY_HAND) == len(OUTCOMES)


@pytest.mark.parametrize("name", [name for name in OUTCOMES if name != "remax"])
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    """0.1 added three times and divided by 3 is not 0.1."""
    equal = torch.full((3,), 0.1, dtype=torch.float64)
    of = Samples(
        rewards_N=equal,
        group_ids_N=torch.zeros(3, dtype=torch.int64),
        completion_tokens_N=torch.tensor([7, 7, 7]),
        components={"right": equal, "style": 10 * equal},
    )
    assert found(name, of) == [0.0] * 3


@pytest.mark.parametrize("name", list(OUTCOMES))
def test_groups_are_found_by_id_not_by_position(name: str) -> None:
    order = torch.tensor([6, 0, 8, 3, 5, 7, 1, 4, 2])
    columns = {
        "rewards_N": torch.tensor(REWARDS)[order],
        "group_ids_N": torch.tensor(IDS)[order],
        "completion_tokens_N": torch.tensor(TOKENS)[order],
        "components": {"right": torch.tensor(REWARDS)[order], "style": torch.tensor(OTHER)[order]},
        "greedy_rewards_N": torch.tensor(GREEDY)[order],
    }
    shuffled = found(name, samples(**columns))
    assert shuffled == pytest.approx([found(name)[i] for i in order.tolist()], rel=CLOSE, abs=CLOSE)


def test_maxrl_of_right_and_wrong_answers() -> None:
    """One of four is right: 4/1 − 1, and −1 three times."""
    of = Samples(rewards_N=torch.tensor([0.0, 1, 0, 0]), group_ids_N=torch.zeros(4, dtype=torch.int64))
    assert found("maxrl", of) == pytest.approx([-1, 3, -1, -1], rel=1e-5)


def test_a_length_penalty_teaches_groups_whose_rewards_are_equal() -> None:
    """The expected numbers are from a public library, for α = 0.33 and lengths 10, 20, 10."""
    of = Samples(
        rewards_N=torch.tensor([1.0, 0.5, 0.8]),
        group_ids_N=torch.zeros(3, dtype=torch.int64),
        completion_tokens_N=torch.tensor([10, 20, 10]),
    )
    assert found("gr3", of) == pytest.approx([0.20915856, -0.25799648, 0.04883792], rel=1e-5)
    equal = Samples(rewards_N=torch.ones(3), group_ids_N=of.group_ids_N, completion_tokens_N=of.completion_tokens_N)
    assert varied(resolve_estimator("gr3"), equal).all()
    assert not varied(resolve_estimator("opo"), equal).any()
    assert found("gr3", equal)[0] > 0 > found("gr3", equal)[1]


def test_completions_without_a_token_weigh_nothing_in_a_baseline_by_length() -> None:
    empty = [0 if group == 9 else length for group, length in zip(IDS, TOKENS, strict=True)]
    assert found("opo", samples(completion_tokens_N=torch.tensor(empty)))[1] == pytest.approx(-0.375), (
        "the plain mean is the baseline"
    )
    one = [0, *TOKENS[1:]]
    expected = 1 - (8 * 0.25 + 4 * 1 + 2 * 1) / 14
    assert found("opo", samples(completion_tokens_N=torch.tensor(one)))[0] == pytest.approx(expected)


# --- options ----------------------------------------------------------------------------------------------------


def with_std(std: Callable[[list[float]], float]) -> list[float]:
    return by_group(lambda r, _, i: 0.0 if len(set(r)) == 1 else (r[i] - mean(r)) / std(r))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"eps": 0.5}, with_std(lambda r: stdev(r) + 0.5)),
        ({"eps": 0.5, "eps_in": "variance"}, with_std(lambda r: math.sqrt(stdev(r) ** 2 + 0.5))),
        ({"divisor": "n"}, with_std(lambda r: pstdev(r) + EPS)),
        ({"divisor": "n", "eps": 0.5, "eps_in": "variance"}, with_std(lambda r: math.sqrt(pstdev(r) ** 2 + 0.5))),
        ({"eps": 0.0}, with_std(stdev)),
        ({"scale": "none"}, by_group(centred)),
    ],
)
def test_eps_and_divisor_of_a_group_s_standard_deviation(options: dict[str, Any], expected: list[float]) -> None:
    assert found({"name": "group_norm", **options}) == pytest.approx(expected, rel=CLOSE, abs=CLOSE)


def test_eps_is_added_to_the_mean_that_divides() -> None:
    expected = by_group(lambda r, _, i: 0.0 if len(set(r)) == 1 else (r[i] - mean(r)) / (mean(r) + 0.5))
    assert found({"name": "maxrl", "eps": 0.5}) == pytest.approx(expected, rel=CLOSE, abs=CLOSE)


@pytest.mark.parametrize("name", ["group_norm", "group_mean", "leave_one_out", "leave_one_out_std", "maxrl", "opo"])
def test_a_group_of_one_has_its_reward_as_its_advantage_where_that_is_asked_for(name: str) -> None:
    alone = samples(rewards_N=torch.tensor([*REWARDS[:7], 0.5, REWARDS[8]]))
    assert found(name, alone)[7] == 0.0
    raw = found({"name": name, "single": "raw"}, alone)
    assert raw[7] == 0.5
    del raw[7]
    assert raw == pytest.approx(BY_HAND[name][:7] + BY_HAND[name][8:], rel=CLOSE, abs=CLOSE), (
        "other samples are unchanged"
    )


def test_a_raw_reward_counts_in_the_statistics_of_the_batch() -> None:
    """GPG counts it as a sample with a gradient, so M is smaller by one. REINFORCE++ with a baseline whitens it like
    the other samples."""
    alone = samples(rewards_N=torch.tensor([*REWARDS[:7], 0.5, REWARDS[8]]))
    centre = by_group(centred)
    centre[7] = 0.5
    scale = len(REWARDS) / (sum(informative()) + 1)
    assert found({"name": "gpg", "single": "raw"}, alone) == pytest.approx([scale * c for c in centre], rel=CLOSE)
    pp = found({"name": "reinforce_pp_baseline", "single": "raw"}, alone)
    assert pp[7] == pytest.approx(whitened(centre)[7], rel=CLOSE)


def test_gpg_may_count_rewards_that_are_not_zero_instead() -> None:
    scale = len(REWARDS) / sum(reward != 0 for reward in REWARDS)
    expected = [scale * value for value in by_group(centred)]
    assert found({"name": "gpg", "scale": "nonzero_share"}) == pytest.approx(expected, rel=CLOSE)


def by_tokens(values: list[float]) -> tuple[float, float]:
    """Returns mean and standard deviation of the values, where each counts as often as its completion has tokens."""
    spelled = [value for value, length in zip(values, TOKENS, strict=True) for _ in range(length)]
    return mean(spelled), stdev(spelled)


def test_whitening_over_tokens_counts_a_sample_once_a_token() -> None:
    middle, spread = by_tokens(REWARDS)
    expected = [(reward - middle) / (spread + EPS) for reward in REWARDS]
    assert found({"name": "reinforce_pp", "whiten": "tokens"}) == pytest.approx(expected, rel=CLOSE)
    norms = by_group(normed)
    middle, spread = by_tokens(norms)
    expected = [(value - middle) / (spread + EPS) if value else 0.0 for value in norms]
    assert found({"name": "group_norm", "whiten": "tokens"}) == pytest.approx(expected, rel=CLOSE, abs=CLOSE)


def test_a_completion_without_a_token_is_zero_where_tokens_are_whitened() -> None:
    lengths = torch.tensor([0, 1, 0, 0, 0, 0, 0, 0, 0])
    assert found({"name": "reinforce_pp", "whiten": "tokens"}, samples(completion_tokens_N=lengths)) == [0.0] * 9
    some = found(
        {"name": "reinforce_pp", "whiten": "tokens"}, samples(completion_tokens_N=torch.tensor([0, *TOKENS[1:]]))
    )
    spelled = [value for value, length in zip(REWARDS[1:], TOKENS[1:], strict=True) for _ in range(length)]
    expected = [(value - mean(spelled)) / (stdev(spelled) + EPS) for value in REWARDS[1:]]
    assert some == pytest.approx([0.0, *expected], rel=CLOSE)
    assert found({"name": "reinforce_pp", "whiten": "tokens"}, samples(completion_tokens_N=0 * lengths)) == [0.0] * 9


def test_the_mean_may_be_kept() -> None:
    expected = [value + mean(REWARDS) for value in whitened(REWARDS)]
    assert found({"name": "reinforce_pp", "keep_mean": True}) == pytest.approx(expected, rel=CLOSE)
    equal = Samples(rewards_N=torch.full((3,), 0.5), group_ids_N=torch.tensor([0, 1, 2]))
    assert found({"name": "reinforce_pp", "keep_mean": True}, equal) == [0.5] * 3


def test_eps_and_divisor_of_the_batch() -> None:
    expected = [(r - mean(REWARDS)) / math.sqrt(pstdev(REWARDS) ** 2 + 0.5) for r in REWARDS]
    options = {"eps": 0.5, "eps_in": "variance", "divisor": "n"}
    assert found({"name": "reinforce_pp", **options}) == pytest.approx(expected, rel=CLOSE)
    scaled = [value / math.sqrt(pstdev(REWARDS) ** 2 + 0.5) for value in by_group(centred)]
    assert found({"name": "batch_std", **options}) == pytest.approx(scaled, rel=CLOSE)


def test_components_are_weighted_by_their_names() -> None:
    weights = {"name": "gdpo", "weights": {"style": 0.25, "right": 2.0}}
    assert found(weights) == pytest.approx(gdpo((2.0, 0.25)), rel=CLOSE, abs=CLOSE)
    with pytest.raises(
        RunError, match=r"weights has the names right, but the components of the rewards are right, style"
    ):
        found({"name": "gdpo", "weights": {"right": 1.0}})


# --- what is missing or impossible ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("opo", "completion_tokens_N"),
        ("gr3", "completion_tokens_N"),
        ({"name": "reinforce_pp", "whiten": "tokens"}, "completion_tokens_N"),
        ("gdpo", "components"),
        ("remax", "greedy_rewards_N"),
    ],
)
def test_a_column_that_is_missing_is_named(name: Any, column: str) -> None:
    for missing in (None, *([{}] if column == "components" else [])):
        with pytest.raises(RunError, match=f"reads {column}, but these samples do not have it"):
            found(name, samples(**{column: missing}))


@pytest.mark.parametrize("name", ["maxrl", "gr3"])
def test_negative_rewards_are_refused_where_they_would_be_turned_around(name: str) -> None:
    with pytest.raises(RunError, match=r"smallest of this step is -0.5"):
        found(name, samples(rewards_N=torch.tensor([-0.5, *REWARDS[1:]])))


def test_a_component_that_is_not_finite_is_refused() -> None:
    broken = {"right": torch.tensor(REWARDS), "style": torch.tensor([math.nan, *OTHER[1:]])}
    with pytest.raises(RunError, match="1 of 9 rewards are not finite"):
        found("gdpo", samples(components=broken))


@pytest.mark.parametrize("column", ["group_ids_N", "completion_tokens_N", "greedy_rewards_N"])
def test_columns_of_another_length_are_refused(column: str) -> None:
    with pytest.raises(RunError, match=r"rewards have shape \(9,\) and .* \(8,\): both must be \[N\]"):
        samples(**{column: torch.zeros(8)})
    with pytest.raises(RunError, match="component 'right'"):
        samples(components={"right": torch.zeros(8)})


def test_the_temperature_of_the_soft_value_is_between_the_best_and_the_mean_reward_and_never_overflows() -> None:
    samples = Samples(rewards_N=torch.tensor([0.0, 900.0]), group_ids_N=torch.tensor([3, 3]))

    def advantages(temperature: float) -> list[float]:
        return compute_advantages(resolve_estimator({"name": "oapl", "temperature": temperature}), samples).tolist()

    assert advantages(2.0) == pytest.approx([-900 + 2 * math.log(2), 2 * math.log(2)])
    assert advantages(1e9) == pytest.approx([-450.0, 450.0])
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(ConfigError, match=r"temperature is .*: it must be finite and above 0"):
            resolve_estimator({"name": "oapl", "temperature": wrong})
