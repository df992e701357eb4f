"""One member of the generator pool: an engine, its rollouts, its weights, its word to the buffer.

Four loops: admission (reserve and start), delivery (rows first, then commit), weights (load and verify), heartbeat.
What must hold: no ticket is asked for before a version is loaded; a commit waits for the verdict of the parity probe
of the last update; every ticket ends as a commit, a failure or, when this process dies, by expiry.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncio_throttle.throttler import Throttler

from asyncrl.buffer.actor import Failure, ReplicaReport
from asyncrl.buffer.records import CommitOutcome, GroupMeta, Refusal, Reservation, Ticket, Version
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data_plane.object_store import Rows
from asyncrl.errors import (
    DataError,
    InfraError,
    ManifestMismatch,
    ManifestVoid,
    ParityError,
    RolloutError,
    TornReplica,
    WeightError,
)
from asyncrl.generation.interfaces import InferenceEngine
from asyncrl.generation.rollout import FinishedGroup, Rollouts
from asyncrl.metrics.catalogue import GENERATOR_STATES
from asyncrl.metrics.recorders import GeneratorMetrics
from asyncrl.metrics.states import SlotStates
from asyncrl.weights.manifest import Manifest, check_bucket, check_parameters, is_news
from asyncrl.weights.parity import parity_tolerance_nats
from asyncrl.weights.store import Publication

logger = logging.getLogger(__name__)

REFUSED_STATE = {
    Refusal.STALENESS: "blocked_on_staleness",
    Refusal.CAPACITY: "blocked_on_capacity",
    Refusal.NO_PROMPTS: "starved_of_prompts",
}
RESERVE_WAIT_S = 20.0
WEIGHTS_WAIT_S = 20.0
HEARTBEATS_PER_TIMEOUT = 5
RETRY_PAUSE_S = 1.0


class Buffer(Protocol):
    """What a generator asks of the buffer."""

    async def reserve(self, replica: str, version: Version, count: int, *, wait_s: float) -> Reservation: ...
    async def commit(self, metas: Sequence[GroupMeta]) -> list[CommitOutcome]: ...
    async def call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any: ...


class RowSink(Protocol):
    """Where finished rows go."""

    async def put(self, store: str, key: str, rows: Rows) -> None: ...
    async def clear(self, store: str, keys: list[str]) -> None: ...


class WeightSource(Protocol):
    """Where new versions come from."""

    async def newer_than(self, version: Version | None, *, wait_s: float) -> Publication | None: ...


class BucketReceiver(Protocol):
    """The transport's receiving side."""

    async def receive(self, handles: list[Any], *, timeout_s: float) -> list[memoryview]: ...


