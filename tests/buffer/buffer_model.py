"""A model of the replay buffer. Each method makes a call to the real buffer and checks the answer.

The model is a plain dictionary from ticket to state, which is updated only from the buffer's answers. The methods
`check_*` compare the whole state, check the rules as they are defined, and continue with a copy of the buffer to show
that it can train another step.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec
from buffer_scenes import Clock, NumberedPrompts, finished, limits, stored_by
from straggler_model import Straggler, treated

from asyncrl.buffer.ledger import Amount, Event, Fate
from asyncrl.buffer.records import (
    CommitOutcome,
    Failure,
    FilteredGroup,
    GroupMeta,
    HeldReport,
    Lease,
    LeaseWait,
    Prefix,
    Refusal,
    Renewal,
    Ticket,
)
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.buffer.snapshot import BufferSnapshot
from asyncrl.common.version import Lineage, Version
from asyncrl.config.schema import OnDeadline
from asyncrl.errors import FailureClass
from asyncrl.generation.generator import HeldTickets

TIMEOUT_S = 10.0
HEARTBEATS_A_LIFE = 10**6
MAX_ATTEMPTS = 3
IN_A_CHECKPOINT = (
    "v", "tickets", "state", "committed", "lost", "booked_bytes", "waiting", "fates", "failed_on", "deadline",
    "newest", "progress", "dropped_tokens", "prefixes", "continued", "dropped",
)  # fmt: skip


class BufferModel:
    def __init__(
        self,
        *,
        eta: int,
        per_step: int,
        spare_groups: int,
        spare_bytes: int,
        prompts: int | None,
        total_steps: int,
        drop_last: bool,
        on_deadline: OnDeadline = "wait",
        most_filtered: int = 0,
    ) -> None:
        self.most_filtered = most_filtered
        self.filtered = 0  # groups since the last lease
        self.filtered_keys: set[str] = set()
        self.limits = limits(
            eta=eta,
            per_step=per_step,
            capacity_groups=per_step + spare_groups,
            capacity_bytes=per_step * 100 + spare_bytes,
            total_steps=total_steps,
            max_attempts=MAX_ATTEMPTS,
            heartbeat_timeout_s=TIMEOUT_S,
        )
        self.clock = Clock()
        self.prompts, self.drop_last, self.on_deadline = NumberedPrompts(prompts), drop_last, on_deadline
        self.buffer = self.new_buffer()
        self.lineage = Lineage()
        self.taken: tuple[bytes, dict[str, Any]] | None = None  # the newest snapshot
        self.saved: tuple[bytes, dict[str, Any]] | None = None  # the newest complete checkpoint
        self.older: list[tuple[bytes, dict[str, Any]]] = []  # the complete checkpoints before it
        self.incarnation = 1
        self.v = 0
        self.published = Version(1, 0)
        self.loaded = dict.fromkeys("abc", Version(1, 0))
        self.tickets: dict[str, Ticket] = {}  # every ticket that was ever issued
        self.state: dict[str, str] = {}  # reserved, ready, leased, over
        self.deadline: dict[str, int] = {}
        self.newest: dict[str, int] = {}  # step of the weights that the replica of a ticket reported last
        self.progress: Counter[str] = Counter()  # generated tokens that the replica of a ticket reported last
        self.dropped_tokens = 0
        self.treated = 0  # stragglers on which the policy acted
        self.committed: set[str] = set()
        self.lost: set[str] = set()
        self.booked_bytes: dict[str, int] = {}
        self.waiting: set[int] = set()  # groups whose prompt is at the front
        self.confirmed: set[str] = set()  # tickets that a heartbeat has named, and no later complete one has left out
        self.unconfirmed_s: dict[str, float] = {}  # the time since which a ticket is not confirmed
        self.lives = itertools.count(1)
        self.held = {replica: self.new_life() for replica in "abc"}  # what each replica knows of its tickets
        self.numbers: dict[str, int] = {}  # of the last heartbeat of each replica that is not quarantined
        self.delayed: dict[str, HeldReport] = {}  # heartbeats that are still under way
        self.lease: Lease | None = None
        self.fates = dict.fromkeys(Fate, 0)
        self.failed_on: dict[int, list[str]] = {}  # the replica of each attempt that failed or expired, by group
        self.replica_last_seen_s: dict[str, float] = {}
        self.quarantined: set[str] = set()  # replicas that were silent for the timeout
        self.versions: dict[str, set[Version]] = {}  # of the tokens of each ticket so far
        self.retained: dict[str, int] = {}  # with the step that ended the group
        self.cleared: set[str] = set()  # keys whose rows are gone, or not loaded yet from a checkpoint
        self.prefixes: dict[int, Prefix] = {}  # what is stored of reserved and waiting groups, as far as it is known
        self.split: dict[int, Prefix] = {}  # what is stored of committed groups, and a checkpoint may need
        self.metas: dict[int, GroupMeta] = {}  # of these groups
        self.continued = self.dropped = 0  # tokens
        self.own_prefix: dict[str, Prefix] = {}  # what each attempt has stored itself
        self.stored: set[str] = set()  # every key under which something was ever stored
        self.sampled: Counter[str] = Counter()  # tokens that the rollout of each ticket has sampled

    def new_buffer(self) -> ReplayBuffer:
        return ReplayBuffer(
            limits=self.limits,
            prompts=self.prompts,
            clock=self.clock,
            drop_last=self.drop_last,
            on_deadline=self.on_deadline,
            most_filtered=self.most_filtered,
        )

    # The state of the model.

    def having(self, *states: str) -> list[str]:
        return [key for key, state in self.state.items() if state in states]

    def slots(self) -> int:
        return len(self.having("reserved", "ready", "leased"))

    def due(self, deadline: int, *states: str) -> int:
        return sum(self.deadline[key] <= deadline for key in self.having(*states))

    def over(self, key: str, fate: Fate | None = None) -> None:
        self.state[key] = "over"
        if fate is not None:
            self.fates[fate] += 1

    def attempt_over(self, key: str) -> None:
        """Ends an attempt without a result. The prompt waits for its next attempt, unless this was the last one."""
        ticket = self.tickets[key]
        last = self.at_last_attempt(key)
        self.over(key, Fate.FAILED if last else None)
        if last:
            self.prefixes.pop(ticket.group, None)
        else:
            self.waiting.add(ticket.group)
            self.failed_on[ticket.group] = [*self.failed_on.get(ticket.group, []), ticket.replica]

    def at_last_attempt(self, key: str) -> bool:
        ticket = self.tickets[key]
        failed_on = [*self.failed_on.get(ticket.group, []), ticket.replica]
        counted = [replica for replica in failed_on if replica not in self.quarantined]
        return len(counted) >= MAX_ATTEMPTS or len(failed_on) >= 2 * MAX_ATTEMPTS

    def seen(self, replica: str) -> None:
        self.replica_last_seen_s[replica] = self.clock.now_s
        self.quarantined.discard(replica)

    def is_left_to_others(self, group: int, replica: str) -> bool:
        """Returns whether a replica leaves a prompt that failed on it to a healthy one that has not tried it."""
        failed_on = self.failed_on.get(group, [])
        healthy = {
            name
            for name, last_seen_s in self.replica_last_seen_s.items()
            if self.clock.now_s - last_seen_s <= TIMEOUT_S / 2 and not self.backs_off(name)
        }
        return replica in failed_on and bool(healthy - self.quarantined - set(failed_on))

    def backs_off(self, replica: str) -> bool:
        life = self.buffer.fleet.life_of(replica)
        return life is not None and life.blocked_until_s > self.clock.now_s

    # Generators.

    def reserve(self, replica: str, count: int, *, reply_lost: bool = False) -> None:
        r, per_step = self.loaded[replica].step, self.limits.groups_per_step
        self.buffer.fleet.heartbeat(replica, has_weights=True)
        self.seen(replica)
        if self.backs_off(replica):
            answer = self.buffer.reserve(replica, version=self.loaded[replica], count=count)
            assert (answer.tickets, answer.refusal) == ((), Refusal.UNHEALTHY)
            return
        if not self.lineage.has(self.loaded[replica]):
            answer = self.buffer.reserve(replica, version=self.loaded[replica], count=count)
            assert (answer.tickets, answer.refusal) == ((), Refusal.OLD_INCARNATION)
            return
        before = self.slots()
        fronts = [group for group in sorted(self.waiting) if not self.is_left_to_others(group, replica)]
        left_out = [group for group in sorted(self.waiting) if group not in fronts]
        answer = self.buffer.reserve(replica, version=self.loaded[replica], count=count)
        for ticket in answer.tickets:
            assert ticket.key not in self.tickets
            self.check_prefix(ticket)
            self.state[ticket.key], self.tickets[ticket.key] = "reserved", ticket
            self.deadline[ticket.key] = ticket.deadline
        for ticket in answer.tickets:  # the slots are checked below, one after the other
            del self.state[ticket.key], self.tickets[ticket.key]
        for n, ticket in enumerate(answer.tickets):
            assert before + n + (self.v - r) * per_step < (self.limits.max_staleness_versions + 1) * per_step  # (1)
            assert self.v * per_step + before + n < self.limits.total_steps * per_step
            if n < len(fronts):
                assert ticket.group == fronts[n], "prompts at the front are issued first"
            elif ticket.attempt > 0:
                assert self.buffer.groups.exhausted, "new prompts come before those that others may try"
                assert ticket.group == left_out.pop(0)
            assert list(ticket.failed_on) == self.failed_on.get(ticket.group, [])
            self.waiting.discard(ticket.group)
            assert ticket.seed == ticket.group * self.limits.group_size
            self.tickets[ticket.key] = ticket
            self.versions[ticket.key] = {ticket.version, *(() if ticket.prefix is None else ticket.prefix.versions)}
            self.state[ticket.key] = "reserved"
            self.deadline[ticket.key], self.newest[ticket.key] = ticket.deadline, ticket.version.step
            self.booked_bytes[ticket.key] = self.limits.worst_group_bytes
            self.unconfirmed_s[ticket.key] = self.clock.now_s
        if not reply_lost:
            self.held[replica].add(answer.tickets)
        assert (answer.refusal is None) == (len(answer.tickets) == count)
        if answer.refusal is Refusal.STALENESS:
            assert self.slots() + (self.v - r) * per_step >= (self.limits.max_staleness_versions + 1) * per_step

    # Heartbeats. The replica's end is the real one, and the calls and answers may be lost, late or delayed.

    def new_life(self) -> HeldTickets:
        return HeldTickets(first_number=next(self.lives) * HEARTBEATS_A_LIFE)

    def heartbeat(self, replica: str, *, store: int | None = None) -> None:
        """The replica reports, as `Generator.report` does, and gets its answers. It then holds no ended ticket."""
        held = self.held[replica]
        self.work(replica, store=store)
        for _ in range(2):
            report = held.report()
            renewal = self.deliver(replica, report)
            assert renewal is not None
            held.answered(report)
            for key in renewal.ended:
                held.forget(key)
            if not renewal.report_all:
                break
            held.report_all()
        assert not renewal.report_all
        # The answer to a commit is still under way if the replica holds a ticket that was committed or filtered.
        assert not [key for key in held if self.has_ended(key) and key not in self.committed | self.filtered_keys]

    def heartbeat_without_answer(self, replica: str, pick: int) -> None:
        """A heartbeat whose answer is lost, or that is lost itself."""
        self.work(replica, store=pick if pick % 3 == 0 else None)
        report = self.held[replica].report()
        if pick % 2:
            self.deliver(replica, report)

    def delay_heartbeat(self, replica: str) -> None:
        """A heartbeat that comes later, maybe after the next ones."""
        self.work(replica)
        self.delayed[replica] = self.held[replica].report()

    def deliver_delayed(self, replica: str) -> None:
        if (report := self.delayed.pop(replica, None)) is not None and self.deliver(replica, report) is None:
            self.held[replica].answered(report)  # a late heartbeat is answered too

    def work(self, replica: str, *, store: int | None = None) -> None:
        """The rollouts of the replica go on."""
        held = self.held[replica]
        for n, key in enumerate(sorted(held)):
            self.sampled[key] += self.tickets[key].group % 3
            held.progressed(key, self.sampled[key])
            if store is not None:
                held.stored(key, self.store(key, store + n, newest=self.loaded[replica]))

    def deliver(self, replica: str, report: HeldReport) -> Renewal | None:
        """The buffer gets a heartbeat."""
        renewal = self.buffer.renew(replica, held=report, version=self.loaded[replica])
        known = self.numbers.get(replica)
        assert (renewal is None) == (known is not None and report.number <= known)
        if renewal is None:
            return None
        self.numbers[replica] = report.number
        self.seen(replica)
        for key in self.reserved_by(replica):
            if known is not None and report.complete and key not in report.tokens and key in self.confirmed:
                self.confirmed.discard(key)
                self.unconfirmed_s[key] = self.clock.now_s
        for key, tokens in report.tokens.items():
            if self.state[key] == "reserved":
                self.confirmed.add(key)
                self.progress[key] = tokens
        for key in self.reserved_by(replica):
            if key in self.confirmed and self.lineage.has(self.loaded[replica]):
                self.newest[key] = max(self.newest[key], self.loaded[replica].step)
        for key, prefix in report.prefixes.items():
            if self.state[key] == "reserved":
                self.record_prefix(key, prefix)
        assert set(renewal.ended) == set(filter(self.has_ended, report.tokens))
        return renewal

    def reserved_by(self, replica: str) -> list[str]:
        return [key for key in self.having("reserved") if self.tickets[key].replica == replica]

    def has_ended(self, key: str) -> bool:
        """Whether no commit of the ticket was accepted or can be accepted."""
        return self.state.get(key, "over") == "over" and not (key in self.committed and key not in self.lost)

    def give_up(self, replica: str, pick: int) -> None:
        """The replica cannot report the failure of a rollout, and forgets its ticket."""
        if held := sorted(self.held[replica]):
            self.held[replica].give_up(held[pick % len(held)])

    def store(self, key: str, pick: int, *, newest: Version) -> Prefix:
        """A replica stores more tokens of a group, after those of its prefix unless it could not read them."""
        ticket, own = self.tickets[key], self.own_prefix.get(key)
        if own is None:
            prefix = stored_by(ticket, tokens=pick % 3 + 1, also=(newest,), unreadable=pick % 5 == 0)
        else:
            prefix = msgspec.structs.replace(
                own, tokens=own.tokens + 1, versions=tuple(sorted({*own.versions, newest}))
            )
        self.own_prefix[key] = prefix
        self.stored.add(key)
        return prefix

    def record_prefix(self, key: str, prefix: Prefix) -> None:
        """The buffer hears what a replica has stored of a reserved group."""
        group = self.tickets[key].group
        before = self.prefixes.get(group)
        if before is not None and before.attempt != prefix.attempt:
            self.dropped += before.tokens - prefix.continued_tokens
        self.prefixes[group] = prefix

    def strand(self, replica: str, pick: int) -> None:
        """A replica stores its groups and ends. The other replicas finish theirs, also newer ones, and the learner
        trains what it can, before any replica takes the prompts of the ended one."""
        self.reserve(replica, pick % 3 + 1)
        self.heartbeat(replica, store=pick)
        self.publish()
        for other in sorted(set("abc") - {replica}):
            self.load(other)
            self.reserve(other, 3)
        self.leave(replica)
        for key in self.having("reserved"):
            self.commit_one(key, row_bytes=10)
        for _ in range(pick % 4):
            self.end_step("ack")
            self.start_step()

    def check_prefix(self, ticket: Ticket) -> None:
        """Checks that a new ticket has the stored prefix exactly if its early deadline can be met, and counts it."""
        prefix = self.prefixes.get(ticket.group)
        if prefix is None:
            assert ticket.prefix is None
            return
        steps = [ticket.version.step, *(version.step for version in prefix.versions)]
        deadline = min(steps) + self.limits.max_staleness_versions
        begun = self.lease is not None
        fits = all(map(self.lineage.has, prefix.versions)) and deadline >= self.v + begun
        for d in range(self.v, self.v + self.limits.max_staleness_versions + 1):
            due = self.due(d, "reserved", "ready") + (deadline <= d)
            fits = fits and due <= (d - self.v + (not begun)) * self.limits.groups_per_step
        assert ticket.prefix == (prefix if fits else None), (prefix, self.v, deadline)
        if fits:
            assert (ticket.oldest, ticket.deadline) == (min(steps), deadline)
        else:
            self.dropped += self.prefixes.pop(ticket.group).tokens

    def crash(self, replica: str) -> None:
        """The replica restarts at once without its tickets, and the buffer gets no message about it."""
        self.held[replica] = self.new_life()

    def load(self, replica: str) -> None:
        """Loads the published version. The rollouts of the replica go on with it."""
        self.loaded[replica] = self.published
        for key in self.having("reserved"):
            if self.tickets[key].replica == replica:
                self.versions[key].add(self.published)

    def commit(self, pick: int) -> None:
        """Commits one reserved group; `pick` selects which."""
        if held := self.having("reserved"):
            self.commit_one(held[pick % len(held)], row_bytes=pick % 101, stores=pick % 2 == 0)

    def commit_anything(self, pick: int) -> None:
        """Commits any ticket that was ever issued: the commit may be late, repeated, or of a replica declared dead."""
        if self.tickets:
            self.commit_one(sorted(self.tickets)[pick % len(self.tickets)], row_bytes=10)

    def commit_one(self, key: str, *, row_bytes: int, stores: bool = False) -> None:
        ticket = self.tickets[key]
        stored = self.store(key, 1, newest=max(self.versions[key])) if stores else None
        if stored is not None and self.state[key] == "reserved":
            self.record_prefix(key, stored)
        equal = row_bytes % 2 == 0
        rewards = (1.0, 1.0) if equal else (0.0, 1.0)
        meta = finished(ticket, versions=self.versions[key], row_bytes=row_bytes, rewards=rewards)
        outcome = self.buffer.commit(msgspec.structs.replace(meta, stored=stored))
        if self.state[key] == "reserved" and not all(map(self.lineage.has, self.versions[key])):
            assert outcome is CommitOutcome.OLD_INCARNATION
            self.over(key)
            self.waiting.add(ticket.group)
            self.keep_surviving(ticket.group, self.prefixes.pop(ticket.group, None))
        elif self.state[key] == "reserved" and equal and self.filtered < self.most_filtered:
            assert outcome is CommitOutcome.FILTERED
            self.filtered += 1
            self.filtered_keys.add(key)
            self.over(key, Fate.FILTERED)
            prefix, own = self.prefixes.pop(ticket.group, None), ticket.prefix
            self.continued += 0 if own is None else own.tokens
            if prefix is not None and prefix.attempt != ticket.attempt:
                assert prefix == own
        elif self.state[key] == "reserved":
            assert outcome is CommitOutcome.ACCEPTED
            self.state[key] = "ready"
            self.booked_bytes[key] = row_bytes
            self.committed.add(key)
            prefix, own = self.prefixes.pop(self.tickets[key].group, None), self.tickets[key].prefix
            self.continued += 0 if own is None else own.tokens
            if prefix is not None and prefix.attempt != self.tickets[key].attempt:
                assert prefix == own
            if self.is_split(meta):
                self.split.pop(ticket.group, None)
                if prefix is not None:
                    self.split[ticket.group] = prefix
                self.metas[ticket.group] = meta
        elif key in self.committed - self.lost:
            assert outcome is CommitOutcome.DUPLICATE
        else:
            assert outcome is CommitOutcome.LATE
        if row_bytes % 3:  # else the answer is still under way
            self.held[ticket.replica].forget(key)

    def fail(self, pick: int) -> None:
        if not self.tickets:
            return
        key = sorted(self.tickets)[pick % len(self.tickets)]
        failure_class = FailureClass.DATA if pick % 3 == 0 else FailureClass.INFRA
        incarnation = self.tickets[key].version.incarnation
        failure = Failure(failure_class=failure_class, reason="test")
        held = self.buffer.fail(key, incarnation=incarnation, failure=failure)
        assert held == (self.state[key] == "reserved")
        if held and failure_class is FailureClass.DATA:
            self.over(key, Fate.FAILED)
            self.prefixes.pop(self.tickets[key].group, None)
        elif held:
            self.attempt_over(key)
        if pick % 2:
            self.held[self.tickets[key].replica].forget(key)

    def leave(self, replica: str) -> None:
        theirs = {key for key in self.having("reserved") if self.tickets[key].replica == replica}
        assert set(self.buffer.leave(replica)) == theirs
        for key in theirs:
            self.attempt_over(key)
        self.held[replica] = self.new_life()

    def time_passes(self, passed_s: float) -> None:
        self.clock.now_s += passed_s
        heard = self.replica_last_seen_s.items()
        gone = {replica for replica, heard_s in heard if self.clock.now_s - heard_s > TIMEOUT_S}
        silent = {
            key
            for key in self.having("reserved")
            if (
                self.tickets[key].replica in gone
                if key in self.confirmed
                else self.clock.now_s - self.unconfirmed_s[key] > TIMEOUT_S
            )
        }
        assert set(self.buffer.expire()) == silent
        for replica in gone:
            self.numbers.pop(replica, None)
            self.quarantined.add(replica)
        for key in silent:
            self.attempt_over(key)

    # The learner.

    def start_step(self) -> None:
        """The learner leases a step, after it has loaded the rows of its checkpoint."""
        self.cleared.difference_update(self.having("ready"))
        plan = self.plan()
        answer = self.buffer.lease()
        if self.lease is not None:
            assert answer == self.lease
            return
        if not isinstance(answer, Lease):
            self.waits(answer, plan)
            return
        assert plan is not None, "the step started, but rule (2) fails"
        self.treat(plan)
        keys = [leased.meta.key for leased in answer.groups]
        assert answer.step == self.v
        assert keys == self.in_order("ready")[: self.limits.groups_per_step]
        assert len(keys) == self.limits.groups_per_step or not self.having("reserved")
        for leased in answer.groups:
            assert leased.deadline == self.deadline[leased.meta.key] >= self.v
            assert leased.extended == (leased.deadline > self.tickets[leased.meta.key].deadline)
            assert leased.extended or leased.meta.oldest >= self.v - leased.max_staleness_versions
        for key in keys:
            self.state[key] = "leased"
        assert answer.filtered == (FilteredGroup(1.0, 2),) * self.filtered
        self.lease, self.filtered = answer, 0

    def in_order(self, *states: str) -> list[str]:
        return sorted(self.having(*states), key=lambda key: (self.deadline[key], self.tickets[key].group))

    def plan(self) -> list[str] | None:
        """Returns the stragglers on which the policy must act so that a step can start; None if it must wait."""
        left = self.in_order("ready")[self.limits.groups_per_step :]
        stragglers = {
            key: Straggler(
                group=self.tickets[key].group,
                deadline=self.deadline[key],
                tokens=self.progress[key],
                extended=self.newest[key] + self.tickets[key].max_staleness_versions,
                last_attempt=self.at_last_attempt(key),
            )
            for key in self.having("reserved")
        }
        return treated(
            self.on_deadline,
            stragglers,
            ready=[self.deadline[key] for key in left],
            step=self.v,
            per_step=self.limits.groups_per_step,
        )

    def treat(self, stragglers: Collection[str]) -> None:
        cancelled, self.buffer.cancelled = self.buffer.cancelled, []
        assert cancelled == ([] if self.on_deadline == "mask" else stragglers)
        self.treated += len(stragglers)
        for key in stragglers:
            if self.on_deadline == "mask":
                self.deadline[key] = self.newest[key] + self.tickets[key].max_staleness_versions
                continue
            prefix = self.prefixes.pop(self.tickets[key].group, None)
            if self.on_deadline == "requeue":
                self.dropped += 0 if prefix is None else prefix.tokens
                self.attempt_over(key)
            else:
                self.over(key, Fate.DROPPED)
                self.dropped_tokens += self.progress[key] - 3  # `check_ledger` counts 3 tokens for each dropped group

    def waits(self, answer: LeaseWait, plan: list[str] | None) -> None:
        assert not self.buffer.cancelled
        ready = self.having("ready")
        if answer is LeaseWait.FINISHED and self.v < self.limits.total_steps:
            assert not self.having("reserved")
            for key in ready:
                self.over(key, Fate.DROPPED)
        elif answer is LeaseWait.NOT_ENOUGH_READY:
            assert len(ready) < self.limits.groups_per_step
        elif answer is LeaseWait.STRAGGLER:
            assert len(ready) >= self.limits.groups_per_step
            assert self.having("reserved"), "only a reserved group can block a step"
            assert plan is None, f"{self.on_deadline} could have started the step"

    def end_step(self, end: str) -> None:
        if self.lease is None:
            return
        keys = tuple(leased.meta.key for leased in self.lease.groups)
        retained = {key for key in keys if self.is_needed(key, self.v)}
        over = tuple(key for key in keys if key not in retained)
        answer = getattr(self.buffer, end)(self.incarnation, self.lease.step)
        assert answer == (True if end == "give_back" else over)
        if end != "give_back":
            self.retained |= dict.fromkeys(retained, self.v)
            self.cleared.update(over)
        for key in keys:
            if end == "give_back":
                self.state[key] = "ready"
            else:
                self.over(key, Fate.TRAINED if end == "ack" else Fate.SKIPPED)
        self.v += end == "ack"
        self.filtered += len(self.lease.filtered) if end == "give_back" else 0
        self.lease = None

    def end_another_step(self, pick: int) -> None:
        """Makes calls that are repeated, too early, or of another incarnation. The checks show that nothing changed."""
        end = ("ack", "skip", "give_back")[pick % 3]
        now = self.incarnation
        for incarnation, step in ((now, self.v - 1), (now, self.v + 1), (now - 1, self.v)):
            getattr(self.buffer, end)(incarnation, step)

    def succeed(self) -> None:
        """Another learner with the weights of the current version takes over. Tickets and groups stay."""
        self.incarnation += 1
        self.lineage = self.lineage.child(Version(self.incarnation - 1, self.v))
        assert self.buffer.succeed() == self.incarnation
        self.filtered += 0 if self.lease is None else len(self.lease.filtered)
        for key in self.having("leased"):
            self.state[key] = "ready"
        self.lease = None

    def checkpoint(self) -> None:
        """Takes a snapshot of the buffer, as bytes, and a copy of the model's state."""
        kept = {name: getattr(self, name) for name in IN_A_CHECKPOINT}
        self.taken = msgspec.msgpack.encode(self.buffer.snapshot()), copy.deepcopy(kept)

    def is_needed(self, key: str, ended: int) -> bool:
        """Whether a learner that goes back to the complete checkpoint or to the newest one can train the group."""
        newest = max(version.step for version in self.versions[key])
        return any(saved is not None and newest <= saved[1]["v"] <= ended for saved in (self.saved, self.taken))

    def is_split(self, meta: GroupMeta) -> bool:
        """Whether a learner that goes back to one of these checkpoints loses some of the tokens, and not all."""
        return any(save is not None and meta.oldest <= save[1]["v"] < meta.newest for save in (self.saved, self.taken))

    def save(self) -> None:
        self.checkpoint()
        self.end_checkpoint(fails=False)

    def end_checkpoint(self, *, fails: bool) -> None:
        """The save of the newest snapshot ends. The rows that only an earlier one needed are cleared."""
        if not fails:
            if self.saved is not None and self.saved is not self.taken:
                self.older.append(self.saved)
            self.saved = self.taken
        if self.saved is None:
            return
        self.split = {group: prefix for group, prefix in self.split.items() if self.is_split(self.metas[group])}
        over = {key for key, step in self.retained.items() if not self.is_needed(key, step)}
        assert set(self.buffer.release(complete=self.saved[1]["v"])) == over
        self.cleared |= over
        for key in over:
            del self.retained[key]

    def restore(self) -> None:
        """Everything dies, and the run continues from the last checkpoint with another buffer."""
        if self.saved is None:
            return
        encoded, kept = self.saved
        snapshot = msgspec.msgpack.decode(encoded, type=BufferSnapshot)
        vars(self).update(copy.deepcopy(kept))
        self.incarnation += 1
        self.lineage = self.lineage.child(snapshot.version)
        self.prompts.taken = snapshot.next_group
        self.retained, self.taken = {}, self.saved
        self.buffer = self.new_buffer()
        self.replica_last_seen_s, self.quarantined = {}, set()
        self.buffer.restore(snapshot, lineage=self.lineage)
        self.dropped += sum(prefix.tokens for prefix in self.prefixes.values())
        self.prefixes, self.split, self.filtered = {}, {}, 0
        for key in self.having("reserved"):
            self.over(key)
            self.waiting.add(self.tickets[key].group)
        for key in self.having("leased"):
            self.state[key] = "ready"
        self.cleared = set(self.having("ready"))
        self.lease = None
        self.published = Version(self.incarnation, self.v)
        self.loaded = dict.fromkeys("abc", self.published)
        self.held = {replica: self.new_life() for replica in "abc"}
        self.confirmed, self.numbers, self.delayed, self.own_prefix = set(), {}, {}, {}

    def roll_back_often(self, pick: int) -> None:
        """After two checkpoints, learners die before they have loaded the rows of theirs, and the next one may go back
        further. The buffer may die with the first one."""
        self.save()
        self.reserve("abc"[pick % 3], pick % 4 + 1)
        for key in self.having("reserved"):
            self.commit_one(key, row_bytes=10)
        self.save()
        if pick % 2:
            self.restore()
        for shift in range(2, 2 + pick % 3):
            if self.older and pick >> shift & 1:
                self.saved = self.older.pop()
            self.roll_back()

    def roll_back(self) -> None:
        """The learner dies, and another one restores the last checkpoint. The buffer and the replicas go on."""
        if self.saved is None:
            return
        encoded, kept = self.saved
        snapshot = msgspec.msgpack.decode(encoded, type=BufferSnapshot)
        self.incarnation += 1
        self.lineage = self.lineage.child(snapshot.version)
        living = [*self.having("reserved", "ready", "leased"), *self.retained]
        living = [key for key in living if all(map(self.lineage.has, self.versions[key])) and key not in self.cleared]
        before = {name: getattr(self, name) for name in IN_A_CHECKPOINT}
        before["prefixes"] = self.split | self.prefixes
        self.split = {}
        self.prompts.taken = snapshot.next_group
        self.buffer.restore(snapshot, lineage=self.lineage, loaded=self.loaded)
        vars(self).update(copy.deepcopy(kept))
        rows = {*before["committed"], *self.retained} - self.cleared
        self.go_on(before, living)
        # The rows of groups without a slot are cleared.
        self.cleared = set(self.tickets) - set(self.having("reserved")) - (rows & set(self.having("ready")))
        self.lease, self.retained, self.taken, self.filtered = None, {}, self.saved, 0
        self.publish()

    def go_on(self, before: dict[str, Any], living: list[str]) -> None:
        """Brings the model from the checkpoint's state to that after `roll_back`. `before` is the state before it."""
        now, then = attempts_of(before["tickets"]), attempts_of(self.tickets)
        reserved = {self.tickets[key].group for key in self.having("reserved")}
        ready = {self.tickets[key].group: key for key in self.having("ready", "leased")}
        superseded = {group for group, key in ready.items() if now[group] > self.tickets[key].attempt + 1}
        unended = (now.keys() - then.keys()) | self.waiting | reserved | ready.keys()
        committed = {key for key in self.committed if self.tickets[key].group not in unended}
        bytes_of = before["booked_bytes"] | {key: self.booked_bytes[key] for key in ready.values()}
        self.deadline = before["deadline"] | {key: self.deadline[key] for key in ready.values()}
        self.newest, self.progress = before["newest"], before["progress"]
        self.tickets, self.booked_bytes = before["tickets"], bytes_of
        places = {self.tickets[key].group: key for key in living if self.tickets[key].group in unended}
        places |= {group: key for group, key in ready.items() if group not in superseded}
        self.state, self.waiting = dict.fromkeys(self.tickets, "over"), unended - places.keys()
        saved_prefixes, self.prefixes = self.prefixes, {}
        for group in self.waiting:
            self.keep_surviving(group, before["prefixes"].get(group))
            if group in saved_prefixes.keys() - before["prefixes"].keys():
                self.dropped += saved_prefixes[group].tokens
        for key in sorted(places.values(), key=lambda key: (self.deadline[key], self.tickets[key].group)):
            group = self.tickets[key].group
            restored = key == ready.get(group)
            if not restored and group in before["failed_on"]:
                self.failed_on[group] = before["failed_on"][group]
            if not self.has_room(key):
                self.waiting.add(group)
            elif not restored and before["state"][key] == "reserved":
                self.state[key] = "reserved"
                if group in before["prefixes"]:
                    self.prefixes[group] = before["prefixes"][group]
            else:
                self.state[key] = "ready"
                committed.add(key)
        self.committed = committed

    def keep_surviving(self, group: int, prefix: Prefix | None) -> None:
        """Keeps what is stored of a group that waits, if not all of it is of dead versions."""
        if prefix is None:
            return
        versions = tuple(filter(self.lineage.has, prefix.versions))
        if versions:
            self.prefixes[group] = msgspec.structs.replace(prefix, versions=versions)
        else:
            self.dropped += prefix.tokens

    def has_room(self, key: str) -> bool:
        booked = sum(self.booked_bytes[each] for each in self.having("reserved", "ready"))
        steps = self.deadline[key] - self.v + 1
        return (
            self.slots() < min(self.limits.capacity_groups, steps * self.limits.groups_per_step)
            and booked + self.booked_bytes[key] <= self.limits.capacity_bytes
        )

    def publish(self) -> None:
        self.published = Version(self.incarnation, self.v)

    def lose_rows(self, pick: int) -> None:
        """Loses the rows of one group in any state, and of one ready group."""
        if not self.tickets:
            return
        keys = {sorted(self.tickets)[pick % len(self.tickets)], *self.having("ready")[:1]}
        lost = {key for key in keys if self.state[key] == "ready"}
        assert set(self.buffer.rows_lost(keys)) == lost
        for key in lost:
            self.over(key, Fate.ROWS_LOST)
            self.lost.add(key)
            self.waiting.add(self.tickets[key].group)

    def is_refused_while_paused(self, replica: str) -> None:
        self.buffer.paused = True
        answer = self.buffer.reserve(replica, version=self.loaded[replica], count=3)
        why = Refusal.PAUSED if self.lineage.has(self.loaded[replica]) else Refusal.OLD_INCARNATION
        assert (answer.tickets, answer.refusal) == ((), self.buffer.fleet.refusal(replica) or why)
        self.buffer.paused = False

    # Checks after every call, written from the definitions of the rules.

    def check_slots(self) -> None:
        counts = self.buffer.counts()
        assert counts.reserved == len(self.having("reserved"))
        assert counts.ready == len(self.having("ready"))
        assert counts.leased == len(self.having("leased"))
        assert self.slots() <= (self.limits.max_staleness_versions + 1) * self.limits.groups_per_step
        assert self.slots() <= self.limits.capacity_groups
        assert counts.booked_bytes == sum(self.booked_bytes[key] for key in self.having("reserved", "ready", "leased"))
        assert counts.booked_bytes <= self.limits.capacity_bytes
        assert counts.waiting == len(self.waiting)
        assert self.buffer.tickets_by_actor() == Counter(self.tickets[key].replica for key in self.having("reserved"))
        assert self.buffer.version == Version(self.incarnation, self.v)

    def check_deadlines(self) -> None:
        """Checks the newest weights of each rollout, and the invariant of docs/guarantees.md: the groups that are due
        fit into the remaining steps. With a lease, also checks rule (2)."""
        reserved = self.buffer.groups.reserved
        assert {key: slot.newest_step for key, slot in reserved.items()} == {key: self.newest[key] for key in reserved}
        per_step = self.limits.groups_per_step
        for deadline in range(self.v - 1, self.v + self.limits.max_staleness_versions + 1):
            assert self.due(deadline, "reserved", "ready", "leased") <= max(0, deadline - self.v + 1) * per_step
            if self.lease is not None:
                assert self.due(deadline, "reserved", "ready") <= max(0, deadline - self.v) * per_step

    def check_prefixes(self) -> None:
        """What is stored is needed exactly if an attempt may still read or replace it, and else it is handed out for
        clearing."""
        prefixes = [*self.prefixes.items(), *self.split.items()]
        needed = {f"{group}.{prefix.attempt}" for group, prefix in prefixes} | set(self.having("reserved"))
        assert set(self.buffer.unneeded_prefixes(self.stored)) == self.stored - needed
        events = self.buffer.account.events
        assert (events[Event.TOKENS_CONTINUED], events[Event.TOKENS_DROPPED]) == (self.continued, self.dropped)

    def check_ledger(self) -> None:
        account = self.buffer.account
        assert account.closed
        assert account == self.buffer.recount()
        counts = self.buffer.counts()
        assert account.fates[Fate.READY].groups == counts.ready
        assert account.fates[Fate.LEASED].groups == counts.leased
        for fate in (Fate.TRAINED, Fate.FILTERED, Fate.SKIPPED, Fate.DROPPED, Fate.FAILED, Fate.ROWS_LOST):
            tokens = 0 if fate is Fate.FAILED else 3 * self.fates[fate]  # `finished` gives 1 + 2 tokens
            tokens += self.dropped_tokens if fate is Fate.DROPPED else 0
            assert account.fates[fate] == Amount(self.fates[fate], 2 * self.fates[fate], tokens)

    def check_progress(self, *, holders_survive: bool) -> None:
        """Checks that a fair continuation from here trains another step: with the replicas that hold tickets, or after
        these replicas have died."""
        buffer, clock, lease = copy.deepcopy((self.buffer, self.clock, self.lease))
        held = [self.tickets[key] for key in self.having("reserved")]
        if not holders_survive:
            clock.now_s += 2 * TIMEOUT_S
            assert len(buffer.expire()) == len(held)
            held = []
        self.continue_fairly(buffer, lease=lease, held=held)

    def continue_fairly(self, buffer: ReplayBuffer, *, lease: Lease | None, held: list[Ticket]) -> None:
        """Continues with the copy: reserves with the newest weights, generates admitted groups, and trains a lease."""
        for _ in range(60):
            answer = lease or buffer.lease()
            if isinstance(answer, Lease):
                buffer.ack(self.incarnation, answer.step)
                assert buffer.version.step == self.v + 1
                return
            if answer is LeaseWait.FINISHED:
                return
            if not held:
                asked = buffer.reserve("fresh", version=buffer.version, count=2)
                held = list(asked.tickets)
                # The buffer knows that prompts have run out only after it asked for one. Then the last step may start.
                assert held or asked.refusal in (Refusal.NO_PROMPTS, Refusal.NO_STEPS), (
                    f"no replica can start a group, and the learner waits: {answer}"
                )
                if not held:
                    continue
            ticket = held.pop()
            outcome = buffer.commit(finished(ticket, newest=self.v))
            if ticket.key in buffer.cancelled:
                assert outcome is CommitOutcome.LATE
            else:
                assert outcome in (CommitOutcome.ACCEPTED, CommitOutcome.FILTERED)
        raise AssertionError("no step after 60 commits")


def attempts_of(tickets: dict[str, Ticket]) -> Counter[int]:
    """Returns the number of attempts that were issued at each group."""
    return Counter(ticket.group for ticket in tickets.values())
