"""A learner's loop in one process and without Ray: the real buffer, and everything else that the loop asks for faked.

One replica, `a`, loads a version as soon as it is delivered and fills the buffer whenever the learner has to wait.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

import numpy as np

from asyncrl.buffer.actor import BufferActor, Failure, ReplicaReport, RunStatus
from asyncrl.buffer.records import CommitOutcome, GroupMeta, Lease, LeaseWait, Ticket, Version
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data_plane.row_store import Rows
from asyncrl.errors import ActorGone, FailureClass
from asyncrl.learner.heldout import HeldoutEvaluation
from asyncrl.learner.interfaces import RunLog
from asyncrl.learner.loop import LearnerLoop
from asyncrl.learner.records import EvalRecord, RunTotals, SampleRecord, StepRecord
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.policy.interfaces import StepReport, TrainGroup

GROUPS_PER_STEP = 2
GROUP_SIZE = 2
TASKS = [Task(question=f"q{index}", prompt=f"q{index}", answer="a") for index in range(100)]
HELDOUT = [Task(question=f"h{index}", prompt=f"h{index}", answer="a") for index in range(5)]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class KeptLog:
    """A run's log in memory."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evals: list[EvalRecord] = []
        self.samples: dict[int, Sequence[SampleRecord]] = {}

    def append_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def append_eval(self, record: EvalRecord) -> None:
        self.evals.append(record)

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        self.samples[step] = samples


class Ref:
    """What a row store hands out for rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __await__(self) -> Generator[None, None, Rows]:
        yield from ()
        return self._rows


class MemoryRows:
    """Row stores as one dictionary."""

    def __init__(self) -> None:
        self.kept: dict[str, Rows] = {}

    async def refs(self, store: str, keys: list[str]) -> list[Ref]:
        return [Ref(self.kept[key]) for key in keys]

    async def clear(self, store: str, keys: list[str]) -> None:
        for key in keys:
            self.kept.pop(key, None)


class LocalBuffer:
    """`BufferClient` without Ray. A lease never waits: `waiting` is what happens meanwhile."""

    def __init__(self, actor: BufferActor, *, waiting: Callable[[float], Awaitable[None]]) -> None:
        self._actor = actor
        self.waiting = waiting

    async def call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        return await getattr(self._actor, method)(*arguments)

    async def lease(self, *, wait_s: float) -> Lease | LeaseWait:
        answer = await self._actor.lease(0.0)
        if not isinstance(answer, Lease) and answer is not LeaseWait.FINISHED:
            await self.waiting(wait_s)
        return answer

    async def status(self) -> RunStatus:
        return await self._actor.status()


class FakePublisher:
    """Delivers when it is settled, as a real delivery may take until then."""

    def __init__(self, delivered: Callable[[Version], Awaitable[None]]) -> None:
        self._delivered = delivered
        self._under_way: Version | None = None
        self.history: list[Version] = []
        self.fails_at: int | None = None

    @property
    def published(self) -> Version | None:
        return self.history[-1] if self.history else None

    async def publish(self, version: Version) -> None:
        await self.settle()
        if version.step == self.fails_at:
            raise OSError(f"no room for version {version}")
        self.history.append(version)
        self._under_way = version

    async def settle(self) -> None:
        if self._under_way is not None:
            version, self._under_way = self._under_way, None
            await self._delivered(version)


Answer = StepReport | Exception | Callable[[Sequence[TrainGroup]], Awaitable[StepReport]]


class FakeTrainer:
    """Trains as it is told, step after step, and well when it was told nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.answers: list[Answer] = []
        self.asked: list[tuple[int, list[str]]] = []

    async def train_step(self, groups: Sequence[TrainGroup], *, step: int) -> StepReport:
        self.asked.append((step, [group.key for group in groups]))
        self._clock.now_s += 1.0
        answer = self.answers.pop(0) if self.answers else trained()
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, StepReport) else await answer(groups)


def trained(**changed: Any) -> StepReport:
    """A good step: 4 samples, 6 tokens, of which 4 are on-policy."""
    fields: dict[str, Any] = {
        "updates_applied": 1,
        "loss": 0.5,
        "grad_norm": 2.0,
        "learning_rate": 1e-3,
        "trained_tokens": 6,
        "trained_samples": 4,
        "on_policy_tokens": 4,
        "on_policy_parity_max_nats": 1e-6,
        "token_staleness": (4, 2),
        "seconds": {"forward_backward": 0.5, "optimizer": 0.25},
    }
    return StepReport(**(fields | changed))


def skipped() -> StepReport:
    """What the ranks say of a step whose gradients were not finite: they had planned to train it."""
    return trained(skipped=True, updates_applied=0, updates_nonfinite=1, loss=0.25, grad_norm=float("nan"))


