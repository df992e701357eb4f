"""If an engine fails, dies or does not answer during a call of the collective, the call raises a typed error."""

import asyncio
from typing import Any

import msgspec
import pytest

from asyncrl.common.version import Version
from asyncrl.errors import CollectiveError, ManifestMismatch
from asyncrl.generation import vllm_weights
from asyncrl.generation.vllm_weights import VLLMWeights
from asyncrl.weights.manifest import Manifest, Probe
from asyncrl.weights.remote_errors import as_text

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]  # imports torch

MANIFEST = Manifest(version=Version(1, 3), tensors=(), buckets=(), probe=Probe(tokens=(), logprobs=()))


class Engine:
    """Answers a call with `outcome`. Does not answer if there is no outcome."""

    def __init__(self, outcome: Any = None, *, errored: bool = False) -> None:
        self._outcome = outcome
        self.errored = errored
        self.cancelled = False

    async def collective_rpc(self, method: str) -> Any:
        assert method == "receive_weights"
        if isinstance(self._outcome, Exception):
            raise self._outcome
        if self._outcome is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled = True
        return self._outcome


async def received_from(engine: Engine) -> Manifest:
    return await VLLMWeights(engine, clear_cache=True).receive()


async def test_the_answer_is_the_manifest() -> None:
    assert await received_from(Engine([msgspec.msgpack.encode(MANIFEST)])) == MANIFEST


async def test_what_a_worker_raised_comes_back_as_itself() -> None:
    text = f"Call to collective_rpc method failed: {as_text(ManifestMismatch('a is missing'))}"
    with pytest.raises(ManifestMismatch, match=r"^a is missing$"):
        await received_from(Engine(Exception(text)))


async def test_any_other_failure_is_the_collectives() -> None:
    with pytest.raises(CollectiveError, match=r"the engine failed .KeyError: 'a'"):
        await received_from(Engine(KeyError("a")))


async def test_an_engine_that_died_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weights, "DEATH_CHECK_S", 0.0)
    engine = Engine(errored=True)
    with pytest.raises(CollectiveError, match="has died"):
        await received_from(engine)


async def test_an_engine_that_says_nothing_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weights, "ANSWER_S", 0.01)
    engine = Engine()
    with pytest.raises(CollectiveError, match=r"did not answer .* shut it down"):
        await received_from(engine)
    await asyncio.sleep(0)  # lets the call receive its cancellation
    assert engine.cancelled
