"""A generator deployment: starts the replicas and looks after them (`pool.py`) until the run ends, a signal asks it to
stop, or fewer than `generator.min_replicas` live.

A stop is clean: replicas start no new groups, groups in flight are committed within the grace, and engines end. Files
that a killed engine left in /dev/shm are removed. A generator deployment never outlives the run.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from asyncrl.common.roles import Role, RunState
from asyncrl.common.tasks import Stopped, running, unless_stopped
from asyncrl.config.schema import Config
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.status import BriefStatus, OwnReplicas
from asyncrl.deployment.inputs import Prompts
from asyncrl.deployment.pool import ReplicaPool
from asyncrl.deployment.shared_actors import RunHandles, enter_run, keep_attached, leave_run, new_deployment
from asyncrl.environments.secrets import read_secrets, warn_of_short
from asyncrl.errors import StallError
from asyncrl.generation.shared_memory import EngineProcesses

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0
"""Time between two checks of the run and of the replicas, seconds."""
COUNT_EVERY_S = 300.0
"""Time between two log lines with the number of generated samples, seconds."""


class Progress:
    """Makes log lines about replicas: one when they begin to generate, then one every `COUNT_EVERY_S`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s: float | None = None

    def line(self, status: BriefStatus, own: OwnReplicas) -> str | None:
        """Returns the next log line about the replicas `own`; None if none is due."""
        busy = [view for view in own.views.values() if view.reserved_groups]
        if self._due_s is None and busy:
            self._due_s = self._clock() + COUNT_EVERY_S
            weights = ", ".join(sorted({view.version.words for view in busy if view.version is not None}))
            return f"generating with the weights of {weights}"
        if self._due_s is None or self._clock() < self._due_s:
            return None
        self._due_s = self._clock() + COUNT_EVERY_S
        samples = sum(report.samples for report in own.reports.values())
        running = sum(own.reports[view.replica].running_groups for view in busy if view.replica in own.reports)
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
        self._prompts = prompts
        self._deployment = new_deployment(Role.GENERATOR, replicas=config.generator.replicas)
        secrets = read_secrets(config.environment, os.environ)
        warn_of_short(secrets)
        self._pool = ReplicaPool(
            config,
            deployment=self._deployment.id,
            model_path=model_path,
            secrets=secrets,
            started=started,
        )

    async def run(self, stop: asyncio.Event) -> None:
        config = self._config
        # Closed from right to left: the replicas end, and then the deployment leaves the run.
        async with AsyncExitStack() as entered, AsyncExitStack() as made:
            # Replicas come first: they import vLLM, the longest part of a start, while the prompts are loaded and the
            # run's actors are created.
            made.push_async_callback(self._pool.end)
            self._pool.make()
            tasks = (await self._prompts).train
            handles = await enter_run(config, deployment=self._deployment, tasks=tasks)
            self._pool.coordinator = handles.coordinator
            entered.push_async_callback(leave_run, handles.coordinator, self._deployment, namespace=config.run.name)
            # Heartbeats begin now and continue while engines start and drain. Without them the run would count this
            # deployment as gone, and the last live deployment that leaves ends the run's actors.
            every_s = config.buffer.heartbeat_timeout_s / 5
            await entered.enter_async_context(running(keep_attached(handles, every_s=every_s), name="keep attached"))
            try:
                await unless_stopped(stop, self._pool.start())
            except Stopped:
                return
            names = ", ".join(replica.name for replica in self._pool.replicas)
            logger.info("engines are ready, waiting for weights: %s", names)
            await self._watch(handles, stop)

    async def _watch(self, handles: RunHandles, stop: asyncio.Event) -> None:
        """Looks after the replicas. Returns when the run has ended or `stop` is set.

        Raises GeneratorPoolExhausted if too few replicas live, and StallError if the run made no progress for
        `run.stall_timeout_s`.
        """
        progress = Progress()
        while not stop.is_set():
            status = await handles.coordinator.call(Coordinator.brief_status)
            names = [replica.name for replica in self._pool.replicas]
            own = await handles.coordinator.call(Coordinator.own_replicas, self._deployment.id, names)
            if line := progress.line(status, own):
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
            await self._pool.look_after(own)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_EVERY_S):
                    await stop.wait()
