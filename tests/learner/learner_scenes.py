"""Runs a learner's loop in one process without Ray: with the real coordinator and fakes for all of its other parts.

One replica, `a`, loads a version as soon as it is delivered. It fills the buffer each time the learner has to wait.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from memory_client import MemoryClient

from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.token_estimators import OUTCOME, TokenEstimator
from asyncrl.buffer.records import CommitOutcome, FailedTicket, Failure, GroupMeta, HeldReport, Lease, LeaseWait, Ticket
from asyncrl.common.version import Version
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import Call, CoordinatorClient, perform
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import ReplicaReport
from asyncrl.coordinator.status import RunSnapshot, RunStatus
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.row_checksums import prompt_checksum, row_checksums
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.rows import TRAIN_PARTITION, Rows
from asyncrl.data_plane.sample_ids import group_of, samples_of
from asyncrl.errors import ActorGone, CheckpointError, FailureClass
from asyncrl.generation.episodes import episode_rows, single_turn, version_spans
from asyncrl.generation.evaluation import Answer as HeldoutAnswer
from asyncrl.generation.evaluation import Rewards
from asyncrl.generation.interfaces import Completion
from asyncrl.learner.audit_records import Record
from asyncrl.learner.heldout import HeldoutEvaluation
from asyncrl.learner.loop import LearnerLoop
from asyncrl.learner.penalty_control import first_loss
from asyncrl.learner.recording import StepEnd, StepRecorder, described_metrics
from asyncrl.learner.records import EvalRecord, RecordSink, RunTotals, SampleRecord, StepRecord
from asyncrl.learner.sample_records import Texts
from asyncrl.learner.saving import Checkpoints
from asyncrl.learner.step import Stages
from asyncrl.learner.trained_prompts import TrainedPrompts
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.metrics.states import StateClock
from asyncrl.policy.tq_policy import STEP_FIELDS
from asyncrl.ranks.named_rows import name_fields
from asyncrl.ranks.report import StepReport
from asyncrl.witness.judge import Request

GROUPS_PER_STEP = 2
GROUP_SIZE = 2
TASKS = [Task(question=f"q{index}", prompt=f"q{index}", answer="a") for index in range(100)]
HELDOUT = [Task(question=f"h{index}", prompt=f"h{index}", answer="a") for index in range(5)]


def decoded(ids: Sequence[int], special: bool) -> str:
    """Returns token ids as text; text with special tokens is in brackets."""
    text = " ".join(map(str, ids))
    return f"[{text}]" if special else text


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class KeptLog(RecordSink):
    """Keeps the records of a run in memory."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evals: list[EvalRecord] = []
        self.samples: dict[int, Sequence[SampleRecord]] = {}
        self.audit: list[Record] = []
        self.synced = 0  # number of audit records that are on the disk
        self.sync_answers: list[CheckpointError | None] = []
        """The errors of the next calls of `sync`."""

    def append_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def append_eval(self, record: EvalRecord) -> None:
        self.evals.append(record)

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        self.samples[step] = samples

    def append_audit(self, record: Record) -> None:
        self.audit.append(record)

    def sync(self) -> None:
        if self.sync_answers and (error := self.sync_answers.pop(0)) is not None:
            raise error
        self.synced = len(self.audit)


class BufferRows:
    """Clears the rows of groups that will not be trained, when the buffer asks for it."""

    def __init__(self, client: MemoryClient) -> None:
        self._client = client

    async def clear(self, keys: Sequence[str]) -> None:
        self._client.clear_samples(ids_of(keys), TRAIN_PARTITION)

    async def keys(self) -> list[str]:
        return []  # no replica dies after it has stored rows


