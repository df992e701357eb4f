"""In float32 one token decides whether engine and learner agree; in bfloat16 the unit of the run. In both, the mean
importance weight of sampled tokens must be 1."""

import math
import random

import pytest

from asyncrl.config.schema import Config
from asyncrl.weights.parity import POOLED_TOKENS, Differences, ParityJudge, ParityLimits


def judge(dtype: str = "bfloat16", *, least_tokens: int = 0, **weights: float) -> ParityJudge:
    config = Config.model_validate({"model": {"dtype": dtype}, "weights": weights})
    return ParityJudge(ParityLimits.of(config), least_tokens=least_tokens)


def differences(*nats: float) -> Differences:
    return Differences.of(nats)


def sampled(engine_is_too_high_nats: float, *, tokens: int) -> Differences:
    """Differences of tokens of two kinds, of which the rarer one has a log-prob that is too high by so many nats."""
    rare = tokens // 5
    noise = [random.Random(tokens + i).gauss(0.0, 0.02) for i in range(tokens)]
    nats = [each - (engine_is_too_high_nats if i < rare else 0.0) for i, each in enumerate(noise)]
    excess = [math.expm1(each) for each in nats]
    found = Differences.of(map(abs, nats))
    return found + Differences(weight_excess=sum(excess), weight_excess_squares=sum(each**2 for each in excess))


def test_differences_add_up_and_a_nan_counts_as_infinite() -> None:
    found = differences(0.01, 0.06) + differences(0.05)
    assert (found.tokens, found.max_nats) == (3, 0.06)
    assert found.spread().mean_nats == pytest.approx(0.04)
    assert found.spread().rms_nats == pytest.approx(math.sqrt((0.01**2 + 0.06**2 + 0.05**2) / 3))
    assert found.spread(least_tokens=6).mean_nats == pytest.approx(0.02)
    assert differences(0.1, math.nan).max_nats == math.inf
    assert differences() == Differences()


@pytest.mark.parametrize("tolerance", [1e-4, 0.3])
def test_in_float32_the_largest_difference_decides(tolerance: float) -> None:
    exact = judge("float32", parity_tolerance_nats=tolerance, least_tokens=POOLED_TOKENS)
    agreeing = [0.0] * 10_000
    assert exact.judge(differences(*agreeing, tolerance)).ratio == 1.0
    assert exact.judge(differences(*agreeing, 2 * tolerance)).ratio == pytest.approx(2.0)
    assert exact.judge(differences(*agreeing)).ratio == 0.0, "the step before does not count"
    assert exact.judge(differences(math.nan)).ratio == math.inf
    assert judge("float32").judge(differences(2e-4)).ratio == 2.0, "1e-4 by default"


@pytest.mark.parametrize(("temperature", "limit"), [(1.0, 1e-4), (1.5, 1e-4), (0.5, 2e-4), (0.3, 1e-4 / 0.3)])
def test_a_low_temperature_divides_the_differences_of_sampled_tokens(temperature: float, limit: float) -> None:
    exact = ParityJudge(ParityLimits.of(Config(), temperature=temperature))
    verdict = exact.judge(differences(2 * limit))
    assert verdict.ratio == pytest.approx(2.0)
    assert ("/ generator.temperature" in verdict.words) is (temperature < 1.0)


def test_in_bfloat16_the_first_differences_are_the_unit() -> None:
    of_run = judge(least_tokens=POOLED_TOKENS)
    assert of_run.judge(differences(*[0.04] * 2000)).ratio == pytest.approx(0.2), "of weights.parity_mean_nats"
    assert of_run.unit is not None
    assert of_run.unit.mean_nats == pytest.approx(0.04)
    healthy = of_run.judge(differences(*[0.05] * 2000))
    assert healthy.ratio < 0.7
    stale = of_run.judge(differences(*[0.1] * 2000))
    assert stale.ratio > 1.0
    for part in ("0.1 nats", "the unit, which was measured at the start, is 0.04 nats", "weights.parity_factor = 2"):
        assert part in stale.words


