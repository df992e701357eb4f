"""The books of a run: final weights are named after their version, and without a trained step there are none."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment.learner import LearnerDeployment
from asyncrl.deployment.run_dir import RunDir
from asyncrl.learner.records import RunTotals, StepRecord

TOTALS = RunTotals(
    wall_s=9.0,
    generated_tokens=600,
    groups_discarded=16,
    ledger_closed=True,
    weight_updates=1,
    mid_sequence_updates=0,
    probe_parity_max_nats=None,
)


class SavingPolicy:
    def __init__(self) -> None:
        self.saved: list[Path] = []

    async def save_hf(self, path: Path) -> None:
        self.saved.append(path)


@pytest.mark.asyncio
async def test_f21_final_weights_are_of_the_last_version_even_when_the_last_step_was_skipped(
    tmp_path: Path, step_record: Callable[..., StepRecord]
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    nothing: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    with RunDir.create(config) as run:
        deployment = LearnerDeployment(
            config, run_dir=run, model_path=nothing, prompts=nothing, started_s=0.0, show=lambda view: None
        )
        policy: Any = SavingPolicy()
        deployment.append_step(step_record(0, trained=False, trained_samples=0, trained_tokens=0))
        assert await deployment._close_books(policy, TOTALS) is None
        assert policy.saved == []
        deployment.append_step(step_record(0))
        deployment.append_step(step_record(1, trained=False, trained_samples=0, trained_tokens=0))
        summary = await deployment._close_books(policy, TOTALS)
        assert [path.parent.name for path in policy.saved] == ["step-1"]
        assert summary is not None
        assert summary.steps == 1
        assert (run.path / "summary.json").exists()
