"""The end of a rollout: stores the rows of finished groups, and then commits the groups or reports their failures."""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from asyncrl.buffer.failure_records import FailedTicket, Failure
from asyncrl.buffer.records import CommitOutcome
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.data_plane.clients import GroupRows
from asyncrl.errors import InfraError, RolloutError, RunError
from asyncrl.generation.held_tickets import HeldTickets
from asyncrl.generation.reward_errors import report_failures
from asyncrl.generation.rollout import FinishedGroup
from asyncrl.generation.running import RunningRollouts
from asyncrl.metrics.recorders import GeneratorMetrics

logger = logging.getLogger(__name__)

DELIVER_EVERY_S = 0.05
"""Least time between two deliveries while rollouts run. Short groups are delivered together, because a delivery takes
three calls to other processes."""


@dataclass(kw_only=True)
class Delivery:
    """Delivers what has ended, in the order in which it ended. `verdict` waits until the weights of the replica are
    verified."""

    coordinator: CoordinatorClient
    rows: GroupRows
    held: HeldTickets
    running: RunningRollouts
    verdict: Callable[[], Awaitable[object]]
    metrics: GeneratorMetrics
    group_size: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._ended: list[FinishedGroup | FailedTicket] = []
        self._something_ended = asyncio.Event()
        self.samples = 0
        """Samples of the groups that the buffer has accepted."""
        self.tokens = 0
        """Completion tokens of these samples."""

    def add(self, ended: FinishedGroup | FailedTicket) -> None:
        """Delivers a group, or reports a failure, soon."""
        self._ended.append(ended)
        self._something_ended.set()

    def add_failed(self, key: str, incarnation: int, error: RolloutError) -> None:
        """Reports soon that the rollout of a ticket failed."""
        self.add(self._failed(key, incarnation, error))

    async def fail_finished(self, error: InfraError) -> None:
        """Reports at once that all groups which are not delivered yet have failed, because they cannot be used."""
        await self._report([self._as_failed(each, error) for each in self._take()])

    async def run(self) -> None:
        """Delivers until it is cancelled."""
        delivered_s = -math.inf
        while True:
            await self._something_ended.wait()
            await self.running.more_ends(wait_s=delivered_s + DELIVER_EVERY_S - self.clock())
            # Groups stay in `_ended` until the verdict: `fail_finished` fails what it finds there.
            await self.verdict()
            delivered_s, ended = self.clock(), self._take()
            groups = [each for each in ended if isinstance(each, FinishedGroup)]
            stored = True
            if groups:
                try:
                    await self.rows.put({group.meta.key: group.rows for group in groups})
                except (RunError, TimeoutError) as error:
                    lost = InfraError(f"could not store the rows of finished groups: {error}", reason="row_store")
                    ended = [self._as_failed(each, lost) for each in ended]
                    stored = False
            # In the order in which they ended: storing rows takes time, and the buffer counts failures in a row.
            for failed, part in itertools.groupby(ended, key=lambda each: isinstance(each, FailedTicket)):
                if failed:
                    await self._report([each for each in part if isinstance(each, FailedTicket)])
                else:
                    await self._commit([each for each in part if isinstance(each, FinishedGroup)])
            self.running.wake()  # admission may wait until fewer groups are held
            if not stored:
                await self._clear([group.meta.key for group in groups])

    def _take(self) -> list[FinishedGroup | FailedTicket]:
        ended, self._ended = self._ended, []
        self._something_ended.clear()
        return ended

    async def _commit(self, groups: Sequence[FinishedGroup]) -> None:
        metas = [msgspec.structs.replace(group.meta, stored=self.held.prefix_of(group.meta.key)) for group in groups]
        outcomes = await self.coordinator.call(Coordinator.commit, metas)
        refused, failures = list[str](), list[Failure]()
        for group, outcome in zip(groups, outcomes, strict=True):
            if outcome is CommitOutcome.DUPLICATE:
                # Only this replica has the ticket, and it commits a group once. So the call was repeated, because its
                # first answer, ACCEPTED, was late.
                outcome = CommitOutcome.ACCEPTED
            self.held.settle(group.meta.key)
            self.metrics.samples(len(group.meta.rewards), outcome=outcome)
            if outcome is CommitOutcome.ACCEPTED:
                self.samples += len(group.meta.rewards)
                self.tokens += group.meta.generated_tokens
                self.metrics.rewards(group.meta.known_rewards, part=group.meta.part)
                failures += group.failures
            else:
                refused.append(group.meta.key)
        for failure in failures:
            if failure.of_tool:
                continue
            self.metrics.reward_failed(reason=failure.reason, samples=1)
        await report_failures(failures, self.coordinator)
        if refused:
            await self.rows.clear(refused)

    async def _clear(self, keys: Sequence[str]) -> None:
        """Clears the rows of a put that failed, because it may have stored them before its answer was lost."""
        try:
            await self.rows.clear(keys)
        except (RunError, TimeoutError) as error:
            logger.warning("rows of groups %s may be left, and the buffer clears them later: %s", keys, error)

    async def _report(self, tickets: Sequence[FailedTicket]) -> None:
        keys = [ticket.key for ticket in tickets]
        if not keys:
            return
        try:
            await self.coordinator.call(Coordinator.fail, tickets)
        except (RunError, TimeoutError) as lost:
            logger.warning("could not report that groups %s failed, so their tickets will expire: %s", keys, lost)
            for key in keys:
                self.held.give_up(key)
        else:
            for key in keys:
                self.held.settle(key)

    def _as_failed(self, ended: FinishedGroup | FailedTicket, error: InfraError) -> FailedTicket:
        """Turns a finished group that cannot be used into a failure. Leaves a failure as it is."""
        if isinstance(ended, FailedTicket):
            return ended
        return self._failed(ended.meta.key, ended.meta.incarnation, error)

    def _failed(self, key: str, incarnation: int, error: RolloutError) -> FailedTicket:
        logger.warning("group %s failed (%s, %s): %s", key, error.failure_class, error.reason, error)
        self.metrics.rollout_failed(failure_class=error.failure_class, reason=error.reason)
        self.metrics.samples(self.group_size, outcome="failed")
        if error.reason.startswith("reward_"):
            self.metrics.reward_failed(reason=error.reason, samples=self.group_size)
        return FailedTicket(key=key, incarnation=incarnation, failure=Failure.of(error))
