"""The tickets that a replica holds, with the progress of each. Its heartbeats name them, and the buffer renews them."""

import asyncio
from collections.abc import Iterable, Iterator

import msgspec

from asyncrl.buffer.records import Prefix, Progress, Ticket


class HeldTickets:
    """Tickets from their reserve until they are settled: committed, failed, or ended by the buffer.

    Calls for a ticket that is not held change nothing: its rollout may end later than the ticket.
    """

    def __init__(self) -> None:
        self._progress: dict[str, Progress] = {}
        self._settled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._progress)

    def __contains__(self, key: str) -> bool:
        return key in self._progress

    def __iter__(self) -> Iterator[str]:
        return iter(self._progress)

    def progress(self) -> dict[str, Progress]:
        """Returns the progress of each ticket by key."""
        return dict(self._progress)

    def add(self, tickets: Iterable[Ticket]) -> None:
        self._progress |= {ticket.key: Progress() for ticket in tickets}

    def generated(self, key: str, tokens: int) -> bool:
        """Records the number of tokens that the ticket's rollout has sampled so far. Returns whether it has changed."""
        before = self._progress.get(key)
        if before is None or before.generated_tokens == tokens:
            return False
        self._progress[key] = msgspec.structs.replace(before, generated_tokens=tokens)
        return True

    def stored(self, key: str, prefix: Prefix) -> None:
        """Records what is stored of the ticket's group."""
        if key in self._progress:
            self._progress[key] = msgspec.structs.replace(self._progress[key], prefix=prefix)

    def prefix_of(self, key: str) -> Prefix | None:
        """Returns what is stored of the ticket's group; None if nothing is, or if the ticket is not held."""
        return self._progress[key].prefix if key in self._progress else None

    def settle(self, key: str) -> None:
        """Ends the holding of a ticket."""
        self._progress.pop(key, None)
        self._settled.set()

    async def all_settled(self) -> None:
        """Waits until no ticket is held."""
        while self._progress:
            self._settled.clear()
            await self._settled.wait()
