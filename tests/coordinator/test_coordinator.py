"""The coordinator: cancelled waits hold no slot, and rows of ended tickets are cleared."""

import asyncio
import contextlib
import functools
import inspect
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import pytest
from buffer_scenes import Clock, everything_else_runs, finished, progress_of
from scraped import scraped

from asyncrl.buffer.ledger import Event
from asyncrl.buffer.records import (
    NO_TASK,
    CommitOutcome,
    FailedTicket,
    Failure,
    FailureCount,
    Lease,
    LeaseWait,
    Refusal,
    Renewal,
    Reservation,
)
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.common.device_time import Devices, Pool, device_time
from asyncrl.common.names import COORDINATOR
from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Lineage, Version
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.coordinator import SWEEP_EVERY_S, Coordinator
from asyncrl.coordinator.registry import AbleReplicas, Attachment, Deployment, ReplicaReport
from asyncrl.coordinator.status import BriefStatus, GeneratorTotals, Restored, RunSnapshot
from asyncrl.data.prompts import Task, prompt_data
from asyncrl.errors import DatasetError, FailureClass, Fenced, LearnerNotRestored, RunLocked, RunMismatch
from asyncrl.metrics.catalogue import BUFFER_WAITS, REPLICA_STATES

Answer = TypeVar("Answer")
FAR_S = 60.0
NOW = Version(1, 0)
CONFIG = {"learner": {"groups_per_step": 2, "group_size": 2}, "staleness": {"max_versions": 0}}
"""A buffer with room for two groups: η = 0 and two groups in a step."""

SHARED = shared_config(Config.model_validate(CONFIG))
FIRST, SECOND = (Deployment(id=name, role=Role.LEARNER, host="h", pid=7) for name in ("first", "second"))
TIMEOUT_S = Config().buffer.heartbeat_timeout_s
SILENT_S = TIMEOUT_S + 1.0


async def no_keys() -> list[str]:
    return []


class ClearedRows:
    """A row client that only records the keys that it should clear. `stored_keys` returns the keys that it has."""

    def __init__(self, stored_keys: Callable[[], Awaitable[list[str]]] = no_keys) -> None:
        self.keys = stored_keys
        self.cleared: list[list[str]] = []

    async def clear(self, keys: Sequence[str]) -> None:
        self.cleared.append(list(keys))


def made(
    rows: ClearedRows,
    *,
    started_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    tasks: int = 20,
    **sections: Any,
) -> Coordinator:
    config = Config.model_validate(CONFIG | sections)
    questions = [Task(question=str(i), prompt=str(i), answer="") for i in range(tasks)]
    return Coordinator(config=config, tasks=questions, rows=rows, started_s=started_s, clock=clock, sleep=sleep)


async def started(rows: ClearedRows, clock: Clock, **options: Any) -> Coordinator:
    """Returns a coordinator whose expiry clock runs."""
    coordinator = made(rows, clock=clock, sleep=clock.sleep, **options)
    await coordinator.start()
    await everything_else_runs()
    return coordinator


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


async def soon(call: asyncio.Task[Answer]) -> Answer:
    """Returns the answer of a waiting call, which must not come only at the end of its wait."""
    async with asyncio.timeout(FAR_S / 2):
        return await call


async def a_waiting_reserve(coordinator: Coordinator) -> asyncio.Task[Reservation]:
    waiting = asyncio.create_task(coordinator.reserve("b", NOW, 2, wait_s=FAR_S))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done(), "a full buffer issued tickets"
    return waiting


