"""The calls of the learner. Each carries the incarnation that the learner got when it attached.

A call whose answer was lost is repeated. The repeated call finds that its lease has ended and changes nothing. The
answers to `ack`, `skip` and `release` are kept until the next such call, because only they name the rows that may be
cleared, and only that of `ack` has the ledger's entry of the step.

If another learner has taken over, the calls of the earlier one raise Fenced and change nothing here. So a learner that
was only slow ends at its next call, and no step of it is counted.
"""

from collections.abc import Sequence

import msgspec

from asyncrl.buffer.ledger import Event, LedgerEntry
from asyncrl.buffer.records import Lease, LeaseWait
from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Version
from asyncrl.coordinator.parts import CoordinatorParts
from asyncrl.coordinator.snapshot import RunSnapshot
from asyncrl.coordinator.status import BriefStatus
from asyncrl.errors import Fenced, RunEnded

_NO_LEASE_EVER = (LeaseWait.FINISHED, LeaseWait.TOO_MANY_FAILURES)
"""Answers to a lease call that stay the same for the rest of the run, so that waiting is useless."""


class Acked(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an ack: the state of the run, the ledger's entry of this step, the keys of the step's groups whose
    rows may be cleared, and the snapshot for a checkpoint if it was wanted.

    Entry and snapshot are of the same moment, right after the step. The state may be newer."""

    status: BriefStatus
    ledger: LedgerEntry
    over: tuple[str, ...]
    snapshot: RunSnapshot | None


class LearnerCalls:
    """Answers the learner."""

    def __init__(self, parts: CoordinatorParts) -> None:
        self._parts = parts
        self._acked: tuple[tuple[int, int], Acked] | None = None
        self._released: tuple[tuple[int, int | None], tuple[str, ...]] | None = None

    async def lease(self, incarnation: int, *, wait_s: float) -> Lease | LeaseWait:
        """Waits up to `wait_s` seconds for the groups of one step. Returns the lease, or the reason why there is
        none.

        Stragglers whose tickets the lease has ended are generated again, or replaced, by the generators that wait.
        """

        def ask() -> Lease | LeaseWait:
            self._check(incarnation)
            return self._parts.buffer.leases.lease()

        started_s = self._parts.clock()
        answer = await self._parts.waiting.answer(
            ask,
            final=lambda answer: isinstance(answer, Lease) or answer in _NO_LEASE_EVER,
            enter=self._parts.waiting.leases.enter,
            wait_s=wait_s,
            role=Role.LEARNER,
        )
        self._parts.metrics.lease_waited(self._parts.clock() - started_s)
        if cancelled := self._parts.buffer.leases.cancelled:
            self._parts.buffer.leases.cancelled = []
            self._parts.clearing.rows(cancelled)
            self._parts.waiting.tickets.wake()
        return answer

    async def ack(self, incarnation: int, step: int, *, snapshot: bool = False) -> Acked:
        """Ends a lease whose step was trained. Returns the state of the run, and a snapshot if it is wanted.

        The snapshot is taken before any other call is answered, so it is of the moment after this step. A repeated call
        gets the same answer: the ledger's entry names each ended group once.
        """
        self._check(incarnation)
        if self._acked is not None and self._acked[0] == (incarnation, step):
            return self._acked[1]
        before = self._parts.buffer.version
        over = self._parts.buffer.leases.ack(incarnation, step)
        trained = self._parts.buffer.version != before
        ledger = self._parts.buffer.ledger_entry(of_ack=trained)
        taken = self._parts.snapshot() if snapshot else None
        self._parts.registry.progressed()
        self._parts.waiting.tickets.wake()
        acked = Acked(status=self._parts.brief_status(), ledger=ledger, over=over, snapshot=taken)
        if trained:
            self._acked = (incarnation, step), acked
        return acked

    def ledger_entry(self, incarnation: int) -> LedgerEntry:
        """Returns the ledger's entry of the present moment, for the end of the audit's records."""
        self._check(incarnation)
        return self._parts.buffer.ledger_entry(of_ack=False)

    def snapshot(self, incarnation: int) -> RunSnapshot:
        """Returns a snapshot of the present moment. A lease counts as not trained."""
        self._check(incarnation)
        return self._parts.snapshot()

    async def skip(self, incarnation: int, step: int) -> tuple[str, ...]:
        """Ends a lease whose step changed no weights. Returns the keys of its groups whose rows may be cleared."""
        self._check(incarnation)
        keys = self._parts.buffer.leases.skip(incarnation, step)
        self._parts.waiting.tickets.wake()
        return keys

    async def give_back(self, incarnation: int, step: int) -> None:
        """Ends a lease without training. Its groups become ready again. Does nothing if there is no such lease."""
        self._check(incarnation)
        self._parts.buffer.leases.give_back(incarnation, step)
        self._parts.waiting.tickets.wake()

    async def rows_lost(self, incarnation: int, keys: Sequence[str]) -> None:
        """Removes ready groups whose rows are lost, e.g. with their node. Their prompts go to the front. Keys of groups
        that are not ready are counted and ignored."""
        self._check(incarnation)
        self._parts.buffer.leases.rows_lost(keys)
        self._parts.waiting.tickets.wake()

    def release(self, incarnation: int, complete: int | None) -> tuple[str, ...]:
        """Releases the groups that were retained for a learner that goes back to a checkpoint, as far as the checkpoint
        of step `complete` does not need them; with None, all, because the run ends. Returns their keys; their rows may
        be cleared. A call that releases nothing new returns the keys of the last call with the same `complete`."""
        self._check(incarnation)
        over = self._parts.buffer.leases.release(complete=complete)
        if over or self._released is None or self._released[0] != (incarnation, complete):
            self._released = (incarnation, complete), over
        return self._released[1]

    def clear_dropped(self, incarnation: int) -> None:
        """Clears the rows of the groups that a lease call dropped. A save that runs may still read them, so the learner
        calls this when its last save has ended."""
        self._check(incarnation)
        dropped, self._parts.buffer.leases.dropped = self._parts.buffer.leases.dropped, []
        self._parts.clearing.rows(dropped)

    def published(self, version: Version) -> None:
        """Records that the learner published a version. The incarnation of the version is that of the learner."""
        self._check(version.incarnation)
        self._parts.registry.publish(version, learner=self._parts.buffer.version)

    def pause(self, incarnation: int) -> None:
        """Stops the admission of new groups. Groups in flight continue."""
        self._check(incarnation)
        self._parts.buffer.tickets.paused = True

    async def resume(self, incarnation: int) -> None:
        """Starts the admission of new groups again."""
        self._check(incarnation)
        self._parts.buffer.tickets.paused = False
        self._parts.waiting.tickets.wake()

    def set_state(self, incarnation: int, state: RunState, message: str = "") -> None:
        """Sets the state of the run."""
        self._check(incarnation)
        self._parts.registry.set_state(state, message)

    def _check(self, incarnation: int) -> None:
        """Raises Fenced if the call comes from a learner that was replaced, and RunEnded if `asyncrl down` ended the
        run."""
        live = self._parts.buffer.version.incarnation
        if incarnation != live:
            self._parts.buffer.ledger.count(Event.LEARNER_FENCED)
            raise Fenced(
                f"this learner (incarnation {incarnation}) was silent for longer than buffer.heartbeat_timeout_s, and "
                f"another learner (incarnation {live}) has taken over; this learner ends"
            )
        if self._parts.registry.state is RunState.FAILED:
            raise RunEnded(self._parts.registry.message)
