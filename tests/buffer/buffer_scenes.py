"""Helpers of the buffer's tests: a manual clock, a source of numbered prompts, and short ways to a buffer's states."""

import asyncio
import itertools
from collections.abc import Collection

from asyncrl.buffer.records import CommitOutcome, GroupMeta, HeldReport, Lease, Prefix, Ticket, VersionSpan
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.staleness import Limits
from asyncrl.common.version import Version
from asyncrl.config.schema import OnDeadline
from asyncrl.data.prompts import Task


class Clock:
    """A monotonic clock that the test moves by setting `now_s`. A `sleep` on it ends when the clock has moved so far.

    It belongs to no event loop until something sleeps on it.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def __call__(self) -> float:
        return self._now_s

    @property
    def now_s(self) -> float:
        return self._now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self._now_s = now_s
        for due_s, sleeper in self._sleepers:
            if due_s <= now_s and not sleeper.done():
                sleeper.set_result(None)
        self._sleepers = [each for each in self._sleepers if not each[1].done()]

    async def sleep(self, seconds: float) -> None:
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now_s + seconds, sleeper))
        await sleeper

    async def passes(self, seconds: float) -> None:
        """Moves the clock on, second by second, and lets all other tasks do after each what they can do then."""
        end_s = self._now_s + seconds
        while self._now_s < end_s:
            self.now_s = min(end_s, self._now_s + 1.0)
            await everything_else_runs()


async def everything_else_runs() -> None:
    """Yields to the event loop often enough that all other tasks do what they can do now."""
    for _ in range(200):
        await asyncio.sleep(0)


class NumberedPrompts:
    """A source of `limit` prompts "0", "1", …. `taken` is the number of prompts that were taken."""

    def __init__(self, limit: int | None = None, *, seed: int = 0) -> None:
        self.limit = limit
        self.seed = seed
        self.taken = 0

    def next(self) -> Task | None:
        if self.limit is not None and self.taken >= self.limit:
            return None
        self.taken += 1
        return self.task(self.taken - 1)

    def task(self, number: int) -> Task:
        name = str(number)
        return Task(question=name, prompt=name, answer=name)


def limits(*, eta: int = 1, per_step: int = 2, group_size: int = 2, **changes: float) -> Limits:
    """Returns small limits. The capacity is what the staleness limit admits, unless `changes` replace it."""
    values: dict[str, float] = {
        "max_staleness_versions": eta,
        "groups_per_step": per_step,
        "group_size": group_size,
        "capacity_groups": (eta + 1) * per_step,
        "capacity_bytes": 10**6,
        "worst_group_bytes": 100,
        "total_steps": 100,
        "max_attempts": 3,
        "max_data_failures": 16,
        "max_infra_failures": 10**6,
        "heartbeat_timeout_s": 10.0,
    }
    return Limits(**(values | changes))  # type: ignore[arg-type]


def finished(
    ticket: Ticket,
    *,
    group_size: int = 2,
    newest: int | None = None,
    row_bytes: int = 10,
    versions: Collection[Version] = (),
    rewards: tuple[float, ...] | None = None,
) -> GroupMeta:
    """Returns the metadata of a group that was generated without a failure, by the versions of its ticket and then by
    `versions`. Sample i has i + 1 tokens."""
    versions = sorted({ticket.version, *versions, *(() if ticket.prefix is None else ticket.prefix.versions)})
    newest = max(version.step for version in versions) if newest is None else newest
    rewards = (1.0,) * group_size if rewards is None else rewards
    return GroupMeta(
        group=ticket.group,
        attempt=ticket.attempt,
        incarnation=ticket.version.incarnation,
        replica=ticket.replica,
        row_bytes=row_bytes,
        prompt_tokens=3,
        completion_tokens=tuple(range(1, group_size + 1)),
        rewards=rewards,
        equal=len({*rewards} - {None}) == 1,
        truncated=(False,) * group_size,
        oldest=ticket.oldest,
        newest=newest,
        continued_tokens=0 if ticket.prefix is None else ticket.prefix.tokens,
        version_spans=(tuple(VersionSpan(version.incarnation, version.step, 1) for version in versions),) * group_size,
    )


def stored_by(ticket: Ticket, *, tokens: int = 2, also: tuple[Version, ...] = (), unreadable: bool = False) -> Prefix:
    """Returns what the attempt of a ticket has stored: `tokens` tokens, after those of its own prefix unless that was
    `unreadable`. `also` are versions beside that of the ticket which generated tokens."""
    before = None if unreadable else ticket.prefix
    continued = 0 if before is None else before.tokens
    versions = {ticket.version, *also, *(() if before is None else before.versions)}
    return Prefix(
        attempt=ticket.attempt,
        tokens=continued + tokens,
        versions=tuple(sorted(versions)),
        continued_tokens=continued,
    )


HEARTBEATS = itertools.count(1)


def progress_of(*held: Ticket, tokens: int = 0, complete: bool = True, also: Collection[str] = ()) -> HeldReport:
    """Returns what the next heartbeat says that names these tickets, and those with the keys `also`, each with this
    number of tokens. It says that the replica holds no others, unless it is not `complete`."""
    keys = [*(ticket.key for ticket in held), *also]
    return HeldReport(number=next(HEARTBEATS), complete=complete, tokens=dict.fromkeys(keys, tokens))


class Scene:
    """A buffer with its clock and its prompts, and short methods to reserve, commit, lease and train groups."""

    def __init__(
        self,
        *,
        prompts: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
        on_deadline: OnDeadline = "wait",
        **changes: int,
    ) -> None:
        self.clock = Clock()
        self.limits = limits(**changes)  # type: ignore[arg-type]
        self.prompts = NumberedPrompts(prompts, seed=seed)
        self.buffer = ReplayBuffer(
            limits=self.limits,
            prompts=self.prompts,
            clock=self.clock,
            drop_last=drop_last,
            on_deadline=on_deadline,
        )

    def reserve(self, count: int, *, step: int | None = None, replica: str = "a") -> tuple[Ticket, ...]:
        version = self.buffer.version if step is None else Version(1, step)
        return self.buffer.reserve(replica, version=version, count=count).tickets

    def commit(self, *tickets: Ticket) -> None:
        for ticket in tickets:
            meta = finished(ticket, group_size=self.limits.group_size)
            assert self.buffer.commit(meta) is CommitOutcome.ACCEPTED

    def store(self, ticket: Ticket, prefix: Prefix) -> None:
        """The replica of the ticket reports what it has stored."""
        held = HeldReport(
            number=next(HEARTBEATS), complete=False, tokens={ticket.key: 0}, prefixes={ticket.key: prefix}
        )
        self.buffer.renew(ticket.replica, held=held)

    def lease(self) -> Lease:
        lease = self.buffer.lease()
        assert isinstance(lease, Lease), lease
        return lease

    def train(self) -> Lease:
        lease = self.lease()
        self.buffer.ack(lease.incarnation, lease.step)
        return lease

    def groups(self, lease: Lease) -> list[int]:
        return [leased.meta.group for leased in lease.groups]
