"""The records for `asyncrl audit`: what each step trained, in the file `audit/steps-<incarnation>.msgpack` of the run.

The learner writes a file for each incarnation and never changes a record. A record of a step takes 40 to 50 bytes for
each sample, and 20 for each group. A record is written after the ack of its step and before the checkpoint of that step
is begun. So after a restart from a checkpoint of step k, the records of all steps before k exist.

A record is one frame: the length of its payload (4 bytes), the xxh3-64 of the payload (8 bytes), and the payload in
MessagePack. A killed writer can leave an incomplete last frame, and a machine that lost its power can leave zeros at
the end. A reader skips both, and sets `ReadRecords.torn`. The audit accepts such an end only of a run that
runs or was killed, and only the record of the last step in steps.jsonl may then be missing.
"""

import os
import struct
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from asyncrl.buffer.ledger import LedgerEntry
from asyncrl.buffer.records import FilteredGroup, VersionSpan
from asyncrl.common.version import Lineage, Version
from asyncrl.errors import FileRefused
from asyncrl.run_files import UNREADABLE, opened
from asyncrl.weights.manifest import Manifest

AUDIT = "audit"
"""Folder of the records in a run's directory."""
_HEAD = struct.Struct("<IQ")
_LARGEST_FILE, _LONGEST_RECORD = 2**32, 2**26
"""Largest file, and longest payload of a record, bytes: a step of a million samples."""
_LONGEST_SEARCHED = 2**22
"""Longest payload that is searched for in a frame whose length is wrong, bytes: a step of 80,000 samples. The search
takes two seconds."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a machine on which the bits of a step's result depend, besides the step's input: the processor,
    the ranks and their threads, and the versions of packages."""

    processor: str
    ranks: int
    threads: int
    packages: dict[str, str]


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """The start of an incarnation, the last one of `lineage`. `settings` are the run's shared settings by dotted
    key. `prompts` says how many prompts the training data have in one row, in two rows, and so on, by the part of a
    mixture (`{"": {1: 90, 2: 5}}`); it is empty if an earlier version of asyncrl wrote the record."""

    lineage: Lineage
    settings: dict[str, object]
    machine: Machine
    prompts: dict[str, dict[int, int]] = {}


class TrainedSample(msgspec.Struct, frozen=True, array_like=True):
    """A sample of a step. `tokens` is the number of its completion tokens, and `spans` has their versions in order.
    `reward` is None if it failed. `trained` is False if a filter masked the sample, if it has no token that may be
    trained, or if its reward failed. `row` is the xxh3-64 of its tokens, log-probs, versions and mask
    (`asyncrl.data.row_checksums`)."""

    tokens: int
    spans: tuple[VersionSpan, ...]
    reward: float | None
    trained: bool
    row: int


class TrainedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group of a step. `incarnation` is that of its reserve, `max_staleness_versions` the η of its ticket.

    If `extended`, `deadline` is later than that of the ticket, and tokens older than η were masked from the loss
    (`staleness.on_deadline: mask`). `prompt` is the checksum of its prompt (`asyncrl.data.row_checksums`), None if an
    earlier version of asyncrl trained it. `part` is its part of a mixture.
    """

    group: int
    attempt: int
    incarnation: int
    deadline: int
    max_staleness_versions: int
    samples: tuple[TrainedSample, ...]
    extended: bool = False
    prompt: int | None = None
    part: str = ""


class TrainedStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A step that was acked. It made version `step` + 1 of its incarnation.

    `before` and `after` are the digests of the weights, as the ranks measured them at the start and at the end of the
    step (`asyncrl.ranks.digest`), of the kind `digest_kind`. In the first step after a start from a checkpoint,
    `before_by_kind` has `before` in the other kinds, because the step that the checkpoint follows may have been trained
    on another kind of device. `token_staleness` is the ranks' count of trained tokens by age: entry s counts the
    tokens that are s versions old. `ledger` is the ledger at the moment of the ack. `filtered` are the groups that were
    left out since the step before (`algorithm.zero_variance: resample`). `line` is the xxh3-64 of the step's line in
    steps.jsonl, without its newline; None if an earlier version of asyncrl trained the step.
    """

    incarnation: int
    step: int
    before: int
    after: int
    loss: float
    grad_norm: float
    token_staleness: tuple[int, ...]
    groups: tuple[TrainedGroup, ...]
    ledger: LedgerEntry
    filtered: tuple[FilteredGroup, ...] = ()
    line: int | None = None
    digest_kind: str = "xxh3"
    before_by_kind: dict[str, int] = {}

    @property
    def digests_before(self) -> dict[str, int]:
        """The digests of the weights at the start of the step, by kind."""
        return {**self.before_by_kind, self.digest_kind: self.before}

    @property
    def made(self) -> Version:
        """The version that the step made."""
        return Version(self.incarnation, self.step + 1)


