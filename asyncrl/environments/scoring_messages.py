"""What passes between a generator and its scoring processes: JSON on a socket, and a few bytes of shared memory."""

import mmap
import time
from enum import StrEnum
from typing import TypeVar

import msgspec

from asyncrl.data.prompts import Task
from asyncrl.environments.reward_function import Form

MAX_FRAME_BYTES = 64 * 2**20
"""Longest message either way; a group of completions is far below it."""

HEADER_BYTES = 4


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


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Completions of one task."""

    task: Task
    completions: tuple[str, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Score these groups: several at once for an asynchronous reward, else one."""

    id: int
    groups: tuple[Group, ...]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a group has no rewards. `sample` is the first completion, from 0, without a usable one; None when a call for
    several completions failed as a whole."""

    reason: RewardFailure
    sample: int | None
    message: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards in the order of a group's completions, or a failure. `retire` says why this process should get no other
    request; it is empty when it can go on."""

    rewards: tuple[float, ...] = ()
    failure: Failure | None = None
    retire: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A result for each group of the request."""

    id: int
    results: tuple[Result, ...]


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """A frame: four bytes of length, big-endian, then JSON. ValueError beyond MAX_FRAME_BYTES."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is beyond the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class Progress:
    """The completion that is being scored, counted over all groups of a request, and since when.

    It is memory that a scoring process writes and its generator reads, so that a fast reward does not pay for a
    message a completion. `file` is a descriptor of `BYTES` bytes. The times are of the monotonic clock, which all
    processes of a machine share.
    """

    BYTES = 16

    def __init__(self, file: int) -> None:
        self._map(file)

    def begin(self, sample: int) -> None:
        """Scoring of completion `sample` begins now."""
        # Each is one store of eight aligned bytes, so that no reader sees a half of it. `struct` and slices are not.
        self._numbers[0] = sample
        self._numbers[1] = time.monotonic()

    def read(self) -> tuple[int, float]:
        """The completion, and when it began."""
        return int(self._numbers[0]), self._numbers[1]

    def detach(self) -> None:
        """What is written from now on stays in this process."""
        self._map(-1)

    def close(self) -> None:
        self._numbers.release()

    def _map(self, file: int) -> None:
        self._numbers = memoryview(mmap.mmap(file, self.BYTES)).cast("d")
