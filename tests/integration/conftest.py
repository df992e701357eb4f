"""Fixtures of the integration tests: a tiny model, one vLLM engine, and helpers to run and end the real commands."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.environments.interfaces import build_tasks
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
PPO = REPOSITORY / "configs" / "ppo.yaml"
SMALL = [
    "model.max_length=64",
    "learner.groups_per_step=4",
    "learner.group_size=4",
    "generator.max_concurrent_groups=8",
    "generator.max_completion_tokens=10",
    "eval.prompts=16",
    "staleness.max_versions=2",
    "learner.optimizer.warmup_steps=0",
    "run.shutdown_grace_s=60",
    "data.dataset=jsonl",  # reading the questions is faster than making them
    "environment.reward=exact_match",
]

QUESTIONS = "environment.options.size=4000"
"""Override for fewer questions than in the quickstart, because each start of a run reads all of them."""


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of the quickstart after a short warm-up, built once per session. The questions are beside it."""
    from asyncrl.demo.tiny_model import ensure_model

    path = tmp_path_factory.mktemp("model") / "tiny"
    tasks = [task for part in build_tasks(load_config([QUICKSTART], [QUESTIONS])) for task in part]
    rows = [{"prompt": task.question, "answer": task.answer, "word": task.metadata["word"]} for task in tasks]
    questions_of(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return ensure_model(small_config(str(path)))


def questions_of(model_path: str | Path) -> Path:
    """Returns the file with the questions of the quickstart."""
    return Path(model_path).with_name("questions.jsonl")


def small_overrides(model_path: str) -> list[str]:
    of_model = [f"model.path={model_path}", f"data.path={questions_of(model_path)}"]
    return [*SMALL, *of_model, "model.tiny.warmup_steps=40", "model.tiny.warmup_wrong_fraction=0"]


def small_config(model_path: str, *overrides: str) -> Config:
    return load_config([QUICKSTART], [*small_overrides(model_path), *overrides])


@pytest.fixture(scope="session")
def run_config(model_path: str) -> Config:
    """The overrides of a small run, for processes that cannot import this file."""
    return small_config(model_path)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(model_path: str) -> AsyncIterator[VLLMEngine]:
    """The only vLLM engine of the session."""
    # With stored tokens, the engine reports its progress every few milliseconds.
    config = small_config(model_path, "generator.max_concurrent_groups=64", "generator.persist_every_tokens=2")
    prepare_environment(config)
    engine = await VLLMEngine.start(config, model_path=model_path)
    yield engine
    processes = [psutil.Process(pid) for pid in engine.processes.started]
    await engine.shutdown()
    assert not psutil.wait_procs(processes, timeout=60)[1], "the engine left processes behind"


def engines_of(session: str) -> set[int]:
    """Returns the pids of the vLLM engine processes that this Ray started. Their stderr is a file in its session
    folder.

    The environment of a process does not identify them, because a process may overwrite it when it sets its name."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            if process.name().startswith("VLLM") and os.readlink(f"/proc/{process.pid}/fd/2").startswith(f"{session}/"):
                found.add(process.pid)
    return found


class Command:
    """An `asyncrl` command in its own process and its own session. Its output goes to a file."""

    def __init__(self, arguments: list[str], *, log: Path, environment: dict[str, str]) -> None:
        self.log = log
        self._file = log.open("wb")
        self.process = psutil.Popen(
            [sys.executable, "-m", "asyncrl", *arguments],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=os.environ | environment,
            start_new_session=True,
        )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Returns the exit code. Fails the test, with the output, if the command takes longer."""
        try:
            return int(self.process.wait(timeout_s))
        except psutil.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s} s:\n{self.output()[-4000:]}")

    def wait_for(self, condition: Callable[[], object], *, timeout_s: float, what: str) -> None:
        """Polls until `condition()` is true. Fails the test, with the output, if the process ends or time runs out.

        A condition that starts a command needs seconds of a core, so the time between two polls is as long as a poll.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            began_s = time.monotonic()
            if condition():
                return
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode} before {what}:\n{self.output()[-4000:]}")
            if time.monotonic() > deadline_s:
                pytest.fail(f"no {what} within {timeout_s} s:\n{self.output()[-4000:]}")
            time.sleep(max(0.2, time.monotonic() - began_s))  # polls another process

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kills the process and its descendants, and nothing else."""
        if self.process.poll() is None:
            family = [*self.process.children(recursive=True), self.process]
            for process in family:
                process.kill()
            psutil.wait_procs(family, timeout=60)
        self._file.close()


Run = Callable[..., Command]


def in_this_process(*arguments: str) -> str:
    """Runs an `asyncrl` command that needs no process of its own, and returns its output. The command's imports, which
    take seconds, are then paid once. Fails the test if the command fails."""
    with patch.dict(os.environ):  # a command may set variables of Ray
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def run_command(tmp_path: Path) -> Iterator[Run]:
    """Returns a function that starts commands. At the end of the test, commands that still run are killed."""
    commands: list[Command] = []

    def run(*arguments: str, **environment: str) -> Command:
        log = tmp_path / f"command-{len(commands)}.log"
        commands.append(Command(list(arguments), log=log, environment=environment))
        return commands[-1]

    yield run
    for command in commands:
        command.end()
