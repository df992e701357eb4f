"""The replicas of one generator deployment: starts them, starts them again after a failure, and adds and drains some.

`asyncrl.buffer.fleet` has the life of a replica. Its deployment ends a replica

- whose process or engine has died (`GeneratorActor.run` raises), or that the coordinator has quarantined,
- or that is suspect, because it sends no heartbeats, and does not answer a call either,

and starts it again, with a new actor. After two starts in a row that committed no group, it waits before the next one,
and twice as long after each further one, at most `LONGEST_BACK_OFF_S` seconds. A replica that fails more often than
`generator.max_restarts` times within an hour is given up, and so is one with an error with which every start would end,
such as a tokenizer that is not the learner's.

If the log-probs for the first weights of a replica differ from the learner's by the same amount in two starts, engine
and learner do not compute the same model. Then the run ends, unless another replica has generated samples.
"""

import asyncio
import contextlib
import copy
import logging
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.buffer.fleet import Cause, ReplicaState, actor_of
from asyncrl.common.names import REPLICAS
from asyncrl.common.roles import Role, RunState
from asyncrl.common.tasks import Stopped, cancelled, running, unless_stopped
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import OVER, Registry, ReplicaView
from asyncrl.coordinator.status import BriefStatus, OwnReplicas
from asyncrl.data_plane.calls import finished, reason_of_death
from asyncrl.deployment.cluster import placed
from asyncrl.deployment.inputs import Prompts
from asyncrl.deployment.shared_actors import JOINED, JoinedCluster, RunHandles, keep_attached, leave_run, new_deployment
from asyncrl.environments.secrets import Secrets, read_secrets, warn_of_short
from asyncrl.errors import (
    ActorGone,
    AsyncRLError,
    ConfigError,
    FirstParityError,
    GeneratorPoolExhausted,
    HandshakeError,
    ManifestMismatch,
    RunError,
    StallError,
)
from asyncrl.generation.actor import GeneratorActor
from asyncrl.generation.shared_memory import EngineProcesses, reap
from asyncrl.log_files import logs_folder
from asyncrl.policy.model_directory import read_json

logger = logging.getLogger(__name__)

# The actor of a replica, and what its deployment knows of the replica.

ACTOR_CONCURRENCY = 10_000
EXIT_S = 10.0
"""Deadline of each call that drains, ends or takes over a replica, seconds."""


