"""The Ray actor of one engine of a `VLLMGeneration`. A driver calls the actor's methods one by one.

Invariants: an engine that has applied only a part of an update does not generate. Every wait for the engine has a
deadline, in this module or in the driver. The replica of an asynchronous run, which reserves its own work, is in
`asyncrl/generation/actor.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from asyncrl.colocated.batch import continue_rows
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import RunError, TornReplica, WeightError
from asyncrl.generation.model_parameters import expected_parameters
from asyncrl.generation.shared_memory import EngineProcesses
from asyncrl.generation.vllm_engine import VLLMEngine, preload, prepare_environment
from asyncrl.weights.manifest import Parameters, check_published, is_news
from asyncrl.weights.transports.ipc import SharedGroup
from asyncrl.weights.transports.peers import Rendezvous

FROM_DISK = Version(0, 0)
"""The label of the weights that the engine started with. It is older than every version that a policy sends."""


class EngineActor:
    """The Ray actor of one engine. Call `start` first. A method that returns a bool returns True when it has done its
    work."""

    def __init__(self, *, config: Config, name: str, sleep_mode: bool, pad_token_id: int) -> None:
        prepare_environment(config)
        preload()
        self._config = config
        self._name = name
        self._sleep_mode = sleep_mode
        self._pad_token_id = pad_token_id
        self._timeout_s = config.weights.load_timeout_s
        self._engine: VLLMEngine | None = None
        self._model: Parameters = {}
        self._updating = asyncio.Lock()

    async def start(self, model_path: str) -> EngineProcesses:
        """Starts the engine with the weights at `model_path`."""
        self._model = expected_parameters(model_path, dtype=self._config.model.dtype)
        self._engine = await VLLMEngine.start(
            self._config, model_path=model_path, name=self._name, sleep_mode=self._sleep_mode
        )
        await self._engine.weights.name(FROM_DISK)
        return self._engine.processes

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        """Generates a response to each prompt (`continue_rows`). Raises TornReplica while only a part of a weight
        update is applied, RunError while the engine sleeps."""
        engine = await self._generating()
        return await continue_rows(engine, data, config=self._config, greedy=greedy, pad_token_id=self._pad_token_id)

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-probs (nats) of each row's tokens except the first, at temperature 1."""
        engine = await self._generating()
        return list(await asyncio.gather(*[engine.score(tokens) for tokens in rows]))

    async def prepare_for_generation(self, tags: Collection[str]) -> bool:
        engine = self._started()
        if "weights" in tags:
            engine.weights.start_over()
        if "kv_cache" in tags:
            self._check_whole(engine)
        await self._within(engine.wake(tags), what="waking the engine")
        return True

    async def finish_generation(self) -> bool:
        engine = self._started()
        if self._sleep_mode:
            await self._within(engine.sleep(), what="putting the engine to sleep")
            return True
        return await self.invalidate_kv_cache()

    async def invalidate_kv_cache(self) -> bool:
        return bool(await self._within(self._started().reset_cache(), what="resetting the KV cache"))

    # -- weights -------------------------------------------------------------------------------------------------

    async def prepare_refit_info(self, info: Parameters) -> bool:
        """Raises ManifestMismatch if the policy's parameters differ from those of the engine's model."""
        check_published(info, self._model, what="the policy's weights")
        return True

    async def init_collective(self, rendezvous: Rendezvous, first_rank: int) -> bool:
        weights = self._started().weights
        await weights.join_collective(rendezvous, first_rank=first_rank, parameters=self._model)
        return True

    async def update_weights_from_collective(self) -> bool:
        """Receives a version while the engine generates. Generation pauses only while the version is applied."""
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
        """Gives the engine to a `with` block that applies one weight update. Waits until no other update runs.

        Ends the engine, and raises WeightError, when the block takes longer than `weights.load_timeout_s`. After
        TornReplica the engine has only a part of the new weights and stays paused. Then its running requests are
        aborted, because they would wait until the next update.
        """
        engine = self._started()
        async with self._updating:
            try:
                async with asyncio.timeout(self._timeout_s):
                    yield engine
            except TimeoutError:
                await self.shutdown()
                raise WeightError(
                    f"loading weights took longer than weights.load_timeout_s = {self._timeout_s:g} s, so the engine "
                    "was ended; raise weights.load_timeout_s if the transfer needs more time"
                ) from None
            except TornReplica:
                await self._within(engine.abort(), what="aborting the running requests")
                raise

    # -- checks and waits ----------------------------------------------------------------------------------------

    def _check_whole(self, engine: VLLMEngine) -> None:
        if not engine.weights.is_whole:
            raise TornReplica(
                "a weight update of this engine is incomplete, so the engine cannot generate; send a whole update first"
            )

    async def _generating(self) -> VLLMEngine:
        engine = self._started()
        async with self._updating:  # waits until a version that is being applied is complete
            self._check_whole(engine)
        if not engine.is_awake:
            raise RunError("the engine sleeps and cannot generate; call prepare_for_generation() first")
        return engine

    async def _within(self, call: Awaitable[Any], *, what: str) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise WeightError(
                f"{what} took longer than weights.load_timeout_s = {self._timeout_s:g} s; raise this limit if the "
                "engine needs more time"
            ) from None

    def _started(self) -> VLLMEngine:
        if self._engine is None:
            raise RunError("the engine is not running: it was not started, or it has ended; call start() first")
        return self._engine

    async def shutdown(self) -> None:
        """Ends the engine's processes. Does nothing when it is called again."""

        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown()
