"""A generator deployment requests the resources of the config from Ray, and sends heartbeats from its start on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from made_up_run import make_status

from asyncrl.common.roles import RunState
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import Registry
from asyncrl.coordinator.status import OwnReplicas, RunStatus
from asyncrl.deployment import pool
from asyncrl.deployment import pool as pool_module
from asyncrl.deployment.inputs import Prompts
from asyncrl.deployment.pool import COUNT_EVERY_S, GeneratorDeployment, Progress, Replica
from asyncrl.errors import CallTimeout, ConfigError, RunError, StallError


def deployment_of(config: Config) -> GeneratorDeployment:
    loop = asyncio.get_running_loop()
    model_path: asyncio.Future[str] = loop.create_future()
    prompts: asyncio.Future[Prompts] = loop.create_future()
    prompts.set_result(Prompts(train=(), heldout=()))
    return GeneratorDeployment(config, model_path=model_path, prompts=prompts)


async def _nothing(*_: object) -> None:
    """The replicas need nothing."""


def test_replicas_say_when_they_generate_and_then_how_much() -> None:
    now_s = [0.0]
    progress = Progress(clock=lambda: now_s[0])
    status = make_status()
    busy = own_replicas_of(status)
    (view,) = status.replicas
    waiting = msgspec.structs.replace(
        busy, views={view.replica: msgspec.structs.replace(view, reserved_groups=0, version=None)}
    )
    assert progress.line(status, waiting) is None
    assert progress.line(status, busy) == "generating with the weights of step 3"
    assert progress.line(status, busy) is None
    for _ in range(2):
        now_s[0] += COUNT_EVERY_S
        line = progress.line(status, busy)
        assert line == "1,234 samples generated, 2 groups in flight; the learner is at step 3 of 9"
        assert progress.line(status, busy) is None


def own_replicas_of(status: RunStatus) -> OwnReplicas:
    return OwnReplicas(
        wanted=1, scalings=0, views={view.replica: view for view in status.replicas}, reports=status.reports
    )


def answers_of(status: RunStatus) -> dict[object, Any]:
    """Returns the answers of a coordinator whose run has this status."""
    return {Coordinator.brief_status: status, Coordinator.own_replicas: own_replicas_of(status)}


@pytest.mark.asyncio
async def test_a_replica_gets_the_secrets_of_the_command_with_its_start_and_a_path_that_holds_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "sk-1")
    config = Config.model_validate({"environment": {"secrets": ["JUDGE_API_KEY"]}, "run": {"dir": "runs", "name": "a"}})
    deployment = deployment_of(config)
    deployment._pool.model_path.set_result("model")  # type: ignore[attr-defined]
    given: dict[str, Any] = {}

    async def done(*_: Any, **__: Any) -> None:
        """Stands for an answer of Ray."""

    def start(model_path: str, **options: Any) -> Any:
        given.update(options)
        return done()

    monkeypatch.setattr(pool_module, "placed", done)
    monkeypatch.setattr(pool_module, "finished", lambda call, **_: call)
    ready = SimpleNamespace(remote=lambda: None)
    replica = Replica("generator-a")
    replica.handle = SimpleNamespace(__ray_ready__=ready, start=SimpleNamespace(remote=start))
    await deployment._pool._start(replica)
    assert given["secrets"].environment == {"JUDGE_API_KEY": "sk-1"}
    assert given["reward_log"] == tmp_path / "runs" / "a" / "logs" / "reward.log"


@pytest.mark.asyncio
async def test_an_engine_that_starts_too_slowly_is_an_error_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deployment_of(Config.model_validate({"generator": {"startup_timeout_s": 7.0}}))
    deployment._pool.model_path.set_result("model")  # type: ignore[attr-defined]

    async def placed(*_: Any, **__: Any) -> None:
        """Ray has placed it."""

    async def late(*_: Any, **__: Any) -> None:
        raise CallTimeout("starting generator-a took longer than 7 s")

    monkeypatch.setattr(pool_module, "placed", placed)
    monkeypatch.setattr(pool_module, "finished", late)
    method = SimpleNamespace(remote=lambda *_, **__: None)
    replica = Replica("generator-a")
    replica.handle = SimpleNamespace(__ray_ready__=method, start=method)
    with pytest.raises(RunError, match=r"generator-a was not ready within generator\.startup_timeout_s = 7 s"):
        await deployment._pool._start(replica)


@pytest.mark.asyncio
async def test_a_secret_that_the_command_lacks_is_an_error_before_replicas_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="export JUDGE_API_KEY"):
        deployment_of(Config.model_validate({"environment": {"secrets": ["JUDGE_API_KEY"]}}))


@pytest.mark.asyncio
async def test_a_replica_asks_for_the_gpus_that_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Actor:
        def options(self, **options: Any) -> "Actor":
            asked.update(options)
            return self

        def remote(self, **_: Any) -> None:
            """Stands for the call that returns the actor's handle."""

    monkeypatch.setattr(pool_module.ray, "remote", lambda _: Actor())
    deployment_of(Config.model_validate({"generator": {"gpus": 2.0, "tensor_parallel_size": 2}}))._pool.make()
    assert asked["num_gpus"] == 2.0


