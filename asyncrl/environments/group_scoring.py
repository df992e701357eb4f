"""Scores groups in the scoring process, with a reward function of any form.

Unless the function ends the process, the result of a group is one finite float for each completion, or one failure.
"""

import asyncio
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any

from msgspec.structs import replace

from asyncrl.config.schema import EnvironmentSection
from asyncrl.environments.reward_function import RewardFunction, subject
from asyncrl.environments.scoring_messages import Failure, Group, Reply, Request, Result, RewardFailure
from asyncrl.environments.secrets import Secrets, needed_variable
from asyncrl.user_code import describe_error

CANCEL_GRACE_S = 1.0
"""Seconds that cancelled coroutines get to end. If one of them does not end, its process is replaced."""

_OUT_OF_MEMORY = "ran out of environment.score_memory_mib"


class GroupScoring:
    """Scores requests one after the other, in the thread that created the object.

    Calls `begin` with the number of a completion when its scoring begins. Asynchronous rewards always run in the same
    event loop, so that a client that they keep between calls stays usable.
    """

    def __init__(
        self,
        reward: RewardFunction,
        section: EnvironmentSection,
        *,
        begin: Callable[[int], None] = lambda sample: None,
        secrets: Secrets | None = None,
        withheld: Collection[str] = (),
    ) -> None:
        self._function = reward.function
        self._form = reward.form
        self._section = section
        self._subject = subject(section)
        self._begin = begin
        self._secrets = secrets or Secrets()
        self._withheld = withheld
        self._runner = asyncio.Runner() if reward.form.asynchronous else None

    def score(self, request: Request) -> Reply:
        """Returns a result for each group. The first failure in a group ends the group's scoring."""
        if self._runner is None:
            return Reply(id=request.id, results=tuple(map(self._scored, request.groups)))
        try:
            results = self._runner.run(self._at_once(request.groups))
        except BaseException as error:  # the reward stopped or broke the event loop
            failed = [self._failed(group, error, sample=None) for group in request.groups]
            results = [replace(result, retire="broke its event loop") for result in failed]
        return Reply(id=request.id, results=tuple(results))

    def _scored(self, group: Group) -> Result:
        if self._form.batched:
            try:
                self._begin(0)
                value = self._function(group.task, group.completions)
                return Result(rewards=_numbers(value, len(group.completions)))
            except BaseException as error:
                return self._failed(group, error, sample=None)
        rewards: list[float] = []
        sample = 0
        try:
            for sample, completion in enumerate(group.completions):
                self._begin(sample)
                rewards.append(_number(self._function(group.task, completion)))
        except BaseException as error:  # also SystemExit and the like, because this is the user's code
            return self._failed(group, error, sample=sample)
        return Result(rewards=tuple(rewards))

    async def _at_once(self, groups: Sequence[Group]) -> list[Result]:
        """Starts all calls of all groups at once and waits for them."""
        sizes = [len(group.completions) for group in groups]
        offsets = [0, *accumulate(sizes)]
        unfinished = set(range(offsets[-1]))

        def finished(samples: range) -> None:
            unfinished.difference_update(samples)
            self._begin(min(unfinished, default=0))

        self._begin(0)
        calls = [
            _Calls(self._function, group, batched=self._form.batched, offset=offset, finished=finished)
            for group, offset in zip(groups, offsets, strict=False)
        ]
        return list(
            await asyncio.gather(*[self._awaited(group, call) for group, call in zip(groups, calls, strict=True)])
        )

    async def _awaited(self, group: Group, calls: "_Calls") -> Result:
        """Waits for the calls of one group. The group's first failure, or its time limit, cancels its other calls."""
        count, timeout_s = len(group.completions), self._section.score_timeout_s
        late, stubborn = await calls.run(self._form.limit_s(timeout_s, count))
        retire = "has a reward call that did not end when it was cancelled" if stubborn else ""
        if calls.errors:
            first = min(calls.errors)
            failed = self._failed(group, calls.errors[first], sample=None if self._form.batched else first)
            return replace(failed, retire=failed.retire or retire)
        if late:
            message = f"{self._subject} {self._form.overran(timeout_s, count)}"
            sample = _only(None if self._form.batched else min(late), count)
            failure = Failure(reason=RewardFailure.TIMEOUT, sample=sample, message=message)
            return Result(failure=failure, retire=retire)
        return Result(rewards=calls.rewards)

    def _failed(self, group: Group, error: BaseException, *, sample: int | None) -> Result:
        if isinstance(error, _Unusable):
            reason, what = error.reason, str(error)
            sample = error.sample if sample is None else sample
        else:
            reason = RewardFailure.RAISED
            what = f"raised {describe_error(error, redact=self._secrets.redact)}{self._hint(error)}"
        sample = _only(sample, len(group.completions))
        failure = Failure(reason=reason, sample=sample, message=f"{self._subject} {what}")
        return Result(failure=failure, retire=_OUT_OF_MEMORY if isinstance(error, MemoryError) else "")

    def _hint(self, error: BaseException) -> str:
        if isinstance(error, MemoryError):
            return f"; the limit is environment.score_memory_mib = {self._section.score_memory_mib}, raise it if needed"
        if name := needed_variable(error, self._withheld):
            return secrets_hint(name)
        return ""


