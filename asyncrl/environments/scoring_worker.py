"""The process in which reward code runs: `python -m asyncrl.environments.scoring_worker SOCKET_FD PARENT_PID`.

Started by `scoring.py` and by nobody else. It reads `Start` once, then answers each `Request` with one `Reply`, all
as length-prefixed JSON on an inherited socket; standard streams go nowhere. Whatever reward code does, a `Reply`
holds one finite float a completion or one failure. Imports none of torch, ray, vllm: start-up is the environment's.
"""

import ctypes
import math
import numbers
import os
import resource
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.interfaces import Reward, build_reward
from asyncrl.errors import ConfigError
from asyncrl.parent_death import die_with
from asyncrl.user_code import describe_error

MAX_FRAME_BYTES = 64 * 2**20
"""Longest message either way; a group of completions is far below it."""

HEADER_BYTES = 4
_SPARE_PROCESSES = 512
_PR_SET_CHILD_SUBREAPER = 36


class RewardFailure(StrEnum):
    """Why a group has no rewards: the `reason` of its DataError, and a metric's label."""

    RAISED = "reward_raised"
    NOT_FINITE = "reward_not_finite"
    WRONG_TYPE = "reward_wrong_type"
    TIMEOUT = "reward_timeout"
    CRASHED = "reward_crashed"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message: the environment section, as JSON text."""

    section: str


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Ready, or why there is nothing to score with: a ConfigError's message and key."""

    error: str | None = None
    key: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Score these completions of one task."""

    id: int
    task: Task
    completions: tuple[str, ...]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The first completion, from 0, that got no usable reward."""

    reason: RewardFailure
    sample: int
    message: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards in the order of the request's completions, or a failure. `retire`: this process is not to be trusted
    with another request."""

    id: int
    rewards: tuple[float, ...] = ()
    failure: Failure | None = None
    retire: bool = False


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """A frame: four bytes of length, big-endian, then JSON. ValueError beyond MAX_FRAME_BYTES."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is beyond the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def score_group(reward: Reward, request: Request) -> Reply:
    """One reward a completion; the first failure ends the group."""
    rewards: list[float] = []
    for sample, completion in enumerate(request.completions):
        try:
            rewards.append(_checked(reward(request.task, completion)))
        except _Unusable as error:
            failure = Failure(reason=error.reason, sample=sample, message=str(error))
            return Reply(id=request.id, failure=failure)
        except BaseException as error:  # SystemExit and the like included: it is foreign code
            failure = Failure(reason=RewardFailure.RAISED, sample=sample, message=describe_error(error))
            return Reply(id=request.id, failure=failure, retire=isinstance(error, MemoryError))
    return Reply(id=request.id, rewards=tuple(rewards))


class _Unusable(Exception):
    def __init__(self, reason: RewardFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _checked(value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise _Unusable(RewardFailure.WRONG_TYPE, f"a reward is a float, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _Unusable(RewardFailure.NOT_FINITE, f"a reward is finite, got {number}")
    return number


def main(connection: socket.socket, *, parent_pid: int) -> None:
    """Serve until the parent closes its end."""
    _die_with(parent_pid)
    section = EnvironmentSection.model_validate_json(_receive(connection, Start).section)
    try:
        reward = build_reward(section)
    except ConfigError as error:
        connection.sendall(encode(Started(error=str(error), key=error.key)))
        return
    except Exception as error:  # an environment's own constructor
        message = f"environment: cannot be made from its options, {describe_error(error)}"
        connection.sendall(encode(Started(error=message, key="environment.options")))
        return
    _limit(memory_bytes=section.score_memory_mib * 2**20)
    connection.sendall(encode(Started()))
    own_pid = os.getpid()
    while True:
        request = _receive(connection, Request)
        reply = score_group(reward, request)
        if os.getpid() != own_pid:
            os._exit(0)  # reward code forked, and this is the copy: only the original answers
        connection.sendall(encode(reply))


def _receive(connection: socket.socket, kind: type[Message]) -> Message:
    header = _receive_exactly(connection, HEADER_BYTES)
    return msgspec.json.decode(_receive_exactly(connection, int.from_bytes(header, "big")), type=kind)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 2**20))
        if not chunk:
            os._exit(0)  # the parent has closed its end, or is gone
        data += chunk
    return bytes(data)


def _die_with(parent_pid: int) -> None:
    """End when the parent ends, even in the middle of a hung reward, and adopt what reward code orphans."""
    if sys.platform == "linux":
        # so that killing this process's tree finds them
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    die_with(parent_pid)


def _limit(*, memory_bytes: int) -> None:
    """Limits for reward code; imports are over, so that they need no allowance."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":
        # The kernel counts all of a user's threads against this limit, and does not apply it to root.
        uid = os.getuid()
        own = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal() and _owner(entry) == uid]
        threads = sum(_threads(entry) for entry in own)
        _lower(resource.RLIMIT_NPROC, threads + _SPARE_PROCESSES)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _owner(process: Path) -> int | None:
    try:
        return process.stat().st_uid
    except OSError:
        return None


def _threads(process: Path) -> int:
    try:
        return sum(1 for _ in (process / "task").iterdir())
    except OSError:
        return 0


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), parent_pid=int(sys.argv[2]))
