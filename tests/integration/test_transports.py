"""Weights from real learner ranks into real vLLM engines, by broadcast and by shared memory; some peers are killed.

What is loaded is proved by the probe: the learner's log-probs of its tokens are the engine's. The tests build on each
other's processes and end some of them, so they run in this order.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from torch.distributed import FileStore

from asyncrl.buffer.records import Version
from asyncrl.config.schema import Config
from asyncrl.errors import CollectiveError, ManifestMismatch, TornReplica, UpdateRefused
from asyncrl.generation.actor import expected_parameters
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment
from asyncrl.policy.worker import PolicyWorker
from asyncrl.weights.manifest import Manifest, Probe, check_parameters, layout
from asyncrl.weights.publisher import take_snapshot
from asyncrl.weights.transports.collective import broadcast_snapshot, join_collective
from asyncrl.weights.transports.ipc import (
    get_weights_ipc_handles,
    prepare_weights_for_ipc,
    release_weights_for_ipc,
)
from asyncrl.weights.transports.peers import Rendezvous

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]

PROCESSES = multiprocessing.get_context("forkserver")
LOOPBACK = "127.0.0.1"
PARITY_NATS = 1e-4
RANKS = 2
FAR_S = 100.0
"""A deadline that a test which passes has not waited for."""
SMALL_BUCKETS = 2**18
PROBE = [[40, 41, 42, 43, 44, 45, 46], [50, 41, 40], [43, 43, 44, 49]]


def change_weights(worker: Any, seed: int) -> None:
    """Every weight moves, on each rank its own part."""
    for _ in worker.gather_weights():
        pass  # a probe may have left parameters whole, and what is changed there is lost
    noise = torch.Generator().manual_seed(worker.rank + 100 * seed)
    with torch.no_grad():
        for parameter in worker._model.parameters():
            shard = parameter.to_local()
            shard.add_(torch.randn(shard.shape, generator=noise) * 0.02)


def snapshot(worker: Any) -> None:
    take_snapshot(worker, layout(worker.weights_metadata(), SMALL_BUCKETS), PROBE)


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """What a learner rank is made of."""

    rank: int
    world_size: int
    config: Config
    store: str

    def make(self) -> PolicyWorker:
        store = FileStore(self.store, self.world_size)
        return PolicyWorker(
            model_path=self.config.model.path,
            config=self.config,
            rank=self.rank,
            world_size=self.world_size,
            store=store,
        )


@dataclass(frozen=True, kw_only=True)
class EngineStart:
    """What a second engine is made of; it needs a process of its own."""

    config: Config

    async def make(self) -> VLLMEngine:
        prepare_environment(self.config)
        return await VLLMEngine.start(self.config, model_path=self.config.model.path)


def serve(calls: Connection, start: Any) -> None:
    """A process that makes what `start` says, and calls functions on it."""
    with asyncio.Runner() as runner:
        made = start.make()
        if asyncio.iscoroutine(made):
            made = runner.run(made)
        calls.send(None)
        while True:
            function, *args = calls.recv()
            try:
                answer = function(made, *args)
                answer = runner.run(answer) if asyncio.iscoroutine(answer) else answer
            except Exception as error:
                answer = error
            calls.send(answer)


class Died(Exception):
    """The process under a call was killed."""


class Remote:
    """A process of this test's, and calls into it."""

    def __init__(self, start: RankStart | EngineStart) -> None:
        self._calls, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=serve, args=(theirs, start))
        self.process.start()
        theirs.close()

    async def started(self) -> None:
        """The test's own limit is the deadline."""
        await asyncio.to_thread(self._answer, None)

    async def call(self, function: Any, *args: Any) -> Any:
        self._calls.send((function, *args))
        return await asyncio.to_thread(self._answer, 2 * FAR_S)

    def _answer(self, timeout_s: float | None) -> Any:
        try:
            assert self._calls.poll(timeout_s), "no answer"
            answer = self._calls.recv()
        except (EOFError, ConnectionError) as error:
            raise Died from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        family = [*psutil.Process(self.process.pid).children(recursive=True)] if self.process.is_alive() else []
        self.process.kill()
        self.process.join(10)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


