"""The manifest of one published version: what its bytes are, how to verify them, and a probe of what they compute.

A replica checks names, shapes and dtypes (`check_parameters`) and the buckets' number, sizes and checksums
(`check_buckets`) before it applies the first byte: a mismatch is typed and changes nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import xxhash

from asyncrl.buffer.records import Version
from asyncrl.errors import HandshakeError, ManifestMismatch, VersionRegression

ALIGNMENT_BYTES = 64  # tensors are viewed in place: every dtype's alignment divides it

Parameters = Mapping[str, tuple[tuple[int, ...], str]]
"""(shape, dtype) of every Hugging Face parameter, by name."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter: Hugging Face name, shape, torch dtype without the `torch.` prefix, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    nbytes: int


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of bytes and its xxh3-128 checksum in hex."""

    nbytes: int
    checksum: str


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed sequences and the learner's own temperature-1 log-probs of their tokens given the prefix (nats).

    `logprobs[i]` has one entry less than `tokens[i]`: the first token has no prefix.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    def max_difference_nats(self, engine_logprobs: Sequence[Sequence[float]]) -> float:
        """Largest absolute difference over all tokens. NaN when either side has one, so that it fails any limit.

        HandshakeError when the engine's log-probs are not as many as the learner's: the pools do not fit together.
        """
        ours_by_row, theirs_by_row = list(map(len, self.logprobs)), list(map(len, engine_logprobs))
        if ours_by_row != theirs_by_row:
            raise HandshakeError(
                f"the engine scored the probe's sequences with {theirs_by_row} log-probs, the learner with "
                f"{ours_by_row}: do both pools read the same `model.path`?"
            )
        differences = [
            abs(ours - theirs)
            for our_row, their_row in zip(self.logprobs, engine_logprobs, strict=True)
            for ours, theirs in zip(our_row, their_row, strict=True)
        ]
        # max() alone would pass over a NaN
        return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that a replica needs to load a version and to prove that it did."""

    version: Version
    previous: Version | None
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[Bucket, ...]
    probe: Probe

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def tensors_of(self, bucket: int) -> list[TensorEntry]:
        return [entry for entry in self.tensors if entry.bucket == bucket]


def layout(parameters: Iterable[tuple[str, tuple[int, ...], str, int]], bucket_bytes: int) -> tuple[TensorEntry, ...]:
    """Places parameters (name, shape, dtype, nbytes) in order into buckets of at most `bucket_bytes`.

    A tensor larger than a bucket gets one of its own.
    """
    entries: list[TensorEntry] = []
    bucket, offset = 0, 0
    for name, shape, dtype, nbytes in parameters:
        if offset and offset + nbytes > bucket_bytes:
            bucket, offset = bucket + 1, 0
        entries.append(
            TensorEntry(name=name, shape=shape, dtype=dtype, bucket=bucket, offset=offset, nbytes=nbytes),
        )
        offset += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(entries)


def bucket_sizes(entries: Iterable[TensorEntry]) -> dict[int, int]:
    """Bytes of each bucket by its index, in the order of first appearance."""
    sizes: dict[int, int] = {}
    for entry in entries:
        sizes[entry.bucket] = max(sizes.get(entry.bucket, 0), entry.offset + entry.nbytes)
    return sizes


def checksum(data: memoryview) -> str:
    """xxh3-128 of the bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def check_buckets(manifest: Manifest, buckets: Sequence[memoryview]) -> None:
    """Raises ManifestMismatch unless `buckets` are the manifest's, byte for byte, and every tensor lies within its."""
    refused = f"weights {manifest.version}: "
    if len(buckets) != len(manifest.buckets):
        raise ManifestMismatch(
            f"{refused}{len(buckets)} buckets arrived, the manifest has {len(manifest.buckets)}; nothing was applied"
        )
    for entry in manifest.tensors:
        end = entry.offset + entry.nbytes
        if entry.bucket >= len(buckets) or end > manifest.buckets[entry.bucket].nbytes:
            raise ManifestMismatch(
                f"{refused}{entry.name} ends at byte {end} of bucket {entry.bucket}, which is not there; "
                "nothing was applied"
            )
    for index, (bucket, data) in enumerate(zip(manifest.buckets, buckets, strict=True)):
        if data.nbytes != bucket.nbytes:
            raise ManifestMismatch(
                f"{refused}bucket {index} has {data.nbytes} bytes, the manifest says {bucket.nbytes}; "
                "nothing was applied"
            )
        found = checksum(data)
        if found != bucket.checksum:
            names = ", ".join(entry.name for entry in manifest.tensors_of(index)[:3])
            raise ManifestMismatch(
                f"{refused}checksum of bucket {index} (with {names}) is {found}, the manifest says "
                f"{bucket.checksum}; nothing was applied"
            )


def check_parameters(manifest: Manifest, expected: Parameters) -> None:
    """Raises ManifestMismatch unless the manifest has exactly the expected names with their shapes and dtypes.

    `expected` maps a Hugging Face parameter name to (shape, dtype) as the engine's own model config implies.
    """
    published = {entry.name: (entry.shape, entry.dtype) for entry in manifest.tensors}
    if len(published) != len(manifest.tensors):
        raise ManifestMismatch(f"weights {manifest.version}: a parameter name appears twice; nothing was applied")
    check_published(published, expected, what=f"weights {manifest.version}")


def check_published(published: Parameters, expected: Parameters, *, what: str) -> None:
    """`check_parameters` of what was read from no manifest: (shape, dtype) by name. `what` begins the message."""
    problems = [f"{name} is missing" for name in expected if name not in published]
    problems += [f"{name} is unknown to the engine's model" for name in published if name not in expected]
    for name, (shape, dtype) in expected.items():
        found = published.get(name)
        if found is not None and found != (shape, dtype):
            problems.append(f"{name} is {found[1]}{list(found[0])}, the engine's model has {dtype}{list(shape)}")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ManifestMismatch(
            f"{what}: {'; '.join(problems[:3])}{more}; nothing was applied. "
            "Do both pools use the same `model.path` and `model.dtype`?"
        )


def is_news(offered: Version, loaded: Version | None) -> bool:
    """Whether a replica should load `offered`: False for a repeated version.

    Raises VersionRegression for an older step of the same incarnation or for an older incarnation (F13).
    """
    if loaded is None or offered > loaded:
        return True
    if offered == loaded:
        return False
    raise VersionRegression(f"weights {offered} were offered to a replica that has loaded {loaded}")
