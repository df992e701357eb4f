"""A simulation of a whole run under a virtual clock: real buffer, replicas and gate, simulated generators and learner.

One tick is one second. Replicas generate groups of random, heavy-tailed length. They load weights late, crash without a
message, and come back. The learner takes a random time for each step, and sometimes skips one. A run is dead if nothing
is committed or trained for `PATIENCE_TICKS`, or if a group is leased after its deadline.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from buffer_scenes import Clock, NumberedPrompts, finished, limits

from asyncrl.buffer.ledger import Account, Fate
from asyncrl.buffer.records import CommitOutcome, Failure, HeldReport, Lease, LeaseWait, Ticket
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.common.version import Version
from asyncrl.coordinator.registry import Replicas
from asyncrl.errors import FailureClass, StalenessViolation
from asyncrl.weights.gate import should_publish

PATIENCE_TICKS = 50
HEARTBEAT_TIMEOUT_S = 2.0
NewBuffer = Callable[..., ReplayBuffer]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The random parameters of one simulated run."""

    eta: int
    per_step: int
    replicas: int
    slots_a_replica: int
    publish_every: int
    total_steps: int
    capacity_groups: int
    prompts: int | None
    straggler_rate: float
    straggler_ticks: int
    load_ticks: int
    step_ticks: int
    crash_rate: float
    infra_rate: float
    skip_rate: float

    @classmethod
    def draw(cls, rng: random.Random, **fixed: float) -> "Pool":
        eta, per_step = rng.randint(0, 3), rng.randint(1, 4)
        total_steps = rng.randint(3, 6)
        drawn: dict[str, object] = {
            "eta": eta,
            "per_step": per_step,
            "replicas": rng.randint(1, 3),
            "slots_a_replica": rng.randint(1, 4),
            "publish_every": rng.randint(1, eta + 1),
            "total_steps": total_steps,
            "capacity_groups": rng.randint(per_step, (eta + 1) * per_step),
            "prompts": rng.choice([None, None, rng.randint(1, total_steps * per_step)]),
            "straggler_rate": rng.choice([0.0, 0.1, 0.3]),
            "straggler_ticks": rng.randint(2, 10),
            "load_ticks": rng.randint(0, 4),
            "step_ticks": rng.randint(0, 2),
            "crash_rate": rng.choice([0.0, 0.0, 0.03]),
            "infra_rate": rng.choice([0.0, 0.0, 0.1]),
            "skip_rate": rng.choice([0.0, 0.0, 0.2]),
        }
        return cls(**(drawn | fixed))  # type: ignore[arg-type]


@dataclass(kw_only=True)
class Outcome:
    """The end of a simulated run. `staleness` is that of the oldest token of each trained group, in versions."""

    end: Literal["finished", "stuck", "beyond deadline"]
    staleness: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    account: Account


@dataclass
class _Replica:
    name: str
    version: Version | None = None
    load_left: int | None = None
    down_left: int = 0
    running: dict[str, tuple[Ticket, int]] = field(default_factory=dict)


