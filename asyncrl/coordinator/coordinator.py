"""The coordinator: moves each group from its ticket to its ack, and tells every caller of the run's state.

It adds waiting (with deadlines, and cancellable), the expiry clock and metrics to the state machine `ReplayBuffer`,
which makes all decisions. `Clearing` clears the rows that no group needs. If the reply with a ticket is lost, no
heartbeat names the ticket as held, and it expires.

The path of a group: `reserve` and `commit` (a generator) in this file, `lease` and `ack` (the learner) in
`learner_calls.py`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from asyncrl.buffer.failure_records import FailedTicket
from asyncrl.buffer.fleet import Cause, Life, replica_of
from asyncrl.buffer.ledger import Event
from asyncrl.buffer.records import CommitOutcome, GroupMeta, HeldReport, Refusal, Renewal, Reservation
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.staleness import limits_of
from asyncrl.common.names import COORDINATOR
from asyncrl.common.roles import Role
from asyncrl.common.version import Version
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.attachments import Attachments
from asyncrl.coordinator.clearing import Clearing
from asyncrl.coordinator.failures import FailureReports
from asyncrl.coordinator.learner_calls import LearnerCalls
from asyncrl.coordinator.parts import CoordinatorParts
from asyncrl.coordinator.registry import Registry
from asyncrl.coordinator.replicas import ReplicaReport, Replicas, ReplicaView
from asyncrl.coordinator.status import BriefStatus, OwnReplicas, RunStatus
from asyncrl.coordinator.waiting import Waiting
from asyncrl.data.prompts import PromptSource, Task
from asyncrl.data_plane.clients import GroupRows
from asyncrl.metrics.catalogue import BUFFER_WAITS
from asyncrl.metrics.recorders import BufferMetrics
from asyncrl.metrics.server import MetricsServer
from asyncrl.metrics.states import StateClock, monotonic_at_process_start

logger = logging.getLogger(__name__)


def _empty_buffer(config: Config, prompts: PromptSource, *, clock: Callable[[], float]) -> ReplayBuffer:
    return ReplayBuffer(
        limits=limits_of(config),
        prompts=prompts,
        clock=clock,
        drop_last=config.data.drop_last,
        on_deadline=config.staleness.on_deadline,
        groups_logged=config.learner.groups_logged,
        most_filtered=config.most_resamples,
    )


class Coordinator:
    """The groups, deployments and replicas of one run.

    `rows` are the rows of groups, and `prefixes` their partial generations; None if the replicas store none. The
    seconds of the states count from `started_s` (monotonic); if it is left out, from the start of the process.
    `learner` answers the calls of the learner, `attachments` admits deployments, `registry` has them and the state of
    the run, `failures` the failed rollouts.
    """

    def __init__(
        self,
        *,
        config: Config,
        tasks: Sequence[Task],
        rows: GroupRows,
        prefixes: GroupRows | None = None,
        started_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        timeout_s = config.buffer.heartbeat_timeout_s
        data, weights = config.data, {part.name: part.weight for part in config.data.mixture}
        prompts = PromptSource(tasks, seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs, weights=weights)
        buffer = _empty_buffer(config, prompts, clock=clock)
        tickets, fleet = buffer.tickets, buffer.fleet
        self._states = StateClock(
            states=BUFFER_WAITS,
            initial="starting",
            started_s=monotonic_at_process_start() if started_s is None else started_s,
            clock=clock,
        )
        metrics = BufferMetrics()
        metrics.states_from(self._states.seconds)
        metrics.run_info(config)
        metrics.limits(buffer.limits)
        self._parts = CoordinatorParts(
            config=config,
            clock=clock,
            prompts=prompts,
            buffer=buffer,
            registry=Registry(shared=shared_config(config), timeout_s=timeout_s, clock=clock),
            replicas=Replicas(may_come_back=lambda replica: fleet.life(replica) is not None, clock=clock),
            waiting=Waiting(
                states=self._states,
                may_get=lambda version: tickets.refusal(version) is None,
                may_ask=lambda replica: fleet.refusal(replica) is not Refusal.UNHEALTHY,
                clock=clock,
            ),
            clearing=Clearing(buffer.unneeded, rows=rows, prefixes=prefixes, now_s=clock()),
            metrics=metrics,
        )
        self.attachments = Attachments(self._parts)
        self.learner = LearnerCalls(self._parts)
        self.registry = self._parts.registry
        self.failures = FailureReports(self._parts)
        self._server: MetricsServer | None = None
        self._tick_s = min(1.0, timeout_s / 5)
        self._ticked_s: float | None = None
        self._stalled = False
        self._expiry: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the expiry clock and the metrics endpoint. A second call does nothing."""
        if self._expiry is None:
            self._server = MetricsServer(self._parts.metrics.registry, host=self._parts.config.metrics.host, port=0)
            self.registry.endpoints.set(COORDINATOR, self._server.address)
            self._states.enter("nobody_waits")
            self._expiry = asyncio.create_task(self._expire_regularly(), name="expiry")

    def brief_status(self) -> BriefStatus:
        """Returns the numbers of the run, for processes that poll them."""
        return self._parts.brief_status()

    def status(self) -> RunStatus:
        """Returns everything about the run, with each replica and its report: 300 bytes for each. Processes that poll
        call `brief_status`."""
        failures = self._parts.buffer.failures
        return RunStatus(
            **msgspec.structs.asdict(self.brief_status()),
            failures=failures.counts(),
            failure_streak=failures.streak,
            replicas=self._views(self._parts.buffer.fleet.lives()),
            reports=dict(self._parts.replicas.reports),
            deployments=tuple(self.registry.live()),
            learner_state_seconds=self.registry.learner_state_seconds,
            targets=dict(self.registry.endpoints.addresses),
            wanted_replicas=self.registry.wanted(),
            given_up=dict(self.registry.given_up),
        )

    def own_replicas(self, deployment: str, names: Collection[str]) -> OwnReplicas:
        """Returns what a generator deployment has to know of its replicas `names`."""
        fleet, reports = self._parts.buffer.fleet, self._parts.replicas.reports
        lives = {name: life for name in names if (life := fleet.life(name)) is not None}
        return OwnReplicas(
            wanted=self.registry.wanted_of(deployment),
            scalings=self.registry.scalings,
            views={view.replica: view for view in self._views(lives)},
            reports={name: reports[name] for name in names if name in reports},
        )

    def _views(self, lives: Mapping[str, Life]) -> tuple[ReplicaView, ...]:
        tickets = self._parts.buffer.tickets
        return self._parts.replicas.views(lives, reserved_groups=tickets.by_replica(), refusal_at=tickets.refusal)

    async def replica_at(
        self, version: Version, *, or_newer: bool = False, other_than: Collection[str], wait_s: float
    ) -> str | None:
        """Waits up to `wait_s` seconds for a live replica that has loaded `version`, or a newer one if that will do.
        Returns the name of its actor, or None. Leaves out the actors `other_than`."""
        return await self._parts.waiting.answer(
            lambda: self._parts.replicas.actor_at(version, or_newer=or_newer, other_than=other_than),
            final=lambda actor: actor is not None,
            enter=self._parts.waiting.loads.enter,
            wait_s=wait_s,
        )

    # --- generators ---------------------------------------------------------------------------------------------

    async def heartbeat(
        self,
        replica: str,
        version: Version | None,
        free_slots: int,
        held: HeldReport,
        report: ReplicaReport,
    ) -> Renewal:
        """Receives the state of a replica, and what is new of its tickets. Renews its tickets.

        Returns the keys of named tickets that have ended without a commit. The replica ends their rollouts, or itself
        if it must. A heartbeat that was overtaken by a newer one changes nothing.
        """
        refused = self._parts.buffer.fleet.refusal(replica)
        renewal = self._parts.buffer.tickets.renew(replica, held=held, version=version)
        if renewal is None:
            return Renewal()
        if renewal.must_end:
            return renewal
        self._parts.replicas.reported(report)
        self.registry.endpoints.set(replica_of(replica), report.metrics_address)
        loaded = self._parts.replicas.heard(replica, version=version, free_slots=free_slots)
        if loaded or refused is not None:
            # A reserve of this replica may now get a ticket, and rule (2) may let the learner go on without its groups
            # (`staleness.on_deadline: mask`).
            self._parts.waiting.tickets.wake_replica(replica)
            self._parts.waiting.leases.ring()
            self._parts.waiting.loads.ring()
        return renewal

    async def leave(self, replica: str) -> None:
        """Removes a replica that ends cleanly, for good. Its tickets expire at once."""
        self._parts.buffer.fleet.retire(replica_of(replica))
        self._without(replica, lost=False)

    async def quarantine(self, replica: str, cause: Cause, reason: str) -> None:
        """Records that a replica must not get tickets any more, because a part of it has failed. Its tickets expire at
        once. A replica that finds its own failure makes this call itself."""
        if self._parts.buffer.fleet.quarantine(replica, cause, reason):
            self._without(replica, lost=True)

    async def restarting(self, replica: str, cause: Cause, reason: str) -> None:
        """Records that the deployment of a replica ends it and starts it again. Its tickets expire at once."""
        self._parts.buffer.fleet.restarting(replica, cause, reason)
        self._without(replica, lost=True)

    def _without(self, replica: str, *, lost: bool) -> None:
        """Forgets a replica that has ended, and expires its tickets. `lost`: it did not end in order."""
        if self._parts.replicas.forget(replica):
            self.registry.endpoints.set(replica_of(replica), "")
            self._parts.buffer.ledger.count(Event.REPLICA_LOST, int(lost))
        self._parts.clearing.rows(self._parts.buffer.tickets.leave(replica))
        self._parts.waiting.tickets.wake_replica(replica)
        self._parts.waiting.groups_changed()

    async def reserve(self, replica: str, version: Version, count: int, *, wait_s: float) -> Reservation:
        """Waits up to `wait_s` seconds until at least one ticket can be issued.

        Returns the tickets, or the reason why there are none.
        """

        def newest() -> Version:
            # While this call waited, the replica may have loaded newer weights and reported them in a heartbeat.
            return max(version, self._parts.replicas.loaded.get(replica, version))

        def ask() -> Reservation:
            answer = self._parts.buffer.tickets.reserve(replica, version=newest(), count=count)
            self._parts.replicas.reserved(replica, version=newest(), asked=count, answer=answer)
            if answer.refusal is Refusal.NO_PROMPTS:
                self._parts.waiting.leases.ring()  # the last step may be short now
            return answer

        started_s = self._parts.clock()
        self._parts.buffer.fleet.hear(replica, has_weights=True)
        await self._parts.waiting.tickets.earlier_have_asked()
        reservation = await self._parts.waiting.answer(
            ask,
            final=lambda answer: bool(answer.tickets) or answer.refusal is Refusal.QUARANTINED,
            enter=lambda: self._parts.waiting.tickets.enter(replica, newest),
            wait_s=wait_s,
            role=Role.GENERATOR,
        )
        self._parts.metrics.reserve_waited(self._parts.clock() - started_s)
        return reservation

    async def commit(self, metas: Sequence[GroupMeta]) -> list[CommitOutcome]:
        """Makes generated groups ready, whose rows are stored, or filters them. Returns one outcome for each."""
        outcomes = [self._parts.buffer.tickets.commit(meta) for meta in metas]
        if not {CommitOutcome.ACCEPTED, CommitOutcome.FILTERED}.isdisjoint(outcomes):
            self.registry.progressed()
        self._parts.waiting.groups_changed()
        return outcomes

    async def fail(self, tickets: Sequence[FailedTicket]) -> None:
        """Ends the attempts of tickets whose rollouts failed. Expires all tickets of a replica that is quarantined for
        that."""
        before = self._parts.buffer.fleet.quarantines.total()
        for ticket in tickets:
            self._parts.buffer.tickets.fail(ticket.key, incarnation=ticket.incarnation, failure=ticket.failure)
        if self._parts.buffer.fleet.quarantines.total() > before:
            self._expire()
        self._parts.waiting.groups_changed()
        self._parts.waiting.failures.ring()

    # --- private ------------------------------------------------------------------------------------------------

    async def _expire_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                await self._tick()
                self._record()
            except Exception:
                # Expiry must go on after an error: without it, the tickets of dead replicas would block the run.
                logger.exception("the buffer failed to expire tickets; it tries again")

    async def _tick(self) -> None:
        """Expires tickets and replicas, unless the last call is longer ago than two periods.

        This process has then stalled, and the heartbeats that arrived meanwhile are only answered after this call. The
        call after it expires them in any case, because a process that is always late must not keep dead tickets.
        """
        now_s = self._parts.clock()
        pause_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        self._ticked_s = now_s
        self._stalled = pause_s > 2 * self._tick_s and not self._stalled
        if self._stalled:
            logger.warning("the buffer's process stalled for %.1f s; no ticket expires before its next check", pause_s)
            return
        self._expire()
        self._parts.clearing.tick(now_s)

    def _expire(self) -> None:
        """Removes silent replicas, and ends tickets that no heartbeat renewed within the timeout."""
        keys = self._parts.buffer.tickets.expire()
        self._parts.clearing.rows(keys)
        gone = self._parts.replicas.forget_unless(self._parts.buffer.fleet.may_be_used)
        self._parts.buffer.ledger.count(Event.REPLICA_LOST, len(gone))
        for actor in gone:
            self.registry.endpoints.set(replica_of(actor), "")
            self._parts.waiting.tickets.wake_replica(actor)  # a quarantined one ends when it knows
        if self._parts.buffer.fleet.back_off_ended() or keys or gone:
            self._parts.waiting.groups_changed()

    def _record(self) -> None:
        buffer, metrics = self._parts.buffer, self._parts.metrics
        lives, holding = buffer.fleet.lives(), buffer.tickets.by_replica()
        metrics.heartbeat(unix_time_s=time.time())
        metrics.fill(buffer.counts())
        metrics.account(buffer.account)
        metrics.replicas(self._parts.replicas.by_state(lives, holding=holding))
        metrics.causes(quarantines=buffer.fleet.quarantines, restarts=buffer.fleet.restarts)
