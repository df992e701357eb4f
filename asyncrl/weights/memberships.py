"""Who takes part in a broadcast of weights, for `weights.transport: collective`. A part of the weight store.

Rank 0 of the learner asks before each broadcast which replicas are there, and then announces the broadcast to them and
to the other ranks. A membership (epoch) is one process group. Its number grows when the members change, and when the
process group has broken.

A replica is there if it waits for an announcement. `present` wakes all replicas that wait, and counts those that wait
again. So a replica that has just died does not become a member of the next membership.

A replica that lacks bytes asks for them here. The ranks then put them into the object store.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from asyncrl.common.version import Version


class Broadcast(msgspec.Struct, frozen=True, kw_only=True):
    """An announced broadcast of `version` in the membership `epoch`: rank 0 of `ranks` learner ranks listens at
    host:port. The members are replicas, in the order of their ranks, which follow those of the learner. Without members
    there is no broadcast."""

    number: int
    epoch: int
    version: Version
    members: tuple[str, ...]
    ranks: int
    host: str
    port: int


class Memberships:
    """The base class of the weight store with the calls of ranks and replicas about broadcasts. Each wait has a
    deadline."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        # for each waiting call: the replica, the epoch that it has joined, and `_question` when the call began
        self._waiting: dict[object, tuple[str, int | None, int]] = {}
        self._question = 0
        self._last: Broadcast | None = None
        self._epoch = 0
        self._offered: set[Version] = set()
        self._requests: dict[Version, int] = {}
        self._request = 0
        self._stored: dict[tuple[Version, int], list[Any]] = {}

    # -- called by learner ranks -------------------------------------------------------------------------------------

    async def present(self, expected: Sequence[str], timeout_s: float) -> dict[str, int | None]:
        """Returns the replicas that wait for an announcement, each with the epoch whose group it has joined. Wakes all
        that wait, and waits up to `timeout_s` until these and the `expected` ones wait again."""
        async with self._changed:
            asked = {replica for replica, _, _ in self._waiting.values()} | set(expected)
            self._question += 1
            self._changed.notify_all()
            await self._reached(lambda: asked <= self._answered().keys(), timeout_s)
            return self._answered()

    def _answered(self) -> dict[str, int | None]:
        return {replica: epoch for replica, epoch, question in self._waiting.values() if question == self._question}

    async def announce(
        self, version: Version, members: Sequence[str], *, ranks: int, host: str, port: int, is_new: bool
    ) -> Broadcast:
        """Announces a broadcast by rank 0, and wakes the ranks and replicas that wait for it. With `is_new` it begins a
        new membership, with the next epoch."""
        async with self._changed:
            self._epoch += is_new
            self._last = Broadcast(
                number=1 if self._last is None else self._last.number + 1,
                epoch=self._epoch,
                version=version,
                members=tuple(members),
                ranks=ranks,
                host=host,
                port=port,
            )
            self._changed.notify_all()
            return self._last

    async def announced(self, version: Version, after: int, timeout_s: float) -> Broadcast | None:
        """Waits for a broadcast of `version` with a number above `after`. Returns None after `timeout_s`."""

        def found() -> bool:
            return self._last is not None and self._last.version == version and self._last.number > after

        async with self._changed:
            return self._last if await self._reached(found, timeout_s) else None

    async def requests(self, after: int, timeout_s: float) -> list[tuple[int, Version]]:
        """Waits for versions whose bytes replicas have asked for since the request with the number `after`. Returns
        them with the numbers of the requests; an empty list after `timeout_s`."""

        def new() -> list[tuple[int, Version]]:
            return [(number, version) for version, number in self._requests.items() if number > after]

        async with self._changed:
            await self._reached(lambda: bool(new()), timeout_s)
            return new()

    async def store_buckets(self, version: Version, rank: int, handles: list[Any]) -> None:
        """Keeps the handles of the buckets that a rank has put into the object store. Ignores handles of a version that
        is not offered any longer."""
        async with self._changed:
            if version in self._offered:
                self._stored[version, rank] = handles
                self._changed.notify_all()

    # -- called by replicas ------------------------------------------------------------------------------------------

    async def next_broadcast(self, replica: str, epoch: int | None, after: int, timeout_s: float) -> Broadcast | None:
        """Waits for a broadcast with a number above `after`. `epoch` is the membership whose group the replica has
        joined. Returns None after `timeout_s`, or when rank 0 asks which replicas wait. The replica then calls
        again at once, which shows that it lives."""
        poll = object()

        def found() -> bool:
            return self._last is not None and self._last.number > after

        async with self._changed:
            question = self._question
            self._waiting[poll] = replica, epoch, question
            self._changed.notify_all()
            try:
                await self._reached(lambda: found() or self._question != question, timeout_s)
            finally:
                del self._waiting[poll]
            return self._last if found() else None

    async def stored_buckets(self, version: Version, rank: int, timeout_s: float) -> list[Any] | None:
        """Asks the ranks to put their buckets of a version into the object store. Returns the handles of those of
        `rank`, or None after `timeout_s`, or when a newer version is offered."""

        def found() -> bool:
            return (version, rank) in self._stored

        async with self._changed:
            if version not in self._requests and not found():
                self._request += 1
                self._requests[version] = self._request
                self._changed.notify_all()
            await self._reached(lambda: found() or self._is_old(version), timeout_s)
            if not found():
                self._requests.pop(version, None)  # so that a later call makes a new request
            return self._stored.get((version, rank))

    def _is_old(self, version: Version) -> bool:
        return any(offered > version for offered in self._offered)

    # -- called by `WeightStore` -------------------------------------------------------------------------------------

    def _offers(self, versions: set[Version]) -> None:
        """Sets the versions that the weight store offers now. Drops the requests and the handles of all other versions.
        The caller holds the lock of `_changed`, and wakes the calls that wait for it."""
        self._offered = versions
        self._requests = {version: number for version, number in self._requests.items() if version in versions}
        self._stored = {key: handles for key, handles in self._stored.items() if key[0] in versions}

    async def _reached(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True