class Simulation:
    def __init__(self, pool: Pool, *, rng: random.Random, new_buffer: NewBuffer = ReplayBuffer) -> None:
        self.pool, self.rng, self.clock = pool, rng, Clock()
        prompts = NumberedPrompts(pool.prompts)
        self.buffer = new_buffer(
            limits=limits(
                eta=pool.eta,
                per_step=pool.per_step,
                group_size=1,
                capacity_groups=pool.capacity_groups,
                total_steps=pool.total_steps,
                max_attempts=10**6,
                heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            ),
            prompts=prompts,
            clock=self.clock,
        )
        self.seen = Replicas(may_come_back=lambda _: True, clock=self.clock)
        self.published: Version | None = None
        self.replicas = [_Replica(f"r{i}") for i in range(pool.replicas)]
        self.lease: Lease | None = None
        self.step_left = 0
        self.staleness: list[int] = []
        self.trained: list[int] = []

    def run(self) -> Outcome:
        idle_ticks, progress = 0, (self.buffer.version, 0)
        while idle_ticks < PATIENCE_TICKS:
            try:
                if self._learner() is LeaseWait.FINISHED:
                    return self._outcome("finished")
            except StalenessViolation:
                return self._outcome("beyond deadline")
            for replica in self.replicas:
                self._replica(replica)
            self.buffer.expire()
            self.seen.forget_unless(self.buffer.fleet.may_be_used)
            self.clock.now_s += 1.0
            before, progress = progress, (self.buffer.version, self.buffer.counts().ready)
            idle_ticks = idle_ticks + 1 if progress == before else 0
        return self._outcome("stuck")

    def _outcome(self, end: Literal["finished", "stuck", "beyond deadline"]) -> Outcome:
        return Outcome(end=end, staleness=self.staleness, trained=self.trained, account=self.buffer.account)

    def _learner(self) -> LeaseWait | None:
        if self.lease is None:
            answer = self.buffer.lease()
            if isinstance(answer, Lease):
                self.lease, self.step_left = answer, self.pool.step_ticks
            elif answer is LeaseWait.FINISHED:
                return answer
        elif self.step_left > 0:
            self.step_left -= 1
        elif self.rng.random() < self.pool.skip_rate:
            self.buffer.skip(self.lease.incarnation, self.lease.step)
            self.lease = None
        else:
            for leased in self.lease.groups:
                self.staleness.append(self.lease.step - leased.meta.oldest)
                self.trained.append(leased.meta.group)
            self.buffer.ack(self.lease.incarnation, self.lease.step)
            self.lease = None
        if should_publish(
            version=self.buffer.version,
            published=self.published,
            publish_every_steps=self.pool.publish_every,
            able=self.seen.able(self.buffer.refusal),
        ):
            self.published = self.buffer.version
        return None

    def _replica(self, replica: _Replica) -> None:
        if replica.down_left > 0:
            replica.down_left -= 1
            return
        if self.rng.random() < self.pool.crash_rate:
            replica.running.clear()  # the buffer gets no message about the crash
            replica.version, replica.load_left = None, None
            replica.down_left = self.rng.randint(1, 6)
            return
        self._load(replica)
        self._finish_groups(replica)
        free_slots = self.pool.slots_a_replica - len(replica.running)
        self.seen.heard(replica.name, version=replica.version, free_slots=free_slots)
        held = HeldReport(number=int(self.clock.now_s), complete=True, tokens=dict.fromkeys(replica.running, 0))
        self.buffer.renew(replica.name, held=held, version=replica.version)
        if replica.version is not None and free_slots > 0:
            answer = self.buffer.reserve(replica.name, version=replica.version, count=free_slots)
            self.seen.reserved(replica.name, version=replica.version, asked=free_slots, answer=answer)
            for ticket in answer.tickets:
                slow = self.rng.random() < self.pool.straggler_rate
                ticks = self.pool.straggler_ticks if slow else self.rng.randint(0, 2)
                replica.running[ticket.key] = (ticket, ticks)

    def _load(self, replica: _Replica) -> None:
        if replica.load_left is None and replica.version != self.published:
            replica.load_left = self.rng.randint(0, self.pool.load_ticks)
        if replica.load_left == 0:
            replica.version, replica.load_left = self.published, None
        elif replica.load_left is not None:
            replica.load_left -= 1

    def _finish_groups(self, replica: _Replica) -> None:
        for key, (ticket, ticks) in list(replica.running.items()):
            if ticks > 0:
                replica.running[key] = (ticket, ticks - 1)
                continue
            del replica.running[key]
            if self.rng.random() < self.pool.infra_rate:
                self.buffer.fail(key, incarnation=1, failure=Failure(failure_class=FailureClass.INFRA, reason="engine"))
                continue
            assert replica.version is not None
            meta = finished(ticket, group_size=1, newest=replica.version.step)
            assert self.buffer.commit(meta) in (CommitOutcome.ACCEPTED, CommitOutcome.LATE)


def discarded_groups(account: Account) -> int:
    """Returns the number of groups that were issued but never trained, without those of steps that the learner
    skipped."""
    return sum(account.fates[fate].groups for fate in (Fate.DROPPED, Fate.FILTERED, Fate.FAILED, Fate.ROWS_LOST))
