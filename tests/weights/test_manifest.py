"""A manifest refuses all data that differs from what was published, and names it."""

import itertools
import re
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from asyncrl.common.version import Version
from asyncrl.errors import HandshakeError, ManifestMismatch, VersionRegression, WeightsDamaged
from asyncrl.weights.manifest import (
    ALIGNMENT_BYTES,
    Bucket,
    Bytes,
    Manifest,
    ParameterSpec,
    Piece,
    Probe,
    check_layout,
    check_parameters,
    checksum,
    flat_bytes,
    into_buckets,
    is_news,
    layout,
    put_bucket,
)

PARAMETERS = [
    ParameterSpec("a.weight", (2, 3), "float32", 24),
    ParameterSpec("b.weight", (5,), "float32", 20),
    ParameterSpec("c.weight", (64,), "bfloat16", 128),
]
EXPECTED = {spec.name: (spec.shape, spec.dtype) for spec in PARAMETERS}
FLAT = np.arange(256, dtype=np.uint8)
"""A flat buffer of `PARAMETERS`, with the gaps."""


def manifest_of(parameters: Sequence[ParameterSpec], pieces: Sequence[Sequence[Piece]] | None = None) -> Manifest:
    """Returns a manifest of `FLAT` with these pieces in its buckets. By default there is one bucket with all bytes."""
    tensors = layout(parameters)
    by_bucket = [[Piece(entry.offset, entry.nbytes) for entry in tensors]] if pieces is None else pieces
    return Manifest(
        version=Version(1, 3),
        tensors=tensors,
        buckets=tuple(
            Bucket(pieces=tuple(pieces), checksum=checksum(FLAT[p.offset : p.offset + p.nbytes] for p in pieces))
            for pieces in by_bucket
        ),
        probe=Probe(tokens=(), logprobs=()),
    )


def bytes_of(bucket: Bucket) -> Bytes:
    """Returns the bytes that the learner sends for a bucket."""
    return np.concatenate([FLAT[piece.offset : piece.offset + piece.nbytes] for piece in bucket.pieces])


def test_layout_aligns_tensors_and_never_overlaps_them() -> None:
    entries = layout(PARAMETERS)
    assert [entry.offset % ALIGNMENT_BYTES for entry in entries] == [0, 0, 0]
    for before, after in itertools.pairwise(entries):
        assert before.offset + before.nbytes <= after.offset


def test_a_tied_parameter_has_the_bytes_of_the_other() -> None:
    entries = layout([*PARAMETERS, ParameterSpec("d.weight", (2, 3), "float32", 24, tied_to="a.weight")])
    assert (entries[3].offset, entries[3].nbytes) == (entries[0].offset, entries[0].nbytes)
    assert flat_bytes(entries) == 256, "its bytes do not travel twice"
    check_layout(manifest_of([*PARAMETERS, ParameterSpec("d", (2, 3), "float32", 24, tied_to="a.weight")], PIECES))


@pytest.mark.parametrize("size", [1, 5, 24, 100, 172, 1000])
def test_buckets_have_every_byte_once_and_one_size(size: int) -> None:
    pieces = [Piece(0, 24), Piece(64, 20), Piece(128, 128)]
    buckets = list(into_buckets(pieces, size))
    sizes = [sum(piece.nbytes for piece in bucket) for bucket in buckets]
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= size
    found = [byte for bucket in buckets for p in bucket for byte in range(p.offset, p.offset + p.nbytes)]
    assert found == [byte for p in pieces for byte in range(p.offset, p.offset + p.nbytes)]


@pytest.mark.fault("F12")
def test_the_expected_parameters_pass() -> None:
    check_parameters(manifest_of(PARAMETERS), EXPECTED)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        (PARAMETERS[:2], "c.weight is missing"),
        ([*PARAMETERS, ParameterSpec("d.weight", (1,), "float32", 4)], "d.weight does not exist"),
        ([ParameterSpec("a.weight", (3, 2), "float32", 24), *PARAMETERS[1:]], r"a.weight is float32\[3, 2\]"),
        ([ParameterSpec("a.weight", (2, 3), "bfloat16", 12), *PARAMETERS[1:]], r"a.weight is bfloat16\[2, 3\]"),
    ],
)
@pytest.mark.fault("F12")
def test_a_wrong_name_shape_or_dtype_is_refused_and_named(parameters: list[ParameterSpec], named: str) -> None:
    with pytest.raises(ManifestMismatch, match=named):
        check_parameters(manifest_of(parameters), EXPECTED)


@pytest.mark.fault("F12")
def test_a_name_that_appears_twice_is_refused() -> None:
    manifest = manifest_of(PARAMETERS)
    twice = msgspec.structs.replace(manifest, tensors=(*manifest.tensors, manifest.tensors[0]))
    with pytest.raises(ManifestMismatch, match="appears twice"):
        check_parameters(twice, EXPECTED)


