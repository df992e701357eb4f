"""The coordinator: the object that all processes of a run call about its groups, deployments and replicas.

    generator ──▶ heartbeat, reserve, commit, fail ──┐                ┌──▶ `ReplayBuffer`: decides about each group
    learner ────▶ lease, ack, skip, release, … ──────┼─ Coordinator ──┼──▶ `Waiting`: calls that wait for a change
    deployment ─▶ attach, leave, restarting, … ──────┘                ├──▶ `Registry`, `Replicas`: deployments, replicas
                                                                      └──▶ `Clearing`: rows that no group needs

A call makes the change that `ReplayBuffer` decides, and wakes the calls that wait for such a change. Waits have
deadlines, and can be cancelled. A regular check (expiry) ends tickets that no heartbeat renews, and quarantines silent
actors. If the reply with a ticket is lost, no heartbeat names the ticket as held, and it expires.

Each call of the learner carries the incarnation that the learner got when it attached. If another learner has taken
over, the calls of the earlier one raise Fenced and change nothing. So a learner that was only slow ends at its next
call, and no step of it is counted.

A call whose answer was lost is repeated, and the repeated call changes nothing, except that a repeated `reserve` gets
other tickets. The answers to `ack`, `skip` and `release` are kept until the next such call, because only these answers
name the rows that may be cleared, and only the answer to `ack` has the ledger's entry of the step. Reports of failures
have unique names, and each counts once.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.buffer.fleet import Cause, Life, ReplicaState, replica_of
from asyncrl.buffer.ledger import Event, LedgerEntry
from asyncrl.buffer.records import (
    CommitOutcome,
    FailedTicket,
    Failure,
    FailureCount,
    GroupMeta,
    HeldReport,
    Lease,
    LeaseWait,
    Refusal,
    Renewal,
    Reservation,
)
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.staleness import limits_of
from asyncrl.common.names import COORDINATOR
from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Lineage, Version
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.autoscaler import Autoscaler, Load
from asyncrl.coordinator.registry import OVER, Deployment, Registry, ReplicaReport, Replicas, ReplicaView
from asyncrl.coordinator.status import BriefStatus, GeneratorTotals, OwnReplicas, Restored, RunSnapshot, RunStatus
from asyncrl.coordinator.waiting import Waiting
from asyncrl.data.prompts import PromptData, PromptSource, Task
from asyncrl.data_plane.rows import Rows
from asyncrl.errors import Fenced, LearnerNotRestored, RunEnded
from asyncrl.metrics.catalogue import BUFFER_WAITS
from asyncrl.metrics.recorders import BufferMetrics
from asyncrl.metrics.server import MetricsServer
from asyncrl.metrics.states import StateClock, monotonic_at_process_start

logger = logging.getLogger(__name__)

# Clears rows and partial generations that no group needs, in the background.
#
# Their keys come from three sources: a call that ended groups, the buffer's list of unneeded partial generations, and a
# search among all stored keys once in a while. The search finds what a replica stored before it died, or what a learner
# did not clear before it died. A failure is logged, and the next search finds the same keys again.

SWEEP_EVERY_S = 60.0
"""Time between two searches for rows and partial generations that no group needs, seconds."""


class Clearing:
    """Clears, in the background, rows and partial generations that no group of `buffer` needs. `tasks` are the clearing
    tasks that run now.

    `rows` are the rows of groups, and `prefixes` their partial generations; None if the replicas store none.
    """

    def __init__(self, buffer: ReplayBuffer, *, rows: Rows, prefixes: Rows | None, now_s: float) -> None:
        self._buffer = buffer
        self._rows = rows
        self._prefixes = prefixes
        self._swept_s = now_s
        self.tasks: set[asyncio.Task[None]] = set()

    def rows(self, keys: Sequence[str]) -> None:
        """Clears the rows under these keys (`<group>.<attempt>`), because they will never be trained: the attempt has
        ended without a commit, or the group was dropped."""
        if keys:
            self._in_background(self._cleared(keys, self._rows), name="clear rows")

    def rows_without_slot(self) -> None:
        """Clears the rows of groups that hold no slot after a restore. The buffer has dropped these groups, or never
        had them."""
        self._in_background(self._sweep_rows(self._buffer.without_slot), name="sweep rows")

    def tick(self, now_s: float) -> None:
        """Clears the partial generations that became unneeded. Every `SWEEP_EVERY_S`, also searches all stored rows and
        partial generations for those that no group needs, and clears them."""
        unneeded = self._buffer.take_unneeded_prefixes()
        if unneeded and self._prefixes is not None:
            self._in_background(self._cleared(unneeded, self._prefixes), name="clear prefixes")
        if now_s - self._swept_s >= SWEEP_EVERY_S:
            self._swept_s = now_s
            self._in_background(self._sweep_rows(self._buffer.never_committed), name="sweep rows")
            if self._prefixes is not None:
                self._in_background(self._sweep_prefixes(self._prefixes), name="sweep prefixes")

    async def _sweep_rows(self, needless: Callable[[Sequence[str]], Sequence[str]]) -> None:
        """Clears the stored rows that no group needs: a replica died after it had stored them, or a learner died before
        it had cleared them. `needless` gets the keys of all stored rows, and returns those of the rows to clear."""
        if left := await self._found(self._rows, needless, what="rows"):
            logger.warning("clearing stored rows that no group needs: %s", ", ".join(left))
            await self._cleared(left, self._rows)

    async def _sweep_prefixes(self, prefixes: Rows) -> None:
        """Clears partial generations that no attempt needs. Their replica died before it had reported them."""
        if left := await self._found(prefixes, self._buffer.unneeded_prefixes, what="partial generations"):
            await self._cleared(left, prefixes)

    async def _found(
        self, stored: Rows, needless: Callable[[Sequence[str]], Sequence[str]], *, what: str
    ) -> Sequence[str]:
        """Returns those of the stored keys that `needless` returns; none if the stored keys cannot be read now."""
        try:
            return needless(await stored.keys())
        except Exception as error:
            logger.warning("could not search for stored %s that no group needs, so none are cleared: %s", what, error)
            return ()

    def _in_background(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _cleared(self, keys: Sequence[str], stored: Rows) -> None:
        try:
            await stored.clear(keys)
        except Exception as error:
            logger.warning("rows or partial generations that no group needs were not cleared: %s", error)


_NO_LEASE_EVER = (LeaseWait.FINISHED, LeaseWait.TOO_MANY_FAILURES)
"""Answers to a lease call that stay the same for the rest of the run, so that waiting is useless."""
BLOCKED = ("blocked_on_staleness", "blocked_on_capacity")
"""States of a generator's slots that get no group because enough groups wait for the learner."""
MOST_REPORTS = 10_000
"""Number of reports of failures that are remembered. A repeated report comes within minutes of the first one."""


