"""The groups of the replay buffer: where each group is, and what changes together when it moves.

    not issued ──▶ reserved ──▶ ready ──▶ leased ──▶ ended
                    │    ▲        │
                    ▼    │        ▼
                   waiting at the front

A group is in exactly one of these places. A prompt at the front waits ahead of all new prompts. `Groups` moves a group,
and keeps the ledger, the numbers of attempts and the rows that stay stored consistent with its place. `KeptRows` knows
which rows and partial generations the data plane keeps for a checkpoint or for the next attempt at a group. The rules
are in `replay_buffer.py`, which decides about each move.

The n-th new prompt is group n. A retry keeps the group, the prompt and the seed, and has the next attempt number. Every
order is total: ready groups are ordered by (deadline, group), waiting prompts by group, which is the order in which the
prompts were first issued.
"""

import heapq
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from asyncrl.buffer.fleet import Fleet, replica_of
from asyncrl.buffer.ledger import Account, Amount, EndedGroup, Event, Fate, Ledger, LedgerEntry
from asyncrl.buffer.records import NO_TASK, GroupMeta, LeasedGroup, OpenGroup, Prefix, Ticket, WaitingPrompt
from asyncrl.buffer.staleness import Limits
from asyncrl.common.version import Lineage, Version
from asyncrl.data.prompts import PromptSource

SEEDS_A_RUN = 2**32
"""Number of sample seeds that each `run.seed` has. A `run.seed` is below 2**31, so all sample seeds are below 2**63,
the limit of vLLM."""
LAST_ATTEMPTS = 10_000
"""Number of ended groups whose last attempt is remembered. It tells why a late commit is refused, and which stored rows
may be cleared. Groups that were committed at their first attempt need no memory. A late commit of a forgotten group is
answered UNKNOWN."""

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


@dataclass(slots=True, eq=False)
class Slot:
    """The slot of one group from reserve to ack. `meta` is None until the commit.

    `reserved_step` and `ready_step` are the learner's step at the reserve and at the commit. A ticket is `confirmed`
    when a heartbeat of its actor has named it. It then lives as long as its actor sends heartbeats. A ticket that
    is not confirmed ends some time after `last_seen_s`, because the reply with it may be lost. `sampled_tokens` is the
    number of tokens that the actor reported last, and `newest_step` is the step of the newest weights that it
    reported. `booked_bytes` is the size of the rows: of the largest possible group until the commit, then the real one.
    `deadline` is the ticket's, unless `staleness.on_deadline: mask` has extended it. `prefix` is the partial generation
    of a reserved group that the data plane has, from this attempt or from an earlier one.
    """

    ticket: Ticket
    reserved_step: int
    reserved_at_s: float
    last_seen_s: float
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
    def stored_tokens(self) -> int:
        """The tokens of the group's prefix in the data plane."""
        return 0 if self.prefix is None else self.prefix.tokens

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


