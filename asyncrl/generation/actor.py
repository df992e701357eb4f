"""The Ray actor of one replica: builds the engine, the scorer and the generator in its own process, and ends them.

A process holds one engine. `start` raises HandshakeError before anything is generated when learner and generators do
not fit together, for example because their tokenizers differ (F25).
"""

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import ray

from asyncrl.common.names import COORDINATOR, WEIGHTS
from asyncrl.common.version import Version
from asyncrl.config.parts import all_configs, environment_name
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.registry import Registry
from asyncrl.data.light_tokenizer import model_folder
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from asyncrl.data_plane.rows import PREFIX_PARTITION, Rows
from asyncrl.environments.scoring import PartScorers
from asyncrl.environments.secrets import Secrets, hide_secrets
from asyncrl.generation.evaluation import Answer, evaluate, prompts_at_once
from asyncrl.generation.generator import Generator
from asyncrl.generation.model_parameters import expected_parameters
from asyncrl.generation.rollout import Rollouts
from asyncrl.generation.shared_memory import SHARED_MEMORY, EngineProcesses, staged_weights, sweep_shared_memory
from asyncrl.generation.vllm_engine import VLLMEngine, preload, prepare_environment
from asyncrl.generation.weight_updates import WeightUpdates
from asyncrl.log_files import LogFile, append_line
from asyncrl.metrics.recorders import GeneratorMetrics
from asyncrl.metrics.server import MetricsServer
from asyncrl.metrics.states import monotonic_at_process_start
from asyncrl.shown_text import describe_process, log_to_stderr, utc
from asyncrl.weights.store import WeightClient
from asyncrl.weights.transports.of_config import transport_of

if TYPE_CHECKING:
    from asyncrl.gateway.agent_rollouts import AgentRollouts
    from asyncrl.gateway.gateway import Answered, Asked

logger = logging.getLogger(__name__)


