"""`WeightUpdates` without a generator: a fake engine whose loads wait for the test, and a replica that records
calls."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buffer_scenes import Clock, everything_else_runs
from fake_engine import FakeEngine
from pool import PARAMETERS, WEIGHTS, Wire, manifest_of

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.errors import InfraError
from asyncrl.generation.interfaces import LoadTimes
from asyncrl.generation.weight_updates import UpdateHooks, WeightUpdates
from asyncrl.metrics.recorders import GeneratorMetrics
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.store import Publication
from asyncrl.weights.transports.interfaces import BroadcastEnd


class ScriptedSource:
    """Returns the versions that the test puts into it, and ignores the version of the replica."""

    def __init__(self) -> None:
        self.offered: asyncio.Queue[Publication] = asyncio.Queue()
        self.asked: list[tuple[Version | None, Version | None]] = []
        self.refused: list[int] = []

    async def newer_than(
        self, version: Version | None, *, wait_s: float, besides: Version | None = None
    ) -> Publication | None:
        self.asked.append((version, besides))
        return await self.offered.get()

    async def refuse(self, delivery: int) -> None:
        self.refused.append(delivery)

    def offer(self, step: int, *, serial: int, delivery: int = 0, handle: bytes | None = WEIGHTS) -> None:
        publication = Publication(serial=serial, delivery=delivery, manifest=manifest_of(step), handles=[handle])
        self.offered.put_nowait(publication)


class BroadcastingWire(Wire):
    """Lists the replicas that take part in broadcasts at the moment. If `broken`, taking part fails."""

    def __init__(self) -> None:
        self.members: list[str] = []
        self.ended: Callable[[BroadcastEnd], None] = lambda end: None
        self.broken = False

    async def take_part(self, replica: str, *, ended: Callable[[BroadcastEnd], None]) -> None:
        if self.broken:
            raise OSError("no route")
        self.members.append(replica)
        self.ended = ended
        try:
            await asyncio.Event().wait()
        finally:
            self.members.remove(replica)


class Scene:
    """One `WeightUpdates` with a fake engine whose loads wait at `may_load`, and the replica that it reports to."""

    def __init__(self, *, staged_at: Path | None = None, **weights: Any) -> None:
        self.engine = FakeEngine()
        self.source = ScriptedSource()
        self.clock = Clock(0.0)
        self.metrics = GeneratorMetrics(environment="test")
        self.wire = BroadcastingWire()
        self.loading: list[bool] = []
        self.failed: list[InfraError] = []
        self.reported: list[Version | None] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self._load, self.engine.load = self.engine.load, self._gated_load  # type: ignore[method-assign]
        self.updates = WeightUpdates(
            config=Config.model_validate({"weights": weights}),
            name="a",
            engine=self.engine,
            source=self.source,
            transport=self.wire,
            parameters=PARAMETERS,
            metrics=self.metrics,
            clock=self.clock,
            staged_at=staged_at,
        )
        hooks = UpdateHooks(show_loading=self.loading.append, fail_unverified=self.fail_unverified, report=self.report)
        self.running = asyncio.create_task(self.updates.run(hooks))

    async def _gated_load(self, manifest: Manifest, buckets: Any, *, on_paused: Callable[[], None]) -> LoadTimes:
        on_paused()
        await self.may_load.wait()
        return await self._load(manifest, buckets)

    async def fail_unverified(self, error: InfraError) -> None:
        self.failed.append(error)

    async def report(self) -> None:
        self.reported.append(self.updates.version)

    def outcomes(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value("asyncrl_weight_updates_total", {"outcome": outcome})


async def waits(wait: Any) -> bool:
    """Returns True if `wait` is still waiting after all other tasks have run."""

    waiting = asyncio.ensure_future(wait)
    await everything_else_runs()
    is_waiting = not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return is_waiting
