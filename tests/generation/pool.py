"""A generator pool in one process without Ray: real coordinator, weight store and generators, but fake engines."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from buffer_scenes import Clock, finished
from fake_engine import FakeEngine, log_prob_of

from asyncrl.buffer.records import Counts, HeldReport, Lease, OpenGroup, Ticket
from asyncrl.buffer.snapshot import BufferSnapshot
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import Call, CoordinatorClient, perform
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.environments.scores import Score
from asyncrl.errors import DataError, ManifestVoid
from asyncrl.generation.generator import Generator
from asyncrl.generation.rollout import Rollouts
from asyncrl.generation.weight_updates import WeightUpdates
from asyncrl.metrics.recorders import GeneratorMetrics
from asyncrl.weights.manifest import Bucket, Bytes, Manifest, ParameterSpec, Piece, Probe, checksum, layout
from asyncrl.weights.store import Publication, WeightStore
from asyncrl.weights.transports.interfaces import Shipment, StoresBytes

PROBE = (5, 6, 7)
PARAMETERS = {"w": ((2,), "float32")}
WEIGHTS = bytes(8)
TASKS = [Task(question=f"q{index}", prompt=f"q{index}", answer="a") for index in range(200)]


class MemoryRows:
    """Keeps the rows of groups in a dictionary."""

    def __init__(self) -> None:
        self.kept: dict[str, BatchedDataDict] = {}
        self.fail_next_put: Exception | None = None

    async def put(self, rows_by_key: Mapping[str, BatchedDataDict]) -> None:
        if self.fail_next_put is not None:
            error, self.fail_next_put = self.fail_next_put, None
            raise error
        self.kept |= rows_by_key

    async def get(self, key: str, columns: Sequence[str]) -> BatchedDataDict:
        return BatchedDataDict({name: self.kept[key][name] for name in columns})

    async def keys(self) -> list[str]:
        return list(self.kept)

    async def clear(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.kept.pop(key, None)


class LocalWeights:
    """Has the methods of `WeightClient`, without Ray."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def newer_than(
        self, version: Version | None, *, wait_s: float, besides: Version | None = None
    ) -> Publication | None:
        return await self._store.newer_than(version, wait_s, besides)

    async def refuse(self, delivery: int) -> None:
        await self._store.refuse(delivery)


class Wire(StoresBytes):
    """A transport whose handles are the bytes themselves. None means that the owner of the bytes has died."""

    def send(self, sent: Shipment) -> list[Any]:
        raise NotImplementedError("the tests offer the handles themselves")

    async def receive(self, handle: Any, *, timeout_s: float) -> Bytes:
        if handle is None:
            raise ManifestVoid("the publishing rank is gone")
        return np.frombuffer(handle, dtype=np.uint8)


class Tokenizer:
    chat_template = None

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[2 + ord(letter) % 26 for letter in text] for text in texts]}


class LengthScorer:
    """Rewards a completion with its length. If `fail`, the reward of every completion fails; if `fail_first`, that of
    the first one of each group."""

    def __init__(self) -> None:
        self.fail = self.fail_first = False

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score]:
        scores: list[Score] = [float(len(completion)) for completion in completions]
        failed = len(scores) if self.fail else int(self.fail_first)
        answer = f"answer to {task.prompt}"
        error = DataError("the reward raised", reason="reward_raised", completion=answer)
        return [error] * failed + scores[failed:]


