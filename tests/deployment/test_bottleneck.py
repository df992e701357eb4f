"""What limits a run: the side that is waited for, and the limit between them only when both wait."""

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.deployment import bottleneck as module
from asyncrl.deployment.bottleneck import OTHER_WAITS, Bound, bottleneck
from asyncrl.metrics.catalogue import GENERATOR_STATES, LEARNER_STATES


def test_doctests() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("waiting", "blocked", "bound", "advice"),
    [
        (0.6, 0.0, Bound.GENERATORS, "add generators"),
        (0.6, 0.1, Bound.GENERATORS, "the staleness limit holds them back 10 %"),
        (0.4, 0.4, Bound.STALENESS, "raise staleness.max_versions"),
        (0.1, 0.6, Bound.LEARNER, "add learner ranks."),
        (0.0, 0.6, Bound.LEARNER, "a lower staleness.max_versions, above 0, would train fresher data"),
        (0.1, 0.15, Bound.NOTHING, "Neither side waits"),
    ],
)
def test_who_waits_decides(waiting: float, blocked: float, bound: Bound, advice: str) -> None:
    found = bottleneck(
        {"waiting_for_groups": waiting, "optimizer": 1 - waiting},
        {"blocked_on_staleness": blocked, "generating": 1 - blocked},
    )
    assert found.bound is bound
    assert advice in found.sentence


def test_slots_that_may_not_start_are_told_from_slots_that_are_too_few() -> None:
    throttled = bottleneck({"waiting_for_groups": 0.9}, {"idle": 0.8, "generating": 0.2})
    assert throttled.bound is Bound.GENERATORS
    assert "raise generator.max_starts_per_s" in throttled.sentence
    busy = bottleneck({"waiting_for_groups": 0.9}, {"idle": 0.1, "generating": 0.9})
    assert "max_starts_per_s" not in busy.sentence


@pytest.mark.parametrize("state", OTHER_WAITS)
def test_a_longer_wait_of_another_kind_comes_first(state: str) -> None:
    found = bottleneck({"waiting_for_groups": 0.5}, {state: 0.6, "blocked_on_staleness": 0.3})
    assert found.bound is OTHER_WAITS[state][0]
    assert "60 % of the time" in found.sentence
    assert bottleneck({"waiting_for_groups": 0.7}, {state: 0.6}).bound is Bound.GENERATORS


def test_every_wait_is_a_state_that_generators_have() -> None:
    assert set(OTHER_WAITS) < set(GENERATOR_STATES)


def shares(states: tuple[str, ...]) -> st.SearchStrategy[dict[str, float]]:
    weights = st.lists(st.integers(0, 100), min_size=len(states), max_size=len(states)).filter(any)
    return weights.map(lambda each: {state: weight / sum(each) for state, weight in zip(states, each, strict=True)})


@given(learner=shares(LEARNER_STATES), generators=shares(GENERATOR_STATES))
def test_every_sentence_names_knobs_that_exist_and_advises_more_staleness_only_to_a_learner_that_waits(
    learner: dict[str, float], generators: dict[str, float]
) -> None:
    found = bottleneck(learner, generators)
    for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)", found.sentence):
        assert key in type(getattr(Config(), section)).model_fields
    if "raise staleness.max_versions" in found.sentence:
        assert learner["waiting_for_groups"] >= 0.2
        assert generators["blocked_on_staleness"] >= 0.2


def test_nothing_known_is_no_bottleneck() -> None:
    assert bottleneck({}, {}).bound is Bound.NOTHING
