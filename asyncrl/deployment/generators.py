"""A generator deployment: starts the replicas and supervises them until the run ends, a signal asks it to stop, or
fewer than `generator.min_replicas` live.

A stop is clean: replicas start no new groups, groups in flight are committed within the grace, and engines end. Files
that a killed engine left in /dev/shm are removed. A generator deployment never outlives the run.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.common.roles import Role, RunState
from asyncrl.config.schema import Config
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.replicas import ReplicaReport, ReplicaView
from asyncrl.coordinator.status import BriefStatus
from asyncrl.data_plane.calls import finished, reason_of_death
from asyncrl.deployment.closing import Stopped, running, unless_stopped
from asyncrl.deployment.cluster import placed
from asyncrl.deployment.inputs import Prompts
from asyncrl.deployment.run_dir import reward_log_path
from asyncrl.deployment.shared_actors import RunHandles, enter_run, keep_attached, leave_run, new_deployment
from asyncrl.environments.secrets import read_secrets
from asyncrl.errors import AsyncRLError, GeneratorPoolExhausted, RunError, StallError
from asyncrl.generation.actor import GeneratorActor
from asyncrl.generation.shared_memory import EngineProcesses, reap

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0
"""Time between two checks of the run and of the replicas, seconds."""
COUNT_EVERY_S = 300.0
"""Time between two log lines with the number of generated samples, seconds."""
ACTOR_CONCURRENCY = 10_000
EXIT_S = 10.0
"""Deadline of each call that ends a replica, seconds."""


class _Replica:
    """The actor of one replica, and the supervisor's state of it."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self.begun = False
        """Whether the call that starts the engine was sent. Before that call, the actor only imports vLLM."""
        self.processes: EngineProcesses | None = None
        self.running: asyncio.Task[None] | None = None


