"""vLLM engines for a synchronous loop. Each engine is a Ray actor, and a driver calls the actors and waits.

    generation = VLLMGeneration(config)                       # `config.generator.replicas` engines
    generation.prepare_refit_info(policy.prepare_refit_info())
    refit_colocated(policy, generation)                       # `refit.py`
    output = generation.generate(prompts)
    generation.shutdown()

Invariants: every wait has a deadline. asyncrl's own errors, KeyError, ValueError and TypeError of an engine are raised
unchanged (by `generate_async` only asyncrl's own), others as Ray's RayTaskError. `shutdown` returns True if every
engine ended in time; any other call that returns a bool returns True if every engine returned True. An asynchronous run
does not use this class: its replicas reserve their own work (`asyncrl/generation/actor.py`).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray

from asyncrl.colocated.batch import join_outputs
from asyncrl.colocated.engine_actor import EngineActor
from asyncrl.common.tasks import cancelled
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.calls import answers, finished, has_process, require_ray, room, start
from asyncrl.errors import CollectiveError, ConfigError, PlacementError, RunError, WeightError
from asyncrl.generation.interfaces import GenerationInterface, all_succeeded, verify_right_padding
from asyncrl.generation.shared_memory import EngineProcesses, reap
from asyncrl.weights.transports.ipc import SharedGroup
from asyncrl.weights.transports.peers import Rendezvous

R = TypeVar("R")

ACTOR_CONCURRENCY = 10_000
"""Calls that an engine's actor runs at a time. `generate_async` makes one call for each row."""
EXIT_S = 10.0
"""Seconds that the engines get to shut down, before their processes are killed."""
BEYOND_S = 10.0
"""Seconds that the driver waits for an engine's actor beyond the actor's own deadline, before it gives up."""
TAGS = ("weights", "kv_cache")


