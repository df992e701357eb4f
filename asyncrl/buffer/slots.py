"""What the replay buffer keeps its groups in: a slot each, the queue of ready ones, the prompts at the front.

Pure containers without rules. All orders are total and known: ready groups by (deadline, group), waiting prompts by
group, which is the order in which the prompts were first issued.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from asyncrl.buffer.ledger import Amount
from asyncrl.buffer.records import GroupMeta, LeasedGroup, Ticket
from asyncrl.data.prompts import Task


@dataclass(slots=True)
class Slot:
    """One group from reserve to ack; `meta` is None until its commit.

    `reserved_step` and `ready_step` are the learner's steps at reserve and at commit.
    """

    ticket: Ticket
    reserved_step: int
    reserved_at_s: float
    heard_at_s: float
    booked_bytes: int
    meta: GroupMeta | None = None
    ready_step: int = 0

    def as_leased(self) -> LeasedGroup:
        """The committed group as a lease shows it."""
        assert self.meta is not None, f"group {self.ticket.key} is leased before its commit"
        return LeasedGroup(
            meta=self.meta,
            task=self.ticket.task,
            deadline=self.ticket.deadline,
            max_staleness_versions=self.ticket.max_staleness_versions,
            reserved_step=self.reserved_step,
            ready_step=self.ready_step,
        )


def amount_of(slots: Iterable[Slot], *, group_size: int) -> Amount:
    """Groups, samples and generated tokens of slots; a reserved one has no tokens yet."""
    tokens = [slot.meta.generated_tokens if slot.meta is not None else 0 for slot in slots]
    return Amount(len(tokens), len(tokens) * group_size, sum(tokens))


class ReadyQueue:
    """Ready groups, earliest deadline first, ties in prompt order. O(log n) a group; few deadlines occur at a time."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._order: dict[int, list[int]] = {}  # deadline to a heap of groups

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self) -> Collection[Slot]:
        return self._slots.values()

    def by_deadline(self) -> dict[int, int]:
        """How many groups are ready for each deadline."""
        return {deadline: len(groups) for deadline, groups in self._order.items()}

    def push(self, slot: Slot) -> None:
        self._slots[slot.ticket.group] = slot
        heapq.heappush(self._order.setdefault(slot.ticket.deadline, []), slot.ticket.group)

    def take(self, share: Mapping[int, int]) -> list[Slot]:
        """Removes so many groups of each deadline; they come earliest deadline first, ties in prompt order."""
        taken: list[Slot] = []
        for deadline in sorted(share):
            groups = self._order[deadline]
            taken += [self._slots.pop(heapq.heappop(groups)) for _ in range(share[deadline])]
            if not groups:
                del self._order[deadline]
        return taken

    def discard(self, slots: Collection[Slot]) -> None:
        """Removes ready groups wherever they stand: O(n) a call, for losses, which are rare and come in bulk."""
        for slot in slots:
            del self._slots[slot.ticket.group]
        for deadline in {slot.ticket.deadline for slot in slots}:
            groups = [group for group in self._order[deadline] if group in self._slots]
            if groups:
                heapq.heapify(groups)
                self._order[deadline] = groups
            else:
                del self._order[deadline]


@dataclass(frozen=True, slots=True, kw_only=True)
class DuePrompt:
    """A prompt that is due for an attempt. `issued`: its group is issued already, and counted as reserved."""

    group: int
    attempt: int
    task: Task
    seed: int
    issued: bool


class Front:
    """Prompts that go out before any new one, in prompt order. They hold no slot."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._prompts: dict[int, DuePrompt] = {}
        self.issued_groups = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, group: int) -> DuePrompt | None:
        return self._prompts.get(group)

    def push(self, prompt: DuePrompt) -> None:
        heapq.heappush(self._order, prompt.group)
        self._prompts[prompt.group] = prompt
        self.issued_groups += prompt.issued

    def pop(self) -> DuePrompt | None:
        """The earliest prompt, None when none waits."""
        if not self._order:
            return None
        prompt = self._prompts.pop(heapq.heappop(self._order))
        self.issued_groups -= prompt.issued
        return prompt