class KeptRows:
    """The rows and partial generations that the data plane keeps for a learner that goes back to a checkpoint, and for
    the next attempts at groups.

    A learner can go back to the newest complete checkpoint, and to the newest snapshot. The save of that snapshot may
    still run, and it reads the rows. So these stay:

    - The rows of a *retained* group. It has ended, but the learner can train it again.
    - The *prefix* of a group that is reserved or waits: the tokens that an attempt has generated so far. The next
      attempt continues them. The slot of a reserved group and the waiting prompt name the newest prefix.
    - The prefix of a committed group that a checkpoint *splits*: a learner that goes back to this checkpoint loses
      some tokens of the group, and not all.

    This class counts the tokens of prefixes that were continued or dropped, and collects the keys of prefixes that no
    attempt needs. `not_loaded` has the keys of ready groups whose rows are only in the checkpoint that a learner
    restores. It is empty after the learner's first lease call, before which the learner loads the rows.
    """

    def __init__(self, *, ledger: Ledger) -> None:
        self._ledger = ledger
        self._complete: int | None = None  # the step of the newest complete checkpoint
        self._snapshot: int | None = None  # the step of the newest snapshot
        self._retained: dict[str, tuple[Slot, int]] = {}  # by key: the slot, and the step that ended the group
        self._split: dict[int, Slot] = {}
        self._unneeded: list[str] = []  # keys whose prefixes became unneeded since `take_unneeded`
        self.not_loaded: set[str] = set()

    # Checkpoints

    def snapshot_taken(self, *, step: int) -> None:
        """Records that a snapshot of `step` was taken. From now on, the groups are retained that a learner needs if it
        goes back to `step`."""
        self._snapshot = step

    def restored(self, *, step: int) -> None:
        """Records that the buffer continues from the checkpoint of `step`, which is complete."""
        self._complete = self._snapshot = step

    def release(self, *, complete: int | None) -> tuple[str, ...]:
        """Records that the newest complete checkpoint is the one of step `complete`, and stops keeping groups and
        prefixes that only earlier checkpoints needed; with None, stops keeping all. Returns the keys of the groups that
        are not retained any longer; their rows may be cleared."""
        self._complete = complete
        if complete is None:
            self._snapshot = None
        clearable = tuple(key for key, (slot, step) in self._retained.items() if not self._is_needed(slot, step))
        for key in clearable:
            del self._retained[key]
        for group, slot in list(self._split.items()):
            assert slot.meta is not None, f"group {slot.ticket.key} is split before its commit"
            if not self._splits(slot.meta):
                del self._split[group]
                if slot.prefix is not None:
                    self._forget(group, slot.prefix)
        return clearable

    def retained(self) -> list[Slot]:
        """Returns the slots that the retained groups had."""
        return [slot for slot, _ in self._retained.values()]

    def retains(self, key: str) -> bool:
        """Returns whether the group with this key is retained."""
        return key in self._retained

    def retain(self, slot: Slot, *, step: int) -> bool:
        """Retains a group that `step` has ended, if a checkpoint needs it. Returns False if none needs it."""
        if self._is_needed(slot, step):
            self._retained[slot.ticket.key] = slot, step
            return True
        return False

    def _is_needed(self, slot: Slot, step: int) -> bool:
        """Returns whether a learner that goes back to a checkpoint can train a group again. It can if `step`, which has
        ended the group, comes after the checkpoint, and all tokens of the group are of weights that the checkpoint
        has."""
        assert slot.meta is not None, f"group {slot.ticket.key} was leased before its commit"
        newest = slot.meta.newest
        return any(at is not None and newest <= at <= step for at in (self._complete, self._snapshot))

    def _splits(self, meta: GroupMeta) -> bool:
        """Returns whether a learner that goes back to a checkpoint loses some tokens of a group, and not all: some are
        of weights after the checkpoint, and some are not."""
        return any(at is not None and meta.oldest <= at < meta.newest for at in (self._complete, self._snapshot))

    # Prefixes

    def split_prefix(self, group: int) -> Prefix | None:
        """Returns the prefix of a committed group that a checkpoint splits; None if there is none."""
        slot = self._split.get(group)
        return None if slot is None else slot.prefix

    def split_tokens(self, lineage: Lineage) -> int:
        """Returns the number of tokens before the first token of a dead version, over the split groups that have such a
        token. A version is dead if the weights of `lineage` are not made from it. The next attempts continue the tokens
        before it."""
        metas = [slot.meta for slot in self._split.values() if slot.meta is not None]
        dead = [meta for meta in metas if not all(map(lineage.has, meta.versions))]
        return sum(meta.surviving_tokens(lineage) for meta in dead)

    def take_unneeded(self) -> tuple[str, ...]:
        """Returns the keys of the attempts whose prefixes became unneeded since the last call. They may be cleared."""
        keys, self._unneeded = tuple(self._unneeded), []
        return keys

    def store(self, slot: Slot, prefix: Prefix) -> None:
        """Records that the data plane now has `prefix` of a reserved group. The prefix of an earlier attempt is not
        needed any longer: the new prefix has its tokens. Tokens that the new prefix lacks, because the attempt could
        not read them, are counted as dropped."""
        before, slot.prefix = slot.prefix, prefix
        if before is not None and before.attempt != prefix.attempt:
            self._count_dropped(before.tokens - prefix.continued_tokens)
            self._forget(slot.ticket.group, before)

    def commit(self, slot: Slot, meta: GroupMeta) -> None:
        """Counts the tokens of the ticket's prefix that a committed attempt continued, and those that it dropped.

        Marks the group's stored tokens as unneeded (`take_unneeded`). If a checkpoint splits the group, the newest
        prefix that was reported stays until `release`.
        """
        self._count_continued(slot, meta)
        if not self._splits(meta):
            self.clear(slot)
            return
        self._split[slot.ticket.group] = slot
        if slot.prefix is None or slot.prefix.attempt != slot.ticket.attempt:
            self._unneeded.append(slot.ticket.key)

    def filter(self, slot: Slot, meta: GroupMeta) -> None:
        """Counts the tokens of the ticket's prefix that a filtered attempt continued, and those that it dropped. Marks
        the stored tokens of the group as unneeded."""
        self._count_continued(slot, meta)
        self.clear(slot)

    def clear(self, slot: Slot) -> None:
        """Marks the stored tokens of a group that is not reserved any longer as unneeded: those that its last attempt
        may have stored, also without a report, and those of an earlier attempt that the last one has not replaced."""
        self._unneeded.append(slot.ticket.key)
        if slot.prefix is not None and slot.prefix.attempt != slot.ticket.attempt:
            self._forget(slot.ticket.group, slot.prefix)

    def drop(self, prefix: Prefix) -> None:
        """Counts the tokens of a prefix that no attempt will continue."""
        self._count_dropped(prefix.tokens)

    def without_prefix(self, prompt: WaitingPrompt) -> WaitingPrompt:
        """Returns a waiting prompt without its prefix, whose tokens are counted as dropped and marked as unneeded."""
        assert prompt.prefix is not None, f"group {prompt.group} has no prefix"
        self.drop(prompt.prefix)
        self._forget(prompt.group, prompt.prefix)
        return msgspec.structs.replace(prompt, prefix=None)

    def surviving(self, prefix: Prefix | None, lineage: Lineage) -> Prefix | None:
        """Returns the part of a prefix before its first token of a dead version: one from which the weights of
        `lineage` are not made. `tokens` of the result counts the later tokens too, because the record does not tell
        them apart. Counts a prefix that has no such part as dropped, and returns None."""
        if prefix is None:
            return None
        versions = tuple(filter(lineage.has, prefix.versions))
        if not versions:
            self.drop(prefix)
            return None
        return msgspec.structs.replace(prefix, versions=versions)

    def _count_continued(self, slot: Slot, meta: GroupMeta) -> None:
        if meta.continued_tokens:
            self._ledger.count(Event.PREFIX_CONTINUED)
            self._ledger.count(Event.TOKENS_CONTINUED, meta.continued_tokens)
        if slot.prefix is not None:
            # An agent may not have used all stored answers. The prefix that its attempt stored has the unused ones too.
            own = slot.prefix.attempt == slot.ticket.attempt
            stored = slot.prefix.continued_tokens if own else slot.prefix.tokens
            self._count_dropped(stored - meta.continued_tokens)

    def _count_dropped(self, tokens: int) -> None:
        if tokens > 0:
            self._ledger.count(Event.PREFIX_DROPPED)
            self._ledger.count(Event.TOKENS_DROPPED, tokens)

    def _forget(self, group: int, prefix: Prefix) -> None:
        self._unneeded.append(f"{group}.{prefix.attempt}")


