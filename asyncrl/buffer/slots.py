"""Containers of the replay buffer: the slot of a group, the queue of ready groups, and the prompts at the front.

They are pure and contain no rules. Every order is total: ready groups are ordered by (deadline, group), waiting prompts
by group, which is the order in which the prompts were first issued.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from asyncrl.buffer.records import NO_TASK, DuePrompt, GroupMeta, LeasedGroup, OpenGroup, Prefix, Ticket


@dataclass(slots=True, eq=False)
class Slot:
    """The slot of one group from reserve to ack. `meta` is None until the commit.

    `reserved_step` and `ready_step` are the learner's step at the reserve and at the commit. A ticket is `confirmed`
    when a heartbeat of its replica has named it. It then lives as long as its replica sends heartbeats. A ticket that
    is not confirmed ends some time after `heard_at_s`, because the reply with it may be lost. `sampled_tokens` is the
    number of tokens that the replica reported last, and `newest_step` is the step of the newest weights that it
    reported. `deadline` is that of the ticket, unless `staleness.on_deadline: mask` has extended it. `prefix` is what
    the data plane has of a reserved group, from this attempt or from an earlier one.
    """

    ticket: Ticket
    reserved_step: int
    reserved_at_s: float
    heard_at_s: float
    booked_bytes: int
    meta: GroupMeta | None = None
    ready_step: int = 0
    confirmed: bool = False
    sampled_tokens: int = 0
    prefix: Prefix | None = None
    deadline: int = field(init=False)
    newest_step: int = field(init=False)

    def __post_init__(self) -> None:
        self.deadline, self.newest_step = self.ticket.deadline, self.ticket.version.step

    @property
    def tokens(self) -> int:
        """The generated tokens that the ledger counts. A group has none until its commit."""
        return 0 if self.meta is None else self.meta.generated_tokens

    @property
    def newest_deadline(self) -> int:
        """The last step at which the newest token of a reserved group may be trained."""
        return self.newest_step + self.ticket.max_staleness_versions

    def as_leased(self) -> LeasedGroup:
        """Returns the committed group in the form of a lease."""
        assert self.meta is not None, f"group {self.ticket.key} is leased before its commit"
        return LeasedGroup(
            meta=self.meta,
            deadline=self.deadline,
            extended=self.deadline > self.ticket.deadline,
            max_staleness_versions=self.ticket.max_staleness_versions,
            reserved_step=self.reserved_step,
            ready_step=self.ready_step,
        )

    def as_open(self) -> OpenGroup:
        """Returns the group in the form of a snapshot."""
        return OpenGroup(
            ticket=msgspec.structs.replace(self.ticket, task=NO_TASK),
            reserved_step=self.reserved_step,
            ready_step=self.ready_step,
            meta=self.meta,
            deadline=self.deadline,
            prefix=self.prefix,
        )


class ReadyQueue:
    """Ready groups, earliest deadline first, ties in prompt order. Adding or taking a group takes O(log n).

    `by_deadline` is the number of groups for each deadline, and `tokens` the sum of their generated tokens.
    """

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._order: list[tuple[int, int]] = []  # a heap of (deadline, group)
        self.by_deadline: Counter[int] = Counter()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self) -> Collection[Slot]:
        return self._slots.values()

    def push(self, slot: Slot) -> None:
        self._slots[slot.ticket.group] = slot
        heapq.heappush(self._order, (slot.deadline, slot.ticket.group))
        self.by_deadline[slot.deadline] += 1
        self.tokens += slot.tokens

    def take(self, groups: int) -> list[Slot]:
        """Removes and returns this number of groups, earliest deadline first, ties in prompt order."""
        taken = [self._slots.pop(heapq.heappop(self._order)[1]) for _ in range(groups)]
        self._count_out(taken)
        return taken

    def discard(self, slots: Collection[Slot]) -> None:
        """Removes any ready groups. A call takes O(n). It is for lost rows, which are rare and affect many groups at
        once."""
        for slot in slots:
            del self._slots[slot.ticket.group]
        self._order = [(slot.deadline, group) for group, slot in self._slots.items()]
        heapq.heapify(self._order)
        self._count_out(slots)

    def _count_out(self, slots: Collection[Slot]) -> None:
        self.by_deadline -= Counter(slot.deadline for slot in slots)
        self.tokens -= sum(slot.tokens for slot in slots)


class Front:
    """Prompts that are issued before any new prompt, in prompt order. They hold no slot."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._prompts: dict[int, DuePrompt] = {}
        self.issued_groups = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, group: int) -> DuePrompt | None:
        return self._prompts.get(group)

    def prompts(self) -> tuple[DuePrompt, ...]:
        """Returns the waiting prompts in prompt order."""
        return tuple(self._prompts[group] for group in sorted(self._prompts))

    def push(self, prompt: DuePrompt) -> None:
        heapq.heappush(self._order, prompt.group)
        self._prompts[prompt.group] = prompt
        self.issued_groups += prompt.issued

    def pop(self, *, unless: Callable[[DuePrompt], bool]) -> DuePrompt | None:
        """Removes and returns the earliest prompt that is not left out by `unless`; None if there is none."""
        left_out: list[int] = []
        found = None
        while self._order and found is None:
            group = heapq.heappop(self._order)
            if unless(self._prompts[group]):
                left_out.append(group)
            else:
                found = self._prompts.pop(group)
                self.issued_groups -= found.issued
        for group in left_out:
            heapq.heappush(self._order, group)
        return found
