"""The signature of a reward selects one of four forms. A function that cannot be called is refused with its
signature."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.config.schema import EnvironmentSection
from asyncrl.environments.interfaces import build_reward
from asyncrl.environments.reward_function import Form, reward_function, subject
from asyncrl.errors import ConfigError

HERE = "test_reward_function"
SECTION = EnvironmentSection(reward="tasks:judge")


def one(task: Any, completion: Any) -> float:
    return 1.0


async def one_async(task: Any, completion: Any) -> float:
    return 1.0


def group(task: Any, completions: Any) -> list[float]:
    return [1.0] * len(completions)


async def group_async(task: Any, completions: Any, *, scale: float = 1.0) -> list[float]:
    return [scale] * len(completions)


class Judge:
    async def __call__(self, task: Any, completion: Any) -> float:
        return 1.0

    def score(self, task: Any, completions: Any) -> list[float]:
        return [1.0] * len(completions)

    def tasks(self, seed: int) -> list[Any]:
        return []


@functools.wraps(group)
def wrapped(*arguments: Any) -> Any:
    return group(*arguments)


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (one, Form()),
        (one_async, Form(asynchronous=True)),
        (group, Form(batched=True)),
        (group_async, Form(batched=True, asynchronous=True)),
        (Judge(), Form(asynchronous=True)),
        (Judge().score, Form(batched=True)),
        (functools.partial(group_async, scale=2.0), Form(batched=True, asynchronous=True)),
        (wrapped, Form(batched=True)),
        (lambda prompt, text, strict=True: 1.0, Form()),
        (lambda *anything: 1.0, Form()),
        (lambda task, *completions: 1.0, Form()),
        (max, Form()),
    ],
)
def test_the_form_of_a_reward_is_read_from_its_signature(function: Callable[..., Any], form: Form) -> None:
    assert reward_function(function, named=subject(SECTION)).form == form


def test_the_score_of_an_environment_has_the_same_forms() -> None:
    assert build_reward(EnvironmentSection(name=f"{HERE}:Judge")).form == Form(batched=True)
    assert build_reward(EnvironmentSection(reward="exact_match")).form == Form()


class Asks:
    def score(self, prompt: str, completion: str, answer: str) -> float:
        return 1.0

    def tasks(self, seed: int) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        (
            {"reward": f"{HERE}:needs_three"},
            "environment.reward",
            r"needs_three has the parameters \(prompt, completion, answer\) and cannot be called with two arguments "
            r"\(missing a required argument: 'answer'\); a reward takes \(task, completion\) for one",
        ),
        ({"reward": f"{HERE}:needs_names"}, "environment.reward", r"parameters \(\*, task, completion\) and cannot"),
        ({"reward": f"{HERE}:Judge.score"}, "environment.reward", "missing a required argument: 'completions'"),
        ({"name": f"{HERE}:Asks"}, "environment.name", rf"environment.name = {HERE}:Asks has the parameters \(prompt:"),
    ],
)
def test_a_function_that_cannot_be_called_with_task_and_completion_is_refused_before_anything_is_scored(
    section: dict[str, str], key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_reward(EnvironmentSection(**section))
    assert key in str(caught.value)


def needs_three(prompt, completion, answer):  # type: ignore[no-untyped-def]
    """Only the parameter names matter here. Annotations would appear in the error."""


def needs_names(*, task, completion):  # type: ignore[no-untyped-def]
    """Has no annotations, for the same reason as `needs_three`."""


def for_trl(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
    """A reward as in TRL's documentation."""
    assert kwargs["answer"] == ["7", "7"]
    return [float(prompt == "3+4=" and completion == "7") for prompt, completion in zip(prompts, completions)]  # noqa: B905


async def for_trl_async(completions, level, answer, strict=True, **kwargs):  # type: ignore[no-untyped-def]
    assert (level, strict) == ([2, 2], True)
    return [float(completion == right) for completion, right in zip(completions, answer)]  # noqa: B905


@pytest.mark.parametrize("function", [for_trl, for_trl_async])
def test_a_reward_for_trl_is_refused_with_an_adapter_that_works(function: Callable[..., Any]) -> None:
    import asyncio

    from asyncrl.data.prompts import Task

    name = function.__name__
    with pytest.raises(ConfigError) as caught:
        build_reward(EnvironmentSection(reward=f"{HERE}:{name}"))
    first, *adapter = str(caught.value).splitlines()
    assert first.startswith(f"environment.reward = {HERE}:{name} has the parameters (")
    assert first.endswith(f"module {HERE} and set environment.reward: {HERE}:{name}_of_task")
    assert len(adapter) == 3
    names: dict[str, Any] = {name: function}
    exec("\n".join(line.removeprefix("    ") for line in adapter), names)
    adapted = reward_function(names[f"{name}_of_task"], named=subject(SECTION))
    assert adapted.form == Form(batched=True, asynchronous=name == "for_trl_async")
    rewards = adapted.function(Task(question="3+4", prompt="3+4=", answer="7", metadata={"level": 2}), ("7", "8"))
    assert (asyncio.run(rewards) if adapted.form.asynchronous else rewards) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["for_trl_by_name", "for_trl_alone"])
def test_the_other_ways_to_write_a_reward_for_trl_are_recognised(name: str) -> None:
    with pytest.raises(ConfigError, match=f"like a reward for TRL.*\n    def {name}_of_task"):
        build_reward(EnvironmentSection(reward=f"{HERE}:{name}"))


def for_trl_by_name(*, completions, prompts, **kwargs):  # type: ignore[no-untyped-def]
    """Takes keyword arguments only."""


def for_trl_alone(completions):  # type: ignore[no-untyped-def]
    """Takes only the completions."""