def secrets_hint(name: str) -> str:
    """Returns the end of an error message for reward code that needs the environment variable `name`."""
    return f"; add {name} to environment.secrets: reward code sees only the variables that are named there"


class _Calls:
    """Runs the calls of one group at once in the running event loop.

    `offset` is the number of the group's first completion in the request. `finished` is called with the numbers of the
    completions whose call has ended.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        group: Group,
        *,
        batched: bool,
        offset: int,
        finished: Callable[[range], None],
    ) -> None:
        self._function = function
        self._group = group
        self._batched = batched
        self._offset = offset
        self._finished = finished
        self._values: dict[int, tuple[float, ...]] = {}
        self._cancelling = False
        self._failed = asyncio.Event()
        self.errors: dict[int, BaseException] = {}

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(reward for _, rewards in sorted(self._values.items()) for reward in rewards)

    async def run(self, limit_s: float) -> tuple[list[int], bool]:
        """Runs the calls for at most `limit_s` seconds. Returns the indexes of the calls that had to be cancelled, and
        whether a call still runs after its cancellation."""
        completions = self._group.completions
        arguments = [completions] if self._batched else list(completions)
        tasks = [asyncio.create_task(self._call(index, each)) for index, each in enumerate(arguments)]
        failed = asyncio.create_task(self._failed.wait())
        either: list[asyncio.Future[Any]] = [asyncio.gather(*tasks, return_exceptions=True), failed]
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        self._cancelling = True
        failed.cancel()
        left = [index for index, task in enumerate(tasks) if not task.done()]
        for index in left:
            tasks[index].cancel()
        if left:
            await asyncio.wait([tasks[index] for index in left], timeout=CANCEL_GRACE_S)
        return left, any(not task.done() for task in tasks)

    async def _call(self, index: int, argument: object) -> None:
        count = len(self._group.completions)
        try:
            value = await self._function(self._group.task, argument)
            self._values[index] = _numbers(value, count) if self._batched else (_number(value),)
        except GeneratorExit:  # the event loop was broken, and Python discards this coroutine
            raise
        except BaseException as error:  # also SystemExit, which would end the event loop
            if not self._cancelling:
                self.errors[index] = error
                self._failed.set()
        first = self._offset + index
        self._finished(range(first, first + (count if self._batched else 1)))


class _Unusable(Exception):
    def __init__(self, reason: RewardFailure, message: str, *, sample: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.sample = sample


def _only(sample: int | None, completions: int) -> int | None:
    """Returns 0 for a call with exactly one completion: only that completion can have failed. Otherwise `sample`."""
    return 0 if sample is None and completions == 1 else sample


def _number(value: object, *, at: str = "", sample: int | None = None) -> float:
    if not isinstance(value, numbers.Real):
        raise _Unusable(RewardFailure.WRONG_TYPE, f"returned {_kind(value)}{at}; {_wanted(value)}", sample=sample)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _Unusable(RewardFailure.NOT_FINITE, f"returned {number}{at}; a reward is a finite number", sample=sample)
    return number


def _numbers(value: object, count: int) -> tuple[float, ...]:
    """Checks the rewards that a batched call returned, and returns them as floats."""
    if hasattr(value, "tolist"):  # a NumPy array or a torch tensor
        value = value.tolist()
    unordered = isinstance(value, str | bytes | Mapping | set)
    if unordered or not isinstance(value, Iterable) or not isinstance(value, Sized):
        raise _Unusable(
            RewardFailure.WRONG_TYPE,
            f"returned {_kind(value)} for {count} completions; a reward with the parameter `completions` returns a "
            "list with one number for each",
        )
    rewards = list(value)
    if len(rewards) != count:
        raise _Unusable(
            RewardFailure.WRONG_TYPE,
            f"returned {len(rewards)} rewards for {count} completions; return one number for each",
        )
    return tuple(_number(each, at=f" at index {index}", sample=index) for index, each in enumerate(rewards))


def _kind(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _wanted(value: object) -> str:
    if asyncio.iscoroutine(value):
        value.close()  # otherwise Python warns that it was never awaited
        return "declare the function with `async def`"
    if isinstance(value, list | tuple):
        return "name the second parameter `completions` to score a group in one call"
    return "a reward is a number"
