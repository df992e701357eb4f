"""`asyncrl generator` logs to the run's directory if its machine has it."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl import shown_text
from asyncrl.cli import generator as command
from asyncrl.cli import start
from asyncrl.common.roles import RunState
from asyncrl.config.schema import Config
from asyncrl.deployment import cluster, shared_actors
from asyncrl.errors import RunLocked, StallError

logger = logging.getLogger("asyncrl.tried")


async def fails(config: Config, stop: asyncio.Event, *, admitted: Callable[[], object], **_: Any) -> RunState | None:
    logger.warning("asks the run")
    admitted()
    logger.warning("replica generator-a is lost")
    raise StallError("no group was committed")


@pytest.mark.parametrize("there", [True, False])
def test_the_last_words_of_the_command_are_in_the_runs_directory(
    there: bool, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.model_validate({"run": {"name": "quick"}})
    logs = Path("runs/quick/logs")
    if there:
        logs.mkdir(parents=True)
    monkeypatch.setattr(shown_text, "_facts", {})
    monkeypatch.setattr(command, "prepared", lambda *_, **__: (config, None))
    monkeypatch.setattr(command, "run_generators", fails)
    with pytest.raises(StallError):
        command.generator([], [], address="h:1")
    assert "replica generator-a is lost" in capsys.readouterr().err
    assert Path("runs").exists() == there, "only the learner makes the directory"
    if there:
        [log] = logs.iterdir()
        assert log.name == f"generator-{socket.gethostname()}-{os.getpid()}.log"
        assert "replica generator-a is lost" in log.read_text()
        assert "asks the run" not in log.read_text(), "the directory may be that of an older run"
        assert log.read_text().endswith("StallError: no group was committed\n")


@pytest.mark.asyncio
@pytest.mark.parametrize("refused", [True, False])
async def test_the_command_is_admitted_when_the_run_does_not_refuse_it(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    async def check(*_: object, **__: object) -> None:
        happened.append("asked")
        if refused:
            raise RunLocked("it has other settings")

    def inputs(*_: object, **__: object) -> None:
        raise StallError("nothing starts in this test")

    monkeypatch.setattr(cluster, "join", lambda *_, **__: None)
    monkeypatch.setattr(cluster, "joined_address", lambda: "h:1")
    monkeypatch.setattr(shared_actors, "check_admission", check)
    monkeypatch.setattr(start, "Inputs", inputs)
    with pytest.raises(RunLocked if refused else StallError):
        await start.run_generators(
            Config(), asyncio.Event(), address="h:1", prompts=None, admitted=lambda: happened.append("admitted")
        )
    assert happened == (["asked"] if refused else ["asked", "admitted"])
