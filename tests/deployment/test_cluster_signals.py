"""SIGTERM belongs to the deployment, whatever Ray does while it starts (F29)."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment import cluster


@pytest.fixture
def ray_takes_sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`ray.init` as far as signals go."""

    def ends_everything(number: int, frame: Any) -> None:
        raise AssertionError("Ray ended its processes and this one")

    def init(**_: Any) -> Any:
        signal.signal(signal.SIGTERM, ends_everything)
        return SimpleNamespace(address_info={"address": "127.0.0.1:1"})

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cluster.ray, "init", init)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.asyncio
@pytest.mark.usefixtures("ray_takes_sigterm")
@pytest.mark.parametrize(
    "start", [lambda: cluster.start_local(Config()), lambda: cluster.join("auto", namespace="run")], ids=["up", "join"]
)
async def test_f29_sigterm_asks_for_a_clean_end_after_ray_was_started(start: Callable[[], object]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        start()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await stop.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
