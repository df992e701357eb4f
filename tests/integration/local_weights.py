"""A publication within one process: stages a rank's snapshot for an engine, without ranks, store or transport."""

from asyncrl.common.version import Version
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.publisher import Snapshot
from asyncrl.weights.staging import StagedWeights


def staged(snapshot: Snapshot, version: Version) -> tuple[Manifest, StagedWeights]:
    """Returns the manifest of the snapshot of a whole model, and its staged weights."""
    manifest = Manifest(
        version=version,
        previous=None,
        tensors=snapshot.entries,
        buckets=snapshot.described(),
        probe=snapshot.probe,
    )
    weights = StagedWeights()
    weights.begin(manifest)
    for part, data in zip(weights.missing, snapshot.buckets, strict=True):
        weights.put(part, data)
    return manifest, weights