class ReplicaActor:
    """The Ray actor `name` of one start of a replica. The constructor asks Ray to make it, and does not wait."""

    def __init__(self, config: Config, *, replica: str, name: str, deployment: str) -> None:
        generator = config.generator
        self._config, self._replica = config, replica
        self._taken_over: Any = None
        """The call that gives the actor to a run after another one; None if this run is its first one."""
        self.handle: Any = (
            ray.remote(GeneratorActor)
            .options(
                name=name,
                namespace=REPLICAS,
                num_cpus=generator.cpus,
                num_gpus=generator.gpus,
                label_selector=generator.node_labels or None,
                max_restarts=0,
                max_concurrency=ACTOR_CONCURRENCY,
            )
            .remote(config=config, name=name, deployment=deployment)
        )

    async def placed(self) -> None:
        """Waits until the actor's process has imported its libraries. Raises PlacementError if Ray has no room for it,
        and RunError if the import takes too long."""
        generator = self._config.generator
        await placed(
            self.handle,
            config=self._config,
            what=f"replica {self._replica}",
            cpus=generator.cpus,
            gpus=generator.gpus,
            node_labels=generator.node_labels,
        )

    async def start(self, model_path: str, *, secrets: Secrets, logs: Path) -> EngineProcesses:
        """Starts the engine. Raises CallTimeout after `generator.startup_timeout_s`."""
        if self._taken_over is not None:
            await finished(self._taken_over, timeout_s=EXIT_S, what=f"taking over {self._replica}")
        # Secrets are arguments of a method call, because Ray's head keeps the arguments of an actor's constructor.
        started = self.handle.start.remote(model_path, secrets=secrets, logs=logs)
        timeout_s, what = self._config.generator.startup_timeout_s, f"starting {self._replica}"
        processes: EngineProcesses = await finished(started, timeout_s=timeout_s, what=what)
        return processes

    async def run(self) -> None:
        """Runs the replica's rollout loop until the replica is drained. Raises the error that ends the loop, or Ray's
        error if the process dies."""
        await self.handle.run.remote()

    async def check_alive(self, *, timeout_s: float) -> None:
        """Raises RunError or TimeoutError if the actor's process does not answer."""
        await finished(self.handle.is_alive.remote(), timeout_s=timeout_s, what=f"asking {self._replica}")

    async def drain(self) -> None:
        """Makes the replica start no new groups. `run` returns when the groups in flight are finished."""
        await finished(self.handle.drain.remote(), timeout_s=EXIT_S, what=f"draining {self._replica}")

    async def rest(self) -> None:
        """Ends all parts of the run in the actor's process but the engine, after `run` has returned. Raises RunError if
        another run cannot use the engine."""
        await finished(self.handle.rest.remote(), timeout_s=EXIT_S, what=f"keeping {self._replica}")

    def of_run(self, config: Config, *, deployment: str, secrets: Secrets, logs: Path) -> "ReplicaActor":
        """Returns a copy of this object, for the same actor in another run. Call it after `rest`. The actor begins at
        once to start the scoring processes of that run, beside the loading of the prompts and the start of the
        buffer."""
        other = copy.copy(self)
        other._config = config
        other._taken_over = self.handle.take_over.remote(
            config=config, deployment=deployment, secrets=secrets, logs=logs
        )
        return other

    async def shutdown(self) -> None:
        """Ends the replica's engine."""
        await finished(self.handle.shutdown.remote(), timeout_s=EXIT_S, what=f"ending {self._replica}")

    def kill(self) -> None:
        """Kills the actor's process."""
        ray.kill(self.handle, no_restart=True)


