"""The manifest of a published version: the layout and checksums of its bytes, and a probe of what the weights compute.

The tensors of a version stand one after the other in one flat buffer. The bytes travel in buckets: each bucket has some
pieces of the flat buffer, all from one learner rank. So a rank sends its own shards, and no rank needs whole weights.

Before a replica applies the first byte, it checks names, shapes and dtypes (`check_parameters`), that the buckets have
every byte of every tensor once (`check_layout`), and size and checksum of each bucket (`put_bucket`). A mismatch raises
ManifestMismatch, and no weight of the engine changes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from asyncrl.common.version import Version
from asyncrl.errors import HandshakeError, ManifestMismatch, VersionRegression, WeightsDamaged

if TYPE_CHECKING:
    import numpy as np  # light commands import this module, and numpy takes them 0.1 s

ALIGNMENT_BYTES = 64  # a multiple of every dtype's alignment, because tensors are viewed in place

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

Parameters = Mapping[str, tuple[tuple[int, ...], str]]
"""(shape, dtype) of every Hugging Face parameter, by name."""


class ParameterSpec(NamedTuple):
    """One parameter as the engine receives it: Hugging Face name, shape, torch dtype without `torch.`, size in
    bytes. `tied_to` is the name of an earlier parameter that is the same tensor, or ""."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    tied_to: str = ""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter: its Hugging Face name, shape, torch dtype (without `torch.`), and the position of its bytes in the
    flat buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A range of bytes of the flat buffer."""

    offset: int
    nbytes: int


class Link(msgspec.Struct, frozen=True, array_like=True):
    """A step on the way to the bytes of a bucket: the version that it makes, the checksum of the whole bucket after it,
    and the number of bytes that travel for it. These bytes are a `delta` to the link before, or the whole bucket."""

    version: Version
    checksum: str
    nbytes: int
    delta: bool


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """The pieces whose bytes a bucket has, one after the other, and the xxh3-128 checksum of these bytes in hex. With
    `weights.delta` it has links, and its handle is a tuple with one handle for each link. The first
    link is the whole bucket."""

    pieces: tuple[Piece, ...]
    checksum: str
    links: tuple[Link, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed token sequences and their log-probs (nats, temperature 1, each token given its prefix) from the learner.

    `logprobs[i]` has one entry less than `tokens[i]`, because the first token has no prefix.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    def differences_nats(self, engine_logprobs: Sequence[Sequence[float]]) -> list[float]:
        """Returns the absolute difference between the engine's and the learner's log-prob of each token, in nats.

        Raises HandshakeError if the engine has not returned one log-prob for each of the learner's.
        """
        ours_by_row, theirs_by_row = list(map(len, self.logprobs)), list(map(len, engine_logprobs))
        if ours_by_row != theirs_by_row:
            raise HandshakeError(
                "the engine and the learner have different numbers of log-probs for the probe's sequences: the engine "
                f"returned {theirs_by_row}, and the learner computed {ours_by_row}; check that both pools read the "
                "same `model.path`"
            )
        return [
            abs(ours - theirs)
            for our_row, their_row in zip(self.logprobs, engine_logprobs, strict=True)
            for ours, theirs in zip(our_row, their_row, strict=True)
        ]


class ReadBack(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison of an engine's live parameters with a manifest's bytes: the names (vLLM's) of those
    that are as published, of those that differ, and of those that were not compared."""

    alike: frozenset[str] = frozenset()
    differing: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()

    def __or__(self, other: "ReadBack") -> "ReadBack":
        """Joins the result of another worker, which compared other parts of the same parameters."""
        return ReadBack(
            alike=self.alike | other.alike,
            differing=self.differing | other.differing,
            unread=self.unread | other.unread,
        )


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a replica needs to load a version and to verify the result."""

    version: Version
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[Bucket, ...]
    probe: Probe

    @property
    def flat_bytes(self) -> int:
        """Size of the flat buffer."""
        return flat_bytes(self.tensors)

    @property
    def sent_bytes(self) -> int:
        """Bytes that travel for this version: those of all buckets, or with deltas those of each bucket's last link."""
        return sum(bucket.links[-1].nbytes if bucket.links else bucket.nbytes for bucket in self.buckets)


def layout(parameters: Iterable[ParameterSpec]) -> tuple[TensorEntry, ...]:
    """Places parameters one after the other in a flat buffer. A tied parameter has the bytes of the one that it is tied
    to."""
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name, shape, dtype, nbytes, tied_to in parameters:
        offset = entries[tied_to].offset if tied_to else end
        entries[name] = TensorEntry(name=name, shape=shape, dtype=dtype, offset=offset, nbytes=nbytes)
        if not tied_to:
            end += aligned(nbytes)
    return tuple(entries.values())


