"""The orders of groups: after any moves, groups come out in order, and no place holds any at the end."""

from buffer_scenes import Clock, NumberedPrompts, Scene, finished, limits
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.fleet import Fleet
from asyncrl.buffer.groups import Groups, Slot
from asyncrl.buffer.ledger import Fate, Ledger
from asyncrl.buffer.records import Ticket, WaitingPrompt
from asyncrl.common.version import Version
from asyncrl.data.prompts import Task

TASK = Task(question="q", prompt="p", answer="a")


def no_groups() -> Groups:
    fleet = Fleet(max_infra_failures=1, timeout_s=10.0, clock=Clock())
    return Groups(limits=limits(), prompts=NumberedPrompts(0), ledger=Ledger(), fleet=fleet)


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
    return Slot(ticket, 0, 0.0, 0.0, 0, finished(ticket))


@given(deadlines=st.dictionaries(st.integers(0, 40), st.integers(0, 3), max_size=25), lost=st.sets(st.integers(0, 40)))
def test_ready_groups_come_by_deadline_then_prompt_order_also_after_losses(
    deadlines: dict[int, int], lost: set[int]
) -> None:
    groups = no_groups()
    slots = {group: ready(group, deadline) for group, deadline in deadlines.items()}
    for slot in slots.values():
        groups.enter(slot)
    groups.lose_rows([slot for group, slot in slots.items() if group in lost])
    assert 0 not in groups.ready_by_deadline.values()
    assert groups.ready_by_deadline == groups.unleased_by_deadline
    assert groups.account() == groups.recount()
    taken = [slot.ticket.group for slot in groups.lease(dict(groups.ready_by_deadline))]
    assert taken == sorted(slots.keys() - lost, key=lambda group: (deadlines[group], group))
    assert (len(groups.ready), groups.ready_by_deadline, groups.unleased_by_deadline) == (0, {}, {})
    assert groups.account() == groups.recount()


@given(st.lists(st.integers(0, 40), unique=True), st.integers(0, 10))
def test_waiting_prompts_come_in_prompt_order(waiting: list[int], popped_early: int) -> None:
    groups = no_groups()
    early = waiting[:popped_early]
    for batch in (early, waiting[popped_early:]):
        for group in batch:
            groups.wait(WaitingPrompt(group=group, attempt=1, task=TASK, seed=0, issued=group % 2 == 0))
        issued = groups.account().fates[Fate.RESERVED].groups
        assert issued == groups.recount().fates[Fate.RESERVED].groups == sum(group % 2 == 0 for group in batch)
        assert [due.group for due in iter(lambda: groups.next_prompt(actor="a"), None)] == sorted(batch)
        assert (len(groups.waiting), groups.account().fates[Fate.RESERVED].groups) == (0, 0)


def test_a_group_that_was_lost_and_came_back_is_ready_once() -> None:
    scene = Scene(eta=1, per_step=1)
    (ticket,) = scene.reserve(1)
    scene.commit(ticket)
    scene.buffer.rows_lost([ticket.key])
    scene.commit(*scene.reserve(1))
    assert scene.groups(scene.train()) == [0]
    assert scene.buffer.counts().ready == 0
