"""One replica of the generator pool: runs rollouts, reports to the coordinator, and updates its weights.

Six loops run at once. Who waits for whom, and the state that counts the time of a slot:

    coordinator ──▶ `Coordinator.reserve` ──▶ `Generator._admit`          starved_of_prompts, blocked_on_capacity,
                                                    │                     blocked_on_staleness; idle: otherwise free
                                                    │
                  engine ◀── `Rollouts.run` ◀───────┤                     generating
                                                    │
    scoring processes, agents ◀── `PartScorers` ◀───┤                     waiting_for_environment; admission does not
                                                    │                     count a group that is only scored
                                                    │
    row store, `Coordinator.commit` ◀── `Delivery.run`                    no slot

    weight store ──▶ `WeightUpdates.run` ──▶ engine                       paused_for_weights
    coordinator ◀── `Generator.report` (heartbeat)                        no slot; its answer names ended tickets
    engine ──▶ `Generator._engine_died`, `Generator._engine_stuck`        no slot: they end the replica

The end of a rollout wakes admission and delivery. The state is `starting` until the engine is ready. Invariants:

- No ticket is reserved before a version is loaded.
- No delivery begins between the pause of a weight update and its verification. Generation resumes after the load.
  Every `weights.probe_every_updates`-th update, and each update of a replica without a version, is verified by a
  probe. The others count as verified.
- Every ticket ends: by a commit, by a failure, or because the buffer ends it. The buffer ends all tickets of this
  replica when `run` ends, when the deployment sees that this process died, or when the heartbeats stop.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from asyncio_throttle.throttler import Throttler

from asyncrl.buffer.fleet import Cause
from asyncrl.buffer.records import CommitOutcome, FailedTicket, Failure, HeldReport, Prefix, Refusal, Ticket
from asyncrl.common.device_time import Devices, Pool, device_time
from asyncrl.common.tasks import cancelled
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import ReplicaReport
from asyncrl.data_plane.rows import Rows
from asyncrl.errors import DataError, EngineDied, EngineStuck, InfraError, Quarantined, RolloutError, RunError
from asyncrl.generation.episodes import Attempt
from asyncrl.generation.interfaces import PartialCompletion, Sampled
from asyncrl.generation.prefixes import PrefixKeeper
from asyncrl.generation.reward_errors import report_failures
from asyncrl.generation.rollout import FinishedGroup, Rollouts
from asyncrl.generation.weight_updates import UpdateHooks, WeightUpdates
from asyncrl.metrics.catalogue import GENERATOR_STATES
from asyncrl.metrics.recorders import GeneratorMetrics
from asyncrl.metrics.states import SlotStates
from asyncrl.user_code import describe_error

logger = logging.getLogger(__name__)

REFUSED_STATE = {
    Refusal.STALENESS: "blocked_on_staleness",
    Refusal.CAPACITY: "blocked_on_capacity",
    Refusal.NO_PROMPTS: "starved_of_prompts",
}
RESERVE_WAIT_S = 20.0
"""Longest wait of a reserve in the buffer for a ticket, seconds, if the reserve before it got fewer than it asked
for."""
RESERVE_EVERY_S = 0.02
"""Least seconds between two reserves while rollouts run, so that one reserve serves several free slots. It is shorter
than `DELIVER_EVERY_S`, because slots stay empty meanwhile."""
HELD_PER_SLOT = 3
"""Most tickets that a replica holds, for each of its slots: of groups that are generated, scored, or wait for their
delivery. On a busy machine the last two take as long as the generation of short groups, and the engine must not wait
for them. The number is bounded, because groups that wait become staler."""
ONE_TOKEN = (0,)
"""Prompt of a request that only shows whether the engine generates."""
HEARTBEATS_PER_TIMEOUT = 5
"""At least this many heartbeats are sent within `buffer.heartbeat_timeout_s`."""


def throttle_of(starts_per_s: float) -> Throttler:
    """Returns a throttle that lets on average `starts_per_s` rollouts start in a second. The number may be below 1."""
    burst = max(1, round(starts_per_s))
    return Throttler(rate_limit=burst, period=burst / starts_per_s)


class Generator:
    """Generates until `drain` is called. `run` raises when the replica cannot go on.

    The engine is ready when this object is made. `rows` stores finished groups, and `prefix_rows` partial ones.
    `started_s` (monotonic clock) is when its process started, or began to serve this run: the time until this object is
    made counts as the state "starting".
    """

    def __init__(
        self,
        *,
        config: Config,
        name: str,
        deployment: str,
        rollouts: Rollouts,
        coordinator: CoordinatorClient,
        rows: Rows,
        prefix_rows: Rows,
        weights: WeightUpdates,
        metrics: GeneratorMetrics,
        started_s: float,
        metrics_address: str = "",
        node: str = "",
        log: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._name = name
        self._deployment = deployment
        self._rollouts = rollouts
        self._coordinator = coordinator
        self._weights = weights
        self._held = HeldTickets(first_number=time.time_ns())
        self._prefixes = PrefixKeeper(
            prefix_rows,
            every_tokens=config.generator.persist_every_tokens,
            wide=tuple(config.widths),
            verified=weights.verified,
            stored=self._held.stored,
        )
        self._metrics, self._clock = metrics, clock
        self._throttle = throttle_of(config.generator.max_starts_per_s)

        self._slots = config.generator.max_concurrent_groups
        self._states = SlotStates(
            self._slots, states=GENERATOR_STATES, initial="starting", started_s=started_s, clock=clock
        )
        self._states.set({"idle": self._slots})
        metrics.run_info(config)
        metrics.states_from(self._states.seconds)
        self._free_state = "idle"
        self._loading = False
        self._running = RunningRollouts()
        self._delivery = Delivery(
            coordinator=coordinator,
            rows=rows,
            held=self._held,
            running=self._running,
            verified=weights.verified,
            metrics=metrics,
            group_size=config.learner.group_size,
            clock=clock,
        )
        self._unverified: dict[str, InfraError] = {}
        self._draining = asyncio.Event()
        self._last_token_s = clock()
        self._metrics_address, self._node, self._log = metrics_address, node, log
        self._devices = Devices.of(gpus=config.generator.gpus, processes=config.generator.tensor_parallel_size)

    @property
    def version(self) -> Version | None:
        """The version that is loaded and verified; None before the first one, and while the replica is torn: after a
        load that broke off, or a probe that failed."""
        return self._weights.version

    async def run(self) -> None:
        """Generates until `drain` is called. Returns when no ticket is held any more."""
        hooks = UpdateHooks(show_loading=self._show_loading, fail_unverified=self._fail_unverified, report=self.report)
        loops = {
            "admission": self._admit(),
            "delivery": self._delivery.run(),
            "weights": self._weights.run(hooks),
            "heartbeat": self._heartbeat(),
            "engine": self._engine_died(),
            "stall": self._engine_stuck(),
        }
        failed: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(loop, name=name) for name, loop in loops.items()]
                await self._draining.wait()
                await self._held.all_settled()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failures:
            failed = failures.exceptions[0]
            raise failed from failed.__cause__
        finally:
            await self._running.cancel_all()
            with contextlib.suppress(Exception):
                if failed is None:
                    await self._coordinator.call(Coordinator.leave, self._name)
                else:
                    await self._coordinator.call(Coordinator.quarantine, self._name, Cause.of(failed), str(failed))

    def drain(self) -> None:
        """Ends admission. The groups of held tickets are still delivered."""
        self._draining.set()
        self._running.wake()

    # --- admission ----------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        wait_s, reserved_s = 0.0, -math.inf
        while not self._draining.is_set():
            await self._running.more_ends(wait_s=reserved_s + RESERVE_EVERY_S - self._clock())
            version = await self._weights.startable()
            # A slot is free again when its group is generated.
            free = min(self._slots - self._running.generating, HELD_PER_SLOT * self._slots - len(self._held))
            if free <= 0:
                await self._running.next_end()
                continue
            reserved_s = self._clock()
            reservation = await self._coordinator.call(Coordinator.reserve, self._name, version, free, wait_s=wait_s)
            # A call waits in the buffer for a ticket only if the call before it got fewer tickets than it asked for.
            wait_s = 0.0 if reservation.refusal is None else RESERVE_WAIT_S
            if reservation.refusal is Refusal.QUARANTINED:
                raise self._quarantined()
            self._free_state = REFUSED_STATE.get(reservation.refusal, "idle") if reservation.refusal else "idle"
            self._show_states()
            self._held.add(reservation.tickets)
            for ticket in reservation.tickets:
                async with self._throttle:
                    # Since the reserve, an update may have torn the replica, or the replica may have fallen too many
                    # publications behind: this waits for a whole update.
                    await self._weights.startable()
                    if ticket.key in self._held:  # the buffer may have ended the ticket while it waited here
                        self._running.start(
                            ticket.key, self._rollout(ticket), ended=functools.partial(self._ended, ticket.key)
                        )
                        self._show_states()

    def _quarantined(self) -> Quarantined:
        return Quarantined(
            f"replica {self._name} gets no groups any more: {self._config.generator.max_infra_failures} of its "
            "rollouts failed in a row (generator.max_infra_failures), or it was replaced"
        )

    async def _rollout(self, ticket: Ticket) -> None:
        started_s = self._clock()
        try:
            try:
                async with asyncio.timeout(self._config.generator.rollout_timeout_s):
                    prefix = await self._prefixes.read(ticket, turns=self._rollouts.agents_of(ticket.task) is not None)
                    attempt = Attempt(
                        prefix=prefix,
                        on_progress=functools.partial(self._progressed, ticket, prefix),
                        on_generated=functools.partial(self._generated, ticket.key),
                        on_environment=functools.partial(self._in_environment, ticket.key),
                    )
                    group = await self._rollouts.run(ticket, attempt)
                    if ticket.key in self._unverified:
                        raise self._unverified[ticket.key]
            except TimeoutError as error:
                limit_s = self._config.generator.rollout_timeout_s
                notes = getattr(error.__cause__, "__notes__", [])  # what the cancelled rollout was doing
                late = f"group {ticket.key} took longer than generator.rollout_timeout_s = {limit_s:g} s"
                raise InfraError("; ".join([late, *notes]), reason="rollout_timeout") from None
            except (RolloutError, asyncio.CancelledError):
                raise
            except Exception as error:
                raise DataError(describe_error(error), reason="unknown") from error
            self._metrics.rollout(group.meta, duration_s=self._clock() - started_s, scoring_s=group.scoring_s)
            if group.activity is not None:
                self._metrics.agents(**group.activity, part=group.meta.part)
            self._delivery.add(group)
        except RolloutError as error:
            self._delivery.add_failed(ticket.key, ticket.version.incarnation, error)

    def _ended(self, key: str) -> None:
        self._unverified.pop(key, None)
        self._prefixes.ended(key)
        self._show_states()

    def _generated(self, key: str) -> None:
        self._running.generated(key)
        self._show_states()

    def _in_environment(self, key: str, waits: bool) -> None:
        self._running.waits_for_environment(key, waits)
        self._show_states()

    def _progressed(self, ticket: Ticket, prefix: Sequence[PartialCompletion], sampled: Sampled) -> None:
        if ticket.key in self._held and ticket.key not in self._unverified:
            if self._held.progressed(ticket.key, sum(sampled.lengths)):
                self._last_token_s = self._clock()
            self._prefixes.sampled(ticket, sampled, continued=prefix)

    def _abandon(self, keys: Collection[str]) -> None:
        """Ends the rollouts of tickets that the buffer has ended. This does not count as a failure.

        A group that is finished already is still delivered: the buffer refuses its commit, and its rows are cleared.
        """
        for key in keys:
            if self._running.cancel(key):
                logger.info("the buffer has ended the ticket of group %s, so its rollout ends", key)
                self._metrics.samples(self._config.learner.group_size, outcome="cancelled")
            self._held.forget(key)

    # --- called by `WeightUpdates` --------------------------------------------------------------------------------

    def _show_loading(self, loading: bool) -> None:
        self._loading = loading
        self._show_states()

    async def _fail_unverified(self, error: InfraError) -> None:
        """Fails all groups that weights with a failed probe may have generated: finished ones now, running ones at
        their end."""
        self._unverified |= dict.fromkeys(self._running, error)
        for key in self._running:
            self._prefixes.ended(key)
        await self._delivery.fail_finished(error)

    async def report(self) -> None:
        # Unlike `_admit`, this counts every held ticket, as the buffer does.
        free = 0 if self._draining.is_set() else max(0, self._slots - len(self._held))
        prompts, seconds = self._rollouts.engine.prompt_tokens, self._states.seconds()
        report = ReplicaReport(
            actor=self._name,
            deployment=self._deployment,
            metrics_address=self._metrics_address,
            node=self._node,
            log=self._log(),
            state_seconds=seconds,
            device_time=(device_time(Pool.GENERATORS, self._devices, seconds),),
            slots=self._slots,
            running_groups=self._running.generating,
            samples=self._delivery.samples,
            completion_tokens=self._delivery.tokens,
            prompt_tokens=prompts.all,
            cached_prompt_tokens=prompts.cached,
            weight_updates=self._weights.updates,
            parity_max_nats=self._weights.parity_max_nats,
        )
        for _ in range(2):  # if the buffer asks for all tickets, a second heartbeat names them
            held = self._held.report()
            renewal = await self._coordinator.call(
                Coordinator.heartbeat, self._name, self._weights.version, free, held, report
            )
            if renewal.must_end:
                raise self._quarantined()
            self._held.answered(held)
            self._abandon(renewal.ended)
            if not renewal.report_all:
                return
            self._held.report_all()

    # --- engine -------------------------------------------------------------------------------------------------

    async def _engine_died(self) -> None:
        raise EngineDied(f"the engine of replica {self._name} has died: {await self._rollouts.engine.died()}")

    async def _engine_stuck(self) -> None:
        """Raises EngineStuck if the engine generates no token for `generator.stall_timeout_s` while rollouts run, and
        then a test request of one token fails, or is not answered within the same time."""
        limit_s = self._config.generator.stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 5))
            if not self._running.generating or self._loading or self.version is None:
                self._last_token_s = self._clock()
            if self._clock() - self._last_token_s < limit_s:
                continue
            try:
                async with asyncio.timeout(limit_s):
                    await self._rollouts.engine.generate(ONE_TOKEN, n=1, seed=None, temperature=0.0, max_tokens=1)
            except (TimeoutError, InfraError) as error:
                raise EngineStuck(
                    f"the engine of replica {self._name} generated no token for generator.stall_timeout_s = "
                    f"{limit_s:g} s while {len(self._running)} groups ran, and none for a request of one token: "
                    f"{str(error) or 'it did not answer in the same time'}. Raise the limit if an engine needs longer "
                    "for a token"
                ) from None
            self._last_token_s = self._clock()

    # --- heartbeat ----------------------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        interval_s = self._config.buffer.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        while True:
            await self.report()
            self._metrics.heartbeat()
            if self._rollouts.agents is not None:
                self._metrics.sessions(self._rollouts.agents.session_ages_s())
            await asyncio.sleep(min(1.0, interval_s))

    # --- states ---------------------------------------------------------------------------------------------------

    def _show_states(self) -> None:
        self._metrics.inflight(self._running.generating)
        busy = min(self._slots, len(self._running))  # groups that are scored keep slots from being idle
        if self._loading:
            self._states.set({"paused_for_weights": self._slots})
            return
        generating = min(busy, self._running.generating)
        waiting = busy - generating + min(generating, self._running.in_environment)
        self._states.set(
            {
                "generating": busy - waiting,
                "waiting_for_environment": waiting,
                self._free_state: self._slots - busy,
            }
        )


# The rollouts that run on a replica, and the waits for their ends.


class RunningRollouts:
    """The asyncio tasks of rollouts, by the key of their ticket. `generated` records that a group has all of its tokens
    and is only scored from then on."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[object]] = {}
        self._only_scoring: set[str] = set()
        self._in_environment: set[str] = set()
        self._one_ended = asyncio.Event()
        self._none_left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    @property
    def generating(self) -> int:
        """The number of rollouts whose groups are not generated yet."""
        return len(self._tasks) - len(self._only_scoring)

    @property
    def in_environment(self) -> int:
        """The number of rollouts that wait for code of their agents: the engine has no call of their group."""
        return len(self._in_environment)

    def waits_for_environment(self, key: str, waits: bool) -> None:
        (self._in_environment.add if waits and key in self._tasks else self._in_environment.discard)(key)

    def start(self, key: str, rollout: Coroutine[Any, Any, object], *, ended: Callable[[], None]) -> None:
        """Starts a rollout. `ended` is called when it does not run any more."""

        def end(_: asyncio.Task[object]) -> None:
            self._ended(key)
            ended()

        task = self._tasks[key] = asyncio.create_task(rollout, name=f"rollout {key}")
        # A task that is cancelled before it has begun runs none of its own code, not even a `finally`.
        task.add_done_callback(end)
        self._none_left.clear()

    def generated(self, key: str) -> None:
        self._only_scoring.add(key)
        self._in_environment.discard(key)
        self._one_ended.set()

    def _ended(self, key: str) -> None:
        self._tasks.pop(key, None)
        self._only_scoring.discard(key)
        self._in_environment.discard(key)
        self._one_ended.set()
        if not self._tasks:
            self._none_left.set()

    def cancel(self, key: str) -> bool:
        """Cancels a rollout. Returns False if it does not run."""
        task = self._tasks.get(key)
        return task is not None and task.cancel()

    async def cancel_all(self) -> None:
        """Cancels all rollouts, and waits for their ends."""
        await cancelled(*self._tasks.values())

    async def next_end(self) -> None:
        """Waits until a group is generated, a rollout ends, or `wake` is called."""
        self._one_ended.clear()
        await self._one_ended.wait()

    def wake(self) -> None:
        self._one_ended.set()

    async def more_ends(self, *, wait_s: float) -> None:
        """Waits `wait_s` seconds, so that one reserve or delivery serves all rollouts that end meanwhile. Returns
        earlier when no rollout runs any more."""
        if self._tasks and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._none_left.wait()


