"""Messages between a generator and its scoring processes: JSON on a socket, and a few bytes of shared memory."""

import fcntl
import math
import mmap
import os
import time
from enum import StrEnum
from typing import Annotated, TypeVar, cast

import msgspec
from msgspec import Meta

from asyncrl.data.prompts import Task
from asyncrl.environments.reward_function import Form

MAX_MESSAGE_BYTES = 64 * 2**20
"""Longest message to a scoring process. A group of completions is far smaller."""
MAX_REPLY_BYTES = 16 * 2**20
"""Longest message from a scoring process. Reward code can write to the socket, and a decoded message needs up to 20
times its length."""
MAX_FAILURE_CHARS = 4_000
"""Longest message of a failure, error of a start, and reason to replace a process. They are shown and written to
records."""
MAX_COMPONENTS = 64
"""Most names of components in the rewards of a run. Each of them is a curve, and a series in Prometheus."""
MAX_COMPONENT_NAME_CHARS = 200


class RewardFailure(StrEnum):
    """Why a completion has no reward. It is the `reason` of its DataError, and the label of a metric."""

    RAISED = "reward_raised"
    NOT_FINITE = "reward_not_finite"
    WRONG_TYPE = "reward_wrong_type"
    TIMEOUT = "reward_timeout"
    CRASHED = "reward_crashed"
    NO_CALL = "agent_made_no_call"
    LIMIT = "agent_limit"


_Text = Annotated[str, Meta(max_length=MAX_FAILURE_CHARS)]
_Name = Annotated[str, Meta(max_length=MAX_COMPONENT_NAME_CHARS)]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a scoring process. `section` is the environment section as JSON text. `withheld` names
    environment variables that exist in the generator's process but not in the scoring process."""

    section: str
    withheld: tuple[str, ...]


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Start`. If `error` is None, the process is ready, and `form` says how the reward is called.
    Otherwise the process ends, and `error` is the message of a ConfigError."""

    form: Form = Form()
    error: _Text | None = None


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Completions of one task, to be scored."""

    task: Task
    completions: tuple[str, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to score groups."""

    id: int
    groups: tuple[Group, ...]


class Components(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reward of a completion that is a sum of components: `total` is their weighted sum, `parts` has each by its
    name, without its weight."""

    total: float
    parts: Annotated[dict[_Name, float], Meta(max_length=MAX_COMPONENTS)]


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why a completion has no reward. If `of_call` is True, the failure may be of other completions: a call for several
    of them failed as a whole, or this one was not scored because others had failed. `error` is the type of the error
    that the reward raised, if it raised one."""

    reason: RewardFailure
    message: _Text
    of_call: bool = False
    error: _Name = ""


Outcome = float | Components | Failure
"""The reward of a completion, or why it has none."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a request. `outcomes` has pairs (index of a completion, its outcome) for some of the completions.
    The index counts over all groups of the request. The last reply has `last` set, and `scored_s` is the time from the
    beginning of the first call to the end of the last one, in seconds.

    `retire` is the reason why the process should get no further request; it is empty when the process can continue.
    With a reason, completions may be left without an outcome.
    """

    id: int
    outcomes: tuple[tuple[int, Outcome], ...]
    last: bool
    scored_s: float = 0.0
    retire: _Text = ""


Message = TypeVar("Message", bound=msgspec.Struct)
_KINDS: tuple[type[msgspec.Struct], ...] = (Start, Started, Request, Reply)
_DECODERS = {kind: msgspec.json.Decoder(kind) for kind in _KINDS}
"""Made by the one thread that imports this module. If several threads decode a type for the first time, msgspec 0.22
may end the process with SIGSEGV: it stores what it knows about the type before that is complete."""


def decode(line: bytes, kind: type[Message]) -> Message:
    """Decodes a message. Raises ValueError or RecursionError for a line that is not a message of this kind."""
    return cast(Message, _DECODERS[kind].decode(line))


def sendable(text: str) -> str:
    """Returns a text of reward code in the form in which a message can contain it: cut to `MAX_FAILURE_CHARS`
    characters, and without lone surrogates, which JSON cannot contain."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_FAILURE_CHARS else f"{text[: MAX_FAILURE_CHARS - 1]}…"


def encode(message: msgspec.Struct) -> bytes:
    """Encodes a message as one line of JSON. Raises ValueError beyond MAX_MESSAGE_BYTES."""
    line = msgspec.json.encode(message) + b"\n"
    if len(line) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a message has {len(line)} bytes, more than the limit of {MAX_MESSAGE_BYTES}; send shorter completions"
        )
    return line


NO_COMPLETION = -1
"""The number in `Progress` while the event loop of an asynchronous reward runs none of the calls."""


class Progress:
    """The completion that is being scored (counted over all groups of a request), and when its scoring began. Of an
    asynchronous reward, it is the completion whose coroutine runs at this moment. If a call scores several completions,
    it is the first of them.

    A scoring process writes it to shared memory and its generator reads it, so that a fast reward does not need a
    message for each completion. `file` is the descriptor of a file that `new_file` made. Times are of the monotonic
    clock, which all processes of a machine share.

    Reward code can write to the memory too. So a reader accepts any numbers, and the file cannot become shorter: access
    to memory behind its end would kill the reader with SIGBUS.
    """

    BYTES = 16

    @staticmethod
    def new_file() -> int:
        """Returns the descriptor of a file of `BYTES` bytes whose size cannot change."""
        file = os.memfd_create("asyncrl scoring progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, Progress.BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return file

    def __init__(self, file: int) -> None:
        self._map(file)

    def begin(self, sample: int) -> None:
        """Records that the scoring of completion `sample` begins now."""
        # Each line stores eight aligned bytes at once, so that a reader never sees half of a number. `struct` and
        # slices do not guarantee that.
        self._numbers[0] = sample
        self._numbers[1] = time.monotonic()

    def read(self) -> tuple[int, float]:
        """Returns the number of the completion, and when its scoring began.

        Reward code may have written numbers that are not finite: they are read as `NO_COMPLETION`, and as a beginning
        in the infinite future.
        """
        number, begun_s = self._numbers[0], self._numbers[1]
        return (
            int(number) if math.isfinite(number) else NO_COMPLETION,
            begun_s if math.isfinite(begun_s) else math.inf,
        )

    def detach(self) -> None:
        """Disconnects from the shared memory: later writes stay in this process."""

        self._map(-1)

    def close(self) -> None:
        self._numbers.release()

    def _map(self, file: int) -> None:
        self._numbers = memoryview(mmap.mmap(file, self.BYTES)).cast("d")
