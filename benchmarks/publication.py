"""Measures what a publication of weights costs: the time for which training waits, and the pause of an engine.

    python benchmarks/publication.py [--ranks 2] [--rounds 9] [--dtype float32]
    python benchmarks/publication.py --slow-replicas

The model is a Qwen3 with about 100 million parameters on CPUs. The learner's part runs first, on its ranks:

- `memcpy`: every rank copies as many bytes as it sends from one block of memory to another, all ranks at the same time.
  The time is that of the slowest rank.
- `snapshot`: the call for which training waits, as the learner makes it, without the parity probe.
- `probe`: the log-probs of the parity probe, which the same call computes.

Then one vLLM engine loads the same weights again and again, while it generates:

- `memcpy`: one copy of all bytes.
- `stage`: every bucket is put into its place and verified, while the engine generates.
- `pause`: from the call that pauses generation until it has resumed.

The claims are that the median of `snapshot` is at most three times the median of the ranks' `memcpy`, and the median of
`pause` at most twice the median of the engine's `memcpy` and 40 ms.

With `--slow-replicas`, there is only `snapshot`, for the transports `object_store` and `collective`, while the version
before is delivered to 0, 1 and 2 replicas that need half a second for each bucket. The claim is that slow replicas do
not change it. `delivery` is the time of a delivery, for which training does not wait.
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import ray
import torch
from checkpoint_cost import make_model, timed
from transformers import AutoModelForCausalLM

from asyncrl.common.names import WEIGHTS
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.errors import WeightError
from asyncrl.generation.vllm_engine import VLLMEngine, prepare_environment
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.actor import SENDING
from asyncrl.ranks.gather import own_shards, parameter_specs
from asyncrl.weights.manifest import Bytes, Manifest, Probe, layout
from asyncrl.weights.publisher import snapshot_of
from asyncrl.weights.staging import Part, StagedWeights
from asyncrl.weights.store import WeightStore
from asyncrl.weights.transports import broadcast
from asyncrl.weights.transports.of_config import transport_of

MIB = 2**20
PROBE = [list(range(1, 21)) for _ in range(4)]
BUCKET_S = 0.5
"""Seconds that a slow replica needs for each bucket."""
SNAPSHOTS = 4
"""Snapshots for each delivery to slow replicas."""
Measured = dict[str, list[float]]


def memcpy(worker: PolicyWorker) -> tuple[int, float]:
    """Copies as many bytes as this rank sends. Returns the bytes and the seconds."""
    nbytes = worker._snapshots[0].memory.nbytes
    blocks = getattr(worker, "blocks", None)
    if blocks is None:
        blocks = worker.blocks = (np.ones(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8))  # type: ignore[attr-defined]
    worker.gather(None)  # the ranks begin together
    started_s = time.perf_counter()
    np.copyto(blocks[1], blocks[0])
    return nbytes, time.perf_counter() - started_s


def learners_part(config: Config, model: Path, *, rounds: int) -> Measured:
    measured: Measured = {"memcpy": [], "snapshot": [], "probe": []}
    policy = Policy(config, model_path=str(model))
    try:
        policy.start()
        entries = layout(policy.weights_metadata())
        for slot in (0, 1):  # the first snapshots get their memory from the system
            policy.ranks.call(PolicyWorker.take_snapshot, entries, PROBE, slot)
        ranks = policy.ranks.call(memcpy)
        print(f"sent by each rank: {', '.join(f'{nbytes / MIB:.0f} MiB' for nbytes, _ in ranks)}")
        for number in range(rounds):
            slot = number % 2
            measured["memcpy"].append(max(seconds for _, seconds in policy.ranks.call(memcpy)))
            measured["snapshot"].append(
                timed(lambda at=slot: policy.ranks.call(PolicyWorker.take_snapshot, entries, [], at))  # type: ignore[misc]
            )
            measured["probe"].append(timed(lambda: policy.ranks.call(PolicyWorker.probe, PROBE)))
    finally:
        policy.shutdown()
    return measured


class SlowReplica:
    """Receives every version, and needs `BUCKET_S` for each bucket."""

    def __init__(self, config: Config, node: str) -> None:
        self._transport = transport_of(config, staged_at=Path(node, "pointer"))
        self._staged = StagedWeights(Path(node, "pointer"))
        self._store = ray.get_actor(WEIGHTS, namespace=config.run.name)
        verify = broadcast.checksum

        def slowly(parts: Iterable[Bytes]) -> str:
            time.sleep(BUCKET_S)
            return verify(parts)

        broadcast.checksum = slowly  # type: ignore[attr-defined]

    async def run(self, name: str) -> None:
        receiving = asyncio.create_task(self._transport.take_part(name, ended=lambda end: None))
        version = None
        while not receiving.done() or receiving.exception() is None:
            publication = await self._store.newer_than.remote(version, 1.0)
            if publication is None:
                continue
            version = publication.manifest.version
            handles = publication.handles

            async def fetch(part: Part) -> Bytes:
                await asyncio.sleep(BUCKET_S)
                return await self._transport.receive(handles[part.bucket], timeout_s=60.0)  # noqa: B023

            with contextlib.suppress(WeightError):
                await self._staged.stage(publication.manifest, fetch)
                self._transport.staged(version)
            self._staged.release()

    async def pid(self) -> int:
        return os.getpid()


def slow_replicas_part(config: Config, model: Path, *, rounds: int, replicas: int) -> Measured:
    """Publishes versions to slow replicas."""
    measured: Measured = {"snapshot": [], "delivery": []}
    options = {"name": WEIGHTS, "namespace": config.run.name, "num_cpus": 0, "max_concurrency": 100}
    store = ray.remote(WeightStore).options(**options).remote()
    make_slow = ray.remote(SlowReplica).options(num_cpus=0, max_concurrency=10).remote
    slow = [make_slow(config, tempfile.mkdtemp(dir=model.parent)) for _ in range(replicas)]  # on a node each
    ray.get([replica.pid.remote() for replica in slow])
    running = [replica.run.remote(f"slow {number}") for number, replica in enumerate(slow)]
    policy, transport = Policy(config, model_path=str(model)), transport_of(config)
    try:
        policy.start()
        entries = layout(policy.weights_metadata())
        for slot in (0, 1):
            policy.ranks.call(PolicyWorker.take_snapshot, entries, PROBE, slot)

        def deliver(number: int) -> float:
            started_s = time.perf_counter()
            version = Version(1, number)
            by_rank = policy.ranks.beside(SENDING, PolicyWorker.deliver, transport, number % 2, version, None)
            sent = [bucket for rank in by_rank for bucket in rank]
            manifest = Manifest(
                version=version,
                tensors=entries,
                buckets=tuple(each.bucket for each in sent),
                probe=Probe(tokens=(), logprobs=()),
            )
            ray.get(store.publish.remote(manifest, [each.handle for each in sent]))
            return time.perf_counter() - started_s

        with ThreadPoolExecutor(1) as beside:
            for number in range(rounds + 1):
                delivery = beside.submit(deliver, number)
                snapshots_s = []
                for _ in range(SNAPSHOTS):
                    time.sleep(random.uniform(0.5, 1.5) * BUCKET_S)  # at any moment of a delivery to slow replicas
                    snapshots_s.append(
                        timed(lambda at=1 - number % 2: policy.ranks.call(PolicyWorker.take_snapshot, entries, [], at))  # type: ignore[misc]
                    )
                delivery_s = delivery.result()
                if number:  # the first delivery opens the group
                    measured["snapshot"] += snapshots_s
                    measured["delivery"].append(delivery_s)
    finally:
        policy.shutdown()
        for actor in (*slow, store):
            ray.kill(actor)
        ray.wait(running, num_returns=len(running), timeout=10.0)
    return measured


async def engines_part(config: Config, model: Path, *, rounds: int) -> Measured:
    measured: Measured = {"memcpy": [], "stage": [], "pause": [], "load": []}
    dtype = getattr(torch, config.model.dtype)
    learner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    entries = layout(parameter_specs(learner, dtype=dtype))
    probe = Probe(tokens=(), logprobs=())
    engine = await VLLMEngine.start(config, model_path=str(model), load_weights=False)
    generating = asyncio.create_task(_generate(engine))
    staged = StagedWeights()
    try:
        for number in range(rounds + 1):
            snapshot = snapshot_of(own_shards(learner, rank=0), entries, bucket_bytes=config.weights.bucket_bytes)
            version = Version(1, number)
            manifest = Manifest(version=version, tensors=entries, buckets=snapshot.described(), probe=probe)
            started_s = time.perf_counter()
            staged.begin(manifest)
            for part, data in zip(staged.missing, snapshot.buckets, strict=True):
                await asyncio.to_thread(staged.put, part, data)
            stage_s = time.perf_counter() - started_s
            copy = snapshot.memory.copy()
            copy_s = timed(lambda to=copy, of=snapshot: np.copyto(to, of.memory))  # type: ignore[misc]
            times = await engine.load(manifest, staged)
            if not number:  # the first load gets its memory from the system
                print(f"engine: {snapshot.memory.nbytes / MIB:.0f} MiB")
                continue
            measured["memcpy"].append(copy_s)
            measured["stage"].append(stage_s)
            measured["pause"].append(times.pause_s + times.load_s + times.resume_s)
            measured["load"].append(times.load_s)
            await asyncio.sleep(0.5)
    finally:
        generating.cancel()
        await engine.shutdown()
    return measured


async def _generate(engine: VLLMEngine) -> None:
    while True:
        await engine.generate([1, 2, 3], n=2, seed=None, temperature=1.0, max_tokens=100)


def show(part: str, measured: Measured) -> dict[str, float]:
    print(f"{part}:")
    for name, seconds in measured.items():
        median = statistics.median(seconds)
        print(f"  {name}: median {median * 1e3:.1f} ms, {min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f} ms")
    return {name: statistics.median(seconds) for name, seconds in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slow-replicas", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    config = Config.model_validate(
        {
            "model": {"dtype": arguments.dtype, "max_length": 128},
            "learner": {"ranks": arguments.ranks, "collective_timeout_s": 300.0},
            "generator": {"max_concurrent_groups": 4},
        }
    )
    prepare_environment(config)
    with tempfile.TemporaryDirectory(prefix="publication-") as name:
        model = Path(name) / "model"
        print(f"{make_model(model) / 1e6:.0f} million parameters, {arguments.ranks} ranks, {arguments.dtype}")
        ray.init("local", num_cpus=arguments.ranks, include_dashboard=False, log_to_driver=False)
        try:
            if arguments.slow_replicas:
                for transport, replicas in product(("object_store", "collective"), (0, 1, 2)):
                    weights = config.weights.model_copy(update={"transport": transport})
                    run = config.run.model_copy(update={"name": f"{transport}-{replicas}"})
                    chosen = config.model_copy(update={"weights": weights, "run": run})
                    measured = slow_replicas_part(chosen, model, rounds=arguments.rounds, replicas=replicas)
                    show(f"{transport}, {replicas} slow replicas", measured)
                return
            learner = show("learner", learners_part(config, model, rounds=arguments.rounds))
        finally:
            ray.shutdown()
        engine = show("engine", asyncio.run(engines_part(config, model, rounds=arguments.rounds)))
    print(f"snapshot / memcpy: {learner['snapshot'] / learner['memcpy']:.2f} (goal 3)")
    print(f"(pause - 40 ms) / memcpy: {(engine['pause'] - 0.04) / engine['memcpy']:.2f} (goal 2)")


if __name__ == "__main__":
    main()
