"""Measures what the system itself costs: runs with 4, 16 and 64 replicas whose engines and ranks only sleep.

    python benchmarks/simulated_pools.py --write
    python benchmarks/simulated_pools.py --replicas 4 --steps 10

Each replica is a process of its own with the generator's loop and an engine that sleeps for the time of a group. The
coordinator, the weight store, the row stores and the learner's loop are those of a run, on a local Ray cluster. The
learner's rank reads the rows of each step from the data plane, and sleeps for the rest of the time of a step. Rewards
do not matter, so no processes for scoring are started.

Closed form. A group takes a uniformly random time with the mean d, so N replicas with c slots each generate at most
N c / d groups/s. The learner trains at most B / s groups/s with B groups a step of s seconds. The rate R is the
smaller one of the two. Then the slots generate for the share R d / (N c) of their time, and the learner trains for the
share R s / B. The rest of each is waiting. Each size runs twice, so that once each side is the slower one. Groups take
the same time at each size, so that the groups/s grow with the pool, and the CPU time of a group should not.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from report_page import busy_percent, provenance, write_section

from asyncrl.common.names import COORDINATOR, WEIGHTS
from asyncrl.common.roles import Role
from asyncrl.common.version import Version
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.data.prompts import Task
from asyncrl.data_plane.rows import PREFIX_PARTITION, TRAIN_PARTITION, Rows
from asyncrl.deployment.cluster import start_node
from asyncrl.deployment.shared_actors import (
    RunHandles,
    enter_run,
    keep_attached,
    leave_run,
    new_deployment,
    open_data_plane,
)
from asyncrl.generation.interfaces import Completion, LoadTimes
from asyncrl.learner.penalty_control import first_loss
from asyncrl.learner.records import RecordSink, StepRecord
from asyncrl.metrics.vllm_counters import PromptTokens
from asyncrl.weights.manifest import Bucket, Manifest, ParameterSpec, Piece, Probe, ReadBack, checksum, layout
from asyncrl.weights.staging import StagedWeights
from asyncrl.weights.transports.object_store import ObjectStoreTransport

BENCHMARK = "simulated_pools.py"
SLOTS, GROUP_SIZE, TOKENS, ETA = 4, 4, 32, 6
GROUP_S, SPREAD = 10.0, 0.3
"""Mean time of a group, seconds, and its largest difference from the mean as a share of it."""
RATIOS = (1.33, 0.75)
"""Rates of the learner over that of the pool."""
SIZES = (4, 16, 64)
WARM_UP_STEPS, LEFT_STEPS = 8, 2 * (ETA + 1)
"""Steps before those that are measured, and after them. The run is stopped before the latter, because near the end of a
run no groups are started that no step would train."""
PARAMETERS = {"w": ((2,), "float32")}
WEIGHTS_BYTES = bytes(8)
PROBE = (5, 6, 7)
TASKS = [Task(question=f"q{number}", prompt=f"q{number}", answer="a") for number in range(1000)]
START_S = 600.0


class SleepingEngine:
    """Implements `InferenceEngine`: a group takes the time that its seed draws."""

    prompt_tokens = PromptTokens(all=0, cached=0)

    def __init__(self, name: str) -> None:
        self._version: Version | None = None
        self._times = random.Random(name)

    async def generate(self, prompt_ids: Sequence[int], *, n: int, **_: Any) -> list[Completion]:
        await asyncio.sleep(GROUP_S * self._times.uniform(1 - SPREAD, 1 + SPREAD))
        assert self._version is not None
        versions = [self._version] * TOKENS
        return [
            Completion(
                token_ids=[3] * TOKENS, logprobs=[-1.0] * TOKENS, versions=versions, text="a", truncated=False
            )
            for _ in range(n)
        ]  # fmt: skip

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    async def load(
        self, manifest: Manifest, staged: StagedWeights, *, on_paused: Callable[[], None] | None = None
    ) -> LoadTimes:
        self._version = manifest.version
        return LoadTimes(pause_s=0.0, load_s=0.0, resume_s=0.0)

    async def read_back(self, manifest: Manifest, staged: StagedWeights) -> ReadBack:
        return ReadBack()

    async def abort(self) -> None: ...

    async def died(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def shutdown(self) -> None: ...


class Tokenizer:
    """Makes three tokens of each text."""

    chat_template = None

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[2, 3, 4] for _ in texts]}


class SameScorer:
    """Rewards the first completion of a group with 1, the others with 0."""

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        return [float(not number) for number in range(len(completions))]


class SleepingReplica:
    """Body of the actor of one replica, like `GeneratorActor`, with an engine that sleeps."""

    def __init__(self, config: Config, name: str) -> None:
        # imported here, because only replicas need them
        from asyncrl.generation.generator import Generator
        from asyncrl.generation.rollout import Rollouts
        from asyncrl.generation.weight_updates import WeightUpdates
        from asyncrl.metrics.recorders import GeneratorMetrics
        from asyncrl.weights.store import WeightClient

        namespace, timeout_s = config.run.name, config.buffer.call_timeout_s
        engine, metrics = SleepingEngine(name), GeneratorMetrics(environment="simulated")
        self._generator = Generator(
            config=config,
            name=name,
            deployment="simulated",
            rollouts=Rollouts(config=config, engine=engine, tokenizer=Tokenizer(), scorer=SameScorer(), replica=name),
            coordinator=CoordinatorClient.over_ray(
                ray.get_actor(COORDINATOR, namespace=namespace), timeout_s=timeout_s
            ),
            rows=Rows(config),
            prefix_rows=Rows(config, partition=PREFIX_PARTITION),
            weights=WeightUpdates(
                config=config,
                name=name,
                engine=engine,
                source=WeightClient(ray.get_actor(WEIGHTS, namespace=namespace), timeout_s=timeout_s),
                transport=ObjectStoreTransport(),
                parameters=PARAMETERS,
                metrics=metrics,
            ),
            metrics=metrics,
            started_s=time.monotonic(),
        )

    async def run(self) -> None:
        await self._generator.run()

    async def drain(self) -> None:
        self._generator.drain()


class SleepingRanks:
    """Stands for `TQPolicy`: a step reads its rows from the data plane and sleeps. `client` is that of the run."""

    def __init__(self, client: Any, *, step_s: float) -> None:
        self._client = client
        self._step_s = step_s

    def prepare_step(self, num_samples: int, group_size: int | None = None) -> None:
        from asyncrl.policy.tq_policy import STEP_FIELDS

        self._client.register_partition(TRAIN_PARTITION, STEP_FIELDS, num_samples, ["train"], group_size)

    def write_to_dataplane(self, meta: Any, fields: Mapping[str, Any]) -> None:
        from asyncrl.ranks.named_rows import name_fields

        self._client.put_samples(meta.sample_ids, meta.partition_id, fields=fields)
        name_fields(meta, fields)

    def train_from_meta(self, meta: Any, loss_fn: Any, eval_mode: bool = False, **_: Any) -> Any:
        from asyncrl.ranks.report import StepReport

        started_s = time.monotonic()
        self._client.get_data(meta, ["input_ids", "generation_logprobs", "token_mask", "advantages"])
        time.sleep(max(0.0, started_s + self._step_s - time.monotonic()))
        report = StepReport(
            updates_applied=1,
            trained_samples=meta.size,
            trained_tokens=meta.size * TOKENS,
            seconds={"forward_backward": time.monotonic() - started_s},
        )
        return {"report": report}

    # The parts of `RunParts`.

    def check_folder(self, folder: Path) -> None: ...

    def stage(self) -> None: ...

    def write(self, path: Path, snapshot: Any, *, hf: bool) -> None:
        path.mkdir(parents=True)
        (path / COMPLETE).touch()


class TinyPublisher:
    """Stands for `Publisher`: publishes weights of eight bytes through Ray's object store."""

    def __init__(self, coordinator: CoordinatorClient, weights: Any) -> None:
        self._coordinator, self._weights = coordinator, weights
        self.published: Version | None = None
        self.trouble = ""

    def check(self) -> None: ...

    async def stop(self) -> None: ...

    async def publish(self, version: Version) -> None:
        data = np.frombuffer(WEIGHTS_BYTES, dtype=np.uint8)
        tensors = layout(ParameterSpec(name, shape, dtype, data.nbytes) for name, (shape, dtype) in PARAMETERS.items())
        bucket = Bucket(pieces=(Piece(0, data.nbytes),), checksum=checksum([data]))
        probe = Probe(tokens=(PROBE,), logprobs=((-1.0,) * (len(PROBE) - 1),))
        manifest = Manifest(version=version, tensors=tensors, buckets=(bucket,), probe=probe)
        self.published = version
        await self._coordinator.call(Coordinator.published, version)
        await self._weights.publish(manifest, [ray.put(data)])

    async def settle(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run. `step_s` is the time of a step, which `learner_over_pool` determines."""

    replicas: int
    learner_over_pool: float

    @property
    def groups_per_step(self) -> int:
        return self.replicas * SLOTS // 2

    @property
    def pool_rate(self) -> float:
        return self.replicas * SLOTS / GROUP_S

    @property
    def step_s(self) -> float:
        return self.groups_per_step / (self.pool_rate * self.learner_over_pool)

    @property
    def rate(self) -> float:
        """Returns the groups per second of the closed form."""
        return min(self.pool_rate, self.groups_per_step / self.step_s)

    @property
    def limit(self) -> str:
        return "pool" if self.learner_over_pool > 1 else "learner"

    def config(self, *, folder: Path, steps: int) -> Config:
        return Config.model_validate(
            {
                "run": {"name": "simulated-pools", "dir": str(folder)},
                "learner": {
                    "groups_per_step": self.groups_per_step,
                    "group_size": GROUP_SIZE,
                    "total_steps": steps,
                    "groups_logged": 0,
                },
                "generator": {
                    "max_concurrent_groups": SLOTS,
                    "max_completion_tokens": TOKENS,
                    "max_starts_per_s": 1000.0,
                },
                "staleness": {"max_versions": ETA},
                "eval": {"prompts": 0},
                "checkpoint": {"every_steps": 0},
            }
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one run: shares of time, groups per second, CPU seconds and memory of a replica."""

    groups_per_s: float
    generating: float
    training: float
    cpu_ms_a_group: float
    cores: float
    replica_mib: float


async def measure(setting: Setting, *, steps: int, folder: Path) -> Measured:
    """Runs the pools for `WARM_UP_STEPS` and `steps` more steps, and measures the latter."""
    config = setting.config(folder=folder, steps=WARM_UP_STEPS + steps + LEFT_STEPS)
    deployment = new_deployment(Role.LEARNER, nonce="simulated")
    client = await open_data_plane(config, deployment=deployment, restores=False)
    handles = await enter_run(config, deployment=deployment, tasks=TASKS)
    attached = asyncio.create_task(keep_attached(handles, every_s=1.0))
    actor = ray.remote(SleepingReplica).options(num_cpus=0, max_concurrency=1000)
    replicas = [actor.remote(config, f"generator-{number:03}") for number in range(setting.replicas)]
    async with asyncio.timeout(START_S):
        await asyncio.gather(*[replica.__ray_ready__.remote() for replica in replicas])
    running = [replica.run.remote() for replica in replicas]
    records: list[Any] = []
    cpu_s: list[float] = []
    stop = asyncio.Event()

    class Measuring(RecordSink):
        def append_step(self, record: StepRecord) -> None:
            records.append(record)
            if len(records) in (WARM_UP_STEPS, WARM_UP_STEPS + steps):
                cpu_s.append(sum(_cpu_s(process) for process in _family()))
            if len(records) == WARM_UP_STEPS + steps:
                stop.set()

    ranks = SleepingRanks(client, step_s=setting.step_s)
    await _loop(config, handles, ranks, Rows(config, client=client), Measuring(), folder).run(stop)
    memory = [process.memory_full_info().pss for process in _family() if "SleepingReplica" in _name(process)]
    await asyncio.gather(*[replica.drain.remote() for replica in replicas])
    await asyncio.gather(*running)
    for replica in replicas:
        ray.kill(replica)
    attached.cancel()
    await leave_run(handles.coordinator, handles.deployment, namespace=config.run.name)
    before, after = records[WARM_UP_STEPS - 1], records[WARM_UP_STEPS + steps - 1]
    seconds, groups = after.wall_s - before.wall_s, steps * setting.groups_per_step
    learner, generator = _spent(before, after, "learner"), _spent(before, after, "generator")
    return Measured(
        groups_per_s=groups / seconds,
        generating=generator["generating"] / sum(generator.values()),
        training=learner["forward_backward"] / seconds,
        cpu_ms_a_group=(cpu_s[1] - cpu_s[0]) / groups * 1e3,
        cores=(cpu_s[1] - cpu_s[0]) / seconds,
        replica_mib=sum(memory) / max(1, len(memory)) / 2**20,
    )


def _loop(
    config: Config,
    handles: RunHandles,
    ranks: Any,
    rows: Rows,
    records: RecordSink,
    folder: Path,
) -> Any:
    """Returns the learner's loop of a run, over ranks that sleep."""
    # imported here, because replicas do not need them
    from asyncrl.learner.heldout import HeldoutEvaluation, ReplicaClient
    from asyncrl.learner.loop import LearnerLoop
    from asyncrl.learner.recording import StepEnd, StepRecorder, described_metrics
    from asyncrl.learner.sample_records import Texts
    from asyncrl.learner.saving import Checkpoints
    from asyncrl.learner.step import Stages
    from asyncrl.learner.trained_prompts import TrainedPrompts
    from asyncrl.metrics.catalogue import LEARNER_STATES
    from asyncrl.metrics.states import StateClock

    metrics = described_metrics(config)
    publisher: Any = TinyPublisher(handles.coordinator, handles.weights)
    checkpoints = Checkpoints(
        config.checkpoint, folder=folder / "checkpoints", run=ranks, sync_records=lambda: None, metrics=metrics
    )
    started_s, incarnation = time.monotonic(), handles.lineage.incarnation
    states = StateClock(states=LEARNER_STATES, initial="starting", started_s=started_s)
    stages = Stages(config=config, policy=ranks, critic=None, states=states, loss=first_loss(config))
    return LearnerLoop(
        config=config,
        incarnation=incarnation,
        coordinator=handles.coordinator,
        stages=stages,
        step_end=StepEnd(
            stages=stages,
            rows=rows,
            incarnation=incarnation,
            coordinator=handles.coordinator,
            checkpoints=checkpoints,
            recorder=StepRecorder(
                metrics=metrics,
                elapsed_s=lambda: time.monotonic() - started_s,
                state_seconds=states.seconds,
            ),
            sinks=[records],
            append_audit=lambda _: None,
            texts=Texts(tokens=str, answer=lambda ids, part: ""),
        ),
        publisher=publisher,
        heldout=HeldoutEvaluation(
            config=config,
            tasks={},
            coordinator=handles.coordinator,
            replicas=ReplicaClient(namespace=config.run.name, timeout_s=60.0),
            sinks=[records],
            metrics=metrics,
            started_s=started_s,
        ),
        checkpoints=checkpoints,
        prompts=TrainedPrompts(TASKS),
    )


def _spent(before: Any, after: Any, side: str) -> dict[str, float]:
    then, now = (getattr(record, f"{side}_state_s") for record in (before, after))
    return {state: seconds - then.get(state, 0.0) for state, seconds in now.items()}


def _family() -> Iterator[psutil.Process]:
    """Yields this process and all that it has started: Ray's daemons, the actors and their processes."""
    own = psutil.Process()
    yield own
    yield from own.children(recursive=True)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _name(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline()[:1])
    except psutil.NoSuchProcess:
        return ""


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray cluster of this process, without GPUs."""
    start_node(
        lambda: ray.init(
            address="local",
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=256 * 2**20,
            namespace="simulated-pools",
        )
    )
    try:
        yield
    finally:
        ray.shutdown()


COLUMNS = [
    "replicas", "limit", "groups/s", "closed form", "ratio", "slots generate", "closed form", "learner trains",
    "closed form", "CPU of a group, ms", "cores in use", "memory of a replica, MiB",
]  # fmt: skip
LEGEND = f"""\
*Closed form* is that of `simulated_pools.py` for the column before it. The rest of the time of slots and learner is
waiting. A group of {GROUP_SIZE} samples takes {GROUP_S:g} s on average. *CPU of a group* is the CPU time of all
processes divided by the trained groups: Ray's daemons, heartbeats and the learner are included. The memory of a replica
is its proportional set size, in which pages that processes share are divided among them."""


def row(setting: Setting, found: Measured) -> str:
    cells = [
        str(setting.replicas),
        setting.limit,
        f"{found.groups_per_s:.2f}",
        f"{setting.rate:.2f}",
        f"{found.groups_per_s / setting.rate:.3f}",
        f"{found.generating:.1%}",
        f"{setting.rate / setting.pool_rate:.1%}",
        f"{found.training:.1%}",
        f"{setting.rate * setting.step_s / setting.groups_per_step:.1%}",
        f"{found.cpu_ms_a_group:.1f}",
        f"{found.cores:.2f}",
        f"{found.replica_mib:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, action="append", help=f"default: {', '.join(map(str, SIZES))}")
    parser.add_argument("--steps", type=int, default=16, help="measured steps of each run")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    busy = busy_percent()
    table = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for replicas, ratio in itertools.product(arguments.replicas or SIZES, RATIOS):
        setting = Setting(replicas=replicas, learner_over_pool=ratio)
        with tempfile.TemporaryDirectory() as folder, local_ray():
            found = asyncio.run(measure(setting, steps=arguments.steps, folder=Path(folder)))
        table.append(row(setting, found))
        print(table[-1], file=sys.stderr, flush=True)
    lines = [provenance(BENCHMARK, busy_percent=busy), "", LEGEND, "", *table]
    print("\n".join(lines))
    if arguments.write:
        write_section(BENCHMARK, lines)


if __name__ == "__main__":
    main()
