"""The Ray actor of one replica: builds engine, scorer and generator in its own process, and ends them.

A process holds one engine. `start` fails before anything is generated when the pools do not fit together (F25).
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import ray

from asyncrl.buffer.actor import BufferClient
from asyncrl.buffer.records import Failure, Version
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from asyncrl.data_plane.clients import GroupRows
from asyncrl.environments.scoring import Scorer
from asyncrl.environments.secrets import Secrets
from asyncrl.generation.generator import Generator
from asyncrl.generation.model_parameters import expected_parameters
from asyncrl.generation.reward_log import RewardLog
from asyncrl.generation.rollout import Rollouts
from asyncrl.generation.vllm_engine import VLLMEngine, preload, prepare_environment
from asyncrl.generation.weight_updates import WeightUpdates
from asyncrl.metrics.recorders import GeneratorMetrics
from asyncrl.metrics.server import MetricsServer
from asyncrl.metrics.states import monotonic_at_process_start
from asyncrl.weights.store import WeightClient
from asyncrl.weights.transports.object_store import ObjectStoreTransport

logger = logging.getLogger(__name__)


class ReplicaProcesses(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica started on its node, for a supervisor that must be sure that it ended."""

    pids: list[int]
    shared_memory: list[str]
    metrics_address: str


class GeneratorActor:
    """Body of the actor; the order is start, run (until drained), shutdown."""

    def __init__(self, *, config: Config, name: str, deployment: str) -> None:
        prepare_environment(config)
        preload()  # the slow part of a start, while the model may still be being made
        logging.basicConfig(level=logging.INFO)
        self._config = config
        self._name = name
        self._deployment = deployment
        self._engine: VLLMEngine | None = None
        self._scorer: Scorer | None = None
        self._server: MetricsServer | None = None
        self._generator: Generator | None = None
        self._rollouts: Rollouts | None = None

    async def start(self, model_path: str, *, secrets: Secrets, reward_log: Path) -> ReplicaProcesses:
        """Starts the engine and shakes hands with the run. `reward_log` gets what reward code prints, if its folder is
        on this node."""
        config, namespace = self._config, self._config.run.name
        timeout_s = config.buffer.call_timeout_s
        output = RewardLog(reward_log, replica=self._name)
        self._scorer = Scorer(config.environment, secrets=secrets, output=output)
        scorer_started = asyncio.create_task(self._scorer.start())
        await asyncio.sleep(0)  # its processes are on their way while the engine's start blocks this loop
        tokenizer = load_tokenizer(model_path, chat=config.data.chat)
        buffer = BufferClient(ray.get_actor("buffer", namespace=namespace), timeout_s=timeout_s)
        await buffer.call("handshake", f"generator {self._name}", tokenizer_fingerprint(tokenizer))
        # Nothing is generated before the first weights of the learner: those on the disk would be read for nothing.
        self._engine = await VLLMEngine.start(config, model_path=model_path, load_weights=False)
        await scorer_started
        metrics = GeneratorMetrics(environment=config.environment.name)
        self._server = MetricsServer(metrics.registry, host=config.metrics.host, port=0)
        self._rollouts = Rollouts(
            config=config,
            engine=self._engine,
            tokenizer=tokenizer,
            scorer=self._scorer,
            replica=self._name,
        )
        updates = WeightUpdates(
            config=config,
            name=self._name,
            engine=self._engine,
            source=WeightClient(ray.get_actor("weights", namespace=namespace), timeout_s=timeout_s),
            transport=ObjectStoreTransport(),
            parameters=expected_parameters(model_path, dtype=config.model.dtype),
            metrics=metrics,
        )
        self._generator = Generator(
            config=config,
            name=self._name,
            deployment=self._deployment,
            rollouts=self._rollouts,
            buffer=buffer,
            rows=GroupRows(config),
            weights=updates,
            metrics=metrics,
            started_s=monotonic_at_process_start(),
            metrics_address=self._server.address,
        )
        return ReplicaProcesses(
            pids=self._engine.pids(),
            shared_memory=self._engine.shared_memory(),
            metrics_address=self._server.address,
        )

    async def run(self) -> None:
        """Generates until drained; raises when the replica cannot go on."""
        assert self._generator is not None, "start comes first"
        await self._generator.run()

    async def drain(self) -> None:
        """Stops admission; `run` returns when what is in flight is committed."""
        if self._generator is not None:
            self._generator.drain()

    async def evaluate(self, tasks: Sequence[Task]) -> tuple[Version | None, list[float | Failure]]:
        """The version afterwards, and for each task a greedy reward, or the failure of its rollout."""
        assert self._generator is not None, "start comes first"
        rewards = await self._generator.evaluate(tasks)
        return self._generator.version, rewards

    async def shutdown(self) -> None:
        """Ends the engine's processes and the scoring worker; may be called at any time, more than once."""
        if self._engine is not None:
            await self._engine.shutdown()
            self._engine = None
        if self._scorer is not None:
            await self._scorer.close()
            self._scorer = None
        if self._server is not None:
            self._server.close()
            self._server = None