class LocalClient(CoordinatorClient):
    """A client in the process of the coordinator. A lease never waits: a call without an answer runs `waiting`
    instead. Each lease call first runs `before_lease`."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        waiting: Callable[[float], Awaitable[None]],
        before_lease: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(self._perform)
        self._coordinator = coordinator
        self.waiting = waiting
        self._before_lease = before_lease

    async def _perform(self, call: Call) -> Any:
        if call.method != "lease":
            return await perform(self._coordinator, call)
        await self._before_lease()
        answer = await perform(self._coordinator, replace(call, options={"wait_s": 0.0}))
        if not isinstance(answer, Lease) and answer is not LeaseWait.FINISHED:
            await self.waiting(call.options["wait_s"])
        return answer


class FakePublisher:
    """Delivers a version only in `settle`, because a real delivery may take that long."""

    def __init__(self, delivered: Callable[[Version], Awaitable[None]]) -> None:
        self.delivered = delivered
        self._under_way: Version | None = None
        self.history: list[Version] = []
        self.fails_at: int | None = None
        self.trouble = ""
        self.changed: float | None = None

    @property
    def published(self) -> Version | None:
        return self.history[-1] if self.history else None

    async def publish(self, version: Version) -> float | None:
        await self.settle()
        if version.step == self.fails_at:
            raise OSError(f"no room for version {version}")
        self.history.append(version)
        self._under_way = version
        return self.changed

    async def settle(self) -> None:
        if self._under_way is not None:
            version, self._under_way = self._under_way, None
            await self.delivered(version)

    def check(self) -> None: ...

    async def stop(self) -> None: ...


Answer = StepReport | Exception | Callable[[KVBatchMeta], StepReport]


class FakeTrainer:
    """Answers each training call with the next of `answers`, or with a good step when none is left. Its rows are real.

    `stages` lists the calls in order.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.client = MemoryClient()
        self._read_masks = self.client.get_data  # a test may replace that of the client
        self.prepare_step(1)  # a generator registers the partition too, and the scene's may put rows before the learner
        self.answers: list[Answer] = []
        self.asked: list[tuple[int, list[str]]] = []
        self.stages: list[str] = []
        self.estimators: list[TokenEstimator] = []
        self.outcomes: list[list[float]] = []
        self.gbs: list[int | None] = []
        self.requests: list[Request | None] = []
        self.fields: list[set[str]] = []
        self.saved: list[str] = []
        self.hf: list[bool] = []
        self.save_answers: list[Exception | None] = []
        self.stage_answers: list[Exception | None] = []
        self.save_s = self.stage_s = 0.0
        self.reports_beta = True

    @property
    def kept(self) -> set[str]:
        """The groups that have rows in the data plane."""
        return {group_of(sample) for sample in self.client.samples(TRAIN_PARTITION)}

    def prepare_step(self, num_samples: int, group_size: int | None = None) -> None:
        self.client.register_partition(TRAIN_PARTITION, STEP_FIELDS, num_samples, ["train"], group_size)

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        self.client.put_samples(meta.sample_ids, meta.partition_id, fields=fields)
        name_fields(meta, fields)

    def read_from_dataplane(self, meta: KVBatchMeta, *, select_fields: Sequence[str]) -> BatchedDataDict:
        return self.client.get_data(meta, select_fields)

    def get_logprobs_from_meta(self, meta: KVBatchMeta) -> None:
        self.stages.append("log-probs")

    def get_reference_policy_logprobs_from_meta(self, meta: KVBatchMeta) -> None:
        self.stages.append("reference")

    def get_advantages_from_meta(self, meta: KVBatchMeta, estimator: TokenEstimator) -> None:
        """Gives every token of a sample its `outcome_advantages`."""
        self.stages.append("advantages")
        self.estimators.append(estimator)
        rows = self.read_from_dataplane(meta, select_fields=["token_mask", "sample_mask", OUTCOME])
        self.outcomes.append(rows[OUTCOME].tolist())
        self.write_to_dataplane(meta, {"advantages": rows["token_mask"] * rows[OUTCOME].unsqueeze(1)})

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        witness: Request | None = None,
    ) -> dict[str, Any]:
        self.requests.append(witness)
        self.asked.append((meta.extra_info["step"], list(dict.fromkeys(map(group_of, meta.sample_ids)))))
        self.stages.append("evaluate" if eval_mode else "train")
        self.fields.append(set(meta.fields or []))
        self.gbs.append(gbs)
        self._clock.now_s += 1.0
        answer = self.answers.pop(0) if self.answers else trained()
        if isinstance(answer, Exception):
            raise answer
        report = answer if isinstance(answer, StepReport) else answer(meta)
        rows = self._read_masks(meta, ["token_mask", "sample_mask"])
        trained_BS = rows["token_mask"] * rows["sample_mask"].unsqueeze(1) > 0
        counts = {"trained_tokens": int(trained_BS.sum()), "trained_samples": int(trained_BS.any(dim=1).sum())}
        penalty = loss_fn.objective.controlled() if isinstance(loss_fn, ObjectiveLoss) else None
        beta = {} if penalty is None or not self.reports_beta else {"penalty_beta": penalty.beta}
        return {"report": replace(report, **counts, diagnostics={**report.diagnostics, **beta})}

    def check_folder(self, folder: Path) -> None: ...

    def stage(self) -> None:
        self._clock.now_s += self.stage_s
        if self.stage_answers and (error := self.stage_answers.pop(0)) is not None:
            raise error

    def write(self, path: Path, snapshot: RunSnapshot, *, hf: bool) -> None:
        """Writes a checkpoint that has only its last file."""
        assert path.name == f"step-{snapshot.version.step}"
        self._clock.now_s += self.save_s
        if self.save_answers and (error := self.save_answers.pop(0)) is not None:
            raise error
        self.saved.append(path.name)
        self.hf.append(hf)
        path.mkdir(parents=True, exist_ok=True)
        (path / COMPLETE).touch()


