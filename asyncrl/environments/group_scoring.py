"""Scores a group with a reward function of any form, in the scoring process.

Whatever the function does, short of ending the process, the reply holds one finite float for each completion or one
failure.
"""

import asyncio
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from typing import Any

from msgspec.structs import replace

from asyncrl.config.schema import EnvironmentSection
from asyncrl.environments.reward_function import RewardFunction, subject
from asyncrl.environments.scoring_messages import Failure, Reply, Request, RewardFailure
from asyncrl.environments.secrets import Secrets, needed_variable
from asyncrl.user_code import describe_error

CANCEL_GRACE_S = 1.0
"""Seconds that coroutines get to end when they are cancelled. If one does not, its process is replaced."""

_OUT_OF_MEMORY = "ran out of environment.score_memory_mib"


class GroupScoring:
    """Scores groups one after the other, in the thread that made it.

    `begin` is called with the number of a completion when its scoring begins. Asynchronous rewards run in one event
    loop that stays the same, so that a client which they keep between calls goes on working.
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
        """One reward for each completion; the first failure ends the group."""
        if self._runner is not None:
            try:
                return self._runner.run(self._awaited(request))
            except BaseException as error:  # the reward stopped the loop, or broke it
                return replace(self._failed(request, error, sample=None), retire="broke its event loop")
        if self._form.batched:
            try:
                self._begin(0)
                value = self._function(request.task, request.completions)
                return Reply(id=request.id, rewards=_numbers(value, len(request.completions)))
            except BaseException as error:
                return self._failed(request, error, sample=None)
        rewards: list[float] = []
        sample = 0
        try:
            for sample, completion in enumerate(request.completions):
                self._begin(sample)
                rewards.append(_number(self._function(request.task, completion)))
        except BaseException as error:  # SystemExit and the like included: it is foreign code
            return self._failed(request, error, sample=sample)
        return Reply(id=request.id, rewards=tuple(rewards))

    async def _awaited(self, request: Request) -> Reply:
        """All calls begin together. The first failure, or the limit, cancels those that are left."""
        self._begin(0)
        calls = _Calls(self._function, request, batched=self._form.batched, finished=self._begin)
        count = len(request.completions)
        limit_s = self._form.limit_s(self._section.score_timeout_s, count)
        late, stubborn = await calls.run(limit_s)
        retire = "did not end when it was cancelled" if stubborn else ""
        if calls.errors:
            first = min(calls.errors)
            failed = self._failed(request, calls.errors[first], sample=None if self._form.batched else first)
            return replace(failed, retire=failed.retire or retire)
        if late:
            message = f"{self._subject} {self._form.overran(self._section.score_timeout_s, count)}"
            sample = None if self._form.batched else min(late)
            failure = Failure(reason=RewardFailure.TIMEOUT, sample=_only(sample, count), message=message)
            return Reply(id=request.id, failure=failure, retire=retire)
        return Reply(id=request.id, rewards=calls.rewards)

    def _failed(self, request: Request, error: BaseException, *, sample: int | None) -> Reply:
        if isinstance(error, _Unusable):
            reason, what = error.reason, str(error)
            sample = error.sample if sample is None else sample
        else:
            reason = RewardFailure.RAISED
            what = f"raised {describe_error(error, redact=self._secrets.redact)}{self._hint(error)}"
        failure = Failure(
            reason=reason, sample=_only(sample, len(request.completions)), message=f"{self._subject} {what}"
        )
        return Reply(id=request.id, failure=failure, retire=_OUT_OF_MEMORY if isinstance(error, MemoryError) else "")

    def _hint(self, error: BaseException) -> str:
        if isinstance(error, MemoryError):
            return f"; environment.score_memory_mib = {self._section.score_memory_mib} is the limit"
        if name := needed_variable(error, self._withheld):
            return secrets_hint(name)
        return ""


def secrets_hint(name: str) -> str:
    """The end of an error of reward code that needs the environment variable `name`."""
    return f"; add {name} to environment.secrets: reward code sees only the variables that are named there"


class _Calls:
    """The calls of one request, run at once in the running event loop."""

    def __init__(
        self, function: Callable[..., Any], request: Request, *, batched: bool, finished: Callable[[int], None]
    ) -> None:
        self._function = function
        self._request = request
        self._batched = batched
        self._finished = finished
        self._values: dict[int, tuple[float, ...]] = {}
        self._cancelling = False
        self._failed = asyncio.Event()
        self.errors: dict[int, BaseException] = {}

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(reward for _, rewards in sorted(self._values.items()) for reward in rewards)

    async def run(self, limit_s: float) -> tuple[list[int], bool]:
        """The calls that had to be cancelled, and whether one of them goes on regardless."""
        arguments = [self._request.completions] if self._batched else list(self._request.completions)
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
        try:
            value = await self._function(self._request.task, argument)
            self._values[index] = (
                _numbers(value, len(self._request.completions)) if self._batched else (_number(value),)
            )
        except GeneratorExit:  # the loop was broken, and this coroutine is thrown away
            raise
        except BaseException as error:  # also SystemExit, which would end the event loop
            if not self._cancelling:
                self.errors[index] = error
                self._failed.set()
        unfinished = set(range(len(self._request.completions))) - self._values.keys()
        self._finished(min(unfinished, default=0))


class _Unusable(Exception):
    def __init__(self, reason: RewardFailure, message: str, *, sample: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.sample = sample


def _only(sample: int | None, completions: int) -> int | None:
    """A call for one completion can only fail for that one."""
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
    """The rewards that a batched call returned."""
    if hasattr(value, "tolist"):  # an array of NumPy, a tensor of torch
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
        value.close()  # it would be reported as never awaited
        return "declare the function with `async def`"
    if isinstance(value, list | tuple):
        return "name the second parameter `completions` to score a group in one call"
    return "a reward is a number"
