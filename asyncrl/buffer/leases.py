"""The learner's side of the replay buffer: leases, how they end, and the succession of learners."""

from collections.abc import Collection, Iterable

from asyncrl.buffer.ledger import Event, Fate
from asyncrl.buffer.records import Lease, LeaseWait
from asyncrl.buffer.slots import Slot
from asyncrl.buffer.staleness import earliest
from asyncrl.buffer.state import BufferState
from asyncrl.buffer.stragglers import stragglers
from asyncrl.config.schema import OnDeadline
from asyncrl.errors import StalenessViolation


class Leases:
    """The calls of the learner. A lease has the tasks of its first `groups_logged` groups.

    Attributes for the owner of the buffer:

    - `wait`: the answer to the last lease call; None if that call got a lease.
    - `dropped`: the keys of dropped groups that were ready. The owner clears their rows and empties the list.
    - `cancelled`: the keys of stragglers whose tickets a lease call has ended. The owner clears rows under them,
      empties the list, and wakes the generators that wait for a ticket.
    """

    def __init__(self, state: BufferState, *, drop_last: bool, on_deadline: OnDeadline, groups_logged: int) -> None:
        self._state = state
        self._drop_last = drop_last
        self._on_deadline: OnDeadline = on_deadline
        self._groups_logged = groups_logged
        self._last_end: tuple[Fate, int, tuple[str, ...]] | None = None
        self.wait: LeaseWait | None = None
        self.dropped: list[str] = []
        self.cancelled: list[str] = []

    def lease(self) -> Lease | LeaseWait:
        """Returns the groups of one step, earliest deadline first, ties in prompt order; or the reason why not now.

        A repeated call returns the current lease again. When the prompts have run out, the last lease may be short.
        With `drop_last`, the groups of a short step are dropped instead: see `dropped`. Stragglers that block the lease
        are treated as `on_deadline` says: see `cancelled` and `stragglers.py`.

        A learner that restored a checkpoint has loaded the rows of its ready groups before the first call.
        """
        self._state.groups.not_loaded.clear()
        if self._state.lease is not None:
            self._state.ledger.count(Event.LEASE_REPEATED)
            return self._state.lease
        answer = self._start_lease()
        self.wait = None if isinstance(answer, Lease) else answer
        return answer

    def ack(self, incarnation: int, step: int) -> tuple[str, ...]:
        """Ends the lease of a step that was trained. The learner's version increases by one.

        Returns the keys of the groups whose rows may be cleared. The other groups are retained until `release`, for a
        learner that goes back to a checkpoint. A repeated call returns the same keys.
        """
        return self._end_lease(incarnation, step, fate=Fate.TRAINED)

    def skip(self, incarnation: int, step: int) -> tuple[str, ...]:
        """Ends the lease of a step that was skipped. The version stays, and other prompts replace its groups.

        Returns the keys of the groups whose rows may be cleared, as `ack` does.
        """
        return self._end_lease(incarnation, step, fate=Fate.SKIPPED)

    def release(self, *, complete: int | None) -> tuple[str, ...]:
        """Forgets what was kept for earlier checkpoints than the newest complete one, of step `complete`; with None,
        all, because the run ends. Returns the keys of the groups whose rows may be cleared."""
        retained, prefixes = self._state.groups.retained, self._state.groups.prefixes
        over = retained.release(complete=complete)
        prefixes.release(retained.splits)
        return over

    def give_back(self, incarnation: int, step: int) -> bool:
        """Ends a lease without training. Its groups become ready again. Returns False if there is no such lease."""
        if not self._holds_lease(incarnation, step):
            self._state.ledger.count(Event.LEASE_CALL_REFUSED)
            return False
        assert self._state.lease is not None
        self._state.filtered[:0] = self._state.lease.filtered
        self._state.lease = None
        self._state.groups.table.return_leased()
        self._state.ledger.count(Event.LEASE_GIVEN_BACK)
        return True

    def rows_lost(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Removes ready groups whose rows are lost. Their prompts go to the front for the next attempt.

        Returns the keys of these groups. Keys of groups that are not ready are counted and ignored. This includes
        leased groups, because the learner may have read their rows already: it must give the lease back first.
        """
        named = set(keys)
        lost = {slot.ticket.key: slot for slot in self._state.groups.table.ready.slots() if slot.ticket.key in named}
        self._state.ledger.count(Event.ROWS_LOST_REFUSED, len(named) - len(lost))
        self._state.groups.lose_rows(lost.values())
        return tuple(lost)

    def succeed(self) -> int:
        """Starts the next incarnation of the learner, with the weights of the current version. Returns its number.

        The lease of the earlier learner is given back, and its later calls are refused. Tickets and groups stay,
        because ancestors of the new incarnation made all of their tokens.
        """
        if self._state.lease is not None:
            self.give_back(self._state.lease.incarnation, self._state.lease.step)
        self._state.lineage = self._state.lineage.child(self._state.version)
        self._last_end = None
        return self._state.lineage.incarnation

    def restored(self) -> None:
        """Forgets the lease and the keys that were not taken yet, because the buffer continues from a snapshot."""
        self._state.lease = self._last_end = self.wait = None
        self.dropped, self.cancelled = [], []
        self._state.filtered = []

    def _start_lease(self) -> Lease | LeaseWait:
        """Starts a lease, or returns the reason why it cannot start now."""
        state, limits = self._state, self._state.limits
        groups, table = state.groups, state.groups.table
        if state.step >= limits.total_steps:
            return LeaseWait.FINISHED
        if state.failures.too_many:
            return LeaseWait.TOO_MANY_FAILURES
        if len(table.ready) < limits.groups_per_step:
            if table.reserved or table.front or not groups.attempts.exhausted:
                return LeaseWait.NOT_ENOUGH_READY
            if self._drop_last:
                self.dropped += groups.drop_ready()
            if not table.ready:
                return LeaseWait.FINISHED
        share = earliest(table.ready.by_deadline, limits.groups_per_step)
        if min(share) < state.step:
            raise StalenessViolation(
                f"a group that is due at step {min(share)} is still ready at step {state.step} (staleness.max_versions "
                f"= {limits.max_staleness_versions}); this is a bug in asyncrl"
            )
        remaining = {deadline: n - share.get(deadline, 0) for deadline, n in table.unleased_by_deadline.items()}
        blocking = stragglers(
            self._on_deadline,
            step=state.step,
            limits=limits,
            remaining=remaining,
            reserved=table.reserved.values(),
            is_last_attempt=groups.attempts.is_last,
        )
        if blocking is None:
            return LeaseWait.STRAGGLER
        self._act_on(blocking)
        leased = table.lease(share)
        filtered, state.filtered = tuple(state.filtered), []
        state.lease = Lease(
            incarnation=state.lineage.incarnation,
            step=state.step,
            groups=tuple(slot.as_leased() for slot in leased),
            filtered=filtered,
            logged_tasks=tuple(slot.ticket.task for slot in leased[: self._groups_logged]),
        )
        return state.lease

    def _act_on(self, blocking: Collection[Slot]) -> None:
        """Does what `staleness.on_deadline` says with the stragglers that block a lease."""
        for slot in blocking:
            match self._on_deadline:
                case "requeue":
                    self._state.groups.restart(slot)
                    self._state.ledger.count(Event.STRAGGLER_REQUEUED)
                case "drop":
                    self._state.groups.drop(slot)
                    self._state.ledger.count(Event.STRAGGLER_DROPPED)
                case "mask":
                    self._state.groups.table.extend(slot)
                    self._state.ledger.count(Event.STRAGGLER_MASKED)
        if self._on_deadline != "mask":
            self.cancelled += [slot.ticket.key for slot in blocking]

    def _holds_lease(self, incarnation: int, step: int) -> bool:
        return self._state.lease is not None and (incarnation, step) == (
            self._state.lease.incarnation,
            self._state.lease.step,
        )

    def _end_lease(self, incarnation: int, step: int, *, fate: Fate) -> tuple[str, ...]:
        if not self._holds_lease(incarnation, step):
            self._state.ledger.count(Event.LEASE_CALL_REFUSED)
            # The reply to the first call may have been lost, and the caller still needs the keys whose rows it may
            # clear.
            last = self._last_end
            if last is not None and incarnation == self._state.lineage.incarnation and last[:2] == (fate, step):
                return last[2]
            return ()
        self._state.lease = None
        keys = self._state.groups.end_leased(fate, step=step)
        self._state.step += fate is Fate.TRAINED
        self._last_end = (fate, step, keys)
        return keys
