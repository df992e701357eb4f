"""What the learner deployment does with the prompts and the tokenizer before its ranks start."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl.common.tasks import Stopped
from asyncrl.config.schema import Config
from asyncrl.data.left_out import LeftOutRow
from asyncrl.data.prompts import Task
from asyncrl.demo.tiny_model import build_tokenizer
from asyncrl.deployment.inputs import Prompts
from asyncrl.deployment.learner import LearnerDeployment
from asyncrl.deployment.run_dir import RunDir
from asyncrl.deployment.screen import Screen
from asyncrl.errors import RunError
from asyncrl.learner.publication import probe_sequences
from asyncrl.learner.records import DataRecord
from asyncrl.views.live import LiveView

pytestmark = pytest.mark.slow


class HangingPolicy:
    def __init__(self) -> None:
        self.released = threading.Event()

    def start(self) -> None:
        self.released.wait(60)


class RefusingPolicy:
    def start(self) -> None:
        raise RunError("no ranks")


async def accept(*_: Any, **__: Any) -> None:
    """Stands for a coordinator that accepts every call."""


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_ranks_that_do_not_start_do_not_keep_a_run_that_is_asked_to_end(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": str(tmp_path)}, "model": {"max_length": 16}})
    build_tokenizer(max_length=16).save_pretrained(tmp_path / "model")
    stop, shown, policy = asyncio.Event(), [], HangingPolicy()

    def show(view: LiveView) -> None:
        shown.append(view.phase)
        if view.phase == "starting the learner's ranks":
            stop.set()

    with RunDir.create(config) as run_dir:
        deployment = LearnerDeployment(
            config,
            run_dir=run_dir,
            model_path=asyncio.sleep(0, ""),
            prompts=asyncio.sleep(0, Prompts(train=(), heldout=())),
            screen=Screen(started_s=0.0, show=show, report=lambda line: None),
        )
        async with asyncio.timeout(120):
            with pytest.raises(Stopped):
                await deployment._train(
                    SimpleNamespace(coordinator=SimpleNamespace(call=accept)),  # type: ignore[arg-type]
                    policy,  # type: ignore[arg-type]
                    None,
                    str(tmp_path / "model"),
                    await deployment._prompts,
                    stop,
                )
            policy.released.set()
        await deployment._model_path
    assert shown == ["loading the tokenizer", "starting the learner's ranks"], "each phase is shown at its start"


@pytest.mark.asyncio
async def test_the_first_prompt_is_printed_as_the_model_gets_it_before_the_ranks_start(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": str(tmp_path)}, "model": {"max_length": 16}})
    build_tokenizer(max_length=16).save_pretrained(tmp_path / "model")
    left_out = {"": [LeftOutRow(2, "duplicate"), LeftOutRow(5, "blank"), LeftOutRow(6, "duplicate")]}
    prompts = Prompts(train=[Task(question="ab", prompt="ab>", answer="ba")], heldout=(), left_out=left_out)
    printed: list[str] = []
    with RunDir.create(config) as run_dir:
        deployment = LearnerDeployment(
            config,
            run_dir=run_dir,
            model_path=asyncio.sleep(0, str(tmp_path / "model")),
            prompts=asyncio.sleep(0, prompts),
            screen=Screen(started_s=0.0, show=lambda view: None, report=printed.append),
        )
        with pytest.raises(RunError, match="no ranks"):
            await deployment._train(
                SimpleNamespace(coordinator=SimpleNamespace(call=accept)),  # type: ignore[arg-type]
                RefusingPolicy(),  # type: ignore[arg-type]
                None,
                await deployment._model_path,
                await deployment._prompts,
                asyncio.Event(),
            )
    assert printed == [
        "data: left out 1 blank, 2 duplicate",
        "first prompt, without a chat template, 3 tokens: 'ab>'",
    ]
    recorded = msgspec.json.decode((run_dir.path / "data.json").read_bytes(), type=DataRecord)
    by_reason = {"data": {"blank": 1, "duplicate": 2}}
    assert recorded == DataRecord(training=1, heldout=0, sets={}, left_out=by_reason)


def test_probe_sequences_leave_room_for_the_token_that_scoring_generates() -> None:
    tokenizer = build_tokenizer(max_length=16)
    tasks = [Task(question="ab", prompt="ab>", answer="ba"), Task(question="", prompt="ab>", answer="b" * 40)]
    sequences = probe_sequences(tokenizer, tasks, max_length=16)
    assert [len(sequence) for sequence in sequences] == [5, 15]
