"""`asyncrl up` shows its current phase before each action that takes long."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment import up
from asyncrl.deployment.launch import Prompts
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import RunError


def up_in(run_dir: RunDir, config: Config, shown: list[str]) -> up.Up:
    """Returns an `Up` whose prompts are loaded already. It appends the phases that it shows to `shown`."""
    return up.Up(
        config,
        run_dir=run_dir,
        started_s=0.0,
        show=lambda view: shown.append(view.phase),
        report=lambda line: None,
        prompts=Prompts(train=(), heldout=()),
    )


@pytest.mark.asyncio
async def test_the_first_phase_is_shown_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def no_ray(*_: object, **__: object) -> str:
        raise RunError(f"no Ray after {shown}")

    monkeypatch.setattr(up, "start_local", no_ray)
    config = Config.model_validate({"run": {"dir": str(tmp_path)}})
    with RunDir.create(config) as run_dir:
        run = up_in(run_dir, config, shown)
        with pytest.raises(RunError, match="starting Ray"):
            await run.run(asyncio.Event())


@pytest.mark.asyncio
async def test_the_learner_is_imported_when_no_thread_imports_the_tiny_model_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both import transformers. The second of two simultaneous imports fails with `cannot import name`."""
    events: list[str] = []

    async def describe(*_: object) -> str:
        await asyncio.to_thread(time.sleep, 0.2)
        events.append("described")
        return "models/tiny"

    async def generate(stop: asyncio.Event) -> None:
        await stop.wait()

    def learner(*_: object) -> SimpleNamespace:
        events.append("imported")
        return SimpleNamespace(run=train)

    async def train(stop: asyncio.Event) -> None:
        return None

    monkeypatch.setattr(up, "start_local", lambda _: "127.0.0.1:1")
    monkeypatch.setattr(up, "session_folder", lambda: str(tmp_path))
    monkeypatch.setattr(up, "described_model", describe)
    monkeypatch.setattr(up, "GeneratorDeployment", lambda *_, **__: SimpleNamespace(run=generate))
    monkeypatch.setattr(up.Up, "_learner", learner)
    config = Config.model_validate({"run": {"dir": str(tmp_path)}})
    with RunDir.create(config) as run_dir:
        run = up_in(run_dir, config, [])
        await run.run(asyncio.Event())
    assert events == ["described", "imported"]
