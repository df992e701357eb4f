"""The tickets that a replica holds, with the progress of each, and what of it the buffer does not know yet."""

import asyncio
from collections.abc import Iterable, Iterator

from asyncrl.buffer.records import HeldReport, Prefix, Ticket


class HeldTickets:
    """Tickets from their reserve until they are settled: committed, failed, or ended by the buffer.

    Each heartbeat sends a `report` of the new tickets and of those whose progress has changed. What it sends counts as
    known when the heartbeat is `answered`. So nothing is lost if a heartbeat or its answer is lost. The first report is
    complete, and so is the next one after `name_all`. Reports are numbered from `first_number` on, which must be larger
    than all numbers of an earlier process of this replica.

    Calls for a ticket that is not held change nothing: its rollout may end later than the ticket.
    """

    def __init__(self, *, first_number: int) -> None:
        self._tokens: dict[str, int] = {}
        self._prefixes: dict[str, Prefix] = {}
        self._new_tokens: dict[str, int] = {}
        self._new_prefixes: dict[str, Prefix] = {}
        self._next_number = first_number
        # A complete report is due until one with the number `_complete_from` or a later one is answered. All of these
        # are complete.
        self._complete_from = first_number
        self._complete_due = True
        self._settled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, key: str) -> bool:
        return key in self._tokens

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    def report(self) -> HeldReport:
        """Returns what the next heartbeat sends."""
        number, self._next_number = self._next_number, self._next_number + 1
        return HeldReport(
            number=number,
            complete=self._complete_due,
            tokens=dict(self._tokens if self._complete_due else self._new_tokens),
            prefixes=dict(self._new_prefixes),
        )

    def answered(self, report: HeldReport) -> None:
        """Records that the buffer knows what a report sent."""
        for key, tokens in report.tokens.items():
            if self._new_tokens.get(key) == tokens:
                del self._new_tokens[key]
        for key, prefix in report.prefixes.items():
            if self._new_prefixes.get(key) is prefix:
                del self._new_prefixes[key]
        if report.number >= self._complete_from:
            self._complete_due = False

    def name_all(self) -> None:
        """Makes the next report complete."""
        self._complete_due, self._complete_from = True, self._next_number

    def add(self, tickets: Iterable[Ticket]) -> None:
        new = {ticket.key: 0 for ticket in tickets}
        self._tokens |= new
        self._new_tokens |= new

    def generated(self, key: str, tokens: int) -> bool:
        """Records the number of tokens that the ticket's rollout has sampled so far. Returns whether it has changed."""
        if self._tokens.get(key, tokens) == tokens:
            return False
        self._tokens[key] = self._new_tokens[key] = tokens
        return True

    def stored(self, key: str, prefix: Prefix) -> None:
        """Records what is stored of the ticket's group."""
        if key in self._tokens:
            self._prefixes[key] = self._new_prefixes[key] = prefix

    def prefix_of(self, key: str) -> Prefix | None:
        """Returns what is stored of the ticket's group; None if nothing is, or if the ticket is not held."""
        return self._prefixes.get(key)

    def settle(self, key: str) -> None:
        """Ends the holding of a ticket that the buffer has ended, or whose commit or failure it has recorded."""
        for kept in (self._tokens, self._new_tokens, self._prefixes, self._new_prefixes):
            kept.pop(key, None)
        self._settled.set()

    def give_up(self, key: str) -> None:
        """Ends the holding of a ticket although the buffer may still count it as held. The next report is complete, so
        the buffer sees that the ticket is not held any longer."""
        self.settle(key)
        self.name_all()

    async def all_settled(self) -> None:
        """Waits until no ticket is held."""
        while self._tokens:
            self._settled.clear()
            await self._settled.wait()
