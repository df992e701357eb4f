"""What limits a run: the side that is waited for, and the limit between them only when both wait."""

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.metrics.catalogue import GENERATOR_STATES, LEARNER_STATES
from asyncrl.views import bottleneck as module
from asyncrl.views.bottleneck import HELD_BACK, OTHER_WAITS, Bound, bottleneck


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
        (0.19, 0.19, Bound.NOTHING, "Neither side waits for more than 20 %"),
        (0.21, 0.19, Bound.GENERATORS, "add generators"),
        (0.19, 0.21, Bound.LEARNER, "add learner ranks."),
        (0.21, 0.21, Bound.STALENESS, "raise staleness.max_versions"),
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


@pytest.mark.parametrize("state", ["blocked_on_capacity", "starved_of_prompts"])
def test_a_learner_that_does_not_wait_wins_nothing_by_another_knob(state: str) -> None:
    found = bottleneck({"forward_backward": 0.99, "waiting_for_groups": 0.01}, {state: 0.6, "generating": 0.4})
    assert found.bound is Bound.LEARNER
    assert found.sentence.startswith("Generators wait for the learner 60 % of the time: add learner ranks")


def test_waits_behind_the_learner_add_up() -> None:
    both = bottleneck({"optimizer": 1.0}, {"blocked_on_staleness": 0.18, "blocked_on_capacity": 0.18})
    assert both.bound is Bound.LEARNER
    assert "36 %" in both.sentence
    assert bottleneck({"optimizer": 1.0}, {"paused_for_weights": 0.5}).bound is Bound.NOTHING, "nobody waits for it"


def test_idle_slots_are_no_proof_of_a_throttle() -> None:
    found = bottleneck({"waiting_for_groups": 0.3, "other": 0.7}, {"idle": 0.67, "generating": 0.33})
    assert "as they do before the first weights, in evaluations and at the end" in found.sentence


def test_a_start_is_no_time_in_which_anybody_could_have_waited() -> None:
    running = bottleneck(
        {"waiting_for_groups": 0.4, "optimizer": 0.6}, {"blocked_on_staleness": 0.25, "generating": 0.75}
    )
    assert running.bound is Bound.STALENESS
    for learner_start, generator_start in ((0.9, 0.0), (0.0, 0.9), (0.6, 0.8)):
        found = bottleneck(
            {"starting": learner_start}
            | {"waiting_for_groups": 0.4 * (1 - learner_start), "optimizer": 0.6 * (1 - learner_start)},
            {"starting": generator_start}
            | {"blocked_on_staleness": 0.25 * (1 - generator_start), "generating": 0.75 * (1 - generator_start)},
        )
        assert found == running
    assert bottleneck({"starting": 1.0}, {"starting": 1.0}).bound is Bound.NOTHING


def test_every_wait_is_a_state_that_generators_have() -> None:
    assert {*OTHER_WAITS, *HELD_BACK} < set(GENERATOR_STATES)


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
        assert learner["waiting_for_groups"] >= 0.2 * (1 - learner["starting"])
        assert generators["blocked_on_staleness"] >= 0.2 * (1 - generators["starting"])


def test_nothing_known_is_no_bottleneck() -> None:
    assert bottleneck({}, {}).bound is Bound.NOTHING
