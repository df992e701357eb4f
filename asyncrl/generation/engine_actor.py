"""The Ray actor of one engine of a `VLLMGeneration`: an engine that a driver tells what to do, call by call.

What must hold: an engine that holds half an update generates nothing; whatever waits for the engine has a deadline. A
pool's replica, which asks for its own work, is `actor.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from asyncrl.buffer.records import Version
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import RunError, TornReplica, WeightError
from asyncrl.generation.batch import continue_rows
from asyncrl.generation.model_parameters import expected_parameters
from asyncrl.generation.vllm_engine import VLLMEngine, preload, prepare_environment
from asyncrl.weights.manifest import Parameters, check_published, is_news
from asyncrl.weights.transports.ipc import SharedGroup
from asyncrl.weights.transports.peers import Rendezvous

FROM_DISK = Version(0, 0)
"""The weights that the engine was started with: step 0, and older than whatever a policy sends."""


class EngineProcesses(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine started on its node."""

    pids: list[int]
    shared_memory: list[str]


class EngineActor:
    """Body of the actor; `start` comes first. Methods answer True for what they did."""

    def __init__(self, *, config: Config, sleep_mode: bool, pad_token_id: int) -> None:
        prepare_environment(config)
        preload()
        self._config = config
        self._sleep_mode = sleep_mode
        self._pad_token_id = pad_token_id
        self._timeout_s = config.weights.load_timeout_s
        self._engine: VLLMEngine | None = None
        self._model: Parameters = {}
        self._updating = asyncio.Lock()

    async def start(self, model_path: str) -> EngineProcesses:
        """Starts the engine with the weights at `model_path`."""
        self._model = expected_parameters(model_path, dtype=self._config.model.dtype)
        self._engine = await VLLMEngine.start(self._config, model_path=model_path, sleep_mode=self._sleep_mode)
        await self._engine.weights.name(FROM_DISK)
        return EngineProcesses(pids=self._engine.pids(), shared_memory=self._engine.shared_memory())

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        """`continue_rows`. TornReplica while the engine holds half an update, RunError while it sleeps."""
        engine = await self._generating()
        return await continue_rows(engine, data, config=self._config, greedy=greedy, pad_token_id=self._pad_token_id)

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Temperature-1 log-probs of each row's tokens but the first."""
        engine = await self._generating()
        return list(await asyncio.gather(*[engine.score(tokens) for tokens in rows]))

    async def prepare_for_generation(self, tags: Collection[str]) -> bool:
        engine = self._started()
        if "weights" in tags:
            engine.weights.start_over()
        if "kv_cache" in tags:
            self._check_whole(engine)
        await self._within(engine.wake(tags), what="waking up")
        return True

    async def finish_generation(self) -> bool:
        engine = self._started()
        if self._sleep_mode:
            await self._within(engine.sleep(), what="falling asleep")
            return True
        return await self.invalidate_kv_cache()

    async def invalidate_kv_cache(self) -> bool:
        return bool(await self._within(self._started().reset_cache(), what="resetting the KV cache"))

    # -- weights -------------------------------------------------------------------------------------------------

    async def prepare_refit_info(self, info: Parameters) -> bool:
        """ManifestMismatch unless the policy's weights are those of the engine's model."""
        check_published(info, self._model, what="the policy's weights")
        return True

    async def init_collective(self, rendezvous: Rendezvous, first_rank: int) -> bool:
        weights = self._started().weights
        await weights.join_collective(rendezvous, first_rank=first_rank, parameters=self._model)
        return True

    async def update_weights_from_collective(self) -> bool:
        """Receives beside what is generated; stands still only while the version is applied."""
        weights = self._started().weights
        manifest = await weights.receive()
        is_news(manifest.version, weights.version)
        async with self._update() as engine:
            await engine.weights.load_received(manifest)
        return True

    async def update_weights_from_ipc_handles(self, handles: Mapping[str, SharedGroup]) -> bool:
        async with self._update() as engine:
            await engine.weights.load_shared(handles, expected=self._model)
        return True

    @asynccontextmanager
    async def _update(self) -> AsyncIterator[VLLMEngine]:
        """One at a time. Past the deadline the engine is ended; a torn one aborts what it was generating, which would
        wait for the next update otherwise."""
        engine = self._started()
        async with self._updating:
            try:
                async with asyncio.timeout(self._timeout_s):
                    yield engine
            except TimeoutError:
                await self.shutdown()
                raise WeightError(
                    f"loading weights took longer than weights.load_timeout_s = {self._timeout_s:g} s; the engine is "
                    "ended"
                ) from None
            except TornReplica:
                await self._within(engine.abort(), what="aborting")
                raise

    # -- checks and waits ----------------------------------------------------------------------------------------

    def _check_whole(self, engine: VLLMEngine) -> None:
        if not engine.weights.is_whole:
            raise TornReplica("half an update was applied: the engine generates nothing before a whole one")

    async def _generating(self) -> VLLMEngine:
        engine = self._started()
        async with self._updating:  # a version that is just being applied is waited for
            self._check_whole(engine)
        if not engine.is_awake:
            raise RunError("the engine sleeps: prepare_for_generation() comes first")
        return engine

    async def _within(self, call: Awaitable[Any], *, what: str) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise WeightError(f"{what} took longer than weights.load_timeout_s = {self._timeout_s:g} s") from None

    def _started(self) -> VLLMEngine:
        if self._engine is None:
            raise RunError("the engine was not started, or it has ended")
        return self._engine

    async def shutdown(self) -> None:
        """Ends the engine's processes; idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown()
