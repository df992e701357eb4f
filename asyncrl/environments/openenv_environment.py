"""Environments of the package openenv, as an environment of several turns.

OpenEnv 0.10 needs other versions of openai and mcp than vLLM, so its client runs in an interpreter of its own
(`own_interpreter.py`, `openenv_program.py`). The conversation with the model takes place here: an observation becomes
a message of the user, and the text of the model's answer becomes an action.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from asyncrl.config.import_path import resolve
from asyncrl.data.prompts import Task
from asyncrl.environments.agents import Session
from asyncrl.environments.own_interpreter import OwnInterpreter
from asyncrl.errors import ConfigError

PROGRAM = Path(__file__).with_name("openenv_program.py")


class OpenEnvEnvironment:
    """An OpenEnv environment at the URL `url`, or of a server that each scoring process starts with `command`.

    `python` is the interpreter whose environment has openenv. In `command`, `{port}` is replaced by a free port.
    `message` and `action` are import paths of functions: `message` takes an observation as a dict, and returns the text
    of a message. `action` takes the text of an answer, and returns an action as a dict, or raises ValueError if the
    text is not an action. `system_prompt` comes before the first message. An episode ends after `turns` actions if the
    environment does not end it. `reset` has arguments of the environment's reset for all tasks. There are `size` tasks,
    each with a seed of its own. `search_path` has folders with modules that are not installed.
    """

    def __init__(
        self,
        *,
        python: str,
        url: str | None = None,
        command: Sequence[str] = (),
        message: str | None = None,
        action: str | None = None,
        system_prompt: str = "",
        turns: int = 8,
        reset: Mapping[str, Any] | None = None,
        size: int = 1000,
        search_path: Sequence[str] = (),
    ) -> None:
        if (url is None) == (not command):
            raise ConfigError(
                "environment.options: OpenEnv needs either the url of a server or the command that starts one; set "
                "one of them"
            )
        self._interpreter = OwnInterpreter(
            "OpenEnv", python=python, part=PROGRAM, options={"url": url, "command": command}, search_path=search_path
        )
        key = "environment.options"
        self._message: Callable[[Mapping[str, Any]], str] = resolve(message, key=key) if message else default_message
        self._action: Callable[[str], Mapping[str, Any]] | None = resolve(action, key=key) if action else None
        self._system_prompt = system_prompt
        self._turns = turns
        self._reset = dict(reset or {})
        self._size = size
        self._numbers = count()

    def tasks(self, seed: int) -> Sequence[Task]:
        """Returns tasks with different seeds. Each question shows the seed of its own task, and the first message of
        the first task, because only this task is reset here. Raises ConfigError if the environment cannot be reset."""
        seeds = random.Random(seed).sample(range(2**31), self._size)
        arguments = [{**self._reset, "seed": each} for each in seeds]
        first = self._interpreter.once({"what": "reset", "episode": 0, "arguments": arguments[0]})
        text = self._message(first["observation"])
        return [Task(question=f"{text} #{each['seed']}", answer="", metadata={"reset": each}) for each in arguments]

    async def run(self, session: Session, task: Task) -> float:
        """Plays one episode, and returns the sum of its rewards. If an answer of the model is not an action, or the
        environment does not accept the action, the episode ends there, and the rewards so far count."""
        episode, total = next(self._numbers), 0.0
        arguments = {**self._reset, **task.metadata.get("reset", {})}
        messages: list[dict[str, Any]] = []
        if self._system_prompt:
            messages.append({"role": "system", "content": self._system_prompt})
        async with self._interpreter.episode() as process:
            try:
                seen = await process.ask(what="reset", episode=episode, arguments=arguments)
                fields: Sequence[str] = seen["fields"]
                for _ in range(self._turns):
                    if seen["done"]:
                        break
                    messages.append({"role": "user", "content": self._message(seen["observation"])})
                    reply = await session.chat(messages)
                    messages.append(reply)
                    try:
                        text = reply["content"] or ""
                        action = self._action(text) if self._action else default_action(text, fields)
                    except ValueError:
                        break
                    seen = await process.ask(what="step", episode=episode, action=action)
                    if "invalid" in seen:
                        break
                    total += float(seen["reward"] or 0)
            finally:
                process.tell(what="close", episode=episode)
        return total


def default_message(observation: Mapping[str, Any]) -> str:
    """Returns the only value of an observation, or all its values as JSON. The observation's `metadata` is left out.

    >>> default_message({"prompt": "Guess 1-9", "metadata": {}})
    'Guess 1-9'
    >>> default_message({"hint": "higher", "left": 2})
    '{"hint": "higher", "left": 2}'
    """
    shown = {name: value for name, value in observation.items() if name != "metadata"}
    return str(*shown.values()) if len(shown) == 1 else json.dumps(shown, ensure_ascii=False)


def default_action(text: str, fields: Sequence[str]) -> dict[str, Any]:
    """Returns the action of an answer. If actions have one field, the text is its value. Otherwise the text must be the
    action as a JSON object. Raises ValueError if it is not.

    >>> default_action("5", ["guess"])
    {'guess': '5'}
    >>> default_action('{"row": 1, "column": 2}', ["row", "column"])
    {'row': 1, 'column': 2}
    """
    if len(fields) == 1:
        return {fields[0]: text.strip()}
    action = json.loads(text)
    if not isinstance(action, dict):
        raise ValueError(f"an action is a JSON object, not {text!r}")
    return action
