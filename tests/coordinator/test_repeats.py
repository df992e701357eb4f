"""A call that is repeated because its answer was lost changes nothing, and its caller learns what it needs.

The table has every method that a client can call. Each row makes the call once in one run and twice in an equal run.
Both runs must have the same state afterwards, and must give the same answers to the calls that follow.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from buffer_scenes import Clock, everything_else_runs, finished

from asyncrl.buffer.fleet import Cause
from asyncrl.buffer.ledger import Event
from asyncrl.buffer.records import (
    CommitOutcome,
    FailedTicket,
    Failure,
    FailureCount,
    GroupMeta,
    HeldReport,
    Lease,
    Ticket,
)
from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Lineage, Version
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator import coordinator
from asyncrl.coordinator.client import Call, CoordinatorClient, perform
from asyncrl.coordinator.coordinator import Acked, Coordinator
from asyncrl.coordinator.registry import Deployment, Registry, ReplicaReport
from asyncrl.coordinator.status import Restored
from asyncrl.data.prompts import Task
from asyncrl.errors import FailureClass

NOW = Version(1, 0)
CONFIG = {"learner": {"groups_per_step": 2, "group_size": 2}, "staleness": {"max_versions": 1}}
RESAMPLE = {"algorithm": {"zero_variance": "resample"}}
SHORT = {"data": {"drop_last": True, "epochs": 1}}
"""With three prompts, the third one makes no whole step and is dropped."""
LEARNER = Deployment(id="l", role=Role.LEARNER, host="h", pid=7)
GENERATOR = Deployment(id="g", role=Role.GENERATOR, host="h", pid=8, replicas=2)
REPORT = ReplicaReport(
    actor="a", deployment="g", metrics_address="h:1", state_seconds={"idle": 1.0}, slots=2, running_groups=1,
    samples=3, completion_tokens=9, weight_updates=1, parity_max_nats=0.0,
)  # fmt: skip

Arguments = tuple[Any, ...]
RECEIVERS = (Coordinator, Registry)
NOT_HARMLESS = {
    "Coordinator.reserve",  # a repeated one gets other tickets, and those of the first one expire: see the last test
    "Registry.scale",  # its client, `asyncrl scale`, repeats no call; a user who calls it again wants another try
}


class Run:
    """A coordinator with a clock that stands still, a client of it, and the keys whose rows it has cleared."""

    def __init__(self, sections: Mapping[str, Any], *, tasks: int) -> None:
        self.config = Config.model_validate(CONFIG | sections)
        self.clock = Clock()
        self.cleared: list[str] = []
        questions = [Task(question=str(i), prompt=str(i), answer="") for i in range(tasks)]
        self.coordinator = Coordinator(
            config=self.config, tasks=questions, rows=self, started_s=0.0, clock=self.clock, sleep=self.clock.sleep
        )
        self.client = CoordinatorClient(self._perform)

    async def _perform(self, call: Call) -> Any:
        return await perform(self.coordinator, call)

    async def clear(self, keys: list[str]) -> None:
        self.cleared += keys

    async def keys(self) -> list[str]:
        return []

    @property
    def shared(self) -> Mapping[str, object]:
        return shared_config(self.config)

    async def reserved(self, count: int = 2, *, version: Version = NOW) -> tuple[Ticket, ...]:
        tickets = (await self.client.call(Coordinator.reserve, "a", version, count, wait_s=0.0)).tickets
        assert len(tickets) == count
        return tickets

    async def ready(self, count: int = 2, *, version: Version = NOW) -> tuple[Ticket, ...]:
        tickets = await self.reserved(count, version=version)
        await self.client.call(Coordinator.commit, [mixed(ticket) for ticket in tickets])
        return tickets

    async def leased(self) -> Lease:
        await self.ready()
        lease = await self.client.call(Coordinator.lease, 1, wait_s=0.0)
        assert isinstance(lease, Lease)
        return lease

    async def state(self) -> dict[str, Any]:
        """Returns what callers can read. The port of the coordinator's endpoint is another one in each run."""
        status = self.coordinator.status()
        snapshot = self.coordinator.snapshot(status.version.incarnation)
        endpoints = self.coordinator.registry.endpoints_since(0)
        await everything_else_runs()  # rows are cleared in the background
        account = msgspec.structs.replace(status.account, events={})
        ledger = msgspec.structs.replace(snapshot.buffer.ledger, events={})
        return {
            "events": {event: number for event, number in status.account.events.items() if number},
            "status": msgspec.structs.replace(status, account=account, targets={}),
            "quarantines": dict(self.coordinator.buffer.fleet.quarantines),
            "restarts": dict(self.coordinator.buffer.fleet.restarts),
            "buffer": msgspec.structs.replace(snapshot.buffer, ledger=ledger),
            "prompts": snapshot.prompts,
            "ledger": self.coordinator.ledger_entry(status.version.incarnation),
            "own": self.coordinator.own_replicas("g", ["a", "b"]),
            "endpoints": (endpoints.serial, sorted(endpoints.endpoints)),
            "nonce": self.coordinator.registry.run_nonce(),
            "cleared": sorted(self.cleared),
        }

    async def afterwards(self) -> list[Any]:
        """Makes the calls of a step that follows, and returns their answers and the state after them."""
        version = self.coordinator.status().version
        incarnation, call = version.incarnation, self.client.call
        held = HeldReport(number=9, complete=False, tokens={})
        answers: list[Any] = [await call(Coordinator.heartbeat, "a", NOW, 1, held, REPORT)]
        reservation = await call(Coordinator.reserve, "z", version, 2, wait_s=0.0)
        answers += [reservation, await call(Coordinator.commit, [mixed(each) for each in reservation.tickets])]
        lease = await call(Coordinator.lease, incarnation, wait_s=0.0)
        answers.append(lease)
        if isinstance(lease, Lease):
            acked = await call(Coordinator.ack, incarnation, lease.step)
            answers.append((acked.clearable, acked.ledger))
        answers.append(sorted(await call(Coordinator.release, incarnation, None)))
        await call(Coordinator.clear_dropped, incarnation)
        return [*answers, await self.state()]


