"""The books of a run: final weights are named after their version, and without a trained step there are none."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment import learner
from asyncrl.deployment.learner import LearnerDeployment
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import RunError
from asyncrl.learner.records import RunTotals, StepRecord
from asyncrl.metrics.discovery import Target

TOTALS = RunTotals(
    wall_s=9.0,
    generated_tokens=600,
    groups_discarded=16,
    ledger_closed=True,
    rows_outstanding=0,
    weight_updates=1,
    mid_sequence_updates=0,
    probe_parity_max_nats=None,
)


class SavingPolicy:
    def __init__(self, error: Exception | None = None) -> None:
        self.saved: list[Path] = []
        self.error = error

    def save_hf(self, path: Path) -> None:
        if self.error is not None:
            raise self.error
        self.saved.append(path)


def deployment_in(run: RunDir, config: Config) -> LearnerDeployment:
    nothing: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return LearnerDeployment(
        config, run_dir=run, model_path=nothing, prompts=nothing, started_s=0.0, show=lambda view: None
    )


@pytest.mark.asyncio
async def test_f21_final_weights_are_of_the_last_version_even_when_the_last_step_was_skipped(
    tmp_path: Path, step_record: Callable[..., StepRecord]
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        policy: Any = SavingPolicy()
        deployment.append_step(step_record(0, trained=False, trained_samples=0, trained_tokens=0))
        await deployment._save_weights(policy)
        assert deployment._summary(TOTALS) is None
        assert policy.saved == []
        deployment.append_step(step_record(0))
        deployment.append_step(step_record(1, trained=False, trained_samples=0, trained_tokens=0))
        await deployment._save_weights(policy)
        summary = deployment._summary(TOTALS)
        assert [path.parent.name for path in policy.saved] == ["step-1"]
        assert summary is not None
        assert summary.steps == 1
        assert (run.path / "summary.json").exists()


@pytest.mark.asyncio
async def test_a_failed_run_keeps_what_it_has_trained_if_its_ranks_still_can(
    tmp_path: Path, step_record: Callable[..., StepRecord], caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        deployment.append_step(step_record(0))
        whole: Any = SavingPolicy()
        await deployment._rescue_weights(whole)
        assert [path.parent.name for path in whole.saved] == ["step-1"]
        dead: Any = SavingPolicy(RunError("rank 0 is gone"))
        await deployment._rescue_weights(dead)
    assert "could not be saved: rank 0 is gone" in caplog.text


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
