"""The groups and attempts that were issued, how each attempt ended, and which attempt is the next one.

The n-th new prompt is group n. A retry keeps the group, the prompt and the seed, and has the next attempt number.
"""

import re
from dataclasses import dataclass, field

from asyncrl.buffer.fleet import Fleet
from asyncrl.buffer.ledger import Event, Ledger
from asyncrl.buffer.records import DuePrompt, Prefix, Ticket
from asyncrl.buffer.slots import Slot
from asyncrl.buffer.staleness import Limits
from asyncrl.buffer.table import GroupTable
from asyncrl.data.prompts import PromptSource

SEEDS_A_RUN = 2**32
"""Sample seeds of one `run.seed`. A `run.seed` is below 2**31, so all of them are below 2**63, the limit of vLLM."""
LAST_ATTEMPTS = 10_000
"""Number of ended groups whose last attempt is remembered, to name the reason why a late commit is refused. Retried and
failed groups are remembered only. A commit of an older one is refused too."""

_KEY = re.compile(r"(\d+)\.(\d+)")


def parsed_key(key: str) -> tuple[int, int] | None:
    """Returns (group, attempt) of a ticket's key; None for a name of another form.

    >>> parsed_key("12.0"), parsed_key("of a user")
    ((12, 0), None)
    """
    found = _KEY.fullmatch(key)
    return None if found is None else (int(found[1]), int(found[2]))


def seed_of_group(run_seed: int, group: int, *, group_size: int) -> int:
    """Returns the seed of a group. It is a multiple of the group size, because vLLM gives sample i the seed + i.

    Each `run.seed` has its own range of `SEEDS_A_RUN` sample seeds, for every group size. They are all different until
    the range is used up, after four billion samples. Then they begin again.

    >>> [seed_of_group(0, group, group_size=3) for group in range(3)]
    [0, 3, 6]
    >>> seed_of_group(1, 0, group_size=3) - 2**32
    2
    """
    first = -(-run_seed * SEEDS_A_RUN // group_size)  # rounded up, so the range has room for one group less
    return (first + group % (SEEDS_A_RUN // group_size - 1)) * group_size


@dataclass(kw_only=True)
class Attempts:
    """What was issued so far.

    `groups` is the number of issued groups, and `exhausted` says whether the prompts have run out. `last_of_ended` has
    the last attempt at each ended group, and whether it was committed. The common case (attempt 0, committed) is left
    out, so that memory does not grow with every group.
    """

    table: GroupTable
    prompts: PromptSource
    limits: Limits
    ledger: Ledger
    fleet: Fleet
    groups: int = 0
    exhausted: bool = False
    last_of_ended: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def new_prompt(self) -> DuePrompt | None:
        """Returns the next new prompt for the first attempt at its group; None if there is none."""
        task = None if self.exhausted else self.prompts.next()
        if task is None:
            self.exhausted = True
            return None
        group = self.groups
        self.groups += 1
        seed = seed_of_group(self.prompts.seed, group, group_size=self.limits.group_size)
        return DuePrompt(group=group, attempt=0, task=task, seed=seed, issued=False)

    def next_prompt(self, *, replica: str) -> DuePrompt | None:
        """Returns the earliest prompt at the front, else a new prompt; None if there is neither.

        A prompt that failed on this replica comes last, if a healthy replica has not tried it.
        """

        def other_may_try(prompt: DuePrompt) -> bool:
            return replica in prompt.failed_on and self.fleet.has_other_than(prompt.failed_on)

        front = self.table.front
        return front.pop(unless=other_may_try) or self.new_prompt() or front.pop(unless=lambda _: False)

    def again(self, ticket: Ticket, *, issued: bool, failed: bool = False, prefix: Prefix | None = None) -> DuePrompt:
        """Returns the prompt of a ticket that has ended, for its next attempt, which begins with `prefix`."""
        self.ledger.count(Event.RETRY)
        return DuePrompt(
            group=ticket.group,
            attempt=ticket.attempt + 1,
            task=ticket.task,
            seed=ticket.seed,
            issued=issued,
            failed_on=(*ticket.failed_on, ticket.replica) if failed else ticket.failed_on,
            prefix=prefix,
        )

    def is_last(self, ticket: Ticket) -> bool:
        """Returns whether the group has failed if this attempt fails.

        That is the attempt number `max_attempts`. Attempts on replicas that were quarantined do not count, up to the
        same number: a prompt that ends every engine must not be tried for ever.
        """
        failed_on, most = [*ticket.failed_on, ticket.replica], self.limits.max_attempts
        counted = sum(not self.fleet.is_excused(replica) for replica in failed_on)
        return counted >= most or len(failed_on) >= 2 * most

    def record_end(self, slot: Slot) -> None:
        """Remembers the last attempt at a group that has ended."""
        last = (slot.ticket.attempt, slot.meta is not None)
        if last != (0, True):
            self.last_of_ended[slot.ticket.group] = last
            if len(self.last_of_ended) > LAST_ATTEMPTS:
                del self.last_of_ended[next(iter(self.last_of_ended))]

    def last(self, group: int) -> tuple[int, bool] | None:
        """Returns (last issued attempt at a group, whether it was committed); None if there is no such group."""
        if not 0 <= group < self.groups:
            return None
        if slot := self.table.open.get(group):
            return slot.ticket.attempt, slot.meta is not None
        if due := self.table.front.get(group):
            return due.attempt - 1, False
        return self.last_of_ended.get(group, (0, True))

    def issued_at(self, group: int) -> int:
        """Returns the number of attempts that were issued at a group."""
        last = self.last(group)
        return 0 if last is None else last[0] + 1

    def has_ended(self, group: int, attempt: int) -> bool:
        """Returns whether no commit of this attempt was accepted or can be accepted. An attempt that was never issued
        counts as such, because a restore forgets the attempts that were issued after its snapshot. So does an attempt
        whose rows were lost after its commit."""
        slot = self.table.open.get(group)
        waits = slot is not None and slot.ticket.attempt == attempt
        return not waits and self.last(group) != (attempt, True)

    def is_never_committed(self, group: int, attempt: int) -> bool:
        """Returns whether this attempt was issued and has ended without a commit that counts."""
        return attempt < self.issued_at(group) and self.has_ended(group, attempt)

    def restore(self, *, groups: int, exhausted: bool, ended: dict[int, tuple[int, bool]]) -> None:
        """Continues from the numbers of a snapshot."""
        self.groups, self.exhausted, self.last_of_ended = groups, exhausted, dict(ended)
