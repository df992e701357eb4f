"""The table of groups: in which state each group is, and the numbers that depend on it.

A group is in exactly one place: reserved (a generator works on it), ready (it may be trained), leased (the learner
trains it), waiting at the front (its prompt waits for the next attempt), or ended. Each method moves groups
between these places, and keeps the containers and the running numbers consistent: the booked bytes, the tokens of ready
and leased groups, the unleased groups by deadline, and the tickets by replica. The table contains no rules and counts
nothing in the ledger.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import takewhile

from asyncrl.buffer.records import GroupMeta
from asyncrl.buffer.slots import Front, ReadyQueue, Slot


class GroupTable:
    """The groups by state, and the bytes that they book.

    Callers read the attributes, and change the slots in them with the methods only:

    - `open`: every slot by group, in the order of the reserves.
    - `reserved`: the reserved slots by key.
    - `held`: the reserved slots of each replica, by key. A replica without a ticket is not in it.
    - `unconfirmed`: the reserved slots whose tickets no heartbeat has named, by key, the oldest first.
    - `to_ask`: the replicas that have to name all of their tickets, because a ticket that they may hold has ended.
    - `ready`, `leased`: the slots of committed groups. `leased_tokens` is the sum of the tokens of the leased ones.
    - `front`: the prompts that wait for their next attempt. They hold no slot.
    - `unleased_by_deadline`: the number of reserved and ready groups by deadline. `-=` forgets the deadlines that no
      group has, so it does not grow with every step of the run.
    """

    def __init__(self) -> None:
        self.open: dict[int, Slot] = {}
        self.reserved: dict[str, Slot] = {}
        self.held: dict[str, dict[str, Slot]] = {}
        self.unconfirmed: dict[str, Slot] = {}
        self.to_ask: set[str] = set()
        self.ready = ReadyQueue()
        self.leased: list[Slot] = []
        self.leased_tokens = 0
        self.front = Front()
        self.unleased_by_deadline: Counter[int] = Counter()
        self.booked_bytes = 0

    @property
    def slots(self) -> int:
        """Number of slots in use, including leased ones.

        The last lease may be short and leave slots free. No group can use them, because a short lease starts only when
        no prompt is left.
        """
        return len(self.reserved) + len(self.ready) + len(self.leased)

    def enter(self, slot: Slot) -> None:
        """Adds a group with its slot: a reserved one, or a ready one if it has been committed."""
        self.open[slot.ticket.group] = slot
        self.unleased_by_deadline[slot.deadline] += 1
        self.booked_bytes += slot.booked_bytes
        if slot.meta is not None:
            self.ready.push(slot)
            return
        key = slot.ticket.key
        self.reserved[key] = slot
        self.held.setdefault(slot.ticket.replica, {})[key] = slot
        if not slot.confirmed:
            self.unconfirmed[key] = slot

    def confirm(self, slot: Slot) -> None:
        """Records that the replica has named the ticket of a reserved group."""
        slot.confirmed = True
        self.unconfirmed.pop(slot.ticket.key, None)

    def unconfirm(self, slot: Slot, *, now_s: float) -> None:
        """Records that the replica does not hold the ticket of a reserved group any longer. The ticket ends like one
        whose reply was lost now."""
        slot.confirmed, slot.heard_at_s = False, now_s
        self.unconfirmed[slot.ticket.key] = slot

    def unconfirmed_before(self, cutoff_s: float) -> list[Slot]:
        """Returns the reserved groups that are not confirmed since before `cutoff_s`. Takes O(their number)."""
        return list(takewhile(lambda slot: slot.heard_at_s < cutoff_s, self.unconfirmed.values()))

    def sort_unconfirmed(self) -> None:
        """Puts the groups that are not confirmed into the order of their times, after groups have entered in another
        order."""
        self.unconfirmed = dict(sorted(self.unconfirmed.items(), key=lambda each: each[1].heard_at_s))

    def commit(self, slot: Slot, meta: GroupMeta, *, step: int) -> None:
        """Moves a group from reserved to ready. The booked bytes that its rows do not need are free again."""
        self._leave_replica(slot)
        slot.meta, slot.ready_step = meta, step
        self.booked_bytes += meta.row_bytes - slot.booked_bytes
        slot.booked_bytes = meta.row_bytes
        self.ready.push(slot)

    def extend(self, slot: Slot) -> None:
        """Gives a reserved group the deadline of its newest token. Its older tokens may then be too old to train."""
        self.unleased_by_deadline -= {slot.deadline: 1}
        slot.deadline = slot.newest_deadline
        self.unleased_by_deadline[slot.deadline] += 1

    def leave_reserved(self, slot: Slot) -> None:
        """Removes a reserved group and frees its slot. Its replica may not know it, so the replica has to name its
        tickets."""
        if slot.confirmed:
            self.to_ask.add(slot.ticket.replica)
        self.leave_filtered(slot)

    def leave_filtered(self, slot: Slot) -> None:
        """Removes a reserved group that its replica has committed, but that is not trained, and frees its slot."""
        self._leave_replica(slot)
        self.unleased_by_deadline -= {slot.deadline: 1}
        self._free(slot)

    def leave_ready(self, slots: Collection[Slot]) -> None:
        """Removes ready groups and frees their slots."""
        self.ready.discard(slots)
        self.unleased_by_deadline -= Counter(slot.deadline for slot in slots)
        for slot in slots:
            self._free(slot)

    def lease(self, share: Mapping[int, int]) -> list[Slot]:
        """Moves groups from ready to leased. `share` maps a deadline to the number of groups."""
        before = self.ready.tokens
        self.leased = self.ready.take(sum(share.values()))
        self.leased_tokens = before - self.ready.tokens
        self.unleased_by_deadline -= share
        return self.leased

    def return_leased(self) -> None:
        """Moves the leased groups back to ready."""
        for slot in self._take_leased():
            self.unleased_by_deadline[slot.deadline] += 1
            self.ready.push(slot)

    def leave_leased(self) -> list[Slot]:
        """Removes the leased groups, frees their slots, and returns them."""
        leased = self._take_leased()
        for slot in leased:
            self._free(slot)
        return leased

    def _take_leased(self) -> list[Slot]:
        leased, self.leased, self.leased_tokens = self.leased, [], 0
        return leased

    def _leave_replica(self, slot: Slot) -> None:
        key, replica = slot.ticket.key, slot.ticket.replica
        del self.reserved[key]
        self.unconfirmed.pop(key, None)
        held = self.held[replica]
        del held[key]
        if not held:
            del self.held[replica]  # otherwise the dict would grow with every replica of the run

    def _free(self, slot: Slot) -> None:
        del self.open[slot.ticket.group]
        self.booked_bytes -= slot.booked_bytes
