"""The built-in games, played by models that follow a script."""

import json
from typing import Any

import pytest

from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.games import Calculator, GuessTheNumber, KeyValueStore, calculated
from asyncrl.environments.interfaces import build_demonstrations, build_environment, build_reward, build_tasks


class Model:
    """A session whose model gives the `answers` in turn: texts, calls of a tool as (name, arguments), or expressions
    for the calculator in brackets."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.seen: list[list[Any]] = []

    async def chat(self, messages: list[Any], *, tools: Any = (), **options: Any) -> dict[str, Any]:
        del tools, options
        self.seen.append(list(messages))
        answer = self.answers.pop(0)
        if isinstance(answer, str) and not answer.startswith("["):
            return {"role": "assistant", "content": answer}
        name, arguments = ("calculator", {"expression": answer.strip("[]")}) if isinstance(answer, str) else answer
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answers", "reward", "results"),
    [
        ([("put", {"key": "b", "value": 4}), "ok", ("get", {"key": "b"}), "it is 4"], 1.0, ["kept", "4"]),
        (["ok", ("get", {"key": "b"}), "5"], 0.0, ["nothing"]),
        ([("put", {"key": "b"}), "ok", "4"], 1.0, ["error: 'value'"]),
        ([("put", {"key": "b", "value": "4"}), ("get", {"key": "b"}), ("get", {"key": "b"}), "4"], 1.0, ["kept", "4"]),
        (["ok", ("get", {"key": "b"}), ("get", {"key": "b"})], 0.0, ["nothing"]),
    ],
)
async def test_key_value_store(answers: list[Any], reward: float, results: list[str]) -> None:
    model = Model(*answers)
    task = Task(question="b is 4. #7", answer="4")
    assert await KeyValueStore().run(model, task) == reward  # type: ignore[arg-type]
    shown = [messages[0]["content"] for messages in model.seen]
    assert set(shown) == {"b is 4.", "What is b?"}
    assert shown == sorted(shown, reverse=True), "the second conversation begins when the first one has ended"
    last = [message["content"] for seen in model.seen[1:] for message in seen[-1:] if message["role"] == "tool"]
    assert last[: len(results)] == results


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answers", "reward", "hints"),
    [
        (["7"], 1.0, []),
        (["5", "8", "7"], 1.0, ["higher", "lower"]),
        (["what", "9", "1"], 0.0, ["no number", "lower"]),
    ],
)
async def test_guess_the_number(answers: list[str], reward: float, hints: list[str]) -> None:
    model = Model(*answers)
    assert await GuessTheNumber().run(model, Task(question="q", answer="7")) == reward  # type: ignore[arg-type]
    assert [message["content"] for message in model.seen[-1] if message["role"] == "user"][1:] == hints


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answers", "reward", "results"),
    [
        (["It is 42."], 1.0, []),
        (["[6 * 7]", "42"], 1.0, ["42"]),
        (["[6 * x]", "[6 * 7]", "41"], 0.0, ["error: only numbers, + - * / and parentheses can be calculated", "42"]),
        (["[1]", "[2]", "[3]"], 0.0, ["1", "2"]),
        (["none"], 0.0, []),
    ],
)
async def test_calculator(answers: list[str], reward: float, results: list[str]) -> None:
    model = Model(*answers)
    task = Task(question="What is 6 * 7?", answer="42")
    assert await Calculator().run(model, task) == reward  # type: ignore[arg-type]
    assert [message["content"] for message in model.seen[-1] if message["role"] == "tool"] == results


@pytest.mark.parametrize("expression", ["__import__('os')", "2 ** 9", "1e13", "1 / 0", "(" * 500, "True", "'a'", ""])
def test_the_calculator_refuses_everything_but_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calculated(expression)


def test_the_calculator_calculates() -> None:
    assert [calculated(each) for each in ("2 * (3 + 4)", "-7 / 2", "6 / 3")] == [14, -3.5, 2]


@pytest.mark.parametrize("name", ["guess_the_number", "calculator", "key_value_store"])
def test_the_games_are_environments_whose_tasks_a_seed_determines(name: str) -> None:
    config = Config.model_validate({"environment": {"name": name}, "data": {"dataset": "environment"}})
    train, heldout = build_tasks(config)
    assert len({task.question for task in (*train, *heldout)}) == 2000
    assert len(build_environment(EnvironmentSection(name=name)).demonstrations(1)) > 2000  # type: ignore[union-attr]
    assert build_tasks(config) == (train, heldout)
    assert build_reward(EnvironmentSection(name=name)).form.agent


@pytest.mark.parametrize(
    ("section", "shown"),
    [
        ({"environment": {"name": "calculator"}}, True),
        ({"environment": {"name": "calculator", "agent": "my_agents:run"}}, True),
        ({"environment": {"name": "calculator", "agent": "my_agents:run"}, "data": {"dataset": "my_data:rows"}}, False),
        ({"environment": {"reward": "exact_match"}, "data": {"dataset": "my_data:rows"}}, False),
    ],
)
def test_an_agent_of_your_own_that_plays_a_games_tasks_has_its_demonstrations(
    section: dict[str, Any], shown: bool
) -> None:
    assert bool(build_demonstrations(Config.model_validate(section))) == shown
