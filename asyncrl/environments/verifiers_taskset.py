"""Tasksets of the package verifiers, as an environment of several turns.

verifiers 0.4 needs other versions of openai and mcp than vLLM, so it cannot be installed beside asyncrl. It runs in an
interpreter of its own (`verifiers_program.py`), which plays the episodes of a scoring process and calls the model with
the URL and the key of each session.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.data.prompts import Task
from asyncrl.environments.agents import Session
from asyncrl.errors import ConfigError

PROGRAM = Path(__file__).with_name("verifiers_program.py")
START_TIMEOUT_S = 120.0
"""Time to import verifiers and to load the tasks. A machine with other work needs about ten seconds."""
EPISODES = 500
"""Episodes that one process plays. verifiers keeps a client for each session, so a process is replaced after them."""


class VerifiersTaskset:
    """The tasks of a taskset, played by verifiers' harnesses.

    `python` is the interpreter whose environment has verifiers and the taskset. `env` is what verifiers' own files have
    as `[env]`: `{taskset: {id: …}, agent: {harness: {id: …}, runtime: {type: …}}}`. `size` is the largest number of
    tasks. `search_path` has folders with modules of tasksets that are not installed.
    """

    def __init__(
        self, *, python: str, env: Mapping[str, Any], size: int = 1000, search_path: Sequence[str] = ()
    ) -> None:
        # -P: the folder of the program has modules with names such as `math`.
        self._command = [python, "-P", str(PROGRAM), json.dumps(env), str(size)]
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
            "PYTHONPATH": os.pathsep.join(search_path),
            # Harnesses look for programs such as `uv` beside the interpreter.
            "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)]),
        }
        self._starting = asyncio.Lock()
        self._player: _Player | None = None

    def tasks(self, seed: int) -> Sequence[Task]:
        """Returns the tasks in the order of the taskset. Raises ConfigError if verifiers cannot load it."""
        del seed
        try:
            done = subprocess.run(
                self._command,
                env=self._environment,
                input=json.dumps({"id": 0, "what": "tasks"}) + "\n",
                capture_output=True,
                text=True,
                timeout=START_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", None) or "").strip().splitlines()
            raise ConfigError(
                f"environment.options: verifiers cannot load the taskset with python = {self._command[0]}: "
                f"{said[-1] if said else error}",
                key="environment.options",
            ) from error
        shown = json.loads(done.stdout)["tasks"]
        return [
            Task(question=f"{text} #{index}", answer="", metadata={"index": index}) for index, text in enumerate(shown)
        ]

    async def run(self, session: Session, task: Task) -> dict[str, float]:
        """Plays one task. Returns the weighted rewards by name. Raises RuntimeError with the error of verifiers."""
        player = await self._ready()
        answer = await player.play(
            {
                "index": task.metadata["index"],
                "base_url": session.base_url,
                "api_key": session.api_key,
                "model": session.model,
            }
        )
        if "error" in answer:
            raise RuntimeError(f"verifiers could not play the task: {answer['error']}")
        rewards: dict[str, float] = answer["rewards"]
        return rewards

    async def _ready(self) -> "_Player":
        async with self._starting:
            if self._player is None or self._player.is_done:
                self._player = _Player(
                    await asyncio.create_subprocess_exec(
                        *self._command,
                        env=self._environment,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                    )
                )
            return self._player


@dataclass(eq=False)
class _Player:
    """A process of the program, and the answers that are awaited by their number."""

    process: asyncio.subprocess.Process
    awaited: dict[int, "asyncio.Future[dict[str, Any]]"] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        self._reading = asyncio.create_task(self._read(), name="answers of verifiers")

    @property
    def is_done(self) -> bool:
        """Whether the process gets no more episodes."""
        return self.asked >= EPISODES or self._reading.done()

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to an order. Raises RuntimeError if the process ends."""
        self.asked += 1
        number = self.asked
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.awaited[number] = answer
        try:
            self._order({"id": number, "what": "play", **order})
            return await answer
        except asyncio.CancelledError:
            self._order({"id": number, "what": "stop"})
            raise
        finally:
            del self.awaited[number]
            if self.is_done and not self.awaited and self.process.stdin is not None:
                self.process.stdin.close()

    def _order(self, order: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            answer = json.loads(line)
            if (awaited := self.awaited.get(answer["id"])) is not None and not awaited.done():
                awaited.set_result(answer)
        code = await self.process.wait()
        for awaited in self.awaited.values():
            if not awaited.done():
                awaited.set_exception(RuntimeError(f"the process of verifiers ended with {code}"))
