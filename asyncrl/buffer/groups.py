"""The states of groups: each group's state, the bytes that it books, and its fate.

`ReplayBuffer` makes the decisions and this module applies them. It keeps four things consistent: the containers of the
states, the booked bytes, the number of unleased groups by deadline, and the ledger. A group is in exactly one place:
reserved, ready, leased, waiting at the front, or ended.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping

import msgspec

from asyncrl.buffer.failures import FailureState
from asyncrl.buffer.ledger import Account, Amount, EndedGroup, Event, Fate, Ledger, LedgerEntry
from asyncrl.buffer.records import DuePrompt, GroupMeta, Prefix, Progress, Ticket
from asyncrl.buffer.slots import Front, ReadyQueue, Slot, amount_of
from asyncrl.buffer.snapshot import BufferSnapshot
from asyncrl.buffer.staleness import Limits
from asyncrl.common.lineage import Lineage
from asyncrl.common.version import Version
from asyncrl.data.prompts import Task

# vLLM gives sample i of a request the seed + i. So the seed of a group is a multiple of the group size, which makes all
# sample seeds different. The range leaves room below 2**63.
_SEED_RANGE = 2**62
_GROUPS_A_SEED = 2**20
LAST_ATTEMPTS = 10_000
"""Number of ended groups whose last attempt is remembered, to name the reason why a late commit is refused. Retried and
failed groups are remembered only. A commit of an older one is refused too."""


class Groups:
    """All groups that were issued. The n-th new prompt is group n. A retry keeps the group, the prompt and the seed.

    `next_prompt` returns the next new prompt, or None when there are no more.
    """

    def __init__(self, *, limits: Limits, next_prompt: Callable[[], Task | None], ledger: Ledger, seed: int) -> None:
        self._limits = limits
        self._next_prompt = next_prompt
        self._ledger = ledger
        self._seed = seed
        self._next_group = 0
        # For ended groups: the last attempt and whether it was committed. The common case (attempt 0, committed) is
        # left out, so that memory does not grow with every group.
        self._last_attempts: dict[int, tuple[int, bool]] = {}
        self.open: dict[int, Slot] = {}  # every slot by group, in the order of the reserves
        self.reserved: dict[str, Slot] = {}  # slots by key, the one with the oldest heartbeat first
        self.ready = ReadyQueue()
        self.leased: list[Slot] = []
        self.unleased_by_deadline: Counter[int] = Counter()  # number of reserved and ready groups by deadline
        self.front = Front()
        self.booked_bytes = 0
        self.exhausted = False
        self.ended: list[EndedGroup] = []  # groups that reached a final fate since the last ack; the owner empties it
        self._complete: int | None = None  # the step of the newest complete checkpoint
        self._snapshot: int | None = None  # the step of the newest snapshot
        self._retained: dict[str, tuple[Slot, int]] = {}  # by key, with the step that ended the group
        self.unneeded_prefixes: list[str] = []  # keys whose prefixes may be cleared; the owner empties it

    @property
    def slots(self) -> int:
        """Number of slots in use, including leased ones.

        The last lease may be short and leave slots free. No group can use them, because a short lease starts only when
        no prompt is left.
        """
        return len(self.reserved) + len(self.ready) + len(self.leased)

    def next_prompt(self) -> DuePrompt | None:
        """Returns the earliest prompt at the front, else a new prompt; None if there is neither."""
        if due := self.front.pop():
            return due
        return self._new_prompt()

    def _new_prompt(self) -> DuePrompt | None:
        task = None if self.exhausted else self._next_prompt()
        if task is None:
            self.exhausted = True
            return None
        group, size = self._next_group, self._limits.group_size
        self._next_group += 1
        seed = (self._seed * _GROUPS_A_SEED + group) % (_SEED_RANGE // size) * size
        return DuePrompt(group=group, attempt=0, task=task, seed=seed, issued=False)

    def admit(self, prompt: DuePrompt, *, replica: str, version: Version, step: int, now_s: float) -> Ticket:
        """Gives the prompt a slot (free → reserved) and returns the ticket."""
        ticket = Ticket(
            group=prompt.group,
            attempt=prompt.attempt,
            task=prompt.task,
            seed=prompt.seed,
            version=version,
            max_staleness_versions=self._limits.max_staleness_versions,
            replica=replica,
            interruptions=prompt.interruptions,
            prefix=prompt.prefix,
        )
        slot = Slot(ticket, step, now_s, now_s, self._limits.worst_group_bytes, prefix=prompt.prefix)
        self.open[ticket.group] = slot
        self.reserved[ticket.key] = slot
        self._count_unleased(ticket.deadline, 1)
        self.booked_bytes += slot.booked_bytes
        if not prompt.issued:
            self._ledger.issue(samples=self._limits.group_size)
        self._ledger.count(Event.ATTEMPT)
        return ticket

    def heard(self, key: str, progress: Progress, *, replica: str, step: int | None, now_s: float) -> None:
        """Records that the replica named its ticket in a heartbeat. Another replica's ticket is left alone.

        `step` is the step of the weights that the replica has loaded; None if it has none at the moment.
        """
        slot = self.reserved.get(key)
        if slot is not None and slot.ticket.replica == replica:
            slot.heard_at_s, slot.progress = now_s, progress
            slot.newest_step = max(slot.newest_step, slot.newest_step if step is None else step)
            if progress.prefix is not None:
                self._stored(slot, progress.prefix)
            self.reserved[key] = self.reserved.pop(key)

    def drop_prefix(self, prompt: DuePrompt) -> DuePrompt:
        """Returns a waiting prompt without its prefix. Counts the tokens."""
        assert prompt.prefix is not None, f"group {prompt.group} has no prefix"
        self._count_dropped(prompt.prefix)
        self._forget(prompt.group, prompt.prefix)
        return msgspec.structs.replace(prompt, prefix=None)

    def restart(self, slot: Slot) -> None:
        """Ends an attempt at a reserved group that is not the last one. The next attempt begins anew: what is stored of
        the group is as old as the attempt that is in the way."""
        if slot.prefix is not None:
            self._count_dropped(slot.prefix)
        self._clear_prefixes(slot)
        slot.prefix = None
        self.retry(slot)

    def needs_prefix(self, group: int, attempt: int) -> bool:
        """Returns whether an attempt at a group writes its prefix now, reads it, or may read it later."""
        if due := self.front.get(group):
            return due.prefix is not None and due.prefix.attempt == attempt
        slot = self.open.get(group)
        if slot is None or slot.meta is not None:
            return False
        return attempt in (slot.ticket.attempt, slot.prefix.attempt if slot.prefix else None)

    def unheard_before(self, cutoff_s: float) -> list[Slot]:
        """Returns the reserved groups whose last heartbeat is before `cutoff_s`. Takes O(their number)."""
        unheard: list[Slot] = []
        for slot in self.reserved.values():
            if slot.heard_at_s >= cutoff_s:
                break
            unheard.append(slot)
        return unheard

    def commit(self, slot: Slot, meta: GroupMeta, *, step: int) -> None:
        """Moves a group from reserved to ready. The booked bytes that its rows do not need are free again."""
        del self.reserved[meta.key]
        slot.meta, slot.ready_step = meta, step
        self._settle_prefix(slot, continued_tokens=meta.continued_tokens)
        self.booked_bytes += meta.row_bytes - slot.booked_bytes
        slot.booked_bytes = meta.row_bytes
        self.ready.push(slot)
        self._ledger.generated(meta.generated_tokens)

    def retry(self, slot: Slot) -> bool:
        """Ends an attempt at a reserved group without a result, and puts the prompt at the front.

        Returns False if it was the last attempt; then the group has failed.
        """
        if slot.ticket.attempt + 1 - slot.ticket.interruptions >= self._limits.max_attempts:
            self.fail(slot)
            return False
        self._leave_reserved(slot)
        self.front.push(self._again(slot.ticket, issued=True, prefix=slot.prefix))
        return True

    def interrupt(self, slot: Slot, *, lineage: Lineage) -> None:
        """Ends an attempt at a reserved group that has a token of a dead version of `lineage`. The prompt goes to the
        front, and the attempt does not count. What is stored up to the first dead token stays."""
        self._leave_reserved(slot)
        prefix = self._surviving(slot.prefix, lineage)
        self.front.push(self._again(slot.ticket, issued=True, interrupted=True, prefix=prefix))

    def fail(self, slot: Slot) -> None:
        """Ends a reserved group that will never be committed. Another prompt may take its slot."""
        self._leave_reserved(slot)
        self._clear_prefixes(slot)
        self._end(slot, Fate.FAILED)

    def drop(self, slot: Slot) -> None:
        """Drops a reserved group. Another prompt may take its slot. The tokens that its replica reported are counted,
        because they were generated."""
        tokens = slot.progress.generated_tokens
        self._leave_reserved(slot)
        self._clear_prefixes(slot)
        self._ledger.generated(tokens)
        self._end(slot, Fate.DROPPED, tokens=tokens)

    def extend(self, slot: Slot) -> None:
        """Gives a reserved group the deadline of its newest token. Its older tokens may then be too old to train."""
        self._count_unleased(slot.deadline, -1)
        slot.deadline = slot.newest_deadline
        self._count_unleased(slot.deadline, 1)

    def lose_rows(self, slots: Collection[Slot]) -> None:
        """Ends ready groups whose rows are lost. Their prompts go to the front.

        The ledger counts the next attempt at such a prompt as newly issued.
        """
        self.ready.discard(slots)
        for slot in slots:
            self._count_unleased(slot.deadline, -1)
            self._free(slot)
            self._settle(Fate.ROWS_LOST, slot)
            self.front.push(self._again(slot.ticket, issued=False))

    def drop_ready(self) -> tuple[str, ...]:
        """Drops all ready groups, because no step will train them. Returns their keys."""
        slots = self.ready.take(self.ready.by_deadline())
        for slot in slots:
            self._count_unleased(slot.deadline, -1)
            self._free(slot)
            self._end(slot, Fate.DROPPED)
        return tuple(slot.ticket.key for slot in slots)

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

    def end_leased(self, fate: Fate, *, step: int) -> tuple[str, ...]:
        """Ends the leased groups of `step` with `fate` (trained or skipped) and frees their slots.

        Returns the keys whose rows may be cleared. The other groups are retained until `release`: a learner that goes
        back to a checkpoint trains them again, and the checkpoint that is being written may read their rows.
        """
        leased, self.leased = self.leased, []
        over: list[str] = []
        for slot in leased:
            self._free(slot)
            self._end(slot, fate)
            if self._is_needed(slot, step):
                self._retained[slot.ticket.key] = slot, step
            else:
                over.append(slot.ticket.key)
        return tuple(over)

    def release(self, *, complete: int | None) -> tuple[str, ...]:
        """Forgets retained groups that are not needed, now that the newest complete checkpoint is that of step
        `complete`; with None, all. Returns their keys; their rows may be cleared."""
        self._complete = complete
        if complete is None:
            self._snapshot = None
        over = tuple(key for key, (slot, step) in self._retained.items() if not self._is_needed(slot, step))
        for key in over:
            del self._retained[key]
        return over

    def _is_needed(self, slot: Slot, step: int) -> bool:
        """Returns whether a learner that goes back to a checkpoint can train a group again that `step` ended: it was
        not trained at the checkpoint, and no token is newer."""
        assert slot.meta is not None, f"group {slot.ticket.key} was leased before its commit"
        newest = slot.meta.newest
        return any(at is not None and newest <= at <= step for at in (self._complete, self._snapshot))

    def last_attempt(self, group: int) -> tuple[int, bool] | None:
        """Returns (last issued attempt at a group, whether it was committed); None if there is no such group."""
        if not 0 <= group < self._next_group:
            return None
        if slot := self.open.get(group):
            return slot.ticket.attempt, slot.meta is not None
        if due := self.front.get(group):
            return due.attempt - 1, False
        return self._last_attempts.get(group, (0, True))

    def attempts(self, group: int) -> int:
        """Returns the number of attempts that were issued at a group."""
        last = self.last_attempt(group)
        return 0 if last is None else last[0] + 1

    def has_ended(self, group: int, attempt: int) -> bool:
        """Returns whether no commit of this attempt was accepted or can be accepted. An attempt that was never issued
        counts as such, because a restore forgets the attempts that were issued after its snapshot."""
        last = self.last_attempt(group)
        return last is None or attempt > last[0] or self.is_never_committed(group, attempt)

    def is_never_committed(self, group: int, attempt: int) -> bool:
        """Returns whether this attempt was issued and has ended without a commit that counts.

        An attempt whose rows were lost after its commit counts as such.
        """
        last = self.last_attempt(group)
        if last is None or attempt > last[0]:
            return False
        slot = self.open.get(group)
        waits = slot is not None and slot.ticket.attempt == attempt
        return not waits and last != (attempt, True)

    def account(self) -> Account:
        """Returns the ledger's account, including the groups that are open now. Takes O(slots)."""
        size = self._limits.group_size
        waiting = Amount(self.front.issued_groups, self.front.issued_groups * size, 0)
        return self._ledger.account(
            reserved=self._amount(self.reserved.values()) + waiting,
            ready=self._amount(self.ready.slots()),
            leased=self._amount(self.leased),
        )

    def entry(self) -> LedgerEntry:
        """Returns the ledger's entry of this moment. Takes O(slots)."""
        account = self.account()
        waiting = (prompt.group for prompt in self.front.prompts())
        return LedgerEntry(
            prompts=self._next_group,
            open=tuple(sorted([*self.open, *waiting])),
            ended=tuple(self.ended),
            issued=account.issued,
            fates={fate: amount for fate, amount in account.fates.items() if amount.groups},
        )

    def snapshot(self, *, version: Version, failures: FailureState) -> BufferSnapshot:
        """Returns the present state, with these parts of it that belong to the buffer. From now on, groups that a
        learner would need that goes back to it are retained."""
        self._snapshot = version.step
        return BufferSnapshot(
            version=version,
            next_group=self._next_group,
            exhausted=self.exhausted,
            open=tuple(slot.as_open() for slot in self.open.values()),
            waiting=self.front.prompts(),
            last_attempts=dict(self._last_attempts),
            ledger=self._ledger.state(),
            failures=failures,
            ended=tuple(self.ended),
        )

    def living(self, *, lineage: Lineage, loaded: Mapping[str, Version]) -> dict[int, Slot]:
        """Returns the groups of which no token is of a dead version of `lineage`, by group: reserved, ready, leased and
        retained ones.

        `loaded` has the last version that each replica reported. The tokens of a reserved group are not known, but a
        replica with a dead version has generated some with it.
        """
        committed = [*self.ready.slots(), *self.leased, *(slot for slot, _ in self._retained.values())]
        living = {
            slot.ticket.group: slot
            for slot in committed
            if slot.meta is not None and all(map(lineage.has, slot.meta.versions))
        }
        for slot in self.reserved.values():
            ticket = slot.ticket
            versions = {ticket.version, loaded.get(ticket.replica, ticket.version)}
            for prefix in (ticket.prefix, slot.prefix):
                versions.update(prefix.versions if prefix is not None else ())
            if all(map(lineage.has, versions)):
                living[ticket.group] = slot
        return living

    def _prefix(self, group: int) -> Prefix | None:
        """Returns what is stored of a group that is reserved or waits."""
        if due := self.front.get(group):
            return due.prefix
        slot = self.open.get(group)
        return slot.prefix if slot is not None and slot.meta is None else None

    def restore(
        self,
        snapshot: BufferSnapshot,
        *,
        earlier: "Groups",
        lineage: Lineage,
        loaded: Mapping[str, Version],
        now_s: float,
    ) -> None:
        """Continues from a snapshot. There are no groups yet.

        `earlier` are the groups of a buffer that went on after the snapshot; there are none if that buffer is gone.
        `lineage` and `loaded` are those of `living`.

        A group that was ready at the snapshot is ready again. Any other group that is living stays as it is. The
        remaining prompts go to the front. So does a group without room in the buffer, or in the steps before its
        deadline: the limits may be smaller than those of the snapshot. No attempt that was issued after the snapshot is
        issued again, because its replica may still commit it.

        What is stored of a prompt is kept up to its first token of a dead version.
        """
        self._complete = self._snapshot = step = snapshot.version.step
        self._next_group, self.exhausted = snapshot.next_group, snapshot.exhausted
        self._last_attempts = dict(snapshot.last_attempts)
        self.ended = list(snapshot.ended)
        living = earlier.living(lineage=lineage, loaded=loaded)
        slots: list[Slot] = []
        due = list(snapshot.waiting)
        for group in snapshot.open:
            ticket, meta = group.ticket, group.meta
            if meta is None:
                due.append(self._again(ticket, issued=True, interrupted=True, prefix=group.prefix))
                continue
            slot = Slot(ticket, group.reserved_step, now_s, now_s, meta.row_bytes, meta, group.ready_step)
            slot.deadline = group.deadline
            if earlier.attempts(ticket.group) <= ticket.attempt + 1:
                slots.append(slot)
            else:  # its rows were lost after the snapshot, and another attempt was issued
                self._settle(Fate.RETURNED_ON_RESUME, slot)
                due.append(self._again(ticket, issued=False, interrupted=True))
        while self._next_group < earlier._next_group and (prompt := self._new_prompt()) is not None:
            due.append(prompt)
        for prompt in due:
            if (kept := living.get(prompt.group)) is not None:
                if not prompt.issued:
                    self._ledger.issue(samples=self._limits.group_size)
                self._ledger.generated(self._amount([kept]).tokens)
                slots.append(kept)
            else:
                stored = earlier._prefix(prompt.group)
                if stored is None and prompt.prefix is not None:  # it was cleared since, or its row store has ended
                    self._count_dropped(prompt.prefix)
                prompt = prompt.not_before(earlier.attempts(prompt.group))
                self.front.push(msgspec.structs.replace(prompt, prefix=self._surviving(stored, lineage)))
        for slot in sorted(slots, key=lambda each: (each.deadline, each.ticket.group)):
            if self._has_room(slot, step=step):
                self._place(slot, step=step)
            else:
                self._settle(Fate.RETURNED_ON_RESUME, slot)
                self.front.push(self._again(slot.ticket, issued=False, interrupted=True))
        self.reserved = dict(sorted(self.reserved.items(), key=lambda each: each[1].heard_at_s))

    def _surviving(self, prefix: Prefix | None, lineage: Lineage) -> Prefix | None:
        """Returns the part of a prefix up to its first token of a dead version. Counts a prefix that has no such part
        as dropped."""
        if prefix is None or (kept := prefix.surviving(lineage)) is not None:
            return kept if prefix is not None else None
        self._count_dropped(prefix)
        return None

    def _place(self, slot: Slot, *, step: int) -> None:
        """Puts a restored group into its slot. The learner is at `step`, which may be an earlier one than before."""
        slot.reserved_step, slot.ready_step = min(slot.reserved_step, step), min(slot.ready_step, step)
        self.open[slot.ticket.group] = slot
        self._count_unleased(slot.deadline, 1)
        self.booked_bytes += slot.booked_bytes
        if slot.meta is None:
            self.reserved[slot.ticket.key] = slot
        else:
            self.ready.push(slot)

    def _has_room(self, slot: Slot, *, step: int) -> bool:
        """Returns True if a restored group fits into the buffer, and into the steps up to its deadline.

        Groups are restored by deadline, so all groups that have a slot already are due no later than this one.
        """
        return (
            self.slots < (slot.deadline - step + 1) * self._limits.groups_per_step
            and self.slots < self._limits.capacity_groups
            and self.booked_bytes + slot.booked_bytes <= self._limits.capacity_bytes
        )

    def _count_unleased(self, deadline: int, groups: int) -> None:
        self.unleased_by_deadline[deadline] += groups
        if not self.unleased_by_deadline[deadline]:
            del self.unleased_by_deadline[deadline]  # otherwise the dict would grow with every step of the run

    def _leave_reserved(self, slot: Slot) -> None:
        del self.reserved[slot.ticket.key]
        self._count_unleased(slot.deadline, -1)
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        del self.open[slot.ticket.group]
        self.booked_bytes -= slot.booked_bytes

    def _end(self, slot: Slot, fate: Fate, *, tokens: int = 0) -> None:
        self._settle(fate, slot, tokens=tokens)
        last = (slot.ticket.attempt, slot.meta is not None)
        if last != (0, True):
            self._last_attempts[slot.ticket.group] = last
            if len(self._last_attempts) > LAST_ATTEMPTS:
                del self._last_attempts[next(iter(self._last_attempts))]

    def _settle(self, fate: Fate, slot: Slot, *, tokens: int = 0) -> None:
        """Counts a final fate of a group's attempt. `tokens` are those of a group that was not committed."""
        amount = self._amount([slot]) + Amount(tokens=tokens)
        self._ledger.settle(fate, amount)
        self.ended.append(EndedGroup(slot.ticket.group, slot.ticket.attempt, fate, amount.samples, amount.tokens))

    def _stored(self, slot: Slot, prefix: Prefix) -> None:
        """Records what the data plane has of a reserved group now. The prefix of an earlier attempt is not needed any
        longer: the new one has its tokens, unless the attempt could not read it."""
        before, slot.prefix = slot.prefix, prefix
        if before is not None and before.attempt != prefix.attempt:
            self._count_dropped(before, continued_tokens=prefix.continued_tokens)
            self._forget(slot.ticket.group, before)

    def _settle_prefix(self, slot: Slot, *, continued_tokens: int) -> None:
        """Counts what a committed attempt took from the prefix of its ticket."""
        if continued_tokens:
            self._ledger.count(Event.PREFIX_CONTINUED)
            self._ledger.count(Event.TOKENS_CONTINUED, continued_tokens)
        if slot.prefix is not None and slot.prefix.attempt != slot.ticket.attempt:
            self._count_dropped(slot.prefix, continued_tokens=continued_tokens)
        self._clear_prefixes(slot)

    def _count_dropped(self, prefix: Prefix, *, continued_tokens: int = 0) -> None:
        """Counts the tokens of a prefix that no attempt will continue. An attempt has continued some of them."""
        if (dropped := prefix.tokens - continued_tokens) > 0:
            self._ledger.count(Event.PREFIX_DROPPED)
            self._ledger.count(Event.TOKENS_DROPPED, dropped)

    def _clear_prefixes(self, slot: Slot) -> None:
        """Marks what is stored of a group that is not reserved any longer as unneeded: what its last attempt may have
        stored without a report, and what it has not replaced of an earlier attempt."""
        self.unneeded_prefixes.append(slot.ticket.key)
        if slot.prefix is not None and slot.prefix.attempt != slot.ticket.attempt:
            self._forget(slot.ticket.group, slot.prefix)

    def _forget(self, group: int, prefix: Prefix) -> None:
        self.unneeded_prefixes.append(f"{group}.{prefix.attempt}")

    def _again(
        self, ticket: Ticket, *, issued: bool, interrupted: bool = False, prefix: Prefix | None = None
    ) -> DuePrompt:
        """Returns the prompt of a ticket that has ended, for its next attempt, which begins with `prefix`."""
        self._ledger.count(Event.RETRY)
        return DuePrompt(
            group=ticket.group,
            attempt=ticket.attempt + 1,
            task=ticket.task,
            seed=ticket.seed,
            issued=issued,
            interruptions=ticket.interruptions + interrupted,
            prefix=prefix,
        )

    def _amount(self, slots: Collection[Slot]) -> Amount:
        return amount_of(slots, group_size=self._limits.group_size)
