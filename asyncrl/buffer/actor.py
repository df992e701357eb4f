"""The buffer actor: a thin asyncio shell around `ReplayBuffer`, and the client with which other processes call it.

The shell adds waiting (with deadlines, and cancellable), the expiry clock, membership and metrics. The state machine
`ReplayBuffer` makes all decisions. There is no `await` between a decision and its return, so a cancelled wait never
holds a slot. If the reply with a ticket is lost, no heartbeat names the ticket as held, and it expires.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from asyncrl.buffer.ledger import Account
from asyncrl.buffer.membership import Deployment, Membership
from asyncrl.buffer.records import (
    CommitOutcome,
    Counts,
    Failure,
    FailureCount,
    FailureStreak,
    GroupMeta,
    Lease,
    LeaseWait,
    Refusal,
    ReplicaView,
    Reservation,
)
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.staleness import Limits
from asyncrl.config.checks import worst_case_group_bytes
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, Task
from asyncrl.data_plane.calls import finished
from asyncrl.data_plane.clients import GroupRows
from asyncrl.metrics.catalogue import BUFFER_WAITS
from asyncrl.metrics.recorders import BufferMetrics
from asyncrl.metrics.server import MetricsServer
from asyncrl.metrics.states import StateClock, monotonic_at_process_start
from asyncrl.run.roles import Role, RunState
from asyncrl.run.version import Version

logger = logging.getLogger(__name__)

_NO_LEASE_EVER = (LeaseWait.FINISHED, LeaseWait.TOO_MANY_FAILURES)
"""Answers to a lease call that stay the same for the rest of the run, so that waiting is useless."""

_WAITS = {
    (False, False): "nobody_waits",
    (True, False): "learner_waits",
    (False, True): "generators_wait",
    (True, True): "both_wait",
}
"""Maps (whether the learner waits, whether any generator waits) to the state in the metrics."""


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's report in each heartbeat. Totals count from the start of the replica.

    `state_seconds` are slot-seconds divided by the number of slots. `running_groups` is the number of rollouts that run
    now, `slots` their maximum.
    """

    actor: str
    deployment: str
    metrics_address: str
    state_seconds: dict[str, float]
    slots: int
    running_groups: int
    samples: int
    completion_tokens: int
    weight_updates: int
    parity_max_nats: float


