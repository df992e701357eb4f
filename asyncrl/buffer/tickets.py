"""The generators' side of the replay buffer: tickets from their reserve to their commit, failure or expiry."""

import math
from collections.abc import Collection, Mapping
from statistics import fmean

import msgspec

from asyncrl.buffer.attempts import parsed_key
from asyncrl.buffer.failure_records import Failure, cut_text
from asyncrl.buffer.fleet import NO_HEARTBEAT, Life
from asyncrl.buffer.ledger import Event
from asyncrl.buffer.records import (
    CommitOutcome,
    FilteredGroup,
    GroupMeta,
    HeldReport,
    Prefix,
    Refusal,
    Renewal,
    Reservation,
    Ticket,
    oldest_step,
)
from asyncrl.buffer.slots import Slot
from asyncrl.buffer.staleness import Limits, Room, admissible, prefix_fits
from asyncrl.buffer.state import BufferState
from asyncrl.common.version import Version
from asyncrl.errors import FailureClass, StalenessViolation

_REFUSED_COMMITS = {
    CommitOutcome.DUPLICATE: Event.COMMIT_DUPLICATE,
    CommitOutcome.LATE: Event.COMMIT_LATE,
    CommitOutcome.UNKNOWN: Event.COMMIT_UNKNOWN,
    CommitOutcome.OLD_INCARNATION: Event.COMMIT_OLD_INCARNATION,
}


