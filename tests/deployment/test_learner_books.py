"""The books of a run: a summary, what a failed run still saves, and what Prometheus discovers."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_run import TOTALS, make_step

from asyncrl.buffer.actor import RunStatus
from asyncrl.config.schema import CheckpointSection, Config
from asyncrl.deployment import learner
from asyncrl.deployment.launch import Prompts
from asyncrl.deployment.learner import LearnerDeployment
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import RunError, StallError
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.records import RunTotals
from asyncrl.metrics.discovery import Target
from asyncrl.metrics.recorders import LearnerMetrics


def deployment_in(run: RunDir, config: Config) -> LearnerDeployment:
    nothing: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return LearnerDeployment(
        config, run_dir=run, model_path=nothing, prompts=nothing, started_s=0.0, show=lambda view: None
    )


def checkpoints_in(run: RunDir, save_hf: Callable[[Path], None]) -> Checkpoints:
    folder = run.path / "checkpoints"
    folder.mkdir()
    return Checkpoints(CheckpointSection(), folder=folder, save_hf=save_hf, metrics=LearnerMetrics())


@pytest.mark.asyncio
async def test_f21_a_run_whose_steps_were_all_skipped_has_no_summary(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        deployment.append_step(make_step(0, trained=False, trained_samples=0, trained_tokens=0))
        assert deployment._summary(TOTALS) is None
        deployment.append_step(make_step(0))
        deployment.append_step(make_step(1, trained=False, trained_samples=0, trained_tokens=0))
        summary = deployment._summary(TOTALS)
        assert summary is not None
        assert summary.steps == 1
        assert (run.path / "summary.json").exists()


@pytest.mark.asyncio
async def test_a_failed_run_keeps_what_it_has_trained_if_its_ranks_still_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    saved: list[str] = []

    def dead(path: Path) -> None:
        raise RunError("rank 0 is gone")

    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        await deployment._rescue_weights()
        deployment._checkpoints = checkpoints_in(run, lambda path: saved.append(path.parent.name))
        deployment.append_step(make_step(0, trained=False, trained_samples=0, trained_tokens=0))
        await deployment._rescue_weights()
        assert saved == []
        deployment.append_step(make_step(0))
        deployment.append_step(make_step(1, trained=False, trained_samples=0, trained_tokens=0))
        await deployment._rescue_weights()
        assert saved == ["step-1"]
        deployment.append_step(make_step(1))
        deployment._checkpoints._save_hf = dead
        await deployment._rescue_weights()
    assert "could not be saved: rank 0 is gone" in caplog.text


@pytest.mark.asyncio
async def test_what_a_failed_run_has_trained_is_saved_while_its_ranks_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    done: list[str] = []

    async def nothing(*_: object, **__: object) -> None:
        pass

    async def status() -> RunStatus:
        raise TimeoutError

    async def run_of(*_: object, **__: object) -> Any:
        return SimpleNamespace(buffer=SimpleNamespace(call=nothing, status=status))

    async def fail(*_: object) -> RunTotals:
        raise StallError("nothing moves")

    async def rescue() -> None:
        done.append("saved")

    monkeypatch.setattr(learner, "enter_run", run_of)
    monkeypatch.setattr(learner, "leave_run", nothing)
    monkeypatch.setattr(learner, "keep_attached", nothing)
    ranks = SimpleNamespace(shutdown=lambda: done.append("ended"))
    monkeypatch.setattr(learner, "TQPolicy", lambda *_, **__: ranks)
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        deployment._prompts = asyncio.sleep(0, Prompts(train=(), heldout=()))
        deployment._model_path = asyncio.sleep(0, "model")
        monkeypatch.setattr(deployment, "_train", fail)
        monkeypatch.setattr(deployment, "_rescue_weights", rescue)
        with pytest.raises(StallError):
            await deployment.run(asyncio.Event())
    assert done == ["saved", "ended"]


@pytest.mark.asyncio
async def test_f27_targets_that_could_not_be_written_are_written_later_and_are_over_http_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    targets = [Target(role="buffer", replica="buffer", address="127.0.0.1:1")]
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        with monkeypatch.context() as full_disk:
            full_disk.setattr(learner, "write_targets", full_disk_error)
            deployment._publish_targets(targets)
        assert "is not up to date: no space" in caplog.text
        assert deployment._targets == targets
        assert not run.targets_path.exists()
        deployment._publish_targets(targets)
        assert json.loads(run.targets_path.read_bytes())[0]["targets"] == ["127.0.0.1:1"]
        deployment._publish_targets([])
        assert json.loads(run.targets_path.read_bytes()) == []


def full_disk_error(path: Path, **arguments: Any) -> None:
    raise OSError("no space")
