"""`asyncrl generator` logs to the run's directory if its machine has it."""

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from asyncrl import shown_text
from asyncrl.cli import generator as command
from asyncrl.common.roles import RunState
from asyncrl.config.schema import Config
from asyncrl.errors import StallError

logger = logging.getLogger("asyncrl.tried")


async def fails(config: Config, stop: asyncio.Event, **_: Any) -> RunState | None:
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
        assert log.read_text().endswith("StallError: no group was committed\n")
