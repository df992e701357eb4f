"""`asyncrl up` shows its current phase before each action that takes long."""

import asyncio
from pathlib import Path

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment import up
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import RunError


@pytest.mark.asyncio
async def test_the_first_phase_is_shown_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def no_ray(*_: object, **__: object) -> str:
        raise RunError(f"no Ray after {shown}")

    monkeypatch.setattr(up, "start_local", no_ray)
    config = Config.model_validate({"run": {"dir": str(tmp_path)}})
    with RunDir.create(config) as run_dir:
        run = up.Up(
            config,
            run_dir=run_dir,
            started_s=0.0,
            show=lambda view: shown.append(view.phase),
            report=lambda line: None,
        )
        with pytest.raises(RunError, match="starting Ray"):
            await run.run(asyncio.Event())
