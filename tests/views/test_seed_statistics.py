"""Intervals and tests over seeds, compared with printed tables and with published examples."""

import math
import random
import statistics

import pytest

from asyncrl.views.seed_statistics import LEVEL, difference, estimate, t_quantile, two_sided_p


def test_quantiles_are_those_of_printed_tables() -> None:
    printed = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 29: 2.045, 120: 1.980, 1_000_000: 1.960}
    assert {degrees: round(t_quantile(degrees), 3) for degrees in printed} == printed


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 40.0])
def test_p_values_are_those_of_the_closed_forms_of_one_and_two_degrees_of_freedom(t: float) -> None:
    assert two_sided_p(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-9)
    assert two_sided_p(-t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)


def test_an_interval_covers_the_mean_of_normal_numbers_as_often_as_it_says() -> None:
    chance = random.Random(1)
    covered = 0
    for _ in range(2000):
        found = estimate([chance.gauss(5, 2) for _ in range(3)])
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 5 <= found.high
    assert covered / 2000 == pytest.approx(LEVEL, abs=0.015)


def test_runs_of_equal_seeds_are_compared_in_pairs_in_any_order() -> None:
    """Student's data on sleep (1908): mean difference 1.58, t = 4.0621 with 9 degrees of freedom, p = 0.002833,
    interval 0.70 to 2.46."""
    one = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    other = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    ours = list(enumerate(other))
    found = difference(ours[::-1], list(enumerate(one)))
    assert found is not None
    assert (found.test, found.n, found.mean) == ("paired", 10, pytest.approx(1.58))
    assert (found.low, found.high, found.p) == pytest.approx((0.7001142, 2.4598858, 0.00283289), rel=1e-5)
    unpaired = difference([(f"other {seed}", value) for seed, value in ours], list(enumerate(one)))
    assert unpaired is not None
    # The same data by Welch's test: t = 1.8608, 17.776 degrees of freedom, p = 0.07939, interval -0.2055 to 3.3655.
    assert (unpaired.test, unpaired.n) == ("welch", 20)
    assert (unpaired.low, unpaired.high, unpaired.p) == pytest.approx((-0.2054832, 3.3654832, 0.07939414), rel=1e-5)


def test_only_seeds_of_both_groups_are_paired_and_repeated_seeds_are_not() -> None:
    found = difference([(0, 1.0), (1, 2.0), (2, 9.0)], [(0, 0.5), (1, 1.0), (3, 7.0)])
    assert found is not None
    assert (found.test, found.n, found.mean) == ("paired", 2, 0.75)
    repeated = difference([(0, 1.0), (0, 2.0), (1, 9.0)], [(0, 0.5), (1, 1.0)])
    assert repeated is not None
    assert (repeated.test, repeated.n, repeated.mean) == ("welch", 5, 3.25)


@pytest.mark.parametrize(("shared", "test", "n"), [(2, "welch", 20), (5, "welch", 20), (6, "paired", 6)])
def test_few_seeds_of_both_groups_do_not_replace_the_test_of_all_runs(shared: int, test: str, n: int) -> None:
    ours = [(seed, float(seed % 3)) for seed in range(10)]
    theirs = [(seed, float(seed % 4)) for seed in range(10 - shared, 20 - shared)]
    found = difference(ours, theirs)
    assert found is not None
    assert (found.test, found.n) == (test, n)
    smaller = difference(ours[10 - shared :], theirs)
    assert smaller is not None
    assert smaller.test == test, "the larger group counts"


def test_a_single_run_has_no_interval_and_no_test() -> None:
    assert estimate([]) is None
    assert difference([], [(0, 1.0)]) is None
    single = estimate([2.0])
    assert single is not None
    assert (single.n, single.mean, single.low) == (1, 2.0, None)
    found = difference([(0, 3.0)], [(0, 1.0), (1, 1.5)])
    assert found is not None
    assert (found.test, found.mean, found.p) == ("", 1.75, None)


def test_numbers_without_spread_have_an_interval_of_no_width() -> None:
    same = difference([(0, 1.0), (1, 1.0)], [(0, 1.0), (1, 1.0)])
    other = difference([(0, 2.0), (1, 2.0)], [(5, 1.0), (6, 1.0)])
    assert same is not None
    assert other is not None
    assert (same.low, same.high, same.p) == (0, 0, 1)
    assert (other.low, other.high, other.p) == (1, 1, 0)
    assert statistics.fmean([1.0]) == 1