class Tickets:
    """The calls of generators. While `paused` is True, no new group is admitted. Admitted groups continue."""

    def __init__(self, state: BufferState) -> None:
        self._state = state
        self.paused = False

    def renew(self, replica: str, *, held: HeldReport, version: Version | None = None) -> Renewal | None:
        """Renews the tickets of a replica that sent a heartbeat, and records the progress that it reports. `version` is
        the version that the replica has loaded. Returns None for a late heartbeat, which changes nothing. A repeated
        one gets its answer again.

        A ticket that a heartbeat has named once is renewed by every later heartbeat. So the work does not depend on the
        number of tickets, but only on what has changed. A ticket whose reserve reply was lost is never named, so it
        expires. So does a ticket that a complete heartbeat does not name any longer.
        """
        fleet, table = self._state.fleet, self._state.groups.table
        life = fleet.life_of(replica)
        if life is not None and held.number < life.heartbeat:
            return None
        life = fleet.hear(replica, has_weights=version is not None)
        if life is None:
            return Renewal(must_end=True)
        if life.heartbeat == NO_HEARTBEAT:  # it may hold tickets that have ended, also if this is a late heartbeat
            table.to_ask.add(replica)
        elif held.complete:
            table.to_ask.discard(replica)
            now_s = self._state.clock()
            for slot in [*table.held.get(replica, {}).values()]:
                if slot.confirmed and slot.ticket.key not in held.tokens:
                    table.unconfirm(slot, now_s=now_s)
        life.heartbeat = held.number
        if version is not None and self._state.lineage.has(version):
            self._loaded(replica, life, step=version.step)
        groups = self._state.groups
        gone = [
            key
            for key, tokens in held.tokens.items()
            if not groups.named(key, tokens=tokens, replica=replica, step=life.step)
        ]
        for key, prefix in held.prefixes.items():
            groups.stored(key, prefix, replica=replica)
        ended = tuple(key for key in gone if (ticket := parsed_key(key)) and groups.attempts.has_ended(*ticket))
        return Renewal(ended=ended, name_all=replica in table.to_ask)

    def leave(self, replica: str) -> tuple[str, ...]:
        """Expires the tickets of a replica that ends. Returns their keys; rows under them may be cleared.

        A replica that ends because something has failed is quarantined first, so that its attempts do not count.
        """
        table = self._state.groups.table
        expired = self._expire([*table.held.get(replica, {}).values()])
        table.to_ask.discard(replica)
        return expired

    def reserve(self, replica: str, *, version: Version, count: int) -> Reservation:
        """Returns tickets for up to `count` groups at the replica's version, and the reason why there are not more."""
        if count < 1:
            raise ValueError(f"replica {replica} reserves {count} groups; the number must be at least 1")
        now_s = self._state.clock()
        if not self._state.lineage.has(version):
            self._state.ledger.count(Event.RESERVE_OLD_INCARNATION)
        elif version.step > self._state.step:
            raise ValueError(
                f"a replica reports version {version}, but the learner has acked only {self._state.step} steps"
            )
        room, refusal = self._room(version, replica=replica)
        tickets: list[Ticket] = []
        while len(tickets) < min(count, room):
            prompt = self._state.groups.attempts.next_prompt(replica=replica)
            if prompt is None:
                refusal = Refusal.NO_PROMPTS
                break
            if prompt.prefix is not None and not self._may_continue(prompt.prefix, version):
                prompt = self._state.groups.prefixes.without(prompt)
            tickets.append(
                self._state.groups.admit(prompt, replica=replica, version=version, step=self._state.step, now_s=now_s)
            )
        return Reservation(tickets=tuple(tickets), refusal=refusal if len(tickets) < count else None)

    def commit(self, meta: GroupMeta) -> CommitOutcome:
        """Makes a group ready, or filters it. The caller has generated and scored the group and has stored its rows.

        Raises an error if the metadata contradicts the ticket, which is a bug in asyncrl: StalenessViolation for a
        token that is older than the ticket, ValueError for anything else. The ticket then stays reserved.
        """
        slot = self._state.groups.table.reserved.get(meta.key)
        if slot is None or meta.incarnation != slot.ticket.version.incarnation:
            outcome = self._why_refused(meta)
            self._state.ledger.count(_REFUSED_COMMITS[outcome])
            return outcome
        if not all(map(self._state.lineage.has, meta.versions)):
            self._state.groups.interrupt(slot, meta, lineage=self._state.lineage)
            self._state.ledger.count(Event.COMMIT_OLD_INCARNATION)
            return CommitOutcome.OLD_INCARNATION
        _check_commit(meta, slot.ticket, limits=self._state.limits, step=self._state.step)
        self._state.failures.succeeded()
        if (life := self._state.fleet.life_of(slot.ticket.replica)) is not None:
            life.committed()
        if self._is_filtered(meta):
            self._state.groups.filter(slot, meta)
            return CommitOutcome.FILTERED
        self._state.groups.commit(slot, meta, step=self._state.step)
        return CommitOutcome.ACCEPTED

    def fail(self, key: str, *, incarnation: int, failure: Failure) -> bool:
        """Ends an attempt whose rollout failed. Returns False if the ticket had ended already.

        After an INFRA failure the prompt goes to the front, until it has had `max_attempts` attempts, and the replica
        may have to pause (`fleet.py`). A DATA failure, or the last attempt, ends the group, and another prompt may take
        its slot. The failure is kept with the prompt of the ticket. After `max_data_failures` DATA failures in a row,
        no more tickets and leases are issued: see `Refusal.TOO_MANY_FAILURES`.
        """
        slot = self._state.groups.table.reserved.get(key)
        if slot is None or incarnation != slot.ticket.version.incarnation:
            self._state.ledger.count(Event.FAIL_REFUSED)
            return False
        failure = msgspec.structs.replace(failure, prompt=cut_text(slot.ticket.task.prompt))
        if failure.failure_class is FailureClass.INFRA:
            self._state.fleet.failed(slot.ticket.replica, failure)
        tried_again = failure.failure_class is FailureClass.INFRA and self._state.groups.retry(slot)
        if failure.failure_class is FailureClass.DATA:
            self._state.groups.fail(slot)
        self._state.failures.failed(failure, ended_group=not tried_again)
        return True

    def expire(self) -> tuple[str, ...]:
        """Quarantines replicas that were silent for the timeout. Ends the tickets of quarantined replicas, and tickets
        that no heartbeat has named within the timeout. A prompt goes to the front, unless this was its last attempt.

        Returns the keys of these tickets; rows under them may be cleared.
        """
        fleet, table = self._state.fleet, self._state.groups.table
        fleet.quarantine_silent()
        gone = [replica for replica in table.held if not fleet.may_be_used(replica)]
        before_s = self._state.clock() - self._state.limits.heartbeat_timeout_s
        slots = {slot.ticket.key: slot for slot in table.unconfirmed_before(before_s)}
        for replica in gone:
            come_back = fleet.is_heard(replica)  # a ticket that it was given just now may be under way
            slots |= {key: slot for key, slot in table.held[replica].items() if slot.confirmed or not come_back}
        expired = self._expire([*slots.values()])
        table.to_ask = {replica for replica in table.to_ask if fleet.may_be_used(replica)}
        return expired

    def by_replica(self) -> Mapping[str, int]:
        """Returns the number of tickets that each replica holds."""
        return {replica: len(slots) for replica, slots in self._state.groups.table.held.items()}

    def refusal(self, version: Version) -> Refusal | None:
        """Returns why a reserve at `version` of a healthy replica would get no ticket now; None if it would get one.
        Changes nothing."""
        room = self._room(version)
        return None if room.groups else room.refusal

    def _loaded(self, replica: str, life: Life, *, step: int) -> None:
        """Records the step of the weights that a replica has loaded. Its rollouts go on with these weights."""
        if step > life.step:
            life.step = step
            for slot in self._state.groups.table.held.get(replica, {}).values():
                if slot.confirmed:
                    slot.newest_step = max(slot.newest_step, step)

    def _room(self, version: Version, *, replica: str | None = None) -> Room:
        """Returns how many groups a replica at `version` may reserve now, and the reason why not more; for a healthy
        one if `replica` is None."""
        if replica is not None and (refusal := self._state.fleet.refusal(replica)) is not None:
            return Room(0, refusal)
        if not self._state.lineage.has(version):
            return Room(0, Refusal.OLD_INCARNATION)
        if self._state.failures.too_many:
            return Room(0, Refusal.TOO_MANY_FAILURES)
        if self.paused:
            return Room(0, Refusal.PAUSED)
        if self._state.groups.attempts.exhausted and not self._state.groups.table.front:
            return Room(0, Refusal.NO_PROMPTS)
        return admissible(
            self._state.limits,
            slots=self._state.groups.table.slots,
            booked_bytes=self._state.groups.table.booked_bytes,
            learner_step=self._state.step,
            replica_step=version.step,
        )

    def _is_filtered(self, meta: GroupMeta) -> bool:
        """Returns whether a group is not trained because all of its rewards are equal, and records its reward."""
        rewards, state = meta.known_rewards, self._state
        if not state.most_filtered or not meta.equal:
            return False
        if len(state.filtered) >= state.most_filtered:
            state.ledger.count(Event.FILTER_LIMIT)
            return False
        state.filtered.append(FilteredGroup(fmean(rewards), len(rewards), meta.part))
        return True

    def _may_continue(self, prefix: Prefix, version: Version) -> bool:
        """Returns whether a replica at `version` may continue a prefix: its tokens are of ancestors of the learner's
        weights, and its early deadline can be met together with all others."""
        return all(map(self._state.lineage.has, prefix.versions)) and prefix_fits(
            step=self._state.step,
            leased=self._state.lease is not None,
            groups_per_step=self._state.limits.groups_per_step,
            deadline=oldest_step(version, prefix) + self._state.limits.max_staleness_versions,
            unleased=self._state.groups.table.unleased_by_deadline,
        )

    def _why_refused(self, meta: GroupMeta) -> CommitOutcome:
        """Returns why a commit is refused: its ticket is not reserved, or it is of another incarnation."""
        if not 1 <= meta.incarnation <= self._state.lineage.incarnation:
            return CommitOutcome.OLD_INCARNATION
        last = self._state.groups.attempts.last(meta.group)
        if last is None or not 0 <= meta.attempt <= last[0]:
            return CommitOutcome.UNKNOWN
        return CommitOutcome.DUPLICATE if last == (meta.attempt, True) else CommitOutcome.LATE

    def _expire(self, slots: Collection[Slot]) -> tuple[str, ...]:
        for slot in slots:
            self._state.groups.retry(slot)
        self._state.ledger.count(Event.TICKET_EXPIRED, len(slots))
        return tuple(slot.ticket.key for slot in slots)


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
            f"group {meta.key} has rewards {meta.rewards}; a sample must have a reward, and all rewards must be finite"
        )
    if not 0 <= meta.row_bytes <= limits.worst_group_bytes:
        raise ValueError(
            f"group {meta.key} takes {meta.row_bytes} bytes, but its reserve booked at most {limits.worst_group_bytes}"
        )
