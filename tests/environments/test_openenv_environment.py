"""Environments of OpenEnv in a process of their own. The process has a small package instead of openenv, which cannot
be installed beside asyncrl. benchmarks/agent_clients.py runs the real one."""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.environments.interfaces import build_environment
from asyncrl.environments.openenv_environment import OpenEnvEnvironment, default_action, default_message
from asyncrl.errors import ConfigError

CORE = """
import asyncio, json, pathlib
from types import SimpleNamespace as Made

LOG = pathlib.Path(__file__).parents[3] / "log"
SESSIONS = 2

def log(*said):
    with LOG.open("a") as file:
        file.write(json.dumps(said) + chr(10))

class GenericEnvClient:
    playing = 0

    def __init__(self, base_url, message_timeout_s):
        self.url, self.number = base_url, None

    async def reset(self, seed, **arguments):
        if GenericEnvClient.playing == SESSIONS:
            raise RuntimeError("Server error: full (code: CAPACITY_REACHED)")
        GenericEnvClient.playing += 1
        self.number, self.left = seed % 9 + 1, 3
        log("reset", seed, arguments)
        await asyncio.sleep(0.01)
        return Made(observation={"text": "Guess 1-9", "metadata": {}}, reward=None, done=False)

    async def step(self, action):
        log("step", action)
        said = action["guess"]
        if said == "hang":
            await asyncio.sleep(100)
        if said == "break":
            raise RuntimeError("Server error: it broke (code: EXECUTION_ERROR)")
        if not said.isdigit():
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        self.left -= 1
        right = int(said) == self.number
        hint = "right" if right else "higher" if int(said) < self.number else "lower"
        return Made(observation={"text": hint, "metadata": {}}, reward=[0.25, 1][right], done=right or not self.left)

    async def close(self):
        if self.number is not None:
            GenericEnvClient.playing -= 1
            log("close", self.number)
"""
SERVER = """
import http.server, json, os, pathlib, sys

class Schema(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        fields = {"guess": {"type": "integer"}, "metadata": {"type": "object"}}
        action = {"properties": fields, "required": ["guess"]}
        self.send_response(200 if self.path == "/schema" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"action": action}).encode())

if sys.argv[1] == "broken":
    sys.exit(3)
with (pathlib.Path(__file__).parent / "servers").open("a") as file:
    file.write(f"{os.getpid()} ")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Schema).serve_forever()
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path) -> None:
    folder = tmp_path / "path" / "openenv" / "core"
    folder.mkdir(parents=True)
    (folder / "generic_client.py").write_text(CORE)
    (tmp_path / "server.py").write_text(SERVER)


def made(folder: Path, *, argument: str = "{port}", **options: Any) -> OpenEnvEnvironment:
    command = [sys.executable, str(folder / "server.py"), argument]
    return OpenEnvEnvironment(
        python=sys.executable, command=command, size=5, search_path=[str(folder / "path")], **options
    )


def said(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def servers(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "servers").read_text().split()]


def task(number: int) -> Task:
    return Task(question="q", answer="", metadata={"reset": {"seed": number - 1}})


class Model:
    """A session whose model writes the `answers` in turn. `read` has the messages of its last call."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.read: Sequence[Mapping[str, Any]] = ()

    async def chat(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        self.read = list(messages)
        return {"role": "assistant", "content": self.answers.pop(0)}


async def played(environment: OpenEnvEnvironment, number: int, *answers: str) -> tuple[float, Model]:
    model: Any = Model(*answers)
    reward = await environment.run(model, task(number))
    assert model.answers == []
    return reward, model


def spoken(text: Mapping[str, Any]) -> str:
    return f"It says {text['text']}"


def last_word(text: str) -> dict[str, Any]:
    return {"guess": text.split()[-1].removesuffix(".")}


def numbers_only(text: str) -> dict[str, Any]:
    return {"guess": str(int(text))}


def test_tasks_have_different_seeds_and_the_first_message(tmp_path: Path) -> None:
    environment = made(tmp_path, reset={"level": 2}, message="test_openenv_environment:spoken")
    tasks = environment.tasks(1)
    resets = [each.metadata["reset"] for each in tasks]
    assert [reset["level"] for reset in resets] == [2] * 5
    assert len({reset["seed"] for reset in resets}) == 5
    assert tasks[1].question == f"It says Guess 1-9 #{resets[1]['seed']}"
    assert environment.tasks(1) == tasks != environment.tasks(2)
    assert [name for name, *_ in said(tmp_path)] == ["reset", "close"] * 3
    assert said(tmp_path)[0] == ["reset", resets[0]["seed"], {"level": 2}]
    assert not any(map(psutil.pid_exists, servers(tmp_path)))


@pytest.mark.asyncio
async def test_an_episode_has_a_message_for_each_observation_and_the_sum_of_the_rewards(tmp_path: Path) -> None:
    reward, model = await played(made(tmp_path, system_prompt="Play."), 6, "5", " 8 ", "6")
    assert reward == 1.5
    assert model.read == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Guess 1-9"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": " 8 "},
        {"role": "user", "content": "lower"},
    ]
    assert said(tmp_path)[1:4] == [["step", {"guess": guess}] for guess in "586"]


@pytest.mark.asyncio
async def test_own_functions_make_messages_and_actions(tmp_path: Path) -> None:
    here = "test_openenv_environment"
    environment = made(tmp_path, message=f"{here}:spoken", action=f"{here}:last_word", reset={"level": 1})
    reward, model = await played(environment, 4, "I guess 3.", "Then 4.")
    assert (reward, model.read[-1]["content"]) == (1.25, "It says higher")
    assert said(tmp_path)[0] == ["reset", 3, {"level": 1}]


