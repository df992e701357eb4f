"""Tasksets of the package verifiers, as an environment of several turns.

verifiers 0.4 needs other versions of openai and mcp than vLLM, so it runs in an interpreter of its own
(`own_interpreter.py`). Each scoring process has one such interpreter, in which `verifiers_program.py` plays its
episodes. The program calls the model with the URL and the key of each session.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.data.prompts import Task
from asyncrl.environments.agents import Session
from asyncrl.environments.own_interpreter import OwnInterpreter

PROGRAM = Path(__file__).with_name("verifiers_program.py")
EPISODES = 500
"""Episodes after which a process is replaced, because verifiers keeps a client of each session in its memory."""


class VerifiersTaskset:
    """The tasks of a taskset, played by verifiers' harnesses.

    `python` is the interpreter whose environment has verifiers and the taskset. `env` is what verifiers' own
    configuration files have as `[env]`: `{taskset: {id: …}, agent: {harness: {id: …}, runtime: {type: …}}}`. `size` is
    the largest number of tasks. `search_path` has folders with modules of tasksets that are not installed.
    """

    def __init__(
        self, *, python: str, env: Mapping[str, Any], size: int = 1000, search_path: Sequence[str] = ()
    ) -> None:
        self._interpreter = OwnInterpreter(
            "verifiers",
            python=python,
            part=PROGRAM,
            options={"env": env, "size": size},
            search_path=search_path,
            episodes=EPISODES,
        )

    def tasks(self, seed: int) -> Sequence[Task]:
        """Returns the tasks in the order of the taskset, for any `seed`. Raises ConfigError if verifiers cannot load
        it."""
        del seed
        shown = self._interpreter.once({"what": "tasks"})["tasks"]
        return [
            Task(question=f"{text} #{index}", answer="", metadata={"index": index}) for index, text in enumerate(shown)
        ]

    async def run(self, session: Session, task: Task) -> dict[str, float]:
        """Plays one task. Returns the weighted rewards by name. Raises RuntimeError with the error of verifiers."""
        async with self._interpreter.episode() as process:
            answer = await process.ask(
                what="play",
                index=task.metadata["index"],
                base_url=session.base_url,
                api_key=session.api_key,
                model=session.model,
            )
        rewards: dict[str, float] = answer["rewards"]
        return rewards