class Scene:
    """A loop with its surroundings; `settings` are sections of the config."""

    def __init__(self, *, log: RunLog | None = None, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "learner": {"groups_per_step": GROUPS_PER_STEP, "group_size": GROUP_SIZE, "total_steps": 3},
            "staleness": {"max_versions": 1},
            "eval": {"prompts": 4},
        }
        for section, values in settings.items():
            defaults[section] = defaults.get(section, {}) | values
        self.config, self.clock = Config.model_validate(defaults), Clock()
        self.rows, self.log = MemoryRows(), KeptLog()
        self.metrics = LearnerMetrics()
        self.loaded: Version | None = None
        self.asked: list[tuple[Version | None, int]] = []
        self.ended: set[str] = set()
        self.actor = BufferActor(
            config=self.config,
            tasks=TASKS,
            nonce="n",
            rows=self.rows,  # type: ignore[arg-type]
            clock=self.clock,
        )
        self.buffer = LocalBuffer(self.actor, waiting=self.generate)
        self.trainer = FakeTrainer(self.clock)
        self.publisher = FakePublisher(self.deliver)
        self.stop = asyncio.Event()
        self.heldout = HeldoutEvaluation(
            config=self.config,
            tasks=HELDOUT,
            buffer=self.buffer,
            replicas=self,
            log=log or self.log,
            metrics=self.metrics,
            started_s=0.0,
            clock=self.clock,
        )
        self.loop = LearnerLoop(
            config=self.config,
            policy=self.trainer,
            publisher=self.publisher,
            buffer=self.buffer,
            rows=self.rows,
            heldout=self.heldout,
            log=log or self.log,
            metrics=self.metrics,
            decode=lambda ids: " ".join(map(str, ids)),
            started_s=0.0,
            clock=self.clock,
        )

    async def run(self) -> RunTotals:
        return await self.loop.run(self.stop)

    async def status(self) -> RunStatus:
        return await self.actor.status()

    # The replica.

    async def deliver(self, version: Version, *, replica: str = "a") -> None:
        await self.actor.published(version)
        self.loaded = version
        await self._heartbeat(replica)

    async def evaluate(self, actor: str, tasks: Sequence[Task]) -> tuple[Version | None, list[float | None]]:
        if actor in self.ended:
            raise ActorGone(f"replica {actor} has ended")
        assert actor in ("generator-a", "generator-b")
        self.asked.append((self.loaded, len(tasks)))
        return self.loaded, [0.25] * len(tasks)

    async def generate(self, wait_s: float) -> None:
        """Fills the buffer as far as it admits."""
        await self.publisher.settle()
        for ticket in await self._tickets():
            self.rows.kept[ticket.key] = _rows(ticket)
            assert await self.actor.commit([_meta(ticket)]) == [CommitOutcome.ACCEPTED]

    async def fail(self, wait_s: float) -> None:
        """Cannot answer a single prompt."""
        for ticket in await self._tickets():
            failure = Failure(key=ticket.key, incarnation=1, failure_class=FailureClass.DATA, reason="too_long")
            await self.actor.fail([failure])

    async def hang(self, wait_s: float) -> None:
        """Does nothing while time goes by."""
        self.clock.now_s += wait_s

    async def _tickets(self) -> tuple[Ticket, ...]:
        return (await self.actor.reserve("a", self.loaded or Version(1, 0), 2 * GROUPS_PER_STEP, 0.0)).tickets

    async def _heartbeat(self, replica: str = "a") -> None:
        report = ReplicaReport(
            actor=f"generator-{replica}",
            deployment="d",
            store="rows",
            metrics_address="",
            state_seconds={"generating": self.clock.now_s},
            samples=0,
            completion_tokens=0,
            weight_updates=len(self.publisher.history),
            parity_max_nats=2e-6,
        )
        await self.actor.heartbeat(replica, self.loaded, 2 * GROUPS_PER_STEP, 0, (), report)


def _rows(ticket: Ticket) -> Rows:
    """Sample i has i + 1 tokens."""
    tokens = sum(range(1, GROUP_SIZE + 1))
    return {
        "output_lengths": np.arange(1, GROUP_SIZE + 1, dtype=np.int32),
        "output_ids": np.arange(tokens, dtype=np.int32),
        "weight_versions": np.full(tokens, ticket.version.step, dtype=np.int64),
    }


def _meta(ticket: Ticket) -> GroupMeta:
    return GroupMeta(
        group=ticket.group,
        attempt=ticket.attempt,
        incarnation=ticket.version.incarnation,
        replica=ticket.replica,
        store="rows",
        row_bytes=10,
        prompt_tokens=3,
        completion_tokens=tuple(range(1, GROUP_SIZE + 1)),
        rewards=tuple(float(index) for index in range(GROUP_SIZE)),
        truncated=(False,) * GROUP_SIZE,
        oldest=ticket.version.step,
        newest=ticket.version.step,
        mid_sequence_updates=1,
    )
