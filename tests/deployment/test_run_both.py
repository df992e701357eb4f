"""`run_both`, the main function of `asyncrl up`: its phases, and the end of both deployments if one of them fails."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment import compose
from asyncrl.deployment.inputs import Inputs, Prompts
from asyncrl.deployment.run_dir import RunDir
from asyncrl.deployment.screen import Screen
from asyncrl.errors import GeneratorPoolExhausted, RunError, StallError
from asyncrl.generation.shared_memory import EngineProcesses, node_id
from asyncrl.learner.records import known_info

DEADLINE_S = 60.0
NO_PROMPTS = Prompts(train=(), heldout=())


def screen_that(show: Callable[[str], None] = lambda phase: None) -> Screen:
    return Screen(started_s=0.0, show=lambda view: show(view.phase), report=lambda line: None)


@pytest.mark.asyncio
async def test_the_first_phase_is_shown_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def no_ray(*_: object, **__: object) -> str:
        raise RunError(f"no Ray after {shown}")

    monkeypatch.setattr(compose, "start_local", no_ray)
    config = Config.model_validate({"run": {"dir": str(tmp_path)}})
    screen = screen_that(shown.append)
    with RunDir.create(config) as run_dir, pytest.raises(RunError, match="starting Ray"):
        await compose.run_both(config, asyncio.Event(), run_dir=run_dir, screen=screen, prompts=NO_PROMPTS)


class Pools:
    """Two deployments that run until they are asked to end or cancelled. `ended` lists how each one ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, generators: Exception | None, learner: Exception | None):
        self.ended: list[str] = []
        monkeypatch.setattr(compose, "GeneratorDeployment", self._deployment("generators", generators))
        monkeypatch.setattr(compose, "_learner", self._deployment("learner", learner))

    def _deployment(self, name: str, error: Exception | None) -> Callable[..., Any]:
        async def run(stop: asyncio.Event) -> str:
            try:
                if error is not None:
                    raise error
                await stop.wait()
            except asyncio.CancelledError:
                self.ended.append(f"{name} cancelled")
                raise
            self.ended.append(f"{name} in order")
            return name

        return lambda *_, **__: SimpleNamespace(run=run)

    async def run(self, folder: Path, stop: asyncio.Event) -> object:
        config = Config.model_validate({"run": {"dir": str(folder)}, "ray": {"address": "10.0.0.7:6379"}})
        async with asyncio.timeout(DEADLINE_S):
            with RunDir.create(config) as run_dir:
                screen = screen_that()
                return await compose.run_both(config, stop, run_dir=run_dir, screen=screen, prompts=NO_PROMPTS)


@pytest.mark.asyncio
async def test_generators_that_fail_end_the_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, generators=GeneratorPoolExhausted("none lives"), learner=None)
    with pytest.raises(GeneratorPoolExhausted):
        await pools.run(tmp_path, asyncio.Event())
    assert pools.ended == ["learner cancelled"]


@pytest.mark.asyncio
async def test_a_learner_that_fails_lets_the_generators_end_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools(monkeypatch, generators=None, learner=StallError("nothing moves"))
    with pytest.raises(StallError):
        await pools.run(tmp_path, asyncio.Event())
    assert pools.ended == ["generators in order"]


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_run_that_is_asked_to_end_ends_both_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = asyncio.Event()
    pools = Pools(monkeypatch, generators=None, learner=None)
    build = compose._learner

    def imported(*arguments: Any, **options: Any) -> Any:
        stop.set()
        return build(*arguments, **options)

    monkeypatch.setattr(compose, "_learner", imported)
    assert await pools.run(tmp_path, stop) == "learner"
    assert sorted(pools.ended) == ["generators in order", "learner in order"]


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize("during", ["importing Ray", "starting Ray", "making prompts"])
async def test_a_signal_while_a_library_is_imported_or_ray_starts_ends_the_start(
    during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, shown = asyncio.Event(), ["importing Ray"]
    asked = asyncio.get_running_loop().call_soon_threadsafe

    def show(phase: str) -> None:
        shown.append(phase)
        if phase == during:
            asked(stop.set)  # from another thread, while a call blocks the event loop: `stop` is not set yet

    monkeypatch.setattr(compose, "start_local", lambda config: "127.0.0.1:1")
    monkeypatch.setattr(compose, "session_folder", lambda: str(tmp_path))
    pools = Pools(monkeypatch, generators=None, learner=RunError("the learner was imported"))
    if during == "importing Ray":
        asked(stop.set)
    config = Config.model_validate({"run": {"dir": str(tmp_path)}})
    async with asyncio.timeout(DEADLINE_S):
        with RunDir.create(config) as run_dir:
            run = compose.run_both(config, stop, run_dir=run_dir, screen=screen_that(show), prompts=NO_PROMPTS)
            assert await run is None
    assert shown[-1] == during
    info = json.loads((run_dir.path / "run.json").read_bytes())
    assert (info["state"], info["exit_reason"]) == ("stopped", "asked to end by a signal, before the first step")
    assert pools.ended == (["generators cancelled"] if during == "making prompts" else [])


@pytest.mark.asyncio
async def test_inputs_end_with_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> Prompts:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Inputs, "_load_prompts", never)
    async with Inputs(Config()) as inputs:
        tasks = [inputs.prompts, inputs.engine_model, inputs.learner_model]
        await asyncio.sleep(0)
    assert all(task.cancelled() or task.done() for task in tasks)
    assert inputs.prompts.cancelled()