class Generator:
    """Runs until `drain`; `run` raises when the replica cannot go on."""

    def __init__(
        self,
        *,
        config: Config,
        name: str,
        deployment: str,
        engine: InferenceEngine,
        rollouts: Rollouts,
        buffer: Buffer,
        rows: RowSink,
        store: str,
        weights: WeightSource,
        transport: BucketReceiver,
        parameters: dict[str, tuple[tuple[int, ...], str]],
        metrics: GeneratorMetrics,
        metrics_address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._name = name
        self._deployment = deployment
        self._engine = engine
        self._rollouts = rollouts
        self._buffer = buffer
        self._rows = rows
        self._store = store
        self._weights = weights
        self._transport = transport
        self._parameters = parameters
        self._metrics = metrics
        self._clock = clock
        self._throttle = Throttler(rate_limit=max(1, round(config.generator.max_starts_per_s)), period=1.0)

        self._slots = config.generator.max_concurrent_groups
        self._states = SlotStates(self._slots, states=GENERATOR_STATES, initial="idle", clock=clock)
        metrics.states_from(self._states.seconds)
        self._free_state = "idle"
        self._loading = False
        self._running: dict[str, asyncio.Task[None]] = {}
        self._held: set[str] = set()
        self._finished: asyncio.Queue[FinishedGroup] = asyncio.Queue()
        self._version: Version | None = None
        self._serial = 0
        self._may_start = asyncio.Event()
        self._verified = asyncio.Event()
        self._slot_freed = asyncio.Event()
        self._settled = asyncio.Event()
        self._draining = asyncio.Event()
        self._samples = self._tokens = self._updates = 0
        self._parity_max_nats = 0.0
        self._metrics_address = metrics_address

    @property
    def version(self) -> Version | None:
        """The weights that are loaded and verified."""
        return self._version

    async def run(self) -> None:
        """Generates until `drain` is called; then returns once every held ticket is settled."""
        loops = [self._admit, self._deliver, self._update_weights, self._heartbeat]
        tasks = [asyncio.create_task(loop(), name=loop.__name__) for loop in loops]
        drained = asyncio.create_task(self._drained(), name="drained")
        try:
            ended: set[asyncio.Task[None]] = set()
            while drained not in ended:
                ended, _ = await asyncio.wait(
                    {task for task in [*tasks, drained] if not task.done()} | {drained},
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in ended:
                    task.result()
        finally:
            for task in [*tasks, drained, *self._running.values()]:
                task.cancel()
            await asyncio.gather(*tasks, drained, *self._running.values(), return_exceptions=True)
            with contextlib.suppress(Exception):
                await self._buffer.call("leave", self._name)

    def drain(self) -> None:
        """Stops admission; what is in flight is finished and committed."""
        self._draining.set()
        self._slot_freed.set()

    async def evaluate(self, tasks: Sequence[Task]) -> list[float]:
        """Greedy rewards on tasks that are outside the ledger, at most one concurrency slot's worth at a time."""
        limit = asyncio.Semaphore(self._slots * self._config.learner.group_size)

        async def one(task: Task) -> float:
            async with limit:
                reward, _ = await self._rollouts.answer(task)
                return reward

        return list(await asyncio.gather(*[one(task) for task in tasks]))

    # --- admission ----------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        wait_s = 0.0
        while not self._draining.is_set():
            await self._may_start.wait()
            free = self._slots - len(self._running)
            if free == 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
                continue
            assert self._version is not None
            reservation = await self._buffer.reserve(self._name, self._version, free, wait_s=wait_s)
            # The first ask returns at once with the reason; only then is it worth waiting for a change.
            wait_s = 0.0 if reservation.refusal is None else RESERVE_WAIT_S
            self._set_free_state(REFUSED_STATE.get(reservation.refusal, "idle") if reservation.refusal else "idle")
            for ticket in reservation.tickets:
                self._held.add(ticket.key)
            for ticket in reservation.tickets:
                async with self._throttle:
                    self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        task = asyncio.create_task(self._rollout(ticket), name=f"rollout {ticket.key}")
        self._running[ticket.key] = task
        self._show_states()
        self._metrics.inflight(len(self._running))

    async def _rollout(self, ticket: Ticket) -> None:
        started_s = self._clock()
        try:
            try:
                async with asyncio.timeout(self._config.generator.rollout_timeout_s):
                    group = await self._rollouts.run(ticket)
                    await self._rows.put(self._store, ticket.key, group.rows)
            except TimeoutError:
                limit_s = self._config.generator.rollout_timeout_s
                raise InfraError(
                    f"group {ticket.key} took longer than generator.rollout_timeout_s = {limit_s:g} s",
                    reason="rollout_timeout",
                ) from None
            except (RolloutError, asyncio.CancelledError):
                raise
            except Exception as error:
                raise DataError(f"{type(error).__name__}: {error}", reason="unknown") from error
            self._metrics.rollout(
                duration_s=self._clock() - started_s,
                prompt_tokens=group.meta.prompt_tokens,
                completion_tokens=group.meta.completion_tokens,
            )
            self._finished.put_nowait(group)
        except RolloutError as error:
            await self._fail(ticket.key, ticket.version.incarnation, error)
        finally:
            self._running.pop(ticket.key, None)
            self._show_states()
            self._metrics.inflight(len(self._running))
            self._slot_freed.set()

    async def _fail(self, key: str, incarnation: int, error: RolloutError) -> None:
        logger.warning("group %s failed (%s, %s): %s", key, error.failure_class, error.reason, error)
        self._metrics.rollout_failed(failure_class=error.failure_class, reason=error.reason)
        group_size = self._config.learner.group_size
        self._metrics.samples(group_size, outcome="failed")
        if error.reason.startswith("reward_"):
            self._metrics.reward_failed(reason=error.reason, samples=group_size)
        failure = Failure(key=key, incarnation=incarnation, failure_class=error.failure_class, reason=error.reason)
        await self._buffer.call("fail", [failure])
        self._settle(key)

    # --- delivery -----------------------------------------------------------------------------------------------

    async def _deliver(self) -> None:
        while True:
            groups = [await self._finished.get()]
            await self._verified.wait()
            while not self._finished.empty():
                groups.append(self._finished.get_nowait())
            outcomes = await self._buffer.commit([group.meta for group in groups])
            refused: list[str] = []
            for group, outcome in zip(groups, outcomes, strict=True):
                self._settle(group.meta.key)
                self._metrics.samples(len(group.meta.rewards), outcome=outcome)
                if outcome is CommitOutcome.ACCEPTED:
                    self._samples += len(group.meta.rewards)
                    self._tokens += group.meta.generated_tokens
                    self._metrics.rewards(group.meta.rewards)
                elif outcome is not CommitOutcome.DUPLICATE:
                    refused.append(group.meta.key)
            if refused:
                await self._rows.clear(self._store, refused)

    # --- weights ------------------------------------------------------------------------------------------------

    async def _update_weights(self) -> None:
        newest = None
        torn_since_s: float | None = None
        while True:
            publication = await self._weights.newer_than(newest, wait_s=WEIGHTS_WAIT_S)
            if publication is None:
                continue
            newest = publication.manifest.version
            if self._version is None or publication.serial - self._serial > self._config.weights.max_lag_publications:
                self._may_start.clear()
            try:
                await self._load(publication)
            except (ManifestMismatch, ManifestVoid) as error:
                if self._version is None and isinstance(error, ManifestMismatch):
                    raise  # there will never be one that fits
                self._metrics.weight_update(outcome="refused", phase_seconds={})
                logger.error("replica %s keeps weights %s: %s", self._name, self._version, error)
                continue
            except (TornReplica, ParityError) as error:
                self._metrics.weight_update(outcome="torn", phase_seconds={})
                logger.error("replica %s is torn: %s", self._name, error)
                await self._tear(error)
                # Only a whole update mends a torn replica: the same version again, or a newer one.
                torn_since_s = torn_since_s or self._clock()
                if self._clock() - torn_since_s > self._config.weights.load_timeout_s:
                    raise
                newest = None
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            torn_since_s = None
            self._serial = publication.serial
            self._may_start.set()

    async def _tear(self, error: WeightError) -> None:
        """Carry no version and start nothing; what bad weights produced is failed as INFRA."""
        self._version = None
        self._may_start.clear()
        if isinstance(error, ParityError):
            await self._engine.abort()
            while not self._finished.empty():
                meta = self._finished.get_nowait().meta
                await self._fail(meta.key, meta.incarnation, InfraError(str(error), reason="parity"))

    async def _load(self, publication: Publication) -> None:
        manifest = publication.manifest
        if not is_news(manifest.version, self._version):
            return
        timeout_s = self._config.weights.load_timeout_s
        check_parameters(manifest, self._parameters)
        started_s = self._clock()
        buckets = await self._transport.receive(publication.handles, timeout_s=timeout_s)
        for index, data in enumerate(buckets):
            check_bucket(manifest, index, data)
        fetched_s = self._clock()
        # From here to the probe's verdict nothing that these weights produced may be committed.
        self._verified.clear()
        self._loading = True
        self._show_states()
        try:
            async with asyncio.timeout(timeout_s):
                times = await self._engine.load(manifest, buckets)
        except TimeoutError:
            raise WeightError(
                f"loading weights {manifest.version} took longer than weights.load_timeout_s = {timeout_s:g} s; the "
                "engine is ended"
            ) from None
        finally:
            self._loading = False
            self._show_states()
        self._updates += 1
        probed_s = self._clock()
        if self._updates % self._config.weights.probe_every_updates == 0 or self._version is None:
            await self._probe(manifest)
        self._version = manifest.version
        self._verified.set()
        self._metrics.policy_version(manifest.version.step)
        self._metrics.weight_update(
            outcome="applied",
            phase_seconds={
                "fetch": fetched_s - started_s,
                "pause": times.pause_s,
                "load": times.load_s,
                "resume": times.resume_s,
                "probe": self._clock() - probed_s,
            },
        )
        await self._report()

    async def _probe(self, manifest: Manifest) -> None:
        probe = manifest.probe
        scores = await asyncio.gather(*[self._engine.score(tokens) for tokens in probe.tokens])
        difference = probe.max_difference_nats(scores)
        self._metrics.parity(difference)
        tolerance = parity_tolerance_nats(self._config)
        if not difference <= tolerance:
            raise ParityError(
                f"replica {self._name}: after loading {manifest.version} the engine's log-probs differ from the "
                f"learner's by {difference:.3g} nats, weights.parity_tolerance_nats is {tolerance:g}"
            )
        self._parity_max_nats = max(self._parity_max_nats, difference)

    # --- heartbeat ----------------------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        interval_s = self._config.buffer.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        while True:
            await self._report()
            self._metrics.heartbeat(unix_time_s=time.time())
            await asyncio.sleep(min(1.0, interval_s))

    async def _report(self) -> None:
        busy = len(self._running)
        report = ReplicaReport(
            actor=self._name,
            deployment=self._deployment,
            store=self._store,
            metrics_address=self._metrics_address,
            state_seconds=self._states.seconds(),
            samples=self._samples,
            completion_tokens=self._tokens,
            weight_updates=self._updates,
            parity_max_nats=self._parity_max_nats,
        )
        await self._buffer.call(
            "heartbeat", self._name, self._version, self._slots - busy, busy, list(self._held), report
        )

    # --- inside -------------------------------------------------------------------------------------------------

    async def _drained(self) -> None:
        await self._draining.wait()
        while self._held:
            self._settled.clear()
            await self._settled.wait()

    def _settle(self, key: str) -> None:
        self._held.discard(key)
        self._settled.set()

    def _set_free_state(self, state: str) -> None:
        self._free_state = state
        self._show_states()

    def _show_states(self) -> None:
        if self._loading:
            self._states.set({"paused_for_weights": self._slots})
            return
        busy = len(self._running)
        self._states.set({"generating": busy, self._free_state: self._slots - busy})
