"""What passes between a generator and its scoring processes: JSON on a socket, and a few bytes of shared memory."""

import mmap
import struct
import time
from enum import StrEnum
from typing import TypeVar

import msgspec

from asyncrl.data.prompts import Task
from asyncrl.environments.reward_function import Form

MAX_FRAME_BYTES = 64 * 2**20
"""Longest message either way; a group of completions is far below it."""

HEADER_BYTES = 4
_PROGRESS = struct.Struct("=qd")


class RewardFailure(StrEnum):
    """Why a group has no rewards: the `reason` of its DataError, and a metric's label."""

    RAISED = "reward_raised"
    NOT_FINITE = "reward_not_finite"
    WRONG_TYPE = "reward_wrong_type"
    TIMEOUT = "reward_timeout"
    CRASHED = "reward_crashed"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message: the environment section as JSON text, and the names of environment variables that exist
    outside of the scoring process but not in it."""

    section: str
    withheld: tuple[str, ...]


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Ready, and how the reward is called; or a ConfigError's message and key."""

    form: Form = Form()
    error: str | None = None
    key: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Score these completions of one task."""

    id: int
    task: Task
    completions: tuple[str, ...]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why there are no rewards. `sample` is the first completion, from 0, without a usable one; None when a call for
    several completions failed as a whole."""

    reason: RewardFailure
    sample: int | None
    message: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards in the order of the request's completions, or a failure. `retire` says why this process should get no
    other request; it is empty when it can go on."""

    id: int
    rewards: tuple[float, ...] = ()
    failure: Failure | None = None
    retire: str = ""


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """A frame: four bytes of length, big-endian, then JSON. ValueError beyond MAX_FRAME_BYTES."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is beyond the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class Progress:
    """The completion that is being scored, and since when.

    It is memory that a scoring process writes and its generator reads, so that a fast reward does not pay for a
    message a completion. `file` is a descriptor of `BYTES` bytes. The times are of the monotonic clock, which all
    processes of a machine share.
    """

    BYTES = _PROGRESS.size

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, self.BYTES)

    def begin(self, sample: int) -> None:
        """Scoring of completion `sample` begins now."""
        _PROGRESS.pack_into(self._memory, 0, sample, time.monotonic())

    def read(self) -> tuple[int, float]:
        """The completion, and when it began."""
        sample, since_s = _PROGRESS.unpack_from(self._memory, 0)
        return sample, since_s

    def detach(self) -> None:
        """What is written from now on stays in this process."""
        self._memory = mmap.mmap(-1, self.BYTES)

    def close(self) -> None:
        self._memory.close()
