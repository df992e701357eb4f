"""The fake engine passes the same contract as vLLM."""

from collections.abc import Awaitable, Callable

import pytest
from engine_contract import CONTRACT
from fake_engine import FakeEngine

from asyncrl.common.version import Version
from asyncrl.weights.manifest import Manifest, Probe
from asyncrl.weights.staging import StagedWeights


@pytest.mark.asyncio
@pytest.mark.parametrize("holds", CONTRACT, ids=lambda holds: holds.__name__)
async def test_the_fake_engine_keeps_the_contract(holds: Callable[..., Awaitable[None]]) -> None:
    engine = FakeEngine()

    async def load(step: int, *, on_paused: Callable[[], None] | None = None) -> None:
        manifest = Manifest(version=Version(1, step), tensors=(), buckets=(), probe=Probe(tokens=(), logprobs=()))
        await engine.load(manifest, StagedWeights(), on_paused=on_paused)

    await holds(engine, load)