# The tickets that a replica holds, the progress of each, and the part of this progress that is not reported yet.


class HeldTickets:
    """Tickets from their reserve until they are settled: committed, failed, or ended by the buffer.

    Each heartbeat sends a `report` of the new tickets and of those whose progress has changed. The changes in a report
    count as known when its heartbeat is `answered`. So nothing is lost if a heartbeat or its answer is lost. A complete
    report has all held tickets: at first, and again after `report_all`, every report is complete until one is answered.
    Reports are numbered from `first_number` on, which must be larger than all numbers of an earlier process of this
    replica.

    Calls for a ticket that is not held change nothing: its rollout may end later than the ticket.
    """

    def __init__(self, *, first_number: int) -> None:
        self._tokens: dict[str, int] = {}
        self._prefixes: dict[str, Prefix] = {}
        self._new_tokens: dict[str, int] = {}
        self._new_prefixes: dict[str, Prefix] = {}
        self._next_number = first_number
        # Every report is complete until the buffer has answered a report with the number `_complete_from` or a
        # larger one.
        self._complete_from = first_number
        self._complete_due = True
        self._settled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, key: str) -> bool:
        return key in self._tokens

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    def report(self) -> HeldReport:
        """Returns the report that the next heartbeat sends, with the next number."""
        number, self._next_number = self._next_number, self._next_number + 1
        return HeldReport(
            number=number,
            complete=self._complete_due,
            tokens=dict(self._tokens if self._complete_due else self._new_tokens),
            prefixes=dict(self._new_prefixes),
        )

    def answered(self, report: HeldReport) -> None:
        """Records that the buffer knows what a report sent."""
        for key, tokens in report.tokens.items():
            if self._new_tokens.get(key) == tokens:
                del self._new_tokens[key]
        for key, prefix in report.prefixes.items():
            if self._new_prefixes.get(key) is prefix:
                del self._new_prefixes[key]
        if report.number >= self._complete_from:
            self._complete_due = False

    def report_all(self) -> None:
        """Makes the next report complete."""
        self._complete_due, self._complete_from = True, self._next_number

    def add(self, tickets: Iterable[Ticket]) -> None:
        new = {ticket.key: 0 for ticket in tickets}
        self._tokens |= new
        self._new_tokens |= new

    def progressed(self, key: str, tokens: int) -> bool:
        """Records the number of tokens that the ticket's rollout has sampled so far. Returns whether it has changed."""
        if self._tokens.get(key, tokens) == tokens:
            return False
        self._tokens[key] = self._new_tokens[key] = tokens
        return True

    def stored(self, key: str, prefix: Prefix) -> None:
        """Records which tokens of the ticket's group are stored."""
        if key in self._tokens:
            self._prefixes[key] = self._new_prefixes[key] = prefix

    def prefix_of(self, key: str) -> Prefix | None:
        """Returns the record of the group's stored tokens; None if none are stored, or if the ticket is not held."""
        return self._prefixes.get(key)

    def forget(self, key: str) -> None:
        """Ends the holding of a ticket that the buffer has ended, or whose commit or failure it has answered."""
        for kept in (self._tokens, self._new_tokens, self._prefixes, self._new_prefixes):
            kept.pop(key, None)
        self._settled.set()

    def give_up(self, key: str) -> None:
        """Ends the holding of a ticket although the buffer may still count it as held. The next report is complete, so
        the buffer sees that the ticket is not held any longer."""
        self.forget(key)
        self.report_all()

    async def all_settled(self) -> None:
        """Waits until no ticket is held."""
        while self._tokens:
            self._settled.clear()
            await self._settled.wait()