@pytest.mark.asyncio
async def test_a_replica_that_was_made_ends_if_the_next_one_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deployment_of(Config.model_validate({"generator": {"replicas": 2}}))
    made: list[str] = []
    ended: list[str] = []

    def make(replica: Replica) -> None:
        if made:
            raise RunError("no second one")
        made.append(replica.name)

    async def end(replica: Replica, **_: object) -> None:
        ended.append(replica.name)

    monkeypatch.setattr(deployment._pool, "_make_actor", make)
    monkeypatch.setattr(deployment._pool, "_end_actor", end)
    with pytest.raises(RunError, match="no second one"):
        await deployment.run(asyncio.Event())
    assert ended[:1] == made


@pytest.mark.asyncio
async def test_the_buffer_hears_of_a_deployment_while_its_engines_start_and_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = asyncio.Event()
    calls: list[object] = []

    async def call(method: object, *_: Any, **__: Any) -> bool:
        calls.append(method)
        if method is Registry.keep:
            kept.set()
        return method is Registry.keep  # other deployments stay, so `detach` is not the last one

    async def enter_run(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(coordinator=SimpleNamespace(call=call), deployment=SimpleNamespace(id="d"))

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async def ended(*_: Any) -> None:
        kept.clear()
        async with asyncio.timeout(60):
            await kept.wait()

    monkeypatch.setattr(pool, "enter_run", enter_run)
    deployment = deployment_of(Config.model_validate({"buffer": {"heartbeat_timeout_s": 0.005}}))
    monkeypatch.setattr(deployment._pool, "make", lambda: None)
    monkeypatch.setattr(deployment._pool, "start", never)
    monkeypatch.setattr(deployment._pool, "end", ended)
    stop = asyncio.Event()
    running = asyncio.create_task(deployment.run(stop))
    async with asyncio.timeout(60):
        await kept.wait()
        stop.set()
        await running
    assert calls[-1] is Registry.detach, "no heartbeat may follow the detach"


@pytest.mark.asyncio
@pytest.mark.fault("F5")
@pytest.mark.parametrize(
    ("state", "step", "learner", "ends"),
    [
        (RunState.RUNNING, 3, True, True),
        (RunState.CLOSING, 3, False, True),
        (RunState.CLOSING, 3, True, False),
        (RunState.STARTING, 3, False, True),
        (RunState.STARTING, 3, True, False),
        (RunState.STARTING, 0, False, False),
    ],
)
async def test_a_deployment_ends_when_nothing_moves_or_no_learner_comes_back(
    monkeypatch: pytest.MonkeyPatch, state: RunState, step: int, learner: bool, ends: bool
) -> None:
    monkeypatch.setattr(pool, "WATCH_EVERY_S", 0.0)
    deployment = deployment_of(Config())
    quiet_s = deployment._config.run.stall_timeout_s + 1.0
    whole = make_status(state=state, quiet_s=quiet_s, version=Version(1, step), learner_attached=learner)
    asked = 0

    async def call(method: object, *_: object) -> Any:
        nonlocal asked
        asked += method is Coordinator.brief_status
        status = msgspec.structs.replace(whole, state=RunState.FINISHED) if asked == 3 else whole
        return answers_of(status)[method]

    handles: Any = SimpleNamespace(coordinator=SimpleNamespace(call=call))
    monkeypatch.setattr(deployment._pool, "look_after", _nothing)
    watching = deployment._watch(handles, asyncio.Event())
    async with asyncio.timeout(60):
        if ends:
            with pytest.raises(StallError, match="attached" if learner else "gone"):
                await watching
        else:
            await watching
    assert asked == (1 if ends else 3)
