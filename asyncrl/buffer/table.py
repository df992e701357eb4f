"""The table of groups: in which state each group is, and the numbers that depend on it.

A group is in exactly one place: reserved, ready, leased, waiting at the front, or ended. Each method moves groups
between these places, and keeps the containers, the booked bytes and the number of unleased groups by deadline
consistent. The table contains no rules and counts nothing in the ledger.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from asyncrl.buffer.records import GroupMeta
from asyncrl.buffer.slots import Front, ReadyQueue, Slot


class GroupTable:
    """The groups by state, and the bytes that they book.

    Callers read the attributes, and change the slots in them with the methods only:

    - `open`: every slot by group, in the order of the reserves.
    - `reserved`: the reserved slots by key, the one with the oldest heartbeat first.
    - `ready`, `leased`: the slots of committed groups.
    - `front`: the prompts that wait for their next attempt. They hold no slot.
    - `unleased_by_deadline`: the number of reserved and ready groups by deadline.
    """

    def __init__(self) -> None:
        self.open: dict[int, Slot] = {}
        self.reserved: dict[str, Slot] = {}
        self.ready = ReadyQueue()
        self.leased: list[Slot] = []
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
        self._count_unleased(slot.deadline, 1)
        self.booked_bytes += slot.booked_bytes
        if slot.meta is None:
            self.reserved[slot.ticket.key] = slot
        else:
            self.ready.push(slot)

    def heard(self, slot: Slot, *, now_s: float) -> None:
        """Records that a heartbeat named a reserved group."""
        slot.heard_at_s = now_s
        self.reserved[slot.ticket.key] = self.reserved.pop(slot.ticket.key)

    def unheard_before(self, cutoff_s: float) -> list[Slot]:
        """Returns the reserved groups whose last heartbeat is before `cutoff_s`. Takes O(their number)."""
        unheard: list[Slot] = []
        for slot in self.reserved.values():
            if slot.heard_at_s >= cutoff_s:
                break
            unheard.append(slot)
        return unheard

    def sort_reserved(self) -> None:
        """Puts the reserved groups into the order of their heartbeats, after groups have entered in another order."""
        self.reserved = dict(sorted(self.reserved.items(), key=lambda each: each[1].heard_at_s))

    def commit(self, slot: Slot, meta: GroupMeta, *, step: int) -> None:
        """Moves a group from reserved to ready. The booked bytes that its rows do not need are free again."""
        del self.reserved[meta.key]
        slot.meta, slot.ready_step = meta, step
        self.booked_bytes += meta.row_bytes - slot.booked_bytes
        slot.booked_bytes = meta.row_bytes
        self.ready.push(slot)

    def extend(self, slot: Slot) -> None:
        """Gives a reserved group the deadline of its newest token. Its older tokens may then be too old to train."""
        self._count_unleased(slot.deadline, -1)
        slot.deadline = slot.newest_deadline
        self._count_unleased(slot.deadline, 1)

    def leave_reserved(self, slot: Slot) -> None:
        """Removes a reserved group and frees its slot."""
        del self.reserved[slot.ticket.key]
        self._count_unleased(slot.deadline, -1)
        self._free(slot)

    def leave_ready(self, slots: Collection[Slot]) -> None:
        """Removes ready groups and frees their slots."""
        self.ready.discard(slots)
        for slot in slots:
            self._count_unleased(slot.deadline, -1)
            self._free(slot)

    def lease(self, share: Mapping[int, int]) -> list[Slot]:
        """Moves groups from ready to leased. `share` maps a deadline to the number of groups."""
        self.leased = self.ready.take(share)
        for deadline, groups in share.items():
            self._count_unleased(deadline, -groups)
        return self.leased

    def return_leased(self) -> None:
        """Moves the leased groups back to ready."""
        leased, self.leased = self.leased, []
        for slot in leased:
            self._count_unleased(slot.deadline, 1)
            self.ready.push(slot)

    def leave_leased(self) -> list[Slot]:
        """Removes the leased groups, frees their slots, and returns them."""
        leased, self.leased = self.leased, []
        for slot in leased:
            self._free(slot)
        return leased

    def _free(self, slot: Slot) -> None:
        del self.open[slot.ticket.group]
        self.booked_bytes -= slot.booked_bytes

    def _count_unleased(self, deadline: int, groups: int) -> None:
        self.unleased_by_deadline[deadline] += groups
        if not self.unleased_by_deadline[deadline]:
            del self.unleased_by_deadline[deadline]  # otherwise the dict would grow with every step of the run