class FakeCritic:
    """Gives each token the reward of its sample as advantage. Its stages are listed among the trainer's `stages`.

    It answers each training call with the next of `answers`, or with a good step when none is left.
    """

    def __init__(self, trainer: FakeTrainer, clock: Clock) -> None:
        self._trainer, self._clock = trainer, clock
        self.answers: list[StepReport | Exception] = []
        self.gbs: list[int | None] = []
        self.fields: list[set[str]] = []
        self.estimators: list[TokenEstimator] = []
        self.losses: list[ValueLossFunction] = []

    def get_values_from_meta(self, meta: KVBatchMeta) -> None:
        self._trainer.stages.append("values")
        rows = self._trainer.read_from_dataplane(meta, select_fields=["token_mask"])
        self._trainer.write_to_dataplane(meta, {"values": 0.5 * rows["token_mask"]})

    def get_advantages_from_meta(self, meta: KVBatchMeta, estimator: TokenEstimator) -> None:
        self._trainer.stages.append("advantages")
        self.estimators.append(estimator)
        rows = self._trainer.read_from_dataplane(meta, select_fields=["token_mask", "rewards", "values"])
        earned = rows["token_mask"] * rows["rewards"].unsqueeze(1)
        self._trainer.write_to_dataplane(meta, {"advantages": earned, "returns": earned})

    def train_from_meta(
        self, meta: KVBatchMeta, loss_fn: ValueLossFunction, *, gbs: int | None = None
    ) -> dict[str, Any]:
        self._trainer.stages.append("train critic")
        self.losses.append(loss_fn)
        self._clock.now_s += 1.0
        self.fields.append(set(meta.fields or []))
        self.gbs.append(gbs)
        answer = self.answers.pop(0) if self.answers else judged()
        if isinstance(answer, Exception):
            raise answer
        return {"report": answer}


def judged(**changed: Any) -> StepReport:
    """Returns the report of a critic's good step, whose values explain three quarters of the returns' variance."""
    metrics = {
        "return_mean": 0.5,
        "return_square_mean": 0.5,
        "value_error_mean": 0.25,
        "value_error_square_mean": 0.125,
        "value_clipped_ratio": 0.1,
    }
    return trained(**{"loss": 0.0625, "loss_metrics": metrics} | changed)


def ids_of(keys: Iterable[str]) -> list[str]:
    """Returns the sample ids of the groups with these keys."""
    return [sample for key in keys for sample in samples_of(key, count=GROUP_SIZE)]


def trained(**changed: Any) -> StepReport:
    """Returns the report of a good step: 4 samples and 6 tokens, of which 4 are on-policy."""
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
    """Returns the ranks' report of a step with non-finite gradients. Its token counts are those of the planned step."""
    return trained(skipped=True, updates_applied=0, updates_nonfinite=1, loss=0.25, grad_norm=float("nan"))


