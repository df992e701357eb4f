"""Random histories of publications as deltas: any number of replicas, of which each stages some of the versions, and
parts that are lost, repeated, damaged, or exchanged. Some versions are delivered again, whole. A replica has either the
learner's bytes of a version, or an error and no version.

    python tests/weights/delta_chains.py 10000
"""

import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.common.version import Version
from asyncrl.errors import WeightError
from asyncrl.weights.delta import DeltaSender
from asyncrl.weights.manifest import Bucket, Bytes, Manifest, ParameterSpec, Probe, check_layout, layout
from asyncrl.weights.memory_file import MemoryFile
from asyncrl.weights.publisher import snapshot_of
from asyncrl.weights.staging import StagedWeights

PROBE = Probe(tokens=(), logprobs=())
SPECS = [ParameterSpec("a", (8, 40), "bfloat16", 640), ParameterSpec("b", (3,), "bfloat16", 6)]
BUCKET_BYTES = 256


class Memory:
    """Implements the sending half of `Transport`: a handle is the number of a part."""

    def __init__(self) -> None:
        self.parts: list[Bytes] = []

    def send(
        self, parts: Sequence[Bytes], described: Sequence[Bucket], version: Version, *, shared: MemoryFile | None
    ) -> list[Any]:
        first = len(self.parts)
        self.parts += [part.copy() for part in parts]
        return list(range(first, len(self.parts)))


class Lost(WeightError):
    """A part does not arrive."""


def random_chain(seed: int) -> Counter[str]:
    """Runs one history. Returns the number of its events by kind. Raises AssertionError for wrong bytes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    master = {"a": torch.randn(8, 40), "b": torch.randn(3)}
    entries, memory, counts = layout(SPECS), Memory(), Counter[str]()
    sender = DeltaSender(anchor_every=draw.randint(1, 6))
    replicas = [StagedWeights() for _ in range(draw.randint(1, 3))]
    stored: Version | None = None
    offered: list[tuple[Manifest, list[Any], bytes]] = []
    snapshot = None

    def described() -> tuple[Manifest, list[Any], bytes]:
        assert snapshot is not None
        buckets = tuple(each.bucket for each in delivered)
        manifest = Manifest(version=version, previous=None, tensors=entries, buckets=buckets, probe=PROBE)
        check_layout(manifest)
        counts["deltas"] += sum(bucket.links[-1].delta for bucket in buckets)
        counts["whole"] += sum(not bucket.links[-1].delta for bucket in buckets)
        return manifest, [each.handle for each in delivered], snapshot.memory.tobytes()

    for step in range(draw.randint(2, 14)):
        for tensor in master.values():
            share = draw.choice([0.0, 0.001, 0.02, 1.0])
            tensor += torch.randn_like(tensor) * (torch.rand_like(tensor) < share)
        shards = [(name, 0, tensor) for name, tensor in master.items()]
        snapshot = snapshot_of(shards, entries, probe=PROBE, bucket_bytes=BUCKET_BYTES, last=snapshot)
        version = Version(1, step)
        for _ in range(draw.choice([1, 1, 2])):  # a delivery may be repeated
            delivered = sender.deliver(snapshot, memory, version, previous=stored)  # type: ignore[arg-type]
        if draw.random() < 0.2:
            counts["not recorded"] += 1
            continue
        stored = version
        offered.append(described())
        _stage_some(replicas, offered, memory, draw, counts)
        if draw.random() < 0.2:  # a replica could not get it
            delivered = sender.deliver(snapshot, memory, version, previous=stored, whole=True)  # type: ignore[arg-type]
            assert not any(each.bucket.links[-1].delta for each in delivered)
            if draw.random() < 0.8:
                offered[-1] = described()
                counts["again"] += 1
            _stage_some(replicas, offered, memory, draw, counts)
    for replica in replicas:
        replica.close()
    return counts


def _stage_some(
    replicas: list[StagedWeights],
    offered: list[tuple[Manifest, list[Any], bytes]],
    memory: Memory,
    draw: random.Random,
    counts: Counter[str],
) -> None:
    for replica in replicas:
        if draw.random() < 0.7:
            _stage(replica, draw.choice(offered[-2:]), memory, draw, counts)


def _stage(
    replica: StagedWeights,
    offer: tuple[Manifest, list[Any], bytes],
    memory: Memory,
    draw: random.Random,
    counts: Counter[str],
) -> None:
    manifest, handles, sent = offer
    replica.begin(manifest)
    faulty = draw.random() < 0.4
    try:
        for part in replica.missing:
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
            replica.put(part, data)
    except WeightError as error:
        counts[type(error).__name__] += 1
        assert faulty, "without a fault, every version can be staged"
    else:
        assert not replica.missing
    if replica.missing:
        return  # it has no version
    counts["staged"] += 1
    flat, start = replica.flat, 0
    for bucket in manifest.buckets:
        for piece in bucket.pieces:
            assert flat[piece.offset : piece.offset + piece.nbytes].tobytes() == sent[start : start + piece.nbytes]
            start += piece.nbytes


if __name__ == "__main__":
    totals = Counter[str]()
    for chain in range(int(sys.argv[1])):
        totals += random_chain(chain)
    print(f"{sys.argv[1]} chains, 0 wrong bytes: {dict(totals)}")