class Progress:
    """Makes log lines about the replicas of a deployment: one when they begin to generate, then one every
    `COUNT_EVERY_S`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s: float | None = None

    @property
    def due(self) -> bool:
        """Whether a line may be due. `line` needs more calls of the coordinator than the rest of a check."""
        return self._due_s is None or self._clock() >= self._due_s

    def line(
        self, status: BriefStatus, views: Collection[ReplicaView], reports: Mapping[str, ReplicaReport]
    ) -> str | None:
        """Returns the next log line; None if none is due. `views` and `reports` are those of the replicas."""
        busy = [view for view in views if view.reserved_groups]
        if self._due_s is None and busy:
            self._due_s = self._clock() + COUNT_EVERY_S
            weights = ", ".join(sorted({view.version.words for view in busy if view.version is not None}))
            return f"generating with the weights of {weights}"
        if self._due_s is None or self._clock() < self._due_s:
            return None
        self._due_s = self._clock() + COUNT_EVERY_S
        samples = sum(report.samples for report in reports.values())
        running = sum(reports[view.replica].running_groups for view in busy if view.replica in reports)
        return (
            f"{samples:,} samples generated, {running} groups in flight; the learner is at {status.version.words} of "
            f"{status.total_steps}"
        )


class GeneratorDeployment:
    """`run` starts the replicas and returns when the run has ended or `stop` is set.

    `started` is called once for each replica whose engine has started, with the processes of the replica.
    """

    def __init__(
        self,
        config: Config,
        *,
        model_path: Awaitable[str],
        prompts: Awaitable[Prompts],
        started: Callable[[EngineProcesses], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._on_started = started
        self._secrets = read_secrets(config.environment, os.environ)
        self._model_path = model_path
        self._prompts = prompts
        self._deployment = new_deployment(Role.GENERATOR)

    async def run(self, stop: asyncio.Event) -> None:
        config = self._config
        # Closed from right to left: the replicas end, and then the deployment leaves the run.
        async with AsyncExitStack() as entered, AsyncExitStack() as made:
            # Replicas come first: they import vLLM, the longest part of a start, while the prompts are loaded and the
            # run's actors are created.
            replicas: list[_Replica] = []
            made.push_async_callback(self._end, replicas)
            replicas.extend(self._make() for _ in range(config.generator.replicas))
            tasks = (await self._prompts).train
            handles = await enter_run(config, deployment=self._deployment, tasks=tasks)
            entered.push_async_callback(leave_run, handles, namespace=config.run.name)
            # Heartbeats begin now and continue while engines start and drain. Without them the run would count this
            # deployment as gone, and the last live deployment that leaves ends the run's actors.
            every_s = config.buffer.heartbeat_timeout_s / 5
            await entered.enter_async_context(running(keep_attached(handles, every_s=every_s), name="keep attached"))
            try:
                await unless_stopped(stop, self._start_all(replicas))
            except Stopped:
                return
            logger.info("engines are ready, waiting for weights: %s", ", ".join(each.name for each in replicas))
            for replica in replicas:
                replica.running = asyncio.create_task(self._run(replica), name=replica.name)
            await self._watch(replicas, handles, stop)

    def _make(self) -> _Replica:
        generator = self._config.generator
        name = f"generator-{secrets.token_hex(3)}"
        handle = (
            ray.remote(GeneratorActor)
            .options(
                name=name,
                namespace=self._config.run.name,
                num_cpus=generator.cpus,
                num_gpus=generator.gpus,
                label_selector=generator.node_labels or None,
                max_restarts=0,
                max_concurrency=ACTOR_CONCURRENCY,
            )
            .remote(config=self._config, name=name, deployment=self._deployment.id)
        )
        return _Replica(name, handle)

    async def _start_all(self, replicas: Sequence[_Replica]) -> None:
        await asyncio.gather(*[self._start(replica) for replica in replicas])

    async def _start(self, replica: _Replica) -> None:
        generator = self._config.generator
        await placed(
            replica.handle.__ray_ready__.remote(),
            config=self._config,
            what=f"replica {replica.name}",
            cpus=generator.cpus,
            gpus=generator.gpus,
            node_labels=generator.node_labels,
        )
        model_path = await self._model_path
        replica.begun = True
        # Secrets are arguments of a method call, because Ray's head keeps the arguments of an actor's constructor.
        started = replica.handle.start.remote(
            model_path, secrets=self._secrets, reward_log=reward_log_path(self._config)
        )
        try:
            replica.processes = await finished(
                started, timeout_s=generator.startup_timeout_s, what=f"starting {replica.name}"
            )
        except TimeoutError:
            raise RunError(
                f"replica {replica.name} was not ready within generator.startup_timeout_s = "
                f"{generator.startup_timeout_s:g} s: its engine is still loading or compiling the model; "
                "raise the limit"
            ) from None
        self._on_started(replica.processes)

    async def _run(self, replica: _Replica) -> None:
        await replica.handle.run.remote()

    async def _watch(self, replicas: list[_Replica], handles: RunHandles, stop: asyncio.Event) -> None:
        """Returns when the run has ended or `stop` is set.

        Removes and ends replicas that died. Raises GeneratorPoolExhausted if fewer than `generator.min_replicas` live,
        and StallError if the run made no progress for `run.stall_timeout_s`.
        """
        lost: list[str] = []
        names, progress = [replica.name for replica in replicas], Progress()
        while not stop.is_set():
            status = await handles.coordinator.call(Coordinator.brief_status)
            if progress.due:
                views = await handles.coordinator.call(Coordinator.replicas, names)
                reports = await handles.coordinator.call(Coordinator.reports, names)
                if line := progress.line(status, views, reports):
                    logger.info("%s", line)
            if status.state in (RunState.FINISHED, RunState.FAILED):
                logger.info("the run is %s", status.state)
                return
            # A learner that closes the run evaluates and saves, and one that restores a checkpoint loads it, which may
            # take longer. Before the first step, the learner may be started much later.
            left = not status.learner_attached and status.version.step > 0
            may_stall = status.state is RunState.RUNNING or left
            if may_stall and status.quiet_s > self._config.run.stall_timeout_s:
                raise StallError(
                    f"no group was committed and no step was trained for {status.quiet_s:.0f} s "
                    f"(run.stall_timeout_s = {self._config.run.stall_timeout_s:g}); {status.counts.ready} groups are "
                    "ready for the learner, which is "
                    f"{'attached' if status.learner_attached else 'gone'}; see the "
                    "learner's log for the cause"
                )
            for replica in [r for r in replicas if r.running is not None and r.running.done()]:
                replicas.remove(replica)
                lost.append(f"{replica.name}: {_cause(replica)}")
                logger.error("replica %s is lost: %s", replica.name, _cause(replica))
                await self._end([replica])
            if len(replicas) < self._config.generator.min_replicas:
                raise GeneratorPoolExhausted(
                    f"only {len(replicas)} replicas live, but generator.min_replicas is "
                    f"{self._config.generator.min_replicas}; lost replicas: {'; '.join(lost)}"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_EVERY_S):
                    await stop.wait()

    async def _end(self, replicas: Sequence[_Replica]) -> None:
        await asyncio.gather(*[self._end_one(replica) for replica in replicas])

    async def _end_one(self, replica: _Replica) -> None:
        """Ends a replica: drains it within the grace, ends its engine, kills its actor, and removes its shared memory.

        Errors are logged and not raised, so that one replica cannot prevent the end of the others.
        """
        grace_s = self._config.run.shutdown_grace_s
        try:
            if replica.running is not None and not replica.running.done():
                await finished(replica.handle.drain.remote(), timeout_s=EXIT_S, what=f"draining {replica.name}")
                async with asyncio.timeout(grace_s):
                    await asyncio.wait([replica.running])
            if replica.begun:
                await finished(replica.handle.shutdown.remote(), timeout_s=EXIT_S, what=f"ending {replica.name}")
        except Exception as error:
            logger.warning("replica %s did not end cleanly: %s", replica.name, error)
        finally:
            if replica.running is not None:
                replica.running.cancel()
                await asyncio.gather(replica.running, return_exceptions=True)
            ray.kill(replica.handle, no_restart=True)
            if (left := replica.processes) is not None:
                await asyncio.to_thread(reap, left, timeout_s=EXIT_S)


def _cause(replica: _Replica) -> str:
    assert replica.running is not None
    error = None if replica.running.cancelled() else replica.running.exception()
    if isinstance(error, RayTaskError) and isinstance(error.cause, AsyncRLError):
        error = error.cause  # without the traceback of the actor, which Ray puts into the text of its own error
    if isinstance(error, RayActorError):
        return reason_of_death(error)
    return f"{type(error).__name__}: {error}" if error is not None else "its rollout loop returned without an error"
