"""A manifest refuses all data that differs from what was published, and names it."""

import itertools
import math
import re

import pytest

from asyncrl.common.version import Version
from asyncrl.errors import HandshakeError, ManifestMismatch, VersionRegression
from asyncrl.weights.manifest import (
    ALIGNMENT_BYTES,
    Bucket,
    Manifest,
    Probe,
    check_buckets,
    check_parameters,
    checksum,
    is_news,
    layout,
)

PARAMETERS = [
    ("a.weight", (2, 3), "float32", 24),
    ("b.weight", (5,), "float32", 20),
    ("c.weight", (64,), "bfloat16", 128),
]
EXPECTED = {name: (shape, dtype) for name, shape, dtype, _ in PARAMETERS}


def manifest_of(parameters: list[tuple[str, tuple[int, ...], str, int]], data: bytes = b"bytes") -> Manifest:
    return Manifest(
        version=Version(1, 3),
        previous=Version(1, 2),
        tensors=layout(parameters, 2**20),
        buckets=(Bucket(nbytes=len(data), checksum=checksum(memoryview(data))),),
        probe=Probe(tokens=(), logprobs=()),
    )


def test_layout_aligns_tensors_and_never_overlaps_them() -> None:
    entries = layout(PARAMETERS, 2**20)
    assert [entry.offset % ALIGNMENT_BYTES for entry in entries] == [0, 0, 0]
    for before, after in itertools.pairwise(entries):
        assert before.offset + before.nbytes <= after.offset


def test_layout_gives_an_oversize_tensor_a_bucket_of_its_own() -> None:
    entries = layout([("a", (4,), "float32", 16), ("big", (64,), "float32", 256), ("c", (4,), "float32", 16)], 128)
    assert [(entry.name, entry.bucket, entry.offset) for entry in entries] == [("a", 0, 0), ("big", 1, 0), ("c", 2, 0)]


@pytest.mark.fault("F12")
def test_the_expected_parameters_pass() -> None:
    check_parameters(manifest_of(PARAMETERS), EXPECTED)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        (PARAMETERS[:2], "c.weight is missing"),
        ([*PARAMETERS, ("d.weight", (1,), "float32", 4)], "d.weight does not exist"),
        ([("a.weight", (3, 2), "float32", 24), *PARAMETERS[1:]], r"a.weight is float32\[3, 2\]"),
        ([("a.weight", (2, 3), "bfloat16", 12), *PARAMETERS[1:]], r"a.weight is bfloat16\[2, 3\]"),
        ([*PARAMETERS, PARAMETERS[0]], "appears twice"),
    ],
)
@pytest.mark.fault("F12")
def test_a_wrong_name_shape_or_dtype_is_refused_and_named(
    parameters: list[tuple[str, tuple[int, ...], str, int]], named: str
) -> None:
    with pytest.raises(ManifestMismatch, match=named):
        check_parameters(manifest_of(parameters), EXPECTED)


BYTES = b"b" * 256


@pytest.mark.parametrize(
    ("buckets", "named"),
    [
        ([b"b" * 255 + b"c"], "bucket 0 .with a.weight.* has the checksum"),
        ([BYTES[1:]], "255 bytes, but the manifest says 256"),
        ([], "0 buckets arrived, but the manifest has 1"),
        ([BYTES, b""], "2 buckets arrived"),
    ],
)
@pytest.mark.fault("F12")
def test_a_flipped_bit_a_missing_byte_or_a_missing_bucket_is_refused(buckets: list[bytes], named: str) -> None:
    manifest = manifest_of(PARAMETERS, BYTES)
    check_buckets(manifest, [memoryview(BYTES)])
    with pytest.raises(ManifestMismatch, match=named):
        check_buckets(manifest, [memoryview(data) for data in buckets])


@pytest.mark.fault("F12")
def test_a_tensor_beyond_its_bucket_is_refused_and_named() -> None:
    manifest = manifest_of(PARAMETERS, BYTES[:100])
    with pytest.raises(ManifestMismatch, match=r"ends at byte .* of bucket 0, but the manifest has no such byte"):
        check_buckets(manifest, [memoryview(BYTES[:100])])


@pytest.mark.fault("F13")
def test_a_repeated_version_is_no_news_and_an_older_one_is_a_regression() -> None:
    assert is_news(Version(1, 3), None)
    assert is_news(Version(1, 4), Version(1, 3))
    assert is_news(Version(2, 0), Version(1, 9))
    assert not is_news(Version(1, 3), Version(1, 3))
    for older in (Version(1, 2), Version(0, 9)):
        with pytest.raises(VersionRegression):
            is_news(older, Version(1, 3))


def test_the_probe_shows_the_worst_token_and_never_swallows_a_nan() -> None:
    probe = Probe(tokens=((1, 2, 3), (4, 5)), logprobs=((-1.0, -2.0), (-3.0,)))
    assert probe.max_difference_nats([[-1.0, -2.5], [-3.25]]) == 0.5
    assert math.isnan(probe.max_difference_nats([[math.nan, -2.0], [-3.0]]))
    assert math.isnan(probe.max_difference_nats([[-1.0, -2.0], [math.nan]]))


@pytest.mark.parametrize("scores", [[[-1.0], [-3.0]], [[-1.0, -2.0]], [[-1.0, -2.0], [-3.0], []]])
@pytest.mark.fault("F25")
def test_log_probs_not_as_many_as_the_probes_tokens_fail_the_handshake(scores: list[list[float]]) -> None:
    probe = Probe(tokens=((1, 2, 3), (4, 5)), logprobs=((-1.0, -2.0), (-3.0,)))
    counts = re.escape(f"{[len(row) for row in scores]} log-probs for the probe's sequences, the learner [2, 1]")
    with pytest.raises(HandshakeError, match=counts):
        probe.max_difference_nats(scores)


def test_a_version_label_that_does_not_parse_is_an_error() -> None:
    assert Version.parse("2.140") == Version(2, 140)
    for label in ("default", "2", "2.", ".4", "2.x", "-1.2"):
        with pytest.raises(ValueError, match="weight version"):
            Version.parse(label)
