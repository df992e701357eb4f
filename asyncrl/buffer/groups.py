"""The transitions of groups: what changes together when a group changes its state or ends.

The other parts of the buffer make the decisions, and `Groups` applies them to the table of groups, the ledger, the
attempts, the stored prefixes and the retained groups. Transitions that concern the table only are methods of
`GroupTable`.
"""

from collections.abc import Collection

from asyncrl.buffer.attempts import Attempts
from asyncrl.buffer.fates import Fates
from asyncrl.buffer.fleet import Fleet
from asyncrl.buffer.ledger import Event, Fate, Ledger
from asyncrl.buffer.prefixes import StoredPrefixes
from asyncrl.buffer.records import DuePrompt, GroupMeta, Prefix, Ticket
from asyncrl.buffer.retained import Retained
from asyncrl.buffer.slots import Slot
from asyncrl.buffer.staleness import Limits
from asyncrl.buffer.table import GroupTable
from asyncrl.common.lineage import Lineage
from asyncrl.common.version import Version
from asyncrl.data.prompts import PromptSource


class Groups:
    """All groups that were issued.

    `prompts` issues the new prompts. The attributes are the parts of the state: `table` (the groups by state),
    `attempts`, `prefixes` (partial generations), `retained` and `fates`. `not_loaded` has the keys of the ready groups
    whose rows are only in the checkpoint that a learner restores. It is empty after the learner's first lease call,
    before which the learner loads the rows.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        prompts: PromptSource,
        ledger: Ledger,
        fleet: Fleet,
    ) -> None:
        self.limits = limits
        self.ledger = ledger
        self.table = GroupTable()
        self.attempts = Attempts(
            table=self.table,
            prompts=prompts,
            limits=limits,
            ledger=ledger,
            fleet=fleet,
        )
        self.prefixes = StoredPrefixes(self.table, ledger=ledger)
        self.retained = Retained()
        self.not_loaded: set[str] = set()
        self.fates = Fates(self.table, attempts=self.attempts, ledger=ledger, group_size=limits.group_size)

    def admit(self, prompt: DuePrompt, *, replica: str, version: Version, step: int, now_s: float) -> Ticket:
        """Gives the prompt a slot (free → reserved) and returns the ticket."""
        ticket = Ticket(
            group=prompt.group,
            attempt=prompt.attempt,
            task=prompt.task,
            seed=prompt.seed,
            version=version,
            max_staleness_versions=self.limits.max_staleness_versions,
            replica=replica,
            failed_on=prompt.failed_on,
            prefix=prompt.prefix,
        )
        self.table.enter(Slot(ticket, step, now_s, now_s, self.limits.worst_group_bytes, prefix=prompt.prefix))
        if not prompt.issued:
            self.ledger.issue(samples=self.limits.group_size)
        self.ledger.count(Event.ATTEMPT)
        return ticket

    def named(self, key: str, *, tokens: int, replica: str, step: int) -> bool:
        """Records that a replica named a ticket in a heartbeat, with the tokens that its rollout has sampled so far.

        `step` is the step of the newest weights that the replica has reported. Returns False if the ticket is not
        reserved. Another replica's ticket is left alone.
        """
        slot = self.table.reserved.get(key)
        if slot is None:
            return False
        if slot.ticket.replica == replica:
            self.table.confirm(slot)
            slot.sampled_tokens, slot.newest_step = tokens, max(slot.newest_step, step)
        return True

    def stored(self, key: str, prefix: Prefix, *, replica: str) -> None:
        """Records what a replica has stored of the group of its ticket."""
        slot = self.table.reserved.get(key)
        if slot is not None and slot.ticket.replica == replica:
            self.prefixes.store(slot, prefix)

    def commit(self, slot: Slot, meta: GroupMeta, *, step: int) -> None:
        """Moves a group from reserved to ready. The booked bytes that its rows do not need are free again."""
        self._store(slot, meta)
        self.table.commit(slot, meta, step=step)
        self.prefixes.settle(slot, continued_tokens=meta.continued_tokens, split=self.retained.splits(meta))
        self.ledger.generated(meta.generated_tokens)

    def filter(self, slot: Slot, meta: GroupMeta) -> None:
        """Ends a reserved group that was generated, but is not trained. Another prompt may take its slot."""
        self._store(slot, meta)
        self.table.leave_filtered(slot)  # without metadata, it does not count as committed: its rows are cleared
        self.prefixes.settle(slot, continued_tokens=meta.continued_tokens, split=False)
        self.ledger.generated(meta.generated_tokens)
        self._end(slot, Fate.FILTERED, tokens=meta.generated_tokens)

    def retry(self, slot: Slot) -> bool:
        """Ends an attempt at a reserved group without a result, and puts the prompt at the front.

        Returns False if it was the last attempt; then the group has failed.
        """
        if self.attempts.is_last(slot.ticket):
            self.fail(slot)
            return False
        self._count_thrown_away(slot.sampled_tokens - _stored_tokens(slot))
        self._again(slot)
        return True

    def restart(self, slot: Slot) -> None:
        """Ends an attempt at a reserved group that is not the last one. The next attempt begins anew: what is stored of
        the group is as old as the attempt that is in the way."""
        if slot.prefix is not None:
            self.prefixes.count_dropped(slot.prefix)
        self._count_thrown_away(slot.sampled_tokens - _stored_tokens(slot))
        self.prefixes.clear(slot)
        slot.prefix = None
        self._again(slot)

    def interrupt(self, slot: Slot, meta: GroupMeta, *, lineage: Lineage) -> None:
        """Ends an attempt at a reserved group that has a token of a dead version of `lineage`. The prompt goes to the
        front, and the attempt does not count. What is stored up to the first dead token stays."""
        self._store(slot, meta)
        self._count_thrown_away(meta.generated_tokens - _stored_tokens(slot))
        self.table.leave_reserved(slot)
        prefix = self.prefixes.surviving(slot.prefix, lineage)
        self.table.front.push(self.attempts.again(slot.ticket, issued=True, prefix=prefix))

    def fail(self, slot: Slot) -> None:
        """Ends a reserved group that will never be committed. Another prompt may take its slot."""
        self._count_thrown_away(max(slot.sampled_tokens, _stored_tokens(slot)))
        self.table.leave_reserved(slot)
        self.prefixes.clear(slot)
        self._end(slot, Fate.FAILED)

    def drop(self, slot: Slot) -> None:
        """Drops a reserved group. Another prompt may take its slot. The tokens that its replica reported are counted,
        because they were generated."""
        self.table.leave_reserved(slot)
        self.prefixes.clear(slot)
        self.ledger.generated(slot.sampled_tokens)
        self._end(slot, Fate.DROPPED, tokens=slot.sampled_tokens)

    def drop_ready(self) -> tuple[str, ...]:
        """Drops all ready groups, because no step will train them. Returns their keys, in the order of a lease."""
        slots = sorted(self.table.ready.slots(), key=lambda slot: (slot.deadline, slot.ticket.group))
        self.table.leave_ready(slots)
        for slot in slots:
            self._end(slot, Fate.DROPPED)
        return tuple(slot.ticket.key for slot in slots)

    def lose_rows(self, slots: Collection[Slot]) -> None:
        """Ends ready groups whose rows are lost. Their prompts go to the front."""
        self.table.leave_ready(slots)
        for slot in slots:
            self.reissue(slot, Fate.ROWS_LOST)

    def end_leased(self, fate: Fate, *, step: int) -> tuple[str, ...]:
        """Ends the leased groups of `step` with `fate` (trained or skipped) and frees their slots.

        Returns the keys whose rows may be cleared. The other groups are retained: a learner that goes back to a
        checkpoint trains them again, and the checkpoint that is being written may read their rows.
        """
        over: list[str] = []
        for slot in self.table.leave_leased():
            self._end(slot, fate)
            if not self.retained.end(slot, step=step):
                over.append(slot.ticket.key)
        return tuple(over)

    def reissue(self, slot: Slot, fate: Fate) -> None:
        """Settles the fate of an attempt that holds no slot any longer, and puts the prompt at the front. If the
        attempt was not committed, the next one begins with what it has stored.

        The ledger counts the next attempt at such a prompt as newly issued.
        """
        self.fates.settle(fate, slot)
        stored = slot.prefix if slot.meta is None else None
        self.table.front.push(self.attempts.again(slot.ticket, issued=False, prefix=stored))

    def _again(self, slot: Slot) -> None:
        self.table.leave_reserved(slot)
        self.table.front.push(self.attempts.again(slot.ticket, issued=True, failed=True, prefix=slot.prefix))

    def _count_thrown_away(self, tokens: int) -> None:
        """Counts tokens of an attempt that ends without a commit. Stored tokens are counted when they are dropped. The
        number is not positive if a replica has stored more than it had reported."""
        self.ledger.count(Event.TOKENS_THROWN_AWAY, max(0, tokens))

    def _store(self, slot: Slot, meta: GroupMeta) -> None:
        if meta.stored is not None:
            self.prefixes.store(slot, meta.stored)

    def _end(self, slot: Slot, fate: Fate, *, tokens: int = 0) -> None:
        self.fates.settle(fate, slot, tokens=tokens)
        self.attempts.record_end(slot)


def _stored_tokens(slot: Slot) -> int:
    return 0 if slot.prefix is None else slot.prefix.tokens
