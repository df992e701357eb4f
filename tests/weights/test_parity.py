"""In float32 one token decides whether engine and learner agree; in bfloat16 a quantile and the mean of many tokens."""

import math

import pytest

from asyncrl.config.schema import Config
from asyncrl.weights.parity import POOLED_TOKENS, Differences, ParityJudge, ParityLimits


def limits(dtype: str, **weights: float) -> ParityLimits:
    return ParityLimits.of(Config.model_validate({"model": {"dtype": dtype}, "weights": weights}))


def differences(*nats: float, tolerance_nats: float = 0.05) -> Differences:
    return Differences.of(nats, tolerance_nats=tolerance_nats)


def test_differences_count_what_is_beyond_the_tolerance_and_a_nan_as_infinite() -> None:
    found = differences(0.01, 0.06, 0.05, math.nan)
    assert (found.tokens, found.beyond, found.max_nats, found.sum_nats) == (4, 2, math.inf, math.inf)
    assert differences() == Differences(tokens=0, beyond=0, sum_nats=0.0, max_nats=0.0)


@pytest.mark.parametrize("tolerance", [1e-4, 0.3])
def test_in_float32_the_largest_difference_decides(tolerance: float) -> None:
    judge = ParityJudge(limits("float32", parity_tolerance_nats=tolerance))
    agreeing = [0.0] * 10_000
    assert judge.ratio(differences(*agreeing, tolerance)) == 1.0
    assert judge.ratio(differences(*agreeing, 2 * tolerance)) == pytest.approx(2.0)
    assert judge.ratio(differences(*agreeing)) == 0.0, "the step before does not count"
    assert judge.ratio(differences(math.nan)) == math.inf


def test_in_bfloat16_single_tokens_may_be_beyond_the_tolerance() -> None:
    """D13: the largest of some thousand differences is 0.06 to 0.08 nats, by rounding alone."""
    judge = ParityJudge(limits("bfloat16"))
    assert judge.ratio(differences(*[0.004] * 1990, *[0.08] * 10)) < 1.0
    assert judge.ratio(differences(*[0.004] * 1970, *[0.08] * 30)) == pytest.approx(1.5)


def test_in_bfloat16_a_mean_beyond_its_limit_is_no_agreement_although_each_token_is_within_the_tolerance() -> None:
    judge = ParityJudge(limits("bfloat16"))
    assert judge.ratio(differences(*[0.03] * 2000)) == pytest.approx(1.5)
    strict = ParityJudge(limits("bfloat16", parity_mean_nats=0.001))
    assert strict.ratio(differences(*[0.004] * 2000)) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("nats", "agrees"),
    [([0.08, *[0.003] * 15], True), ([0.15, *[0.008] * 35], True), ([0.5] * 16, False), ([0.05] * 8, False)],
)
def test_a_probe_in_bfloat16_is_judged_by_its_mean_each_time_alone(nats: list[float], agrees: bool) -> None:
    """A probe has the same few tokens each time, of which one may always round badly. Wrong weights must be found with
    the first one."""
    assert (limits("bfloat16").ratio_of_probe(differences(*nats)) <= 1.0) is agrees


def test_a_probe_in_float32_is_judged_by_its_largest_difference() -> None:
    assert limits("float32").ratio_of_probe(differences(0.0, 1e-4)) == 1.0
    assert limits("float32").ratio_of_probe(differences(0.0, 2e-4)) == 2.0
    assert limits("float32").ratio_of_probe(differences(math.nan)) == math.inf


@pytest.mark.parametrize(("tokens", "agrees"), [(20, True), (45, False)])
def test_tokens_that_are_missing_count_as_equal(tokens: int, agrees: bool) -> None:
    judge = ParityJudge(limits("bfloat16"))
    assert (judge.ratio(differences(*[0.9] * tokens)) <= 1.0) is agrees


def test_the_newest_tokens_are_judged_and_at_least_so_many() -> None:
    judge = ParityJudge(limits("bfloat16"))
    judge.ratio(differences(*[0.08] * 19))
    for _ in range(POOLED_TOKENS // 100 - 1):
        ratio = judge.ratio(differences(*[0.0] * 100))
    assert ratio == pytest.approx(19 / POOLED_TOKENS / 0.01), "the first ones are among the newest 2,000"
    assert judge.ratio(differences(*[0.0] * 100)) == 0.0
    assert judge.ratio(differences(*[0.9] * 2000)) > 1.0
    assert judge.pooled.beyond == 2000
    assert judge.ratio(differences()) == 0.0, "without new tokens nothing is judged"


def test_the_limits_in_words() -> None:
    assert limits("float32").words == "weights.parity_tolerance_nats = 0.0001"
    assert "0.01 of 2000 tokens may be beyond weights.parity_tolerance_nats = 0.05" in limits("bfloat16").words
