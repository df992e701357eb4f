"""The shell of the buffer actor: cancelled waits hold no slot, and rows of ended tickets are cleared."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from buffer_scenes import finished

from asyncrl.buffer.actor import BufferActor, FailedTicket, ReplicaReport
from asyncrl.buffer.membership import Deployment
from asyncrl.buffer.records import CommitOutcome, Failure, LeaseWait, Refusal, Reservation
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.errors import FailureClass, RunLocked
from asyncrl.metrics.catalogue import BUFFER_WAITS, REPLICA_STATES
from asyncrl.run.roles import Role
from asyncrl.run.version import Version

FAR_S = 60.0
NOW = Version(1, 0)
CONFIG = {"learner": {"groups_per_step": 2, "group_size": 2}, "staleness": {"max_versions": 0}}
"""A buffer with room for two groups: η = 0 and two groups in a step."""


class ClearedRows:
    """A row client that only records the keys that it should clear."""

    def __init__(self) -> None:
        self.cleared: list[list[str]] = []

    async def clear(self, keys: Sequence[str]) -> None:
        self.cleared.append(list(keys))


def actor(
    rows: ClearedRows,
    *,
    started_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    **sections: Any,
) -> BufferActor:
    config = Config.model_validate(CONFIG | sections)
    tasks = [Task(question=str(i), prompt=str(i), answer="") for i in range(20)]
    return BufferActor(
        config=config,
        tasks=tasks,
        nonce="n",
        rows=rows,
        started_s=started_s,
        clock=clock,  # type: ignore[arg-type]
    )


def report_of(replica: str) -> ReplicaReport:
    return ReplicaReport(
        actor=replica,
        deployment="d",
        metrics_address="",
        state_seconds={},
        slots=2,
        running_groups=0,
        samples=0,
        completion_tokens=0,
        weight_updates=0,
        parity_max_nats=0.0,
    )


async def a_waiting_reserve(buffer: BufferActor) -> asyncio.Task[Reservation]:
    waiting = asyncio.create_task(buffer.reserve("b", NOW, 2, FAR_S))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done(), "a full buffer issued tickets"
    return waiting


async def free_a_slot(buffer: BufferActor, key: str) -> None:
    await buffer.fail(
        [FailedTicket(key=key, incarnation=1, failure=Failure(failure_class=FailureClass.DATA, reason="x"))]
    )


@pytest.mark.asyncio
@pytest.mark.fault("F16")
async def test_a_wait_ends_with_a_ticket_as_soon_as_a_slot_is_free() -> None:
    buffer = actor(ClearedRows())
    held = await buffer.reserve("a", NOW, 2, 0.0)
    waiting = await a_waiting_reserve(buffer)
    await free_a_slot(buffer, held.tickets[0].key)
    assert len((await waiting).tickets) == 1


@pytest.mark.asyncio
@pytest.mark.fault("F16")
async def test_a_wait_cancelled_in_the_moment_of_its_ticket_leaks_no_slot() -> None:
    buffer = actor(ClearedRows())
    held = await buffer.reserve("a", NOW, 2, 0.0)
    waiting = await a_waiting_reserve(buffer)
    await free_a_slot(buffer, held.tickets[0].key)  # wakes the waiting task, which has not run yet
    waiting.cancel()
    assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
    assert buffer._buffer.counts().reserved == 1
    assert len((await buffer.reserve("c", NOW, 9, 0.0)).tickets) == 1, "the cancelled wait kept the slot"


@pytest.mark.asyncio
@pytest.mark.fault("F16")
async def test_a_full_buffer_says_why_when_the_wait_is_over() -> None:
    buffer = actor(ClearedRows())
    await buffer.reserve("a", NOW, 2, 0.0)
    assert await buffer.reserve("b", NOW, 2, 0.0) == Reservation(tickets=(), refusal=Refusal.STALENESS)


@pytest.mark.asyncio
@pytest.mark.fault("F40")
async def test_rows_of_a_generator_that_was_declared_dead_are_cleared_and_its_commit_is_refused() -> None:
    rows = ClearedRows()
    buffer = actor(rows)
    (ticket, other) = (await buffer.reserve("zombie", NOW, 2, 0.0)).tickets
    await buffer.heartbeat("zombie", NOW, 0, [ticket.key, other.key], report_of("zombie"))
    await buffer.leave("zombie")
    await asyncio.gather(*buffer._clearing)
    assert rows.cleared == [[ticket.key, other.key]]
    (winner, _) = (await buffer.reserve("b", NOW, 2, 0.0)).tickets
    assert (winner.group, winner.seed) == (ticket.group, ticket.seed)
    assert winner.key != ticket.key, "rows of two attempts must not have the same key"
    assert await buffer.commit([finished(winner), finished(ticket)]) == [CommitOutcome.ACCEPTED, CommitOutcome.LATE]


@pytest.mark.asyncio
async def test_state_seconds_say_who_waits_and_add_up() -> None:
    now_s = 7.0
    buffer = actor(ClearedRows(), started_s=3.0, clock=lambda: now_s)
    await buffer.start()
    tasks: list[asyncio.Task[Any]] = []
    try:
        now_s = 8.0
        tickets = (await buffer.reserve("a", NOW, 2, FAR_S)).tickets  # takes all tickets, without a wait
        tasks.append(await a_waiting_reserve(buffer))
        now_s = 10.0
        tasks.append(asyncio.create_task(buffer.lease(FAR_S)))
        await asyncio.sleep(0)
        now_s = 14.0
        await buffer.commit([finished(ticket) for ticket in tickets])
        await tasks[1]
        now_s = 22.0
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        now_s = 38.0
        read, name = buffer._metrics.registry.get_sample_value, "asyncrl_buffer_state_seconds_total"
        assert {state: read(name, {"state": state}) for state in BUFFER_WAITS} == {
            "starting": 4.0,
            "nobody_waits": 1.0 + 16.0,
            "generators_wait": 2.0 + 8.0,
            "both_wait": 4.0,
            "learner_waits": 0.0,
        }
        await buffer.ack(1, 0)
        tasks.append(asyncio.create_task(buffer.lease(FAR_S)))
        await asyncio.sleep(0)
        now_s = 39.0
        assert read(name, {"state": "learner_waits"}) == 1.0
    finally:
        for task in (*tasks, buffer._expiry):
            if task is not None:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if buffer._server is not None:
            buffer._server.close()


@pytest.mark.asyncio
@pytest.mark.fault("F5")
async def test_only_a_commit_that_is_accepted_is_progress() -> None:
    now_s = 0.0
    config = Config.model_validate({"learner": {"groups_per_step": 2, "group_size": 2}})
    tasks = [Task(question="q", prompt="q", answer="")]
    rows: Any = ClearedRows()
    buffer = BufferActor(config=config, tasks=tasks, nonce="n", rows=rows, started_s=0.0, clock=lambda: now_s)
    [ticket] = (await buffer.reserve("a", NOW, 1, 0.0)).tickets
    now_s = 5.0
    assert await buffer.commit([finished(ticket)]) == [CommitOutcome.ACCEPTED]
    assert (await buffer.status()).quiet_s == 0.0
    now_s = 9.0
    assert await buffer.commit([finished(ticket)]) == [CommitOutcome.DUPLICATE]
    await buffer.commit([])
    assert (await buffer.status()).quiet_s == 4.0, "a repeated commit must not reset the stall watchdog"


@pytest.mark.asyncio
async def test_metrics_show_replicas_by_state_and_an_account_that_closes_while_groups_are_under_way() -> None:
    buffer = actor(ClearedRows())
    await buffer.heartbeat("new", None, 2, [], report_of("new"))
    await buffer.heartbeat("idle", NOW, 2, [], report_of("idle"))
    await buffer.reserve("busy", NOW, 2, 0.0)
    buffer._record()
    read = buffer._metrics.registry.get_sample_value
    shown = {state: read("asyncrl_replicas", {"state": state}) for state in REPLICA_STATES}
    assert shown == {"generating": 1, "waiting": 1, "without_weights": 1, "silent": 0}
    assert read("asyncrl_ledger_issued_groups_total") == 2
    assert read("asyncrl_ledger_unaccounted_groups") == 0


@pytest.mark.asyncio
async def test_who_asks_whether_it_may_join_has_not_joined() -> None:
    buffer = actor(ClearedRows())
    shared = shared_config(Config.model_validate(CONFIG))
    learners = [Deployment(id=name, role=Role.LEARNER, host="h", pid=7) for name in ("first", "second")]
    for learner in learners:
        await buffer.check(learner, shared)
    await buffer.attach(learners[0], shared)
    with pytest.raises(RunLocked):
        await buffer.check(learners[1], shared)


@pytest.mark.asyncio
async def test_endpoints_are_those_of_replicas_that_have_one_until_they_leave() -> None:
    buffer = actor(ClearedRows())
    for name, address in (("a", "127.0.0.1:1"), ("b", "127.0.0.1:2"), ("starting", "")):
        report = msgspec.structs.replace(report_of(name), metrics_address=address)
        await buffer.heartbeat(name, NOW, 2, [], report)
    assert (await buffer.status()).targets == {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}
    await buffer.leave("a")
    assert (await buffer.status()).targets == {"b": "127.0.0.1:2"}, "the replica has left, although its report is kept"


@pytest.mark.asyncio
async def test_the_age_of_what_waits_longest_is_shown() -> None:
    now_s = 0.0
    buffer = actor(ClearedRows(), clock=lambda: now_s)
    await buffer.reserve("a", NOW, 1, 0.0)
    now_s = 7.0
    buffer._record()
    assert buffer._metrics.registry.get_sample_value("asyncrl_buffer_oldest_group_age_seconds") == 7.0


@pytest.mark.asyncio
async def test_failures_are_answered_as_soon_as_there_are_more_than_the_caller_knows() -> None:
    buffer = actor(ClearedRows())
    tickets = (await buffer.reserve("a", NOW, 2, 0.0)).tickets
    waiting = asyncio.create_task(buffer.failures(0, FAR_S))
    await asyncio.sleep(0)
    await buffer.heartbeat("a", NOW, 0, [], report_of("a"))
    assert not waiting.done()
    await free_a_slot(buffer, tickets[0].key)
    async with asyncio.timeout(FAR_S / 2):
        [count] = await waiting
    assert (count.first.reason, count.rollouts) == ("x", 1)
    assert await buffer.failures(1, 0.0) == (count,), "without new failures the answer comes at the end of the wait"


@pytest.mark.asyncio
async def test_a_learner_that_waits_learns_at_once_that_too_many_groups_failed() -> None:
    buffer = actor(ClearedRows(), generator={"max_data_failures": 2})
    tickets = (await buffer.reserve("a", NOW, 2, 0.0)).tickets
    waiting = asyncio.create_task(buffer.lease(FAR_S))
    await asyncio.sleep(0)
    for ticket in tickets:
        await free_a_slot(buffer, ticket.key)
    async with asyncio.timeout(FAR_S / 2):
        assert await waiting is LeaseWait.TOO_MANY_FAILURES
    streak = (await buffer.status()).failure_streak
    assert streak is not None
    assert streak.groups == 2
