"""An actor that does not answer: Ray has no room for it, or its process still imports vLLM."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment import cluster
from asyncrl.errors import CallTimeout, PlacementError, RunError

CONFIG = Config.model_validate(
    {"ray": {"placement_timeout_s": 5.0}, "generator": {"startup_timeout_s": 70.0}, "learner": {"startup_timeout_s": 9}}
)


class Ray:
    """Fakes an actor whose constructor returns after `constructor_s` seconds, if Ray has placed it at once."""

    def __init__(self) -> None:
        self.now_s, self.constructor_s = 0.0, 0.0
        self.has_process = True
        self.handle: Any = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: None))

    async def finished(self, _: object, *, timeout_s: float, what: str) -> None:
        if self.now_s + timeout_s < self.constructor_s:
            self.now_s += timeout_s
            raise CallTimeout(f"{what} took longer than {timeout_s:g} s")

    async def place(self, **options: str) -> None:
        await cluster.placed(self.handle, config=CONFIG, what="replica a", cpus=3.0, gpus=1.0, **options)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    fake = Ray()
    monkeypatch.setattr(cluster, "finished", fake.finished)
    monkeypatch.setattr(cluster, "has_process", lambda handle: fake.has_process and handle is fake.handle)
    monkeypatch.setattr(cluster, "room", lambda *_, **__: "; the cluster has 2 CPU (0 free)")
    return fake


@pytest.mark.asyncio
async def test_an_actor_without_a_process_has_no_room(ray: Ray) -> None:
    ray.has_process, ray.constructor_s = False, 8.0
    message = (
        r"Ray did not place replica a within ray\.placement_timeout_s = 5 s: it asks for 3 CPUs and 1 GPUs; the cluster"
    )
    with pytest.raises(PlacementError, match=message):
        await ray.place()
    assert ray.now_s == 5.0


@pytest.mark.asyncio
async def test_a_process_that_imports_for_longer_than_placement_may_take_is_waited_for(
    ray: Ray, caplog: pytest.LogCaptureFixture
) -> None:
    ray.constructor_s = 74.0
    with caplog.at_level(logging.WARNING):
        await ray.place()
    assert "Ray has placed replica a, and its process still imports its libraries after 5 s" in caplog.text
    caplog.clear()
    ray.now_s, ray.constructor_s = 0.0, 4.0
    await ray.place()
    assert caplog.text == ""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "limit"),
    [({}, "generator.startup_timeout_s = 70 s"), ({"startup": "learner.startup_timeout_s"}, "learner.* = 9 s")],
)
async def test_a_process_that_imports_for_too_long_is_no_lack_of_room(
    options: dict[str, str], limit: str, ray: Ray
) -> None:
    ray.constructor_s = 1000.0
    with pytest.raises(RunError, match=f"did not import its libraries within {limit}; the disk") as raised:
        await ray.place(**options)
    assert not isinstance(raised.value, PlacementError)
