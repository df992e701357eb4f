"""Small environments of several turns, for tests, docs and trials."""

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.data.prompts import Task
from asyncrl.environments.agents import Demonstration, Session


class GuessTheNumber:
    """The model guesses a number from 1 to `highest`, and is told whether the number is higher or lower.

    The reward is 1 if it finds the number within `guesses` guesses, and 0 otherwise. The prompt is the same in all
    games, so that the model cannot learn the numbers by heart.
    """

    def __init__(self, *, highest: int = 9, guesses: int = 3, size: int = 2000) -> None:
        self.highest, self.guesses, self.size = highest, guesses, size

    def tasks(self, seed: int) -> Sequence[Task]:
        draw = random.Random(seed)
        return [
            Task(question=f"Guess 1-{self.highest} #{number}", answer=str(draw.randint(1, self.highest)))
            for number in range(self.size)
        ]

    def demonstrations(self, seed: int) -> Sequence[Demonstration]:
        """Returns the guesses of games for the warm-up. Each guess is drawn with equal chances from all numbers, or
        from the numbers that agree with all hints so far. So a model learns which guesses the hints allow, and training
        still has to find out that these are better."""
        draw, made = random.Random(seed), []
        for task in self.tasks(seed):
            messages, lowest, highest = self._beginning(), 1, self.highest
            for _ in range(self.guesses):
                heeds = draw.random() < 0.5
                guess = draw.randint(lowest, highest) if heeds else draw.randint(1, self.highest)
                made.append(Demonstration(messages=tuple(messages), answer=str(guess)))
                messages += self._after({"role": "assistant", "content": str(guess)}, int(task.answer))
                lowest = max(lowest, guess + 1) if guess < int(task.answer) else lowest
                highest = min(highest, guess - 1) if guess > int(task.answer) else highest
                if guess == int(task.answer):
                    break
        return made

    async def run(self, session: Session, task: Task) -> float:
        """Plays one game, and returns its reward."""
        messages, number = self._beginning(), int(task.answer)
        for _ in range(self.guesses):
            reply = await session.chat(messages)
            if _guess(reply) == number:
                return 1.0
            messages += self._after(reply, number)
        return 0.0

    def _beginning(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"Guess 1-{self.highest}"}]

    def _after(self, reply: dict[str, Any], number: int) -> list[dict[str, Any]]:
        """Returns the reply, and what the model is told after it."""
        guess = _guess(reply)
        hint = "no number" if guess is None else "higher" if guess < number else "lower"
        return [reply, {"role": "user", "content": hint}]


def _guess(reply: Mapping[str, Any]) -> int | None:
    found = re.search(r"\d{1,9}", reply["content"] or "")
    return int(found[0]) if found else None


def _tool(name: str, *parameters: str) -> dict[str, Any]:
    """Returns the description of a tool with these parameters, which are texts."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def _written(name: str, arguments: Mapping[str, str]) -> str:
    """Returns the text of a tool call in the format in which the tiny model (`model.tiny`) writes it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def _called(name: str, arguments: Mapping[str, str], result: str) -> list[dict[str, Any]]:
    """Returns the messages of a call and of its result."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "1", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]


async def _answer(
    session: Session,
    question: str,
    *,
    tools: Sequence[Mapping[str, Any]],
    calls: int,
    result: Callable[[Mapping[str, str]], str],
) -> str:
    """Asks the model a question, and answers its tool calls with `result`, in at most `calls` turns. Returns the
    model's first answer without a tool call; empty if there was none."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(calls + 1):
        reply = await session.chat(messages, tools=tools)
        if not (called := reply.get("tool_calls")):
            return reply["content"] or ""
        results = ({"role": "tool", "tool_call_id": c["id"], "content": result(c["function"])} for c in called)
        messages += [reply, *results]
    return ""


def _right(text: str, answer: str) -> float:
    """Returns 1 if the last number of a text is the answer, and 0 otherwise."""
    found = re.findall(r"-?\d+", text)
    return float(bool(found) and found[-1] == answer)


CALCULATOR = _tool("calculator", "expression")


