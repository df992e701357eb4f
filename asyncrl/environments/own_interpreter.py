"""Packages that cannot be installed beside asyncrl, in an interpreter of their own.

verifiers and OpenEnv need other versions of openai and mcp than vLLM. The part of an environment that uses such a
package is a file, which an interpreter of another virtual environment runs (`own_interpreter_main.py`). A scoring
process starts the interpreter when it plays its first episode. It sends orders as lines of JSON, and gets the answers
in any order.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

MAIN = Path(__file__).with_name("own_interpreter_main.py")
START_TIMEOUT_S = 120.0
"""Seconds in which `once` must get its answer, with the import of the package. A busy machine needs about ten."""


class OwnInterpreter:
    """A file that runs in another interpreter, and its process.

    `package` is the package's name in errors, `python` the interpreter that has it, `part` the file, and `options` the
    keyword arguments of the file's class `Part`. `search_path` has folders with modules that are not installed. A
    process is replaced after `episodes` episodes; with None, never.
    """

    def __init__(
        self,
        package: str,
        *,
        python: str,
        part: Path,
        options: Mapping[str, Any],
        search_path: Sequence[str] = (),
        episodes: int | None = None,
    ) -> None:
        self._package = package
        self._episodes = episodes
        # -P keeps the folder of MAIN off the search path, whose `secrets.py` and `verifiers.py` would hide Python's
        # module `secrets` and the package `verifiers`.
        self._command = [python, "-P", str(MAIN), str(part), json.dumps(options)]
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
            "PYTHONPATH": os.pathsep.join(search_path),
            # Packages look for programs such as `uv` and `uvicorn` beside the interpreter.
            "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)]),
        }
        self._starting = asyncio.Lock()
        self._process: Process | None = None

    def once(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Starts a process that answers only this order, and returns the answer. Raises ConfigError with the cause if
        the process cannot start, fails, or has not ended after `START_TIMEOUT_S`, or if the package raises an error."""
        try:
            done = subprocess.run(
                [*self._command, json.dumps({"id": 0, **order})],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=START_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", None) or "").strip().splitlines()
            raise self._refused(said[-1] if said else str(error)) from error
        answer: dict[str, Any] = json.loads(done.stdout)
        if "error" in answer:
            raise self._refused(answer["error"])
        return answer

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"environment.options: {self._package} cannot run with python = {self._command[0]}: {why}")

    @asynccontextmanager
    async def episode(self) -> AsyncIterator["Process"]:
        """Yields the process for the orders of one episode. Starts a new process if there is none, or if the last one
        gets no more episodes."""
        async with self._starting:
            if self._process is None or self._process.is_done:
                started = await asyncio.create_subprocess_exec(
                    *self._command,
                    env=self._environment,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=2**26,  # bytes of one answer, such as an observation
                )
                self._process = Process(self._package, started, left=self._episodes)
            process = self._process
            process.begin()
        try:
            yield process
        finally:
            process.end()


@dataclass(eq=False)
class Process:
    """A process of the interpreter. `awaited` has the answers that are still to come, with the number of their request
    as key. `left` is the number of episodes that it may still begin; None without a limit. `episodes` counts the
    episodes that run now, and `asked` all orders that were sent."""

    package: str
    process: asyncio.subprocess.Process
    left: int | None
    awaited: dict[int, "asyncio.Future[dict[str, Any]]"] = field(default_factory=dict)
    episodes: int = 0
    asked: int = 0

    def __post_init__(self) -> None:
        self._reading = asyncio.create_task(self._read(), name=f"answers of {self.package}")

    @property
    def is_done(self) -> bool:
        """Whether the process gets no more episodes: it has begun all that it may begin, or it has ended."""
        return self.left == 0 or self._reading.done()

    def begin(self) -> None:
        """Counts an episode that begins."""
        self.episodes += 1
        self.left = None if self.left is None else self.left - 1

    def end(self) -> None:
        """Counts an episode that ends. If no other episode runs, and the process gets no more episodes, closes its
        input, which ends the process."""
        self.episodes -= 1
        if self.is_done and not self.episodes and self.process.stdin is not None:
            self.process.stdin.close()

    async def ask(self, **order: Any) -> dict[str, Any]:
        """Returns the answer to an order. Raises RuntimeError with the error of the package, or if the process ends. If
        the caller is cancelled, the work on the order is cancelled too."""
        number = self.tell(**order)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.awaited[number] = answer
        try:
            if self._reading.done():
                raise RuntimeError(f"the process of {self.package} has ended")
            answered = await answer
        except asyncio.CancelledError:
            self.tell(what="stop", of=number)
            raise
        finally:
            del self.awaited[number]
        if "error" in answered:
            raise RuntimeError(f"{self.package} failed: {answered['error']}")
        return answered

    def tell(self, **order: Any) -> int:
        """Sends an order and does not wait for its answer. Returns the number of the order."""
        assert self.process.stdin is not None
        self.asked += 1
        self.process.stdin.write(json.dumps({"id": self.asked, **order}).encode() + b"\n")
        return self.asked

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            answer = json.loads(line)
            if (awaited := self.awaited.get(answer["id"])) is not None and not awaited.done():
                awaited.set_result(answer)
        code = await self.process.wait()
        for awaited in self.awaited.values():
            if not awaited.done():
                awaited.set_exception(RuntimeError(f"the process of {self.package} ended with {code}"))