class Scene:
    """A learner's loop with all of its parts. `settings` are sections of the configuration, `sets` the tasks of named
    held-out sets, `prompts` the number of training prompts. `group` are fields of the groups that the replica
    commits. `before` is the last record of a resumed run. The records go to `log` and to `sinks`."""

    def __init__(
        self,
        *,
        sinks: Sequence[RecordSink] = (),
        append_audit: Callable[[Record], None] | None = None,
        sets: Mapping[str, Sequence[Task]] | None = None,
        prompts: int = len(TASKS),
        group: Mapping[str, Any] | None = None,
        before: StepRecord | None = None,
        **settings: Any,
    ) -> None:
        self.group = group or {}
        defaults: dict[str, Any] = {
            "learner": {
                "groups_per_step": GROUPS_PER_STEP,
                "group_size": GROUP_SIZE,
                "total_steps": 3,
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0, "schedule": "constant"},
            },
            "staleness": {"max_versions": 1},
            "eval": {"prompts": 4},
            "witness": {"every_steps": 0},  # the trainer's numbers are made up
        }
        for section, values in settings.items():
            defaults[section] = defaults.get(section, {}) | values
        self.config, self.clock = Config.model_validate(defaults), Clock()
        self.log, self.trainer = KeptLog(), FakeTrainer(self.clock)
        self.critic = FakeCritic(self.trainer, self.clock) if self.config.critic is not None else None
        self.metrics = described_metrics(self.config)
        self.states = StateClock(states=LEARNER_STATES, initial="starting", started_s=0.0, clock=self.clock)
        self.metrics.states_from(self.states.seconds)
        self.held: dict[str, int] = {}  # tickets that the replica names in its heartbeats, with their tokens
        self.heartbeats = itertools.count(1)
        self.loaded: Version | None = None
        self.asked: list[tuple[Version | None, int]] = []
        self.ended: set[str] = set()
        self.coordinator = Coordinator(
            config=self.config,
            tasks=TASKS[:prompts],
            rows=BufferRows(self.trainer.client),
            started_s=0.0,
            clock=self.clock,
        )
        self.client = LocalClient(self.coordinator, waiting=self.generate, before_lease=self.between_steps)
        self.publisher = FakePublisher(self.deliver)
        self.stop = asyncio.Event()
        self.slow_saves = False
        self.heldout = HeldoutEvaluation(
            config=self.config,
            tasks={"heldout": HELDOUT, **(sets or {})},
            coordinator=self.client,
            replicas=self,
            sinks=[self.log, *sinks],
            metrics=self.metrics,
            started_s=0.0,
            repeat_pause_s=0.0,
            clock=self.clock,
        )
        self.folder = tempfile.TemporaryDirectory(prefix="checkpoints-")
        self.checkpoints = Checkpoints(
            self.config.checkpoint,
            folder=Path(self.folder.name),
            run=self.trainer,
            sync_records=self.log.sync,
            metrics=self.metrics,
            clock=self.clock,
        )
        stages = Stages(
            config=self.config,
            policy=self.trainer,
            critic=self.critic,
            states=self.states,
            loss=first_loss(self.config, before),
            clock=self.clock,
        )
        recorder = StepRecorder(
            metrics=self.metrics, elapsed_s=self.clock, state_seconds=self.states.seconds, before=before
        )
        self.loop = LearnerLoop(
            config=self.config,
            incarnation=1,
            coordinator=self.client,
            stages=stages,
            step_end=StepEnd(
                stages=stages,
                rows=Rows(self.config, client=self.trainer.client),
                incarnation=1,
                coordinator=self.client,
                checkpoints=self.checkpoints,
                recorder=recorder,
                sinks=[self.log, *sinks],
                append_audit=append_audit or self.log.append_audit,
                texts=Texts(tokens=lambda ids: decoded(ids, True), answer=lambda ids, _: decoded(ids, False)),
            ),
            publisher=self.publisher,
            heldout=self.heldout,
            checkpoints=self.checkpoints,
            prompts=TrainedPrompts(TASKS[:prompts]),
        )

    async def run(self) -> RunTotals:
        return await self.loop.run(self.stop)

    async def status(self) -> RunStatus:
        return self.coordinator.status()

    async def between_steps(self) -> None:
        """Waits for the running save, so that a save ends before the next step unless it is slow."""
        if not self.slow_saves:
            await self.checkpoints.settle()

    # The replica.

    async def deliver(self, version: Version, *, replica: str = "a") -> None:
        self.coordinator.published(version)
        self.loaded = version
        await self.heartbeat(replica)

    async def evaluate(
        self, actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[HeldoutAnswer]]:
        if actor in self.ended:
            raise ActorGone(f"replica {actor} has ended")
        assert actor in ("a", "b")
        self.asked.append((self.loaded, len(tasks)))
        return self.loaded, [Rewards((0.25,), 0)] * len(tasks)

    async def generate(self, wait_s: float) -> None:
        """Commits one group for each ticket that the buffer grants."""
        await self.publisher.settle()
        await self.commit(await self.tickets())

    async def commit(self, tickets: Iterable[Ticket]) -> None:
        """Commits a group for each ticket."""
        for ticket in tickets:
            self.trainer.client.put_samples(ids_of([ticket.key]), TRAIN_PARTITION, fields=rows_of(ticket))
            assert await self.coordinator.commit([msgspec.structs.replace(meta_of(ticket), **self.group)]) == [
                CommitOutcome.ACCEPTED
            ]

    async def fail(self, wait_s: float) -> None:
        """Reports a failure for each ticket that the buffer grants."""
        for ticket in await self.tickets():
            failure = Failure(failure_class=FailureClass.DATA, reason="too_long", message="the prompt is too long")
            await self.coordinator.fail([FailedTicket(key=ticket.key, incarnation=1, failure=failure)])

    async def hang(self, wait_s: float) -> None:
        """Advances the clock by `wait_s` without generating."""
        self.clock.now_s += wait_s

    async def tickets(self, replica: str = "a") -> tuple[Ticket, ...]:
        return (
            await self.coordinator.reserve(replica, self.loaded or Version(1, 0), 2 * GROUPS_PER_STEP, wait_s=0.0)
        ).tickets

    async def heartbeat(self, replica: str = "a") -> None:
        report = ReplicaReport(
            actor=replica,
            deployment="d",
            metrics_address="",
            state_seconds={"generating": self.clock.now_s},
            slots=2 * GROUPS_PER_STEP,
            running_groups=0,
            samples=0,
            completion_tokens=0,
            weight_updates=len(self.publisher.history),
            parity_max_nats=2e-6,
        )
        held = HeldReport(number=next(self.heartbeats), complete=True, tokens=self.held)
        await self.coordinator.heartbeat(replica, self.loaded, 2 * GROUPS_PER_STEP, held, report)


