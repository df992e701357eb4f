"""The life of groups: which state each is in, what it books, and what became of it.

`ReplayBuffer` decides; this carries out, and keeps four things in step: the containers of the states, the bytes
booked, the groups outstanding by deadline, and the ledger. A group is in exactly one place: reserved, ready, leased,
waiting at the front, or ended.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol

from asyncrl.buffer.ledger import Account, Amount, Event, Fate, Ledger
from asyncrl.buffer.records import GroupMeta, Ticket, Version
from asyncrl.buffer.slots import DuePrompt, Front, ReadyQueue, Slot, amount_of
from asyncrl.buffer.staleness import Limits
from asyncrl.data.prompts import Task

# vLLM gives child i of a request the seed + i, so a base seed is a multiple of the group size, and the largest leaves
# room below 2**63.
_SEED_RANGE = 2**62
_GROUPS_A_SEED = 2**20


class Prompts(Protocol):
    """Where new prompts come from, in the order in which they are issued."""

    def next(self) -> Task | None:
        """The next prompt; None once exhausted."""
        ...


class Groups:
    """Every group that was issued. The n-th new prompt is group n; a retry keeps its group, prompt and seed."""

    def __init__(self, *, limits: Limits, prompts: Prompts, ledger: Ledger, seed: int) -> None:
        self._limits = limits
        self._prompts = prompts
        self._ledger = ledger
        self._seed = seed
        self._next_group = 0
        # Last attempt of ended groups and whether it was committed, except the common one: attempt 0, committed.
        self._last_attempts: dict[int, tuple[int, bool]] = {}
        self.open: dict[int, Slot] = {}  # every slot by group, in the order of the reserves
        self.reserved: dict[str, Slot] = {}  # by key, the longest unheard first
        self.ready = ReadyQueue()
        self.leased: list[Slot] = []
        self.unleased_by_deadline: Counter[int] = Counter()  # reserved and ready
        self.front = Front()
        self.booked_bytes = 0
        self.exhausted = False

    @property
    def slots(self) -> int:
        """Slots taken, leased ones included. A short last lease leaves room, but nothing that could take it: it starts
        only when no prompt is left anywhere."""
        return len(self.reserved) + len(self.ready) + len(self.leased)

    def next_prompt(self) -> DuePrompt | None:
        """The earliest prompt at the front, else a new one; None when both have run out."""
        if due := self.front.pop():
            return due
        task = None if self.exhausted else self._prompts.next()
        if task is None:
            self.exhausted = True
            return None
        group, size = self._next_group, self._limits.group_size
        self._next_group += 1
        seed = (self._seed * _GROUPS_A_SEED + group) % (_SEED_RANGE // size) * size
        return DuePrompt(group=group, attempt=0, task=task, seed=seed, issued=False)

    def admit(self, prompt: DuePrompt, *, replica: str, version: Version, step: int, now_s: float) -> Ticket:
        """The prompt gets a slot: free to reserved."""
        ticket = Ticket(
            group=prompt.group,
            attempt=prompt.attempt,
            task=prompt.task,
            seed=prompt.seed,
            version=version,
            max_staleness_versions=self._limits.max_staleness_versions,
            replica=replica,
        )
        slot = Slot(ticket, step, now_s, now_s, self._limits.worst_group_bytes)
        self.open[ticket.group] = slot
        self.reserved[ticket.key] = slot
        self._count_unleased(ticket.deadline, 1)
        self.booked_bytes += slot.booked_bytes
        if not prompt.issued:
            self._ledger.issue(samples=self._limits.group_size)
        self._ledger.count(Event.ATTEMPT)
        return ticket

    def heard(self, key: str, *, replica: str, now_s: float) -> None:
        """The replica still works on its ticket."""
        slot = self.reserved.get(key)
        if slot is not None and slot.ticket.replica == replica:
            slot.heard_at_s = now_s
            self.reserved[key] = self.reserved.pop(key)

    def unheard_before(self, cutoff_s: float) -> list[Slot]:
        """Reserved groups nobody was heard of since; O(their number)."""
        unheard: list[Slot] = []
        for slot in self.reserved.values():
            if slot.heard_at_s >= cutoff_s:
                break
            unheard.append(slot)
        return unheard

    def commit(self, slot: Slot, meta: GroupMeta, *, step: int) -> None:
        """Reserved to ready; the bytes that the worst case did not need are refunded."""
        del self.reserved[meta.key]
        slot.meta, slot.ready_step = meta, step
        self.booked_bytes += meta.row_bytes - slot.booked_bytes
        slot.booked_bytes = meta.row_bytes
        self.ready.push(slot)
        self._ledger.generated(meta.generated_tokens)

    def retry(self, slot: Slot) -> bool:
        """A reserved group's attempt is over without a result: its prompt goes to the front. False when it had its last
        attempt, so that the group has failed."""
        if slot.ticket.attempt + 1 >= self._limits.max_attempts:
            self.fail(slot)
            return False
        self._leave_reserved(slot)
        self._to_front(slot, issued=True)
        return True

    def fail(self, slot: Slot) -> None:
        """A reserved group will never be committed. Another prompt may take its slot."""
        self._leave_reserved(slot)
        self._end(slot, Fate.FAILED)

    def lose_rows(self, slots: Collection[Slot]) -> None:
        """Ready groups' rows are gone: their prompts go to the front and will be issued anew."""
        self.ready.discard(slots)
        for slot in slots:
            self._count_unleased(slot.ticket.deadline, -1)
            self._free(slot)
            self._ledger.settle(Fate.ROWS_LOST, self._amount([slot]))
            self._to_front(slot, issued=False)

    def drop_ready(self) -> tuple[str, ...]:
        """Every ready group is dropped: no step will ever train it. Their keys."""
        slots = self.ready.take(self.ready.by_deadline())
        for slot in slots:
            self._count_unleased(slot.ticket.deadline, -1)
            self._free(slot)
            self._end(slot, Fate.DROPPED)
        return tuple(slot.ticket.key for slot in slots)

    def lease(self, share: Mapping[int, int]) -> list[Slot]:
        """Ready to leased: so many groups of each deadline."""
        self.leased = self.ready.take(share)
        for deadline, groups in share.items():
            self._count_unleased(deadline, -groups)
        return self.leased

    def return_leased(self) -> None:
        """Leased to ready again."""
        leased, self.leased = self.leased, []
        for slot in leased:
            self._count_unleased(slot.ticket.deadline, 1)
            self.ready.push(slot)

    def end_leased(self, fate: Fate) -> tuple[str, ...]:
        """Leased to trained or skipped: the slots are free. The groups' keys."""
        leased, self.leased = self.leased, []
        for slot in leased:
            self._free(slot)
            self._end(slot, fate)
        return tuple(slot.ticket.key for slot in leased)

    def last_attempt(self, group: int) -> tuple[int, bool] | None:
        """The last attempt that was given out at a group and whether it was committed; None: no such group."""
        if not 0 <= group < self._next_group:
            return None
        if slot := self.open.get(group):
            return slot.ticket.attempt, slot.meta is not None
        if due := self.front.get(group):
            return due.attempt - 1, False
        return self._last_attempts.get(group, (0, True))

    def account(self) -> Account:
        """The ledger with what is open now. O(slots)."""
        size = self._limits.group_size
        waiting = Amount(self.front.issued_groups, self.front.issued_groups * size, 0)
        return self._ledger.account(
            reserved=self._amount(self.reserved.values()) + waiting,
            ready=self._amount(self.ready.slots()),
            leased=self._amount(self.leased),
        )

    def _count_unleased(self, deadline: int, groups: int) -> None:
        self.unleased_by_deadline[deadline] += groups
        if not self.unleased_by_deadline[deadline]:
            del self.unleased_by_deadline[deadline]  # deadlines pass: what is kept must not grow with the run

    def _leave_reserved(self, slot: Slot) -> None:
        del self.reserved[slot.ticket.key]
        self._count_unleased(slot.ticket.deadline, -1)
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        del self.open[slot.ticket.group]
        self.booked_bytes -= slot.booked_bytes

    def _end(self, slot: Slot, fate: Fate) -> None:
        self._ledger.settle(fate, self._amount([slot]))
        last = (slot.ticket.attempt, slot.meta is not None)
        if last != (0, True):
            self._last_attempts[slot.ticket.group] = last

    def _to_front(self, slot: Slot, *, issued: bool) -> None:
        ticket = slot.ticket
        self.front.push(
            DuePrompt(group=ticket.group, attempt=ticket.attempt + 1, task=ticket.task, seed=ticket.seed, issued=issued)
        )
        self._ledger.count(Event.RETRY)

    def _amount(self, slots: Collection[Slot]) -> Amount:
        return amount_of(slots, group_size=self._limits.group_size)
