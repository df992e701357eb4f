"""Stragglers: reserved groups that rule (2) of `staleness.py` needs before the learner may start its next step.

If rule (2) fails although enough groups are ready, let d be the smallest deadline at which it fails, and `excess` the
number of groups by which it fails there. The policy `staleness.on_deadline` acts on exactly `excess` reserved groups
that are due by d, those with the fewest generated tokens first:

    wait       nothing: the learner waits
    requeue    the attempt ends, and the prompt goes to the front
    drop       the group ends with the fate `dropped`, and another prompt takes its place
    mask       the group stays and gets the deadline newest + η, where newest is its replica's version

If rule (2) then fails at a later deadline, the same is done there. If the policy cannot act on enough groups, it acts
on none: the learner would have to wait all the same, and the work would be lost for nothing. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from asyncrl.buffer.records import Ticket
from asyncrl.buffer.slots import Slot
from asyncrl.buffer.staleness import Limits, lease_violation
from asyncrl.config.schema import OnDeadline


def stragglers(
    policy: OnDeadline,
    *,
    step: int,
    limits: Limits,
    remaining: Mapping[int, int],
    reserved: Iterable[Slot],
    is_last_attempt: Callable[[Ticket], bool],
) -> list[Slot] | None:
    """Returns the reserved groups on which the policy acts so that rule (2) holds at `step`.

    `remaining` maps a deadline to the number of groups that stay reserved or ready after the lease. `is_last_attempt`
    tells whether a group fails with its present attempt. Returns an empty list if rule (2) holds already, and None if
    the learner has to wait.
    """
    left, chosen = Counter(remaining), list[Slot]()
    free: list[Slot] | None = None
    while violation := lease_violation(step=step, groups_per_step=limits.groups_per_step, remaining=left):
        if policy == "wait":
            return None
        if free is None:  # takes O(reserved), so not before a group is in the way
            free = [slot for slot in reserved if policy != "requeue" or not is_last_attempt(slot.ticket)]
        deadline, excess = violation
        blocking = [slot for slot in free if slot.deadline <= deadline]
        if policy == "mask":
            blocking = [slot for slot in blocking if slot.newest_deadline > deadline]
        blocking.sort(key=lambda slot: (slot.sampled_tokens, slot.ticket.group))
        if len(blocking) < excess:
            return None
        for slot in blocking[:excess]:
            left[slot.deadline] -= 1
            if policy == "mask":
                left[slot.newest_deadline] += 1
            free.remove(slot)
            chosen.append(slot)
    return chosen
