"""The judgements of the witness: what is accepted, and the words of what is not."""

import math

import pytest

from asyncrl.witness.judge import Finding, Request, advantage_findings, counts_finding, steps_finding, worst
from asyncrl.witness.objective import Counts, Sample
from asyncrl.witness.optimizer import Element, difference

COUNTS = Counts(tokens=50_000, sequences=64)


def test_one_sample_or_token_too_few_is_found_in_any_number_of_tokens() -> None:
    assert not counts_finding(COUNTS, tokens=50_000, sequences=64).failed
    assert counts_finding(COUNTS, tokens=50_000, sequences=63).failed
    many = Counts(tokens=30_000_000, sequences=4096)
    one_less = counts_finding(many, tokens=29_999_999, sequences=4096)
    assert one_less.failed
    assert "29999999 tokens" in one_less.words


def test_an_advantage_is_compared_with_the_largest_of_the_step() -> None:
    def found(value: float) -> Finding:
        sample = Sample(group=0, reward=1.0, weight=1.0, token_weights=[1.0], advantages=[value], current=[-1.0])
        [finding] = advantage_findings(Request(counts=(), advantages=(0.5,), largest_advantage=2.0), {0: sample})
        return finding

    assert found(0.5 + 1e-5).ratio == pytest.approx(0.5)
    assert found(0.5 + 3e-5).failed
    assert found(math.nan).failed


def test_the_message_says_how_large_a_difference_is_and_whose_bug_it_may_be() -> None:
    assert "this is 3 times what is accepted. It is a bug of asyncrl or" in Finding(check="rows", ratio=3.0).message
    other = steps_finding(3, expected=4)
    assert "it has made 4; none is accepted. It is a bug of asyncrl" in other.message
    assert "inf" not in other.message
    for check, key in (("coefficients", "algorithm.loss"), ("advantages", "algorithm.advantage")):
        own = Finding(check=check, ratio=2.0, kind="own function")
        assert f"It is a bug of your function, {key}, or of asyncrl (compared by: own function)" in own.message


def test_the_worst_finding_of_each_check_is_kept_and_a_number_that_is_none_is_worst() -> None:
    findings = [Finding(check="rows", ratio=ratio) for ratio in (0.1, math.nan, 2.0)]
    assert [*worst([Finding(check="frozen", ratio=0.0), *findings])] == ["rows", "frozen"]
    assert math.isnan(worst(findings)["rows"].ratio)


def test_changes_below_the_rounding_of_a_usual_change_are_accepted() -> None:
    """The first moment and the gradient cancel each other to 1e-6 of their size, and the value is 0."""
    element = Element(value=0.0, gradient=-1.0, first=0.11111, second=0.1, steps=5)
    assert difference(element, 1e-11, 1.02e-11, rate=1e-5) < 1
    assert difference(element, 1e-6, 1.02e-6, rate=1e-5) > 1
    assert difference(element, 0.0, 0.0, rate=0.0) == 0