class VLLMGeneration(GenerationInterface):
    """Runs `config.generator.replicas` engines with the model at `model_path` (default: `config.model.path`).

    `start` places the engines. If it was not called, the first call that needs engines calls it.

    `colocated` engines free their device's memory in `finish_generation`, by vLLM's sleep mode, which exists on GPUs
    only. On CPUs an engine and the learner use the same memory, so an engine only drops its prefix cache.
    `pad_token_id` pads prompts and outputs.
    """

    def __init__(
        self, config: Config, *, model_path: str | None = None, colocated: bool = False, pad_token_id: int = 0
    ) -> None:
        self._config = config
        self._model_path = model_path or config.model.path
        self._sleep_mode = colocated and config.generator.gpus > 0
        self._pad_token_id = pad_token_id
        self._engines: list[Any] | None = None  # before `start`
        self._processes: list[EngineProcesses] = []
        self._announced = False

    def start(self) -> None:
        """Places the engines and loads the model. Raises PlacementError if Ray has no room within
        `ray.placement_timeout_s`, RunError if a process does not import vLLM within `generator.startup_timeout_s`,
        TimeoutError if an engine does not load the model within that time, and ConfigError with `model.lora`."""
        require_ray("place engines")
        config = self._config
        if config.model.lora is not None:
            raise ConfigError(
                "model.lora: the engines of a synchronous loop take whole weights only; remove model.lora, or train "
                "the adapter with `asyncrl up` or asyncrl.run"
            )
        actor = ray.remote(EngineActor).options(
            num_cpus=config.generator.cpus,
            num_gpus=config.generator.gpus,
            label_selector=config.generator.node_labels or None,
            max_restarts=0,
            max_concurrency=ACTOR_CONCURRENCY,
        )
        self._engines = [
            actor.remote(
                config=config, name=f"engine {number}", sleep_mode=self._sleep_mode, pad_token_id=self._pad_token_id
            )
            for number in range(config.generator.replicas)
        ]
        try:
            self._wait_for_places()
            self._processes = self._all(
                EngineActor.start, self._model_path, timeout_s=config.generator.startup_timeout_s
            )
        except BaseException:
            self.shutdown()
            raise

    def _wait_for_places(self) -> None:
        generator, timeout_s = self._config.generator, self._config.ray.placement_timeout_s
        try:
            self._wait_for_constructors(timeout_s)
            return
        except TimeoutError:
            if not all(map(has_process, self._alive())):
                raise PlacementError(
                    f"Ray has no room for {generator.replicas} engines (generator.replicas) of {generator.cpus:g} CPU "
                    f"and {generator.gpus:g} GPU each within ray.placement_timeout_s={timeout_s:g}"
                    f"{room(('CPU', 'GPU'), node_labels=generator.node_labels, section='generator')}"
                ) from None
        try:
            self._wait_for_constructors(generator.startup_timeout_s)
        except TimeoutError:
            raise RunError(
                "Ray has placed the engines, but their processes did not import vLLM within "
                f"generator.startup_timeout_s = {generator.startup_timeout_s:g} s; the disk with the Python "
                "environment may be cold or slow: start again, or raise the limit"
            ) from None

    def _wait_for_constructors(self, timeout_s: float) -> None:
        """Waits until the processes of the engines have imported vLLM. Raises CallTimeout."""
        ready = [engine.__ray_ready__.remote() for engine in self._alive()]
        answers(ready, timeout_s=timeout_s, what="placing the engines")

    # -- generation ----------------------------------------------------------------------------------------------

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        self._check(data)
        engines = self._alive()
        shards = [shard for shard in data.shard_by_batch_size(len(engines), allow_uneven_shards=True) if shard.size]
        pairs = zip(engines, shards, strict=False)
        refs = [start(engine, EngineActor.generate, shard, greedy) for engine, shard in pairs]
        try:
            outputs = answers(refs, timeout_s=self._config.run.stall_timeout_s, what="generating")
        except BaseException:
            for ref in refs:
                ray.cancel(ref)
            raise
        return join_outputs(outputs, pad_token_id=self._pad_token_id)

    async def generate_async(
        self, data: BatchedDataDict, greedy: bool = False
    ) -> AsyncGenerator[tuple[int, BatchedDataDict], None]:
        self._check(data)
        engines, timeout_s = self._alive(), self._config.run.stall_timeout_s

        async def one(row: int) -> tuple[int, BatchedDataDict]:
            ref = start(engines[row % len(engines)], EngineActor.generate, data.slice(row, row + 1), greedy)
            return row, await finished(ref, timeout_s=timeout_s, what=f"generating row {row}")

        rows = [asyncio.create_task(one(row)) for row in range(data.size)]
        try:
            for row in asyncio.as_completed(rows):
                yield await row
        finally:
            await cancelled(*rows)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Returns, for each engine, the log-probs (nats) of each row's tokens except the first, at temperature 1.

        Compare them with the policy's log-probs to verify a refit.
        """
        return self._all(EngineActor.score, rows, timeout_s=self._config.run.stall_timeout_s)

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        unknown = sorted(set(tags or ()).difference(TAGS))
        if unknown:
            raise ValueError(f"cannot wake {unknown}: an engine can wake {' and '.join(TAGS)}; use these tags only")
        return self._all_did(EngineActor.prepare_for_generation, TAGS if tags is None else tuple(tags))

    def finish_generation(self) -> bool:
        return self._all_did(EngineActor.finish_generation)

    def invalidate_kv_cache(self) -> bool:
        return self._all_did(EngineActor.invalidate_kv_cache)

    def _check(self, data: BatchedDataDict) -> None:
        if not data.size:
            raise ValueError("the batch has no rows to continue; give at least one prompt")
        verify_right_padding(data, pad_value=self._pad_token_id)

    # -- weights -------------------------------------------------------------------------------------------------

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> bool:
        self._announced = self._all_did(EngineActor.prepare_refit_info, dict(state_dict_info))
        return self._announced

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int | None = None
    ) -> list["ray.ObjectRef[bool]"]:
        engines, size = self._alive(), self._config.generator.tensor_parallel_size
        first = world_size - size * len(engines)
        if first < 1 or train_world_size not in (None, first):
            raise CollectiveError(
                f"these {len(engines)} engines have {size * len(engines)} workers, which do not fit after "
                f"train_world_size={train_world_size} ranks in a group of world_size={world_size}; world_size must be "
                "the number of training ranks plus the number of engine workers"
            )
        rendezvous = Rendezvous(
            host=ip,
            port=port,
            world_size=world_size,
            train_world_size=first,
            timeout_s=self._config.weights.load_timeout_s,
        )
        join = EngineActor.init_collective
        return [start(engine, join, rendezvous, first + size * i) for i, engine in enumerate(engines)]

    def update_weights_from_collective(self) -> list["ray.ObjectRef[bool]"]:
        self._check_announced()
        return [start(engine, EngineActor.update_weights_from_collective) for engine in self._alive()]

    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, SharedGroup]) -> bool:
        self._check_announced()
        return self._all_did(EngineActor.update_weights_from_ipc_handles, dict(ipc_handles))

    def _check_announced(self) -> None:
        if not self._announced:
            raise WeightError(
                "the engines' model has not been compared with the policy's; call prepare_refit_info() first"
            )

    # -- processes -----------------------------------------------------------------------------------------------

    def shutdown(self) -> bool:
        engines, self._engines = self._engines or [], []
        ending = [start(engine, EngineActor.shutdown) for engine in engines]
        try:
            answers(ending, timeout_s=EXIT_S, what="ending the engines")
            in_order = True
        except (RunError, TimeoutError, ray.exceptions.RayError):
            in_order = False
        for engine in engines:
            ray.kill(engine, no_restart=True)
        processes, self._processes = self._processes, []
        for left in processes:
            reap(left, timeout_s=EXIT_S)
        return in_order

    def _all_did(self, method: Callable[..., Awaitable[bool]], *args: Any) -> bool:
        # The engine actor has an earlier deadline of its own, so that its error comes first: it has more details.
        timeout_s = self._config.weights.load_timeout_s + BEYOND_S
        return all_succeeded(self._all(method, *args, timeout_s=timeout_s))

    def _all(self, method: Callable[..., Awaitable[R]], *args: Any, timeout_s: float) -> list[R]:
        """Calls a method of `EngineActor` on every engine. Returns the results in the order of the engines."""
        refs = [start(engine, method, *args) for engine in self._alive()]
        return answers(refs, timeout_s=timeout_s, what=method.__name__)

    def _alive(self) -> list[Any]:
        if self._engines is None:
            self.start()
        if not self._engines:
            raise RunError("the generation has no engines: they did not start, or shutdown() has ended them")
        return self._engines
