"""A publication within one process: stages weights for an engine, without ranks and store."""

from collections.abc import Iterable, Sequence

from asyncrl.common.version import Version
from asyncrl.weights.manifest import Manifest, Probe, TensorEntry
from asyncrl.weights.publisher import OwnShard, Snapshot, deliver, snapshot_of
from asyncrl.weights.staging import StagedWeights
from asyncrl.weights.transports.interfaces import Transport

RANKS = 2
NO_PROBE = Probe(tokens=(), logprobs=())


def staged(snapshot: Snapshot, version: Version) -> tuple[Manifest, StagedWeights]:
    """Returns the manifest of the snapshot of a whole model, and its staged weights."""
    manifest = Manifest(
        version=version,
        tensors=snapshot.entries,
        buckets=snapshot.described(),
        probe=NO_PROBE,
    )
    weights = StagedWeights()
    weights.begin(manifest)
    for part, data in zip(weights.missing, snapshot.buckets, strict=True):
        weights.put(part, data)
    return manifest, weights


async def delivered(
    shards: Iterable[OwnShard], entries: Sequence[TensorEntry], version: Version, transport: Transport
) -> tuple[Manifest, StagedWeights]:
    """Sends whole tensors as two learner ranks would: each one the half of the rows of every tensor. Returns the
    manifest, and what a replica has staged."""
    by_rank: list[list[OwnShard]] = [[] for _ in range(RANKS)]
    for name, first, tensor in shards:
        for rank, rows in enumerate(tensor.tensor_split(RANKS)):
            by_rank[rank].append((name, first, rows))
            first += rows.numel()
    snapshots = [snapshot_of(own, entries, bucket_bytes=2**18, shared=True) for own in by_rank]
    sent = [
        bucket
        for rank, snapshot in enumerate(snapshots)
        for bucket in deliver(snapshot, transport.sender(rank, RANKS), version)
    ]
    buckets = tuple(each.bucket for each in sent)
    manifest = Manifest(version=version, tensors=tuple(entries), buckets=buckets, probe=NO_PROBE)
    weights = StagedWeights()
    weights.begin(manifest)
    for part in weights.missing:
        weights.put(part, await transport.receive(sent[part.bucket].handle, timeout_s=30.0))
    return manifest, weights
