"""One replica of the generator pool: runs rollouts, reports to the coordinator, and updates its weights.

Six loops run at once: admission (reserves tickets and starts rollouts), delivery (`delivery.py`), heartbeat, weight
updates (`weight_updates.py`), and two that wait for the engine's death and look for tokens of the engine. Invariants:

- No ticket is reserved before a version is loaded.
- A commit waits until the parity probe of the last weight update has passed.
- Every ticket ends in a commit or a failure, or the buffer has ended it. If this process dies, its tickets expire.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence

from asyncio_throttle.throttler import Throttler

from asyncrl.buffer.fleet import Cause
from asyncrl.buffer.records import Refusal, Ticket
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.replicas import ReplicaReport
from asyncrl.data_plane.clients import GroupRows
from asyncrl.errors import DataError, EngineDied, EngineStuck, InfraError, Quarantined, RolloutError
from asyncrl.generation.delivery import Delivery
from asyncrl.generation.held_tickets import HeldTickets
from asyncrl.generation.interfaces import PartialCompletion, Sampled
from asyncrl.generation.prefix_keeper import PrefixKeeper
from asyncrl.generation.rollout import Attempt, Rollouts
from asyncrl.generation.running import RunningRollouts
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
"""Seconds that a reserve waits in the buffer for a ticket, after a first one was refused."""
RESERVE_EVERY_S = 0.02
"""Least time between two reserves while rollouts run. It is shorter than that of deliveries, because a free slot waits
for it."""
HELD_PER_SLOT = 3
"""Most tickets that a replica holds, for each of its slots: of groups that are generated, scored, or wait for their
delivery. On a busy machine the last two take as long as the generation of short groups, and the engine must not wait
for them. Groups that wait grow older."""
PROBE = (0,)
"""Tokens of a request that only shows whether the engine generates."""
HEARTBEATS_PER_TIMEOUT = 5
"""At least this many heartbeats are sent within `buffer.heartbeat_timeout_s`."""


class Generator:
    """Generates until `drain` is called. `run` raises when the replica cannot go on.

    The engine is ready when this object is made. `rows` are finished groups, `prefix_rows` partial ones. `started_s`
    (monotonic clock) is when its process started: the time since then counts as the state "starting".
    """

    def __init__(
        self,
        *,
        config: Config,
        name: str,
        deployment: str,
        rollouts: Rollouts,
        coordinator: CoordinatorClient,
        rows: GroupRows,
        prefix_rows: GroupRows,
        weights: WeightUpdates,
        metrics: GeneratorMetrics,
        started_s: float,
        metrics_address: str = "",
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
            support=config.has_supports,
            verdict=weights.verdict,
            stored=self._held.stored,
        )
        self._metrics, self._clock = metrics, clock
        starts_per_s = config.generator.max_starts_per_s
        burst = max(1, round(starts_per_s))
        self._throttle = Throttler(rate_limit=burst, period=burst / starts_per_s)

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
            verdict=weights.verdict,
            metrics=metrics,
            group_size=config.learner.group_size,
            clock=clock,
        )
        self._spoiled: dict[str, InfraError] = {}
        self._draining = asyncio.Event()
        self._last_token_s = clock()
        self._metrics_address = metrics_address

    @property
    def version(self) -> Version | None:
        """The version that is loaded and verified; None before the first one and while the replica is torn."""
        return self._weights.version

    async def run(self) -> None:
        """Generates until `drain` is called. Returns when every held ticket has been committed or has failed."""
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
        """Stops admission. Rollouts in flight are finished and committed."""
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
            # The first call returns at once and gives the reason of a refusal. Later calls wait for a change.
            wait_s = 0.0 if reservation.refusal is None else RESERVE_WAIT_S
            if reservation.refusal is Refusal.QUARANTINED:
                raise self._quarantined()
            self._free_state = REFUSED_STATE.get(reservation.refusal, "idle") if reservation.refusal else "idle"
            self._show_states()
            self._held.add(reservation.tickets)
            for ticket in reservation.tickets:
                async with self._throttle:
                    # A failed update may have torn the replica since the reserve. Then this waits for a whole version.
                    await self._weights.startable()
                    if ticket.key in self._held:  # the buffer may have ended the ticket while it waited here
                        self._running.start(ticket.key, self._rollout(ticket))
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
                    if ticket.key in self._spoiled:
                        raise self._spoiled[ticket.key]
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
        finally:
            self._running.ended(ticket.key)
            self._spoiled.pop(ticket.key, None)
            self._prefixes.ended(ticket.key)
            self._show_states()

    def _generated(self, key: str) -> None:
        self._running.generated(key)
        self._show_states()

    def _in_environment(self, key: str, waits: bool) -> None:
        self._running.waits_for_environment(key, waits)
        self._show_states()

    def _progressed(self, ticket: Ticket, prefix: Sequence[PartialCompletion], sampled: Sampled) -> None:
        if ticket.key in self._held and ticket.key not in self._spoiled:
            if self._held.generated(ticket.key, sum(sampled.lengths)):
                self._last_token_s = self._clock()
            self._prefixes.sampled(ticket, sampled, continued=prefix)

    def _abandon(self, keys: Collection[str]) -> None:
        """Ends the rollouts of tickets that the buffer has ended. This is not a failure.

        A group that is finished is left to the delivery: the buffer refuses its commit, and its rows are cleared.
        """
        for key in keys:
            if self._running.cancel(key):
                logger.info("the buffer has ended the ticket of group %s, so its rollout ends", key)
                self._metrics.samples(self._config.learner.group_size, outcome="cancelled")
            self._held.settle(key)

    # --- calls of a weight update ---------------------------------------------------------------------------------

    def _show_loading(self, loading: bool) -> None:
        self._loading = loading
        self._show_states()

    async def _fail_unverified(self, error: InfraError) -> None:
        self._spoiled |= dict.fromkeys(self._running, error)
        for key in self._running:
            self._prefixes.ended(key)
        await self._delivery.fail_finished(error)

    async def report(self) -> None:
        # Count as the buffer does: a slot is taken from the reserve on, also while the rollout waits for the throttle.
        free = 0 if self._draining.is_set() else max(0, self._slots - len(self._held))
        prompts = self._rollouts.engine.prompt_tokens
        report = ReplicaReport(
            actor=self._name,
            deployment=self._deployment,
            metrics_address=self._metrics_address,
            state_seconds=self._states.seconds(),
            slots=self._slots,
            running_groups=self._running.generating,
            samples=self._delivery.samples,
            completion_tokens=self._delivery.tokens,
            prompt_tokens=prompts.all,
            cached_prompt_tokens=prompts.cached,
            weight_updates=self._weights.updates,
            parity_max_nats=self._weights.parity_max_nats,
        )
        for _ in range(2):  # if the buffer asks for all tickets, they follow at once
            held = self._held.report()
            renewal = await self._coordinator.call(
                Coordinator.heartbeat, self._name, self._weights.version, free, held, report
            )
            if renewal.must_end:
                raise self._quarantined()
            self._held.answered(held)
            self._abandon(renewal.ended)
            if not renewal.name_all:
                return
            self._held.name_all()

    # --- engine -------------------------------------------------------------------------------------------------

    async def _engine_died(self) -> None:
        raise EngineDied(f"the engine of replica {self._name} has died: {await self._rollouts.engine.died()}")

    async def _engine_stuck(self) -> None:
        """Raises EngineStuck if the engine generates no token for `generator.stall_timeout_s` while rollouts run, and
        then does not generate one token for a request of its own in the same time."""
        limit_s = self._config.generator.stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 5))
            if not self._running.generating or self._loading or self.version is None:
                self._last_token_s = self._clock()
            if self._clock() - self._last_token_s < limit_s:
                continue
            try:
                async with asyncio.timeout(limit_s):
                    await self._rollouts.engine.generate(PROBE, n=1, seed=None, temperature=0.0, max_tokens=1)
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
            self._metrics.heartbeat(unix_time_s=time.time())
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
