"""Snapshots of the buffer for a checkpoint, and how a buffer continues from one.

A snapshot has the metadata only; the rows of ready groups are saved beside it. It is consistent between two calls,
because the buffer is a state machine without threads. It holds no lease: a leased group counts as ready, since its step
has not been trained.

If the buffer died, all of its groups come from the snapshot. If only the learner died, the buffer has changed since the
snapshot, and the weights of the steps after the snapshot are lost. Groups without a token of lost weights stay, and the
others are generated again.
"""

from collections.abc import Iterable, Mapping

import msgspec

from asyncrl.buffer.groups import Groups, Slot
from asyncrl.buffer.ledger import EndedGroup, FailureState, Fate, LedgerState
from asyncrl.buffer.records import NO_TASK, OpenGroup, WaitingPrompt
from asyncrl.common.version import Lineage, Version


class BufferSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a `ReplayBuffer` when the learner was at `version`.

    `next_group` is the number of prompts that were issued, so it is also the position in the order of the prompts.
    `last_attempts` has the ended groups whose last attempt was not attempt 0, or was not committed. `ended` has the
    groups that reached a final fate since the last ack. Tickets and prompts have `NO_TASK` instead of their tasks,
    which are in the data of the run. The number of the checkpoint's format (`asyncrl.checkpoints.directory`) is also
    that of this record.
    """

    version: Version
    next_group: int
    exhausted: bool
    open: tuple[OpenGroup, ...]
    waiting: tuple[WaitingPrompt, ...]
    last_attempts: dict[int, tuple[int, bool]]
    ledger: LedgerState
    failures: FailureState
    ended: tuple[EndedGroup, ...] = ()


def take_snapshot(groups: Groups, *, version: Version, failures: FailureState) -> BufferSnapshot:
    """Returns the present state of the groups. `version` and `failures` are the parts of a snapshot that `ReplayBuffer`
    has. From now on, the groups are retained that a learner needs if it goes back to this snapshot."""
    groups.kept.snapshot_taken(step=version.step)
    return BufferSnapshot(
        version=version,
        next_group=groups.issued,
        exhausted=groups.exhausted,
        open=tuple(slot.as_open() for slot in groups.open.values()),
        waiting=tuple(msgspec.structs.replace(prompt, task=NO_TASK) for prompt in groups.waiting_prompts()),
        last_attempts=dict(groups.last_of_ended),
        ledger=groups.ledger.state(),
        failures=failures,
        ended=tuple(groups.ledger.ended),
    )


def restore(
    groups: Groups,
    snapshot: BufferSnapshot,
    *,
    earlier: Groups,
    lineage: Lineage,
    loaded: Mapping[str, Version],
    now_s: float,
) -> None:
    """Continues from a snapshot. `groups` is empty at the call, and has the ledger of the snapshot.

    `earlier` are the groups of a buffer that went on after the snapshot; there are none if that buffer is gone.
    `lineage` is that of the learner that continues, and `loaded` has the last version that each actor reported.

    A group that was ready at the snapshot is ready again, unless its rows were lost since. Any other group without a
    token of a dead version (`living`) stays, as a reserved group or, if it was committed, as a ready one. The prompts
    of all other groups wait ahead of all new prompts. So does the prompt of a group without room in the buffer, or in
    the steps up to its deadline: the limits may be smaller than those of the snapshot. No attempt that was issued after
    the snapshot is issued again, because its actor may still commit it.

    The stored tokens of a prompt are kept up to the first token of a dead version: one from which the weights of
    `lineage` are not made.
    """
    step = snapshot.version.step
    groups.restore(
        issued=snapshot.next_group,
        exhausted=snapshot.exhausted,
        last_of_ended=snapshot.last_attempts,
        newest_forgotten=earlier.newest_forgotten,
    )
    groups.kept.restored(step=step)
    slots, due = _opened(groups, snapshot, earlier=earlier, now_s=now_s)
    groups.kept.not_loaded = {slot.ticket.key for slot in slots} - {slot.ticket.key for slot in _with_rows(earlier)}
    while groups.issued < earlier.issued and (prompt := groups.new_prompt()) is not None:
        due.append(prompt)
    stay = living(earlier, lineage=lineage, loaded=loaded)
    for prompt in due:
        if (kept := stay.get(prompt.group)) is not None:
            if not prompt.issued:
                groups.ledger.issue(samples=groups.limits.group_size)
            groups.ledger.generated(kept.tokens)
            slots.append(kept)
        else:
            groups.wait(_not_issued_since(groups, prompt, earlier=earlier, lineage=lineage))
    _place(groups, slots, step=step)


def living(groups: Groups, *, lineage: Lineage, loaded: Mapping[str, Version]) -> dict[int, Slot]:
    """Returns the slots of the groups of which no token is of a dead version, by group: reserved groups, and ready,
    leased and retained ones whose rows are in the data plane. A version is dead if the weights of `lineage` are not
    made from it.

    `loaded` has the last version that each actor reported. The tokens of a reserved group are not known, but an actor
    with a dead version has generated some with it.
    """
    stay = {
        slot.ticket.group: slot
        for slot in _with_rows(groups)
        if slot.meta is not None and all(map(lineage.has, slot.meta.versions))
    }
    for slot in groups.reserved.values():
        ticket = slot.ticket
        versions = {ticket.version, loaded.get(ticket.replica, ticket.version)}
        for prefix in (ticket.prefix, slot.prefix):
            versions.update(prefix.versions if prefix is not None else ())
        if all(map(lineage.has, versions)):
            stay[ticket.group] = slot
    return stay


def _with_rows(groups: Groups) -> list[Slot]:
    """Returns the groups whose rows are in the data plane: ready, leased and retained ones.

    A learner may have died after the restore of its checkpoint and before it loaded the rows into the data plane. The
    groups whose rows are only in that checkpoint are then left out.
    """
    committed = [*groups.ready.values(), *groups.leased, *groups.kept.retained()]
    return [slot for slot in committed if slot.ticket.key not in groups.kept.not_loaded]


def _opened(
    groups: Groups, snapshot: BufferSnapshot, *, earlier: Groups, now_s: float
) -> tuple[list[Slot], list[WaitingPrompt]]:
    """Returns the slots of the groups that were ready at the snapshot, and the waiting prompts of all other groups in
    it. A group whose rows were lost since, so that another attempt was issued, is among the prompts."""
    slots: list[Slot] = []
    task_of = groups.prompts.task
    due = [msgspec.structs.replace(prompt, task=task_of(prompt.group)) for prompt in snapshot.waiting]
    for group in snapshot.open:
        ticket = msgspec.structs.replace(group.ticket, task=task_of(group.ticket.group))
        meta = group.meta
        if meta is None:
            due.append(groups.next_attempt(ticket, issued=True, prefix=group.prefix))
            continue
        slot = Slot(ticket, group.reserved_step, now_s, now_s, meta.row_bytes, meta, group.ready_step)
        slot.deadline = group.deadline
        if earlier.issued_attempts(ticket.group) <= ticket.attempt + 1:
            slots.append(slot)
        else:  # its rows were lost after the snapshot, and another attempt was issued
            groups.settle(slot, Fate.RETURNED_ON_RESUME)
            due.append(groups.next_attempt(ticket, issued=False))
    return slots, due


def _not_issued_since(groups: Groups, prompt: WaitingPrompt, *, earlier: Groups, lineage: Lineage) -> WaitingPrompt:
    """Returns a prompt of a snapshot with the number of an attempt that was not issued after the snapshot. Its prefix
    is the stored one up to the first token of a dead version of `lineage`."""
    stored = earlier.prefix_of(prompt.group)
    if stored is None and prompt.prefix is not None:  # the prefix was cleared since, or its row store has ended
        groups.kept.drop(prompt.prefix)
    attempt = max(prompt.attempt, earlier.issued_attempts(prompt.group))
    return msgspec.structs.replace(prompt, attempt=attempt, prefix=groups.kept.surviving(stored, lineage))


def _place(groups: Groups, slots: Iterable[Slot], *, step: int) -> None:
    """Puts restored groups into their slots. If a group has no room, its prompt goes ahead of all new prompts. The
    learner is at `step`, which may be an earlier one than before."""
    for slot in sorted(slots, key=lambda each: (each.deadline, each.ticket.group)):
        if _has_room(groups, slot, step=step):
            slot.reserved_step, slot.ready_step = min(slot.reserved_step, step), min(slot.ready_step, step)
            groups.enter(slot)
        else:
            groups.reissue(slot, Fate.RETURNED_ON_RESUME)
    groups.sort_by_time()


def _has_room(groups: Groups, slot: Slot, *, step: int) -> bool:
    """Returns True if a restored group fits into the buffer, and into the steps up to its deadline.

    Groups are restored by deadline, so all groups that have a slot already are due no later than this one.
    """
    limits = groups.limits
    return (
        groups.slots < (slot.deadline - step + 1) * limits.groups_per_step
        and groups.slots < limits.capacity_groups
        and groups.booked_bytes + slot.booked_bytes <= limits.capacity_bytes
    )
