"""The replay buffer: a pure state machine that admits groups, leases them to the learner, and accounts for each.

           reserve           commit           lease            ack
    free ──────────▶ reserved ──────▶ ready ─────────▶ leased ──────▶ trained
      ▲                │ fail, expire   │ rows_lost      │ give_back: ready again; skip: slot freed
      └────────────────┴────────────────┴────────────────┘

These statements are true after every call:

- Every slot was admitted under rule (1), and every lease was started under rule (2) of `staleness.py`. So every
  admitted group can be trained by its deadline.
- A lease holds its slots until it ends, and it never ends by time.
- The ledger's account is closed.
- Calls are idempotent by id. A repeated, late or unknown call is counted and changes nothing.

The state machine has no threads and no sockets, and the clock is an argument. `asyncrl.coordinator` runs it.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import msgspec

from asyncrl.buffer.commit_check import check_commit
from asyncrl.buffer.failures import FailureLog
from asyncrl.buffer.groups import Groups
from asyncrl.buffer.ledger import Account, Event, Fate, Ledger, LedgerEntry
from asyncrl.buffer.records import (
    CommitOutcome,
    Counts,
    Failure,
    GroupMeta,
    Lease,
    LeaseWait,
    Prefix,
    Progress,
    Refusal,
    Reservation,
    Ticket,
    cut_text,
    oldest_step,
)
from asyncrl.buffer.restoring import restore, take_snapshot
from asyncrl.buffer.slots import Slot
from asyncrl.buffer.snapshot import BufferSnapshot
from asyncrl.buffer.staleness import Limits, Room, admissible, earliest, prefix_fits
from asyncrl.buffer.stragglers import stragglers
from asyncrl.common.lineage import Lineage
from asyncrl.common.version import Version
from asyncrl.config.schema import OnDeadline
from asyncrl.data.prompts import Task
from asyncrl.errors import FailureClass, StalenessViolation

_KEY = re.compile(r"(\d+)\.(\d+)")
_REFUSED_COMMITS = {
    CommitOutcome.DUPLICATE: Event.COMMIT_DUPLICATE,
    CommitOutcome.LATE: Event.COMMIT_LATE,
    CommitOutcome.UNKNOWN: Event.COMMIT_UNKNOWN,
    CommitOutcome.OLD_INCARNATION: Event.COMMIT_OLD_INCARNATION,
}


class ReplayBuffer:
    """The groups between the generators and the learner.

    `next_prompt` returns the next new prompt, or None when there are no more. `clock` returns monotonic seconds. `step`
    is the learner's version v at the start. The order of the prompts and their seeds depend only on their source and
    `seed`, so that a run with η = 0 trains the same batches as a sequential loop.

    Attributes for the owner of the buffer:

    - `paused`: while it is True, no new group is admitted. Admitted groups continue.
    - `dropped`: the keys of dropped groups that were ready. The owner clears their rows and empties the list.
    - `cancelled`: the keys of stragglers whose tickets a lease call has ended. The owner clears rows under them,
      empties the list, and wakes the generators that wait for a ticket.
    - `failures`: the failed rollouts so far.
    - `ledger`: counts fates and events. The owner counts the events that it finds itself, such as a lost replica.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        next_prompt: Callable[[], Task | None],
        clock: Callable[[], float],
        step: int = 0,
        seed: int = 0,
        drop_last: bool = False,
        on_deadline: OnDeadline = "wait",
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._lineage = Lineage()
        self._step = step
        self._drop_last = drop_last
        self._on_deadline = on_deadline
        self.ledger = Ledger()
        self.failures = FailureLog(max_streak=limits.max_data_failures)
        self.paused = False
        self.dropped: list[str] = []
        self.cancelled: list[str] = []
        self._new_groups = partial(Groups, limits=limits, next_prompt=next_prompt, ledger=self.ledger, seed=seed)
        self._groups = self._new_groups()
        self._lease: Lease | None = None
        self._last_end: tuple[Fate, int, tuple[str, ...]] | None = None
        self._lease_wait: LeaseWait | None = None

    # For generators.

    def renew(self, replica: str, *, held: Mapping[str, Progress], version: Version | None = None) -> tuple[str, ...]:
        """Renews the tickets `held`, by key, of a replica that sent a heartbeat, and records their progress and the
        version that the replica has loaded.

        A ticket whose reserve reply was lost is not in `held`, so it expires. Returns the keys of the tickets that have
        ended without a commit: no commit of them can be accepted, so the replica need not generate them any longer.
        """
        now_s = self._clock()
        step = version.step if version is not None and self._lineage.has(version) else None
        for key, progress in held.items():
            self._groups.heard(key, progress, replica=replica, step=step, now_s=now_s)
        tickets = ((key, _KEY.fullmatch(key)) for key in held)
        return tuple(
            key for key, found in tickets if found and self._groups.attempts.has_ended(int(found[1]), int(found[2]))
        )

    def leave(self, replica: str) -> tuple[str, ...]:
        """Expires the tickets of a replica that ends. Returns their keys; rows under them may be cleared."""
        return self._expire([slot for slot in self._groups.table.reserved.values() if slot.ticket.replica == replica])

    def reserve(self, replica: str, *, version: Version, count: int) -> Reservation:
        """Returns tickets for up to `count` groups at the replica's version, and the reason why there are not more."""
        if count < 1:
            raise ValueError(f"replica {replica} reserves {count} groups; the number must be at least 1")
        now_s = self._clock()
        room, refusal = self._room(version)
        tickets: list[Ticket] = []
        while len(tickets) < min(count, room):
            prompt = self._groups.next_prompt()
            if prompt is None:
                refusal = Refusal.NO_PROMPTS
                break
            if prompt.prefix is not None and not self._may_continue(prompt.prefix, version):
                prompt = self._groups.prefixes.without(prompt)
            tickets.append(self._groups.admit(prompt, replica=replica, version=version, step=self._step, now_s=now_s))
        return Reservation(tickets=tuple(tickets), refusal=refusal if len(tickets) < count else None)

    def commit(self, meta: GroupMeta) -> CommitOutcome:
        """Makes a group ready. The caller has generated and scored the group and has stored its rows.

        Raises an error if the metadata contradicts the ticket, which is a bug in asyncrl: StalenessViolation for a
        token that is older than the ticket, ValueError for anything else. The ticket then stays reserved.
        """
        slot = self._groups.table.reserved.get(meta.key)
        if slot is None or meta.incarnation != slot.ticket.version.incarnation:
            outcome = self._why_refused(meta)
            self.ledger.count(_REFUSED_COMMITS[outcome])
            return outcome
        if not all(map(self._lineage.has, meta.versions)):
            self._groups.interrupt(slot, lineage=self._lineage)
            self.ledger.count(Event.COMMIT_OLD_INCARNATION)
            return CommitOutcome.OLD_INCARNATION
        check_commit(meta, slot.ticket, limits=self._limits, step=self._step)
        self._groups.commit(slot, meta, step=self._step)
        self.failures.succeeded()
        return CommitOutcome.ACCEPTED

    def fail(self, key: str, *, incarnation: int, failure: Failure) -> bool:
        """Ends an attempt whose rollout failed. Returns False if the ticket had ended already.

        After an INFRA failure the prompt goes to the front, until it has had `max_attempts` attempts. A DATA failure,
        or the last attempt, ends the group, and another prompt may take its slot. The failure is kept with the prompt
        of the ticket. After `max_data_failures` DATA failures in a row, no more tickets and leases are issued: see
        `Refusal.TOO_MANY_FAILURES`.
        """
        slot = self._groups.table.reserved.get(key)
        if slot is None or incarnation != slot.ticket.version.incarnation:
            self.ledger.count(Event.FAIL_REFUSED)
            return False
        failure = msgspec.structs.replace(failure, prompt=cut_text(slot.ticket.task.prompt))
        tried_again = failure.failure_class is FailureClass.INFRA and self._groups.retry(slot)
        if failure.failure_class is FailureClass.DATA:
            self._groups.fail(slot)
        self.failures.failed(failure, ended_group=not tried_again)
        return True

    def expire(self) -> tuple[str, ...]:
        """Ends tickets that were not renewed within the timeout. A prompt goes to the front, unless this was its last
        attempt.

        Returns the keys of these tickets; rows under them may be cleared.
        """
        return self._expire(self._groups.table.unheard_before(self._clock() - self._limits.heartbeat_timeout_s))

    def never_committed(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` whose attempts have ended without a commit. No commit of them can be accepted, so
        their rows may be cleared. Keys of groups that were never issued are left out, and names of another form."""
        tickets = ((key, _KEY.fullmatch(key)) for key in keys)
        return tuple(
            key
            for key, found in tickets
            if found and self._groups.attempts.is_never_committed(int(found[1]), int(found[2]))
        )

    def without_slot(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` that are keys of groups, but of none that is reserved, ready or leased."""
        held = {slot.ticket.key for slot in self._groups.table.open.values()}
        return tuple(key for key in keys if _KEY.fullmatch(key) and key not in held)

    def unneeded_prefixes(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` whose prefixes no attempt writes, reads or may read later. Names of another form are
        left out."""
        tickets = ((key, _KEY.fullmatch(key)) for key in keys)
        return tuple(
            key for key, found in tickets if found and not self._groups.prefixes.is_needed(int(found[1]), int(found[2]))
        )

    def take_unneeded_prefixes(self) -> tuple[str, ...]:
        """Returns the keys of the attempts whose prefixes became unneeded since the last call. They may be cleared."""
        return self._groups.prefixes.take_unneeded()

    # For the learner.

    def lease(self) -> Lease | LeaseWait:
        """Returns the groups of one step, earliest deadline first, ties in prompt order; or the reason why not now.

        A repeated call returns the current lease again. When the prompts have run out, the last lease may be short.
        With `drop_last`, the groups of a short step are dropped instead: see `dropped`. Stragglers that block the lease
        are treated as `on_deadline` says: see `cancelled` and `stragglers.py`.
        """
        if self._lease is not None:
            self.ledger.count(Event.LEASE_REPEATED)
            return self._lease
        answer = self._start_lease()
        self._lease_wait = None if isinstance(answer, Lease) else answer
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
        """Forgets retained groups that are not needed, now that the newest complete checkpoint is that of step
        `complete`; with None, all, because the run ends. Returns their keys; their rows may be cleared."""
        return self._groups.retained.release(complete=complete)

    def give_back(self, incarnation: int, step: int) -> bool:
        """Ends a lease without training. Its groups become ready again. Returns False if there is no such lease."""
        if not self._holds_lease(incarnation, step):
            self.ledger.count(Event.LEASE_CALL_REFUSED)
            return False
        self._lease = None
        self._groups.table.return_leased()
        self.ledger.count(Event.LEASE_GIVEN_BACK)
        return True

    def rows_lost(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Removes ready groups whose rows are lost. Their prompts go to the front for the next attempt.

        Returns the keys of these groups. Keys of groups that are not ready are counted and ignored. This includes
        leased groups, because the learner may have read their rows already: it must give the lease back first.
        """
        named = set(keys)
        lost = {slot.ticket.key: slot for slot in self._groups.table.ready.slots() if slot.ticket.key in named}
        self.ledger.count(Event.ROWS_LOST_REFUSED, len(named) - len(lost))
        self._groups.lose_rows(lost.values())
        return tuple(lost)

    def succeed(self) -> int:
        """Starts the next incarnation of the learner, with the weights of the current version. Returns its number.

        The lease of the earlier learner is given back, and its later calls are refused. Tickets and groups stay,
        because ancestors of the new incarnation made all of their tokens.
        """
        if self._lease is not None:
            self.give_back(self._lease.incarnation, self._lease.step)
        self._lineage = self._lineage.child(self.version)
        self._last_end = None
        return self._lineage.incarnation

    # For checkpoints.

    def snapshot(self) -> BufferSnapshot:
        """Returns the present state. A leased group counts as ready, because its step has not been trained."""
        return take_snapshot(self._groups, version=self.version, failures=self.failures.state())

    def restore(self, snapshot: BufferSnapshot, *, lineage: Lineage, loaded: Mapping[str, Version] = {}) -> None:
        """Continues from a snapshot as the live incarnation of `lineage`, which began at `snapshot.version`.

        The source of the prompts must continue after the first `snapshot.next_group` prompts. The rows of the groups
        that were ready must be restored as well; `rows_lost` names those that are not there.

        If this buffer has groups, its learner has died and another one goes back to the snapshot. The groups that only
        ancestors of `lineage` made stay, also those that a lost step trained and that are retained. Replicas go on with
        their tickets. `loaded` has the last version that each replica reported. The ledger is that of the snapshot and
        of the groups that stay.
        """
        earlier, self._groups = self._groups, self._new_groups()
        self._lineage, self._step = lineage, snapshot.version.step
        self._lease = self._last_end = self._lease_wait = None
        self.dropped, self.cancelled = [], []
        self.ledger.restore(snapshot.ledger)
        self.failures.restore(snapshot.failures)
        restore(self._groups, snapshot, earlier=earlier, lineage=lineage, loaded=loaded, now_s=self._clock())

    # For supervisors and views of the run.

    @property
    def version(self) -> Version:
        """The learner's version: the incarnation, and the number of acked steps."""
        return Version(self._lineage.incarnation, self._step)

    @property
    def lineage(self) -> Lineage:
        """The incarnations of the learner so far."""
        return self._lineage

    @property
    def account(self) -> Account:
        """The account at this moment, including open groups. Takes O(slots)."""
        return self._groups.fates.account()

    def ledger_entry(self, *, of_ack: bool) -> LedgerEntry:
        """Returns the ledger's entry of this moment, for the audit. `of_ack` begins a new list of ended groups."""
        return self._groups.fates.entry(of_ack=of_ack)

    def reserved_by_replica(self) -> Counter[str]:
        """Returns the number of tickets that each replica holds."""
        return Counter(slot.ticket.replica for slot in self._groups.table.reserved.values())

    def counts(self) -> Counts:
        """Returns the current contents of the buffer."""
        groups = self._groups.table
        oldest = next(iter(groups.open.values()), None)
        return Counts(
            reserved=len(groups.reserved),
            ready=len(groups.ready),
            leased=len(groups.leased),
            waiting=len(groups.front),
            booked_bytes=groups.booked_bytes,
            oldest_group_age_s=0.0 if oldest is None else self._clock() - oldest.reserved_at_s,
            lease_wait=self._lease_wait,
        )

    def _room(self, version: Version) -> Room:
        """Returns how many groups a replica at `version` may reserve now, and the reason why not more."""
        if not self._lineage.has(version):
            self.ledger.count(Event.RESERVE_OLD_INCARNATION)
            return Room(0, Refusal.OLD_INCARNATION)
        if version.step > self._step:
            raise ValueError(f"a replica reports version {version}, but the learner has acked only {self._step} steps")
        if self.failures.too_many:
            return Room(0, Refusal.TOO_MANY_FAILURES)
        if self.paused:
            return Room(0, Refusal.PAUSED)
        if self._groups.attempts.exhausted and not self._groups.table.front:
            return Room(0, Refusal.NO_PROMPTS)
        return admissible(
            self._limits,
            slots=self._groups.table.slots,
            booked_bytes=self._groups.table.booked_bytes,
            learner_step=self._step,
            replica_step=version.step,
        )

    def _may_continue(self, prefix: Prefix, version: Version) -> bool:
        """Returns whether a replica at `version` may continue a prefix: its tokens are of ancestors of the learner's
        weights, and its early deadline can be met together with all others."""
        return all(map(self._lineage.has, prefix.versions)) and prefix_fits(
            step=self._step,
            leased=self._lease is not None,
            groups_per_step=self._limits.groups_per_step,
            deadline=oldest_step(version, prefix) + self._limits.max_staleness_versions,
            unleased=self._groups.table.unleased_by_deadline,
        )

    def _why_refused(self, meta: GroupMeta) -> CommitOutcome:
        """Returns why a commit is refused: its ticket is not reserved, or it is of another incarnation."""
        if not 1 <= meta.incarnation <= self._lineage.incarnation:
            return CommitOutcome.OLD_INCARNATION
        last = self._groups.attempts.last(meta.group)
        if last is None or not 0 <= meta.attempt <= last[0]:
            return CommitOutcome.UNKNOWN
        return CommitOutcome.DUPLICATE if last == (meta.attempt, True) else CommitOutcome.LATE

    def _expire(self, slots: Collection[Slot]) -> tuple[str, ...]:
        for slot in slots:
            self._groups.retry(slot)
        self.ledger.count(Event.TICKET_EXPIRED, len(slots))
        return tuple(slot.ticket.key for slot in slots)

    def _start_lease(self) -> Lease | LeaseWait:
        """Starts a lease, or returns the reason why it cannot start now."""
        table, size = self._groups.table, self._limits.groups_per_step
        if self._step >= self._limits.total_steps:
            return LeaseWait.FINISHED
        if self.failures.too_many:
            return LeaseWait.TOO_MANY_FAILURES
        if len(table.ready) < size:
            if table.reserved or table.front or not self._groups.attempts.exhausted:
                return LeaseWait.NOT_ENOUGH_READY
            if self._drop_last:
                self.dropped += self._groups.drop_ready()
            if not table.ready:
                return LeaseWait.FINISHED
        share = earliest(table.ready.by_deadline(), size)
        if min(share) < self._step:
            raise StalenessViolation(
                f"a group that is due at step {min(share)} is still ready at step {self._step} (staleness.max_versions "
                f"= {self._limits.max_staleness_versions}); this is a bug in asyncrl"
            )
        remaining = {deadline: n - share.get(deadline, 0) for deadline, n in table.unleased_by_deadline.items()}
        blocking = stragglers(
            self._on_deadline,
            step=self._step,
            limits=self._limits,
            remaining=remaining,
            reserved=table.reserved.values(),
        )
        if blocking is None:
            return LeaseWait.STRAGGLER
        self._act_on(blocking)
        leased = tuple(slot.as_leased() for slot in table.lease(share))
        self._lease = Lease(incarnation=self._lineage.incarnation, step=self._step, groups=leased)
        return self._lease

    def _act_on(self, blocking: Collection[Slot]) -> None:
        """Does what `staleness.on_deadline` says with the stragglers that block a lease."""
        for slot in blocking:
            match self._on_deadline:
                case "requeue":
                    self._groups.restart(slot)
                    self.ledger.count(Event.STRAGGLER_REQUEUED)
                case "drop":
                    self._groups.drop(slot)
                    self.ledger.count(Event.STRAGGLER_DROPPED)
                case "mask":
                    self._groups.table.extend(slot)
                    self.ledger.count(Event.STRAGGLER_MASKED)
        if self._on_deadline != "mask":
            self.cancelled += [slot.ticket.key for slot in blocking]

    def _holds_lease(self, incarnation: int, step: int) -> bool:
        return self._lease is not None and (incarnation, step) == (self._lease.incarnation, self._lease.step)

    def _end_lease(self, incarnation: int, step: int, *, fate: Fate) -> tuple[str, ...]:
        if not self._holds_lease(incarnation, step):
            self.ledger.count(Event.LEASE_CALL_REFUSED)
            # The reply to the first call may have been lost, and the caller still needs the keys whose rows it may
            # clear.
            last = self._last_end
            if last is not None and incarnation == self._lineage.incarnation and last[:2] == (fate, step):
                return last[2]
            return ()
        self._lease = None
        keys = self._groups.end_leased(fate, step=step)
        self._step += fate is Fate.TRAINED
        self._last_end = (fate, step, keys)
        return keys
