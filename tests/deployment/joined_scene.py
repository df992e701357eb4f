"""A cluster in this process: the real coordinator of a run, without Ray."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.common.roles import Role
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import Call, CoordinatorClient, perform
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import Deployment
from asyncrl.coordinator.status import Restored
from asyncrl.data.prompts import Task
from asyncrl.deployment.shared_actors import JoinedCluster, RunHandles
from asyncrl.environments.secrets import Secrets
from asyncrl.generation.shared_memory import EngineProcesses, node_id

TASKS = (Task(question="ab", prompt="ab>", answer="ba"),)


class NoRows:
    """The rows of a buffer that has none."""

    async def clear(self, keys: Sequence[str]) -> None: ...

    async def keys(self) -> list[str]:
        return []


class OneProcessCluster:
    """A cluster with one run. `calls` lists the calls that its coordinator got.

    `before` has functions that run before a call of a method, by the method's name. They get the call. `answers` has
    functions whose results are the answers to a method's calls, instead of those of the coordinator.
    """

    def __init__(self, config: Config, *, tasks: Sequence[Task] = TASKS) -> None:
        self.config = config
        self.now_s = 0.0
        self.coordinator = Coordinator(
            config=config, tasks=tasks, rows=NoRows(), started_s=0.0, clock=lambda: self.now_s
        )
        registry = self.coordinator.registry
        registry.set_endpoint("buffer", "127.0.0.1:2", node="h")
        # With this generator a learner is never the last deployment that leaves, which would end Ray's actors.
        registry.attach(Deployment(id="generator-1", role=Role.GENERATOR, host="h", pid=1))
        self.calls: list[Call] = []
        self.before: dict[str, Callable[[Call], Awaitable[None]]] = {}
        self.answers: dict[str, Callable[[], Any]] = {}
        self.client = CoordinatorClient(self._send)
        self.rows: Any = object()
        self.nodes: list[dict[str, Any]] = []
        self.joined = JoinedCluster(open_data_plane=self._open, enter_run=self._enter, nodes=self._nodes)

    def called(self, method: str) -> list[tuple[Any, ...]]:
        """Returns the arguments of the calls of a method."""
        return [call.arguments for call in self.calls if call.method == method]

    def replace_learner(self) -> None:
        """Lets another learner take the place of one that was silent for too long."""
        self.now_s += 2 * self.config.buffer.heartbeat_timeout_s
        other = Deployment(id="another", role=Role.LEARNER, host="h", pid=1)
        self.coordinator.registry.attach(other)

    async def _send(self, call: Call) -> Any:
        self.calls.append(call)
        if call.method in self.before:
            await self.before[call.method](call)
        if call.method in self.answers:
            return self.answers[call.method]()
        return await perform(self.coordinator, call)

    async def _open(self, *_: object, **__: object) -> Any:
        return self.rows

    async def _enter(
        self, config: Config, *, deployment: Deployment, tasks: Sequence[Task], restored: Restored | None = None
    ) -> RunHandles:
        attach = partial(self.client.call, Coordinator.attach, deployment, shared=shared_config(config))
        lineage = await attach(restored=restored)
        weights: Any = None
        return RunHandles(deployment=deployment, lineage=lineage, coordinator=self.client, weights=weights)

    async def _nodes(self, *, timeout_s: float) -> list[dict[str, Any]]:
        return self.nodes


class MadeUpActors:
    """Makes the actors of replicas, without processes. An actor generates until a test ends it, or until it is drained
    or killed. `actors` has the newest actor by its name, and `said` the calls that end actors.

    The next starts raise `start_errors`, and the next rests `rest_errors`.
    A start waits for `starting`, a shutdown for `shutdown`, and an actor that is
    asked whether it lives for `alive`.
    """

    def __init__(self) -> None:
        self.actors: dict[str, MadeUpActor] = {}
        self.said: list[tuple[str, str]] = []
        self.taken_over: dict[str, Path] = {}
        """The folder of the logs of the run that has taken over an actor, by the name of the actor."""
        self.make_errors: list[Exception | None] = []
        self.start_errors: list[Exception] = []
        self.rest_errors: list[Exception] = []
        self.starting: Callable[[], Awaitable[object]] = partial(asyncio.sleep, 0)
        self.alive: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        self.shutdown: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)

    def __call__(self, config: Config, *, replica: str, name: str, deployment: str) -> Any:
        if self.make_errors and (error := self.make_errors.pop(0)) is not None:
            raise error
        self.actors[name] = MadeUpActor(self, name)
        return self.actors[name]

    @property
    def made(self) -> list[str]:
        return list(self.actors)

    @property
    def killed(self) -> list[str]:
        return [name for what, name in self.said if what == "kill"]


class MadeUpActor:
    """Stands for `ReplicaActor`."""

    def __init__(self, actors: MadeUpActors, name: str) -> None:
        self._actors, self._name = actors, name
        self.given: dict[str, Any] = {}
        self.ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def placed(self) -> None: ...

    async def start(self, model_path: str, *, secrets: Secrets, logs: Path) -> EngineProcesses:
        self.given = {"model_path": model_path, "secrets": secrets, "logs": logs}
        if self._actors.start_errors:
            raise self._actors.start_errors.pop(0)
        await self._actors.starting()
        return EngineProcesses(node=node_id(), started={}, shared_memory=[])

    async def run(self) -> None:
        await self.ends

    async def check_alive(self, *, timeout_s: float) -> None:
        self._actors.said.append(("check_alive", self._name))
        await self._actors.alive()

    async def drain(self) -> None:
        self._actors.said.append(("drain", self._name))
        if not self.ends.done():
            self.ends.set_result(None)

    async def rest(self) -> None:
        self._actors.said.append(("rest", self._name))
        if self._actors.rest_errors:
            raise self._actors.rest_errors.pop(0)

    def of_run(self, config: Config, *, deployment: str, secrets: Secrets, logs: Path) -> "MadeUpActor":
        self._actors.taken_over[self._name] = logs
        other = MadeUpActor(self._actors, self._name)
        self._actors.actors[self._name] = other
        return other

    async def shutdown(self) -> None:
        self._actors.said.append(("shutdown", self._name))
        await self._actors.shutdown()

    def kill(self) -> None:
        self._actors.said.append(("kill", self._name))