def mixed(ticket: Ticket) -> GroupMeta:
    """Returns a group that is not filtered, because its rewards differ."""
    return finished(ticket, rewards=(0.0, 1.0))


def uncounted(answer: Any) -> Any:
    """Returns an answer without the counted events, which the state of the run has too."""
    if not isinstance(answer, Acked):
        return answer
    account = msgspec.structs.replace(answer.status.account, events={})
    return msgspec.structs.replace(answer, status=msgspec.structs.replace(answer.status, account=account))


def failed(ticket: Ticket, failure_class: FailureClass) -> FailedTicket:
    return FailedTicket(key=ticket.key, incarnation=1, failure=Failure(failure_class=failure_class, reason="x"))


@dataclass(frozen=True)
class Row:
    """A call of `method` with the arguments that `prepare` returns, after it has brought a run to the state of the
    call. `counted` are the events that the repeated call counts. `second` is its answer, if it is another one."""

    method: Callable[..., Any]
    prepare: Callable[[Run], Awaitable[Arguments]]
    options: Mapping[str, Any] = field(default_factory=dict)
    counted: Mapping[Event, int] = field(default_factory=dict)
    second: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tasks: int = 20

    def __str__(self) -> str:
        return f"{self.method.__qualname__} after {self.prepare.__name__}"


def given(*arguments: Any) -> Callable[[Run], Awaitable[Arguments]]:
    async def nothing(_: Run) -> Arguments:
        return arguments

    return nothing


async def a_ticket(run: Run) -> Arguments:
    [ticket] = await run.reserved(1)
    return "a", NOW, 1, HeldReport(number=1, complete=False, tokens={ticket.key: 3}), REPORT


async def all_tickets_again(run: Run) -> Arguments:
    [first, second] = await run.reserved()
    for number in (1, 2):
        held = HeldReport(number=number, complete=True, tokens={first.key: 3, second.key: 4})
        await run.client.call(Coordinator.heartbeat, "a", NOW, 0, held, REPORT)
    return "a", NOW, 1, HeldReport(number=3, complete=True, tokens={first.key: 5}), REPORT