def rows_of(ticket: Ticket) -> BatchedDataDict:
    """Returns the rows of a ticket's group. The prompt has 3 tokens; sample i has i + 1 completion tokens: 10, 11, …"""
    version = Version(ticket.version.incarnation, ticket.version.step)
    completions = [
        Completion(
            token_ids=list(range(10, 11 + i)), logprobs=[0.0] * (i + 1), versions=[version] * (i + 1), text="",
            truncated=False,
        )
        for i in range(GROUP_SIZE)
    ]  # fmt: skip
    return episode_rows([single_turn([1, 2, 3], each) for each in completions])


def meta_of(ticket: Ticket) -> GroupMeta:
    return GroupMeta(
        group=ticket.group,
        attempt=ticket.attempt,
        incarnation=ticket.version.incarnation,
        replica=ticket.replica,
        row_bytes=10,
        prompt_tokens=3,
        completion_tokens=tuple(range(1, GROUP_SIZE + 1)),
        rewards=tuple(float(index) for index in range(GROUP_SIZE)),
        truncated=(False,) * GROUP_SIZE,
        oldest=ticket.version.step,
        newest=ticket.version.step,
        mid_sequence_updates=1,
        version_spans=tuple(version_spans([ticket.version] * tokens) for tokens in range(1, GROUP_SIZE + 1)),
        row_checksums=tuple(row_checksums(rows_of(ticket))),
        prompt=prompt_checksum(ticket.task.input),
    )