class PublishedVersion(msgspec.Struct, frozen=True, array_like=True, tag="published"):
    """A published version. `digest` is that of its manifest: of names, shapes, dtypes and the checksums of the
    bytes."""

    version: Version
    digest: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The end of a run, with the ledger of this moment. It does not count if the run was resumed afterwards."""

    version: Version
    ledger: LedgerEntry


Record = TrainedStep | PublishedVersion | Ended
_began = msgspec.msgpack.Decoder(Began)
_record = msgspec.msgpack.Decoder(Record)


def records_path(run: Path, incarnation: int) -> Path:
    """Returns the path of the file with an incarnation's records."""
    return run / AUDIT / f"steps-{incarnation}.msgpack"


def framed(record: Began | Record) -> bytes:
    """Returns the bytes of a record in its file."""
    payload = msgspec.msgpack.encode(record)
    return _HEAD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


class ReadRecords(NamedTuple):
    """The records of one incarnation. `began` is None if the file has no whole record. `damage` says where a frame does
    not match its checksum, or is not a record; then the records after it are not read. `torn` is whether an incomplete
    frame or zeros at the end were left out."""

    began: Began | None
    records: list[Record]
    damage: str | None = None
    torn: bool = False


def read_records(path: Path) -> ReadRecords:
    """Returns the records in a file. Leaves an incomplete last frame out. Raises FileRefused, or another OSError."""
    with opened(path, inside=path.parent.parent) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LARGEST_FILE:
            raise FileRefused(f"{path} has {size:,} bytes, and at most {_LARGEST_FILE:,} are read")
        return _read_frames(file, str(path), size=size)


def _read_frames(file: BinaryIO, name: str, *, size: int) -> ReadRecords:
    began: Began | None = None
    records: list[Record] = []
    number = 1
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, checksum = _HEAD.unpack(head)
        left = size - file.tell()
        payload = file.read(min(length, left, _LONGEST_RECORD))
        if length > left:
            if _is_whole(payload, checksum):
                return ReadRecords(began, records, f"record {number} of {name} has another length than was written")
            return ReadRecords(began, records, torn=True)
        if length > _LONGEST_RECORD or xxhash.xxh3_64_intdigest(payload) != checksum:
            if not any(head) and not any(map(any, iter(partial(file.read, _LONGEST_RECORD), b""))):
                return ReadRecords(began, records, torn=True)
            return ReadRecords(began, records, f"record {number} of {name} does not match its checksum")
        try:
            if began is None:
                began = _began.decode(payload)
            else:
                records.append(_record.decode(payload))
        except UNREADABLE as error:
            return ReadRecords(began, records, f"record {number} of {name} cannot be read ({error})")
        number += 1
    return ReadRecords(began, records, torn=bool(head))


def _is_whole(rest: bytes, checksum: int) -> bool:
    """Returns whether the `rest` of a file begins with a payload of this checksum. The rest is shorter than the
    recorded length of the payload. So if the payload is whole, the recorded length was changed, and no killed writer
    left the frame."""
    digest = xxhash.xxh3_64()
    for place in range(min(len(rest), _LONGEST_SEARCHED)):
        digest.update(rest[place : place + 1])
        if digest.intdigest() == checksum:
            return True
    return False


def manifest_digest(manifest: Manifest) -> str:
    """Returns the xxh3-128 of the layout of a version and the checksums of its bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((manifest.tensors, manifest.buckets)))
