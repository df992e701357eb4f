"""The containers: after any pushes and discards, entries come out in order, and the container is empty at the end."""

from buffer_scenes import Scene
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.groups import DuePrompt, ReadyQueue, Slot, WaitingPrompts
from asyncrl.buffer.records import Ticket
from asyncrl.common.version import Version
from asyncrl.data.prompts import Task

TASK = Task(question="q", prompt="p", answer="a")


def ready(group: int, deadline: int) -> Slot:
    ticket = Ticket(
        group=group,
        attempt=0,
        task=TASK,
        seed=0,
        version=Version(1, deadline),
        max_staleness_versions=0,
        replica="a",
    )
    return Slot(ticket, 0, 0.0, 0.0, 0)


@given(deadlines=st.dictionaries(st.integers(0, 40), st.integers(0, 3), max_size=25), lost=st.sets(st.integers(0, 40)))
def test_ready_groups_come_by_deadline_then_prompt_order_also_after_losses(
    deadlines: dict[int, int], lost: set[int]
) -> None:
    queue = ReadyQueue()
    slots = {group: ready(group, deadline) for group, deadline in deadlines.items()}
    for slot in slots.values():
        queue.push(slot)
    queue.discard([slot for group, slot in slots.items() if group in lost])
    assert 0 not in queue.by_deadline.values()
    taken = [slot.ticket.group for slot in queue.take(queue.by_deadline.total())]
    assert taken == sorted(slots.keys() - lost, key=lambda group: (deadlines[group], group))
    assert (len(queue), queue.by_deadline) == (0, {})


@given(st.lists(st.integers(0, 40), unique=True), st.integers(0, 10))
def test_waiting_prompts_come_in_prompt_order(groups: list[int], popped_early: int) -> None:
    front = WaitingPrompts()
    early = groups[:popped_early]
    for batch in (early, groups[popped_early:]):
        for group in batch:
            front.push(DuePrompt(group=group, attempt=1, task=TASK, seed=0, issued=group % 2 == 0))
        assert front.issued_groups == sum(group % 2 == 0 for group in batch)
        assert [due.group for due in iter(lambda: front.pop(unless=lambda _: False), None)] == sorted(batch)
        assert (len(front), front.issued_groups) == (0, 0)


def test_a_group_that_was_lost_and_came_back_is_ready_once() -> None:
    scene = Scene(eta=1, per_step=1)
    (ticket,) = scene.reserve(1)
    scene.commit(ticket)
    scene.buffer.leases.rows_lost([ticket.key])
    scene.commit(*scene.reserve(1))
    assert scene.groups(scene.train()) == [0]
    assert scene.buffer.counts().ready == 0