def a_replica_that_is_heard(*arguments: Any) -> Callable[[Run], Awaitable[Arguments]]:
    async def a_replica(run: Run) -> Arguments:
        await run.client.call(Coordinator.heartbeat, *await a_ticket(run))
        return "a", *arguments

    return a_replica


async def generated(run: Run) -> Arguments:
    return ([mixed(ticket) for ticket in await run.reserved()],)


async def generated_with_equal_rewards(run: Run) -> Arguments:
    return ([finished(ticket) for ticket in await run.reserved()],)


async def a_bad_answer(run: Run) -> Arguments:
    return ([failed(ticket, FailureClass.DATA) for ticket in await run.reserved()],)


async def a_broken_engine(run: Run) -> Arguments:
    return ([failed(ticket, FailureClass.INFRA) for ticket in await run.reserved()],)


async def ready_groups(run: Run) -> Arguments:
    await run.ready()
    return (1,)


async def rows_of_ready_groups_lost(run: Run) -> Arguments:
    return 1, [ticket.key for ticket in await run.ready()]


async def a_lease(run: Run) -> Arguments:
    lease = await run.leased()
    return lease.incarnation, lease.step


async def an_earlier_step_and_a_lease(run: Run) -> Arguments:
    await run.client.call(Coordinator.ack, *await a_lease(run))
    await run.ready(version=Version(1, 1))
    await run.client.call(Coordinator.lease, 1, wait_s=0.0)
    return 1, 0


async def a_step_that_no_lease_has(run: Run) -> Arguments:
    await run.client.call(Coordinator.skip, *await a_lease(run))
    return 1, 5


async def a_retained_step(run: Run) -> Arguments:
    await run.client.call(Coordinator.snapshot, 1)
    acked = await run.client.call(Coordinator.ack, *await a_lease(run))
    assert acked.clearable == (), "the rows of the step stay for a learner that goes back"
    return 1, None


async def a_checkpoint_after_a_retained_step(run: Run) -> Arguments:
    await a_retained_step(run)
    await run.client.call(Coordinator.snapshot, 1)
    return 1, 1


async def a_dropped_group(run: Run) -> Arguments:
    await run.client.call(Coordinator.ack, *await a_lease(run))
    await run.ready(1, version=Version(1, 1))
    assert (await run.client.call(Coordinator.reserve, "a", Version(1, 1), 1, wait_s=0.0)).tickets == ()
    await run.client.call(Coordinator.lease, 1, wait_s=0.0)
    return (1,)


async def a_pause(run: Run) -> Arguments:
    await run.client.call(Coordinator.pause, 1)
    return (1,)


async def another_learner(run: Run) -> Arguments:
    await run.client.call(Coordinator.attach, LEARNER, shared=run.shared)
    await run.leased()
    run.clock.now_s += 1e6
    return (msgspec.structs.replace(LEARNER, id="other"),)


async def a_learner_and_its_generator(run: Run) -> Arguments:
    for deployment in (LEARNER, GENERATOR):
        await run.client.call(Coordinator.attach, deployment, shared=run.shared)
    return (LEARNER.id,)


async def a_deployment(run: Run) -> Arguments:
    await run.client.call(Coordinator.attach, LEARNER, shared=run.shared)
    return (LEARNER.id,)


async def a_set_endpoint(run: Run) -> Arguments:
    await run.client.call(Registry.set_endpoint, "b", "h:2")
    return "b", "h:3"


