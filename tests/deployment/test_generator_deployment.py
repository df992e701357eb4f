"""A generator deployment asks Ray for what the config says, and is a live member of its run from its first moment."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment import generators
from asyncrl.deployment.generators import GeneratorDeployment
from asyncrl.deployment.launch import Prompts


def deployment_of(config: Config) -> GeneratorDeployment:
    loop = asyncio.get_running_loop()
    model_path: asyncio.Future[str] = loop.create_future()
    prompts: asyncio.Future[Prompts] = loop.create_future()
    prompts.set_result(Prompts(train=(), heldout=()))
    return GeneratorDeployment(config, model_path=model_path, prompts=prompts)


@pytest.mark.asyncio
async def test_a_replica_asks_for_the_gpus_that_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Actor:
        def options(self, **options: Any) -> "Actor":
            asked.update(options)
            return self

        def remote(self, **_: Any) -> None:
            """The handle."""

    monkeypatch.setattr(generators.ray, "remote", lambda _: Actor())
    deployment_of(Config.model_validate({"generator": {"gpus": 2.0, "tensor_parallel_size": 2}}))._make()
    assert asked["num_gpus"] == 2.0


@pytest.mark.asyncio
async def test_the_buffer_hears_of_a_deployment_while_its_engines_start_and_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = asyncio.Event()
    calls: list[str] = []

    async def call(method: str, *_: Any) -> int:
        calls.append(method)
        if method == "keep":
            kept.set()
        return 1

    async def enter_run(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(buffer=SimpleNamespace(call=call), deployment=SimpleNamespace(id="d"))

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async def ended(*_: Any) -> None:
        kept.clear()
        async with asyncio.timeout(5):
            await kept.wait()

    monkeypatch.setattr(generators, "enter_run", enter_run)
    deployment = deployment_of(Config.model_validate({"buffer": {"heartbeat_timeout_s": 0.005}}))
    monkeypatch.setattr(deployment, "_make", lambda: None)
    monkeypatch.setattr(deployment, "_start_all", never)
    monkeypatch.setattr(deployment, "_end", ended)
    stop = asyncio.Event()
    running = asyncio.create_task(deployment.run(stop))
    async with asyncio.timeout(10):
        await kept.wait()
        stop.set()
        await running
    assert calls[-1] == "detach", "and nothing after it"
