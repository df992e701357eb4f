"""Several rewards of one completion: their sum counts, and each is known by its name."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.config.rules import check_config
from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.group_scoring import GroupScoring
from asyncrl.environments.interfaces import build_reward
from asyncrl.environments.scoring_messages import Components, Failure, Group, Outcome, Reply, Request, RewardFailure
from asyncrl.environments.verifiers import regex
from asyncrl.errors import ConfigError

HERE = "test_reward_terms"


def long(task: Task, completion: str) -> float:
    return float(len(completion))


def shortest(task: Task, completions: Sequence[str]) -> list[float]:
    return [float(len(each) == min(map(len, completions))) for each in completions]


async def asked(task: Task, completion: str) -> float:
    await asyncio.sleep(0)
    return 0.5


async def ranked(task: Task, completions: Sequence[str]) -> list[float]:
    return [float(number) for number, _ in enumerate(completions)]


def raises(task: Task, completion: str) -> float:
    raise KeyError(completion) if completion == "bad" else ValueError("always")


def too_few(task: Task, completions: Sequence[str]) -> list[float]:
    return [1.0]


def parts(task: Task, completion: str) -> dict[str, float]:
    return {"right": 1.0, "style": -0.25}


def section(*names: str, **options: Any) -> EnvironmentSection:
    terms = [{"name": name, "fn": f"{HERE}:{name}", "weight": weight} for weight, name in enumerate(names, start=1)]
    return EnvironmentSection.model_validate({"rewards": terms} | options)


def scored(environment: EnvironmentSection, *completions: str) -> list[Outcome]:
    sent: list[Reply] = []
    task = Task(question="2+2=", prompt="2+2=", answer="4")
    scoring = GroupScoring(build_reward(environment), environment, send=sent.append)
    scoring.score(Request(id=1, groups=(Group(task=task, completions=completions),)))
    return [outcome for _, outcome in sorted((pair for reply in sent for pair in reply.outcomes), key=lambda p: p[0])]


@pytest.mark.parametrize(
    ("names", "first", "second"),
    [
        (("long",), {"long": 1.0}, {"long": 3.0}),
        (("long", "shortest"), {"long": 1.0, "shortest": 1.0}, {"long": 3.0, "shortest": 0.0}),
        (("long", "asked"), {"long": 1.0, "asked": 0.5}, {"long": 3.0, "asked": 0.5}),
        (
            ("ranked", "asked", "shortest", "long"),
            {"ranked": 0.0, "asked": 0.5, "shortest": 1.0, "long": 1.0},
            {"ranked": 1.0, "asked": 0.5, "shortest": 0.0, "long": 3.0},
        ),
    ],
)
def test_rewards_of_any_form_are_added_by_their_weights(
    names: tuple[str, ...], first: dict[str, float], second: dict[str, float]
) -> None:
    outcomes = scored(section(*names), "a", "abc")
    for outcome, expected in zip(outcomes, (first, second), strict=True):
        assert isinstance(outcome, Components)
        assert outcome.parts == expected
        assert outcome.total == sum(weight * expected[name] for weight, name in enumerate(names, start=1))


def test_a_reward_may_return_its_components_itself() -> None:
    [outcome] = scored(EnvironmentSection(reward=f"{HERE}:parts"), "x")
    assert outcome == Components(total=0.75, parts={"right": 1.0, "style": -0.25})


@pytest.mark.parametrize("with_asked", [False, True])
@pytest.mark.fault("F19")
def test_the_error_of_one_reward_names_it_and_fails_that_completion_only(with_asked: bool) -> None:
    names = ("long", "raises", "asked") if with_asked else ("long", "raises")
    outcomes = scored(section(*names), "bad", "good")
    for outcome, text in zip(outcomes, ("KeyError: 'bad'", "ValueError: always"), strict=True):
        assert isinstance(outcome, Failure)
        assert outcome.message.startswith(f"environment.rewards: raises raised {text} (")
        assert outcome.reason is RewardFailure.RAISED


@pytest.mark.fault("F19")
def test_a_reward_of_a_group_with_too_few_numbers_names_itself() -> None:
    [first, _] = scored(section("long", "too_few"), "a", "b")
    assert isinstance(first, Failure)
    assert first.message.startswith("environment.rewards: too_few returned 1 rewards for 2 completions")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "returned an empty dict"),
        ({1: 2.0}, "returned a dict with the key 1"),
        ({"right": None}, "returned None as 'right'"),
        ({"right": float("nan")}, "returned nan as 'right'"),
        ({"right": 1e308, "style": 1e308}, "returned components whose sum is inf"),
    ],
)
@pytest.mark.fault("F19")
def test_components_that_are_no_finite_numbers_fail(
    value: dict[Any, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{HERE}.parts", lambda task, completion: value)
    [outcome] = scored(EnvironmentSection(reward=f"{HERE}:parts"), "x")
    assert isinstance(outcome, Failure)
    assert message in outcome.message


def test_built_in_rewards_take_their_options() -> None:
    rewards = [
        {"name": "format", "fn": "regex", "options": {"pattern": "<answer>.*</answer>"}, "weight": 0.5},
        {"name": "right", "fn": "exact_match"},
        {"name": "brief", "fn": "length", "options": {"free_chars": 3, "buffer_chars": 10}},
    ]
    environment = EnvironmentSection.model_validate({"rewards": rewards})
    first, second = scored(environment, "4", "<answer>4</answer>")
    assert first == Components(total=1.0, parts={"format": 0.0, "right": 1.0, "brief": 0.0})
    assert second == Components(total=-0.5, parts={"format": 1.0, "right": 0.0, "brief": -1.0})


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"fn": "regexp"}, r"environment\.rewards\.x\.fn = regexp: must be one of .*did you mean 'regex'"),
        ({"fn": "tasks"}, r"environment\.rewards\.x\.fn = tasks: must be one of"),
    ],
)
def test_an_unknown_reward_is_refused_with_the_known_ones(term: dict[str, Any], message: str) -> None:
    config = Config.model_validate({"environment": {"rewards": [{"name": "x"} | term]}})
    with pytest.raises(ConfigError, match=message):
        check_config(config)


def test_two_rewards_need_two_names_and_reward_is_not_set_beside_them() -> None:
    twice = [{"name": "x", "fn": "exact_match"}] * 2
    config = Config.model_validate({"environment": {"rewards": twice, "reward": "exact_match"}})
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    assert "has 2 rewards with the name x" in str(caught.value)
    assert "environment.reward: has no effect with environment.rewards" in str(caught.value)


def test_options_that_a_reward_does_not_take_are_refused_with_its_name() -> None:
    rewards = [{"name": "format", "fn": "regex", "options": {"patern": "x"}}]
    with pytest.raises(
        ConfigError, match=r"environment\.rewards\.format\.options: the reward regex cannot take them .*patern"
    ):
        build_reward(EnvironmentSection.model_validate({"rewards": rewards}))
    for fn, missing, options in (
        ("regex", "pattern", "pattern, whole, generation_prompt"),
        ("length", "free_chars", "free_chars, buffer_chars"),
        ("judge", "model", "model, url, url_variable, prompt, key_variable, max_tokens, most_per_s, time_limit_s"),
    ):
        lacking = {"rewards": [{"name": "format", "fn": fn}]}
        with pytest.raises(ConfigError, match=rf"{fn} cannot take them \(missing .*'{missing}'\); .* {options}$"):
            build_reward(EnvironmentSection.model_validate(lacking))


@pytest.mark.parametrize(
    ("end", "completion", "matches"),
    [
        ("<|im_start|>assistant\n<think>\n", "12 </think> 7", True),
        ("<|assistant|><think>", "</think>", True),
        ("<|im_start|>assistant\n", "12 </think> 7", False),
        ("", "<think>12</think> 7", True),
    ],
)
def test_a_regex_may_begin_with_the_generation_prompt(end: str, completion: str, matches: bool) -> None:
    task = Task(question="q", answer="7", generation_prompt=end)
    assert regex(task, completion, pattern="<think>.*</think>", generation_prompt=True) == float(matches)
    assert regex(task, completion, pattern="<think>.*</think>") == float("<think>" in completion)
