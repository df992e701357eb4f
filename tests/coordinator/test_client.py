"""The typed client: the same calls give the same answers in the coordinator's process and over Ray."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from buffer_scenes import finished
from local_ray import end_actor, local_ray

from asyncrl.buffer.records import CommitOutcome, FailedTicket, Failure, Lease, LeaseWait
from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Version
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorActor, CoordinatorClient, perform
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import Deployment, Registry
from asyncrl.data.prompts import Task
from asyncrl.errors import ActorGone, CallTimeout, FailureClass, RunLocked

NOW = Version(1, 0)
CONFIG = Config.model_validate({"learner": {"groups_per_step": 2, "group_size": 2}, "staleness": {"max_versions": 0}})
TASKS = [Task(question=str(i), prompt=str(i), answer="") for i in range(20)]
TIMEOUT_S = 60.0


class NoRows:
    """A row client of a run in which no row is stored."""

    async def clear(self, keys: Any) -> None:
        pass

    async def keys(self) -> list[str]:
        return []


@asynccontextmanager
async def in_process() -> AsyncIterator[CoordinatorClient]:
    yield CoordinatorClient(partial(perform, Coordinator(config=CONFIG, tasks=TASKS, rows=NoRows())))


def actor() -> Any:
    return ray.remote(CoordinatorActor).options(num_cpus=0, max_concurrency=100).remote(
        config=CONFIG, tasks=TASKS
    )  # fmt: skip


@asynccontextmanager
async def over_ray() -> AsyncIterator[CoordinatorClient]:
    handle = actor()
    yield CoordinatorClient.over_ray(handle, timeout_s=TIMEOUT_S)
    ray.kill(handle)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(cpus=1, namespace=uuid.uuid4().hex):
        yield


Opened = Callable[[], AbstractAsyncContextManager[CoordinatorClient]]


@pytest.fixture(params=["in process", pytest.param("over Ray", marks=[pytest.mark.slow, pytest.mark.integration])])
def opened(request: pytest.FixtureRequest) -> Opened:
    if request.param == "in process":
        return in_process
    request.getfixturevalue("cluster")
    return over_ray


@pytest.mark.asyncio
async def test_a_group_goes_from_its_ticket_to_its_ack(opened: Opened) -> None:
    async with opened() as client:
        tickets = (await client.call(Coordinator.reserve, "a", NOW, 9, wait_s=0.0)).tickets
        assert len(tickets) == 2
        assert await client.call(Coordinator.lease, 1, wait_s=0.0) is LeaseWait.NOT_ENOUGH_READY
        outcomes = await client.call(Coordinator.commit, [finished(ticket) for ticket in tickets])
        assert outcomes == [CommitOutcome.ACCEPTED] * 2
        lease = await client.call(Coordinator.lease, 1, wait_s=TIMEOUT_S)
        assert isinstance(lease, Lease)
        status = (await client.call(Coordinator.ack, lease.incarnation, lease.step)).status
        assert status.version == Version(1, 1)
        assert status.account.closed


@pytest.mark.asyncio
async def test_each_door_answers_and_its_errors_arrive_unchanged(opened: Opened) -> None:
    shared = shared_config(CONFIG)
    first, second = (Deployment(id=name, role=Role.LEARNER, host="h", pid=7) for name in ("first", "second"))
    failure = Failure(failure_class=FailureClass.DATA, reason="x")
    async with opened() as client:
        await client.call(Coordinator.attach, first, shared=shared)
        with pytest.raises(RunLocked, match="pid 7 on h"):
            await client.call(Coordinator.check_attach, second, shared=shared)
        assert await client.call(Registry.keep, first.id)
        [ticket] = (await client.call(Coordinator.reserve, "a", NOW, 1, wait_s=0.0)).tickets
        await client.call(Coordinator.set_state, 1, RunState.CLOSING, "why")
        await client.call(Coordinator.fail, [FailedTicket(key=ticket.key, incarnation=1, failure=failure)])
        await client.call(Coordinator.heldout_failed, "1", failure)
        [count] = await client.call(Coordinator.failure_counts, 1, wait_s=TIMEOUT_S)
        assert (count.rollouts, count.groups) == (2, 1)
        status = await client.call(Coordinator.status)
        assert (status.state, status.message, status.deployments) == (RunState.CLOSING, "why", (first,))


@pytest.mark.asyncio
async def test_the_deadline_of_a_call_includes_the_wait_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[tuple[str, float]] = []

    async def finished_at_once(ref: Any, *, timeout_s: float, what: str) -> None:
        deadlines.append((what, timeout_s))

    monkeypatch.setattr("asyncrl.coordinator.client.finished", finished_at_once)
    handle = SimpleNamespace(perform=SimpleNamespace(remote=lambda call: call))
    client = CoordinatorClient.over_ray(handle, timeout_s=30.0)
    await client.call(Coordinator.lease, 1, wait_s=5.0)
    await client.call(Coordinator.status)
    assert deadlines == [("the buffer's lease", 35.0), ("the buffer's status", 30.0)]


@pytest.mark.asyncio
async def test_a_late_call_is_repeated_if_the_client_has_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [CallTimeout("late"), CallTimeout("late"), "status"]

    async def finished(*_: Any, **__: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("asyncrl.coordinator.client.finished", finished)
    handle = SimpleNamespace(perform=SimpleNamespace(remote=lambda call: call))
    patient = CoordinatorClient.over_ray(handle, timeout_s=30.0, patience_s=60.0)
    assert await patient.call(Coordinator.status) == "status"
    answers.append(CallTimeout("late"))
    with pytest.raises(CallTimeout):
        await CoordinatorClient.over_ray(handle, timeout_s=30.0).call(Coordinator.status)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.usefixtures("cluster")
async def test_a_call_of_an_actor_that_has_ended_says_so() -> None:
    handle = actor()
    client = CoordinatorClient.over_ray(handle, timeout_s=TIMEOUT_S)
    await client.call(Coordinator.start)
    end_actor(handle)
    with pytest.raises(ActorGone, match="the buffer's status"):
        await client.call(Coordinator.status)