NO_WAIT = {"wait_s": 0.0}
FAILURE = Failure(failure_class=FailureClass.DATA, reason="x")
TABLE = [
    Row(Coordinator.start, given()),
    Row(Coordinator.brief_status, given()),
    Row(Coordinator.status, given()),
    Row(Coordinator.own_replicas, given("g", ["a"])),
    Row(Coordinator.replica_at, given(NOW), {"other_than": [], "wait_s": 0.0}),
    Row(Coordinator.heartbeat, a_ticket),
    Row(Coordinator.heartbeat, all_tickets_again),
    Row(Coordinator.leave, a_replica_that_is_heard()),
    Row(Coordinator.quarantine, a_replica_that_is_heard(Cause.ENGINE_DIED, "why")),
    Row(Coordinator.quarantine, a_replica_that_is_heard(Cause.NO_HEARTBEATS, "why")),
    Row(Coordinator.restarting, a_replica_that_is_heard(Cause.ENGINE_DIED, "why")),
    Row(Coordinator.restarting, given("a", Cause.START_FAILED, "why")),
    Row(Coordinator.commit, generated, counted={Event.COMMIT_DUPLICATE: 2}, second=[CommitOutcome.DUPLICATE] * 2),
    Row(
        Coordinator.commit,
        generated_with_equal_rewards,
        counted={Event.COMMIT_LATE: 2},
        second=[CommitOutcome.LATE] * 2,
        config=RESAMPLE,
    ),
    Row(Coordinator.fail, a_bad_answer, counted={Event.FAIL_REFUSED: 2}),
    Row(Coordinator.fail, a_broken_engine, counted={Event.FAIL_REFUSED: 2}),
    Row(Coordinator.lease, ready_groups, NO_WAIT, counted={Event.LEASE_REPEATED: 1}),
    Row(Coordinator.ack, a_lease),
    Row(Coordinator.ack, a_lease, {"snapshot": True}),
    Row(Coordinator.ack, an_earlier_step_and_a_lease),
    Row(Coordinator.ack, a_step_that_no_lease_has, counted={Event.LEASE_CALL_REFUSED: 1}),
    Row(Coordinator.skip, a_lease, counted={Event.LEASE_CALL_REFUSED: 1}),
    Row(Coordinator.give_back, a_lease, counted={Event.LEASE_CALL_REFUSED: 1}),
    Row(Coordinator.rows_lost, rows_of_ready_groups_lost, counted={Event.ROWS_LOST_REFUSED: 2}),
    Row(Coordinator.release, a_retained_step),
    Row(Coordinator.release, a_checkpoint_after_a_retained_step),
    Row(Coordinator.clear_dropped, a_dropped_group, config=SHORT, tasks=3),
    Row(Coordinator.ledger_entry, ready_groups),
    Row(Coordinator.snapshot, ready_groups),
    Row(Coordinator.published, given(NOW)),
    Row(Coordinator.pause, given(1)),
    Row(Coordinator.resume, a_pause),
    Row(Coordinator.set_state, given(1, RunState.RUNNING, "why")),
    Row(Coordinator.check_attach, given(LEARNER), {"shared": ...}),
    Row(Coordinator.attach, given(LEARNER), {"shared": ...}),
    Row(Coordinator.attach, given(GENERATOR), {"shared": ...}),
    Row(Coordinator.attach, another_learner, {"shared": ...}),
    Row(Registry.check, given(GENERATOR), {"shared": ...}),
    Row(Registry.attach, given(GENERATOR)),
    Row(Registry.keep, a_deployment, {"state_seconds": {"training": 2.0}}),
    Row(Registry.detach, a_deployment),
    Row(Registry.detach, a_learner_and_its_generator),
    Row(Registry.run_nonce, given()),
    Row(Registry.live, given()),
    Row(Registry.ask_to_end, given()),
    Row(Registry.ask_to_end, given(), {"restart": True}),
    Row(Registry.wanted, given()),
    Row(Registry.wanted_of, given("g")),
    Row(Registry.gave_up, given("a", "why")),
    Row(Registry.handshake, given(), {"who": "a", "fingerprint": "f"}),
    Row(Registry.set_state, given(RunState.RUNNING, "why")),
    Row(Registry.progressed, given()),
    Row(Registry.publish, given(NOW), {"learner": NOW}),
    Row(Registry.set_endpoint, a_set_endpoint),
    Row(Registry.endpoints_since, given(0)),
    Row(Coordinator.heldout_failed, given("1", FAILURE)),
    Row(Coordinator.samples_failed, given("1", [FailureCount(first=FAILURE, samples=3, tool_calls=2)])),
    Row(Coordinator.failure_counts, given(-1), NO_WAIT),
]