@pytest.mark.asyncio
async def test_the_learner_is_imported_when_no_thread_imports_the_tiny_model_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both import transformers. The second of two simultaneous imports fails with `cannot import name`."""
    events: list[str] = []
    pools = Pools(monkeypatch, generators=None, learner=StallError("nothing moves"))
    build = compose._learner

    async def describe(_: Inputs) -> str:
        await asyncio.to_thread(time.sleep, 0.2)
        events.append("described")
        return "models/tiny"

    def imported(*arguments: Any, **options: Any) -> Any:
        events.append("imported")
        return build(*arguments, **options)

    monkeypatch.setattr(Inputs, "_describe_model", describe)
    monkeypatch.setattr(compose, "_learner", imported)
    with pytest.raises(StallError):
        await pools.run(tmp_path, asyncio.Event())
    assert events == ["described", "imported"]


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("both", [True, False], ids=["up", "learner"])
async def test_each_phase_of_a_start_is_shown_once(both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_buffer(*_: object, **__: object) -> None:
        raise RunError("no buffer")

    async def until_the_end(_: object, end: asyncio.Event) -> None:
        await end.wait()

    monkeypatch.setattr("asyncrl.deployment.learner.open_data_plane", no_buffer)
    monkeypatch.setattr(compose.GeneratorDeployment, "run", until_the_end)
    monkeypatch.setattr(Inputs, "_describe_model", lambda _: asyncio.sleep(0, "models/tiny"))
    config, stop, shown = Config.model_validate({"run": {"dir": str(tmp_path)}}), asyncio.Event(), list[str]()
    screen = screen_that(shown.append)
    with RunDir.create(config) as run_dir:
        if both:
            monkeypatch.setattr(compose, "start_local", lambda _: "127.0.0.1:6379")
            monkeypatch.setattr(compose, "session_folder", lambda: str(tmp_path))
            run = compose.run_both(config, stop, run_dir=run_dir, screen=screen, prompts=NO_PROMPTS)
        else:
            monkeypatch.setattr(compose, "joined_address", lambda: "127.0.0.1:6379")
            run = compose.run_learner(config, stop, run_dir=run_dir, screen=screen, prompts=NO_PROMPTS)
        with pytest.raises(RunError, match="no buffer"):
            await run
    first = ["starting Ray"] if both else []
    imported = ["importing the learner"] if both else []
    assert shown == [*first, "making prompts", *imported, "starting the buffer"]


@pytest.mark.asyncio
@pytest.mark.parametrize("here", [True, False])
async def test_run_json_names_the_files_of_engines_on_this_machine_only(
    here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools(monkeypatch, generators=None, learner=None)
    node = node_id() if here else "another node"

    def generators(*_: object, started: Callable[[EngineProcesses], None], **__: object) -> Any:
        started(EngineProcesses(node=node, started={}, shared_memory=["psm_a"]))
        return SimpleNamespace(run=asyncio.Event.wait)

    async def trained(_: asyncio.Event) -> None:
        """The learner has trained its last step."""

    monkeypatch.setattr(compose, "GeneratorDeployment", generators)
    monkeypatch.setattr(compose, "_learner", lambda *_, **__: SimpleNamespace(run=trained))
    await pools.run(tmp_path, asyncio.Event())
    info = known_info(tmp_path / Config().run.name)
    assert info is not None
    assert info.shared_memory == (["psm_a"] if here else [])