@pytest.mark.asyncio
@pytest.mark.parametrize("action", [None, "test_openenv_environment:numbers_only"])
async def test_an_answer_that_is_no_action_ends_the_episode(tmp_path: Path, action: str | None) -> None:
    environment = made(tmp_path, action=action)
    assert (await played(environment, 4, "3", "what?"))[0] == 0.25
    assert (await played(environment, 4, "4"))[0] == 1.0


@pytest.mark.asyncio
async def test_an_episode_ends_after_some_turns(tmp_path: Path) -> None:
    assert (await played(made(tmp_path, turns=2), 9, "1", "2"))[0] == 0.5


@pytest.mark.asyncio
async def test_an_error_of_the_environment_raises_and_the_next_episode_runs(tmp_path: Path) -> None:
    environment = made(tmp_path)
    with pytest.raises(RuntimeError, match=r"OpenEnv failed: RuntimeError: Server error: it broke"):
        await played(environment, 4, "break")
    assert (await played(environment, 4, "4"))[0] == 1.0
    assert len(servers(tmp_path)) == 1


@pytest.mark.asyncio
async def test_an_episode_waits_while_the_server_has_as_many_sessions_as_it_can(tmp_path: Path) -> None:
    environment = made(tmp_path)
    results = await asyncio.gather(*[played(environment, number, "1", "2", "3") for number in (3, 4, 5, 3, 5)])
    assert [reward for reward, _ in results] == [1.5, 0.75, 0.75, 1.5, 0.75]
    playing = 0
    for name, *_ in said(tmp_path):
        playing += {"reset": 1, "step": 0, "close": -1}[name]
        assert playing <= 2


@pytest.mark.asyncio
async def test_a_cancelled_episode_closes_its_session(tmp_path: Path) -> None:
    environment = made(tmp_path)
    running = asyncio.create_task(played(environment, 4, "hang"))
    while not (tmp_path / "log").exists() or len(said(tmp_path)) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while len(said(tmp_path)) < 3:
        await asyncio.sleep(0.01)
    assert said(tmp_path)[2] == ["close", 4]


@pytest.mark.asyncio
@pytest.mark.parametrize("url", ["http://127.0.0.1:{}", "ws://127.0.0.1:{}/"])
async def test_an_environment_may_use_a_server_that_runs(tmp_path: Path, url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = await asyncio.create_subprocess_exec(sys.executable, str(tmp_path / "server.py"), str(port))
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            await asyncio.sleep(0.01)
        options = {"python": sys.executable, "url": url.format(port), "search_path": [str(tmp_path / "path")]}
        assert (await played(OpenEnvEnvironment(**options), 4, "3", "4"))[0] == 1.25
        assert servers(tmp_path) == [server.pid]
    finally:
        server.kill()
        await server.wait()


@pytest.mark.asyncio
async def test_a_server_that_has_ended_is_started_again_and_ends_with_the_process(tmp_path: Path) -> None:
    environment = made(tmp_path)
    await played(environment, 4, "4")
    first = psutil.Process(servers(tmp_path)[0])
    first.kill()
    while first.is_running():  # until the process of the environment has read how its server ended
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # its event loop learns it in the next round
    await played(environment, 4, "4")
    assert len(set(servers(tmp_path))) == 2
    process = environment._interpreter._process
    assert process is not None
    assert process.process.stdin is not None
    process.process.stdin.close()
    assert await asyncio.wait_for(process.process.wait(), 30) == 0
    assert not any(map(psutil.pid_exists, servers(tmp_path)))


@pytest.mark.asyncio
async def test_an_episode_raises_if_its_process_has_ended_while_the_model_answered(tmp_path: Path) -> None:
    environment = made(tmp_path)

    class Killing(Model):
        async def chat(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            [server] = map(psutil.Process, servers(tmp_path))
            interpreter = server.parent()
            assert interpreter is not None
            for process in (interpreter, server):
                process.kill()
            while interpreter.is_running():  # until this process has read how it ended
                await asyncio.sleep(0.01)
            return await super().chat(messages)

    model: Any = Killing("4")
    with pytest.raises(RuntimeError, match=r"the process of OpenEnv (has ended|ended with -9)"):
        await asyncio.wait_for(environment.run(model, task(4)), 30)
    assert (await played(environment, 4, "4"))[0] == 1.0


def test_a_server_that_does_not_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"OpenEnv cannot run .* the command of the server ended with 3"):
        made(tmp_path, argument="broken").tasks(0)


def test_an_environment_needs_a_server_and_functions_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="either the url of a server or the command"):
        OpenEnvEnvironment(python=sys.executable)
    with pytest.raises(ConfigError, match="either the url of a server or the command"):
        made(tmp_path, url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="names 'other'"):
        made(tmp_path, message="test_openenv_environment:other")


def test_messages_and_actions_of_several_fields_are_json() -> None:
    assert default_message({"hint": "größer", "left": 2, "metadata": {}}) == '{"hint": "größer", "left": 2}'
    assert default_action('{"row": 1, "column": 2}', ["row", "column"]) == {"row": 1, "column": 2}
    for text in ("5", "row 1"):
        with pytest.raises(ValueError, match=r"."):
            default_action(text, ["row", "column"])


def test_the_environment_is_built_by_its_name() -> None:
    options = {"python": sys.executable, "url": "http://127.0.0.1:1"}
    config = Config.model_validate({"environment": {"name": "openenv", "options": options}})
    assert isinstance(build_environment(config.environment), OpenEnvEnvironment)
