"""Tasksets of verifiers in a process of their own. The process has a small package instead of verifiers, which cannot
be installed beside asyncrl. benchmarks/agent_clients.py runs the real one."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.environments import verifiers_taskset
from asyncrl.environments.agents import Session
from asyncrl.environments.interfaces import build_environment
from asyncrl.environments.verifiers_taskset import VerifiersTaskset
from asyncrl.errors import ConfigError

CLIENTS = """
from dataclasses import dataclass

@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str

@dataclass
class ModelContext:
    client: EvalClientConfig
    model: str
"""
LOADERS = """
import asyncio, contextlib, itertools, json, os, pathlib, sys
from types import SimpleNamespace as Made

def resolve_env_config(data):
    return data

def load_environment(config):
    if config["taskset"]["id"] != "mine":
        raise ModuleNotFoundError("taskset not found")
    print("a taskset may print")
    return Env(config)

class Tasks:
    def take(self, size):
        texts = itertools.chain(["play", "fail", "two", "unscored", "exit", "hang"], itertools.repeat("play"))
        return (Made(data=Made(prompt_text=text, name=None)) for text in itertools.islice(texts, size))

class Env:
    def __init__(self, config):
        self.taskset, self.log = Tasks(), pathlib.Path(config["log"])

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        text = task.data.prompt_text
        await asyncio.sleep(0.01)  # other episodes begin
        key = os.environ[context.client.api_key_var]
        said = [text, context.client.base_url, key, context.model, os.getpid(), sys.path, os.environ["PYTHONPATH"]]
        with self.log.open("a") as file:
            file.write(json.dumps(said) + chr(10))
        try:
            await asyncio.sleep(100 if text == "hang" else 0)
        except asyncio.CancelledError:
            self.log.write_text("stopped")
            raise
        if text == "exit":
            os._exit(3)
        if text == "fail":
            return Made(ok=False, errors=[], traces=[Made(errors=[Made(type="HarnessError", message="no")])])
        reward = None if text == "unscored" else Made(value=0.5)
        trace = Made(errors=[], rewards={"right": Made(value=1.0), "short": reward})
        return Made(ok=True, errors=[], traces=[trace] * (2 if text == "two" else 1))
"""


@pytest.fixture
def taskset(tmp_path: Path) -> VerifiersTaskset:
    package = tmp_path / "path" / "verifiers" / "v1"
    (package / "utils").mkdir(parents=True)
    (package / "clients.py").write_text(CLIENTS)
    (package / "utils" / "loaders.py").write_text(LOADERS)
    return made(tmp_path)


def made(folder: Path, id: str = "mine") -> VerifiersTaskset:
    env = {"taskset": {"id": id}, "log": str(folder / "log")}
    return VerifiersTaskset(python=sys.executable, env=env, size=8, search_path=[str(folder / "path")])


def said(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def task(index: int) -> Task:
    return Task(question="q", answer="", metadata={"index": index})


def session(number: int = 0) -> Session:
    return Session(base_url=f"http://node/{number}/v1", api_key=f"key-{number}", model="run")


def test_the_tasks_are_those_of_the_taskset_and_have_different_questions(taskset: VerifiersTaskset) -> None:
    tasks = taskset.tasks(0)
    assert [each.metadata["index"] for each in tasks] == list(range(8))
    assert [each.question for each in tasks][-2:] == ["play #6", "play #7"]


@pytest.mark.asyncio
async def test_episodes_get_their_own_session_and_share_a_process(taskset: VerifiersTaskset, tmp_path: Path) -> None:
    rewards = await asyncio.gather(*[taskset.run(session(number), task(0)) for number in range(3)])
    assert rewards == [{"right": 1.0, "short": 0.5}] * 3
    seen = said(tmp_path)
    assert [each[:4] for each in seen] == [["play", f"http://node/{i}/v1", f"key-{i}", "run"] for i in range(3)]
    assert len({each[4] for each in seen}) == 1
    *_, path, given = seen[0]
    assert given == str(tmp_path / "path"), "our own search path has other versions of the packages"
    assert str(Path(verifiers_taskset.__file__).parent) not in path, "the folder has modules such as `math`"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("index", "message"),
    [
        (1, "HarnessError: no"),
        (2, "2 traces, but only one agent can be trained"),
        (3, "no reward short"),
        (4, "ended with 3"),
        (99, "IndexError"),
    ],
)
async def test_an_episode_that_cannot_be_scored_raises_and_the_next_one_runs(
    taskset: VerifiersTaskset, index: int, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        await taskset.run(session(), task(index))
    assert await taskset.run(session(), task(0)) == {"right": 1.0, "short": 0.5}


@pytest.mark.asyncio
async def test_a_cancelled_episode_is_stopped_in_the_process(taskset: VerifiersTaskset, tmp_path: Path) -> None:
    running = asyncio.create_task(taskset.run(session(), task(5)))
    while not (tmp_path / "log").exists():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while (tmp_path / "log").read_text() != "stopped":
        await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_a_process_is_replaced_after_some_episodes_and_ends(
    taskset: VerifiersTaskset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers_taskset, "EPISODES", 2)
    taskset = made(tmp_path)
    await taskset.run(session(), task(0))
    first = said(tmp_path)[0][4]
    await asyncio.gather(*[taskset.run(session(), task(0)) for _ in range(2)])
    assert len({each[4] for each in said(tmp_path)}) == 2
    async with asyncio.timeout(30):
        while psutil.pid_exists(first):
            await asyncio.sleep(0.01)


def test_a_taskset_that_cannot_be_loaded_is_refused_with_the_error_of_verifiers(
    taskset: VerifiersTaskset, tmp_path: Path
) -> None:
    del taskset
    with pytest.raises(ConfigError, match=r"environment.options: .*python: ModuleNotFoundError: taskset not found"):
        made(tmp_path, id="other").tasks(0)
    with pytest.raises(ConfigError, match="no-python"):
        VerifiersTaskset(python="/no-python", env={}).tasks(0)


def test_the_environment_is_built_by_its_name() -> None:
    options = {"python": sys.executable, "env": {"taskset": {"id": "mine"}}}
    section = {"name": "verifiers", "options": json.loads(json.dumps(options))}
    config = Config.model_validate({"environment": section})
    assert isinstance(build_environment(config.environment), VerifiersTaskset)
