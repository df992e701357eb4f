"""The life of each replica of the generator pool: which replicas may get tickets, and which must be started again.

    stale ◀──▶ healthy ──▶ suspect ──▶ quarantined ──▶ restarting ──▶ stale
                  ▲           │             │
                  └───────────┘             └──▶ retired

A stale replica may also become suspect. Any replica in use may be quarantined. A replica that was quarantined for
silence becomes stale or healthy at its next heartbeat.

A replica keeps its name, and has one process after another: its actors. Only the calls of its newest actor count. These
events change the state:

- A heartbeat: without weights the replica is `stale`, with weights `healthy`.
- No heartbeat for half of the timeout: `suspect`. Its deployment calls the process, to see whether it answers. After
  the whole timeout the replica is `quarantined`, until it sends a heartbeat again.
- INFRA failures in a row (a part of the system failed, and not the data): from the second one on, the replica gets no
  tickets for a while, twice as long each time. After `generator.max_infra_failures` it is `quarantined`.
- Its engine or its process has died, or its engine is stuck: `quarantined`.
- Its deployment ends a quarantined replica and starts it again (`restarting`), or gives it up (`retired`).

Attempts on an actor that was ever quarantined do not count against `buffer.max_attempts`.

Pure: the clock is an argument. A generator deployment polls the states of its replicas, ends those that are
quarantined, and starts them again.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.buffer.records import Failure, Refusal
from asyncrl.errors import ActorGone, EngineDied, EngineStuck, Quarantined, WeightError

BACK_OFF_S = 0.5
"""Time without tickets after the second INFRA failure in a row, seconds. It doubles with each further failure, up to
`LONGEST_BACK_OFF_S`."""
LONGEST_BACK_OFF_S = 30.0
NOT_ITS_OWN = frozenset({"row_store", "prefix", "parity", "aborted"})
"""Reasons of INFRA failures that are not counted against the replica: the data plane has failed, or a weight update has
failed and the replica repeats it."""
FORGET_TIMEOUTS = 4
"""Number of heartbeat timeouts after which the record of a replica that was quarantined for silence is deleted. Its
deployment may have ended too."""
FORGET_S = 3600.0
"""Time without a heartbeat after which the record of any other quarantined or restarting replica is deleted, seconds.
Two heartbeat timeouts count instead if they are longer."""
NO_HEARTBEAT = -1
NO_STEP = -1
GONE = 10_000
"""Largest number of remembered names of actors that were ever quarantined, and also of replicas that were given up."""


class ReplicaState(StrEnum):
    """The state of a replica.

    STALE: it has no whole version of the weights. HEALTHY: it may get tickets. SUSPECT: it has sent no heartbeat for
    half of the timeout. QUARANTINED: it gets no tickets. RESTARTING: its deployment ends it and starts it again. A
    replica that its deployment does not start again has no state.
    """

    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    RESTARTING = "restarting"


class Cause(StrEnum):
    """Why a replica was quarantined. It is the label of a metric."""

    NO_HEARTBEATS = "no_heartbeats"
    INFRA_FAILURES = "infra_failures"
    ENGINE_DIED = "engine_died"
    ENGINE_STUCK = "engine_stuck"
    WEIGHTS = "weights"
    PROCESS_DIED = "process_died"
    START_FAILED = "start_failed"
    OTHER = "other"

    @classmethod
    def of(cls, error: BaseException) -> "Cause":
        """Returns the cause for an error that ended a replica."""
        for kind, cause in _CAUSES.items():
            if isinstance(error, kind):
                return cause
        return cls.OTHER


_CAUSES = {
    EngineDied: Cause.ENGINE_DIED,
    EngineStuck: Cause.ENGINE_STUCK,
    Quarantined: Cause.INFRA_FAILURES,
    WeightError: Cause.WEIGHTS,
    ActorGone: Cause.PROCESS_DIED,
}


def replica_of(actor: str) -> str:
    """Returns the name of the replica of an actor.

    >>> replica_of("generator-1a2b3c"), replica_of("generator-1a2b3c.2")
    ('generator-1a2b3c', 'generator-1a2b3c')
    """
    return actor.partition(".")[0]


def actor_of(replica: str, start: int) -> str:
    """Returns the name of the actor of a replica's start number `start`, counted from 1.

    >>> actor_of("generator-1a2b3c", 1), actor_of("generator-1a2b3c", 2)
    ('generator-1a2b3c', 'generator-1a2b3c.2')
    """
    return replica if start == 1 else f"{replica}.{start}"


def start_of(actor: str) -> int:
    """Returns the number of the start that made an actor.

    >>> start_of("generator-1a2b3c"), start_of("generator-1a2b3c.2")
    (1, 2)
    """
    return int(actor.partition(".")[2] or 1)


@dataclass(slots=True)
class Life:
    """The life of one replica. `cause` and `reason` (a text) are those of its last quarantine; None and "" before.

    `restarts` is the number of its actors after the first one. `failures` are INFRA failures in a row, and until
    `blocked_until_s` (on the fleet's clock) it gets no tickets because of them. `heartbeat` is the number of its last
    heartbeat; NO_HEARTBEAT before the first one, and after a quarantine. `step` is that of the newest weights that it
    has reported as loaded; NO_STEP if it has none.
    """

    actor: str
    last_seen_s: float
    state: ReplicaState = ReplicaState.STALE
    cause: Cause | None = None
    reason: str = ""
    failures: int = 0
    blocked_until_s: float = 0.0
    heartbeat: int = NO_HEARTBEAT
    step: int = NO_STEP

    @property
    def restarts(self) -> int:
        return start_of(self.actor) - 1

    @property
    def may_be_used(self) -> bool:
        """False for a replica that gets no tickets until it sends a heartbeat again or is started again."""
        return self.state not in (ReplicaState.QUARANTINED, ReplicaState.RESTARTING)

    def committed(self) -> None:
        """Records that a group of its actor was committed, which ends its INFRA failures in a row."""
        self.failures, self.blocked_until_s = 0, 0.0


class Fleet:
    """The state (`Life`) of every replica, by name. `clock` returns monotonic seconds.

    `quarantines` and `restarts` are the numbers of quarantines and restarts so far, by cause.
    """

    def __init__(self, *, max_infra_failures: int, timeout_s: float, clock: Callable[[], float]) -> None:
        self._max_infra_failures = max_infra_failures
        self._timeout_s = timeout_s
        self._clock = clock
        self._lives: dict[str, Life] = {}
        self._excused: dict[str, None] = {}  # actors that were ever quarantined, the oldest first
        self._retired: dict[str, None] = {}
        self._backing_off: set[str] = set()
        self._none_silent_until_s = -math.inf
        self.quarantines: Counter[Cause] = Counter()
        self.restarts: Counter[Cause] = Counter()

    def life(self, replica: str) -> Life | None:
        """Returns the life of a replica, which becomes SUSPECT now if it was silent for half of the timeout; None if
        the replica is not known or was given up."""
        life = self._lives.get(replica)
        if life is None:
            return None
        silent = self._clock() - life.last_seen_s > self._timeout_s / 2
        if silent and life.state in (ReplicaState.STALE, ReplicaState.HEALTHY):
            life.state = ReplicaState.SUSPECT
        return life

    def lives(self) -> Mapping[str, Life]:
        """Returns the life of each replica that was not given up, in the order of their first heartbeats."""
        return {name: life for name in self._lives if (life := self.life(name)) is not None}

    def life_of(self, actor: str) -> Life | None:
        """Returns the life of the replica whose newest actor is `actor`; None if there is no such replica."""
        life = self._lives.get(replica_of(actor))
        return life if life is not None and life.actor == actor else None

    def may_be_used(self, actor: str) -> bool:
        """Returns whether an actor has sent a heartbeat, is still the newest actor of its replica, and is neither
        quarantined nor being restarted."""
        life = self.life_of(actor)
        return life is not None and life.may_be_used

    def is_heard(self, actor: str) -> bool:
        """Returns whether the calls of an actor count: no newer actor of its replica has called, the replica was not
        given up, and the actor is not being ended. An actor that is quarantined because its heartbeats stopped still
        counts."""
        replica, life = replica_of(actor), self._lives.get(replica_of(actor))
        if replica in self._retired:
            return False
        if life is None or start_of(actor) > start_of(life.actor):
            return True
        quarantined = life.state is ReplicaState.QUARANTINED and life.cause is not Cause.NO_HEARTBEATS
        return actor == life.actor and not quarantined and life.state is not ReplicaState.RESTARTING

    def heartbeat(self, actor: str, *, has_weights: bool) -> Life | None:
        """Records a heartbeat. Returns the life of the replica; None if the calls of the actor do not count any more
        (`is_heard`): then the actor must end."""
        if not self.is_heard(actor):
            return None
        life = self._lives.get(replica_of(actor))
        if life is None or life.actor != actor:
            cause, reason = (None, "") if life is None else (life.cause, life.reason)
            life = self._lives[replica_of(actor)] = Life(actor, self._clock(), cause=cause, reason=reason)
        life.last_seen_s = self._clock()
        life.state = ReplicaState.HEALTHY if has_weights else ReplicaState.STALE
        return life

    def failed(self, actor: str, failure: Failure) -> bool:
        """Counts an INFRA failure of a rollout on an actor, unless its reason is one of `NOT_ITS_OWN`. From the second
        one in a row on, the actor gets no tickets for a while. Returns True if it is quarantined for this failure."""
        life = self.life_of(actor)
        if life is None or not life.may_be_used or failure.reason in NOT_ITS_OWN:
            return False
        life.failures += 1
        if life.failures >= self._max_infra_failures:
            why = f"{life.failures} INFRA failures in a row, the last one: {failure.message or failure.reason}"
            return self.quarantine(actor, Cause.INFRA_FAILURES, why)
        if life.failures > 1:
            pause_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (life.failures - 2))
            life.blocked_until_s = self._clock() + pause_s
            self._backing_off.add(actor)
        return False

    def quarantine(self, actor: str, cause: Cause, reason: str) -> bool:
        """Quarantines an actor. Returns False, and changes nothing, if the actor is not the newest one of its replica,
        if its replica is being restarted, or if it is quarantined already for another cause than NO_HEARTBEATS."""
        life = self.life_of(actor)
        if life is None or life.state is ReplicaState.RESTARTING:
            return False
        again = life.state is ReplicaState.QUARANTINED
        if again and life.cause is not Cause.NO_HEARTBEATS:
            return False
        life.state, life.cause, life.reason = ReplicaState.QUARANTINED, cause, reason
        life.heartbeat = NO_HEARTBEAT
        self.quarantines[cause] += not again
        _remember(self._excused, actor)
        return True

    def quarantine_silent(self) -> None:
        """Quarantines the actors that sent no heartbeat for the timeout. Deletes the records of replicas that were
        silent for much longer (`FORGET_TIMEOUTS`, `FORGET_S`).

        The call comes each second, and there may be 10,000 replicas. So it computes the earliest time at which a
        replica can reach its limit, and until then a call takes O(1). Heartbeats only make this time later.
        """
        now_s = self._clock()
        if now_s <= self._none_silent_until_s:
            return
        for name, life in list(self._lives.items()):
            silent_s = now_s - life.last_seen_s
            if silent_s > self._forget_s(life):
                del self._lives[name]
            elif silent_s > self._timeout_s and life.may_be_used:
                self.quarantine(life.actor, Cause.NO_HEARTBEATS, f"no heartbeat for {self._timeout_s:g} s")
        # The timeout from now on is the limit of a replica whose first heartbeat comes later.
        limits_s = [life.last_seen_s + self._next_limit_s(life) for life in self._lives.values()]
        self._none_silent_until_s = min([now_s + self._timeout_s, *limits_s])

    def restarting(self, actor: str, cause: Cause, reason: str) -> None:
        """Records that the deployment of an actor ends it, for this cause, and starts its replica again.

        A replica that was retired is then not retired any longer: the end of a pod retires its replicas, and the
        deployment starts them again in another pod.
        """
        self._retired.pop(replica_of(actor), None)
        if self.life_of(actor) is None and self.is_heard(actor):
            self._lives[replica_of(actor)] = Life(actor, self._clock())  # it died before its first heartbeat
        self.quarantine(actor, cause, reason)
        life = self.life_of(actor)
        if life is not None and life.state is not ReplicaState.RESTARTING:
            life.state = ReplicaState.RESTARTING
            self.restarts[life.cause or cause] += 1

    def retire(self, replica: str) -> None:
        """Deletes the record of a replica that its deployment does not start again. The calls of its actors do not
        count any more."""
        self._lives.pop(replica, None)
        _remember(self._retired, replica)

    def refusal(self, actor: str) -> Refusal | None:
        """Returns why an actor gets no tickets now; None if it may get some. An actor that has not called before
        may."""
        if not self.is_heard(actor):
            return Refusal.QUARANTINED
        life = self.life(replica_of(actor))
        suspect = life is not None and life.state in (ReplicaState.SUSPECT, ReplicaState.QUARANTINED)
        return Refusal.UNHEALTHY if suspect or self._backs_off(actor) else None

    def back_off_ended(self) -> bool:
        """Returns whether, since the last call, an actor's time without tickets after INFRA failures has ended."""
        ended = {actor for actor in self._backing_off if not self._backs_off(actor)}
        self._backing_off -= ended
        return bool(ended)

    def has_other_than(self, actors: Collection[str]) -> bool:
        """Returns whether there is a healthy replica to which none of `actors` belongs, and which may get tickets now:
        INFRA failures do not keep it from them."""
        tried = {replica_of(actor) for actor in actors}
        return any(
            life.state is ReplicaState.HEALTHY and not self._backs_off(life.actor)
            for name in self._lives
            if name not in tried and (life := self.life(name)) is not None
        )

    def is_excused(self, actor: str) -> bool:
        """Returns whether the attempts on an actor do not count, because it was quarantined at least once."""
        return actor in self._excused

    def _backs_off(self, actor: str) -> bool:
        """Returns whether the actor gets no tickets now because of INFRA failures."""
        life = self.life_of(actor)
        return life is not None and life.blocked_until_s > self._clock()

    def _forget_s(self, life: Life) -> float:
        """Returns for how many seconds a replica may be silent before its record is deleted."""
        only_silent = life.state is ReplicaState.QUARANTINED and life.cause is Cause.NO_HEARTBEATS
        return FORGET_TIMEOUTS * self._timeout_s if only_silent else max(FORGET_S, 2 * self._timeout_s)

    def _next_limit_s(self, life: Life) -> float:
        """Returns for how many seconds a replica may be silent before it is quarantined. For one that is quarantined or
        being restarted, these are the seconds until its record is deleted."""
        return self._timeout_s if life.may_be_used else self._forget_s(life)


def _remember(names: dict[str, None], name: str) -> None:
    names[name] = None
    if len(names) > GONE:
        del names[next(iter(names))]
