"""Clears rows and partial generations that no group needs, in the background.

Their keys come from three sources: a call that ended groups, the buffer's list of unneeded partial generations, and a
search among all stored keys once in a while. The search finds what a replica stored before it died, or what a learner
did not clear before it died. A failure is logged, and the next search finds the same keys again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asyncrl.buffer.unneeded import Unneeded
from asyncrl.data_plane.clients import GroupRows

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 60.0
"""Time between two searches for rows that belong to no group, seconds."""


class Clearing:
    """Clears what `unneeded` names, and the rows of keys that callers pass. `tasks` are the tasks that run now.

    `rows` are the rows of groups, and `prefixes` their partial generations; None if the replicas store none.
    """

    def __init__(self, unneeded: Unneeded, *, rows: GroupRows, prefixes: GroupRows | None, now_s: float) -> None:
        self._unneeded = unneeded
        self._rows = rows
        self._prefixes = prefixes
        self._swept_s = now_s
        self.tasks: set[asyncio.Task[None]] = set()

    def rows(self, keys: Sequence[str]) -> None:
        """Clears the rows of groups that will never be trained."""
        if keys:
            self._in_background(self._cleared(keys, self._rows), name="clear rows")

    def rows_without_slot(self) -> None:
        """Clears the rows of groups that hold no slot, because the learner went back to a checkpoint."""
        self._in_background(self._sweep_rows(self._unneeded.without_slot), name="sweep rows")

    def tick(self, now_s: float) -> None:
        """Clears the partial generations that became unneeded, and searches for others every `SWEEP_EVERY_S`."""
        unneeded = self._unneeded.take_prefixes()
        if unneeded and self._prefixes is not None:
            self._in_background(self._cleared(unneeded, self._prefixes), name="clear prefixes")
        if now_s - self._swept_s >= SWEEP_EVERY_S:
            self._swept_s = now_s
            self._in_background(self._sweep_rows(self._unneeded.never_committed), name="sweep rows")
            if self._prefixes is not None:
                self._in_background(self._sweep_prefixes(self._prefixes), name="sweep prefixes")

    async def _sweep_rows(self, needless: Callable[[Sequence[str]], Sequence[str]]) -> None:
        """Clears the rows of groups that belong to nothing. A replica died after it had stored them, or a learner
        before it cleared them. `needless` returns their keys among those of all rows."""
        if left := await self._found(self._rows, needless, what="rows"):
            logger.warning("clearing the rows of groups that belong to nothing: %s", ", ".join(left))
            await self._cleared(left, self._rows)

    async def _sweep_prefixes(self, prefixes: GroupRows) -> None:
        """Clears partial generations that no attempt needs. Their replica died before it had reported them."""
        if left := await self._found(prefixes, self._unneeded.prefixes, what="partial generations"):
            await self._cleared(left, prefixes)

    async def _found(
        self, stored: GroupRows, needless: Callable[[Sequence[str]], Sequence[str]], *, what: str
    ) -> Sequence[str]:
        """Returns those of the stored keys that `needless` returns; none if they cannot be read now."""
        try:
            return needless(await stored.keys())
        except Exception as error:
            logger.warning("%s without a group were not looked for: %s", what, error)
            return ()

    def _in_background(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _cleared(self, keys: Sequence[str], stored: GroupRows) -> None:
        try:
            await stored.clear(keys)
        except Exception as error:
            logger.warning("the rows of groups that will not be trained were not cleared: %s", error)
