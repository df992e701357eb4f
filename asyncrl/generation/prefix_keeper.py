"""Stores what the rollouts of a replica have sampled so far, and reads what an earlier attempt has stored.

Storing never fails a rollout: if a group cannot be stored, it is generated on, and a later attempt would continue what
was stored before, or begin again. Invariant: stored tokens were sampled by verified weights, because a put waits for
the probe of the last weight update.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from asyncrl.buffer.records import Prefix, Ticket
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import SUPPORT
from asyncrl.data_plane.clients import GroupRows
from asyncrl.errors import AsyncRLError
from asyncrl.generation.interfaces import PartialCompletion, Sampled
from asyncrl.generation.long_work import beside_loop
from asyncrl.generation.prefixes import PREFIX_COLUMNS, TURN_COLUMNS, prefix_of, rows_of, samples_of_rows

logger = logging.getLogger(__name__)


class PrefixKeeper:
    """Stores a group whenever one of its samples has grown by `every_tokens` tokens. With 0, it stores nothing.
    `support`: tokens have supports (`generator.top_k`).

    `verdict` waits until the last weight update is verified. `stored` is called with a group's key after each put.
    """

    def __init__(
        self,
        rows: GroupRows,
        *,
        every_tokens: int,
        support: bool = False,
        verdict: Callable[[], Awaitable[None]],
        stored: Callable[[str, Prefix], None],
    ) -> None:
        self._rows = rows
        self._every_tokens = every_tokens
        self._columns = (*PREFIX_COLUMNS, *([SUPPORT] if support else []))
        self._verdict = verdict
        self._stored = stored
        self._lengths: dict[str, Sequence[int]] = {}  # tokens of each sample at the last put of a group
        self._puts: dict[str, asyncio.Task[None]] = {}

    async def read(self, ticket: Ticket, *, turns: bool = False) -> list[PartialCompletion]:
        """Returns the samples with which the ticket's attempt begins; none if nothing is stored or can be read. Those
        of agents have `turns`."""
        prefix = ticket.prefix
        if prefix is None:
            return []
        columns = (*self._columns, *(TURN_COLUMNS if turns else ()))
        try:
            rows = await self._rows.get(f"{ticket.group}.{prefix.attempt}", columns)
            return samples_of_rows(rows, prefix=prefix)
        except (AsyncRLError, TimeoutError, KeyError) as error:
            logger.warning(
                "group %s begins again, because %d stored tokens of attempt %d cannot be read: %s",
                ticket.key,
                prefix.tokens,
                prefix.attempt,
                error,
            )
            return []

    def sampled(self, ticket: Ticket, sampled: Sampled, *, continued: Sequence[PartialCompletion]) -> None:
        """Stores the group in the background if it has grown enough and no earlier put of it runs. `continued` is the
        prefix of the attempt."""
        if not self._every_tokens or ticket.key in self._puts:
            return
        before = self._lengths.get(ticket.key) or [len(sample.token_ids) for sample in continued]
        grown = [now - then for now, then in zip(sampled.lengths, before or [0] * len(sampled.lengths), strict=True)]
        if max(grown) < self._every_tokens or (samples := sampled.partial()) is None:
            return
        self._lengths[ticket.key] = [len(sample.token_ids) for sample in samples]
        put = asyncio.create_task(self._put(ticket, samples, continued), name=f"store {ticket.key}")
        self._puts[ticket.key] = put
        put.add_done_callback(lambda _: self._puts.pop(ticket.key, None))

    def ended(self, key: str) -> None:
        """Forgets a group whose rollout has ended, and gives up its running put."""
        self._lengths.pop(key, None)
        if put := self._puts.get(key):
            put.cancel()

    async def _put(
        self, ticket: Ticket, samples: Sequence[PartialCompletion], continued: Sequence[PartialCompletion]
    ) -> None:
        def built() -> tuple[BatchedDataDict, Prefix]:
            return rows_of(samples), prefix_of(samples, attempt=ticket.attempt, continued=continued)

        await self._verdict()
        try:
            rows, prefix = await beside_loop(built, tokens=sum(len(sample.token_ids) for sample in samples))
            await self._rows.put({ticket.key: rows})
        except Exception as error:
            logger.warning("group %s is not stored, and a later attempt may begin again: %s", ticket.key, error)
            return
        self._stored(ticket.key, prefix)
