"""`run_both`, the main function of `asyncrl up`: its phases, and the end of both deployments if one of them fails."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.cli import start
from asyncrl.cli.kept import KeptProcess
from asyncrl.cli.start import Parts, imported_parts, new_learner, run_both, run_learner
from asyncrl.config.schema import Config
from asyncrl.deployment.cluster import LocalRay
from asyncrl.deployment.inputs import Inputs, Prompts
from asyncrl.deployment.run_dir import RunDir
from asyncrl.deployment.screen import Screen
from asyncrl.deployment.shared_actors import JoinedCluster
from asyncrl.errors import GeneratorPoolExhausted, RunError, StallError
from asyncrl.generation.shared_memory import EngineProcesses, node_id
from asyncrl.learner.records import known_info

DEADLINE_S = 60.0
NO_PROMPTS = Prompts(train=(), heldout=())
RAY_SINCE = "2026-11-30T08:00:00+00:00"


def screen_that(show: Callable[[str], None] = lambda phase: None) -> Screen:
    return Screen(started_s=0.0, show=lambda view: show(view.phase), report=lambda line: None)


async def ran(
    folder: Path, stop: asyncio.Event, parts: Parts, *, screen: Screen | None = None, own_ray: bool = False
) -> object:
    """Runs both deployments, which `parts` makes, on a joined Ray or on an own one."""
    ray = {} if own_ray else {"address": "10.0.0.7:6379"}
    config = Config.model_validate({"run": {"dir": str(folder)}, "model": {"path": str(folder)}, "ray": ray})
    async with asyncio.timeout(DEADLINE_S):
        with RunDir.create(config) as run_dir:
            return await run_both(
                config,
                stop,
                run_dir=run_dir,
                screen=screen or screen_that(),
                prompts=NO_PROMPTS,
                new_parts=lambda: parts,
            )


@pytest.mark.asyncio
async def test_the_first_phase_is_shown_before_ray_starts(tmp_path: Path) -> None:
    shown: list[str] = []

    def no_ray(_: Config) -> LocalRay:
        raise RunError(f"no Ray after {shown}")

    with pytest.raises(RunError, match="starting Ray"):
        await ran(
            tmp_path,
            asyncio.Event(),
            replace(imported_parts(), start_ray=no_ray),
            screen=screen_that(shown.append),
            own_ray=True,
        )


class Pools:
    """Two deployments that run until they are asked to end or cancelled. `ended` lists how each one ended."""

    def __init__(
        self,
        *,
        generators: Exception | None = None,
        learner: Exception | None = None,
        generators_at_end: Exception | None = None,
    ):
        self.ended: list[str] = []
        self.free = asyncio.Event()
        """The learner needs its engines no longer."""
        self._at_end = {"generators": generators_at_end}
        self.parts = replace(
            imported_parts(),
            new_generators=self._deployment("generators", generators),
            new_learner=self._deployment("learner", learner),
        )

    def _deployment(self, name: str, error: Exception | None) -> Callable[..., Any]:
        async def run(stop: asyncio.Event) -> str:
            try:
                if error is not None:
                    raise error
                await stop.wait()
            except asyncio.CancelledError:
                self.ended.append(f"{name} cancelled")
                raise
            if (late := self._at_end.get(name)) is not None:
                raise late
            self.ended.append(f"{name} in order")
            return name

        return lambda *_, **__: SimpleNamespace(run=run, engines_free=self._engines_free)

    async def _engines_free(self, stop: asyncio.Event) -> None:
        await stop.wait()
        await self.free.wait()

    def when_imported(self, imported: Callable[[], object]) -> Parts:
        """Returns the parts, with a learner that calls `imported` when it is made."""

        def new_learner(*arguments: Any, **options: Any) -> Any:
            imported()
            return self.parts.new_learner(*arguments, **options)

        return replace(self.parts, new_learner=new_learner)


@pytest.mark.asyncio
async def test_generators_that_fail_end_the_learner(tmp_path: Path) -> None:
    pools = Pools(generators=GeneratorPoolExhausted("none lives"))
    with pytest.raises(GeneratorPoolExhausted):
        await ran(tmp_path, asyncio.Event(), pools.parts)
    assert pools.ended == ["learner cancelled"]


@pytest.mark.asyncio
async def test_a_learner_that_fails_lets_the_generators_end_in_order(tmp_path: Path) -> None:
    pools = Pools(learner=StallError("nothing moves"))
    with pytest.raises(StallError):
        await ran(tmp_path, asyncio.Event(), pools.parts)
    assert pools.ended == ["generators in order"]


@pytest.mark.asyncio
async def test_the_error_of_a_learner_that_failed_first_is_not_hidden_by_that_of_the_generators(tmp_path: Path) -> None:
    pools = Pools(learner=StallError("nothing moves"), generators_at_end=GeneratorPoolExhausted("no learner"))
    with pytest.raises(StallError):
        await ran(tmp_path, asyncio.Event(), pools.parts)


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_run_that_is_asked_to_end_ends_both_in_order(tmp_path: Path) -> None:
    stop, pools = asyncio.Event(), Pools()
    pools.free.set()
    assert await ran(tmp_path, stop, pools.when_imported(stop.set)) == "learner"
    assert sorted(pools.ended) == ["generators in order", "learner in order"]


def with_learner(pools: Pools, run: Callable[[asyncio.Event], Awaitable[str]]) -> Parts:
    """Returns the parts of `pools` with a learner that runs `run`."""
    made = pools.parts.new_learner()
    made.run = run
    return replace(pools.parts, new_learner=lambda *_, **__: made)


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_engines_stay_until_the_learner_of_a_run_that_is_asked_to_end_needs_them_no_longer(
    tmp_path: Path,
) -> None:
    stop, pools, ended = asyncio.Event(), Pools(), list[list[str]]()

    async def run(stop: asyncio.Event) -> str:
        stop.set()
        for _ in range(100):  # saves and evaluates
            await asyncio.sleep(0)
        ended.append([*pools.ended])
        pools.free.set()
        while not pools.ended:  # closes meanwhile
            await asyncio.sleep(0)
        return "learner"

    assert await ran(tmp_path, stop, with_learner(pools, run)) == "learner"
    assert ended == [[]]
    assert pools.ended == ["generators in order"]


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize("error", [None, StallError("nothing moves")])
async def test_engines_end_with_a_learner_that_does_not_free_them(error: Exception | None, tmp_path: Path) -> None:
    stop, pools = asyncio.Event(), Pools()

    async def run(stop: asyncio.Event) -> str:
        stop.set()
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return "learner"

    with contextlib.nullcontext() if error is None else pytest.raises(StallError):
        assert await ran(tmp_path, stop, with_learner(pools, run)) == "learner"
    assert pools.ended == ["generators in order"]


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize("at_once", [True, False], ids=["while the learner saves", "at their end"])
async def test_generators_that_fail_after_a_request_to_end_do_not_cancel_the_last_save(
    at_once: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop, pools = asyncio.Event(), Pools()

    async def generate(end: asyncio.Event) -> None:
        await (stop if at_once else end).wait()
        raise GeneratorPoolExhausted("none lives")

    async def run(stop: asyncio.Event) -> str:
        stop.set()
        for _ in range(100):
            await asyncio.sleep(0)
        pools.free.set()
        return "saved"

    parts = replace(with_learner(pools, run), new_generators=lambda *_, **__: SimpleNamespace(run=generate))
    assert await ran(tmp_path, stop, parts) == "saved"
    assert "the generators did not end in order: none lives" in caplog.text


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize("during", ["importing Ray", "starting Ray", "making prompts"])
async def test_a_signal_while_a_library_is_imported_or_ray_starts_ends_the_start(during: str, tmp_path: Path) -> None:
    stop, shown = asyncio.Event(), list[str]()
    asked = asyncio.get_running_loop().call_soon_threadsafe

    def show(phase: str) -> None:
        shown.append(phase)
        if phase == during:
            asked(stop.set)  # from another thread, while a call blocks the event loop: `stop` is not set yet

    pools = Pools(learner=RunError("the learner was imported"))
    parts = replace(pools.parts, start_ray=lambda _: LocalRay("127.0.0.1:1", str(tmp_path), since=RAY_SINCE))
    assert await ran(tmp_path, stop, parts, screen=screen_that(show), own_ray=True) is None
    assert shown[-1] == during
    info = json.loads((tmp_path / Config().run.name / "run.json").read_bytes())
    assert (info["state"], info["exit_reason"]) == ("stopped", "asked to end by a signal, before the first step")
    assert pools.ended == (["generators cancelled"] if during == "making prompts" else [])


go_on = threading.Event()


def endless() -> list[dict[str, str]]:
    """A dataset that cannot be read before the test ends."""
    go_on.wait(DEADLINE_S)
    return []


@pytest.mark.asyncio
async def test_inputs_end_with_their_block(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"data": {"dataset": f"{__name__}:endless"}, "model": {"path": str(tmp_path), "tiny": None}}
    )
    try:
        async with Inputs(config) as inputs:
            tasks = [inputs.prompts, inputs.engine_model, inputs.learner_model]
            await asyncio.sleep(0)
        assert all(task.cancelled() or task.done() for task in tasks)
        assert inputs.prompts.cancelled()
    finally:
        go_on.set()


@pytest.mark.asyncio
async def test_the_learner_is_imported_when_no_thread_imports_the_tiny_model_any_more(tmp_path: Path) -> None:
    """Both import transformers. The second of two simultaneous imports fails with `cannot import name`."""
    events: list[str] = []
    pools = Pools(learner=StallError("nothing moves"))

    async def describe() -> str:
        await asyncio.to_thread(time.sleep, 0.2)
        events.append("described")
        return "models/tiny"

    def new_inputs(config: Config, **options: Any) -> Inputs:
        inputs = Inputs(config, **options)
        inputs.engine_model = asyncio.create_task(describe())
        return inputs

    parts = replace(pools.when_imported(lambda: events.append("imported")), new_inputs=new_inputs)
    with pytest.raises(StallError):
        await ran(tmp_path, asyncio.Event(), parts)
    assert events == ["described", "imported"]


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("both", [True, False], ids=["up", "learner"])
async def test_each_phase_of_a_start_is_shown_once(both: bool, tmp_path: Path) -> None:
    async def no_buffer(*_: object, **__: object) -> Any:
        raise RunError("no buffer")

    shown: list[str] = []
    parts = replace(
        Pools().parts,
        start_ray=lambda _: LocalRay("127.0.0.1:6379", str(tmp_path), since=RAY_SINCE),
        joined_address=lambda: "127.0.0.1:6379",
        new_learner=partial(new_learner, cluster=JoinedCluster(open_data_plane=no_buffer)),
    )
    run = run_both if both else run_learner
    config = Config.model_validate({"run": {"dir": str(tmp_path)}, "model": {"path": str(tmp_path)}})
    screen = screen_that(shown.append)
    with RunDir.create(config) as run_dir, pytest.raises(RunError, match="no buffer"):
        await run(config, asyncio.Event(), run_dir=run_dir, screen=screen, prompts=NO_PROMPTS, new_parts=lambda: parts)
    first = ["importing Ray", "starting Ray"] if both else []
    imported = ["importing the learner"] if both else []
    assert shown == [*first, "making prompts", *imported, "starting the buffer"]


@pytest.mark.asyncio
@pytest.mark.parametrize("here", [True, False])
async def test_run_json_names_the_files_of_engines_on_this_machine_only(here: bool, tmp_path: Path) -> None:
    node = node_id() if here else "another node"

    def generators(*_: object, started: Callable[[EngineProcesses], None], **__: object) -> Any:
        started(EngineProcesses(node=node, started={}, shared_memory=["psm_a"]))
        return SimpleNamespace(run=asyncio.Event.wait)

    async def trained(_: asyncio.Event) -> None:
        """The learner has trained its last step."""

    trains: Any = SimpleNamespace(run=trained, engines_free=asyncio.Event.wait)
    parts = replace(Pools().parts, new_generators=generators, new_learner=lambda *_, **__: trains)
    await ran(tmp_path, asyncio.Event(), parts)
    info = known_info(tmp_path / Config().run.name)
    assert info is not None
    assert info.shared_memory == (["psm_a"] if here else [])


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["finished", "failed", "stopped"])
async def test_a_process_of_a_sweep_keeps_replicas_only_of_a_run_that_has_finished(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, its = socket.socketpair()
    monkeypatch.setattr(start, "KEPT", KeptProcess(sweep=its))
    asked, stop, starts = [], asyncio.Event(), []

    async def trained(_: asyncio.Event) -> None:
        if end == "failed":
            raise StallError("nothing moves")
        if end == "stopped":
            stop.set()
            await asyncio.sleep(0)

    def generators(*_: object, kept: list[Any], **__: object) -> Any:
        assert kept is start.KEPT.replicas
        return SimpleNamespace(run=asyncio.Event.wait, keep_replicas=lambda: asked.append(end))

    def started(_: Config) -> LocalRay:
        starts.append(1)
        return LocalRay("127.0.0.1:1", str(tmp_path), since=RAY_SINCE)

    parts = replace(imported_parts(), start_ray=started, new_generators=generators)
    learner = SimpleNamespace(run=trained, engines_free=asyncio.Event.wait)
    parts = replace(parts, new_learner=lambda *_, **__: learner)
    with ours, its:
        for _ in range(2):
            stop.clear()
            with contextlib.suppress(StallError):
                await ran(tmp_path, stop, parts, own_ray=True)
    assert asked == (["finished"] * 2 if end == "finished" else [])
    assert len(starts) == 1, "both runs have the Ray of the process"
