"""Messages between a generator and its scoring processes: JSON on a socket, and a few bytes of shared memory."""

import mmap
import time
from enum import StrEnum
from typing import TypeVar

import msgspec

from asyncrl.data.prompts import Task
from asyncrl.environments.reward_function import Form

MAX_MESSAGE_BYTES = 64 * 2**20
"""Longest message in either direction. A group of completions is far smaller."""


class RewardFailure(StrEnum):
    """Why a completion has no reward. It is the `reason` of its DataError, and the label of a metric."""

    RAISED = "reward_raised"
    NOT_FINITE = "reward_not_finite"
    WRONG_TYPE = "reward_wrong_type"
    TIMEOUT = "reward_timeout"
    CRASHED = "reward_crashed"
    NO_CALL = "agent_made_no_call"
    LIMIT = "agent_limit"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a scoring process. `section` is the environment section as JSON text. `withheld` names
    environment variables that exist in the generator's process but not in the scoring process."""

    section: str
    withheld: tuple[str, ...]


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that the process is ready and how the reward is called; or a ConfigError's message."""

    form: Form = Form()
    error: str | None = None


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Completions of one task, to be scored."""

    task: Task
    completions: tuple[str, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to score groups: several at once for an asynchronous reward, otherwise one."""

    id: int
    groups: tuple[Group, ...]


class Components(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reward of a completion that is a sum of components: `total` is their weighted sum, `parts` has each by its
    name, without its weight."""

    total: float
    parts: dict[str, float]


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why a completion has no reward. If `of_call` is True, a call for several completions failed as a whole."""

    reason: RewardFailure
    message: str
    of_call: bool = False


Outcome = float | Components | Failure
"""The reward of a completion, or why it has none."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a request: the outcomes of some completions by their number, which counts over all groups of the
    request. The last reply has `last` set.

    `retire` is the reason why the process should get no further request; it is empty when the process can continue.
    With a reason, completions may be left without an outcome.
    """

    id: int
    outcomes: tuple[tuple[int, Outcome], ...]
    last: bool
    retire: str = ""


Message = TypeVar("Message", bound=msgspec.Struct)


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
    message for each completion. `file` is the descriptor of a file of `BYTES` bytes. Times are of the monotonic clock,
    which all processes of a machine share.
    """

    BYTES = 16

    def __init__(self, file: int) -> None:
        self._map(file)

    def begin(self, sample: int) -> None:
        """Records that the scoring of completion `sample` begins now."""
        # Each line stores eight aligned bytes at once, so that a reader never sees half of a number. `struct` and
        # slices do not guarantee that.
        self._numbers[0] = sample
        self._numbers[1] = time.monotonic()

    def read(self) -> tuple[int, float]:
        """Returns the number of the completion, and when its scoring began."""
        return int(self._numbers[0]), self._numbers[1]

    def detach(self) -> None:
        """Disconnects from the shared memory: later writes stay in this process."""

        self._map(-1)

    def close(self) -> None:
        self._numbers.release()

    def _map(self, file: int) -> None:
        self._numbers = memoryview(mmap.mmap(file, self.BYTES)).cast("d")