class Replica:
    """A replica of the deployment. `name` stays, and each start has an actor of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = 0
        """Number of the present start, counted from 1."""
        self.process: ReplicaActor | None = None
        """The actor of the present start."""
        self.begun = False
        """Whether the call that starts the engine was sent. Before that call, the actor only imports vLLM."""
        self.taken_over = False
        """Whether the actor of the present start has generated for an earlier run."""
        self.processes: EngineProcesses | None = None
        self.running: asyncio.Task[None] | None = None
        """The call of the actor that generates. None while the replica starts."""
        self.work: asyncio.Task[None] | None = None
        """The task that starts or replaces the replica, or asks it whether it lives; None if there is no such task."""
        self.restarted_s: deque[float] = deque()
        self.samples = 0
        """Samples of all starts, by the last status."""
        self.log = ""
        """The node and the path of its log, by its last heartbeat; empty before the first."""
        self.samples_before = 0
        """Samples of the earlier starts."""
        self.error: BaseException | None = None
        """The last error because of which the replica was started again or given up."""
        self.first_difference_nats: float | None = None
        """The last difference that ended a start of the replica: between the engine's and the learner's log-probs for
        the first weights of the start."""
        self.fruitless = 0
        """Number of starts in a row that committed no group."""

    @property
    def actor(self) -> str:
        return actor_of(self.name, self.start)

    @property
    def generates(self) -> bool:
        return self.running is not None and not self.running.done()

    @property
    def ended_with(self) -> BaseException:
        """The error with which the call that generates has ended."""
        assert self.running is not None
        error = None if self.running.cancelled() else self.running.exception()
        if isinstance(error, RayTaskError) and isinstance(error.cause, AsyncRLError):
            return error.cause  # without the traceback of the actor, which Ray puts into the text of its own error
        if isinstance(error, RayActorError):
            return ActorGone(reason_of_death(error))
        return error or RunError("its rollout loop returned without an error")


WINDOW_S = 3600.0
"""`generator.max_restarts` limits the restarts within this time, seconds."""
BACK_OFF_S = 1.0
"""Wait before the next start of a replica after two starts in a row that committed no group, seconds. It doubles with
each further one."""
LONGEST_BACK_OFF_S = 60.0
EQUAL_DIFFERENCES = 0.01
"""Differences of log-probs in two starts of a replica are equal if they differ by at most this share: engines with
several threads do not round alike in each start."""
_ASKED = (ReplicaState.SUSPECT, ReplicaState.QUARANTINED)
"""States of a replica whose process is asked whether it lives."""
NOT_MENDED = (ConfigError, HandshakeError, ManifestMismatch)
"""Errors with which every start of a replica would end."""


@dataclass
class ReplicaPool:
    """The replicas of the deployment `deployment`. `started` is called for each engine that has started, with its
    processes. `new_actor` makes the actor of each start. `kept` has the replicas of an earlier run of this process,
    which the pool takes over. At the end, the replicas that stay for the next run are put into it."""

    config: Config
    _: KW_ONLY
    deployment: str
    model_path: Awaitable[str]
    secrets: Secrets
    started: Callable[[EngineProcesses], None]
    new_actor: Callable[..., ReplicaActor] = ReplicaActor
    kept: list[Replica] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._logs = logs_folder(self.config.run.dir / self.config.run.name)
        self.coordinator: CoordinatorClient | None = None
        """The run's coordinator. None before the deployment has entered the run, and so before a replica joins it."""
        self.replicas: list[Replica] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._scalings, self._scaled_because = 0, ""
        self._given_up = 0
        """Number of replicas that were given up since `asyncrl scale` was last given, without those that are no longer
        wanted."""
        self._lost: list[str] = []
        self._below_since_s: float | None = None
        self._wrong_model: ConfigError | None = None
        self.keeps = False
        """Whether `end` keeps the replicas whose engines another run can use, because the run has finished."""

    def make(self) -> None:
        """Takes over the kept replicas, and makes actors for as many as `generator.replicas` needs more. New actors
        begin to import vLLM, the longest part of a start."""
        taken, self.kept[:] = self.kept[:], []
        for each in taken:
            replica = Replica(each.name)
            assert each.process is not None, "a replica that is kept has an actor"
            replica.start, replica.processes, replica.taken_over = each.start, each.processes, True
            replica.process = each.process.of_run(
                self.config, deployment=self.deployment, secrets=self.secrets, logs=self._logs
            )
            self.replicas.append(replica)
        for _ in range(self.config.generator.replicas - len(taken)):
            replica = Replica(f"generator-{secrets.token_hex(3)}")
            self.replicas.append(replica)
            self._make_actor(replica)

    async def start(self) -> None:
        """Starts the engines of the replicas that `make` made. Raises the error of the first one that cannot start."""
        await asyncio.gather(*[self._start(replica) for replica in self.replicas])
        for replica in self.replicas:
            replica.running = asyncio.create_task(self._run(replica), name=replica.name)

    async def look_after(self, own: OwnReplicas) -> None:
        """Begins to end, start, add and drain replicas, as the coordinator and the replicas themselves require.

        Raises ConfigError if engines compute other log-probs than the learner from the first weights on, and no replica
        has generated samples. Raises GeneratorPoolExhausted if fewer than `generator.min_replicas` replicas generate
        (or than are wanted, if that is fewer), and the missing ones are given up, or do not generate again within
        `generator.replace_timeout_s`.
        """
        for replica in [*self.replicas]:
            if (report := own.reports.get(replica.name)) is not None:
                replica.samples, replica.log = report.samples, report.log_place
            if replica.work is not None and replica.work.done():
                replica.work.result()
                replica.work = None
            if replica.work is None and replica.running is not None:
                self._look_at(replica, own.views.get(replica.name))
        wanted = len(self.replicas) + self._given_up if own.wanted is None else own.wanted
        if (own.scalings, own.scaled_because) != (self._scalings, self._scaled_because):
            # If the wanted number falls, the replicas that were given up are subtracted first. `asyncrl scale` forgets
            # them, so that new replicas start in their place.
            missed = max(0, wanted - len(self.replicas))
            self._given_up = min(self._given_up, missed) if own.scalings == self._scalings else 0
            self._scalings, self._scaled_because = own.scalings, own.scaled_because
            logger.info("this deployment should have %d replicas now: %s", wanted, own.scaled_because)
        while len(self.replicas) + self._given_up < wanted:
            self._add()
        while len(self.replicas) > wanted:
            self._drain(self._least_useful())
        self._check_size(min(self.config.generator.min_replicas, wanted))

    def end_idle(self) -> None:
        """Begins to end the replicas that do not generate, because they start or have failed. Called when the run was
        asked to end: then no replica is started any more."""
        for replica in [each for each in self.replicas if not each.generates]:
            self._drain(replica)

    async def end(self, *, grace_s: float) -> None:
        """Ends all replicas: drains them within `grace_s` seconds, and ends their engines. Replicas whose draining
        began earlier have at most this time too. If the pool `keeps` replicas, at most `generator.replicas` of those
        whose engines another run can use go into `kept` instead."""
        wanted = self.replicas[: self.config.generator.replicas] if self.keeps else []
        rested = await asyncio.gather(*[self._rests(replica, grace_s=grace_s) for replica in wanted])
        self.kept += [replica for replica, rests in zip(wanted, rested, strict=True) if rests]
        ends = [self._end_and_leave(each, grace_s=grace_s) for each in self.replicas if each not in self.kept]
        await asyncio.gather(*ends, self._end_drained(grace_s))

    async def _rests(self, replica: Replica, *, grace_s: float) -> bool:
        """Drains a replica within `grace_s` seconds, and ends all but its engine. Returns whether another run can use
        the engine."""
        if replica.work is not None or not replica.generates:
            return False
        assert replica.process is not None
        assert replica.running is not None
        try:
            await replica.process.drain()
            async with asyncio.timeout(grace_s):
                await replica.running  # raises the error that ended the replica; without one, it has left the run
            await replica.process.rest()
        except Exception as error:
            logger.warning("the engine of replica %s is not kept for the next run: %s", replica.name, error)
            return False
        logger.info("the engine of replica %s is kept for the next run", replica.name)
        return True

    async def _end_drained(self, grace_s: float) -> None:
        if self._ending:
            _, late = await asyncio.wait(self._ending, timeout=grace_s)
            await cancelled(*late)

    # --- failures -----------------------------------------------------------------------------------------------

    def _look_at(self, replica: Replica, view: ReplicaView | None) -> None:
        """Begins to replace a replica whose rollout loop has ended, or to ask one that is suspect or quarantined
        whether it lives."""
        assert replica.running is not None
        if replica.running.done():
            self._begin(replica, self._replace(replica, replica.ended_with))
        elif view is not None and view.actor == replica.actor and view.state in _ASKED:
            self._begin(replica, self._ask(replica, view))

    def _begin(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
        replica.work = asyncio.create_task(work, name=f"supervision of {replica.name}")

    async def _ask(self, replica: Replica, view: ReplicaView) -> None:
        """Replaces a suspect or quarantined replica if its process does not answer within
        `buffer.heartbeat_timeout_s`. If it answers, does nothing: its heartbeats are late, or it ends its rollout loop
        itself."""
        timeout_s = self.config.buffer.heartbeat_timeout_s
        try:
            assert replica.process is not None
            await replica.process.check_alive(timeout_s=timeout_s)
        except (RunError, TimeoutError) as error:
            if not replica.generates:  # its rollout loop has ended meanwhile; the next `_look_at` finds the cause
                return
            silent = ActorGone(f"no heartbeat for {view.silent_s:.0f} s, and no answer of the process: {error}")
            await self._replace(replica, silent, cause=Cause.NO_HEARTBEATS)

    async def _replace(self, replica: Replica, error: BaseException, *, cause: Cause | None = None) -> None:
        """Ends the actor of a replica and starts the replica again, until a start succeeds, or until the replica is
        given up."""
        assert self.coordinator is not None, "replicas are looked after when the deployment has entered the run"
        while True:
            gives_up = self._why_given_up(replica, error)
            logger.error(
                "replica %s is lost: %s; %s%s",
                replica.name,
                error,
                f"its log is {replica.log}; " if replica.log else "",
                gives_up or f"it is started again (restart {len(replica.restarted_s) + 1} within an hour)",
            )
            report = Coordinator.quarantine if gives_up else Coordinator.restarting
            replica.error = error
            try:
                await self.coordinator.call(
                    report, replica.actor, cause or Cause.of(error), f"{type(error).__name__}: {error}"
                )
                if gives_up:
                    await self.coordinator.call(Coordinator.leave, replica.actor)
                    await self.coordinator.call(Registry.gave_up, replica.name, f"{error}; {gives_up}")
            except (RunError, TimeoutError) as unheard:
                logger.warning("the buffer did not get the report that replica %s is lost: %s", replica.name, unheard)
            await self._end_actor(replica, answers=cause is not Cause.NO_HEARTBEATS)
            if gives_up:
                if isinstance(error, FirstParityError) and not any(each.samples for each in self.replicas):
                    self._wrong_model = await self._not_served(replica, error)
                self.replicas.remove(replica)
                self._given_up += 1
                self._lost.append(f"{replica.name}: {error} ({gives_up})")
                return
            replica.fruitless = 0 if replica.samples > replica.samples_before else replica.fruitless + 1
            replica.samples_before = replica.samples
            if replica.fruitless > 1:
                await self.sleep(min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (replica.fruitless - 2)))
            replica.restarted_s.append(self.clock())
            try:
                await self._bring_up(replica)
            except Exception as failed:
                error, cause = failed, Cause.START_FAILED
                continue
            logger.warning("replica %s has started again", replica.name)
            return

    def _why_given_up(self, replica: Replica, error: BaseException) -> str | None:
        """Returns why a replica is not started again; None if it is."""
        while replica.restarted_s and self.clock() - replica.restarted_s[0] > WINDOW_S:
            replica.restarted_s.popleft()
        limit = self.config.generator.max_restarts
        if isinstance(error, FirstParityError):
            last, replica.first_difference_nats = replica.first_difference_nats, error.nats
            if last is not None and math.isclose(last, error.nats, rel_tol=EQUAL_DIFFERENCES):
                return "it is not started again, because its first weights were wrong by this difference in two starts"
        if isinstance(error, NOT_MENDED):
            return "it is not started again, because the next start would end in the same way"
        if len(replica.restarted_s) >= limit:
            return (
                f"it is not started again, because it was started again {len(replica.restarted_s)} times within an "
                f"hour (generator.max_restarts = {limit})"
            )
        return None

    async def _not_served(self, replica: Replica, error: FirstParityError) -> ConfigError:
        """Returns the error that ends the run because engines compute other log-probs than the learner. It names the
        family of the model."""
        family = None
        with contextlib.suppress(OSError, ValueError):
            family = read_json(Path(await self.model_path) / "config.json").get("model_type")
        return ConfigError(
            f"model.path = {self.config.model.path}: engines compute other log-probs than the learner for models of "
            f"the family {family}: the difference of the first weights was {error.nats:.3g} nats in "
            f"two starts of {replica.name}, so further starts would end in the same way; choose another model, or, if "
            "the difference is only rounding, raise weights.parity_tolerance_nats or weights.parity_mean_nats "
            f"({error})"
        )

    def _check_size(self, least: int) -> None:
        if self._wrong_model is not None:
            raise self._wrong_model
        live = sum(replica.generates for replica in self.replicas)
        if live >= least:
            self._below_since_s = None
            return
        now_s, limit_s = self.clock(), self.config.generator.replace_timeout_s
        self._below_since_s = now_s if self._below_since_s is None else self._below_since_s
        if len(self.replicas) >= least and now_s - self._below_since_s <= limit_s:
            return
        coming = [
            f"{replica.name} is being started" + (f" after this error: {replica.error}" if replica.error else "")
            for replica in self.replicas
            if not replica.generates
        ]
        raise GeneratorPoolExhausted(
            f"only {live} replicas live, but generator.min_replicas is {self.config.generator.min_replicas} "
            f"(generator.replace_timeout_s = {limit_s:g} s); {'; '.join(coming + self._lost)}"
        )

    # --- number of replicas -------------------------------------------------------------------------------------

    def _add(self) -> None:
        replica = Replica(f"generator-{secrets.token_hex(3)}")
        self.replicas.append(replica)
        logger.info("replica %s is added", replica.name)
        self._begin(replica, self._begin_added(replica))

    async def _begin_added(self, replica: Replica) -> None:
        try:
            await self._bring_up(replica)
        except Exception as error:
            await self._replace(replica, error, cause=Cause.START_FAILED)

    def _least_useful(self) -> Replica:
        """Returns the replica to end: one that does not generate, else the youngest."""
        idle = [replica for replica in self.replicas if not replica.generates]
        return (idle or self.replicas)[-1]

    def _drain(self, replica: Replica) -> None:
        """Begins to end a replica that is not wanted any more. Its groups in flight are finished."""
        logger.info("replica %s is drained", replica.name)
        self.replicas.remove(replica)

        async def drained() -> None:
            await self._end_and_leave(replica, grace_s=self.config.generator.rollout_timeout_s)
            logger.info("replica %s has ended", replica.name)

        task = asyncio.create_task(drained(), name=f"end of {replica.name}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # --- actors -------------------------------------------------------------------------------------------------

    async def _bring_up(self, replica: Replica) -> None:
        """Makes an actor for a replica, starts its engine, and begins to generate."""
        self._make_actor(replica)
        await self._start(replica)
        replica.running = asyncio.create_task(self._run(replica), name=replica.name)

    def _make_actor(self, replica: Replica) -> None:
        replica.start += 1
        replica.begun, replica.processes, replica.running = False, None, None
        replica.taken_over, replica.log = False, ""
        replica.process = self.new_actor(
            self.config, replica=replica.name, name=replica.actor, deployment=self.deployment
        )

    async def _start(self, replica: Replica) -> None:
        """Starts the engine of a replica. If the engine of an earlier run cannot be taken over, it ends, and the
        replica gets a new one."""
        if not replica.taken_over:
            await self._start_engine(replica)
            return
        try:
            await self._start_engine(replica)
            logger.info("replica %s has taken over the engine of the run before this one", replica.name)
        except Exception as error:
            logger.warning(
                "replica %s gets a new engine, because it cannot take over that of an earlier run: %s",
                replica.name,
                error,
            )
            await self._end_actor(replica)
            self._make_actor(replica)
            await self._start_engine(replica)

    async def _start_engine(self, replica: Replica) -> None:
        assert replica.process is not None
        await replica.process.placed()
        model_path = await self.model_path
        replica.begun = True
        try:
            replica.processes = await replica.process.start(model_path, secrets=self.secrets, logs=self._logs)
        except TimeoutError:
            limit_s = self.config.generator.startup_timeout_s
            raise RunError(
                f"replica {replica.name} was not ready within generator.startup_timeout_s = {limit_s:g} s: its engine "
                "is still loading or compiling the model; raise the limit"
            ) from None
        self.started(replica.processes)

    async def _run(self, replica: Replica) -> None:
        assert replica.process is not None
        await replica.process.run()

    async def _end_and_leave(self, replica: Replica, *, grace_s: float) -> None:
        """Ends a replica that is not started again. Ends its supervision first. At the end, removes the replica from
        the run, because a replica that had to be killed has not left the run itself."""
        if replica.work is not None:
            await cancelled(replica.work)
        try:
            await self._end_actor(replica, grace_s=grace_s)
        finally:
            if self.coordinator is not None and replica.start:
                # if the call fails, the replica's tickets expire later
                with contextlib.suppress(RunError, TimeoutError):
                    async with asyncio.timeout(EXIT_S):
                        await self.coordinator.call(Coordinator.leave, replica.actor)

    async def _end_actor(self, replica: Replica, *, grace_s: float | None = None, answers: bool = True) -> None:
        """Ends the actor of a replica: drains it within `grace_s` seconds, ends its engine, kills its process, and
        removes its shared memory. Without `grace_s` it is not drained. A process that does not answer is only killed.

        Errors are logged and not raised, so that one replica cannot prevent the end of the others.
        """
        if (process := replica.process) is None:
            return
        try:
            if grace_s is not None and replica.generates:
                assert replica.running is not None
                await process.drain()
                async with asyncio.timeout(grace_s):
                    await asyncio.wait([replica.running])
            if replica.begun and answers:
                await process.shutdown()
        except Exception as error:
            logger.warning("replica %s did not end cleanly: %s", replica.name, error)
        finally:
            if replica.running is not None:
                await cancelled(replica.running)
            process.kill()
            if (left := replica.processes) is not None:
                await asyncio.to_thread(reap, left, timeout_s=EXIT_S)


# A generator deployment: starts the replicas and looks after them (`ReplicaPool`) until the run ends, a signal asks it
# to stop, or fewer than `generator.min_replicas` live.
#
# A stop is clean: replicas start no new groups, groups in flight are committed within the grace, and engines end. Files
# that a killed engine left in /dev/shm are removed. A generator deployment never outlives the run.

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
    """`run` starts the replicas and returns when the run has ended or `stop` is set. It returns the run's last state;
    None if `stop` was set.

    `started` is called each time an engine of a replica has started, with the processes of the replica. `new_actor`
    makes the actor of each start of a replica. `kept` has the replicas of an earlier run of this process, which the
    deployment takes over. The run and the replicas are checked every `watch_every_s` seconds.

    `asked` returns whether the run was asked to end. Then no replica is started any more, but those that generate stay
    until `stop` is set. `grace_left_s` returns how many seconds the groups in flight may take at the end; default:
    `run.shutdown_grace_s`.

    If SIGTERM has ended the learner before its last step, the replicas stay for `generator.wait_for_learner_s` seconds.
    The next learner continues with them, as it does after a learner that was killed.
    """

    def __init__(
        self,
        config: Config,
        *,
        model_path: Awaitable[str],
        prompts: Awaitable[Prompts],
        started: Callable[[EngineProcesses], None] = lambda _: None,
        asked: Callable[[], bool] = lambda: False,
        grace_left_s: Callable[[], float] | None = None,
        cluster: JoinedCluster = JOINED,
        new_actor: Callable[..., ReplicaActor] = ReplicaActor,
        kept: list[Replica] | None = None,
        watch_every_s: float = WATCH_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._preempted_s: float | None = None
        """Time at which SIGTERM was found to have ended the learner, on `clock`; None if the run has a learner, or has
        ended in another way."""
        self._cluster = cluster
        self._asked = asked
        self._grace_left_s = grace_left_s or (lambda: config.run.shutdown_grace_s)
        self._may_keep = kept is not None
        self._watch_every_s = watch_every_s
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
            new_actor=new_actor,
            kept=[] if kept is None else kept,
        )

    def keep_replicas(self) -> None:
        """Lets the replicas whose engines another run can use go into `kept` when `run` ends, because the run has
        finished."""
        self._pool.keeps = True

    async def run(self, stop: asyncio.Event) -> RunState | None:
        config = self._config
        # Closed from right to left: the replicas end, and then the deployment leaves the run.
        async with AsyncExitStack() as entered, AsyncExitStack() as made:
            # Replicas come first: they import vLLM, the longest part of a start, while the prompts are loaded and the
            # run's actors are created.
            made.push_async_callback(self._end)
            self._pool.make()
            tasks = (await self._prompts).train
            handles = await self._cluster.enter_run(config, deployment=self._deployment, tasks=tasks)
            self._pool.coordinator = handles.coordinator
            entered.push_async_callback(leave_run, handles.coordinator, self._deployment, namespace=config.run.name)
            # Heartbeats begin now and continue while engines start and drain. Without them the run would count this
            # deployment as gone, and the last live deployment that leaves ends the run's actors.
            every_s = config.buffer.heartbeat_timeout_s / 5
            await entered.enter_async_context(running(keep_attached(handles, every_s=every_s), name="keep attached"))
            try:
                await unless_stopped(stop, self._pool.start())
            except Stopped:
                return None
            names = ", ".join(replica.name for replica in self._pool.replicas)
            logger.info("engines are ready, waiting for weights: %s", names)
            return await self._watch(handles, stop)

    async def _end(self) -> None:
        await self._pool.end(grace_s=self._grace_left_s())

    async def _watch(self, handles: RunHandles, stop: asyncio.Event) -> RunState | None:
        """Looks after the replicas. Returns the run's state when it has ended, or None when `stop` is set.

        Raises the errors of `ReplicaPool.look_after`, and StallError if the run made no progress for
        `run.stall_timeout_s`, although it is running or has lost its learner after a step.
        """
        progress = Progress()
        while not stop.is_set():
            status = await handles.coordinator.call(Coordinator.brief_status)
            names = [replica.name for replica in self._pool.replicas]
            own = await handles.coordinator.call(Coordinator.own_replicas, self._deployment.id, names)
            if line := progress.line(status, own):
                logger.info("%s", line)
            if not self._stays(status.state):
                logger.info("the run is %s", status.state)
                self._pool.keeps |= self._may_keep and status.state is RunState.FINISHED
                return status.state
            # `run.stall_timeout_s` limits the time without progress, but not always. A learner that closes the run
            # evaluates and saves, and one that starts again loads a checkpoint: both may take longer. Before the first
            # step, the learner may be started much later than the replicas.
            left = not status.learner_attached and status.version.step > 0
            may_stall = status.state is not RunState.PREEMPTED and (status.state is RunState.RUNNING or left)
            if may_stall and status.quiet_s > self._config.run.stall_timeout_s:
                raise StallError(
                    f"no group was committed and no step was trained for {status.quiet_s:.0f} s "
                    f"(run.stall_timeout_s = {self._config.run.stall_timeout_s:g}); {status.counts.ready} groups are "
                    "ready for the learner, which is "
                    f"{'attached' if status.learner_attached else 'gone'}; see the "
                    "learner's log for the cause"
                )
            if self._asked():
                self._pool.end_idle()
            else:
                await self._pool.look_after(own)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._watch_every_s):
                    await stop.wait()
        return None

    def _stays(self, state: RunState) -> bool:
        """Returns whether the replicas stay in a run with this state: it is not over, or its learner was ended by
        SIGTERM less than `generator.wait_for_learner_s` seconds ago."""
        wait_s = self._config.generator.wait_for_learner_s
        if state is not RunState.PREEMPTED or not wait_s:
            self._preempted_s = None
            return state not in OVER
        if self._preempted_s is None:
            self._preempted_s = self._clock()
            logger.info(
                "SIGTERM has ended the run's learner; waiting for the next one for %g s (generator.wait_for_learner_s)",
                wait_s,
            )
        return self._clock() - self._preempted_s < wait_s
