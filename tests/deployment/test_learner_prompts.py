"""What the learner deployment does with the prompts and the tokenizer before its ranks start."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest
from joined_scene import OneProcessCluster

from asyncrl.config.schema import Config
from asyncrl.data.left_out import LeftOutRow
from asyncrl.data.prompts import Task
from asyncrl.demo.tiny_model import build_tokenizer
from asyncrl.deployment.inputs import Prompts
from asyncrl.deployment.learner import LearnerDeployment
from asyncrl.deployment.run_dir import RunDir
from asyncrl.deployment.screen import Screen
from asyncrl.deployment.training import Training
from asyncrl.errors import RunError
from asyncrl.learner.publication import probe_sequences
from asyncrl.learner.records import DataRecord
from asyncrl.views.live import LiveView

pytestmark = pytest.mark.slow


class FakePolicy:
    """A policy whose ranks start by `start`. It notes whether they were ended."""

    def __init__(self, start: Callable[[], object]) -> None:
        self.start = start
        self.built: dict[str, Any] = {}
        self.ended = False

    def build(self, config: Config, **arguments: Any) -> Any:
        self.built = arguments
        return self

    def shutdown(self, *, keep: bool) -> None:
        self.ended = not keep


def deployed(
    run_dir: RunDir, config: Config, *, policy: FakePolicy, cluster: OneProcessCluster, prompts: Prompts, screen: Screen
) -> LearnerDeployment:
    """Returns a learner deployment of `policy` with the model in model/ beside the directory of the run."""
    return LearnerDeployment(
        config,
        run_dir=run_dir,
        model_path=asyncio.sleep(0, str(run_dir.path.parent / "model")),
        prompts=asyncio.sleep(0, prompts),
        screen=screen,
        cluster=cluster.joined,
        new_training=partial(Training, new_policy=policy.build),
    )


def config_in(folder: Path) -> Config:
    build_tokenizer(max_length=16).save_pretrained(folder / "model")
    return Config.model_validate({"run": {"dir": str(folder)}, "model": {"max_length": 16}})


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_ranks_that_do_not_start_do_not_keep_a_run_that_is_asked_to_end(tmp_path: Path) -> None:
    config, stop, released, shown = config_in(tmp_path), asyncio.Event(), threading.Event(), list[str]()
    policy, cluster = FakePolicy(lambda: released.wait(60)), OneProcessCluster(config)

    def show(view: LiveView) -> None:
        shown.append(view.phase)
        if view.phase == "starting the learner's ranks":
            stop.set()

    with RunDir.create(config) as run_dir:
        screen = Screen(started_s=0.0, show=show, report=lambda line: None)
        deployment = deployed(
            run_dir, config, policy=policy, cluster=cluster, prompts=Prompts(train=(), heldout=()), screen=screen
        )
        async with asyncio.timeout(120):
            assert await deployment.run(stop) is None
        released.set()
    assert [phase for phase, _ in groupby(shown)] == [
        "starting the buffer",
        "preparing the model",
        "loading the tokenizer",
        "starting the learner's ranks",
    ], "each phase is shown at its start"
    assert policy.ended
    assert policy.built["dp_client"] is cluster.rows, "another client would not notice that the index has died"


@pytest.mark.asyncio
async def test_the_first_prompt_is_printed_as_the_model_gets_it_before_the_ranks_start(tmp_path: Path) -> None:
    def no_ranks() -> None:
        raise RunError("no ranks")

    config = config_in(tmp_path)
    left_out = {"": [LeftOutRow(2, "duplicate"), LeftOutRow(5, "blank"), LeftOutRow(6, "duplicate")]}
    prompts = Prompts(train=[Task(question="ab", prompt="ab>", answer="ba")], heldout=(), left_out=left_out)
    printed: list[str] = []
    with RunDir.create(config) as run_dir:
        deployment = deployed(
            run_dir,
            config,
            policy=FakePolicy(no_ranks),
            cluster=OneProcessCluster(config),
            prompts=prompts,
            screen=Screen(started_s=0.0, show=lambda view: None, report=printed.append),
        )
        with pytest.raises(RunError, match="no ranks"):
            await deployment.run(asyncio.Event())
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