def asked_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which each question for tickets adds the replica that asks."""
    reserve, asked = ReplayBuffer.reserve, list[str]()

    def noted(buffer: ReplayBuffer, replica: str, *, version: Version, count: int) -> Reservation:
        asked.append(replica)
        return reserve(buffer, replica, version=version, count=count)

    monkeypatch.setattr(ReplayBuffer, "reserve", noted)
    return asked


async def free_a_slot(coordinator: Coordinator, key: str) -> None:
    await coordinator.fail(
        [FailedTicket(key=key, incarnation=1, failure=Failure(failure_class=FailureClass.DATA, reason="x"))]
    )


@pytest.mark.asyncio
@pytest.mark.fault("F16")
async def test_a_wait_ends_with_a_ticket_as_soon_as_a_slot_is_free() -> None:
    coordinator = made(ClearedRows())
    held = await coordinator.reserve("a", NOW, 2, wait_s=0.0)
    waiting = await a_waiting_reserve(coordinator)
    await free_a_slot(coordinator, held.tickets[0].key)
    assert len((await soon(waiting)).tickets) == 1


@pytest.mark.asyncio
@pytest.mark.fault("F16")
async def test_a_wait_cancelled_in_the_moment_of_its_ticket_leaks_no_slot() -> None:
    coordinator = made(ClearedRows())
    held = await coordinator.reserve("a", NOW, 2, wait_s=0.0)
    waiting = await a_waiting_reserve(coordinator)
    await free_a_slot(coordinator, held.tickets[0].key)  # wakes the waiting task, which has not run yet
    waiting.cancel()
    assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
    assert coordinator.status().counts.reserved == 1
    assert len((await coordinator.reserve("c", NOW, 9, wait_s=0.0)).tickets) == 1, "the cancelled wait kept the slot"


@pytest.mark.asyncio
@pytest.mark.fault("F16")
async def test_a_full_buffer_says_why_when_the_wait_is_over() -> None:
    coordinator = made(ClearedRows())
    await coordinator.reserve("a", NOW, 2, wait_s=0.0)
    assert await coordinator.reserve("b", NOW, 2, wait_s=0.0) == Reservation(tickets=(), refusal=Refusal.STALENESS)


@pytest.mark.asyncio
async def test_a_step_that_ends_the_ticket_of_a_straggler_clears_its_rows_and_wakes_a_generator_for_its_prompt() -> (
    None
):
    """η = 1, B = 2: step 1 would leave group 2 behind, which is due at step 1, so its prompt starts again."""
    rows = ClearedRows()
    coordinator = made(rows, staleness={"max_versions": 1, "on_deadline": "requeue"})
    first = (await coordinator.reserve("a", NOW, 4, wait_s=0.0)).tickets
    await coordinator.commit([finished(ticket) for ticket in first[:2]])
    await coordinator.lease(1, wait_s=0.0)
    await coordinator.ack(1, 0)
    more = (await coordinator.reserve("a", Version(1, 1), 2, wait_s=0.0)).tickets
    straggler, *ready = [*first[2:], *more]
    await coordinator.commit([finished(ticket) for ticket in ready])
    waiting = asyncio.create_task(coordinator.reserve("b", Version(1, 1), 1, wait_s=FAR_S))
    await asyncio.sleep(0)
    lease = await coordinator.lease(1, wait_s=0.0)
    assert isinstance(lease, Lease)
    (again,) = (await soon(waiting)).tickets
    assert (again.group, again.attempt) == (straggler.group, 1)
    await everything_else_runs()
    assert rows.cleared == [[straggler.key]]
    held = progress_of(straggler, again)
    assert (await coordinator.heartbeat("a", Version(1, 1), 0, held, report_of("a"))).ended == (straggler.key,)
    assert (await coordinator.commit([finished(straggler)])) == [CommitOutcome.LATE]
    assert coordinator.status().failures == ()


@pytest.mark.asyncio
async def test_a_heartbeat_with_newer_weights_lets_a_waiting_lease_mask_the_stragglers_old_tokens() -> None:
    coordinator = made(ClearedRows(), staleness={"max_versions": 1, "on_deadline": "mask"})
    first = (await coordinator.reserve("a", NOW, 4, wait_s=0.0)).tickets
    await coordinator.heartbeat("a", NOW, 0, progress_of(*first), report_of("a"))
    await coordinator.commit([finished(ticket) for ticket in first[:2]])
    await coordinator.lease(1, wait_s=0.0)
    await coordinator.ack(1, 0)
    more = (await coordinator.reserve("b", Version(1, 1), 2, wait_s=0.0)).tickets
    straggler, *ready = [*first[2:], *more]
    await coordinator.commit([finished(ticket) for ticket in ready])
    waiting = asyncio.create_task(coordinator.lease(1, wait_s=FAR_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert (await coordinator.heartbeat("a", Version(1, 1), 0, progress_of(straggler), report_of("a"))).ended == ()
    assert isinstance(await soon(waiting), Lease)
    assert coordinator.status().account.events[Event.STRAGGLER_MASKED] == 1
    assert (await coordinator.commit([finished(straggler)])) == [CommitOutcome.ACCEPTED]


@pytest.mark.asyncio
@pytest.mark.fault("F40")
async def test_rows_of_a_generator_that_was_declared_dead_are_cleared_and_its_commit_is_refused() -> None:
    rows = ClearedRows()
    coordinator = made(rows)
    (ticket, other) = (await coordinator.reserve("zombie", NOW, 2, wait_s=0.0)).tickets
    await coordinator.heartbeat("zombie", NOW, 0, progress_of(ticket, other), report_of("zombie"))
    await coordinator.leave("zombie")
    await everything_else_runs()
    assert rows.cleared == [[ticket.key, other.key]]
    (winner, _) = (await coordinator.reserve("b", NOW, 2, wait_s=0.0)).tickets
    assert (winner.group, winner.seed) == (ticket.group, ticket.seed)
    assert winner.key != ticket.key, "rows of two attempts must not have the same key"
    assert await coordinator.commit([finished(winner), finished(ticket)]) == [
        CommitOutcome.ACCEPTED,
        CommitOutcome.LATE,
    ]


@pytest.mark.asyncio
async def test_state_seconds_say_who_waits_and_add_up() -> None:
    clock = Clock(7.0)
    coordinator = await started(ClearedRows(), clock, started_s=3.0, buffer={"heartbeat_timeout_s": 1000.0})
    tasks: list[asyncio.Task[Any]] = []
    try:
        clock.now_s = 8.0
        tickets = (await coordinator.reserve("a", NOW, 2, wait_s=FAR_S)).tickets  # takes all tickets, without a wait
        tasks.append(await a_waiting_reserve(coordinator))
        clock.now_s = 10.0
        tasks.append(asyncio.create_task(coordinator.lease(1, wait_s=FAR_S)))
        await asyncio.sleep(0)
        clock.now_s = 14.0
        await coordinator.commit([finished(ticket) for ticket in tickets])
        await tasks[1]
        clock.now_s = 22.0
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        clock.now_s = 38.0
        read, name = (await scraped(coordinator)).get_sample_value, "asyncrl_buffer_state_seconds_total"
        assert {state: read(name, {"state": state}) for state in BUFFER_WAITS} == {
            "starting": 4.0,
            "nobody_waits": 1.0 + 16.0,
            "generators_wait": 2.0 + 8.0,
            "both_wait": 4.0,
            "learner_waits": 0.0,
        }
        await coordinator.ack(1, 0)
        tasks.append(asyncio.create_task(coordinator.lease(1, wait_s=FAR_S)))
        await asyncio.sleep(0)
        clock.now_s = 39.0
        assert (await scraped(coordinator)).get_sample_value(name, {"state": "learner_waits"}) == 1.0
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.asyncio
@pytest.mark.fault("F5")
async def test_only_a_commit_that_is_accepted_is_progress() -> None:
    now_s = 0.0
    config = Config.model_validate({"learner": {"groups_per_step": 2, "group_size": 2}})
    tasks = [Task(question="q", prompt="q", answer="")]
    rows = ClearedRows()
    coordinator = Coordinator(config=config, tasks=tasks, rows=rows, started_s=0.0, clock=lambda: now_s)
    [ticket] = (await coordinator.reserve("a", NOW, 1, wait_s=0.0)).tickets
    now_s = 5.0
    assert await coordinator.commit([finished(ticket)]) == [CommitOutcome.ACCEPTED]
    assert coordinator.status().quiet_s == 0.0
    now_s = 9.0
    assert await coordinator.commit([finished(ticket)]) == [CommitOutcome.DUPLICATE]
    await coordinator.commit([])
    assert coordinator.status().quiet_s == 4.0, "a repeated commit must not reset the stall watchdog"


@pytest.mark.asyncio
async def test_metrics_show_replicas_by_state_and_an_account_that_closes_while_groups_are_under_way() -> None:
    clock = Clock()
    coordinator = await started(ClearedRows(), clock)
    await coordinator.heartbeat("new", None, 2, progress_of(), report_of("new"))
    await coordinator.heartbeat("idle", NOW, 2, progress_of(), report_of("idle"))
    await coordinator.reserve("busy", NOW, 2, wait_s=0.0)
    await clock.passes(1.0)
    read = (await scraped(coordinator)).get_sample_value
    shown = {state: read("asyncrl_replicas", {"state": state}) for state in REPLICA_STATES}
    assert {state: count for state, count in shown.items() if count} == {
        "generating": 1, "waiting": 1, "without_weights": 1
    }  # fmt: skip
    assert read("asyncrl_ledger_issued_groups_total") == 2
    assert read("asyncrl_ledger_unaccounted_groups") == 0


@pytest.mark.asyncio
async def test_who_asks_whether_it_may_join_has_not_joined() -> None:
    coordinator = made(ClearedRows())
    shared = shared_config(Config.model_validate(CONFIG))
    learners = [Deployment(id=name, role=Role.LEARNER, host="h", pid=7) for name in ("first", "second")]
    for learner in learners:
        coordinator.check_attach(learner, shared=shared)
    await coordinator.attach(learners[0], shared=shared)
    with pytest.raises(RunLocked):
        coordinator.check_attach(learners[1], shared=shared)


@pytest.mark.asyncio
async def test_the_status_has_the_learners_seconds_by_state_of_its_last_heartbeat() -> None:
    coordinator = made(ClearedRows())
    generator = Deployment(id="g", role=Role.GENERATOR, host="h", pid=8)
    for each in (FIRST, generator):
        await coordinator.attach(each, shared=SHARED)
    assert coordinator.status().learner_state_seconds == {}
    coordinator.registry.keep(FIRST.id, state_seconds={"optimizer": 2.0})
    coordinator.registry.keep(generator.id)
    assert coordinator.status().learner_state_seconds == {"optimizer": 2.0}


@pytest.mark.asyncio
async def test_the_number_of_replicas_follows_who_waits_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    sections = {"buffer": {"heartbeat_timeout_s": 1000.0}, "generator": {"autoscale": {"max": 2, "dwell_s": 10.0}}}
    coordinator = await started(ClearedRows(), clock, **sections)
    registry, shared = coordinator.registry, shared_config(Config.model_validate(CONFIG | sections))
    for each in (FIRST, Deployment(id="g", role=Role.GENERATOR, host="h", pid=8, replicas=1)):
        await coordinator.attach(each, shared=shared)

    async def trains(step: int, *, learner_waits: bool) -> None:
        version = Version(1, step)
        tickets = (await coordinator.reserve("a", version, 2, wait_s=0.0)).tickets
        lease = asyncio.create_task(coordinator.lease(1, wait_s=FAR_S))
        if learner_waits:
            await clock.passes(5.0)
            busy = msgspec.structs.replace(report_of("a"), state_seconds={"starting": 50.0, "generating": clock.now_s})
            await coordinator.heartbeat("a", version, 2, progress_of(*tickets), busy)
        await coordinator.commit([finished(ticket) for ticket in tickets])
        await soon(lease)
        if not learner_waits:
            for actor in ("a", "b"):
                blocked = msgspec.structs.replace(
                    report_of(actor), state_seconds={"starting": 50.0, "blocked_on_staleness": clock.now_s}
                )
                await coordinator.heartbeat(actor, version, 2, progress_of(), blocked)
            await clock.passes(20.0)  # a replica was seen to make a group in 6 s
        await coordinator.ack(1, step)
        await clock.passes(1.0)

    for step in range(3):
        await trains(step, learner_waits=True)
    assert registry.wanted() == {"g": 1}, "the learner has not said that it trains"
    coordinator.set_state(1, RunState.RUNNING)
    for step in range(3, 6):
        await trains(step, learner_waits=True)
    assert registry.wanted() == {"g": 2}
    assert (await scraped(coordinator)).get_sample_value("asyncrl_wanted_replicas") == 2
    because = coordinator.status().scaled_because
    assert because.startswith("generator.autoscale: from 1 to 2 replicas, because the learner waited for groups in 67%")
    assert coordinator.own_replicas("g", []).scaled_because == because
    assert because in caplog.messages
    for step in range(6, 13):
        await trains(step, learner_waits=False)
    assert registry.wanted() == {"g": 1}
    assert "blocked as many slots as 2.0 replicas have" in caplog.messages[-1]


@pytest.mark.asyncio
async def test_endpoints_are_those_of_replicas_that_have_one_until_they_leave() -> None:
    clock = Clock()
    coordinator = await started(ClearedRows(), clock)
    for name, address in (("a", "127.0.0.1:1"), ("b", "127.0.0.1:2"), ("starting", "")):
        report = msgspec.structs.replace(report_of(name), metrics_address=address, node=f"node-{name}")
        await coordinator.heartbeat(name, NOW, 2, progress_of(), report)
    own = {COORDINATOR: coordinator.status().targets[COORDINATOR]}
    assert coordinator.status().targets == own | {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}
    nodes = {process: endpoint.node for process, endpoint in coordinator.registry.endpoints.items()}
    assert nodes == {COORDINATOR: socket.gethostname(), "a": "node-a", "b": "node-b"}
    await coordinator.leave("a")
    assert coordinator.status().targets == own | {"b": "127.0.0.1:2"}, (
        "the replica has left, although its report is kept"
    )
    await clock.passes(SILENT_S)
    assert coordinator.status().targets == own, "it is silent for too long"
    assert list(coordinator.registry.endpoints_since(0).endpoints) == [COORDINATOR]


@pytest.mark.asyncio
async def test_the_age_of_what_waits_longest_is_shown() -> None:
    clock = Clock()
    coordinator = await started(ClearedRows(), clock)
    await coordinator.reserve("a", NOW, 1, wait_s=0.0)
    await clock.passes(7.0)
    assert (await scraped(coordinator)).get_sample_value("asyncrl_buffer_oldest_group_age_seconds") == 7.0


@pytest.mark.asyncio
async def test_failures_are_answered_as_soon_as_there_are_more_than_the_caller_knows() -> None:
    coordinator = made(ClearedRows())
    tickets = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    waiting = asyncio.create_task(coordinator.failure_counts(0, wait_s=FAR_S))
    await asyncio.sleep(0)
    await coordinator.heartbeat("a", NOW, 0, progress_of(), report_of("a"))
    assert not waiting.done()
    await free_a_slot(coordinator, tickets[0].key)
    [count] = await soon(waiting)
    assert (count.first.reason, count.rollouts) == ("x", 1)
    assert await coordinator.failure_counts(1, wait_s=0.0) == (count,), (
        "without new failures the answer comes at the end of the wait"
    )


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_failed_samples_of_committed_groups_are_answered_like_failed_rollouts() -> None:
    coordinator = made(ClearedRows())
    waiting = asyncio.create_task(coordinator.failure_counts(0, wait_s=FAR_S))
    await asyncio.sleep(0)
    failure = Failure(failure_class=FailureClass.DATA, reason="reward_raised")
    await coordinator.samples_failed("1", [FailureCount(samples=3, first=failure)])
    async with asyncio.timeout(FAR_S / 2):
        [count] = await waiting
    assert (count.rollouts, count.samples) == (0, 3)
    assert coordinator.status().failure_streak is None


@pytest.mark.asyncio
async def test_a_learner_that_waits_learns_at_once_that_too_many_groups_failed() -> None:
    coordinator = made(ClearedRows(), generator={"max_data_failures": 2})
    tickets = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    waiting = asyncio.create_task(coordinator.lease(1, wait_s=FAR_S))
    await asyncio.sleep(0)
    for ticket in tickets:
        await free_a_slot(coordinator, ticket.key)
    assert await soon(waiting) is LeaseWait.TOO_MANY_FAILURES
    streak = coordinator.status().failure_streak
    assert streak is not None
    assert streak.groups == 2


@pytest.mark.asyncio
@pytest.mark.fault("F2")
async def test_a_replica_that_is_silent_too_long_is_counted_as_lost_and_its_tickets_go_elsewhere() -> None:
    clock, rows = Clock(), ClearedRows()
    coordinator = await started(rows, clock)
    lost = (await coordinator.reserve("killed", NOW, 1, wait_s=0.0)).tickets[0]
    kept = (await coordinator.reserve("survivor", NOW, 1, wait_s=0.0)).tickets[0]
    await clock.passes(TIMEOUT_S)
    await coordinator.heartbeat("survivor", NOW, 0, progress_of(kept), report_of("survivor"))
    waiting = await a_waiting_reserve(coordinator)
    await clock.passes(1.0)
    assert (await soon(waiting)).tickets[0].group == lost.group
    await everything_else_runs()
    assert rows.cleared == [[lost.key]]
    status = coordinator.status()
    assert (status.account.events[Event.REPLICA_LOST], status.account.events[Event.TICKET_EXPIRED]) == (1, 1)
    assert [view.replica for view in status.replicas if view.live] == ["b", "survivor"]
    assert [view.trouble for view in status.replicas if not view.live] == ["quarantined (no heartbeat for 15 s)"]


@pytest.mark.asyncio
@pytest.mark.fault("F1")
async def test_a_replica_quarantined_for_its_failures_loses_its_tickets_its_endpoint_and_its_place_in_line() -> None:
    coordinator = made(
        ClearedRows(), generator={"max_infra_failures": 1}, learner={"groups_per_step": 3, "group_size": 2}
    )
    [failed, held, other] = (await coordinator.reserve("a", NOW, 3, wait_s=0.0)).tickets
    report = msgspec.structs.replace(report_of("a"), metrics_address="host:1")
    await coordinator.heartbeat("a", NOW, 0, progress_of(failed, held), report)
    waiting = asyncio.create_task(coordinator.reserve("a", NOW, 1, wait_s=FAR_S))
    await asyncio.sleep(0)
    coordinator.pause(1)  # no change wakes a call, because none gets a ticket
    failure = Failure(failure_class=FailureClass.INFRA, reason="engine")
    await coordinator.fail([FailedTicket(key=failed.key, incarnation=1, failure=failure)])
    assert await coordinator.heartbeat("a", NOW, 0, progress_of(held, other), report) == Renewal(must_end=True)
    assert await soon(waiting) == Reservation(tickets=(), refusal=Refusal.QUARANTINED)
    status = coordinator.status()
    what = (status.counts.reserved, status.counts.waiting, status.targets, status.able)
    assert what == (0, 3, {}, ()), "also the ticket that it has not named"
    assert status.account.events[Event.REPLICA_LOST] == 1


@pytest.mark.asyncio
@pytest.mark.fault("F2")
async def test_a_silent_replica_that_waits_in_line_is_lost_once_and_holds_up_no_publication() -> None:
    clock = Clock()
    coordinator = await started(ClearedRows(), clock)
    await coordinator.reserve("a", NOW, 2, wait_s=0.0)
    await coordinator.heartbeat("b", NOW, 2, progress_of(), report_of("b"))
    waiting = await a_waiting_reserve(coordinator)
    await clock.passes(30.0)
    status = coordinator.status()
    assert status.account.events[Event.REPLICA_LOST] == 2, "replica a is silent too"
    assert status.able == ()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_change_does_not_wake_a_replica_that_has_to_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = made(ClearedRows(), learner={"groups_per_step": 3, "group_size": 2})
    failing = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    failure = Failure(failure_class=FailureClass.INFRA, reason="engine")
    coordinator.pause(1)
    await coordinator.fail([FailedTicket(key=each.key, incarnation=1, failure=failure) for each in failing])
    waiting = [asyncio.create_task(coordinator.reserve(name, NOW, 1, wait_s=FAR_S)) for name in ("a", "b")]
    await asyncio.sleep(0)
    asked = asked_in(monkeypatch)
    await coordinator.resume(1)
    assert (await soon(waiting[1])).tickets
    assert asked == ["b"]
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_repeated_heartbeat_is_answered_again() -> None:
    coordinator = made(ClearedRows())
    [held] = (await coordinator.reserve("a", NOW, 1, wait_s=0.0)).tickets
    await coordinator.heartbeat("a", NOW, 0, progress_of(held), report_of("a"))
    failure = Failure(failure_class=FailureClass.INFRA, reason="x")
    await coordinator.fail([FailedTicket(key=held.key, incarnation=1, failure=failure)])
    again = progress_of(held)
    first = await coordinator.heartbeat("a", NOW, 0, again, report_of("a"))
    assert first.ended == (held.key,)
    assert await coordinator.heartbeat("a", NOW, 0, again, report_of("a")) == first


@pytest.mark.asyncio
async def test_a_deployment_is_told_of_its_own_replicas_only() -> None:
    coordinator = made(ClearedRows())
    for name, replicas in (("d", 2), ("e", 1)):
        generators = Deployment(id=name, role=Role.GENERATOR, host="h", pid=1, replicas=replicas)
        await coordinator.attach(generators, shared=SHARED)
    for replica in ("own", "other"):
        await coordinator.heartbeat(replica, NOW, 2, progress_of(), report_of(replica))
    told = coordinator.own_replicas("d", ["own", "not started yet"])
    assert (told.wanted, list(told.views), list(told.reports)) == (2, ["own"], ["own"])
    coordinator.registry.scale(1, because="why")
    assert coordinator.own_replicas("d", []).wanted == coordinator.registry.wanted()["d"]
    assert coordinator.own_replicas("gone", []).wanted is None


@pytest.mark.asyncio
@pytest.mark.fault("F2")
async def test_a_stall_of_the_buffers_process_expires_nothing_that_is_still_held() -> None:
    clock = Clock()
    coordinator = await started(ClearedRows(), clock)
    [held, lost] = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    await clock.passes(1.0)
    clock.now_s += SILENT_S
    await everything_else_runs()  # it looks before the heartbeats that waited
    assert coordinator.status().account.events[Event.TICKET_EXPIRED] == 0
    assert [view.replica for view in coordinator.status().replicas] == ["a"]
    await coordinator.heartbeat("a", NOW, 0, progress_of(held), report_of("a"))
    clock.now_s += 3.0
    await everything_else_runs()  # late again, because the machine is busy
    assert coordinator.status().account.events[Event.TICKET_EXPIRED] == 1, "no heartbeat names the second one"
    snapshot = coordinator.snapshot(1).buffer
    assert [group.ticket.key for group in snapshot.open] == [held.key]
    assert [prompt.group for prompt in snapshot.waiting] == [lost.group]


@pytest.mark.asyncio
@pytest.mark.fault("F40")
async def test_rows_that_a_dead_replica_stored_after_its_ticket_expired_are_cleared() -> None:
    clock, asked = Clock(), [0]

    async def stored_keys() -> list[str]:
        asked[0] += 1
        if asked[0] == 1:
            raise TimeoutError("the index is late")
        return [lost.key, kept.key]

    rows = ClearedRows(stored_keys)
    coordinator = await started(rows, clock)
    [lost, kept] = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    for _ in range(int(2 * SWEEP_EVERY_S)):
        await coordinator.heartbeat("a", NOW, 0, progress_of(kept), report_of("a"))
        await clock.passes(1.0)
    assert rows.cleared == [[lost.key], [lost.key]], "once when the ticket expired, once because rows came later"
    assert asked == [2], "a search that failed is repeated a minute later"


async def performed(call: Callable[[], Any]) -> None:
    """Performs a call that may be a coroutine."""
    answer = call()
    if inspect.isawaitable(answer):
        await answer


@pytest.mark.asyncio
@pytest.mark.parametrize("role", Role)
@pytest.mark.fault("F32")
async def test_attach_refuses_a_deployment_with_another_config(role: Role) -> None:
    coordinator = made(ClearedRows())
    deployment = Deployment(id="d", role=role, host="h", pid=8)
    with pytest.raises(RunMismatch, match=r"run\.seed = 1234, but the run was started with"):
        await coordinator.attach(deployment, shared=SHARED | {"run.seed": 1234})
    assert coordinator.registry.live() == [], "it is not admitted"


@pytest.mark.asyncio
@pytest.mark.parametrize("role", Role)
@pytest.mark.fault("F32")
async def test_a_deployment_with_other_prompts_is_refused_and_the_error_names_what_differs(role: Role) -> None:
    coordinator = made(ClearedRows(), tasks=4)
    own = [Task(question=str(i), prompt=str(i), answer="") for i in range(4)]
    other = [*own[:2], Task(question="2", prompt="2", answer="other"), own[3]]
    deployment = Deployment(id="d", role=role, host="h", pid=8)
    source = "data.path = rows.jsonl on h"
    message = r"rows\.jsonl on h has 4 training prompts, .*: they differ from number 3 on, which is '2' in the run"
    with pytest.raises(RunMismatch, match=message):
        await coordinator.attach(deployment, shared=SHARED, prompts=prompt_data(other, source=source))
    assert coordinator.registry.live() == [], "it is not admitted"
    await coordinator.attach(deployment, shared=SHARED, prompts=prompt_data(own, source=source))
    assert coordinator.registry.live() == [deployment]


@pytest.mark.asyncio
@pytest.mark.fault("F13")
async def test_every_call_of_a_learner_that_was_replaced_is_refused_and_changes_nothing() -> None:
    now_s = 0.0
    coordinator = made(ClearedRows(), clock=lambda: now_s)
    assert (await coordinator.attach(FIRST, shared=SHARED)).incarnation == 1
    assert (await coordinator.attach(FIRST, shared=SHARED)).incarnation == 1, "a repeated call starts no incarnation"
    tickets = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    await coordinator.commit([finished(ticket) for ticket in tickets])
    lease = await coordinator.lease(1, wait_s=0.0)
    assert isinstance(lease, Lease)
    coordinator.set_state(1, RunState.RUNNING)
    now_s = SILENT_S
    assert (await coordinator.attach(SECOND, shared=SHARED)).incarnation == 2
    before = coordinator.status()
    assert before.state is RunState.STARTING, "the new learner loads its model, and generators wait for it"
    calls: list[Callable[[], Any]] = [
        lambda: coordinator.lease(1, wait_s=0.0),
        lambda: coordinator.ack(1, 0),
        lambda: coordinator.skip(1, 0),
        lambda: coordinator.give_back(1, 0),
        lambda: coordinator.rows_lost(1, [tickets[0].key]),
        lambda: coordinator.published(NOW),
        lambda: coordinator.pause(1),
        lambda: coordinator.resume(1),
        lambda: coordinator.set_state(1, RunState.FAILED, "late"),
    ]
    for call in calls:
        with pytest.raises(Fenced, match=r"incarnation 1.*incarnation 2.*has taken over"):
            await performed(call)
    after = coordinator.status()
    assert after.account.events[Event.LEARNER_FENCED] == len(calls)
    assert (after.version, after.counts, after.state, after.published) == (
        before.version,
        before.counts,
        before.state,
        before.published,
    )
    assert coordinator.registry.keep(FIRST.id) is Attachment.GONE
    # The groups of the first learner stay, because version 1.0 is an ancestor of incarnation 2.
    assert await coordinator.lease(2, wait_s=0.0) == msgspec.structs.replace(lease, incarnation=2)
    assert (await coordinator.ack(2, 0)).status.version == Version(2, 1)
    assert (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).refusal is Refusal.STALENESS
    assert (await coordinator.reserve("a", Version(1, 1), 2, wait_s=0.0)).refusal is Refusal.OLD_INCARNATION


@pytest.mark.asyncio
@pytest.mark.fault("F13")
@pytest.mark.parametrize("restores", [False, True])
async def test_a_lease_call_that_waits_is_refused_when_another_learner_takes_over(restores: bool) -> None:
    now_s = 0.0
    coordinator = made(ClearedRows(), clock=lambda: now_s)
    await coordinator.attach(FIRST, shared=SHARED)
    restored = Restored(snapshot=coordinator.snapshot(1), lineage=Lineage((NOW,))) if restores else None
    waiting = asyncio.create_task(coordinator.lease(1, wait_s=FAR_S))
    await asyncio.sleep(0)
    now_s = SILENT_S
    await coordinator.attach(SECOND, shared=SHARED, restored=restored)
    with pytest.raises(Fenced):
        await soon(waiting)


@pytest.mark.asyncio
@pytest.mark.fault("F13")
async def test_a_learner_without_the_trained_weights_is_refused_with_what_to_do() -> None:
    now_s = 0.0
    coordinator = made(ClearedRows(), clock=lambda: now_s)
    await coordinator.attach(FIRST, shared=SHARED)
    tickets = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    await coordinator.commit([finished(ticket) for ticket in tickets])
    await coordinator.lease(1, wait_s=0.0)
    await coordinator.ack(1, 0)
    with pytest.raises(RunLocked):
        coordinator.check_attach(SECOND, shared=SHARED)
    now_s = SILENT_S
    for refused in (coordinator.check_attach, coordinator.attach):
        with pytest.raises(LearnerNotRestored, match=r"has trained 1 steps.*asyncrl down"):
            await performed(functools.partial(refused, SECOND, shared=SHARED))
    assert coordinator.status().version == Version(1, 1)
    assert (await coordinator.attach(FIRST, shared=SHARED)).incarnation == 1, "the learner itself has the weights"


@pytest.mark.asyncio
@pytest.mark.parametrize("state", [RunState.FAILED, RunState.FINISHED, RunState.CLOSING])
async def test_no_learner_takes_over_a_run_that_is_over(state: RunState) -> None:
    now_s = 0.0
    coordinator = made(ClearedRows(), clock=lambda: now_s)
    await coordinator.attach(FIRST, shared=SHARED)
    generator = Deployment(id="g", role=Role.GENERATOR, host="h", pid=8)
    await coordinator.attach(generator, shared=SHARED)
    coordinator.set_state(1, state, "rank 1 died")
    coordinator.registry.detach(FIRST.id)
    with pytest.raises(LearnerNotRestored, match=f"is {state}: rank 1 died"):
        await coordinator.attach(SECOND, shared=SHARED)
    restores = functools.partial(coordinator.check_attach, SECOND, shared=SHARED, restores=True)
    with contextlib.nullcontext() if state is RunState.CLOSING else pytest.raises(LearnerNotRestored):
        restores()  # a learner that was killed while it closed the run may go on
    assert (await coordinator.attach(generator, shared=SHARED)).incarnation == 1


@pytest.mark.asyncio
async def test_the_next_learner_continues_a_preempted_run_with_the_generators_that_wait_for_it() -> None:
    coordinator = made(ClearedRows())
    snapshot = await trained_once(coordinator)
    generator = Deployment(id="g", role=Role.GENERATOR, host="h", pid=8)
    await coordinator.attach(generator, shared=SHARED)
    coordinator.set_state(1, RunState.PREEMPTED)
    assert not coordinator.registry.detach(FIRST.id)
    with pytest.raises(LearnerNotRestored, match=r"has trained 1 steps.*asyncrl down"):
        coordinator.check_attach(SECOND, shared=SHARED)
    with pytest.raises(RunLocked, match="start the learner first"):
        coordinator.check_attach(msgspec.structs.replace(generator, id="late"), shared=SHARED)
    restored = Restored(snapshot=snapshot, lineage=Lineage((snapshot.version,)))
    assert (await coordinator.attach(SECOND, shared=SHARED, restored=restored)).incarnation == 2
    assert coordinator.registry.state is RunState.STARTING
    coordinator.check_attach(msgspec.structs.replace(generator, id="late"), shared=SHARED)
    coordinator.set_state(2, RunState.PREEMPTED)
    coordinator.registry.detach(SECOND.id)
    assert coordinator.registry.detach(generator.id), "the last one that stops waiting ends the run's actors"
    with pytest.raises(RunLocked, match="start this command again"):
        coordinator.check_attach(FIRST, shared=SHARED, restores=True)


async def reports(coordinator: Coordinator, actor: str, number: int) -> GeneratorTotals:
    """Lets an actor on 2 GPUs report `number` of everything that it counts. Returns the totals of the run."""
    states = {"generating": float(number)}
    report = msgspec.structs.replace(
        report_of(actor),
        samples=number,
        weight_updates=number,
        state_seconds=states,
        device_time=(device_time(Pool.GENERATORS, Devices.of(gpus=2.0, processes=1), states),),
    )
    await coordinator.heartbeat(actor, NOW, 2, progress_of(), report)
    return coordinator.brief_status().generators


def totals_of(number: int, *, mean_s: float) -> GeneratorTotals:
    """Returns the totals of replicas that reported `number` together, and `mean_s` as their mean seconds."""
    time = device_time(Pool.GENERATORS, Devices.of(gpus=2.0, processes=1), {"generating": float(number)})
    return GeneratorTotals(
        samples=number, weight_updates=number, state_seconds={"generating": mean_s}, device_time=(time,)
    )


@pytest.mark.asyncio
async def test_totals_of_generators_that_outlive_a_learner_are_counted_once() -> None:
    now_s = 0.0
    coordinator = made(ClearedRows(), clock=lambda: now_s)
    snapshot = await trained_once(coordinator)
    assert await reports(coordinator, "a", 10) == totals_of(10, mean_s=10.0)
    recorded = totals_of(9, mean_s=9.0)
    restored = Restored(snapshot=snapshot, lineage=Lineage((snapshot.version,)), generators=recorded)
    now_s = SILENT_S
    await coordinator.attach(SECOND, shared=SHARED, restored=restored)
    assert await reports(coordinator, "a", 30) == totals_of(30, mean_s=30.0), "9 of them are in the records"
    await coordinator.leave("a")
    assert await reports(coordinator, "b", 2) == totals_of(32, mean_s=16.0), "a replica that is gone still counts"


@pytest.mark.asyncio
async def test_totals_of_an_earlier_coordinator_are_added_once_also_over_two_learners() -> None:
    now_s = 0.0
    snapshot = await trained_once(made(ClearedRows()))
    coordinator = made(ClearedRows(), clock=lambda: now_s)
    assert await reports(coordinator, "a", 1) == totals_of(1, mean_s=1.0), "it may report before a learner attaches"
    lineage = Lineage((snapshot.version,))
    restored = Restored(snapshot=snapshot, lineage=lineage, generators=totals_of(9, mean_s=9.0))
    for _ in range(2):  # the second call repeats the first one, whose answer was lost
        await coordinator.attach(SECOND, shared=SHARED, restored=restored)
    assert await reports(coordinator, "a", 3) == totals_of(12, mean_s=12.0)
    now_s = SILENT_S
    later = Restored(snapshot=snapshot, lineage=lineage.child(snapshot.version), generators=totals_of(12, mean_s=12.0))
    await coordinator.attach(msgspec.structs.replace(SECOND, id="third"), shared=SHARED, restored=later)
    assert await reports(coordinator, "a", 4) == totals_of(13, mean_s=13.0)


@pytest.mark.asyncio
async def test_a_learner_without_a_checkpoint_begins_a_run_that_was_preempted_before_its_first_step() -> None:
    coordinator = made(ClearedRows())
    await coordinator.attach(FIRST, shared=SHARED)
    await coordinator.attach(Deployment(id="g", role=Role.GENERATOR, host="h", pid=8), shared=SHARED)
    coordinator.set_state(1, RunState.PREEMPTED)
    coordinator.registry.detach(FIRST.id)
    assert (await coordinator.attach(SECOND, shared=SHARED)).incarnation == 2
    assert coordinator.registry.state is RunState.STARTING


@pytest.mark.asyncio
async def test_rows_of_a_dropped_step_are_cleared_once_and_not_before_the_learner_has_saved() -> None:
    rows = ClearedRows()
    coordinator = made(rows, data={"drop_last": True, "epochs": 1}, tasks=1)
    [ticket] = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    await coordinator.commit([finished(ticket)])
    for _ in range(2):
        assert await coordinator.lease(1, wait_s=0.0) is LeaseWait.FINISHED
    await everything_else_runs()
    assert rows.cleared == [], "a save may still read them"
    for _ in range(2):
        coordinator.clear_dropped(1)
    await everything_else_runs()
    assert rows.cleared == [[ticket.key]]


async def trained_once(
    coordinator: Coordinator, *, shared: Mapping[str, object] = SHARED, learner: Deployment = FIRST
) -> RunSnapshot:
    """Trains the first step of a run. Returns the snapshot of its ack."""
    await coordinator.attach(learner, shared=shared)
    tickets = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    await coordinator.commit([finished(ticket) for ticket in tickets])
    await coordinator.lease(1, wait_s=0.0)
    acked = await coordinator.ack(1, 0, snapshot=True)
    assert acked.snapshot is not None
    return msgspec.msgpack.decode(msgspec.msgpack.encode(acked.snapshot), type=RunSnapshot)


@pytest.mark.asyncio
@pytest.mark.fault("F8")
async def test_a_learner_that_restored_a_checkpoint_continues_with_the_next_prompts() -> None:
    snapshot = await trained_once(made(ClearedRows()))
    again, whole = made(ClearedRows()), made(ClearedRows())
    restored = Restored(snapshot=snapshot, lineage=Lineage((snapshot.version,)))
    assert (await again.attach(SECOND, shared=SHARED, restored=restored)).incarnation == 2
    assert again.status().version == Version(2, 1)
    assert again.status().account.closed
    assert (await again.reserve("a", Version(1, 0), 2, wait_s=0.0)).refusal is Refusal.STALENESS
    after = (await again.reserve("a", Version(2, 1), 2, wait_s=0.0)).tickets
    await trained_once(whole)
    next_ones = (await whole.reserve("a", Version(1, 1), 2, wait_s=0.0)).tickets
    assert [(t.group, t.task, t.seed) for t in after] == [(t.group, t.task, t.seed) for t in next_ones]


@pytest.mark.asyncio
@pytest.mark.fault("F6")
async def test_a_learner_goes_back_to_its_checkpoint_and_the_generators_go_on() -> None:
    now_s = 0.0

    async def stored() -> list[str]:
        return ["0.0", "1.0", "2.0", "3.0", "4.0"]

    rows = ClearedRows(stored)
    limit = {"staleness": {"max_versions": 1}}
    shared = shared_config(Config.model_validate(CONFIG | limit))
    coordinator = made(rows, clock=lambda: now_s, **limit)
    snapshot = await trained_once(coordinator, shared=shared)
    coordinator.set_state(1, RunState.RUNNING)
    trained, also_trained, stays, continued = (await coordinator.reserve("a", Version(1, 1), 4, wait_s=0.0)).tickets
    await coordinator.commit([finished(trained), finished(also_trained)])
    await coordinator.lease(1, wait_s=0.0)
    assert (await coordinator.ack(1, 1)).clearable == (), "their rows stay for a learner that goes back"
    now_s = SILENT_S
    restored = Restored(snapshot=snapshot, lineage=Lineage((snapshot.version,)))
    lineage = await coordinator.attach(SECOND, shared=shared, restored=restored)
    assert (lineage.incarnation, coordinator.status().version) == (2, Version(2, 1))
    assert coordinator.status().state is RunState.STARTING, "generators do not take the restart for a stall"
    with pytest.raises(Fenced):
        await coordinator.ack(1, 2)
    lost = finished(continued, versions=[Version(1, 2)])
    assert await coordinator.commit([finished(stays), lost]) == [CommitOutcome.ACCEPTED, CommitOutcome.OLD_INCARNATION]
    lease = await coordinator.lease(2, wait_s=0.0)
    assert isinstance(lease, Lease)
    assert [group.meta.key for group in lease.groups] == [trained.key, also_trained.key]
    assert coordinator.status().counts.waiting == 1, "the prompt of the group with a token of a lost step"
    assert coordinator.status().account.closed
    await everything_else_runs()
    assert rows.cleared == [["0.0", "1.0"]], "the first learner did not clear them before it died"


@pytest.mark.asyncio
async def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing() -> None:
    now_s = 0.0
    coordinator = made(ClearedRows(), clock=lambda: now_s)
    snapshot = await trained_once(coordinator)
    now_s = SILENT_S
    await coordinator.attach(SECOND, shared=SHARED, restored=Restored(snapshot=snapshot, lineage=Lineage((NOW,))))
    now_s = 2 * SILENT_S
    before = coordinator.snapshot(2)
    for branches in ((), (Version(1, 1), Version(2, 1)), (NOW,)):
        with pytest.raises(LearnerNotRestored, match="of another run with this name"):
            await coordinator.attach(
                FIRST, shared=SHARED, restored=Restored(snapshot=snapshot, lineage=Lineage(branches))
            )
    assert coordinator.snapshot(2) == before


@pytest.mark.asyncio
@pytest.mark.fault("F18")
async def test_a_checkpoint_that_the_run_made_on_another_cluster_is_refused_where_its_generators_still_live() -> None:
    """The learner on the other cluster has issued attempts with the numbers of attempts that run here. The rows of one
    would be trained with the metadata of the other."""
    now_s = 0.0
    here, there = made(ClearedRows(), clock=lambda: now_s), made(ClearedRows())
    snapshot = await trained_once(here)
    second = Lineage((snapshot.version,))
    await there.attach(SECOND, shared=SHARED, restored=Restored(snapshot=snapshot, lineage=second))
    elsewhere = there.snapshot(2)
    third = msgspec.structs.replace(SECOND, id="third")
    restored = Restored(snapshot=elsewhere, lineage=second.child(elsewhere.version))
    now_s = SILENT_S
    with pytest.raises(LearnerNotRestored, match="a learner on another cluster wrote it"):
        await here.attach(third, shared=SHARED, restored=restored)
    here_again = Restored(snapshot=snapshot, lineage=second.child(snapshot.version))
    assert (await here.attach(third, shared=SHARED, restored=here_again)).incarnation == 3


@pytest.mark.asyncio
async def test_only_a_buffer_that_lived_on_says_that_the_learner_goes_back(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    lived, new = made(ClearedRows(), clock=lambda: now_s), made(ClearedRows())
    snapshot = await trained_once(lived)
    now_s = SILENT_S
    restored = Restored(snapshot=snapshot, lineage=Lineage((snapshot.version,)))
    await new.attach(SECOND, shared=SHARED, restored=restored)
    assert "goes back" not in caplog.text
    await lived.attach(SECOND, shared=SHARED, restored=restored)
    assert "the learner goes back from 1.1 to 1.1" in caplog.text


@pytest.mark.asyncio
@pytest.mark.fault("F32")
async def test_a_learner_in_the_directory_of_another_run_of_this_name_is_refused_with_both_nonces() -> None:
    """Its lineage alone does not show it: both runs may have been resumed at the same steps."""
    now_s = 0.0
    coordinator = made(ClearedRows(), clock=lambda: now_s)
    first, second = (msgspec.structs.replace(each, nonce="n1") for each in (FIRST, SECOND))
    other = msgspec.structs.replace(second, nonce="n0")
    snapshot = await trained_once(coordinator, learner=first)
    restored = Restored(snapshot=snapshot, lineage=Lineage((snapshot.version,)))
    now_s = SILENT_S
    before = coordinator.snapshot(1)
    for refused in (
        functools.partial(coordinator.attach, other, restored=restored),
        functools.partial(coordinator.check_attach, other, restores=True),
    ):
        with pytest.raises(
            LearnerNotRestored, match=r"has the nonce 'n1'.* another run .*the nonce 'n0'; set run\.dir"
        ):
            await performed(functools.partial(refused, shared=SHARED))
    assert coordinator.snapshot(1) == before
    assert (await coordinator.attach(second, shared=SHARED, restored=restored)).incarnation == 2


@pytest.mark.asyncio
async def test_a_snapshot_of_other_prompts_is_refused() -> None:
    snapshot = await trained_once(made(ClearedRows(), tasks=19))
    restored = Restored(snapshot=snapshot, lineage=Lineage((snapshot.version,)))
    with pytest.raises(DatasetError, match="are not those of this dataset"):
        await made(ClearedRows()).attach(SECOND, shared=SHARED, restored=restored)


@pytest.mark.asyncio
async def test_what_happens_to_groups_wakes_only_generators_that_can_get_a_ticket_in_the_order_of_their_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = made(ClearedRows())
    held = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    calls = [asyncio.create_task(coordinator.reserve(f"waits-{n}", NOW, 1, wait_s=FAR_S)) for n in range(1000)]
    await asyncio.sleep(0)
    asked = asked_in(monkeypatch)
    await coordinator.commit([finished(held[0])])
    await coordinator.heartbeat("a", NOW, 0, progress_of(held[1]), report_of("a"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert asked == [], "a commit frees no slot"
    await free_a_slot(coordinator, held[1].key)
    assert len((await calls[0]).tickets) == 1
    for _ in range(10):
        await asyncio.sleep(0)
    assert asked == ["waits-0"]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_run_that_is_closing_admits_no_group_also_to_a_replica_that_waits_for_one() -> None:
    coordinator = made(ClearedRows())
    held = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    coordinator.set_state(1, RunState.RUNNING)
    waiting = await a_waiting_reserve(coordinator)
    coordinator.set_state(1, RunState.CLOSING)
    assert await coordinator.commit([finished(ticket) for ticket in held]) == [CommitOutcome.ACCEPTED] * 2
    await coordinator.lease(1, wait_s=0.0)
    await coordinator.ack(1, 0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert (await coordinator.reserve("b", NOW, 1, wait_s=0.0)).refusal is Refusal.PAUSED
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_waiting_generator_is_seen_to_need_newer_weights_after_the_step_that_made_them() -> None:
    """The gate publishes on demand, so it must know why the replica gets no ticket, although its call only waits."""
    coordinator = made(ClearedRows())
    held = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    waiting = await a_waiting_reserve(coordinator)
    await coordinator.commit([finished(ticket) for ticket in held])
    await coordinator.lease(1, wait_s=0.0)
    status = (await coordinator.ack(1, 0)).status
    assert status.able == (AbleReplicas(version=NOW, replicas=1, stale=1),), "replica a has no free slot"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_waiting_generator_that_has_loaded_other_weights_asks_again() -> None:
    """Without its question, the gate would not know that it is refused at these weights too."""
    coordinator = made(ClearedRows())
    await trained_once(coordinator)
    coordinator.pause(1)
    waiting = await a_waiting_reserve(coordinator)
    await coordinator.heartbeat("b", Version(1, 1), 2, progress_of(), report_of("b"))
    assert [view.refused_for for view in coordinator.status().replicas if view.replica == "b"] == [None]
    for _ in range(5):
        await asyncio.sleep(0)
    assert [view.refused_for for view in coordinator.status().replicas if view.replica == "b"] == [Refusal.PAUSED]
    await coordinator.resume(1)
    assert [ticket.version for ticket in (await soon(waiting)).tickets] == [Version(1, 1)] * 2


@pytest.mark.asyncio
async def test_the_learner_hears_at_once_that_the_prompts_have_run_out() -> None:
    coordinator = made(ClearedRows(), data={"epochs": 1}, tasks=1)
    [ticket] = (await coordinator.reserve("a", NOW, 1, wait_s=0.0)).tickets
    await coordinator.commit([finished(ticket)])
    waiting = asyncio.create_task(coordinator.lease(1, wait_s=FAR_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert (await coordinator.reserve("a", NOW, 1, wait_s=0.0)).refusal is Refusal.NO_PROMPTS
    lease = await soon(waiting)
    assert isinstance(lease, Lease)
    assert len(lease.groups) == 1


@pytest.mark.asyncio
async def test_an_evaluation_waits_for_a_replica_that_has_loaded_its_version() -> None:
    coordinator = made(ClearedRows())
    await coordinator.heartbeat("b", NOW, 2, progress_of(), report_of("b"))
    assert await coordinator.replica_at(NOW, other_than=(), wait_s=0.0) == "b"
    assert await coordinator.replica_at(NOW, other_than=("b",), wait_s=0.0) is None
    waiting = asyncio.create_task(coordinator.replica_at(NOW, other_than=("b",), wait_s=FAR_S))
    await asyncio.sleep(0)
    await coordinator.heartbeat("c", None, 2, progress_of(), report_of("c"))
    await asyncio.sleep(0)
    assert not waiting.done()
    await coordinator.heartbeat("c", NOW, 2, progress_of(), report_of("c"))
    assert await soon(waiting) == "c"


@pytest.mark.asyncio
async def test_the_brief_status_agrees_with_the_whole_one_and_does_not_grow_with_the_run() -> None:
    sections = {"buffer": {"capacity_bytes": 10**12}, "learner": {"groups_per_step": 1000}}
    coordinator = made(ClearedRows(), clock=lambda: 0.0, **sections)
    shared = shared_config(Config.model_validate(CONFIG | sections))
    sizes: list[int] = []
    for replicas in (1, 200):
        for number in range(replicas):
            name = f"replica-{number}"
            await coordinator.attach(Deployment(id=name, role=Role.GENERATOR, host="h", pid=number), shared=shared)
            await coordinator.heartbeat(name, NOW, 2, progress_of(), report_of(name))
            await coordinator.reserve(name, NOW, 2, wait_s=0.0)
        brief, whole = coordinator.brief_status(), coordinator.status()
        for field in BriefStatus.__struct_fields__:
            assert getattr(brief, field) == getattr(whole, field), field
        assert brief.totals.replicas == len(whole.reports) == len(whole.replicas) == replicas
        assert (brief.oldest_replica_step, brief.learner_attached) == (0, False)
        sizes.append(len(msgspec.msgpack.encode(brief)))
    assert sizes[1] < sizes[0] + 50, "only numbers with more digits"


@pytest.mark.asyncio
async def test_an_overtaken_heartbeat_changes_neither_the_version_nor_the_report_of_its_replica() -> None:
    coordinator = made(ClearedRows())
    late = progress_of()
    await coordinator.heartbeat("a", NOW, 1, progress_of(), msgspec.structs.replace(report_of("a"), samples=7))
    assert await coordinator.heartbeat("a", None, 2, late, report_of("a")) == Renewal()
    status = coordinator.status()
    assert [(view.version, view.free_slots) for view in status.replicas] == [(NOW, 1)]
    assert (status.reports["a"].samples, status.totals.samples) == (7, 7)


@pytest.mark.asyncio
async def test_a_lease_has_the_tasks_of_the_logged_groups_only_and_a_snapshot_has_none() -> None:
    coordinator = made(ClearedRows())
    tickets = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    await coordinator.commit([finished(ticket) for ticket in tickets])
    lease = await coordinator.lease(1, wait_s=0.0)
    assert isinstance(lease, Lease)
    assert (len(lease.groups), lease.logged_tasks) == (2, (tickets[0].task,))
    snapshot = coordinator.snapshot(1)
    assert [group.ticket.task for group in snapshot.buffer.open] == [NO_TASK, NO_TASK]
    again = made(ClearedRows())
    await again.attach(FIRST, shared=SHARED, restored=Restored(snapshot=snapshot, lineage=Lineage((NOW,))))
    released = await again.lease(2, wait_s=0.0)
    assert isinstance(released, Lease)
    assert released.logged_tasks == lease.logged_tasks


@pytest.mark.asyncio
async def test_a_running_number_that_is_wrong_is_found_at_a_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = made(ClearedRows())
    tickets = (await coordinator.reserve("a", NOW, 2, wait_s=0.0)).tickets
    await coordinator.commit([finished(ticket) for ticket in tickets])
    coordinator.snapshot(1)
    assert coordinator.status().account.closed
    assert "bug of asyncrl" not in caplog.text
    coordinator.buffer.groups.ready.popitem()
    assert not coordinator.status().account.closed, "the ledger counts the issued tokens by itself"
    coordinator.snapshot(1)
    assert "bug of asyncrl" in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("change", ["ack", "skip", "resume", "leave", "rows_lost"])
async def test_whatever_frees_a_slot_wakes_a_waiting_generator(change: str) -> None:
    coordinator = made(ClearedRows(), staleness={"max_versions": 2}, buffer={"capacity_groups": 4})
    if change == "resume":
        coordinator.pause(1)
    else:
        tickets = (await coordinator.reserve("a", NOW, 4, wait_s=0.0)).tickets
        await coordinator.commit([finished(ticket) for ticket in tickets[:3]])
        lease = await coordinator.lease(1, wait_s=0.0)
        assert isinstance(lease, Lease)
    waiting = asyncio.create_task(coordinator.reserve("b", NOW, 1, wait_s=FAR_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    match change:
        case "ack":
            await coordinator.ack(1, 0)
        case "skip":
            await coordinator.skip(1, 0)
        case "resume":
            await coordinator.resume(1)
        case "leave":
            await coordinator.leave("a")
        case "rows_lost":
            await coordinator.rows_lost(1, [tickets[2].key])
    assert len((await soon(waiting)).tickets) == 1
