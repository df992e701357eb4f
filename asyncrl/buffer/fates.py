"""The fates of groups: settles the final ones in the ledger, and adds the open ones from the table to the account."""

from collections.abc import Collection

from asyncrl.buffer.attempts import Attempts
from asyncrl.buffer.ledger import Account, Amount, EndedGroup, Fate, Ledger, LedgerEntry
from asyncrl.buffer.slots import Slot
from asyncrl.buffer.table import GroupTable


class Fates:
    """The fates of the groups in a table. `ended` are the groups that reached a final fate since the last ack."""

    def __init__(self, table: GroupTable, *, attempts: Attempts, ledger: Ledger, group_size: int) -> None:
        self._table = table
        self._attempts = attempts
        self._ledger = ledger
        self._group_size = group_size
        self.ended: list[EndedGroup] = []

    def amount(self, slots: Collection[Slot]) -> Amount:
        """Returns the number of groups, samples and generated tokens of slots."""
        return self._amount(len(slots), tokens=sum(slot.tokens for slot in slots))

    def settle(self, fate: Fate, slot: Slot, *, tokens: int = 0) -> None:
        """Counts a final fate of a group's attempt. `tokens` are those of a group that was not committed."""
        amount = self.amount([slot]) + Amount(tokens=tokens)
        self._ledger.settle(fate, amount)
        self.ended.append(EndedGroup(slot.ticket.group, slot.ticket.attempt, fate, amount.samples, amount.tokens))

    def account(self) -> Account:
        """Returns the ledger's account, including the groups that are open now. Takes O(1) in the number of groups."""
        table = self._table
        return self._ledger.account(
            reserved=self._amount(len(table.reserved) + table.front.issued_groups),
            ready=self._amount(len(table.ready), tokens=table.ready.tokens),
            leased=self._amount(len(table.leased), tokens=table.leased_tokens),
        )

    def recount(self) -> Account:
        """Returns the account with all open groups counted one by one. It differs from `account` only if a running
        number is wrong, which is a bug. Takes O(slots)."""
        table = self._table
        issued = [prompt for prompt in table.front.prompts() if prompt.issued]
        return self._ledger.account(
            reserved=self.amount(table.reserved.values()) + self._amount(len(issued)),
            ready=self.amount(table.ready.slots()),
            leased=self.amount(table.leased),
        )

    def entry(self, *, of_ack: bool) -> LedgerEntry:
        """Returns the ledger's entry of this moment. `of_ack` begins a new list of ended groups; otherwise the open
        groups are counted one by one. Takes O(slots), because the entry has the numbers of all open groups."""
        account = self.account() if of_ack else self.recount()
        waiting = (prompt.group for prompt in self._table.front.prompts())
        entry = LedgerEntry(
            prompts=self._attempts.groups,
            open=tuple(sorted([*self._table.open, *waiting])),
            ended=tuple(self.ended),
            issued=account.issued,
            fates={fate: amount for fate, amount in account.fates.items() if amount.groups},
        )
        if of_ack:
            self.ended = []
        return entry

    def _amount(self, groups: int, *, tokens: int = 0) -> Amount:
        return Amount(groups, groups * self._group_size, tokens)
