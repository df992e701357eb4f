"""The headline of a run is its most urgent problem, else its bottleneck.

A limit between the two sides (staleness, capacity, weights) is named only when both sides wait.
"""

import doctest
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.common.concern import Concern
from asyncrl.config.schema import Config
from asyncrl.learner.records import Note, shares_of
from asyncrl.metrics.catalogue import GENERATOR_STATES, LEARNER_STATES
from asyncrl.views import headline as module
from asyncrl.views.headline import HELD_BACK, OTHER_WAITS, Bound, bottleneck, headline
from asyncrl.views.run_view import RunView


def test_doctests() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("waiting", "blocked", "bound", "advice"),
    [
        (0.6, 0.0, Bound.GENERATORS, "add generators"),
        (0.6, 0.1, Bound.GENERATORS, "the staleness limit blocks generators 10 %"),
        (0.4, 0.4, Bound.STALENESS, "raise staleness.max_versions"),
        (0.1, 0.6, Bound.LEARNER, "add learner ranks where cores or GPUs are free."),
        (0.0, 0.6, Bound.LEARNER, "You can lower staleness.max_versions (but not to 0)"),
        (0.1, 0.15, Bound.NOTHING, "Neither side waits"),
        (0.19, 0.19, Bound.NOTHING, "Neither side waits for more than 20 %"),
        (0.21, 0.19, Bound.GENERATORS, "add generators"),
        (0.19, 0.21, Bound.LEARNER, "add learner ranks where cores or GPUs are free."),
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
    if state != "waiting_for_environment":  # if nothing is generated, it is the reason, whatever the learner's share
        assert bottleneck({"waiting_for_groups": 0.7}, {state: 0.6}).bound is Bound.GENERATORS


def test_slow_agents_are_named_when_slots_wait_for_them_more_than_for_the_engine() -> None:
    slow = {"waiting_for_environment": 0.5, "generating": 0.4, "idle": 0.1}
    found = bottleneck({"waiting_for_groups": 0.9}, slow)
    assert found.bound is Bound.ENVIRONMENT
    assert "agents' own code 50 % of the time: make rewards, tools and environments faster" in found.sentence
    fast = {"waiting_for_environment": 0.4, "generating": 0.5, "idle": 0.1}
    assert bottleneck({"waiting_for_groups": 0.9}, fast).bound is Bound.GENERATORS
    assert bottleneck({"optimizer": 1.0}, slow).bound is Bound.NOTHING


@pytest.mark.parametrize("state", ["blocked_on_capacity", "starved_of_prompts"])
def test_a_learner_that_does_not_wait_wins_nothing_by_another_knob(state: str) -> None:
    found = bottleneck({"forward_backward": 0.99, "waiting_for_groups": 0.01}, {state: 0.6, "generating": 0.4})
    assert found.bound is Bound.LEARNER
    assert found.sentence.startswith("Generators wait for the learner 60 % of the time: add learner ranks")


def test_waits_behind_the_learner_add_up() -> None:
    both = bottleneck({"optimizer": 1.0}, {"blocked_on_staleness": 0.18, "blocked_on_capacity": 0.18})
    assert both.bound is Bound.LEARNER
    assert "36 %" in both.sentence
    assert bottleneck({"optimizer": 1.0}, {"paused_for_weights": 0.5}).bound is Bound.NOTHING, (
        "neither side waits for the other"
    )


def test_idle_slots_are_no_proof_of_a_throttle() -> None:
    found = bottleneck({"waiting_for_groups": 0.3, "other": 0.7}, {"idle": 0.67, "generating": 0.33})
    assert "That is normal before the first weights, in evaluations and at the end" in found.sentence


def test_a_start_is_no_time_in_which_anybody_could_have_waited() -> None:
    running = bottleneck(
        {"waiting_for_groups": 0.4, "optimizer": 0.6}, {"blocked_on_staleness": 0.25, "generating": 0.75}
    )
    assert running.bound is Bound.STALENESS
    for learner_start, generator_start in ((0.9, 0.0), (0.0, 0.9), (0.6, 0.8)):
        learner = {"waiting_for_groups": 0.4 * (1 - learner_start), "optimizer": 0.6 * (1 - learner_start)}
        generators = {"blocked_on_staleness": 0.25, "generating": 0.75}
        generators = {state: share * (1 - generator_start) for state, share in generators.items()}
        found = bottleneck(
            shares_of({"starting": learner_start} | learner), shares_of({"starting": generator_start} | generators)
        )
        assert found == running
    assert shares_of({"starting": 1.0}) == {}


def test_every_wait_is_a_state_that_generators_have() -> None:
    assert {*OTHER_WAITS, *HELD_BACK} < set(GENERATOR_STATES)


def shares(states: tuple[str, ...]) -> st.SearchStrategy[dict[str, float]]:
    weights = st.lists(st.integers(0, 100), min_size=len(states), max_size=len(states))
    return weights.map(lambda each: shares_of(dict(zip(states, each, strict=True)))).filter(bool)


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


WAITING_LEARNER = {"waiting_for_groups": 0.5, "optimizer": 0.5}
BUSY_LEARNER = {"optimizer": 1.0}
HELD_BACK_GENERATORS = {"blocked_on_staleness": 0.5, "generating": 0.5}


@pytest.mark.parametrize("room", [True, False, None])
def test_more_processes_are_advised_only_where_they_fit(room: bool | None) -> None:
    learner = bottleneck(BUSY_LEARNER, HELD_BACK_GENERATORS, room=room).sentence
    generators = bottleneck(WAITING_LEARNER, {"generating": 1.0}, room=room).sentence
    throttled = bottleneck(WAITING_LEARNER, {"idle": 0.5, "generating": 0.5}, room=room).sentence
    assert ("add learner ranks" in learner) == (room is not False)
    assert ("where cores or GPUs are free" in learner) == (room is None)
    for sentence in (generators, throttled):
        assert ("add generators" in sentence) == (room is not False)
    assert "raise generator.max_starts_per_s" in throttled
    if room is False:
        assert learner == (
            "Generators wait for the learner 50 % of the time. You can lower staleness.max_versions (but not to 0) to "
            "train on fresher samples at the same speed."
        )
        assert "raise generator.max_concurrent_groups" in generators


NOTES = [
    Note(concern=concern, number=1.0, fact=f"the fact of {concern}", causes=("first", "second"), look="asyncrl samples")
    for concern in (Concern.CUT, Concern.UNCHANGED)
]
SHARES: dict[str, Any] = {"learner_shares": WAITING_LEARNER, "generator_shares": HELD_BACK_GENERATORS}


def test_the_first_note_is_the_headline() -> None:
    run = RunView(notes=NOTES, **SHARES)
    found = headline(run)
    assert found is not None
    assert (found.concern, found.warns) == (Concern.CUT, True)
    assert found.sentence == "the fact of cut. Likely causes: (1) first; (2) second. Look: asyncrl samples"


def test_without_a_note_the_headline_is_the_bottleneck_if_both_sides_are_known() -> None:
    found = headline(RunView(**SHARES))
    assert found is not None
    assert (found.concern, found.warns) == (Concern.BOTTLENECK, False)
    assert "raise staleness.max_versions" in found.sentence
    assert headline(RunView()) is None
    assert headline(RunView(learner_shares=WAITING_LEARNER)) is None, "the other side did not answer"