class Calculator:
    """The model answers a question of arithmetic, and can call a calculator.

    The reward is 1 if the number in its last answer is right, and 0 otherwise. The calculator may be called in `calls`
    turns.
    """

    def __init__(self, *, highest: int = 99, calls: int = 2, size: int = 2000) -> None:
        self.highest, self.calls, self.size = highest, calls, size

    def tasks(self, seed: int) -> Sequence[Task]:
        numbers = range(2, self.highest + 1)
        expressions = [f"{a} {sign} {b}" for a in numbers for b in numbers for sign in "+-*"]
        random.Random(seed).shuffle(expressions)
        return [
            Task(question=f"What is {expression}?", answer=str(calculated(expression)))
            for expression in expressions[: self.size]
        ]

    def demonstrations(self, seed: int) -> Sequence[Demonstration]:
        """Returns calls and answers for the warm-up, of which many are wrong. They show how to call the calculator and
        how to answer. Training still has to find out that the right expression and its result give the reward. Most
        first answers are guesses, so a model that takes the most probable answer gives a wrong one."""
        draw, made = random.Random(seed), []
        tasks = self.tasks(seed)
        for task in tasks:
            asked: dict[str, Any] = {"role": "user", "content": task.question}
            shown = _expression(draw.choice(tasks) if draw.random() < 0.4 else task)
            arguments, result = {"expression": shown}, str(calculated(shown))
            guess = str(draw.randint(0, self.highest))
            first = _written("calculator", arguments) if draw.random() < 0.4 else guess
            made.append(Demonstration(messages=(asked,), tools=(CALCULATOR,), answer=first))
            then = (asked, *_called("calculator", arguments, result))
            second = result if draw.random() < 0.6 else guess
            made.append(Demonstration(messages=then, tools=(CALCULATOR,), answer=second))
        return made

    async def run(self, session: Session, task: Task) -> float:
        """Lets the model answer one question, and returns its reward."""
        text = await _answer(session, task.question, tools=[CALCULATOR], calls=self.calls, result=_result)
        return _right(text, task.answer)


def _expression(task: Task) -> str:
    return task.question.removeprefix("What is ").removesuffix("?")


PUT, GET = _tool("put", "key", "value"), _tool("get", "key")
KEYS = "abcdefgh"


class KeyValueStore:
    """The model reads a value in one conversation, and must give it in another one without the messages of the first.

    It can keep the value with the tool `put`, and find it with the tool `get`. The reward is 1 if the last number of
    its answer is the value, and 0 otherwise. Each episode has a store of its own. The two conversations are branches of
    the episode.
    """

    def __init__(self, *, highest: int = 99, size: int = 2000) -> None:
        self.highest, self.size = highest, size

    def tasks(self, seed: int) -> Sequence[Task]:
        draw = random.Random(seed)
        values = [str(draw.randint(1, self.highest)) for _ in range(self.size)]
        return [
            Task(question=f"{draw.choice(KEYS)} is {value}. #{number}", answer=value)
            for number, value in enumerate(values)
        ]

    def demonstrations(self, seed: int) -> Sequence[Demonstration]:
        """Returns calls and answers for the warm-up. Many are wrong on purpose: they show how to call the tools and how
        to answer, and training still has to find out what gives the reward."""
        draw, made = random.Random(seed), []
        for task in self.tasks(seed):
            key, guess = task.question[0], str(draw.randint(1, self.highest))
            put = {"key": key, "value": task.answer if draw.random() < 0.8 else guess}
            get = {"key": key if draw.random() < 0.8 else draw.choice(KEYS)}
            told, asked = _told(task), _asked(task)
            calls = (
                ((told,), _written("put", put) if draw.random() < 0.8 else "ok"),
                ((told, *_called("put", put, "kept")), "ok"),
                ((asked,), _written("get", get) if draw.random() < 0.4 else guess),
                ((asked, *_called("get", get, task.answer)), task.answer if draw.random() < 0.8 else guess),
            )
            made += [Demonstration(messages=messages, tools=(PUT, GET), answer=answer) for messages, answer in calls]
        return made

    async def run(self, session: Session, task: Task) -> float:
        """Plays one episode: both conversations, with one store. Returns its reward."""
        store: dict[str, str] = {}

        def result(function: Mapping[str, str]) -> str:
            try:
                arguments = json.loads(function["arguments"])
                if function["name"] == "put":
                    store[str(arguments["key"])] = str(arguments["value"])
                    return "kept"
                return store.get(str(arguments["key"]), "nothing")
            except (ValueError, KeyError, TypeError) as error:
                return f"error: {error}"

        options: dict[str, Any] = {"tools": [PUT, GET], "calls": 1, "result": result}
        await _answer(session, _told(task)["content"], **options)
        return _right(await _answer(session, _asked(task)["content"], **options), task.answer)


def _told(task: Task) -> dict[str, Any]:
    return {"role": "user", "content": task.question.partition(" #")[0]}


def _asked(task: Task) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {task.question[0]}?"}


def calculated(expression: str) -> int | float:
    """Returns the value of an expression of numbers, `+ - * /` and parentheses.

    Raises ValueError for any other expression, for a division by zero, and for numbers beyond 10¹². Runs no code.

    >>> calculated("2 * (3 + 4)")
    14
    """
    try:
        value = _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} cannot be calculated: {error}") from None
    return int(value) if value == int(value) else value


_OPERATIONS: Mapping[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value: float = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only numbers, + - * / and parentheses can be calculated")
    if abs(value) > 10**12:
        raise ValueError("a number is beyond 10¹²")
    return value


def _result(function: Mapping[str, str]) -> str:
    """Returns what the calculator answers to a call: the number, or what is wrong."""
    if function["name"] != "calculator":
        return f"there is no tool {function['name']}"
    try:
        return str(calculated(str(json.loads(function["arguments"])["expression"])))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