DELIVER_EVERY_S = 0.05
"""Least time between two deliveries while rollouts run. Short groups are delivered together, because a delivery takes
three calls to other processes."""


# The end of a rollout: stores the rows of finished groups, and then commits the groups or reports their failures.


@dataclass(kw_only=True)
class Delivery:
    """Delivers rollouts that have ended, in the order in which they ended: stores and commits finished groups, and
    reports failures. `verified` waits until the weights of the replica are verified."""

    coordinator: CoordinatorClient
    rows: Rows
    held: HeldTickets
    running: RunningRollouts
    verified: Callable[[], Awaitable[object]]
    metrics: GeneratorMetrics
    group_size: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._ended: list[FinishedGroup | FailedTicket] = []
        self._something_ended = asyncio.Event()
        self.samples = 0
        """Number of samples of the groups that the buffer has accepted."""
        self.tokens = 0
        """Number of completion tokens of these samples."""

    def add(self, ended: FinishedGroup | FailedTicket) -> None:
        """Delivers a group, or reports a failure, soon."""
        self._ended.append(ended)
        self._something_ended.set()

    def add_failed(self, key: str, incarnation: int, error: RolloutError) -> None:
        """Reports soon that the rollout of a ticket failed."""
        self.add(self._failed(key, incarnation, error))

    async def fail_finished(self, error: InfraError) -> None:
        """Reports at once all ended rollouts whose delivery has not begun. Their finished groups fail with `error`."""
        await self._report([self._as_failed(each, error) for each in self._take()])

    async def run(self) -> None:
        """Delivers until it is cancelled."""
        delivered_s = -math.inf
        while True:
            await self._something_ended.wait()
            await self.running.more_ends(wait_s=delivered_s + DELIVER_EVERY_S - self.clock())
            # Groups stay in `_ended` until the weights are verified: `fail_finished` fails what it finds there.
            await self.verified()
            delivered_s, ended = self.clock(), self._take()
            groups = [each for each in ended if isinstance(each, FinishedGroup)]
            stored = True
            if groups:
                try:
                    await self.rows.put({group.meta.key: group.rows for group in groups})
                except (RunError, TimeoutError) as error:
                    lost = InfraError(f"could not store the rows of finished groups: {error}", reason="row_store")
                    ended = [self._as_failed(each, lost) for each in ended]
                    stored = False
            # Commits and failures go to the buffer in the order in which the rollouts ended, because it counts failures
            # in a row.
            for failed, part in itertools.groupby(ended, key=lambda each: isinstance(each, FailedTicket)):
                if failed:
                    await self._report([each for each in part if isinstance(each, FailedTicket)])
                else:
                    await self._commit([each for each in part if isinstance(each, FinishedGroup)])
            self.running.wake()  # admission may wait until fewer groups are held
            if not stored:
                await self._clear([group.meta.key for group in groups])

    def _take(self) -> list[FinishedGroup | FailedTicket]:
        ended, self._ended = self._ended, []
        self._something_ended.clear()
        return ended

    async def _commit(self, groups: Sequence[FinishedGroup]) -> None:
        metas = [msgspec.structs.replace(group.meta, stored=self.held.prefix_of(group.meta.key)) for group in groups]
        outcomes = await self.coordinator.call(Coordinator.commit, metas)
        refused, failures = list[str](), list[Failure]()
        for group, outcome in zip(groups, outcomes, strict=True):
            if outcome is CommitOutcome.DUPLICATE:
                # Only this replica has the ticket, and it commits a group once. So the call was repeated, because its
                # first answer, ACCEPTED, was late.
                outcome = CommitOutcome.ACCEPTED
            self.held.forget(group.meta.key)
            self.metrics.samples(len(group.meta.rewards), outcome=outcome)
            if outcome is CommitOutcome.ACCEPTED:
                self.samples += len(group.meta.rewards)
                self.tokens += group.meta.generated_tokens
                self.metrics.rewards(group.meta.known_rewards, part=group.meta.part)
                failures += group.failures
            else:
                refused.append(group.meta.key)
        for failure in failures:
            if failure.of_tool:
                continue
            self.metrics.reward_failed(reason=failure.reason, samples=1)
        await report_failures(failures, self.coordinator)
        if refused:
            await self._clear(refused)

    async def _clear(self, keys: Sequence[str]) -> None:
        """Clears the rows of refused groups, or of a put that failed: the put may have stored them before its answer
        was lost."""
        try:
            await self.rows.clear(keys)
        except (RunError, TimeoutError) as error:
            logger.warning("rows of groups %s may be left, and the buffer clears them later: %s", keys, error)

    async def _report(self, tickets: Sequence[FailedTicket]) -> None:
        keys = [ticket.key for ticket in tickets]
        if not keys:
            return
        try:
            await self.coordinator.call(Coordinator.fail, tickets)
        except (RunError, TimeoutError) as lost:
            logger.warning("could not report that groups %s failed, so their tickets will expire: %s", keys, lost)
            for key in keys:
                self.held.give_up(key)
        else:
            for key in keys:
                self.held.forget(key)

    def _as_failed(self, ended: FinishedGroup | FailedTicket, error: InfraError) -> FailedTicket:
        """Turns a finished group that cannot be used into a failure. Leaves a failure as it is."""
        if isinstance(ended, FailedTicket):
            return ended
        return self._failed(ended.meta.key, ended.meta.incarnation, error)

    def _failed(self, key: str, incarnation: int, error: RolloutError) -> FailedTicket:
        logger.warning("group %s failed (%s, %s): %s", key, error.failure_class, error.reason, error)
        self.metrics.rollout_failed(failure_class=error.failure_class, reason=error.reason)
        self.metrics.samples(self.group_size, outcome="failed")
        if error.reason.startswith("reward_"):
            self.metrics.reward_failed(reason=error.reason, samples=self.group_size)
        return FailedTicket(key=key, incarnation=incarnation, failure=Failure.of(error))