class GeneratorActor:
    """Body of a replica's Ray actor. Call `start`, then `run` (which returns when the replica is drained), then
    `shutdown`. Or call `rest` in place of `shutdown`, and `take_over` and `start` for another run, to keep the engine's
    processes."""

    def __init__(self, *, config: Config, name: str, deployment: str) -> None:
        prepare_environment(config)
        preload()  # importing vLLM is the slow part of a start; meanwhile the learner may still prepare the model
        log_to_stderr(config.run.log_format)
        self._config = config
        self._name = name
        self._deployment = deployment
        self._started = AsyncExitStack()
        """Ends the parts of the present run."""
        self._scoring: tuple[PartScorers, asyncio.Task[None]] | None = None
        """The scorer of the present run, and the task that starts its processes."""
        self._engine: VLLMEngine | None = None
        self._began_s = monotonic_at_process_start()
        """Start of the process, or of the present run if the process has generated for an earlier one, on the monotonic
        clock."""
        self._generator: Generator | None = None
        self._updates: WeightUpdates | None = None
        self._agents: AgentRollouts | None = None
        self._evaluate: Callable[..., Awaitable[list[Answer]]]
        describe_process(
            run=config.run.name,
            role="generator",
            replica=name,
            incarnation=lambda: None if (loaded := self._loaded) is None else loaded.incarnation,
            step=lambda: None if (loaded := self._loaded) is None else loaded.step,
        )

    @property
    def _loaded(self) -> Version | None:
        """The version of the engine's weights; None before the first ones, and while the replica is torn."""
        return None if self._updates is None else self._updates.version

    async def start(self, model_path: str, *, secrets: Secrets, logs: Path) -> EngineProcesses:
        """Starts the engine, compares the tokenizer with the run's, and connects to the run's actors.

        `logs` is the folder for the log of this process and for the lines that reward code prints. If it does not exist
        on this node, both are only on stderr. Returns the engine's processes and the names in /dev/shm that are ended
        and removed if this process is killed.
        """
        config, namespace = self._config, self._config.run.name
        log = self._started.enter_context(LogFile(logs / f"replica-{self._name}.log", form=config.run.log_format))
        timeout_s, patience_s = config.buffer.call_timeout_s, config.run.stall_timeout_s
        scorer, scorer_started = self._scoring or self._begin_scoring(secrets, logs)
        await asyncio.sleep(0)  # lets the scorer's start begin; its processes start at the next await
        # An engine with adapters reads the base model's weights here. Any other gets all weights from the learner.
        model_path = await asyncio.to_thread(model_folder, model_path, weights=config.model.lora is not None)
        tokenizer = load_tokenizer(model_path, chat=config.data.chat, chat_options=config.data.chat_options)
        handle = ray.get_actor(COORDINATOR, namespace=namespace)
        coordinator = CoordinatorClient.over_ray(handle, timeout_s=timeout_s, patience_s=patience_s)
        fingerprint = tokenizer_fingerprint(tokenizer)
        await coordinator.call(Registry.handshake, who=f"generator {self._name}", fingerprint=fingerprint)
        # The replica generates nothing before the learner has sent its first weights, so the engine does not read the
        # weights on the disk, except those to which adapters belong.
        if self._engine is None:
            self._engine = await VLLMEngine.start(config, model_path=model_path, name=self._name, load_weights=False)
        else:
            self._engine = await self._engine.taken_over(config, model_path=model_path, name=self._name)
        engine = self._engine
        await scorer_started
        metrics = GeneratorMetrics(environment=environment_name(config))
        server = MetricsServer(metrics.registry, host=config.metrics.host, port=0)
        self._started.callback(server.close)
        pointer = staged_weights(namespace, cluster=ray.get_runtime_context().gcs_address)
        self._started.callback(sweep_shared_memory, [pointer])
        updates = WeightUpdates(
            config=config,
            name=self._name,
            engine=engine,
            source=WeightClient(
                ray.get_actor(WEIGHTS, namespace=namespace), timeout_s=timeout_s, patience_s=patience_s
            ),
            transport=transport_of(config, staged_at=SHARED_MEMORY / pointer),
            parameters=expected_parameters(model_path, dtype=config.model.dtype, lora=config.model.lora),
            metrics=metrics,
            staged_at=SHARED_MEMORY / pointer,
        )
        self._agents = agents = await self._with_agents(model_path, engine, scorer, tokenizer, logs)
        rollouts = Rollouts(
            config=config, engine=engine, tokenizer=tokenizer, scorer=scorer, replica=self._name, agents=agents
        )
        self._updates = updates
        self._evaluate = partial(evaluate, rollouts=rollouts, coordinator=coordinator)
        self._generator = Generator(
            config=config,
            name=self._name,
            deployment=self._deployment,
            rollouts=rollouts,
            coordinator=coordinator,
            rows=Rows(config),
            prefix_rows=Rows(config, partition=PREFIX_PARTITION),
            weights=updates,
            metrics=metrics,
            started_s=self._began_s,
            metrics_address=server.address,
            node=socket.gethostname(),
            log=lambda: log.path,
        )
        return msgspec.structs.replace(engine.processes, shared_memory=[*engine.processes.shared_memory, pointer])

    def _begin_scoring(self, secrets: Secrets, logs: Path) -> "tuple[PartScorers, asyncio.Task[None]]":
        """Makes the scorer of the run, and begins to start its processes. Returns it, and the task that starts them."""
        hide_secrets(self._config.environment, secrets.environment)
        reward_log = RewardLog(logs / f"reward-{socket.gethostname()}.log", replica=self._name)
        scorer = PartScorers(all_configs(self._config), secrets=secrets, output=reward_log)
        self._started.push_async_callback(scorer.close)
        self._scoring = scorer, asyncio.create_task(scorer.start())
        return self._scoring

    async def _with_agents(
        self, model_path: str, engine: VLLMEngine, scorer: PartScorers, tokenizer: Any, logs: Path
    ) -> "AgentRollouts | None":
        """Starts the gateway in a process of its own, if any task has an agent."""
        if not scorer.any_agent:
            return None
        from asyncrl.gateway.agent_rollouts import AgentRollouts
        from asyncrl.gateway.server import RemoteGateway

        config = self._config
        gateway = RemoteGateway(config=config, model_path=model_path, replica=self._name, logs=logs)
        await gateway.start()
        return AgentRollouts(config=config, gateway=gateway, engine=engine, scorer=scorer, tokenizer=tokenizer)

    async def sample(self, asked: "Asked") -> "Answered":
        """Lets the engine answer a call of an agent. The gateway, which is a process of its own, calls this."""
        assert self._agents is not None, "only agents have a gateway"
        return await self._agents.sample(asked)

    async def run(self) -> None:
        """Generates until the replica is drained. Raises when the replica cannot go on."""
        assert self._generator is not None, "call start() first"
        await self._generator.run()

    async def is_alive(self) -> None:
        """Answers, so that the caller knows that the process runs."""

    async def drain(self) -> None:
        """Stops admission. `run` returns when no ticket is held any more: each group is committed, has failed, or the
        buffer has ended its ticket."""
        if self._generator is not None:
            self._generator.drain()

    async def evaluate(
        self, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        """Answers each task of the held-out set `name` with the version that is loaded, and keeps this version
        meanwhile. `share` is the share of the slots that it may take.

        Returns the version, and for each task the rewards of its samples, or the failure of its rollout. Without a
        version there are no answers. Raises TimeoutError after `eval.timeout_s`.
        """
        assert self._updates is not None, "call start() first"
        slots = self._config.generator.max_concurrent_groups * self._config.learner.group_size
        how = self._config.eval.each_set()[name]
        at_once = prompts_at_once(slots, share=share, samples=how.samples)
        async with self._updates.held() as version:
            if version is None:
                return None, []
            async with asyncio.timeout(self._config.eval.timeout_s):  # limited: no newer weights are loaded meanwhile
                return version, await self._evaluate(tasks, how=how, at_once=at_once)

    async def shutdown(self) -> None:
        """Ends the engine's processes and the scoring processes. It may be called at any time, and more than once."""
        try:
            await self._started.aclose()
        finally:
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.shutdown()

    async def rest(self) -> None:
        """Ends all parts of the run but the engine's processes, which then wait for `take_over`. Call it when `run` has
        returned. Raises RunError if the engine cannot serve another run: then this process must end too."""
        assert self._engine is not None, "call start() first"
        await self._started.aclose()
        self._started, self._generator, self._updates, self._agents = AsyncExitStack(), None, None, None
        self._scoring = None
        del self._evaluate
        await self._engine.rest()
        gc.collect()

    async def take_over(self, *, config: Config, deployment: str, secrets: Secrets, logs: Path) -> None:
        """Gives the process to another run after `rest`, and begins to start the run's scoring processes. Call `start`
        afterwards."""
        self._config, self._deployment, self._began_s = config, deployment, time.monotonic()
        describe_process(run=config.run.name)
        self._begin_scoring(secrets, logs)


# Writes the lines that reward code prints to `logs/reward-HOST.log` in the run's directory.


class RewardLog:
    """Appends lines to `path`, to which all replicas of this machine write. If the folder of `path` does not exist on
    this node, logs the lines instead. A call may block, as a disk or a mount does: the reader of each scoring process
    calls it in a thread of its own."""

    def __init__(self, path: Path, *, replica: str) -> None:
        self._path = path
        self._replica = replica
        self._failed = False

    def __call__(self, line: str) -> None:
        """Writes one line. Logs the first of several disk errors in a row; lines are lost until a write succeeds."""
        try:
            self._append(line)
        except FileNotFoundError:
            logger.info("reward code: %s", line)
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning(
                    "cannot write %s (%s), so lines that reward code prints are lost; free space or fix the "
                    "permissions of its folder",
                    self._path,
                    error,
                )
        else:
            self._failed = False

    def _append(self, line: str) -> None:
        append_line(self._path, f"{utc(time.time())} {self._replica}: {line}\n".encode(errors="replace"))
