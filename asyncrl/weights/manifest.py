"""The manifest of a published version: the layout and checksums of its bytes, and a probe of what the weights compute.

Before a replica applies the first byte, it checks names, shapes and dtypes (`check_parameters`), and number, sizes and
checksums of the buckets (`check_buckets`). A mismatch raises ManifestMismatch and changes nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import xxhash

from asyncrl.common.version import Version
from asyncrl.errors import HandshakeError, ManifestMismatch, VersionRegression

ALIGNMENT_BYTES = 64  # a multiple of every dtype's alignment, because tensors are viewed in place

Parameters = Mapping[str, tuple[tuple[int, ...], str]]
"""(shape, dtype) of every Hugging Face parameter, by name."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter: its Hugging Face name, shape, torch dtype (without `torch.`), and the position of its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    nbytes: int


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """The size of one bucket, and its xxh3-128 checksum in hex."""

    nbytes: int
    checksum: str


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed token sequences and their log-probs (nats, temperature 1, each token given its prefix) from the learner.

    `logprobs[i]` has one entry less than `tokens[i]`, because the first token has no prefix.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    def max_difference_nats(self, engine_logprobs: Sequence[Sequence[float]]) -> float:
        """Returns the largest absolute difference over all tokens. It is NaN if either side has a NaN, so that it
        fails every limit.

        Raises HandshakeError if the engine has not returned one log-prob for each of the learner's.
        """
        ours_by_row, theirs_by_row = list(map(len, self.logprobs)), list(map(len, engine_logprobs))
        if ours_by_row != theirs_by_row:
            raise HandshakeError(
                f"the engine returned {theirs_by_row} log-probs for the probe's sequences, the learner {ours_by_row}; "
                "check that both pools read the same `model.path`"
            )
        differences = [
            abs(ours - theirs)
            for our_row, their_row in zip(self.logprobs, engine_logprobs, strict=True)
            for ours, theirs in zip(our_row, their_row, strict=True)
        ]
        # max() would ignore a NaN
        return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a replica needs to load a version and to verify the result."""

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
    """Places parameters (name, shape, dtype, nbytes) one after the other into buckets of at most `bucket_bytes`.

    A tensor that is larger than `bucket_bytes` gets a bucket of its own.
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
    """Returns the size in bytes of each bucket by its index, in the order of first appearance."""
    sizes: dict[int, int] = {}
    for entry in entries:
        sizes[entry.bucket] = max(sizes.get(entry.bucket, 0), entry.offset + entry.nbytes)
    return sizes


def checksum(data: memoryview) -> str:
    """Returns the xxh3-128 checksum of the bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def check_buckets(manifest: Manifest, buckets: Sequence[memoryview]) -> None:
    """Raises ManifestMismatch unless `buckets` match the manifest byte for byte and every tensor lies in its bucket."""
    refused = f"weights {manifest.version}: "
    if len(buckets) != len(manifest.buckets):
        raise ManifestMismatch(
            f"{refused}{len(buckets)} buckets arrived, but the manifest has {len(manifest.buckets)}; nothing was "
            "applied"
        )
    for entry in manifest.tensors:
        end = entry.offset + entry.nbytes
        if entry.bucket >= len(buckets) or end > manifest.buckets[entry.bucket].nbytes:
            raise ManifestMismatch(
                f"{refused}{entry.name} ends at byte {end} of bucket {entry.bucket}, but the manifest has no such "
                "byte; nothing was applied"
            )
    for index, (bucket, data) in enumerate(zip(manifest.buckets, buckets, strict=True)):
        if data.nbytes != bucket.nbytes:
            raise ManifestMismatch(
                f"{refused}bucket {index} has {data.nbytes} bytes, but the manifest says {bucket.nbytes}; "
                "nothing was applied"
            )
        found = checksum(data)
        if found != bucket.checksum:
            names = ", ".join(entry.name for entry in manifest.tensors_of(index)[:3])
            raise ManifestMismatch(
                f"{refused}bucket {index} (with {names}) has the checksum {found}, but the manifest says "
                f"{bucket.checksum}, so its bytes are damaged; nothing was applied"
            )


def check_parameters(manifest: Manifest, expected: Parameters) -> None:
    """Raises ManifestMismatch unless the manifest has exactly the expected names, shapes and dtypes.

    `expected` gives (shape, dtype) for each Hugging Face parameter name, from the config of the engine's model.
    """
    published = {entry.name: (entry.shape, entry.dtype) for entry in manifest.tensors}
    if len(published) != len(manifest.tensors):
        raise ManifestMismatch(f"weights {manifest.version}: a parameter name appears twice; nothing was applied")
    check_published(published, expected, what=f"weights {manifest.version}")


def check_published(published: Parameters, expected: Parameters, *, what: str) -> None:
    """Raises ManifestMismatch unless `published` equals `expected`. `what` is the start of the message."""
    problems = [f"{name} is missing" for name in expected if name not in published]
    problems += [f"{name} does not exist in the engine's model" for name in published if name not in expected]
    for name, (shape, dtype) in expected.items():
        found = published.get(name)
        if found is not None and found != (shape, dtype):
            problems.append(f"{name} is {found[1]}{list(found[0])}, but {dtype}{list(shape)} in the engine's model")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ManifestMismatch(
            f"{what}: {'; '.join(problems[:3])}{more}; nothing was applied. "
            "Check that both pools use the same `model.path` and `model.dtype`"
        )


def is_news(offered: Version, loaded: Version | None) -> bool:
    """Returns True if a replica should load `offered`, False if it has loaded this version already.

    Raises VersionRegression for an older step of the same incarnation, and for an older incarnation (F13).
    """
    if loaded is None or offered > loaded:
        return True
    if offered == loaded:
        return False
    raise VersionRegression(
        f"weights {offered} were offered to a replica that has loaded {loaded}; versions must not go back"
    )