def test_the_table_has_every_call_of_the_coordinator() -> None:
    calls = {
        f"{receiver.__name__}.{name}"
        for receiver in RECEIVERS
        for name, method in vars(receiver).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert {row.method.__qualname__ for row in TABLE} == calls - NOT_HARMLESS


@pytest.mark.asyncio
@pytest.mark.parametrize("row", TABLE, ids=str)
async def test_a_call_whose_answer_was_lost_is_repeated_without_effect(row: Row) -> None:
    answers, states = [], []
    for times in (1, 2):
        run = Run(row.config, tasks=row.tasks)
        arguments = await row.prepare(run)
        options = {name: run.shared if value is ... else value for name, value in row.options.items()}
        answers += [uncounted(await run.client.call(row.method, *arguments, **options)) for _ in range(times)]
        states.append(await run.state())
        states.append(await run.afterwards())
    once, first, second = answers
    assert once == first, "the two runs are equal"
    assert second == (first if row.second is None else row.second)
    for one, other in ((states[0], states[2]), (states[1][-1], states[3][-1])):
        counts = {event: other["events"].get(event, 0) - one["events"].get(event, 0) for event in Event}
        assert {event: number for event, number in counts.items() if number} == row.counted
        assert {**other, "events": {}} == {**one, "events": {}}
    assert states[1][:-1] == states[3][:-1]


@pytest.mark.asyncio
async def test_a_repeated_ack_names_the_ended_groups_and_has_the_snapshot_of_the_first_one() -> None:
    """The audit reads the ledger's entry, and the learner saves the snapshot: both are of the moment after the step."""
    run = Run({}, tasks=20)
    lease = await run.leased()
    first = await run.client.call(Coordinator.ack, 1, 0, snapshot=True)
    await run.ready(version=Version(1, 1))
    repeated = await run.client.call(Coordinator.ack, 1, 0, snapshot=True)
    assert repeated == first
    assert isinstance(repeated, Acked)
    assert [ended.group for ended in repeated.ledger.ended] == [group.meta.group for group in lease.groups]
    assert repeated.snapshot is not None
    assert repeated.snapshot.buffer.open == ()


@pytest.mark.asyncio
async def test_a_learner_that_restores_again_because_its_answer_was_lost_keeps_its_incarnation() -> None:
    """The groups that were committed between the two calls stay."""
    before = Run({}, tasks=20)
    await before.ready()
    snapshot = before.coordinator.snapshot(1)
    run = Run({}, tasks=20)
    restored = Restored(snapshot=snapshot, lineage=Lineage((NOW,)))
    lineage = await run.client.call(Coordinator.attach, LEARNER, shared=run.shared, restored=restored)
    await run.ready(1, version=Version(2, 0))
    assert run.coordinator.status().counts.ready == 3
    assert await run.client.call(Coordinator.attach, LEARNER, shared=run.shared, restored=restored) == lineage
    assert run.coordinator.status().counts.ready == 3


@pytest.mark.asyncio
async def test_reports_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "MOST_REPORTS", 3)
    run = Run({}, tasks=20)
    for report in ("1", "2", "3", "4", "4", "1"):
        await run.client.call(Coordinator.heldout_failed, report, FAILURE)
    [count] = run.coordinator.status().failures
    assert count.rollouts == 5, "the repeated report 4 counts once, and report 1 was forgotten"


@pytest.mark.asyncio
@pytest.mark.fault("F16")
async def test_a_repeated_reserve_gets_other_tickets_and_those_of_the_lost_answer_expire() -> None:
    run = Run({}, tasks=20)
    lost, held = await run.reserved(1), await run.reserved(1)
    for number in (1, 2):
        report = HeldReport(number=number, complete=True, tokens={held[0].key: 1})
        await run.client.call(Coordinator.heartbeat, "a", NOW, 1, report, REPORT)
        run.clock.now_s += 0.7 * run.config.buffer.heartbeat_timeout_s
    await run.coordinator.start()
    await everything_else_runs()
    await run.clock.passes(1.0)
    status = run.coordinator.status()
    assert (status.counts.reserved, status.counts.waiting) == (1, 1)
    assert status.account.closed
    [again] = await run.reserved(1)
    assert (again.group, again.attempt) == (lost[0].group, lost[0].attempt + 1)
