"""Stored prefixes: what the data plane has of groups that are reserved or wait, and which of it no attempt needs.

An attempt stores the tokens that it has generated so far, and the next attempt at the group continues them. The slot of
a reserved group and the prompt at the front name the newest stored prefix. That of a committed group stays if a learner
that goes back to a checkpoint would lose some of the group's tokens, and not all. This module counts the tokens that
were continued and those that were dropped, and collects the keys of prefixes that may be cleared.
"""

from collections.abc import Callable

import msgspec

from asyncrl.buffer.ledger import Event, Ledger
from asyncrl.buffer.records import DuePrompt, GroupMeta, Prefix
from asyncrl.buffer.slots import Slot
from asyncrl.buffer.table import GroupTable
from asyncrl.common.lineage import Lineage


class StoredPrefixes:
    """The stored prefixes of the groups in a table."""

    def __init__(self, table: GroupTable, *, ledger: Ledger) -> None:
        self._table = table
        self._ledger = ledger
        self._split: dict[int, Slot] = {}
        """Committed groups that have older and newer tokens than a checkpoint, with what is stored of them."""
        self._unneeded: list[str] = []  # keys whose prefixes became unneeded since `take_unneeded`

    def of(self, group: int) -> Prefix | None:
        """Returns what is stored of a group."""
        return next(iter(self._stored(group)), None)

    def is_needed(self, group: int, attempt: int) -> bool:
        """Returns whether an attempt at a group writes its prefix now, reads it, or may read it later."""
        slot = self._reserved(group)
        if slot is not None and slot.ticket.attempt == attempt:
            return True
        return any(prefix.attempt == attempt for prefix in self._stored(group))

    def take_unneeded(self) -> tuple[str, ...]:
        """Returns the keys of the attempts whose prefixes became unneeded since the last call. They may be cleared."""
        keys, self._unneeded = tuple(self._unneeded), []
        return keys

    def store(self, slot: Slot, prefix: Prefix) -> None:
        """Records what the data plane has of a reserved group now. The prefix of an earlier attempt is not needed any
        longer: the new one has its tokens, unless the attempt could not read it."""
        before, slot.prefix = slot.prefix, prefix
        if before is not None and before.attempt != prefix.attempt:
            self.count_dropped(before, continued_tokens=prefix.continued_tokens)
            self._forget(slot.ticket.group, before)

    def settle(self, slot: Slot, *, continued_tokens: int, split: bool) -> None:
        """Counts what a committed attempt took from the prefix of its ticket. What is stored is cleared, or stays until
        `release` if a checkpoint splits the group."""
        if continued_tokens:
            self._ledger.count(Event.PREFIX_CONTINUED)
            self._ledger.count(Event.TOKENS_CONTINUED, continued_tokens)
        if slot.prefix is not None:
            # An agent may not have used all stored answers. What its attempt stored has the unused ones too.
            own = slot.prefix.attempt == slot.ticket.attempt
            self._drop((slot.prefix.continued_tokens if own else slot.prefix.tokens) - continued_tokens)
        if not split:
            self.clear(slot)
            return
        self._split[slot.ticket.group] = slot
        if slot.prefix is None or slot.prefix.attempt != slot.ticket.attempt:
            self._unneeded.append(slot.ticket.key)

    def release(self, splits: Callable[[GroupMeta], bool]) -> None:
        """Marks what is stored of committed groups as unneeded, unless `splits` returns True for them."""
        for group, slot in list(self._split.items()):
            assert slot.meta is not None, f"group {slot.ticket.key} is split before its commit"
            if not splits(slot.meta):
                del self._split[group]
                if slot.prefix is not None:
                    self._forget(group, slot.prefix)

    def split_tokens(self, lineage: Lineage) -> int:
        """Returns how many tokens ancestors have generated of the groups that weights of dead versions finished."""
        metas = [slot.meta for slot in self._split.values() if slot.meta is not None]
        dead = [meta for meta in metas if not all(map(lineage.has, meta.versions))]
        return sum(meta.surviving_tokens(lineage) for meta in dead)

    def without(self, prompt: DuePrompt) -> DuePrompt:
        """Returns a waiting prompt without its prefix. Counts the tokens."""
        assert prompt.prefix is not None, f"group {prompt.group} has no prefix"
        self.count_dropped(prompt.prefix)
        self._forget(prompt.group, prompt.prefix)
        return msgspec.structs.replace(prompt, prefix=None)

    def clear(self, slot: Slot) -> None:
        """Marks what is stored of a group that is not reserved any longer as unneeded: what its last attempt may have
        stored without a report, and what it has not replaced of an earlier attempt."""
        self._unneeded.append(slot.ticket.key)
        if slot.prefix is not None and slot.prefix.attempt != slot.ticket.attempt:
            self._forget(slot.ticket.group, slot.prefix)

    def surviving(self, prefix: Prefix | None, lineage: Lineage) -> Prefix | None:
        """Returns the part of a prefix up to its first token of a dead version of `lineage`. Its `tokens` then counts
        the dead ones too, because the record does not tell them apart. Counts a prefix that has no such part as
        dropped."""
        if prefix is None:
            return None
        versions = tuple(filter(lineage.has, prefix.versions))
        if not versions:
            self.count_dropped(prefix)
            return None
        return msgspec.structs.replace(prefix, versions=versions)

    def count_dropped(self, prefix: Prefix, *, continued_tokens: int = 0) -> None:
        """Counts the tokens of a prefix that no attempt will continue. An attempt has continued some of them."""
        self._drop(prefix.tokens - continued_tokens)

    def _drop(self, tokens: int) -> None:
        if tokens > 0:
            self._ledger.count(Event.PREFIX_DROPPED)
            self._ledger.count(Event.TOKENS_DROPPED, tokens)

    def _stored(self, group: int) -> list[Prefix]:
        """Returns what a waiting or reserved group continues, before what is stored of its commit."""
        holders = (self._table.front.get(group), self._reserved(group), self._split.get(group))
        return [holder.prefix for holder in holders if holder is not None and holder.prefix is not None]

    def _reserved(self, group: int) -> Slot | None:
        slot = self._table.open.get(group)
        return slot if slot is not None and slot.meta is None else None

    def _forget(self, group: int, prefix: Prefix) -> None:
        self._unneeded.append(f"{group}.{prefix.attempt}")
