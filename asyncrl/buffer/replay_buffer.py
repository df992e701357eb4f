"""The replay buffer: a pure state machine that admits groups, leases them to the learner, and accounts for each.

           reserve           commit           lease            ack
    free ──────────▶ reserved ──────▶ ready ─────────▶ leased ──────▶ trained
      ▲                │ fail, expire   │ rows_lost      │ give_back: ready again; skip: slot freed
      └────────────────┴────────────────┴────────────────┘

These statements are true after every call:

- Every slot was admitted under rule (1), and every lease was started under rule (2) of `staleness.py`. So every
  admitted group can be trained by its deadline.
- A lease holds its slots until it ends, and it never ends by time.
- The ledger's account is closed: every issued group has exactly one fate.
- Calls that name a ticket or a leased step are idempotent. A repeated, late or unknown one is counted and changes
  nothing.

`ReplayBuffer` decides, and `Groups` (`groups.py`) moves the groups and counts what changes with them.

The state machine has no threads and no sockets, and the clock is an argument. `asyncrl.coordinator` runs it.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from statistics import fmean

import msgspec

from asyncrl.buffer.fleet import NO_HEARTBEAT, NO_STEP, Fleet, Life
from asyncrl.buffer.groups import Groups, Slot, parsed_key
from asyncrl.buffer.ledger import Account, Event, FailureLog, Fate, Ledger, LedgerEntry
from asyncrl.buffer.records import (
    CommitOutcome,
    Counts,
    Failure,
    FilteredGroup,
    GroupMeta,
    HeldReport,
    Lease,
    LeaseWait,
    Prefix,
    Refusal,
    Renewal,
    Reservation,
    Ticket,
    cut_text,
    oldest_step,
)
from asyncrl.buffer.snapshot import BufferSnapshot, restore, take_snapshot
from asyncrl.buffer.staleness import Admission, Limits, admissible, earliest, lease_violation, prefix_fits
from asyncrl.common.version import Lineage, Version
from asyncrl.config.schema import OnDeadline
from asyncrl.data.prompts import PromptSource
from asyncrl.errors import FailureClass, StalenessViolation

_REFUSED_COMMITS = {
    CommitOutcome.DUPLICATE: Event.COMMIT_DUPLICATE,
    CommitOutcome.LATE: Event.COMMIT_LATE,
    CommitOutcome.UNKNOWN: Event.COMMIT_UNKNOWN,
    CommitOutcome.OLD_INCARNATION: Event.COMMIT_OLD_INCARNATION,
}


class ReplayBuffer:
    """The groups between the generators and the learner.

    `prompts` issues the new prompts: group n has the n-th one. `clock` returns monotonic seconds. A lease has the tasks
    of its first `groups_logged` groups. Before each lease, up to `most_filtered` groups whose rewards are all equal are
    filtered, that is, not trained. The order of the prompts and their seeds depend only on their source, so that a run
    with η = 0 trains the same batches as a sequential loop.

    The owner of the buffer may read these attributes, and tell `fleet` and `failures` what happened:

    - `limits`: the limits of the buffer.
    - `step`: the number of acked steps, and `lineage`: the incarnations of the learner so far.
    - `groups`: where each group is. A restore replaces it.
    - `fleet`: the lives of the replicas.
    - `failures`: the failures of rollouts, rewards and tools so far.
    - `ledger`: counts fates and events. The owner counts the events that it finds itself, such as a lost replica.
    - `lease_wait`: the answer to the last lease call; None if that call got a lease, or before the first one.

    The owner changes these:

    - `paused`: while it is True, no new group is admitted. Admitted groups continue.
    - `dropped`: the keys of dropped groups that were ready. The owner clears their rows and empties the list.
    - `cancelled`: the keys of stragglers whose tickets a lease call has ended. The owner clears rows under them,
      empties the list, and wakes the generators that wait for a ticket.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        prompts: PromptSource,
        clock: Callable[[], float],
        drop_last: bool = False,
        on_deadline: OnDeadline = "wait",
        groups_logged: int = 0,
        most_filtered: int = 0,
    ) -> None:
        self.limits = limits
        self.ledger = Ledger()
        self.failures = FailureLog(max_streak=limits.max_data_failures)
        self.fleet = Fleet(
            max_infra_failures=limits.max_infra_failures, timeout_s=limits.heartbeat_timeout_s, clock=clock
        )
        self._new_groups = partial(Groups, limits=limits, prompts=prompts, ledger=self.ledger, fleet=self.fleet)
        self.groups = self._new_groups()
        self.step = 0
        self.lineage = Lineage()
        self._clock = clock
        self._drop_last = drop_last
        self._on_deadline: OnDeadline = on_deadline
        self._groups_logged = groups_logged
        self._most_filtered = most_filtered
        self._filtered: list[FilteredGroup] = []  # since the last lease, at most `most_filtered`
        self._lease: Lease | None = None  # the lease that the learner holds
        self._last_end: tuple[Fate, int, tuple[str, ...]] | None = None  # of the last lease: fate, step, answer
        self.lease_wait: LeaseWait | None = None
        self.paused = False
        self.dropped: list[str] = []
        self.cancelled: list[str] = []

    @property
    def version(self) -> Version:
        """The learner's version: the incarnation, and the number of acked steps."""
        return Version(self.lineage.incarnation, self.step)

    @property
    def account(self) -> Account:
        """The account at this moment, including open groups. Takes O(1) in the number of groups."""
        return self.groups.account()

    def recount(self) -> Account:
        """Returns the account with all open groups counted one by one. It equals `account`, or there is a bug."""
        return self.groups.recount()

    def ledger_entry(self, *, of_ack: bool) -> LedgerEntry:
        """Returns the ledger's entry of this moment, for the audit. With `of_ack`, the next entry has only groups that
        end after this call."""
        return self.groups.ledger_entry(of_ack=of_ack)

    def counts(self) -> Counts:
        """Returns the number of groups in each state, the booked bytes, the age of the oldest group, and the answer to
        the last lease."""
        groups = self.groups
        oldest = next(iter(groups.open.values()), None)
        return Counts(
            reserved=len(groups.reserved),
            ready=len(groups.ready),
            leased=len(groups.leased),
            waiting=len(groups.waiting),
            booked_bytes=groups.booked_bytes,
            oldest_group_age_s=0.0 if oldest is None else self._clock() - oldest.reserved_at_s,
            lease_wait=self.lease_wait,
        )

    def snapshot(self) -> BufferSnapshot:
        """Returns the present state. A leased group counts as ready, because its step has not been trained."""
        return take_snapshot(self.groups, version=self.version, failures=self.failures.state())

    def restore(self, snapshot: BufferSnapshot, *, lineage: Lineage, loaded: Mapping[str, Version] = {}) -> int:
        """Continues from a snapshot as the live incarnation of `lineage`, which began at `snapshot.version`.

        The source of the prompts must continue after the first `snapshot.next_group` prompts. The rows of the groups
        that were ready must be loaded before the next call of `lease`. Groups whose rows cannot be loaded are passed to
        `rows_lost`.

        If this buffer has groups, its learner has died and another one goes back to the snapshot. The steps after the
        snapshot, and their weights, are lost. A group stays if no token of it is of lost weights, also if a lost step
        has trained it and its rows are retained. Actors go on with their tickets. `loaded` has the last version that
        each actor reported. The ledger is that of the snapshot and of the groups that stay. A committed group of which
        only the later tokens are of lost weights is generated again from its stored first tokens. Returns the number of
        these first tokens.
        """
        earlier, self.groups = self.groups, self._new_groups()
        self.lineage, self.step = lineage, snapshot.version.step
        for life in self.fleet.lives().values():
            life.step = NO_STEP  # the replica may have reported weights that the learner has lost
        self._lease = self._last_end = self.lease_wait = None
        self.dropped, self.cancelled = [], []
        self._filtered = []
        self.ledger.restore(snapshot.ledger, ended=snapshot.ended)
        self.failures.restore(snapshot.failures)
        restore(self.groups, snapshot, earlier=earlier, lineage=lineage, loaded=loaded, now_s=self._clock())
        # `restore` may have ended tickets of any actor, so each must name all that it holds in its next heartbeat.
        self.groups.must_report_all.update(life.actor for life in self.fleet.lives().values())
        return earlier.kept.split_tokens(lineage)

    # --- calls of the generators: tickets from their reserve to their commit, failure or expiry -----------------

    def renew(self, actor: str, *, held: HeldReport, version: Version | None = None) -> Renewal | None:
        """Renews the tickets of an actor that sent a heartbeat, and records the progress that it reports. `version` is
        the version that the actor has loaded. Returns None for a late heartbeat, which changes nothing. A repeated
        heartbeat is answered again.

        A ticket that a heartbeat has named once is renewed by every later heartbeat. So the work does not depend on the
        number of tickets, but only on what has changed. A ticket whose reserve reply was lost is never named, so it
        expires. So does a ticket that a complete heartbeat does not name any longer.
        """
        fleet, groups = self.fleet, self.groups
        life = fleet.life_of(actor)
        if life is not None and held.number < life.heartbeat:
            return None
        life = fleet.heartbeat(actor, has_weights=version is not None)
        if life is None:
            return Renewal(must_end=True)
        if life.heartbeat == NO_HEARTBEAT:
            # This is the actor's first heartbeat, or the first one after a quarantine that ended its tickets. It may be
            # late, so even a complete report may not name the tickets that the actor holds now.
            groups.must_report_all.add(actor)
        elif held.complete:
            groups.must_report_all.discard(actor)
            now_s = self._clock()
            for slot in [*groups.held.get(actor, {}).values()]:
                if slot.confirmed and slot.ticket.key not in held.tokens:
                    groups.unconfirm(slot, now_s=now_s)
        life.heartbeat = held.number
        if version is not None and self.lineage.has(version):
            self._loaded(actor, life, step=version.step)
        gone = [
            key
            for key, tokens in held.tokens.items()
            if not groups.confirm(key, tokens=tokens, actor=actor, step=life.step)
        ]
        for key, prefix in held.prefixes.items():
            groups.store(key, prefix, actor=actor)
        ended = tuple(key for key in gone if (ticket := parsed_key(key)) and groups.has_ended(*ticket))
        return Renewal(ended=ended, report_all=actor in groups.must_report_all)

    def leave(self, actor: str) -> tuple[str, ...]:
        """Expires the tickets of an actor that ends. Returns their keys; rows under them may be cleared.

        An actor that ends because something has failed is quarantined first, so that its attempts do not count against
        `max_attempts`.
        """
        groups = self.groups
        expired = self._expire([*groups.held.get(actor, {}).values()])
        groups.must_report_all.discard(actor)
        return expired

    def reserve(self, actor: str, *, version: Version, count: int) -> Reservation:
        """Returns tickets for up to `count` groups at the actor's version, and the reason why there are not more."""
        if count < 1:
            raise ValueError(f"actor {actor} reserves {count} groups; the number must be at least 1")
        now_s = self._clock()
        if not self.lineage.has(version):
            self.ledger.count(Event.RESERVE_OLD_INCARNATION)
        elif version.step > self.step:
            raise ValueError(
                f"actor {actor} reports version {version}, but the learner has acked only {self.step} steps"
            )
        room, refusal = self._admission(version, actor=actor)
        tickets: list[Ticket] = []
        while len(tickets) < min(count, room):
            prompt = self.groups.next_prompt(actor=actor)
            if prompt is None:
                refusal = Refusal.NO_PROMPTS
                break
            if prompt.prefix is not None and not self._may_continue(prompt.prefix, version):
                prompt = self.groups.kept.without_prefix(prompt)
            tickets.append(self.groups.admit(prompt, actor=actor, version=version, step=self.step, now_s=now_s))
        return Reservation(tickets=tuple(tickets), refusal=refusal if len(tickets) < count else None)

    def commit(self, meta: GroupMeta) -> CommitOutcome:
        """Makes a group ready, or filters it; a group with tokens of weights that the learner has lost is generated
        again. The caller has generated and scored the group and has stored its rows.

        Raises an error if the metadata contradicts the ticket, which is a bug in asyncrl: StalenessViolation for a
        token that is older than the ticket, ValueError for anything else. The ticket then stays reserved.
        """
        slot = self.groups.reserved.get(meta.key)
        if slot is None or meta.incarnation != slot.ticket.version.incarnation:
            outcome = self._why_refused(meta)
            self.ledger.count(_REFUSED_COMMITS[outcome])
            return outcome
        if not all(map(self.lineage.has, meta.versions)):
            self.groups.interrupt(slot, meta, lineage=self.lineage)
            self.ledger.count(Event.COMMIT_OLD_INCARNATION)
            return CommitOutcome.OLD_INCARNATION
        _check_commit(meta, slot.ticket, limits=self.limits, step=self.step)
        self.failures.succeeded()
        if (life := self.fleet.life_of(slot.ticket.replica)) is not None:
            life.committed()
        if self._is_filtered(meta):
            self.groups.filter(slot, meta)
            return CommitOutcome.FILTERED
        self.groups.commit(slot, meta, step=self.step)
        return CommitOutcome.ACCEPTED

    def fail(self, key: str, *, incarnation: int, failure: Failure) -> bool:
        """Ends an attempt whose rollout failed. Returns False if the ticket had ended already.

        After an INFRA failure the prompt goes ahead of all new prompts, until it has had `max_attempts` attempts, and
        the replica may have to pause (`fleet.py`). A DATA failure, or the last attempt, ends the group, and another
        prompt may take its slot. The failure is kept with the prompt of the ticket. After `max_data_failures` DATA
        failures without a committed group in between, no more tickets and leases are issued: see
        `Refusal.TOO_MANY_FAILURES`.
        """
        slot = self.groups.reserved.get(key)
        if slot is None or incarnation != slot.ticket.version.incarnation:
            self.ledger.count(Event.FAIL_REFUSED)
            return False
        failure = msgspec.structs.replace(failure, prompt=cut_text(slot.ticket.task.prompt))
        if failure.failure_class is FailureClass.INFRA:
            self.fleet.failed(slot.ticket.replica, failure)
        tried_again = failure.failure_class is FailureClass.INFRA and self.groups.retry(slot)
        if failure.failure_class is FailureClass.DATA:
            self.groups.fail(slot)
        self.failures.failed(failure, ended_group=not tried_again)
        return True

    def expire(self) -> tuple[str, ...]:
        """Quarantines actors that were silent for the timeout. Ends the tickets of quarantined actors, and tickets
        that no heartbeat has named within the timeout. Their prompts go ahead of all new prompts, unless this was the
        last attempt.

        Returns the keys of these tickets; rows under them may be cleared.
        """
        fleet, groups = self.fleet, self.groups
        fleet.quarantine_silent()
        gone = [actor for actor in groups.held if not fleet.may_be_used(actor)]
        before_s = self._clock() - self.limits.heartbeat_timeout_s
        slots = {slot.ticket.key: slot for slot in groups.unconfirmed_before(before_s)}
        for actor in gone:
            come_back = fleet.is_heard(actor)  # the reply with its newest ticket may be under way
            slots |= {key: slot for key, slot in groups.held[actor].items() if slot.confirmed or not come_back}
        expired = self._expire([*slots.values()])
        groups.must_report_all = {actor for actor in groups.must_report_all if fleet.may_be_used(actor)}
        return expired

    def tickets_by_actor(self) -> Mapping[str, int]:
        """Returns the number of tickets that each actor holds."""
        return {actor: len(slots) for actor, slots in self.groups.held.items()}

    def refusal(self, version: Version) -> Refusal | None:
        """Returns why a reserve at `version` of a healthy replica would get no ticket now; None if it would get one.
        Changes nothing."""
        room = self._admission(version)
        return None if room.groups else room.refusal

    def _loaded(self, actor: str, life: Life, *, step: int) -> None:
        """Records the step of the weights that an actor has loaded. The actor's rollouts go on with these weights."""
        if step > life.step:
            life.step = step
            for slot in self.groups.held.get(actor, {}).values():
                if slot.confirmed:
                    slot.newest_step = max(slot.newest_step, step)

    def _admission(self, version: Version, *, actor: str | None = None) -> Admission:
        """Returns how many groups an actor at `version` may reserve now, and the reason why not more. If `actor` is
        None, returns this for a healthy actor."""
        if actor is not None and (refusal := self.fleet.refusal(actor)) is not None:
            return Admission(0, refusal)
        if not self.lineage.has(version):
            return Admission(0, Refusal.OLD_INCARNATION)
        if self.failures.too_many:
            return Admission(0, Refusal.TOO_MANY_FAILURES)
        if self.paused:
            return Admission(0, Refusal.PAUSED)
        if self.groups.exhausted and not self.groups.waiting:
            return Admission(0, Refusal.NO_PROMPTS)
        return admissible(
            self.limits,
            slots=self.groups.slots,
            booked_bytes=self.groups.booked_bytes,
            learner_step=self.step,
            replica_step=version.step,
        )

    def _is_filtered(self, meta: GroupMeta) -> bool:
        """Returns whether a group is filtered, that is, not trained because all of its rewards are equal. Records the
        reward of a filtered group. At most `most_filtered` groups are filtered before a lease."""
        rewards = meta.known_rewards
        if not self._most_filtered or not meta.equal:
            return False
        if len(self._filtered) >= self._most_filtered:
            self.ledger.count(Event.FILTER_LIMIT)
            return False
        self._filtered.append(FilteredGroup(fmean(rewards), len(rewards), meta.part))
        return True

    def _may_continue(self, prefix: Prefix, version: Version) -> bool:
        """Returns whether an actor at `version` may continue a prefix: the learner's weights are made from the versions
        of its tokens, and the early deadline of its group can be met together with all other deadlines."""
        return all(map(self.lineage.has, prefix.versions)) and prefix_fits(
            step=self.step,
            leased=self._lease is not None,
            groups_per_step=self.limits.groups_per_step,
            deadline=oldest_step(version, prefix) + self.limits.max_staleness_versions,
            unleased=self.groups.unleased_by_deadline,
        )

    def _why_refused(self, meta: GroupMeta) -> CommitOutcome:
        """Returns why a commit is refused: OLD_INCARNATION if there was no such incarnation, UNKNOWN if there was no
        such attempt or it is forgotten, DUPLICATE if the attempt was committed before, else LATE."""
        if not 1 <= meta.incarnation <= self.lineage.incarnation:
            return CommitOutcome.OLD_INCARNATION
        last = self.groups.last_attempt(meta.group)
        if last is None or not 0 <= meta.attempt <= last[0] or self.groups.is_forgotten(meta.group, meta.attempt):
            return CommitOutcome.UNKNOWN
        return CommitOutcome.DUPLICATE if last == (meta.attempt, True) else CommitOutcome.LATE

    def _expire(self, slots: Collection[Slot]) -> tuple[str, ...]:
        for slot in slots:
            self.groups.retry(slot)
        self.ledger.count(Event.TICKET_EXPIRED, len(slots))
        return tuple(slot.ticket.key for slot in slots)

    # --- calls of the learner: leases, how they end, and the succession of learners -----------------------------

    def lease(self) -> Lease | LeaseWait:
        """Returns the groups of one step, earliest deadline first, ties in prompt order; or the reason why not now.

        A repeated call returns the current lease again. When the prompts have run out, the last lease may be short.
        With `drop_last`, the groups of a short step are dropped instead: see `dropped`. Stragglers that block the lease
        are treated as `on_deadline` says: see `cancelled` and `stragglers`.

        A learner that restores a checkpoint must load the rows of the ready groups before its first lease call.
        """
        self.groups.kept.not_loaded.clear()
        if self._lease is not None:
            self.ledger.count(Event.LEASE_REPEATED)
            return self._lease
        answer = self._start_lease()
        self.lease_wait = None if isinstance(answer, Lease) else answer
        return answer

    def ack(self, incarnation: int, step: int) -> tuple[str, ...]:
        """Ends the lease of a step that was trained. The learner's version increases by one.

        Returns the keys of the groups whose rows may be cleared. The other groups are retained until `release`, for a
        learner that goes back to a checkpoint. A repeated call returns the same keys. A call for a step that is not
        leased changes nothing and returns no keys.
        """
        return self._end_lease(incarnation, step, fate=Fate.TRAINED)

    def skip(self, incarnation: int, step: int) -> tuple[str, ...]:
        """Ends the lease of a step that was skipped. The version stays, and other prompts replace its groups.

        Returns the keys of the groups whose rows may be cleared, as `ack` does.
        """
        return self._end_lease(incarnation, step, fate=Fate.SKIPPED)

    def release(self, *, complete: int | None) -> tuple[str, ...]:
        """Stops retaining the groups that only checkpoints older than the newest complete one need. `complete` is the
        step of the newest complete checkpoint; None stops retaining all groups, because the run ends. Returns the keys
        of these groups, whose rows may be cleared."""
        return self.groups.kept.release(complete=complete)

    def give_back(self, incarnation: int, step: int) -> bool:
        """Ends a lease without training. Its groups become ready again. Returns False if there is no such lease."""
        if not self._holds_lease(incarnation, step):
            self.ledger.count(Event.LEASE_CALL_REFUSED)
            return False
        assert self._lease is not None
        self._filtered[:0] = self._lease.filtered
        self._lease = None
        self.groups.return_leased()
        self.ledger.count(Event.LEASE_GIVEN_BACK)
        return True

    def rows_lost(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Removes ready groups whose rows are lost. Their prompts wait for the next attempt, ahead of all new prompts.

        Returns the keys of these groups. Keys of groups that are not ready are counted and ignored. This includes
        leased groups, because the learner may have read their rows already: it must give the lease back first.
        """
        named = set(keys)
        lost = {slot.ticket.key: slot for slot in self.groups.ready.values() if slot.ticket.key in named}
        self.ledger.count(Event.ROWS_LOST_REFUSED, len(named) - len(lost))
        self.groups.lose_rows(lost.values())
        return tuple(lost)

    def succeed(self) -> int:
        """Starts the next incarnation of the learner, with the weights of the current version. Returns its number.

        The lease of the earlier learner is given back, and its later calls are refused. Tickets and groups stay,
        because the new incarnation begins with the weights of the earlier learner, so no weights are lost.
        """
        if self._lease is not None:
            self.give_back(self._lease.incarnation, self._lease.step)
        self.lineage = self.lineage.child(self.version)
        self._last_end = None
        return self.lineage.incarnation

    def _start_lease(self) -> Lease | LeaseWait:
        """Starts a lease, or returns the reason why it cannot start now."""
        limits, groups = self.limits, self.groups
        if self.step >= limits.total_steps:
            return LeaseWait.FINISHED
        if self.failures.too_many:
            return LeaseWait.TOO_MANY_FAILURES
        if len(groups.ready) < limits.groups_per_step:
            if groups.reserved or groups.waiting or not groups.exhausted:
                return LeaseWait.NOT_ENOUGH_READY
            if self._drop_last:
                self.dropped += groups.drop_ready()
            if not groups.ready:
                return LeaseWait.FINISHED
        share = earliest(groups.ready_by_deadline, limits.groups_per_step)
        if min(share) < self.step:
            raise StalenessViolation(
                f"a group that is due at step {min(share)} is still ready at step {self.step} (staleness.max_versions "
                f"= {limits.max_staleness_versions}); this is a bug in asyncrl"
            )
        remaining = {deadline: n - share.get(deadline, 0) for deadline, n in groups.unleased_by_deadline.items()}
        blocking = stragglers(
            self._on_deadline,
            step=self.step,
            limits=limits,
            remaining=remaining,
            reserved=groups.reserved.values(),
            is_last_attempt=groups.is_last_attempt,
        )
        if blocking is None:
            return LeaseWait.STRAGGLER
        self._act_on(blocking)
        leased = groups.lease(share)
        filtered, self._filtered = tuple(self._filtered), []
        self._lease = Lease(
            incarnation=self.lineage.incarnation,
            step=self.step,
            groups=tuple(slot.as_leased() for slot in leased),
            filtered=filtered,
            logged_tasks=tuple(slot.ticket.task for slot in leased[: self._groups_logged]),
        )
        return self._lease

    def _act_on(self, blocking: Collection[Slot]) -> None:
        """Does what `staleness.on_deadline` says with the stragglers that block a lease."""
        for slot in blocking:
            match self._on_deadline:
                case "requeue":
                    self.groups.restart(slot)
                    self.ledger.count(Event.STRAGGLER_REQUEUED)
                case "drop":
                    self.groups.drop(slot)
                    self.ledger.count(Event.STRAGGLER_DROPPED)
                case "mask":
                    self.groups.extend(slot)
                    self.ledger.count(Event.STRAGGLER_MASKED)
        if self._on_deadline != "mask":
            self.cancelled += [slot.ticket.key for slot in blocking]

    def _holds_lease(self, incarnation: int, step: int) -> bool:
        return self._lease is not None and (incarnation, step) == (
            self._lease.incarnation,
            self._lease.step,
        )

    def _end_lease(self, incarnation: int, step: int, *, fate: Fate) -> tuple[str, ...]:
        if not self._holds_lease(incarnation, step):
            self.ledger.count(Event.LEASE_CALL_REFUSED)
            # The reply to the first call may have been lost, and the caller still needs the keys whose rows it may
            # clear.
            last = self._last_end
            if last is not None and incarnation == self.lineage.incarnation and last[:2] == (fate, step):
                return last[2]
            return ()
        self._lease = None
        keys = self.groups.end_leased(fate, step=step)
        if fate is Fate.TRAINED:
            self.step += 1
        self._last_end = (fate, step, keys)
        return keys

    # --- rows and partial generations in the data plane that no group needs -------------------------------------

    def never_committed(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` whose attempts have ended without a commit. No commit of them can be accepted, so
        their rows may be cleared. Leaves out keys of attempts that were never issued, and names of another form."""
        groups = self.groups
        return tuple(key for key in keys if (ticket := parsed_key(key)) and groups.is_never_committed(*ticket))

    def without_slot(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` that have the form `<group>.<attempt>`, but whose attempt is not reserved, ready,
        leased or retained."""
        groups = self.groups
        held = {slot.ticket.key for slot in (*groups.open.values(), *groups.kept.retained())}
        return tuple(key for key in keys if parsed_key(key) and key not in held)

    def unneeded_prefixes(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` whose prefixes no attempt writes, reads or may read later. Names of another form are
        left out."""
        groups = self.groups
        return tuple(key for key in keys if (ticket := parsed_key(key)) and not groups.needs_prefix(*ticket))

    def take_unneeded_prefixes(self) -> tuple[str, ...]:
        """Returns the keys of the attempts whose prefixes became unneeded since the last call. They may be cleared."""
        return self.groups.kept.take_unneeded()


def _check_commit(meta: GroupMeta, ticket: Ticket, *, limits: Limits, step: int) -> None:
    """Raises an error if the metadata of a commit contradicts its ticket, or the learner's present `step`.

    StalenessViolation for a token that is older than the ticket, ValueError for anything else.
    """
    if meta.oldest < ticket.oldest:
        raise StalenessViolation(
            f"group {meta.key} has a token of step {meta.oldest}, which is older than step {ticket.oldest} of its "
            "ticket's version and prefix; this is a bug in asyncrl"
        )
    if not meta.oldest <= meta.newest <= step:
        raise ValueError(
            f"group {meta.key} has tokens of steps {meta.oldest} to {meta.newest}, but the learner is at step {step}"
        )
    size = limits.group_size
    columns = [meta.completion_tokens, meta.rewards, meta.truncated, *meta.components.values()]
    lengths = {len(column) for column in (*columns, *filter(None, [meta.read_tokens]))}
    if lengths != {size}:
        raise ValueError(f"group {meta.key} has {sorted(lengths)} samples, but learner.group_size is {size}")
    if not meta.known_rewards or not all(map(math.isfinite, meta.known_rewards)):
        raise ValueError(
            f"group {meta.key} has rewards {meta.rewards}; at least one sample must have a reward, and all "
            "rewards must be finite"
        )
    if not 0 <= meta.row_bytes <= limits.worst_group_bytes:
        raise ValueError(
            f"group {meta.key} takes {meta.row_bytes} bytes, but its reserve booked at most {limits.worst_group_bytes}"
        )


# Stragglers: reserved groups that rule (2) of `staleness.py` needs before the learner may start its next step.
#
# Rule (2) says for each deadline d that the groups due by d fit into the steps up to d. If it fails although enough
# groups are ready, let d be the smallest deadline at which it fails, and `excess` the number of groups that do not fit.
# The policy `staleness.on_deadline` acts on exactly `excess` reserved groups that are due by d, those with the fewest
# generated tokens first:
#
#     wait       nothing: the learner waits
#     requeue    the attempt ends, and the prompt goes ahead of all new prompts
#     drop       the group ends with the fate `dropped`, and another prompt takes its place
#     mask       the group stays and gets the deadline newest + η, where newest is its actor's version
#
# If rule (2) then fails at a later deadline, the same is done for that deadline. If the policy cannot act on enough
# groups, it acts on none: the learner would have to wait all the same, and the work would be lost for nothing. Pure.


def stragglers(
    policy: OnDeadline,
    *,
    step: int,
    limits: Limits,
    remaining: Mapping[int, int],
    reserved: Iterable[Slot],
    is_last_attempt: Callable[[Ticket], bool],
) -> list[Slot] | None:
    """Returns the reserved groups on which `policy` (`staleness.on_deadline`) acts so that the learner may start `step`
    by rule (2).

    `remaining` maps a deadline to the number of groups that stay reserved or ready after the lease. `is_last_attempt`
    tells whether a group fails with its present attempt. Returns an empty list if rule (2) holds already, and None if
    the learner has to wait.
    """
    left, chosen = Counter(remaining), list[Slot]()
    free: list[Slot] | None = None
    while violation := lease_violation(step=step, groups_per_step=limits.groups_per_step, remaining=left):
        if policy == "wait":
            return None
        if free is None:  # takes O(reserved), so not before a group is in the way
            free = [slot for slot in reserved if policy != "requeue" or not is_last_attempt(slot.ticket)]
        deadline, excess = violation
        blocking = [slot for slot in free if slot.deadline <= deadline]
        if policy == "mask":
            blocking = [slot for slot in blocking if slot.newest_deadline > deadline]
        blocking.sort(key=lambda slot: (slot.sampled_tokens, slot.ticket.group))
        if len(blocking) < excess:
            return None
        for slot in blocking[:excess]:
            left[slot.deadline] -= 1
            if policy == "mask":
                left[slot.newest_deadline] += 1
            free.remove(slot)
            chosen.append(slot)
    return chosen