class Pool:
    """One coordinator, one weight store, and any number of generators."""

    def __init__(self, **overrides: Any) -> None:
        settings: dict[str, Any] = {
            "learner": {"groups_per_step": 4, "group_size": 2, "total_steps": 50},
            "generator": {"max_concurrent_groups": 3, "max_completion_tokens": 6, "max_starts_per_s": 10_000.0},
            "staleness": {"max_versions": 1},
        }
        for section, values in overrides.items():
            settings[section] = settings.get(section, {}) | values
        self.config = Config.model_validate(settings)
        self.clock = Clock(0.0)
        self.rows, self.prefixes = MemoryRows(), MemoryRows()
        self.coordinator = Coordinator(
            config=self.config,
            tasks=TASKS,
            rows=self.rows,
            prefixes=self.prefixes,
            started_s=0.0,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self._elsewhere: tuple[Ticket, ...] = ()
        self.calls: list[Call] = []
        """The calls of the replicas to the coordinator."""
        self.store = WeightStore()
        self.engines: dict[str, FakeEngine] = {}
        self.scorer = LengthScorer()
        self.running: dict[str, asyncio.Task[None]] = {}
        self.generators: dict[str, Generator] = {}
        self.rollouts: dict[str, Rollouts] = {}
        self.updates: dict[str, WeightUpdates] = {}
        self.metrics: dict[str, GeneratorMetrics] = {}

    def add(self, name: str, *, metrics_address: str = "", node: str = "") -> FakeEngine:
        engine = FakeEngine()
        rollouts = self.rollouts[name] = self.rollouts_with(engine, name=name)
        metrics = self.metrics[name] = GeneratorMetrics(environment="test")
        updates = self.updates[name] = WeightUpdates(
            config=self.config,
            name=name,
            engine=engine,
            source=LocalWeights(self.store),
            transport=Wire(),
            parameters=PARAMETERS,
            metrics=metrics,
        )
        self.generators[name] = Generator(
            config=self.config,
            name=name,
            deployment="d",
            rollouts=rollouts,
            coordinator=CoordinatorClient(self._perform),
            rows=self.rows,
            prefix_rows=self.prefixes,
            weights=updates,
            metrics=metrics,
            started_s=0.0,
            metrics_address=metrics_address,
            node=node,
            clock=self.clock,
        )
        self.engines[name] = engine
        self.running[name] = asyncio.create_task(self.generators[name].run())
        return engine

    async def _perform(self, call: Call) -> Any:
        self.calls.append(call)
        return await perform(self.coordinator, call)

    def rollouts_with(self, engine: FakeEngine, *, name: str) -> Rollouts:
        return Rollouts(config=self.config, engine=engine, tokenizer=Tokenizer(), scorer=self.scorer, replica=name)

    async def publish(self, step: int, *, parameters: Any = None, handles: Sequence[Any] = (WEIGHTS,)) -> None:
        manifest = manifest_of(step, parameters=parameters)
        self.coordinator.published(manifest.version)
        await self.store.publish(manifest, list(handles))

    async def train(self) -> Lease:
        """Leases one step and acks it. Returns the lease."""
        lease = await self.coordinator.lease(1, wait_s=60.0)
        assert isinstance(lease, Lease)
        await self.coordinator.ack(lease.incarnation, lease.step)
        return lease

    async def step(self) -> Lease:
        """Trains one step and publishes the next version. Returns the lease."""
        lease = await self.train()
        await self.publish(lease.step + 1)
        return lease

    async def reserve_elsewhere(self) -> None:
        """Another replica, which is not here, begins the groups of a step."""
        count = self.config.learner.groups_per_step
        self._elsewhere = (await self.coordinator.reserve("elsewhere", Version(1, 0), count, wait_s=0.0)).tickets
        assert len(self._elsewhere) == count

    async def step_elsewhere(self) -> None:
        """The learner trains a step with the groups of the other replica, and publishes the next version."""
        await self.coordinator.commit([finished(ticket) for ticket in self._elsewhere])
        lease = await self.step()
        assert [group.meta.group for group in lease.groups] == [ticket.group for ticket in self._elsewhere]

    async def expire_tickets(self) -> None:
        """Lets the heartbeat timeout pass at once. The tickets of all replicas expire, although the replicas live."""
        await self.coordinator.start()
        await asyncio.sleep(0)
        self.clock.now_s += self.config.buffer.heartbeat_timeout_s + 1.0
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def counts(self) -> Counts:
        return self.coordinator.brief_status().counts

    def snapshot(self) -> BufferSnapshot:
        """Returns the groups in the buffer. It keeps them from now on for a learner that goes back to this moment."""
        return self.coordinator.snapshot(self.coordinator.brief_status().version.incarnation).buffer

    def ready(self) -> list[OpenGroup]:
        """Returns the groups that were committed and are not trained yet."""
        return [group for group in self.snapshot().open if group.meta is not None]

    def tickets(self, replica: str) -> dict[str, OpenGroup]:
        """Returns the groups whose tickets a replica holds, as the buffer knows them, by their keys."""
        held = [group for group in self.snapshot().open if group.meta is None and group.ticket.replica == replica]
        return {group.ticket.key: group for group in held}

    def heartbeats(self, replica: str) -> list[HeldReport]:
        """Returns what the heartbeats of a replica said of its tickets."""
        heartbeats = [call.arguments for call in self.calls if call.method == Coordinator.heartbeat.__name__]
        return [held for name, _, _, held, _ in heartbeats if name == replica]

    @property
    def failures(self) -> Counter[str]:
        """Counts failed rollouts by class and reason."""
        return Counter({count.first.label: count.rollouts for count in self.coordinator.status().failures})

    async def close(self) -> None:
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)


@contextlib.asynccontextmanager
async def empty_pool(**overrides: Any) -> AsyncIterator[Pool]:
    """Yields a pool without replicas. Ends all replicas that are added to it."""
    pool = Pool(**overrides)
    try:
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def started_pool(**overrides: Any) -> AsyncIterator[tuple[Pool, FakeEngine]]:
    """Yields a pool with one replica, `a`, and its engine. Version 0 is published."""
    async with empty_pool(**overrides) as pool:
        engine = pool.add("a")
        await pool.publish(0)
        yield pool, engine


def manifest_of(step: int, *, parameters: Any = None) -> Manifest:
    """Builds the manifest of version `step`, with a probe that a `FakeEngine` passes."""
    version = Version(1, step)
    shapes = PARAMETERS if parameters is None else parameters
    probe = Probe(tokens=(PROBE,), logprobs=(tuple(log_prob_of(token, version) for token in PROBE[1:]),))
    tensors = layout(ParameterSpec(name, shape, dtype, len(WEIGHTS)) for name, (shape, dtype) in shapes.items())
    bucket = Bucket(pieces=(Piece(0, len(WEIGHTS)),), checksum=checksum([np.frombuffer(WEIGHTS, dtype=np.uint8)]))
    return Manifest(version=version, tensors=tensors, buckets=(bucket,), probe=probe)


async def until(condition: Callable[[], object]) -> None:
    """Lets all other tasks run until `condition()` is true. Fails if it does not become true."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")
