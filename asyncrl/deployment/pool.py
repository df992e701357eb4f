"""The replicas of one generator deployment: starts them, starts them again after a failure, and adds and drains some.

`asyncrl.buffer.fleet` has the life of a replica. Its deployment ends a replica

- whose process or engine has died (`GeneratorActor.run` raises), or that the coordinator has quarantined,
- or that is suspect, because it sends no heartbeats, and does not answer a call either,

and starts it again, with a new actor. After a start that committed no group, it waits before the next one, twice as
long each time. A replica that fails more often than `generator.max_restarts` times within an hour is given up, and so
is one that the run refuses.

If the first weights of a replica are wrong by the same difference in two starts, engine and learner do not compute the
same model. Then the run ends, unless another replica generates.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import ray

from asyncrl.buffer.fleet import Cause, ReplicaState
from asyncrl.common.tasks import cancelled
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import Registry
from asyncrl.coordinator.replicas import ReplicaView
from asyncrl.coordinator.status import OwnReplicas
from asyncrl.data_plane.calls import finished
from asyncrl.deployment.cluster import placed
from asyncrl.deployment.replica import Replica
from asyncrl.deployment.run_dir import reward_log_path
from asyncrl.environments.secrets import Secrets
from asyncrl.errors import (
    ActorGone,
    ConfigError,
    FirstParityError,
    GeneratorPoolExhausted,
    HandshakeError,
    ManifestMismatch,
    RunError,
)
from asyncrl.generation.actor import GeneratorActor
from asyncrl.generation.shared_memory import EngineProcesses, reap
from asyncrl.policy.model_directory import read_json

logger = logging.getLogger(__name__)

ACTOR_CONCURRENCY = 10_000
EXIT_S = 10.0
"""Deadline of each call that ends a replica, seconds."""
WINDOW_S = 3600.0
"""`generator.max_restarts` limits the restarts within this time, seconds."""
BACK_OFF_S = 1.0
"""Time before the second start in a row that follows a start without a committed group, seconds. It doubles."""
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
    processes."""

    config: Config
    _: KW_ONLY
    deployment: str
    model_path: Awaitable[str]
    secrets: Secrets
    started: Callable[[EngineProcesses], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.coordinator: CoordinatorClient | None = None
        """The run's coordinator. None before the deployment has entered the run, and so before a replica joins it."""
        self.replicas: list[Replica] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._scalings = 0
        self._given_up = 0
        """Number of replicas that were given up since the last `asyncrl scale`."""
        self._lost: list[str] = []
        self._below_since_s: float | None = None
        self._wrong_model: ConfigError | None = None

    def make(self) -> None:
        """Makes the actors of `generator.replicas` replicas. They import vLLM, the longest part of a start."""
        for _ in range(self.config.generator.replicas):
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

        Raises ConfigError if engines compute other log-probs than the learner from the first weights on, and
        GeneratorPoolExhausted if fewer than `generator.min_replicas` replicas generate, and no other one comes back
        within `generator.replace_timeout_s`.
        """
        for replica in [*self.replicas]:
            if replica.name in own.reports:
                replica.samples = own.reports[replica.name].samples
            if replica.work is not None and replica.work.done():
                replica.work.result()
                replica.work = None
            if replica.work is None and replica.running is not None:
                self._look_at(replica, own.views.get(replica.name))
        wanted = len(self.replicas) + self._given_up if own.wanted is None else own.wanted
        if own.scalings != self._scalings:
            self._scalings, self._given_up = own.scalings, 0
        while len(self.replicas) + self._given_up < wanted:
            self._add()
        while len(self.replicas) > wanted:
            self._drain(self._least_useful())
        self._check_size(min(self.config.generator.min_replicas, wanted))

    async def end(self) -> None:
        """Ends all replicas: drains them within the grace, and ends their engines."""
        await asyncio.gather(*[self._end_and_leave(replica) for replica in self.replicas], *self._ending)

    # --- failures -----------------------------------------------------------------------------------------------

    def _look_at(self, replica: Replica, view: ReplicaView | None) -> None:
        """Begins to replace a replica that has failed, or to ask one that is silent."""
        assert replica.running is not None
        if replica.running.done():
            self._begin(replica, self._replace(replica, replica.ended_with))
        elif view is not None and view.actor == replica.actor and view.state in _ASKED:
            self._begin(replica, self._ask(replica, view))

    def _begin(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
        replica.work = asyncio.create_task(work, name=f"supervision of {replica.name}")

    async def _ask(self, replica: Replica, view: ReplicaView) -> None:
        """Replaces a silent replica if its process does not answer. One that answers may only be late."""
        timeout_s = self.config.buffer.heartbeat_timeout_s
        try:
            await finished(replica.handle.is_alive.remote(), timeout_s=timeout_s, what=f"asking {replica.name}")
        except (RunError, TimeoutError) as error:
            if not replica.generates:  # it has ended meanwhile, and the next look finds the cause
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
                "replica %s is lost: %s; %s",
                replica.name,
                error,
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
                logger.warning("the buffer did not hear that replica %s is lost: %s", replica.name, unheard)
            await self._end_actor(replica, drain=False, answers=cause is not Cause.NO_HEARTBEATS)
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
                await asyncio.sleep(min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (replica.fruitless - 2)))
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
        """Returns the error that ends the run, with the family of the model."""
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
        generator = self.config.generator
        replica.start += 1
        replica.begun, replica.processes, replica.running = False, None, None
        replica.handle = (
            ray.remote(GeneratorActor)
            .options(
                name=replica.actor,
                namespace=self.config.run.name,
                num_cpus=generator.cpus,
                num_gpus=generator.gpus,
                label_selector=generator.node_labels or None,
                max_restarts=0,
                max_concurrency=ACTOR_CONCURRENCY,
            )
            .remote(config=self.config, name=replica.actor, deployment=self.deployment)
        )

    async def _start(self, replica: Replica) -> None:
        generator = self.config.generator
        await placed(
            replica.handle,
            config=self.config,
            what=f"replica {replica.name}",
            cpus=generator.cpus,
            gpus=generator.gpus,
            node_labels=generator.node_labels,
        )
        model_path = await self.model_path
        replica.begun = True
        # Secrets are arguments of a method call, because Ray's head keeps the arguments of an actor's constructor.
        started = replica.handle.start.remote(model_path, secrets=self.secrets, reward_log=reward_log_path(self.config))
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
        self.started(replica.processes)

    async def _run(self, replica: Replica) -> None:
        await replica.handle.run.remote()

    async def _end_and_leave(self, replica: Replica, *, grace_s: float | None = None) -> None:
        """Ends a replica that does not come back, and its supervision first. It leaves the run also if it had to be
        killed."""
        if replica.work is not None:
            await cancelled(replica.work)
        await self._end_actor(replica, grace_s=grace_s)
        if self.coordinator is None or not replica.start:
            return
        with contextlib.suppress(RunError, TimeoutError):  # its tickets then expire
            async with asyncio.timeout(EXIT_S):
                await self.coordinator.call(Coordinator.leave, replica.actor)

    async def _end_actor(
        self, replica: Replica, *, drain: bool = True, answers: bool = True, grace_s: float | None = None
    ) -> None:
        """Ends the actor of a replica: drains it within the grace, ends its engine, kills its process, and removes its
        shared memory. A process that does not answer is only killed. `grace_s` is `run.shutdown_grace_s` if it is left
        out.

        Errors are logged and not raised, so that one replica cannot prevent the end of the others.
        """
        grace_s = self.config.run.shutdown_grace_s if grace_s is None else grace_s
        try:
            if drain and replica.generates:
                assert replica.running is not None
                await finished(replica.handle.drain.remote(), timeout_s=EXIT_S, what=f"draining {replica.name}")
                async with asyncio.timeout(grace_s):
                    await asyncio.wait([replica.running])
            if replica.begun and answers:
                await finished(replica.handle.shutdown.remote(), timeout_s=EXIT_S, what=f"ending {replica.name}")
        except Exception as error:
            logger.warning("replica %s did not end cleanly: %s", replica.name, error)
        finally:
            if replica.running is not None:
                await cancelled(replica.running)
            if replica.handle is not None:
                ray.kill(replica.handle, no_restart=True)
            if (left := replica.processes) is not None:
                await asyncio.to_thread(reap, left, timeout_s=EXIT_S)