class FailedTicket(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket whose rollout failed, and the failure."""

    key: str
    incarnation: int
    failure: Failure


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the run at one moment, as the buffer knows it. `asyncrl status` and the live view read it.

    `quiet_s` is the time since the last progress (a committed group, an acked step, a new state), seconds.
    """

    run: str
    state: RunState
    message: str
    nonce: str
    version: Version
    published: Version | None
    total_steps: int
    max_staleness_versions: int
    capacity_groups: int
    counts: Counts
    account: Account
    failures: tuple[FailureCount, ...]
    failure_streak: FailureStreak | None
    replicas: tuple[ReplicaView, ...]
    reports: dict[str, ReplicaReport]
    deployments: tuple[Deployment, ...]
    quiet_s: float
    targets: dict[str, str]


def limits_of(config: Config) -> Limits:
    """Returns the buffer's limits from the config."""
    learner, staleness = config.learner, config.staleness
    return Limits(
        max_staleness_versions=staleness.max_versions,
        groups_per_step=learner.groups_per_step,
        group_size=learner.group_size,
        capacity_groups=config.buffer.capacity_groups or (staleness.max_versions + 1) * learner.groups_per_step,
        capacity_bytes=config.buffer.capacity_bytes,
        worst_group_bytes=worst_case_group_bytes(config),
        total_steps=learner.total_steps,
        max_attempts=config.buffer.max_attempts,
        max_data_failures=config.generator.max_data_failures,
        heartbeat_timeout_s=config.buffer.heartbeat_timeout_s,
    )


class BufferActor:
    """The class of the buffer actor.

    `rows` clears the rows of groups that will never be trained. The seconds of the states count from `started_s`
    (monotonic); if it is left out, from the start of the process.
    """

    def __init__(
        self,
        *,
        config: Config,
        tasks: Sequence[Task],
        nonce: str,
        rows: GroupRows,
        started_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._nonce = nonce
        self._clock = clock
        self._rows = rows
        self._clearing: set[asyncio.Task[None]] = set()
        self._limits = limits_of(config)
        prompts = PromptSource(tasks, seed=config.run.seed, shuffle=config.data.shuffle, epochs=config.data.epochs)
        self._buffer = ReplayBuffer(
            limits=self._limits,
            prompts=prompts,
            clock=clock,
            seed=config.run.seed,
            drop_last=config.data.drop_last,
        )
        self._shared = shared_config(config)
        self._members = Membership(shared=self._shared, timeout_s=config.buffer.heartbeat_timeout_s, clock=clock)
        self._loaded: dict[str, Version] = {}
        self._reports: dict[str, ReplicaReport] = {}
        self._state, self._message = RunState.STARTING, ""
        self._progress_at_s = clock()
        self._targets: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._waiting: Counter[Role] = Counter()
        self._states = StateClock(
            states=BUFFER_WAITS,
            initial="starting",
            started_s=monotonic_at_process_start() if started_s is None else started_s,
            clock=clock,
        )
        self._metrics = BufferMetrics()
        self._metrics.states_from(self._states.seconds)
        self._metrics.run_info(config)
        self._metrics.limits(
            max_staleness_versions=self._limits.max_staleness_versions,
            capacity_groups=self._limits.capacity_groups,
            capacity_bytes=self._limits.capacity_bytes,
        )
        self._server: MetricsServer | None = None
        self._expiry: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Starts the expiry clock and the metrics endpoint. Returns the run's nonce. A second call only returns it."""
        if self._expiry is None:
            self._server = MetricsServer(self._metrics.registry, host=self._config.metrics.host, port=0)
            self._targets["buffer"] = self._server.address
            self._states.enter("nobody_waits")
            self._expiry = asyncio.create_task(self._expire_regularly(), name="expiry")
        return self._nonce

    # --- deployments --------------------------------------------------------------------------------------------

    async def check(self, deployment: Deployment, shared: dict[str, object]) -> None:
        """Raises the errors that `attach` would raise, and changes nothing."""
        self._members.check(deployment, shared=shared)

    async def attach(self, deployment: Deployment, shared: dict[str, object]) -> str:
        """Admits a deployment and returns the run's nonce. Raises RunMismatch or RunLocked."""
        self._members.attach(deployment, shared=shared)
        return self._nonce

    async def handshake(self, who: str, fingerprint: str) -> None:
        """Raises HandshakeError if the tokenizer or vocabulary differs from that of the first caller."""
        self._members.handshake(who=who, fingerprint=fingerprint)

    async def keep(self, deployment_id: str) -> None:
        """Receives a heartbeat of a deployment."""
        self._members.keep(deployment_id)

    async def detach(self, deployment_id: str) -> int:
        """Removes a deployment that leaves. Returns how many live ones remain."""
        return self._members.detach(deployment_id)

    async def set_state(self, state: RunState, message: str = "") -> None:
        """Sets the state of the run. The learner calls it."""
        self._state, self._message = state, message
        self._progress_at_s = self._clock()
        await self._notify()

    async def add_target(self, name: str, address: str) -> None:
        """Adds the metrics endpoint of another process to the status."""
        self._targets[name] = address

    async def status(self) -> RunStatus:
        replicas = self._buffer.replicas()
        return RunStatus(
            run=self._config.run.name,
            state=self._state,
            message=self._message,
            nonce=self._nonce,
            version=self._buffer.version,
            published=self._buffer.published,
            total_steps=self._limits.total_steps,
            max_staleness_versions=self._limits.max_staleness_versions,
            capacity_groups=self._limits.capacity_groups,
            counts=self._buffer.counts(),
            account=self._buffer.ledger,
            failures=self._buffer.failures.counts(),
            failure_streak=self._buffer.failures.streak,
            replicas=replicas,
            reports=dict(self._reports),
            deployments=tuple(self._members.live()),
            quiet_s=self._clock() - self._progress_at_s,
            targets=dict(self._targets) | self._replica_targets(replicas),
        )

    def _replica_targets(self, replicas: Sequence[ReplicaView]) -> dict[str, str]:
        """Returns the metrics endpoints of the current replicas.

        `_reports` also has the reports of replicas that are gone, because the run's totals need them.
        """
        addresses = {
            view.replica: self._reports[view.replica].metrics_address
            for view in replicas
            if view.replica in self._reports
        }
        return {name: address for name, address in addresses.items() if address}

    # --- generators ---------------------------------------------------------------------------------------------

    async def heartbeat(
        self,
        replica: str,
        version: Version | None,
        free_slots: int,
        held: Collection[str],
        report: ReplicaReport,
    ) -> None:
        self._buffer.heartbeat(replica, version=version, free_slots=free_slots, held=held)
        self._reports[replica] = report
        if version is not None and self._loaded.get(replica) != version:
            self._loaded[replica] = version
            await self._notify()

    async def leave(self, replica: str) -> None:
        """Removes a replica that ends cleanly. Its tickets expire at once."""
        self._clear(self._buffer.leave(replica))
        self._loaded.pop(replica, None)
        await self._notify()

    async def reserve(self, replica: str, version: Version, count: int, wait_s: float) -> Reservation:
        """Waits up to `wait_s` seconds until at least one ticket can be issued.

        Returns the tickets, or the reason why there are none.
        """
        started_s = self._clock()
        async with self._changed:
            while True:
                # While this call waited, the replica may have loaded newer weights and reported them in a heartbeat.
                reservation = self._buffer.reserve(
                    replica, version=max(version, self._loaded.get(replica, version)), count=count
                )
                left_s = wait_s - (self._clock() - started_s)
                if reservation.tickets or reservation.refusal is Refusal.OLD_INCARNATION or left_s <= 0:
                    self._metrics.reserve_waited(self._clock() - started_s)
                    return reservation
                await self._change_within(left_s, who=Role.GENERATOR)

    async def commit(self, metas: Sequence[GroupMeta]) -> list[CommitOutcome]:
        outcomes = [self._buffer.commit(meta) for meta in metas]
        if CommitOutcome.ACCEPTED in outcomes:
            self._progress_at_s = self._clock()
        await self._notify()
        return outcomes

    async def fail(self, tickets: Sequence[FailedTicket]) -> None:
        for ticket in tickets:
            self._buffer.fail(ticket.key, incarnation=ticket.incarnation, failure=ticket.failure)
        await self._notify()

    async def heldout_failed(self, failure: Failure) -> None:
        """A rollout of the held-out evaluation failed."""
        self._buffer.failures.heldout_failed(failure)
        await self._notify()

    # --- learner ------------------------------------------------------------------------------------------------

    async def lease(self, wait_s: float) -> Lease | LeaseWait:
        """Waits up to `wait_s` seconds for the groups of one step. Returns the lease, or the reason why there is
        none."""
        started_s = self._clock()
        async with self._changed:
            while True:
                answer = self._buffer.lease()
                self._clear(self._buffer.take_dropped())
                left_s = wait_s - (self._clock() - started_s)
                if isinstance(answer, Lease) or answer in _NO_LEASE_EVER or left_s <= 0:
                    self._metrics.lease_waited(self._clock() - started_s)
                    return answer
                await self._change_within(left_s, who=Role.LEARNER)

    async def failures(self, known_rollouts: int, wait_s: float) -> tuple[FailureCount, ...]:
        """Returns the counts of failed rollouts.

        Waits until there are more than `known_rollouts`, but at most `wait_s` seconds.
        """
        log = self._buffer.failures
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: log.rollouts > known_rollouts)
        return log.counts()

    async def ack(self, incarnation: int, step: int) -> RunStatus:
        """Ends a lease whose step was trained. Returns the state of the run."""
        self._buffer.ack(incarnation, step)
        self._progress_at_s = self._clock()
        await self._notify()
        return await self.status()

    async def skip(self, incarnation: int, step: int) -> tuple[str, ...]:
        keys = self._buffer.skip(incarnation, step)
        await self._notify()
        return keys

    async def give_back(self, incarnation: int, step: int) -> bool:
        given = self._buffer.give_back(incarnation, step)
        await self._notify()
        return given

    async def rows_lost(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Removes ready groups whose rows are lost, e.g. with their node. Their prompts go to the front.

        Returns the keys of the groups that were removed.
        """
        lost = self._buffer.rows_lost(keys)
        await self._notify()
        return lost

    async def published(self, version: Version) -> None:
        """Records that the learner published a version."""
        self._buffer.publish(version)

    async def pause(self) -> None:
        """Stops the admission of new groups. Groups in flight continue."""
        self._buffer.pause()

    async def resume(self) -> None:
        self._buffer.resume()
        await self._notify()

    # --- private ------------------------------------------------------------------------------------------------

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _change_within(self, seconds: float, *, who: Role) -> None:
        self._wait_of(who, 1)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        finally:
            self._wait_of(who, -1)

    def _wait_of(self, who: Role, change: int) -> None:
        self._waiting[who] += change
        self._states.enter(_WAITS[self._waiting[Role.LEARNER] > 0, self._waiting[Role.GENERATOR] > 0])

    async def _expire_regularly(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._limits.heartbeat_timeout_s / 5))
            try:
                keys = self._buffer.expire()
                if keys:
                    self._clear(keys)
                    await self._notify()
                self._record()
            except Exception:
                # Expiry must go on after an error: without it, the tickets of dead replicas would block the run.
                logger.exception("the buffer failed to expire tickets; it tries again")

    def _clear(self, keys: Sequence[str]) -> None:
        if keys:
            task = asyncio.create_task(self._rows.clear(keys), name="clear rows")
            self._clearing.add(task)
            task.add_done_callback(self._cleared)

    def _cleared(self, task: "asyncio.Task[None]") -> None:
        self._clearing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("the rows of groups that will not be trained were not cleared: %s", task.exception())

    def _record(self) -> None:
        counts, account = self._buffer.counts(), self._buffer.ledger
        self._metrics.heartbeat(unix_time_s=time.time())
        self._metrics.fill(
            reserved=counts.reserved,
            ready=counts.ready,
            leased=counts.leased,
            bytes=counts.booked_bytes,
            oldest_group_age_s=counts.oldest_group_age_s,
        )
        self._metrics.events({event.value: total for event, total in account.events.items()})
        self._metrics.replicas(Counter(_replica_state(view) for view in self._buffer.replicas()))
        self._metrics.ledger(
            issued_groups=account.issued.groups,
            groups={fate.value: amount.groups for fate, amount in account.fates.items()},
            tokens={fate.value: amount.tokens for fate, amount in account.fates.items()},
        )


def _replica_state(view: ReplicaView) -> str:
    if not view.live:
        return "silent"
    if view.version is None:
        return "without_weights"
    return "generating" if view.reserved_groups else "waiting"


class BufferClient:
    """Client of the buffer actor. Each call has a deadline of `timeout_s` seconds, plus the time that it may wait."""

    def __init__(self, handle: Any, *, timeout_s: float) -> None:
        self._handle = handle
        self._timeout_s = timeout_s

    async def call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        """Calls a method of `BufferActor` by its name and returns the answer."""
        return await finished(
            getattr(self._handle, method).remote(*arguments),
            timeout_s=self._timeout_s + wait_s,
            what=f"the buffer's {method}",
        )

    async def reserve(self, replica: str, version: Version, count: int, *, wait_s: float) -> Reservation:
        reservation: Reservation = await self.call("reserve", replica, version, count, wait_s, wait_s=wait_s)
        return reservation

    async def commit(self, metas: Sequence[GroupMeta]) -> list[CommitOutcome]:
        outcomes: list[CommitOutcome] = await self.call("commit", list(metas))
        return outcomes

    async def lease(self, *, wait_s: float) -> Lease | LeaseWait:
        answer: Lease | LeaseWait = await self.call("lease", wait_s, wait_s=wait_s)
        return answer

    async def status(self) -> RunStatus:
        status: RunStatus = await self.call("status")
        return status