PIECES = [[Piece(64, 20), Piece(0, 10)], [Piece(128, 128), Piece(10, 14)]]
"""Two buckets with all bytes of `PARAMETERS`, in another order."""


@pytest.mark.fault("F12")
def test_bytes_from_any_bucket_and_in_any_order_get_their_places() -> None:
    manifest = manifest_of(PARAMETERS, PIECES)
    check_layout(manifest)
    flat = np.zeros(manifest.flat_bytes, dtype=np.uint8)
    for index in (1, 0):
        put_bucket(manifest, index, bytes_of(manifest.buckets[index]), flat=flat)
    for entry in manifest.tensors:
        place = slice(entry.offset, entry.offset + entry.nbytes)
        assert np.array_equal(flat[place], FLAT[place])


@pytest.mark.parametrize(
    ("pieces", "named"),
    [
        ([PIECES[0]], "do not have all 24 bytes of a.weight"),
        ([PIECES[1]], "do not have all 24 bytes of a.weight"),
        ([[Piece(0, 24), Piece(64, 20), Piece(128, 127)]], "do not have all 128 bytes of c.weight"),
        ([[Piece(0, 24), Piece(65, 19), Piece(128, 128)]], "do not have all 20 bytes of b.weight"),
        ([*PIECES, [Piece(10, 1)]], "byte 10 would arrive twice"),
        ([*PIECES, [Piece(256, 1)]], "outside of the [0-9]+ bytes of all tensors"),
        ([*PIECES, [Piece(-1, 1)]], "outside of the [0-9]+ bytes of all tensors"),
        ([], "do not have all 24 bytes of a.weight"),
    ],
)
@pytest.mark.fault("F12")
def test_buckets_that_do_not_make_up_the_weights_are_refused(pieces: list[list[Piece]], named: str) -> None:
    with pytest.raises(ManifestMismatch, match=named):
        check_layout(manifest_of(PARAMETERS, pieces))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda data: np.where(np.arange(data.size) == 3, data + 1, data),
            "bucket 0 .with a.weight, b.weight. has the",
        ),
        (lambda data: data[1:], "29 bytes, but the manifest says 30"),
        (lambda data: data[:0], "0 bytes, but the manifest says 30"),
    ],
)
@pytest.mark.fault("F12")
def test_a_flipped_bit_or_a_missing_byte_is_refused(change: Callable[[Bytes], Bytes], named: str) -> None:
    manifest = manifest_of(PARAMETERS, PIECES)
    data = bytes_of(manifest.buckets[0])
    flat = np.zeros(manifest.flat_bytes, dtype=np.uint8)
    with pytest.raises(WeightsDamaged, match=named):
        put_bucket(manifest, 0, change(data).astype(np.uint8), flat=flat)
    put_bucket(manifest, 0, data, flat=flat)


@pytest.mark.fault("F13")
def test_a_repeated_version_is_no_news_and_an_older_one_is_a_regression() -> None:
    assert is_news(Version(1, 3), None)
    assert is_news(Version(1, 4), Version(1, 3))
    assert is_news(Version(2, 0), Version(1, 9))
    assert not is_news(Version(1, 3), Version(1, 3))
    for older in (Version(1, 2), Version(0, 9)):
        with pytest.raises(VersionRegression):
            is_news(older, Version(1, 3))


def test_the_probe_has_the_difference_of_every_token() -> None:
    probe = Probe(tokens=((1, 2, 3), (4, 5)), logprobs=((-1.0, -2.0), (-3.0,)))
    assert probe.differences_nats([[-1.0, -2.5], [-3.25]]) == [0.0, 0.5, 0.25]


@pytest.mark.parametrize("scores", [[[-1.0], [-3.0]], [[-1.0, -2.0]], [[-1.0, -2.0], [-3.0], []]])
@pytest.mark.fault("F25")
def test_log_probs_not_as_many_as_the_probes_tokens_fail_the_handshake(scores: list[list[float]]) -> None:
    probe = Probe(tokens=((1, 2, 3), (4, 5)), logprobs=((-1.0, -2.0), (-3.0,)))
    counts = re.escape(f"the engine returned {[len(row) for row in scores]}, and the learner computed [2, 1]")
    with pytest.raises(HandshakeError, match=counts):
        probe.differences_nats(scores)


def test_a_version_label_that_does_not_parse_is_an_error() -> None:
    assert Version.parse("2.140") == Version(2, 140)
    for label in ("default", "2", "2.", ".4", "2.x", "-1.2"):
        with pytest.raises(ValueError, match="weight version"):
            Version.parse(label)