def test_a_unit_has_a_limit_of_its_own() -> None:
    """Weights that are wrong from the start would otherwise be the measure of all later ones."""
    wrong = judge(least_tokens=POOLED_TOKENS)
    verdict = wrong.judge(differences(*[0.5] * 2000))
    assert verdict.ratio == pytest.approx(2.5)
    assert "weights.parity_mean_nats = 0.2" in verdict.words
    assert wrong.unit is None
    assert judge(least_tokens=POOLED_TOKENS, parity_mean_nats=1.0).judge(differences(*[0.5] * 2000)).ratio < 1.0


def test_a_small_unit_does_not_refuse_a_model_that_becomes_sharper() -> None:
    small = judge(least_tokens=POOLED_TOKENS)
    small.judge(differences(*[0.001] * 2000))
    assert small.judge(differences(*[0.015] * 2000)).ratio < 1.0
    assert small.judge(differences(*[0.03] * 2000)).ratio > 1.0


def test_a_few_large_differences_are_found_by_their_mean_square() -> None:
    of_run = judge(least_tokens=POOLED_TOKENS)
    of_run.judge(differences(*[0.03] * 2000))
    assert of_run.judge(differences(*[0.03] * 1999, 1.0)).ratio < 1.0, "one token may round badly"
    verdict = of_run.judge(differences(*[0.03] * 1960, *[0.6] * 40))
    assert verdict.ratio > 1.0
    assert "root mean square" in verdict.words


def test_the_factor_is_that_of_the_configuration() -> None:
    strict = judge(least_tokens=POOLED_TOKENS, parity_factor=1.2)
    strict.judge(differences(*[0.04] * 2000))
    assert strict.judge(differences(*[0.06] * 2000)).ratio > 1.0


@pytest.mark.parametrize(("times", "agrees"), [(1.0, True), (2.2, True), (4.0, False), (12.0, False)])
def test_a_probe_has_few_tokens_and_each_one_is_judged_alone(times: float, agrees: bool) -> None:
    probes = judge()
    first = [0.03, 0.0, 0.06, 0.08, 0.02, 0.01, 0.05, 0.04, 0.03, 0.02, 0.05, 0.03, 0.0, 0.07, 0.02, 0.01]
    assert probes.judge(differences(*first)).ratio < 1.0
    verdict = probes.judge(differences(*[each * times for each in first]))
    assert (verdict.ratio <= 1.0) is agrees
    assert probes.judge(differences(*first)).ratio < 1.0, "the one before does not count"


@pytest.mark.parametrize(("tokens", "agrees"), [(20, True), (100, False), (600, False)])
def test_tokens_that_are_missing_count_as_equal(tokens: int, agrees: bool) -> None:
    assert (judge(least_tokens=POOLED_TOKENS).judge(differences(*[0.9] * tokens)).ratio <= 1.0) is agrees


def test_the_newest_tokens_are_judged_and_at_least_so_many() -> None:
    of_run = judge(least_tokens=POOLED_TOKENS)
    of_run.judge(differences(*[0.0] * 2000))
    of_run.judge(differences(*[0.02] * 100))
    assert of_run.judge(differences(*[0.0] * 1900)).ratio == pytest.approx(math.sqrt(100 * 0.02**2 / 2000) / 0.032)
    assert of_run.judge(differences(*[0.0] * 100)).ratio == 0.0
    assert of_run.judge(differences(*[0.9] * 2000)).ratio > 1.0
    assert of_run.judge(differences()).ratio == 0.0, "without new tokens nothing is judged"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_that_reports_rare_tokens_too_high_is_found_by_the_mean_importance_weight(dtype: str) -> None:
    limits = {"parity_mean_nats": 10.0} if dtype == "bfloat16" else {"parity_tolerance_nats": 10.0}
    of_run = judge(dtype, least_tokens=POOLED_TOKENS, **limits)
    assert of_run.judge(sampled(0.0, tokens=3000)).ratio < 1.0
    verdict = judge(dtype, least_tokens=POOLED_TOKENS, **limits).judge(sampled(3.0, tokens=3000))
    assert verdict.ratio > 1.0
    assert "the mean of p_learner / p_engine over 3000 sampled tokens is 0.8" in verdict.words