async def join(engine: VLLMEngine, rendezvous: Rendezvous, first_rank: int, parameters: Any) -> None:
    await engine.weights.join_collective(rendezvous, first_rank=first_rank, parameters=parameters)


async def receive(engine: VLLMEngine) -> Manifest:
    return await engine.weights.receive()


async def load_received(engine: VLLMEngine, manifest: Manifest) -> None:
    await engine.weights.load_received(manifest)


async def score(engine: VLLMEngine, tokens: Sequence[int]) -> list[float]:
    return await engine.score(tokens)


def engine_pids(engine: VLLMEngine) -> list[int]:
    return engine.pids()


class Scene:
    """Two learner ranks, the session's engine and another one."""

    def __init__(self, config: Config, engine: VLLMEngine, store: str) -> None:
        self.engine = engine
        self.parameters = expected_parameters(config.model.path, dtype="float32")
        self.other = Remote(EngineStart(config=config))
        self.ranks = [
            Remote(RankStart(rank=rank, world_size=RANKS, config=config, store=store)) for rank in range(RANKS)
        ]

    async def on_ranks(self, function: Any, *args: Any) -> list[Any]:
        return list(await asyncio.gather(*self.calls(function, *args)))

    def calls(self, function: Any, *args: Any) -> list[Any]:
        return [rank.call(function, *args) for rank in self.ranks]

    async def join(self, *, engines: int = 2, parameters: Any = None) -> None:
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
        meeting = Rendezvous(
            host=LOOPBACK, port=port, world_size=RANKS + engines, train_world_size=RANKS, timeout_s=FAR_S
        )
        calls = [
            *self.calls(join_collective, meeting),
            join(self.engine, meeting, RANKS, parameters or self.parameters),
        ]
        if engines == 2:
            calls.append(self.other.call(join, meeting, RANKS + 1, self.parameters))
        await asyncio.gather(*calls)

    async def parity_nats(self, manifest: Manifest, *, of_other: bool = False) -> float:
        rows = [list(row) for row in manifest.probe.tokens]
        scores = [await (self.other.call(score, row) if of_other else self.engine.score(row)) for row in rows]
        return manifest.probe.max_difference_nats(scores)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def scene(
    engine: VLLMEngine, run_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Scene]:
    # one process pays for the ranks' imports
    PROCESSES.set_forkserver_preload(["asyncrl.policy.worker"])
    scene = Scene(run_config, engine, str(tmp_path_factory.mktemp("ranks") / "store"))
    await asyncio.gather(*[remote.started() for remote in (scene.other, *scene.ranks)])
    yield scene
    for remote in (scene.other, *scene.ranks):
        remote.end()


async def outcomes(*calls: Awaitable[Any]) -> list[Any]:
    """What each returned or raised."""
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_two_ranks_bring_two_engines_to_the_same_weights(scene: Scene) -> None:
    await scene.join()
    for step in (0, 1):
        await scene.on_ranks(change_weights, step)
        await scene.on_ranks(snapshot)
        first, second, *_ = await asyncio.gather(
            scene.engine.weights.receive(),
            scene.other.call(receive),
            *scene.calls(broadcast_snapshot, Version(1, step)),
        )
        assert first == second
        assert first.version == Version(1, step)
        assert len(first.buckets) > 2
        assert await scene.parity_nats(first) > 1e-2, "the probe would not see the update"
        await asyncio.gather(scene.engine.weights.load_received(first), scene.other.call(load_received, second))
        assert await scene.parity_nats(first) < PARITY_NATS
        assert await scene.parity_nats(second, of_other=True) < PARITY_NATS
        [completion] = await scene.engine.generate(PROBE[0], n=1, seed=0, temperature=1.0, max_tokens=3)
        assert set(completion.versions) == {Version(1, step)}