def aligned(nbytes: int) -> int:
    """Returns the size of a tensor with the gap up to the next one."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def flat_bytes(entries: Iterable[TensorEntry]) -> int:
    """Returns the size of the flat buffer that has these tensors."""
    return max((entry.offset + entry.nbytes for entry in entries), default=0)


def into_buckets(pieces: Iterable[Piece], bucket_bytes: int) -> Iterator[tuple[Piece, ...]]:
    """Divides pieces into buckets of `bucket_bytes`; the last one may be smaller. A piece may be cut.

    >>> list(into_buckets([Piece(0, 6), Piece(64, 2)], 4))
    [(Piece(offset=0, nbytes=4),), (Piece(offset=4, nbytes=2), Piece(offset=64, nbytes=2))]
    """
    bucket: list[Piece] = []
    room = bucket_bytes
    for piece in pieces:
        offset, left = piece.offset, piece.nbytes
        while left:
            taken = min(left, room)
            bucket.append(Piece(offset, taken))
            offset, left, room = offset + taken, left - taken, room - taken
            if not room:
                yield tuple(bucket)
                bucket, room = [], bucket_bytes
    if bucket:
        yield tuple(bucket)


def checksum(parts: Iterable[Bytes]) -> str:
    """Returns the xxh3-128 checksum of bytes that are given in one or more parts, in hex."""
    hashed = xxhash.xxh3_128()
    for part in parts:
        hashed.update(part.data)
    return hashed.hexdigest()


def check_manifest(manifest: Manifest, expected: Parameters) -> None:
    """Raises ManifestMismatch unless the manifest has the expected parameters, and its buckets have every byte of them
    once. Called before the first byte is fetched."""
    check_parameters(manifest, expected)
    check_layout(manifest)


def check_layout(manifest: Manifest) -> None:
    """Raises ManifestMismatch unless the buckets have every byte of every tensor, no byte twice, and none outside of
    the flat buffer. The links of a bucket, if it has some, must begin with the whole bucket and end with its
    checksum."""
    refused = f"weights {manifest.version}: "
    for index, bucket in enumerate(manifest.buckets):
        if bucket.links and (bucket.links[0].delta or bucket.links[-1].checksum != bucket.checksum):
            raise ManifestMismatch(
                f"{refused}the links of bucket {index} (the whole bucket, then deltas) do not lead to its bytes; "
                "nothing was applied"
            )
    pieces = sorted((piece for bucket in manifest.buckets for piece in bucket.pieces), key=lambda piece: piece.offset)
    for piece, after in pairwise(pieces):
        if piece.offset + piece.nbytes > after.offset:
            raise ManifestMismatch(f"{refused}byte {after.offset} would arrive twice; nothing was applied")
    if pieces and not (pieces[0].offset >= 0 and pieces[-1].offset + pieces[-1].nbytes <= manifest.flat_bytes):
        raise ManifestMismatch(
            f"{refused}a bucket has bytes outside of the {manifest.flat_bytes} bytes of all tensors; nothing was "
            "applied"
        )
    following = iter(pieces)
    start = end = 0  # the bytes from `start` to `end` arrive without a gap; the tensor must begin and end within them
    for entry in sorted(manifest.tensors, key=lambda entry: entry.offset):
        while end < entry.offset + entry.nbytes:
            added = next(following, None)
            if added is None:
                break
            start = start if added.offset == end else added.offset
            end = added.offset + added.nbytes
        if not start <= entry.offset <= entry.offset + entry.nbytes <= end:
            raise ManifestMismatch(
                f"{refused}the buckets do not have all {entry.nbytes} bytes of {entry.name}; nothing was applied"
            )


def place(bucket: Bucket, data: Bytes, *, flat: Bytes) -> None:
    """Puts the bytes of a bucket into their places in the flat buffer."""
    start = 0
    for piece in bucket.pieces:
        flat[piece.offset : piece.offset + piece.nbytes] = data[start : start + piece.nbytes]
        start += piece.nbytes


def put_bucket(manifest: Manifest, index: int, data: Bytes, *, flat: Bytes, link: Link | None = None) -> None:
    """Puts the bytes of bucket `index` into their places in the flat buffer, and verifies them there. With `link`, they
    are the bucket's bytes as of this link, and must have the link's checksum.

    Raises WeightsDamaged unless `data` has the size and the checksum that the manifest says.
    """
    refused, bucket = f"weights {manifest.version}: bucket {index}", manifest.buckets[index]
    if link is not None:
        refused += f" as of {link.version}"
    if data.nbytes != bucket.nbytes:
        raise WeightsDamaged(
            f"{refused} has {data.nbytes} bytes, but the manifest says {bucket.nbytes}; nothing was applied"
        )
    place(bucket, data, flat=flat)
    found = checksum(flat[piece.offset : piece.offset + piece.nbytes] for piece in bucket.pieces)
    expected = bucket.checksum if link is None else link.checksum
    if found != expected:
        ranges = [(piece.offset, piece.offset + piece.nbytes) for piece in bucket.pieces]
        names = [
            entry.name
            for entry in manifest.tensors
            if any(entry.offset < end and start < entry.offset + entry.nbytes for start, end in ranges)
        ]
        raise WeightsDamaged(
            f"{refused} (with {', '.join(names[:3])}) has the checksum {found}, but the manifest says "
            f"{expected}, so its bytes are damaged; nothing was applied"
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
    """Raises ManifestMismatch unless the parameters `published` equal those that the engine's model has, `expected`.
    `what` is the start of the message."""
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

    Raises VersionRegression for an older step of the same incarnation, and for an older incarnation (F13 in
    docs/faults.md).
    """
    if loaded is None or offered > loaded:
        return True
    if offered == loaded:
        return False
    raise VersionRegression(
        f"weights {offered} were offered to a replica that has loaded {loaded}; versions must not go back"
    )