class Groups:
    """All groups that were issued.

    `prompts` issues the new prompts. Callers read these attributes, and change them with the methods only, except for
    `must_report_all`:

    - `issued`: the number of groups that were issued, and `exhausted`: whether the prompts have run out.
    - `waiting`: the prompts at the front, by group. They are issued before any new prompt, and hold no slot.
    - `open`: every slot by group, in the order of the reserves.
    - `reserved`: the reserved slots by key.
    - `held`: the reserved slots of each actor, by key. An actor without a ticket is not in it.
    - `unconfirmed`: the reserved slots whose tickets no heartbeat has named, by key, the oldest first.
    - `must_report_all`: the actors that have to name all of their tickets, because a ticket that they may hold has
      ended.
    - `ready`: the slots of committed groups, by group. `ready_by_deadline` is their number for each deadline.
    - `leased`: the slots that the learner trains.
    - `last_of_ended`: the last attempt at each ended group, and whether it was committed. The common case (attempt 0,
      committed) is left out, and of the others only the newest `LAST_ATTEMPTS` are kept, so that memory does not grow
      with every group.
    - `newest_forgotten`: the largest group that is not in `last_of_ended` any longer, -1 if there is none.
    - `unleased_by_deadline`: the number of reserved and ready groups by deadline. `-=` forgets the deadlines that no
      group has, so it does not grow with every step of the run.
    - `booked_bytes`: the bytes that all slots book.
    - `kept`: what the data plane keeps for checkpoints and next attempts.
    """

    def __init__(self, *, limits: Limits, prompts: PromptSource, ledger: Ledger, fleet: Fleet) -> None:
        self.limits = limits
        self.prompts = prompts
        self.ledger = ledger
        self._fleet = fleet
        self.kept = KeptRows(ledger=ledger)
        self.issued, self.exhausted = 0, False
        self.waiting: dict[int, WaitingPrompt] = {}
        self._waiting_order: list[int] = []  # a heap of groups
        self._waiting_issued = 0  # waiting prompts whose groups the ledger counts as reserved
        self.open: dict[int, Slot] = {}
        self.reserved: dict[str, Slot] = {}
        self.held: dict[str, dict[str, Slot]] = {}
        self.unconfirmed: dict[str, Slot] = {}
        self.must_report_all: set[str] = set()
        self.ready: dict[int, Slot] = {}
        self._ready_order: list[tuple[int, int]] = []  # a heap of (deadline, group)
        self.ready_by_deadline: Counter[int] = Counter()
        self._ready_tokens = 0
        self.leased: list[Slot] = []
        self._leased_tokens = 0
        self.last_of_ended: dict[int, tuple[int, bool]] = {}
        self.newest_forgotten = -1
        self.unleased_by_deadline: Counter[int] = Counter()
        self.booked_bytes = 0

    @property
    def slots(self) -> int:
        """Number of slots in use, including leased ones.

        The last lease may be short and leave slots free. No group can use them, because a short lease starts only when
        no prompt is left.
        """
        return len(self.reserved) + len(self.ready) + len(self.leased)

    # --- prompts, and the attempts at them ----------------------------------------------------------------------

    def next_prompt(self, *, actor: str) -> WaitingPrompt | None:
        """Returns the earliest waiting prompt, else a new prompt; None if there is neither.

        A prompt that failed on the replica of `actor`, also on an earlier actor of this replica, comes last as long as
        there is a healthy replica that has not tried the prompt.
        """
        name = replica_of(actor)

        def other_may_try(prompt: WaitingPrompt) -> bool:
            return name in map(replica_of, prompt.failed_on) and self._fleet.has_other_than(prompt.failed_on)

        return self._pop_waiting(unless=other_may_try) or self.new_prompt() or self._pop_waiting(unless=lambda _: False)

    def new_prompt(self) -> WaitingPrompt | None:
        """Returns the next new prompt for the first attempt at its group; None if there is none."""
        task = None if self.exhausted else self.prompts.next()
        if task is None:
            self.exhausted = True
            return None
        group = self.issued
        self.issued += 1
        seed = seed_of_group(self.prompts.seed, group, group_size=self.limits.group_size)
        return WaitingPrompt(group=group, attempt=0, task=task, seed=seed, issued=False)

    def wait(self, prompt: WaitingPrompt) -> None:
        """Adds a prompt to the front: the waiting prompts, which are issued before any new prompt. Takes O(log n)."""
        heapq.heappush(self._waiting_order, prompt.group)
        self.waiting[prompt.group] = prompt
        self._waiting_issued += prompt.issued

    def waiting_prompts(self) -> tuple[WaitingPrompt, ...]:
        """Returns the waiting prompts in prompt order."""
        return tuple(self.waiting[group] for group in sorted(self.waiting))

    def next_attempt(
        self, ticket: Ticket, *, issued: bool, failed: bool = False, prefix: Prefix | None = None
    ) -> WaitingPrompt:
        """Makes the entry with which the prompt of an ended ticket waits for its next attempt, and counts a retry. The
        caller adds the entry to the waiting prompts with `wait`. `issued` says whether the ledger already counts the
        group as reserved. With `failed`, the ticket's actor joins those on which an attempt at the group has failed.
        The next attempt continues the tokens of `prefix`."""
        self.ledger.count(Event.RETRY)
        return WaitingPrompt(
            group=ticket.group,
            attempt=ticket.attempt + 1,
            task=ticket.task,
            seed=ticket.seed,
            issued=issued,
            failed_on=(*ticket.failed_on, ticket.replica) if failed else ticket.failed_on,
            prefix=prefix,
        )

    def restore(
        self, *, issued: int, exhausted: bool, last_of_ended: Mapping[int, tuple[int, bool]], newest_forgotten: int
    ) -> None:
        """Continues from the numbers of a snapshot. `newest_forgotten` is that of the `Groups` that this object
        replaces."""
        self.issued, self.exhausted, self.last_of_ended = issued, exhausted, dict(last_of_ended)
        self.newest_forgotten = newest_forgotten

    def is_last_attempt(self, ticket: Ticket) -> bool:
        """Returns whether the group fails if this attempt fails.

        It fails if `max_attempts` attempts count, this one included. Attempts on actors that were quarantined do not
        count, but the group also fails after twice as many attempts of both kinds: a prompt that ends every engine must
        not be tried for ever.
        """
        failed_on, most = [*ticket.failed_on, ticket.replica], self.limits.max_attempts
        counted = sum(not self._fleet.is_excused(actor) for actor in failed_on)
        return counted >= most or len(failed_on) >= 2 * most

    def last_attempt(self, group: int) -> tuple[int, bool] | None:
        """Returns (last issued attempt at a group, whether it was committed); None if there is no such group. A group
        that may be forgotten counts as trained at its first attempt (`is_forgotten`)."""
        if not 0 <= group < self.issued:
            return None
        if slot := self.open.get(group):
            return slot.ticket.attempt, slot.meta is not None
        if due := self.waiting.get(group):
            return due.attempt - 1, False
        return self.last_of_ended.get(group, (0, True))

    def issued_attempts(self, group: int) -> int:
        """Returns the number of attempts that were issued at a group."""
        last = self.last_attempt(group)
        return 0 if last is None else last[0] + 1

    def is_forgotten(self, group: int, attempt: int) -> bool:
        """Returns whether it is not known any longer how an attempt at an ended group ended. Its rows may be cleared.

        A group that was trained at its first attempt, before the newest forgotten one, looks like a forgotten one.
        """
        if group > self.newest_forgotten or group in self.open or group in self.waiting:
            return False
        return group not in self.last_of_ended and not self.kept.retains(f"{group}.{attempt}")

    def has_ended(self, group: int, attempt: int) -> bool:
        """Returns whether no commit of this attempt counts or can still be accepted. This is so for an attempt that was
        never issued, because a restore forgets the attempts that were issued after its snapshot; for one whose rows
        were lost after its commit; and for a forgotten one (`is_forgotten`)."""
        if self.is_forgotten(group, attempt):
            return True
        slot = self.open.get(group)
        waits = slot is not None and slot.ticket.attempt == attempt
        return not waits and self.last_attempt(group) != (attempt, True)

    def is_never_committed(self, group: int, attempt: int) -> bool:
        """Returns whether this attempt was issued and has ended without a commit that counts."""
        return attempt < self.issued_attempts(group) and self.has_ended(group, attempt)

    def prefix_of(self, group: int) -> Prefix | None:
        """Returns the prefix of a group, from which its next attempt can continue; None if nothing is stored."""
        return next(iter(self._prefixes(group)), None)

    def needs_prefix(self, group: int, attempt: int) -> bool:
        """Returns whether an attempt at a group writes its prefix now, reads it, or may read it later."""
        slot = self.open.get(group)
        if slot is not None and slot.meta is None and slot.ticket.attempt == attempt:
            return True
        return any(prefix.attempt == attempt for prefix in self._prefixes(group))

    def _prefixes(self, group: int) -> list[Prefix]:
        """Returns the stored prefixes of a group: the one of its waiting prompt or reserved slot, and then the one that
        is kept of a committed group which a checkpoint splits."""
        due, slot = self.waiting.get(group), self.open.get(group)
        found = (
            due.prefix if due is not None else None,
            slot.prefix if slot is not None and slot.meta is None else None,
            self.kept.split_prefix(group),
        )
        return [prefix for prefix in found if prefix is not None]

    def _pop_waiting(self, *, unless: Callable[[WaitingPrompt], bool]) -> WaitingPrompt | None:
        """Removes and returns the earliest prompt that is not left out by `unless`; None if there is none."""
        left_out: list[int] = []
        found = None
        while self._waiting_order and found is None:
            group = heapq.heappop(self._waiting_order)
            if unless(self.waiting[group]):
                left_out.append(group)
            else:
                found = self.waiting.pop(group)
                self._waiting_issued -= found.issued
        for group in left_out:
            heapq.heappush(self._waiting_order, group)
        return found

    # --- reserved groups ----------------------------------------------------------------------------------------

    def admit(self, prompt: WaitingPrompt, *, actor: str, version: Version, step: int, now_s: float) -> Ticket:
        """Gives the prompt a slot, and returns the ticket."""
        ticket = Ticket(
            group=prompt.group,
            attempt=prompt.attempt,
            task=prompt.task,
            seed=prompt.seed,
            version=version,
            max_staleness_versions=self.limits.max_staleness_versions,
            replica=actor,
            failed_on=prompt.failed_on,
            prefix=prompt.prefix,
        )
        self.enter(Slot(ticket, step, now_s, now_s, self.limits.worst_group_bytes, prefix=prompt.prefix))
        if not prompt.issued:
            self.ledger.issue(samples=self.limits.group_size)
        self.ledger.count(Event.ATTEMPT)
        return ticket

    def enter(self, slot: Slot) -> None:
        """Adds a group with its slot: a reserved one, or a ready one if it has been committed."""
        self.open[slot.ticket.group] = slot
        self.unleased_by_deadline[slot.deadline] += 1
        self.booked_bytes += slot.booked_bytes
        if slot.meta is not None:
            self._push_ready(slot)
            return
        key = slot.ticket.key
        self.reserved[key] = slot
        self.held.setdefault(slot.ticket.replica, {})[key] = slot
        if not slot.confirmed:
            self.unconfirmed[key] = slot

    def confirm(self, key: str, *, tokens: int, actor: str, step: int) -> bool:
        """Records that an actor named a ticket in a heartbeat, with the tokens that its rollout has sampled so far.

        `step` is the step of the newest weights that the actor has reported. Returns False if the ticket is not
        reserved. Another actor's ticket is left alone.
        """
        slot = self.reserved.get(key)
        if slot is None:
            return False
        if slot.ticket.replica == actor:
            slot.confirmed = True
            self.unconfirmed.pop(key, None)
            slot.sampled_tokens, slot.newest_step = tokens, max(slot.newest_step, step)
        return True

    def unconfirm(self, slot: Slot, *, now_s: float) -> None:
        """Records that the actor does not hold the ticket of a reserved group any longer. The ticket expires after the
        heartbeat timeout, counted from `now_s`, like one whose reply was lost."""
        slot.confirmed, slot.last_seen_s = False, now_s
        self.unconfirmed[slot.ticket.key] = slot

    def unconfirmed_before(self, cutoff_s: float) -> list[Slot]:
        """Returns the reserved groups that are not confirmed and were last seen before `cutoff_s`. Takes O(their
        number)."""
        return list(takewhile(lambda slot: slot.last_seen_s < cutoff_s, self.unconfirmed.values()))

    def sort_by_time(self) -> None:
        """Puts the groups with a slot into the order of their reserves, and those that are not confirmed into the order
        of `last_seen_s`, after groups have entered in another order."""
        self.open = dict(sorted(self.open.items(), key=lambda each: each[1].reserved_at_s))
        self.unconfirmed = dict(sorted(self.unconfirmed.items(), key=lambda each: each[1].last_seen_s))

    def store(self, key: str, prefix: Prefix, *, actor: str) -> None:
        """Records the partial generation that an actor has stored for the ticket `key`, if it still holds the
        ticket."""
        slot = self.reserved.get(key)
        if slot is not None and slot.ticket.replica == actor:
            self.kept.store(slot, prefix)

    def extend(self, slot: Slot) -> None:
        """Gives a straggler the deadline of its newest token (`staleness.on_deadline: mask`). Its older tokens may then
        be too old to train; the ranks mask them."""
        self.unleased_by_deadline -= {slot.deadline: 1}
        slot.deadline = slot.newest_deadline
        self.unleased_by_deadline[slot.deadline] += 1

    def commit(self, slot: Slot, meta: GroupMeta, *, step: int) -> None:
        """Moves a group from reserved to ready. The booked bytes that its rows do not need are free again."""
        if meta.stored is not None:
            self.kept.store(slot, meta.stored)
        self._leave_actor(slot)
        slot.meta, slot.ready_step = meta, step
        self.booked_bytes += meta.row_bytes - slot.booked_bytes
        slot.booked_bytes = meta.row_bytes
        self._push_ready(slot)
        self.kept.commit(slot, meta)
        self.ledger.generated(meta.generated_tokens)

    def filter(self, slot: Slot, meta: GroupMeta) -> None:
        """Ends a reserved group that was generated, but is not trained because all of its rewards are equal
        (`algorithm.zero_variance: resample`). Another prompt may take its slot."""
        if meta.stored is not None:
            self.kept.store(slot, meta.stored)
        self._leave_actor(slot)  # the slot gets no metadata: the group does not count as committed
        self._free_unleased(slot)
        self.kept.filter(slot, meta)
        self.ledger.generated(meta.generated_tokens)
        self._end(slot, Fate.FILTERED, tokens=meta.generated_tokens)

    def retry(self, slot: Slot) -> bool:
        """Ends an attempt at a reserved group without a result, and puts the prompt ahead of all new prompts.

        Returns False if it was the last attempt; then the group has failed.
        """
        if self.is_last_attempt(slot.ticket):
            self.fail(slot)
            return False
        self._count_thrown_away(slot.sampled_tokens - slot.stored_tokens)
        self._try_again(slot)
        return True

    def restart(self, slot: Slot) -> None:
        """Ends an attempt at a straggler, and puts the prompt ahead of all new prompts (`staleness.on_deadline:
        requeue`). The attempt must not be the last one. The next attempt begins without a prefix, because the stored
        tokens are as old as this attempt, which is too old."""
        if slot.prefix is not None:
            self.kept.drop(slot.prefix)
        self._count_thrown_away(slot.sampled_tokens - slot.stored_tokens)
        self.kept.clear(slot)
        slot.prefix = None
        self._try_again(slot)

    def interrupt(self, slot: Slot, meta: GroupMeta, *, lineage: Lineage) -> None:
        """Ends an attempt at a reserved group that has a token of a dead version: one from which the weights of
        `lineage` are not made. The prompt goes ahead of all new prompts, and the attempt does not count against
        `buffer.max_attempts`. The next attempt continues the stored tokens before the first one of a dead version."""
        if meta.stored is not None:
            self.kept.store(slot, meta.stored)
        self._count_thrown_away(meta.generated_tokens - slot.stored_tokens)
        self._leave_reserved(slot)
        self.wait(self.next_attempt(slot.ticket, issued=True, prefix=self.kept.surviving(slot.prefix, lineage)))

    def fail(self, slot: Slot) -> None:
        """Ends a reserved group that will never be committed. Another prompt may take its slot."""
        self._count_thrown_away(max(slot.sampled_tokens, slot.stored_tokens))
        self._leave_reserved(slot)
        self.kept.clear(slot)
        self._end(slot, Fate.FAILED)

    def drop(self, slot: Slot) -> None:
        """Ends a straggler with the fate `dropped` (`staleness.on_deadline: drop`). Another prompt may take its slot.
        The tokens that its actor reported are counted, because they were generated."""
        self._leave_reserved(slot)
        self.kept.clear(slot)
        self.ledger.generated(slot.sampled_tokens)
        self._end(slot, Fate.DROPPED, tokens=slot.sampled_tokens)

    def _try_again(self, slot: Slot) -> None:
        self._leave_reserved(slot)
        self.wait(self.next_attempt(slot.ticket, issued=True, failed=True, prefix=slot.prefix))

    def _count_thrown_away(self, tokens: int) -> None:
        """Counts tokens of an attempt that ends without a commit. `tokens` leaves out stored tokens that a next attempt
        may continue: they are counted when they are dropped. It is negative if an actor has stored more tokens than it
        had reported; then nothing is counted."""
        self.ledger.count(Event.TOKENS_THROWN_AWAY, max(0, tokens))

    def _leave_reserved(self, slot: Slot) -> None:
        """Removes a reserved group and frees its slot. Its actor may not know that the ticket has ended, so the actor's
        next heartbeat has to name all of its tickets."""
        if slot.confirmed:
            self.must_report_all.add(slot.ticket.replica)
        self._leave_actor(slot)
        self._free_unleased(slot)

    def _leave_actor(self, slot: Slot) -> None:
        key, actor = slot.ticket.key, slot.ticket.replica
        del self.reserved[key]
        self.unconfirmed.pop(key, None)
        held = self.held[actor]
        del held[key]
        if not held:
            del self.held[actor]  # otherwise the dict would grow with every actor of the run

    # --- ready and leased groups --------------------------------------------------------------------------------

    def lease(self, share: Mapping[int, int]) -> list[Slot]:
        """Moves groups from ready to leased, earliest deadline first, ties in prompt order. `share` maps each of the
        earliest deadlines to the number of groups. Takes O(log n) for each group. Returns the leased groups."""
        earliest = [heapq.heappop(self._ready_order)[1] for _ in range(sum(share.values()))]
        self.leased = [self.ready.pop(group) for group in earliest]
        self._leased_tokens = sum(slot.tokens for slot in self.leased)
        self._ready_tokens -= self._leased_tokens
        self.ready_by_deadline -= share
        self.unleased_by_deadline -= share
        return self.leased

    def return_leased(self) -> None:
        """Moves the leased groups back to ready."""
        for slot in self._take_leased():
            self.unleased_by_deadline[slot.deadline] += 1
            self._push_ready(slot)

    def end_leased(self, fate: Fate, *, step: int) -> tuple[str, ...]:
        """Ends the leased groups of `step` with `fate` (trained or skipped) and frees their slots.

        Returns the keys whose rows may be cleared. The other groups are retained: a learner that goes back to a
        checkpoint trains them again, and the checkpoint that is being written may read their rows.
        """
        clearable: list[str] = []
        for slot in self._take_leased():
            self._free(slot)
            self._end(slot, fate)
            if not self.kept.retain(slot, step=step):
                clearable.append(slot.ticket.key)
        return tuple(clearable)

    def drop_ready(self) -> tuple[str, ...]:
        """Drops all ready groups, because no step will train them. Returns their keys, in the order of a lease."""
        slots = sorted(self.ready.values(), key=lambda slot: (slot.deadline, slot.ticket.group))
        self._leave_ready(slots)
        for slot in slots:
            self._end(slot, Fate.DROPPED)
        return tuple(slot.ticket.key for slot in slots)

    def lose_rows(self, slots: Collection[Slot]) -> None:
        """Ends ready groups whose rows are lost. Their prompts go ahead of all new prompts."""
        self._leave_ready(slots)
        for slot in slots:
            self.reissue(slot, Fate.ROWS_LOST)

    def reissue(self, slot: Slot, fate: Fate) -> None:
        """Records the final fate of an attempt that holds no slot any longer, and puts the prompt ahead of all new
        prompts. If the attempt was not committed, the next one continues the tokens that it has stored.

        The ledger counts the next attempt at such a prompt as newly issued.
        """
        self.settle(slot, fate)
        stored = slot.prefix if slot.meta is None else None
        self.wait(self.next_attempt(slot.ticket, issued=False, prefix=stored))

    def _push_ready(self, slot: Slot) -> None:
        """Adds a ready group. Takes O(log n)."""
        self.ready[slot.ticket.group] = slot
        heapq.heappush(self._ready_order, (slot.deadline, slot.ticket.group))
        self.ready_by_deadline[slot.deadline] += 1
        self._ready_tokens += slot.tokens

    def _leave_ready(self, slots: Collection[Slot]) -> None:
        """Removes some of the ready groups, and frees their slots. Takes O(n). It is for lost and dropped rows, which
        are rare and affect many groups at once."""
        for slot in slots:
            del self.ready[slot.ticket.group]
            self._ready_tokens -= slot.tokens
            self._free_unleased(slot)
        self.ready_by_deadline -= Counter(slot.deadline for slot in slots)
        self._ready_order = [(slot.deadline, group) for group, slot in self.ready.items()]
        heapq.heapify(self._ready_order)

    def _take_leased(self) -> list[Slot]:
        leased, self.leased, self._leased_tokens = self.leased, [], 0
        return leased

    def _free_unleased(self, slot: Slot) -> None:
        self.unleased_by_deadline -= {slot.deadline: 1}
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        del self.open[slot.ticket.group]
        self.booked_bytes -= slot.booked_bytes

    # --- fates, and the account ---------------------------------------------------------------------------------

    def settle(self, slot: Slot, fate: Fate, *, tokens: int = 0) -> None:
        """Counts the final fate of an attempt at a group, such as `Fate.TRAINED`. `tokens` is the number of tokens of a
        group that was not committed: its slot counts none."""
        ticket = slot.ticket
        self.ledger.settle(EndedGroup(ticket.group, ticket.attempt, fate, self.limits.group_size, slot.tokens + tokens))

    def account(self) -> Account:
        """Returns the ledger's account, including the groups that are open now. Takes O(1) in the number of groups."""
        return self.ledger.account(
            reserved=self._amount(len(self.reserved) + self._waiting_issued),
            ready=self._amount(len(self.ready), tokens=self._ready_tokens),
            leased=self._amount(len(self.leased), tokens=self._leased_tokens),
        )

    def recount(self) -> Account:
        """Returns the account with all open groups counted one by one. It differs from `account` only if a running
        number is wrong, which is a bug. Takes O(slots)."""
        issued = sum(prompt.issued for prompt in self.waiting.values())
        return self.ledger.account(
            reserved=self._amount(len(self.reserved) + issued, tokens=_tokens(self.reserved.values())),
            ready=self._amount(len(self.ready), tokens=_tokens(self.ready.values())),
            leased=self._amount(len(self.leased), tokens=_tokens(self.leased)),
        )

    def ledger_entry(self, *, of_ack: bool) -> LedgerEntry:
        """Returns the ledger's entry of this moment. With `of_ack`, the next entry has only groups that end after this
        call; without it, the open groups are counted one by one. Takes O(slots), because the entry lists all open
        groups."""
        account = self.account() if of_ack else self.recount()
        entry = LedgerEntry(
            prompts=self.issued,
            open=tuple(sorted([*self.open, *self.waiting])),
            ended=tuple(self.ledger.ended),
            issued=account.issued,
            fates={fate: amount for fate, amount in account.fates.items() if amount.groups},
        )
        if of_ack:
            self.ledger.ended = []
        return entry

    def _end(self, slot: Slot, fate: Fate, *, tokens: int = 0) -> None:
        """Counts the final fate of a group whose prompt is not issued again, and remembers its last attempt."""
        self.settle(slot, fate, tokens=tokens)
        last = (slot.ticket.attempt, slot.meta is not None)
        if last != (0, True):
            self.last_of_ended[slot.ticket.group] = last
            if len(self.last_of_ended) > LAST_ATTEMPTS:
                forgotten = next(iter(self.last_of_ended))
                del self.last_of_ended[forgotten]
                self.newest_forgotten = max(self.newest_forgotten, forgotten)

    def _amount(self, groups: int, *, tokens: int = 0) -> Amount:
        return Amount(groups, groups * self.limits.group_size, tokens)


def _tokens(slots: Collection[Slot]) -> int:
    return sum(slot.tokens for slot in slots)