async def test_f12_a_refusal_reaches_every_process_by_its_type_and_changes_nothing(scene: Scene) -> None:
    other = {name: ((*shape, 1), dtype) for name, (shape, dtype) in scene.parameters.items()}
    await scene.join(parameters=other)
    before = await scene.engine.score(PROBE[0])
    await scene.on_ranks(change_weights, 2)
    await scene.on_ranks(snapshot)
    refused, *others = await outcomes(
        scene.engine.weights.receive(),
        scene.other.call(receive),
        *scene.calls(broadcast_snapshot, Version(1, 2)),
    )
    assert isinstance(refused, ManifestMismatch), refused
    assert "Do both pools use the same `model.path`" in str(refused)
    assert [type(outcome) for outcome in others] == [UpdateRefused] * 3, others
    assert await scene.engine.score(PROBE[0]) == before


async def killed_while_others_wait(pid: int, calls: list[Any]) -> list[Any]:
    """Outcomes of `calls` when the process `pid` stops before they begin, and is killed while they wait for it."""
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)
    tasks = [asyncio.ensure_future(call) for call in calls]
    done, _ = await asyncio.wait(tasks, timeout=2.0)
    assert not done, "nobody waited for the peer that is about to die"
    process.kill()
    return await asyncio.wait_for(outcomes(*tasks), FAR_S / 2)


async def test_f11_an_engine_killed_on_the_way_costs_the_others_nothing_but_the_group(scene: Scene) -> None:
    await scene.join()
    before = await scene.engine.score(PROBE[0])
    version = scene.engine.weights.version
    await scene.on_ranks(snapshot)
    [pid] = await scene.other.call(engine_pids)
    calls = [scene.engine.weights.receive(), *scene.calls(broadcast_snapshot, Version(1, 3))]
    calls.append(scene.other.call(receive))
    found = await killed_while_others_wait(pid, calls)
    assert [type(outcome) for outcome in found] == [CollectiveError] * 4, found
    assert await scene.engine.score(PROBE[0]) == before, "a death on the way changed weights"
    assert scene.engine.weights.version == version

    # a new group without it, as if nothing had been
    await scene.join(engines=1)
    manifest, *_ = await asyncio.gather(scene.engine.weights.receive(), *scene.calls(broadcast_snapshot, Version(1, 3)))
    await scene.engine.weights.load_received(manifest)
    assert await scene.parity_nats(manifest) < PARITY_NATS


async def test_f11_a_learner_rank_killed_on_the_way_leaves_the_engine_with_its_weights(scene: Scene) -> None:
    await scene.on_ranks(change_weights, 4)
    await scene.on_ranks(snapshot)
    before = await scene.engine.score(PROBE[0])
    calls = [scene.engine.weights.receive(), *scene.calls(broadcast_snapshot, Version(1, 4))]
    engine, rank_0, rank_1 = await killed_while_others_wait(scene.ranks[1].process.pid, calls)
    assert isinstance(engine, CollectiveError), engine
    assert isinstance(rank_0, CollectiveError), rank_0
    assert isinstance(rank_1, Died), rank_1
    assert await scene.engine.score(PROBE[0]) == before
    [completion] = await scene.engine.generate(PROBE[0], n=1, seed=0, temperature=1.0, max_tokens=3)
    assert set(completion.versions) == {Version(1, 3)}


# -- shared memory of one learner rank and one engine -----------------------------------------------------------------


async def new_weights(neighbour: Remote, step: int) -> Manifest:
    """The neighbour's weights change: what they are now, and what they compute."""
    await neighbour.call(change_weights, step)
    return Manifest(
        version=Version(2, step),
        previous=None,
        tensors=layout(await neighbour.call(metadata), SMALL_BUCKETS),
        buckets=(),
        probe=Probe(tokens=tuple(map(tuple, PROBE)), logprobs=await neighbour.call(probe_logprobs)),
    )


def metadata(worker: Any) -> Any:
    return worker.weights_metadata()


def probe_logprobs(worker: Any) -> Any:
    return tuple(tuple(row.tolist()) for row in worker.probe(PROBE))


def open_memory_files(worker: Any) -> int:
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("asyncrl-weights" in os.readlink(path) for path in descriptors if os.path.islink(path))


