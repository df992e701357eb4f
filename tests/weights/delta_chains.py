"""Random histories of publications as deltas: any number of replicas, of which each stages some of the versions, and
parts that are lost, repeated, damaged, or exchanged. The replicas share their memory in half of the histories. Some
versions are delivered again, whole. A replica has either the learner's bytes of a version, or an error and no version.

    python tests/weights/delta_chains.py 10000
    python tests/weights/delta_chains.py 2500 7500    # the last quarter of them
"""

import asyncio
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from asyncrl.common.version import Version
from asyncrl.errors import WeightError
from asyncrl.weights.delta import DeltaSender
from asyncrl.weights.manifest import Bytes, Manifest, ParameterSpec, Probe, check_layout, layout
from asyncrl.weights.publisher import snapshot_of
from asyncrl.weights.staging import Part, StagedWeights
from asyncrl.weights.transports.interfaces import Shipment

PROBE = Probe(tokens=(), logprobs=())
SPECS = [ParameterSpec("a", (8, 40), "bfloat16", 640), ParameterSpec("b", (3,), "bfloat16", 6)]
BUCKET_BYTES = 256


class Memory:
    """Implements `Sender`: a handle is the number of a part."""

    def __init__(self) -> None:
        self.parts: list[Bytes] = []

    def send(self, sent: Shipment) -> list[Any]:
        first = len(self.parts)
        self.parts += [part.copy() for part in sent.parts]
        return list(range(first, len(self.parts)))


class Lost(WeightError):
    """A part does not arrive."""


def random_chain(seed: int) -> Counter[str]:
    """Runs one history. Returns the number of its events by kind. Raises AssertionError for wrong bytes."""
    with tempfile.TemporaryDirectory(prefix="chain-") as folder:
        return asyncio.run(_chain(seed, pointer=Path(folder, "pointer")))


async def _chain(seed: int, *, pointer: Path) -> Counter[str]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    master = {"a": torch.randn(8, 40), "b": torch.randn(3)}
    entries, memory, counts = layout(SPECS), Memory(), Counter[str]()
    sender = DeltaSender(anchor_every=draw.randint(1, 6))
    shares = draw.random() < 0.5
    replicas = [StagedWeights(pointer if shares else None) for _ in range(draw.randint(1, 3))]
    stored: Version | None = None
    offered: list[tuple[Manifest, list[Any], bytes]] = []
    snapshot = None

    def described() -> tuple[Manifest, list[Any], bytes]:
        assert snapshot is not None
        buckets = tuple(each.bucket for each in delivered)
        manifest = Manifest(version=version, tensors=entries, buckets=buckets, probe=PROBE)
        check_layout(manifest)
        counts["deltas"] += sum(bucket.links[-1].delta for bucket in buckets)
        counts["whole"] += sum(not bucket.links[-1].delta for bucket in buckets)
        return manifest, [each.handle for each in delivered], snapshot.memory.tobytes()

    for step in range(draw.randint(2, 14)):
        for tensor in master.values():
            share = draw.choice([0.0, 0.001, 0.02, 1.0])
            tensor += torch.randn_like(tensor) * (torch.rand_like(tensor) < share)
        shards = [(name, 0, tensor) for name, tensor in master.items()]
        snapshot = snapshot_of(shards, entries, bucket_bytes=BUCKET_BYTES, last=snapshot)
        version = Version(1, step)
        for _ in range(draw.choice([1, 1, 2])):  # a delivery may be repeated
            delivered = sender.deliver(snapshot, memory, version, previous=stored)  # type: ignore[arg-type]
        if draw.random() < 0.2:
            counts["not recorded"] += 1
            continue
        stored = version
        offered.append(described())
        await _stage_some(replicas, offered, memory, draw, counts)
        if draw.random() < 0.2:  # a replica could not get it
            delivered = sender.deliver(snapshot, memory, version, previous=stored, whole=True)  # type: ignore[arg-type]
            assert not any(each.bucket.links[-1].delta for each in delivered)
            if draw.random() < 0.8:
                offered[-1] = described()
                counts["again"] += 1
            await _stage_some(replicas, offered, memory, draw, counts)
    for replica in replicas:
        replica.close()
    return counts


async def _stage_some(
    replicas: list[StagedWeights],
    offered: list[tuple[Manifest, list[Any], bytes]],
    memory: Memory,
    draw: random.Random,
    counts: Counter[str],
) -> None:
    for replica in replicas:
        if draw.random() < 0.7:
            await _stage(replica, draw.choice(offered[-2:]), memory, draw, counts)


async def _stage(
    replica: StagedWeights,
    offer: tuple[Manifest, list[Any], bytes],
    memory: Memory,
    draw: random.Random,
    counts: Counter[str],
) -> None:
    manifest, handles, sent = offer
    faulty = draw.random() < 0.4

    async def fetch(part: Part) -> Bytes:
        assert part.link is not None
        data = memory.parts[handles[part.bucket][part.link]].copy()
        fault = draw.choice(["lost", "bit", "cut", "other", "repeated", ""]) if faulty else ""
        match fault:
            case "lost":
                raise Lost("a part")
            case "bit":
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            case "cut":
                data = data[: draw.randrange(len(data))]
            case "other":
                data = draw.choice(memory.parts).copy()
            case "repeated":
                replica.put(part, data)
        counts[fault or "sound"] += 1
        return data

    try:
        await replica.stage(manifest, fetch)
    except WeightError as error:
        counts[type(error).__name__] += 1
        assert faulty, "without a fault, every version can be staged"
        return  # it has no version
    assert not replica.missing
    counts["staged"] += 1
    flat, start = replica.flat, 0
    for bucket in manifest.buckets:
        for piece in bucket.pieces:
            assert flat[piece.offset : piece.offset + piece.nbytes].tobytes() == sent[start : start + piece.nbytes]
            start += piece.nbytes
    replica.release()


if __name__ == "__main__":
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    totals = Counter[str]()
    for chain in range(first, first + int(sys.argv[1])):
        totals += random_chain(chain)
    print(f"{sys.argv[1]} chains from {first} on, 0 wrong bytes: {dict(totals)}")
