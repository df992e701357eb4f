"""A call that is repeated, because its answer was late, changes nothing and gets the answer of the first one."""

from functools import partial
from typing import Any

import pytest
from buffer_scenes import finished

from asyncrl.buffer.failure_records import FailedTicket, Failure, FailureCount
from asyncrl.buffer.ledger import Event
from asyncrl.buffer.records import CommitOutcome, Lease
from asyncrl.common.roles import Role
from asyncrl.common.version import Version
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator import repeats
from asyncrl.coordinator.attachments import Attachments
from asyncrl.coordinator.client import Call, CoordinatorClient, perform
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.failures import FailureReports
from asyncrl.coordinator.learner_calls import LearnerCalls
from asyncrl.coordinator.registry import Deployment, Registry
from asyncrl.coordinator.repeats import ONCE, Answers
from asyncrl.data.prompts import Task
from asyncrl.errors import FailureClass

NOW = Version(1, 0)
CONFIG = Config.model_validate({"learner": {"groups_per_step": 2, "group_size": 2}, "staleness": {"max_versions": 0}})
FAILURE = Failure(failure_class=FailureClass.DATA, reason="x")


class NoRows:
    """A row client of a run in which no row is stored."""

    async def clear(self, keys: Any) -> None:
        pass

    async def keys(self) -> list[str]:
        return []


class Late:
    """A coordinator whose first answer to each call is lost, except that of a reserve: a repeated one gets other
    tickets."""

    def __init__(self) -> None:
        tasks = [Task(question=str(i), prompt=str(i), answer="") for i in range(20)]
        self.coordinator = Coordinator(config=CONFIG, tasks=tasks, rows=NoRows())
        self._answers = Answers(kept_s=60.0)
        self.client = CoordinatorClient(self._send)

    async def _send(self, call: Call) -> Any:
        for _ in range(1 if call.method == "reserve" else 2):
            answer = await self._answers.to(call.id, partial(perform, self.coordinator, call))
        return answer


def test_all_calls_that_are_performed_once_exist() -> None:
    doors = {door.__name__: door for door in (Coordinator, LearnerCalls, Registry, FailureReports)}
    for name in ONCE:
        door, _, method = name.partition(".")
        assert callable(getattr(doors[door], method))


@pytest.mark.asyncio
async def test_the_path_of_a_group_counts_once_and_the_ledger_names_its_groups() -> None:
    scene = Late()
    call = scene.client.call
    tickets = (await call(Coordinator.reserve, "a", NOW, 2, wait_s=0.0)).tickets
    assert await call(Coordinator.commit, [finished(each) for each in tickets]) == [CommitOutcome.ACCEPTED] * 2
    assert isinstance(await call(LearnerCalls.lease, 1, wait_s=0.0), Lease)
    acked = await call(LearnerCalls.ack, 1, 0, snapshot=True)
    assert sorted(ended.group for ended in acked.ledger.ended) == [0, 1], "the audit reads it"
    assert acked.snapshot is not None
    [first, _] = (await call(Coordinator.reserve, "a", Version(1, 1), 2, wait_s=0.0)).tickets
    await call(Coordinator.fail, [FailedTicket(key=first.key, incarnation=1, failure=FAILURE)])
    await call(FailureReports.heldout_failed, FAILURE)
    await call(FailureReports.samples_failed, [FailureCount(first=FAILURE, rollouts=0, groups=0, samples=3)])
    [count] = scene.coordinator._parts.buffer.failures.counts()
    assert (count.rollouts, count.groups, count.samples) == (2, 1, 3)
    events = scene.coordinator.status().account.events
    assert (events[Event.COMMIT_DUPLICATE], events[Event.LEASE_CALL_REFUSED], events[Event.FAIL_REFUSED]) == (0, 0, 0)
    released = await call(LearnerCalls.release, 1, None)
    assert {*acked.over, *released} == {each.key for each in tickets}, "otherwise their rows would stay"


@pytest.mark.asyncio
async def test_the_last_deployment_that_leaves_hears_that_it_was_the_last_one() -> None:
    scene = Late()
    only = Deployment(id="d", role=Role.LEARNER, host="h", pid=7)
    await scene.client.call(Attachments.attach, only, shared=shared_config(CONFIG))
    assert await scene.client.call(Registry.detach, only.id), "otherwise no process ends the run's actors"


@pytest.mark.asyncio
async def test_answers_are_forgotten_after_their_time_and_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST", 3)
    now_s, performed = 0.0, list[str]()
    answers = Answers(kept_s=10.0, clock=lambda: now_s)

    async def perform(name: str) -> int:
        performed.append(name)
        return len(performed)

    for name in ("a", "b", "c", "d"):
        await answers.to(name, partial(perform, name))
    assert len(answers._known) == 3
    assert await answers.to("d", partial(perform, "d")) == 4
    now_s = 10.0
    assert await answers.to("d", partial(perform, "d")) == 5
    assert len(answers._known) == 1
    assert performed == ["a", "b", "c", "d", "d"]


@pytest.mark.asyncio
async def test_a_call_that_has_failed_is_performed_again() -> None:
    answers, failures = Answers(kept_s=10.0), [ValueError("first")]

    async def perform() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    with pytest.raises(ValueError, match="first"):
        await answers.to("id", perform)
    assert await answers.to("id", perform) == "answer"
