"""A cluster in this process: the real coordinator of a run, without Ray."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from asyncrl.common.roles import Role
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import Call, CoordinatorClient, perform
from asyncrl.coordinator.coordinator import Attachments, Coordinator
from asyncrl.coordinator.registry import Deployment
from asyncrl.coordinator.status import Restored
from asyncrl.data.prompts import Task
from asyncrl.deployment.shared_actors import JoinedCluster, RunHandles

TASKS = (Task(question="ab", prompt="ab>", answer="ba"),)


class NoRows:
    """The rows of a buffer that has none."""

    async def clear(self, keys: Sequence[str]) -> None: ...

    async def keys(self) -> list[str]:
        return []


class LocalCluster:
    """A cluster with one run. `calls` lists the calls that its coordinator got.

    `before` has functions that run before a call of a method, by the method's name. They get the call.
    """

    def __init__(self, config: Config, *, tasks: Sequence[Task] = TASKS) -> None:
        self.config = config
        self.now_s = 0.0
        self.coordinator = Coordinator(
            config=config, tasks=tasks, rows=NoRows(), started_s=0.0, clock=lambda: self.now_s
        )
        registry = self.coordinator.registry
        registry.endpoints.set("buffer", "127.0.0.1:2")
        # With this generator a learner is never the last deployment that leaves, which would end Ray's actors.
        registry.attach(
            Deployment(id="generator-1", role=Role.GENERATOR, host="h", pid=1), shared=shared_config(config)
        )
        self.calls: list[Call] = []
        self.before: dict[str, Callable[[Call], Awaitable[None]]] = {}
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
        self.coordinator.registry.attach(other, shared=shared_config(self.config))

    async def _send(self, call: Call) -> Any:
        self.calls.append(call)
        if call.method in self.before:
            await self.before[call.method](call)
        return await perform(self.coordinator, call)

    async def _open(self, *_: object, **__: object) -> Any:
        return self.rows

    async def _enter(
        self, config: Config, *, deployment: Deployment, tasks: Sequence[Task], restored: Restored | None = None
    ) -> RunHandles:
        attach = partial(self.client.call, Attachments.attach, deployment, shared=shared_config(config))
        lineage = await attach(restored=restored)
        weights: Any = None
        return RunHandles(deployment=deployment, lineage=lineage, coordinator=self.client, weights=weights)

    async def _nodes(self, *, timeout_s: float) -> list[dict[str, Any]]:
        return self.nodes