class Acked(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an ack: the state of the run, the ledger's entry of this step, the keys of the step's groups whose
    rows may be cleared, and the snapshot for a checkpoint if it was wanted.

    All of them are of the same moment, right after the step."""

    status: BriefStatus
    ledger: LedgerEntry
    clearable: tuple[str, ...]
    snapshot: RunSnapshot | None


class Coordinator:
    """The groups, deployments and replicas of one run.

    `rows` are the rows of groups, and `prefixes` their partial generations; None if the replicas store none. The
    seconds of the states count from `started_s` (monotonic); if it is left out, from the start of the process. `sleep`
    waits until `clock` has moved by a number of seconds.

    `registry` has the deployments, their metrics endpoints and the state of the run, and `buffer` the groups. Processes
    call the methods of the registry too. Only this class, and `Clearing` for it, change the buffer.
    """

    def __init__(
        self,
        *,
        config: Config,
        tasks: Sequence[Task],
        rows: Rows,
        prefixes: Rows | None = None,
        started_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        timeout_s = config.buffer.heartbeat_timeout_s
        data, weights = config.data, {part.name: part.weight for part in config.data.mixture}
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._prompts = PromptSource(
            tasks, seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs, weights=weights
        )
        self.buffer = buffer = ReplayBuffer(
            limits=limits_of(config),
            prompts=self._prompts,
            clock=clock,
            drop_last=data.drop_last,
            on_deadline=config.staleness.on_deadline,
            groups_logged=config.learner.groups_logged,
            most_filtered=config.most_resamples,
        )
        autoscale = config.generator.autoscale
        self.registry = Registry(shared=shared_config(config), timeout_s=timeout_s, clock=clock, autoscale=autoscale)
        self._autoscaler = None if autoscale is None else Autoscaler(autoscale)
        self._replicas = Replicas(may_come_back=lambda replica: buffer.fleet.life(replica) is not None, clock=clock)
        self._states = StateClock(
            states=BUFFER_WAITS,
            initial="starting",
            started_s=monotonic_at_process_start() if started_s is None else started_s,
            clock=clock,
        )
        self._waiting = Waiting(
            states=self._states,
            may_get=lambda version: buffer.refusal(version) is None,
            may_ask=lambda actor: buffer.fleet.refusal(actor) is not Refusal.UNHEALTHY,
            clock=clock,
        )
        self._clearing = Clearing(buffer, rows=rows, prefixes=prefixes, now_s=clock())
        self._metrics = BufferMetrics()
        self._metrics.states_from(self._states.seconds)
        self._metrics.run_info(config)
        self._metrics.limits(buffer.limits)
        self._earlier = GeneratorTotals()
        """The totals of the run's generators before the start of this coordinator."""
        self._acked: tuple[tuple[int, int], Acked] | None = None
        self._released: tuple[tuple[int, int | None], tuple[str, ...]] | None = None
        self._reports: dict[str, None] = {}  # names of reports of failures, the oldest first
        self._tick_s = min(1.0, timeout_s / 5)
        self._ticked_s: float | None = None
        self._stalled = False
        self._expiry: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the regular expiry of tickets and the metrics endpoint, which end with the event loop. A second call
        does nothing."""
        if self._expiry is None:
            server = MetricsServer(self._metrics.registry, host=self._config.metrics.host, port=0)
            self.registry.set_endpoint(COORDINATOR, server.address, node=socket.gethostname())
            self._states.enter("nobody_waits")
            self._expiry = asyncio.create_task(self._expire_regularly(server), name="expiry")

    def brief_status(self) -> BriefStatus:
        """Returns the numbers of the run, for processes that poll them."""
        buffer, registry, replicas = self.buffer, self.registry, self._replicas
        return BriefStatus(
            run=self._config.run.name,
            state=registry.state,
            message=registry.message,
            version=buffer.version,
            published=registry.published,
            total_steps=buffer.limits.total_steps,
            max_staleness_versions=buffer.limits.max_staleness_versions,
            capacity_groups=buffer.limits.capacity_groups,
            counts=buffer.counts(),
            account=buffer.account,
            learner_attached=registry.learner_attached,
            quiet_s=registry.quiet_s,
            totals=replicas.totals,
            able=replicas.able(buffer.refusal),
            oldest_replica_step=replicas.oldest_step(),
            generators=self._earlier.plus(replicas.totals),
        )

    def status(self) -> RunStatus:
        """Returns everything about the run, with each replica and its report: 300 bytes for each. Processes that poll
        call `brief_status`."""
        failures = self.buffer.failures
        return RunStatus(
            **msgspec.structs.asdict(self.brief_status()),
            failures=failures.counts(),
            failure_streak=failures.streak,
            replicas=self._views(self.buffer.fleet.lives()),
            reports=dict(self._replicas.reports),
            deployments=tuple(self.registry.live()),
            learner_state_seconds=self.registry.learner_state_seconds,
            targets={process: endpoint.address for process, endpoint in self.registry.endpoints.items()},
            wanted_replicas=self.registry.wanted(),
            scaled_because=self.registry.scaled_because,
            given_up=dict(self.registry.given_up),
        )

    def own_replicas(self, deployment: str, names: Collection[str]) -> OwnReplicas:
        """Returns the views and the last reports of a generator deployment's replicas `names`, and how many replicas it
        should have. The deployment polls this."""
        fleet, reports = self.buffer.fleet, self._replicas.reports
        lives = {name: life for name in names if (life := fleet.life(name)) is not None}
        return OwnReplicas(
            wanted=self.registry.wanted_of(deployment),
            scalings=self.registry.scalings,
            scaled_because=self.registry.scaled_because,
            views={view.replica: view for view in self._views(lives)},
            reports={name: reports[name] for name in names if name in reports},
        )

    async def replica_at(
        self, version: Version, *, or_newer: bool = False, other_than: Collection[str], wait_s: float
    ) -> str | None:
        """Waits up to `wait_s` seconds for a live replica that has loaded `version` (with `or_newer`, or a newer one).
        Returns the name of its actor, or None. Leaves out the actors `other_than`."""
        return await self._waiting.answer(
            lambda: self._replicas.actor_at(version, or_newer=or_newer, other_than=other_than),
            final=lambda actor: actor is not None,
            enter=self._waiting.loads.enter,
            wait_s=wait_s,
        )

    # --- generators ---------------------------------------------------------------------------------------------

    async def heartbeat(
        self,
        actor: str,
        version: Version | None,
        free_slots: int,
        held: HeldReport,
        report: ReplicaReport,
    ) -> Renewal:
        """Receives the state of an actor, and the changes of its tickets. Renews its tickets.

        Returns the keys of tickets in `held` that have ended without a commit, so that the actor ends their rollouts.
        If the answer has `must_end`, the actor ends itself. A heartbeat that was overtaken by a newer one changes
        nothing.
        """
        refused = self.buffer.fleet.refusal(actor)
        renewal = self.buffer.renew(actor, held=held, version=version)
        if renewal is None:
            return Renewal()
        if renewal.must_end:
            return renewal
        self._replicas.reported(report)
        self.registry.set_endpoint(replica_of(actor), report.metrics_address, node=report.node)
        loaded = self._replicas.heard(actor, version=version, free_slots=free_slots)
        if loaded or refused is not None:
            # A reserve of this actor may now get a ticket. With `staleness.on_deadline: mask`, the actor's groups may
            # now get a later deadline, and the learner its lease.
            self._waiting.tickets.wake_actor(actor)
            self._waiting.leases.wake_all()
            self._waiting.loads.wake_all()
        return renewal

    async def leave(self, actor: str) -> None:
        """Removes for good a replica whose actor ends cleanly. The tickets of the actor expire at once."""
        self.buffer.fleet.retire(replica_of(actor))
        self._without(actor, lost=False)

    async def quarantine(self, actor: str, cause: Cause, reason: str) -> None:
        """Records that an actor must not get tickets any more, because a part of it has failed. Its tickets expire at
        once. An actor that finds its own failure makes this call itself."""
        if self.buffer.fleet.quarantine(actor, cause, reason):
            self._without(actor, lost=True)

    async def restarting(self, actor: str, cause: Cause, reason: str) -> None:
        """Records that the deployment of an actor ends it and starts its replica again. Its tickets expire at once."""
        self.buffer.fleet.restarting(actor, cause, reason)
        self._without(actor, lost=True)

    def _without(self, actor: str, *, lost: bool) -> None:
        """Forgets a replica's actor that has ended or must not be used, and expires its tickets. `lost` is True if the
        actor did not end cleanly."""
        if self._replicas.forget(actor):
            self.registry.set_endpoint(replica_of(actor), "")
            self.buffer.ledger.count(Event.REPLICA_LOST, int(lost))
        self._clearing.rows(self.buffer.leave(actor))
        self._waiting.tickets.wake_actor(actor)
        self._waiting.groups_changed()

    async def reserve(self, actor: str, version: Version, count: int, *, wait_s: float) -> Reservation:
        """Waits up to `wait_s` seconds until at least one ticket can be issued.

        Returns the tickets, or the reason why there are none; at once if the actor must end (`Refusal.QUARANTINED`).
        """

        def newest() -> Version:
            # While this call waited, the actor may have loaded newer weights and reported them in a heartbeat.
            return max(version, self._replicas.loaded.get(actor, version))

        def ask() -> Reservation:
            answer = self.buffer.reserve(actor, version=newest(), count=count)
            self._replicas.reserved(actor, version=newest(), asked=count, answer=answer)
            if answer.refusal is Refusal.NO_PROMPTS:
                self._waiting.leases.wake_all()  # without prompts, the learner may get a last, short step
            return answer

        started_s = self._clock()
        self.buffer.fleet.heartbeat(actor, has_weights=True)
        await self._waiting.tickets.earlier_have_asked()
        reservation = await self._waiting.answer(
            ask,
            final=lambda answer: bool(answer.tickets) or answer.refusal is Refusal.QUARANTINED,
            enter=lambda: self._waiting.tickets.enter(actor, newest),
            wait_s=wait_s,
            role=Role.GENERATOR,
        )
        self._metrics.reserve_waited(self._clock() - started_s)
        return reservation

    async def commit(self, metas: Sequence[GroupMeta]) -> list[CommitOutcome]:
        """Makes generated groups ready, or filters them. Their rows must be stored already. Returns one outcome for
        each group."""
        outcomes = [self.buffer.commit(meta) for meta in metas]
        if not {CommitOutcome.ACCEPTED, CommitOutcome.FILTERED}.isdisjoint(outcomes):
            self.registry.progressed()
        self._waiting.groups_changed()
        return outcomes

    async def fail(self, tickets: Sequence[FailedTicket]) -> None:
        """Ends the attempts of tickets whose rollouts failed. If an actor is quarantined because of these failures, all
        of its tickets expire."""
        before = self.buffer.fleet.quarantines.total()
        for ticket in tickets:
            self.buffer.fail(ticket.key, incarnation=ticket.incarnation, failure=ticket.failure)
        if self.buffer.fleet.quarantines.total() > before:
            self._expire()
        self._waiting.groups_changed()
        self._waiting.failures.wake_all()

    # --- learner ------------------------------------------------------------------------------------------------

    async def lease(self, incarnation: int, *, wait_s: float) -> Lease | LeaseWait:
        """Waits up to `wait_s` seconds for the groups of one step. Returns the lease, or the reason why there is none;
        at once if there will be none any more.

        To start the lease, the buffer may end the tickets of stragglers (`staleness.on_deadline`). Generators that wait
        for a ticket then generate these groups again, or other groups instead.
        """

        def ask() -> Lease | LeaseWait:
            self._check_learner(incarnation)
            return self.buffer.lease()

        started_s = self._clock()
        answer = await self._waiting.answer(
            ask,
            final=lambda answer: isinstance(answer, Lease) or answer in _NO_LEASE_EVER,
            enter=self._waiting.leases.enter,
            wait_s=wait_s,
            role=Role.LEARNER,
        )
        self._metrics.lease_waited(self._clock() - started_s)
        if cancelled := self.buffer.cancelled:
            self.buffer.cancelled = []
            self._clearing.rows(cancelled)
            self._waiting.tickets.wake()
        return answer

    async def ack(self, incarnation: int, step: int, *, snapshot: bool = False) -> Acked:
        """Ends a lease whose step was trained. Returns the state of the run, and a snapshot if it is wanted.

        The snapshot is taken before any other call is answered, so it is of the moment after this step. A repeated call
        gets the same answer: the ledger's entry names each ended group once.
        """
        self._check_learner(incarnation)
        if self._acked is not None and self._acked[0] == (incarnation, step):
            return self._acked[1]
        before = self.buffer.version
        clearable = self.buffer.ack(incarnation, step)
        trained = self.buffer.version != before
        ledger = self.buffer.ledger_entry(of_ack=trained)
        taken = self._snapshot() if snapshot else None
        self.registry.progressed()
        self._waiting.tickets.wake()
        acked = Acked(status=self.brief_status(), ledger=ledger, clearable=clearable, snapshot=taken)
        if trained:
            self._acked = (incarnation, step), acked
        return acked

    def ledger_entry(self, incarnation: int) -> LedgerEntry:
        """Returns the ledger's entry of the present moment, for the end of the audit's records."""
        self._check_learner(incarnation)
        return self.buffer.ledger_entry(of_ack=False)

    def snapshot(self, incarnation: int) -> RunSnapshot:
        """Returns a snapshot of the present moment. Leased groups count as ready, because their step is not acked."""
        self._check_learner(incarnation)
        return self._snapshot()

    async def skip(self, incarnation: int, step: int) -> tuple[str, ...]:
        """Ends a lease whose step did not change the policy's weights. Returns the keys of its groups whose rows may be
        cleared."""
        self._check_learner(incarnation)
        keys = self.buffer.skip(incarnation, step)
        self._waiting.tickets.wake()
        return keys

    async def give_back(self, incarnation: int, step: int) -> None:
        """Ends a lease without training. Its groups become ready again. Does nothing if there is no such lease."""
        self._check_learner(incarnation)
        self.buffer.give_back(incarnation, step)
        self._waiting.tickets.wake()

    async def rows_lost(self, incarnation: int, keys: Sequence[str]) -> None:
        """Removes ready groups whose rows are lost, e.g. with their node. Their prompts are generated again, ahead of
        all new prompts. Keys of groups that are not ready are counted and ignored."""
        self._check_learner(incarnation)
        self.buffer.rows_lost(keys)
        self._waiting.tickets.wake()

    def release(self, incarnation: int, complete: int | None) -> tuple[str, ...]:
        """Stops retaining groups for a learner that goes back to a checkpoint, as far as the checkpoint of step
        `complete` and newer ones do not need them; with None, all groups, because the run ends. Returns the keys of
        these groups; their rows may be cleared. A call that releases nothing new returns the keys of the last call with
        the same `complete`."""
        self._check_learner(incarnation)
        clearable = self.buffer.release(complete=complete)
        if clearable or self._released is None or self._released[0] != (incarnation, complete):
            self._released = (incarnation, complete), clearable
        return self._released[1]

    def clear_dropped(self, incarnation: int) -> None:
        """Clears the rows of the groups that a lease call dropped. A save in progress may still read these rows, so the
        learner calls this when its last save has ended."""
        self._check_learner(incarnation)
        dropped, self.buffer.dropped = self.buffer.dropped, []
        self._clearing.rows(dropped)

    def published(self, version: Version) -> None:
        """Records that the learner published a version. The incarnation of the version is that of the learner."""
        self._check_learner(version.incarnation)
        self.registry.publish(version, learner=self.buffer.version)

    def pause(self, incarnation: int) -> None:
        """Stops the admission of new groups. Groups in flight continue."""
        self._check_learner(incarnation)
        self.buffer.paused = True

    async def resume(self, incarnation: int) -> None:
        """Starts the admission of new groups again."""
        self._check_learner(incarnation)
        self.buffer.paused = False
        self._waiting.tickets.wake()

    def set_state(self, incarnation: int, state: RunState, message: str = "") -> None:
        """Sets the state of the run. A run that is closing admits no new groups."""
        self._check_learner(incarnation)
        if state is RunState.CLOSING:
            self.buffer.paused = True
        self.registry.set_state(state, message)

    def _check_learner(self, incarnation: int) -> None:
        """Raises Fenced if the call comes from a learner that was replaced, and RunEnded if `asyncrl down` ended the
        run."""
        live = self.buffer.version.incarnation
        if incarnation != live:
            self.buffer.ledger.count(Event.LEARNER_FENCED)
            raise Fenced(
                f"this learner (incarnation {incarnation}) was silent for longer than buffer.heartbeat_timeout_s, and "
                f"another learner (incarnation {live}) has taken over; this learner ends"
            )
        if self.registry.state is RunState.FAILED:
            raise RunEnded(self.registry.message)

    # --- deployments that enter the run -------------------------------------------------------------------------

    def check_attach(self, deployment: Deployment, *, shared: Mapping[str, object], restores: bool = False) -> None:
        """Raises an error if the deployment may not attach, and changes nothing. `restores` says whether a learner
        restores a checkpoint.

        Raises the errors of `Registry.check`. Raises LearnerNotRestored for a learner if the run has ended and was not
        preempted, or if the learner lacks the trained weights of this run: it restores no checkpoint, or one of another
        run. Such a learner would train other weights under the same version numbers.
        """
        self.registry.check(deployment, shared=shared)
        if deployment.role is not Role.LEARNER or deployment == self.registry.learner:
            return
        name, step, state = self._config.run.name, self.buffer.version.step, self.registry.state
        again = f"end the run with `asyncrl down {name}`, then start it again, or set run.lost_weights=new_run"
        over = state in OVER and state is not RunState.PREEMPTED  # the next learner continues a preempted run
        if over or (state is RunState.CLOSING and not restores):
            why = f": {self.registry.message}" if self.registry.message else ""
            raise LearnerNotRestored(f"run {name!r} is {state}{why}; {again}")
        if restores and (before := self.registry.learner) is not None and before.nonce != deployment.nonce:
            raise LearnerNotRestored(
                f"the run {name!r} on this cluster has the nonce {before.nonce!r} in its run.json, but the checkpoint "
                f"is of another run with this name, which has the nonce {deployment.nonce!r}; set run.dir to the "
                f"directory of the first learner, or {again}"
            )
        if step and not restores:
            raise LearnerNotRestored(
                f"run {name!r} has trained {step} steps, and the trained weights were lost with its learner; this "
                f"learner would begin again with the weights of model.path; {again}. Set model.path to saved weights, "
                "e.g. in the folder checkpoints/ of the run's directory, to begin with these"
            )

    async def attach(
        self,
        deployment: Deployment,
        *,
        shared: Mapping[str, object],
        prompts: PromptData | None = None,
        restored: Restored | None = None,
    ) -> Lineage:
        """Admits a deployment. Returns the run's lineage. Raises the errors of `check_attach`, and RunMismatch if the
        deployment has other `prompts` than the run.

        A learner that replaces another one gets a new incarnation: the live one of the lineage. All of a learner's
        calls carry its incarnation. The calls of a replaced learner raise Fenced.

        The buffer continues from what a learner `restored`, also if the buffer is ahead of this snapshot. Groups whose
        tokens are all of weights that are not lost stay. The learner puts the rows of the groups that were ready at its
        checkpoint into the data plane before its first lease. Raises LearnerNotRestored for a checkpoint of another
        run.
        """
        self.check_attach(deployment, shared=shared, restores=restored is not None)
        if prompts is not None:
            self._prompts.check_same(prompts)
        replaced, repeated = self.registry.learner, deployment == self.registry.learner
        lived_on = not self._untouched
        if restored is not None and not repeated:
            self._check_same_run(restored)
            if not lived_on:  # otherwise the reports in `_replicas` have a part of these totals already
                self._earlier = restored.generators
            self._prompts.restore(restored.snapshot.prompts)
        self.registry.attach(deployment)
        if restored is not None and not repeated:
            self._restore(restored, lived_on=lived_on)
            self._waiting.groups_changed()
        elif deployment.role is Role.LEARNER and replaced is not None and not repeated:
            incarnation = self.buffer.succeed()
            self.registry.set_state(RunState.STARTING)
            logger.warning("learner %s replaces %s as incarnation %d", deployment.id, replaced.id, incarnation)
            self._waiting.groups_changed()
        return self.buffer.lineage

    def _check_same_run(self, restored: Restored) -> None:
        """Raises LearnerNotRestored if the lineage of a restored checkpoint does not continue that of this run.

        Also raises it if the checkpoint is of an incarnation that did not train here, but on another cluster: its
        attempts may have the same numbers as other attempts, which generators of this cluster still generate.
        """
        known = restored.snapshot.version.incarnation <= self.buffer.lineage.incarnation
        if self._untouched or (known and restored.lineage.continues(self.buffer.lineage)):
            return
        name, at = self._config.run.name, self.buffer.version.words
        raise LearnerNotRestored(
            f"run {name!r} is at {at}, but the checkpoint does not continue it: the checkpoint is of another run with "
            "this name, or a learner on another cluster wrote it; set run.dir to the directory of this run, or end the "
            f"run with `asyncrl down {name}`, then start it again from the checkpoint"
        )

    def _restore(self, restored: Restored, *, lived_on: bool) -> None:
        """Brings the buffer to the state of a checkpoint. If this buffer has issued groups already, it keeps the groups
        whose tokens are all of versions from which the restored weights are made, and generators go on with their
        tickets."""
        left = self.buffer.version
        split_tokens = self.buffer.restore(
            restored.snapshot.buffer, lineage=restored.lineage, loaded=self._replicas.loaded
        )
        # The data plane may still have rows of groups that the restore has dropped, or of a coordinator that has died.
        self._clearing.rows_without_slot()
        if not lived_on:
            return
        self.registry.set_state(RunState.STARTING)
        kept = self.buffer.account.issued.tokens
        logger.warning(
            "the learner goes back from %s to %s: %d tokens of finished groups stay; groups with tokens of weights "
            "that are now lost are generated again, and continue their %d earlier tokens as far as these were stored "
            "(generator.persist_every_tokens)",
            left,
            restored.snapshot.version,
            kept - restored.snapshot.buffer.ledger.issued.tokens,
            split_tokens,
        )

    @property
    def _untouched(self) -> bool:
        """Whether no group was ever issued, and no learner has attached."""
        return self.registry.learner is None and self.buffer.account.issued.groups == 0

    # --- failures of rollouts -----------------------------------------------------------------------------------

    def heldout_failed(self, report: str, failure: Failure) -> None:
        """Counts a failed rollout of a held-out evaluation. `report` is the unique name of the report: a repeated one
        changes nothing."""
        if self._is_new_report(report):
            self.buffer.failures.count(failure, rollouts=1)
            self._waiting.failures.wake_all()

    async def samples_failed(self, report: str, counts: Sequence[FailureCount]) -> None:
        """Counts completions whose reward failed, and calls of tools that failed, in groups that were committed.
        `report` is the unique name of the report: a repeated one changes nothing."""
        if self._is_new_report(report):
            for count in counts:
                self.buffer.failures.count(count.first, samples=count.samples, tool_calls=count.tool_calls)
            self._waiting.failures.wake_all()

    async def failure_counts(self, known_failures: int, *, wait_s: float) -> tuple[FailureCount, ...]:
        """Returns the counts of failures.

        Returns as soon as the sum of the counts is above `known_failures`, and after `wait_s` seconds in any case.
        """
        log = self.buffer.failures
        return await self._waiting.answer(
            log.counts,
            final=lambda _: log.total > known_failures,
            enter=self._waiting.failures.enter,
            wait_s=wait_s,
        )

    def _is_new_report(self, report: str) -> bool:
        if report in self._reports:
            return False
        self._reports[report] = None
        if len(self._reports) > MOST_REPORTS:
            del self._reports[next(iter(self._reports))]
        return True

    # --- private ------------------------------------------------------------------------------------------------

    async def _expire_regularly(self, server: MetricsServer) -> None:
        with contextlib.closing(server):
            while True:
                await self._sleep(self._tick_s)
                try:
                    self._tick()
                    self._record()
                except Exception:
                    # Expiry must go on after an error: without it, the tickets of dead replicas would block the run.
                    logger.exception("the buffer failed to expire tickets; it tries again")

    def _tick(self) -> None:
        """Expires tickets and actors, clears what no group needs, and lets the autoscaler decide, unless the last call
        is longer ago than two periods.

        This process has then stalled, and the heartbeats that arrived meanwhile are only answered after this call. The
        next call expires tickets and actors in any case, because a process that is always late must not keep dead
        tickets.
        """
        now_s = self._clock()
        pause_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        self._ticked_s = now_s
        self._stalled = pause_s > 2 * self._tick_s and not self._stalled
        if self._stalled:
            logger.warning("the buffer's process stalled for %.1f s; no ticket expires before its next check", pause_s)
            return
        self._expire()
        self._clearing.tick(now_s)
        self._autoscale(now_s)

    def _expire(self) -> None:
        """Quarantines actors that sent no heartbeat for the timeout. Removes all quarantined actors, and ends their
        tickets and those that no heartbeat renewed in this time."""
        keys = self.buffer.expire()
        self._clearing.rows(keys)
        gone = self._replicas.forget_unless(self.buffer.fleet.may_be_used)
        self.buffer.ledger.count(Event.REPLICA_LOST, len(gone))
        for actor in gone:
            self.registry.set_endpoint(replica_of(actor), "")
            self._waiting.tickets.wake_actor(actor)  # an actor that gets the refusal QUARANTINED ends
        if self.buffer.fleet.back_off_ended() or keys or gone:
            self._waiting.groups_changed()

    def _autoscale(self, now_s: float) -> None:
        """Changes the number of replicas if the autoscaler decides so. The deployments add and drain replicas as after
        `asyncrl scale`."""
        registry, buffer = self.registry, self.buffer
        if self._autoscaler is None:
            return
        replicas = sum(registry.wanted().values())
        # Waits before the first step, at the end, and without a learner do not show how many replicas are needed.
        if not replicas or registry.state is not RunState.RUNNING or not registry.learner_attached:
            self._autoscaler.forget()
            return
        waits, slots, counts = self._states.seconds(), self._replicas.totals.state_seconds, buffer.counts()
        load = Load(
            at_s=now_s,
            step=buffer.version.step,
            groups_per_step=buffer.limits.groups_per_step,
            groups=buffer.version.step * buffer.limits.groups_per_step + counts.ready + counts.leased,
            learner_waits_s=waits["learner_waits"],
            both_wait_s=waits["both_wait"],
            replica_s=sum(slots.values()) - slots.get("starting", 0.0),
            blocked_s=sum(slots.get(state, 0.0) for state in BLOCKED),
        )
        live = sum(life.state is ReplicaState.HEALTHY for life in buffer.fleet.lives().values())
        if (change := self._autoscaler.decide(load, replicas=replicas, live=live)) is not None:
            registry.scale(change.replicas, because=change.because, again=False)
            logger.info("%s", change.because)

    def _record(self) -> None:
        buffer, metrics = self.buffer, self._metrics
        lives, holding = buffer.fleet.lives(), buffer.tickets_by_actor()
        metrics.heartbeat()
        metrics.fill(buffer.counts())
        metrics.account(buffer.account)
        wanted = sum(self.registry.wanted().values())
        metrics.replicas(self._replicas.by_state(lives, holding=holding), wanted=wanted)
        metrics.causes(quarantines=buffer.fleet.quarantines, restarts=buffer.fleet.restarts)

    def _snapshot(self) -> RunSnapshot:
        """Returns the present state of the groups and the prompts, for a checkpoint."""
        if (recount := self.buffer.recount()) != (account := self.buffer.account):
            logger.error("the ledger has %s, but its groups add up to %s: this is a bug of asyncrl", account, recount)
        return RunSnapshot(buffer=self.buffer.snapshot(), prompts=self._prompts.state())

    def _views(self, lives: Mapping[str, Life]) -> tuple[ReplicaView, ...]:
        buffer = self.buffer
        return self._replicas.views(lives, reserved_groups=buffer.tickets_by_actor(), refusal_at=buffer.refusal)