def flip_a_bit(worker: Any, path: str) -> None:
    with open(path, "r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def neighbour(
    scene: Scene, run_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Remote]:
    """A learner of one rank."""
    store = str(tmp_path_factory.mktemp("neighbour") / "store")
    neighbour = Remote(RankStart(rank=0, world_size=1, config=run_config, store=store))
    await neighbour.started()
    yield neighbour
    neighbour.end()


async def share_all(scene: Scene, neighbour: Remote, manifest: Manifest, *, buffer_bytes: int) -> int:
    """A whole refit by shared memory; how many groups it took."""
    groups: list[list[str]] = await neighbour.call(prepare_weights_for_ipc, buffer_bytes)
    check_parameters(manifest, scene.parameters)
    await scene.engine.weights.begin(manifest.version)
    for names in groups:
        await scene.engine.weights.apply_shared(await neighbour.call(get_weights_ipc_handles, names))
    await scene.engine.weights.commit([entry.name for entry in manifest.tensors])
    await neighbour.call(release_weights_for_ipc)
    return len(groups)


async def test_a_rank_shares_its_weights_with_the_engine_beside_it_and_leaves_nothing(
    scene: Scene, neighbour: Remote
) -> None:
    segments = set(os.listdir("/dev/shm"))
    for step, buffer_bytes in enumerate((SMALL_BUCKETS, 2**30)):
        manifest = await new_weights(neighbour, step)
        assert await scene.parity_nats(manifest) > 1e-2, "the probe would not see the update"
        groups = await share_all(scene, neighbour, manifest, buffer_bytes=buffer_bytes)
        assert groups == 1 if buffer_bytes > SMALL_BUCKETS else groups > 2
        assert await scene.parity_nats(manifest) < PARITY_NATS
        assert await neighbour.call(open_memory_files) == 0
    assert {name for name in os.listdir("/dev/shm") if name.startswith("psm_")} <= segments
    [completion] = await scene.engine.generate(PROBE[0], n=1, seed=0, temperature=1.0, max_tokens=3)
    assert set(completion.versions) == {Version(2, 1)}


@pytest.mark.parametrize("trouble", ["a flipped bit", "a learner that let go", "a group twice"])
async def test_f11_a_refit_that_failed_half_way_is_torn_until_a_whole_one(
    scene: Scene, neighbour: Remote, trouble: str
) -> None:
    """The first half ends within a layer's fused projection: none of it may count into the whole refit after it."""
    manifest = await new_weights(neighbour, 7)
    groups: list[list[str]] = await neighbour.call(prepare_weights_for_ipc, 1)
    half = 1 + next(index for index, [name] in enumerate(groups) if name.endswith("k_proj.weight"))
    weights = scene.engine.weights
    await weights.begin(manifest.version)
    for names in groups[:half]:
        handles = await neighbour.call(get_weights_ipc_handles, names)
        await weights.apply_shared(handles)
    if trouble == "a group twice":
        await weights.apply_shared(handles)
        broken = weights.commit([name for names in groups[: half + 1] for name in names])
    else:
        cut = await neighbour.call(get_weights_ipc_handles, groups[half])
        [handle] = cut.values()
        damage = (flip_a_bit, handle.path) if trouble == "a flipped bit" else (release_weights_for_ipc,)
        await neighbour.call(*damage)
        broken = weights.apply_shared(cut)
    with pytest.raises(TornReplica, match=r"2\.7 failed half way"):
        await broken
    late = asyncio.create_task(scene.engine.generate(PROBE[0], n=1, seed=9, temperature=1.0, max_tokens=3))
    done, _ = await asyncio.wait([late], timeout=1.0)
    assert not done, "a torn engine generated"
    await share_all(scene, neighbour, manifest, buffer_bytes=SMALL_BUCKETS)
    [completion] = await late
    assert set(completion.versions) == {Version(2, 7)}
    assert await scene.parity_nats(manifest) < PARITY_NATS
    assert await neighbour.call(open_memory_files) == 0
