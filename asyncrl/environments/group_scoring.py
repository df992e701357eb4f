"""Scores groups in the scoring process, with a reward function of any form.

Unless the function ends the process, the result of a group is one finite float for each completion, or one failure.
"""

import asyncio
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from itertools import accumulate, chain

from msgspec.structs import replace

from asyncrl.config.schema import EnvironmentSection
from asyncrl.environments.reward_function import RewardFunction, subject
from asyncrl.environments.scoring_messages import Failure, Group, Reply, Request, Result, RewardFailure
from asyncrl.environments.secrets import secrets_hint
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
        withheld: Collection[str] = (),
    ) -> None:
        self._function = reward.function
        self._form = reward.form
        self._section = section
        self._subject = subject(section)
        self._begin = begin
        self._withheld = withheld
        self._unfinished: set[int] = set()  # numbers of the completions whose calls have not ended
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
        """Makes the calls of one group one after the other."""
        sample = None
        try:
            if self._form.batched:
                self._begin(0)
                return Result(rewards=_numbers(self._function(group.task, group.completions), len(group.completions)))
            rewards: list[float] = []
            for sample, completion in enumerate(group.completions):
                self._begin(sample)
                rewards.append(_number(self._function(group.task, completion)))
            return Result(rewards=tuple(rewards))
        except BaseException as error:  # also SystemExit and the like, because this is the user's code
            return self._failed(group, error, sample=sample)

    async def _at_once(self, groups: Sequence[Group]) -> list[Result]:
        """Starts all calls of all groups at once and waits for them."""
        ends = accumulate(len(group.completions) for group in groups)
        numbers = [range(end - len(group.completions), end) for group, end in zip(groups, ends, strict=True)]
        self._unfinished = set(chain.from_iterable(numbers))
        self._begin(0)
        return await asyncio.gather(*map(self._awaited, groups, numbers))

    async def _awaited(self, group: Group, numbers: range) -> Result:
        """Runs the calls of one group at once. The group's first failure, or its time limit, cancels its other calls.

        `numbers` are the numbers of the group's completions in the request.
        """
        count, timeout_s, batched = len(group.completions), self._section.score_timeout_s, self._form.batched
        if batched:
            calls = [asyncio.create_task(self._call(group, group.completions, numbers))]
        else:
            each = zip(group.completions, numbers, strict=True)
            calls = [asyncio.create_task(self._call(group, text, range(n, n + 1))) for text, n in each]
        limit_s = self._form.limit_s(timeout_s, count)
        done, late = await asyncio.wait(calls, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for call in late:
            call.cancel()
        cancelled = asyncio.gather(*late, return_exceptions=True)
        _, stubborn = await asyncio.wait([cancelled], timeout=CANCEL_GRACE_S)
        retire = "has a reward call that did not end when it was cancelled" if stubborn else ""
        errors = [(index, error) for index, call in enumerate(calls) if call in done and (error := call.exception())]
        if late and not errors:
            overran = _Unusable(RewardFailure.TIMEOUT, self._form.overran(timeout_s, count))
            errors = [(min(map(calls.index, late)), overran)]
        if errors:
            index, error = errors[0]
            failed = self._failed(group, error.__cause__ or error, sample=None if batched else index)
            return replace(failed, retire=failed.retire or retire)
        return Result(rewards=tuple(chain.from_iterable(call.result() for call in calls)))

    async def _call(self, group: Group, argument: object, numbers: range) -> tuple[float, ...]:
        """Makes one call for the completions with these numbers and returns their rewards. Raises _CallFailed."""
        try:
            value = await self._function(group.task, argument)
            return _numbers(value, len(numbers)) if self._form.batched else (_number(value),)
        except GeneratorExit:  # the event loop was broken, and Python discards this coroutine
            raise
        except BaseException as error:
            raise _CallFailed from error
        finally:
            self._unfinished.difference_update(numbers)
            self._begin(min(self._unfinished, default=0))

    def _failed(self, group: Group, error: BaseException, *, sample: int | None) -> Result:
        if isinstance(error, _Unusable):
            reason, what = error.reason, str(error)
            sample = error.sample if sample is None else sample
        else:
            reason = RewardFailure.RAISED
            what = f"raised {describe_error(error)}{self._hint(error)}"
        if sample is None and len(group.completions) == 1:
            sample = 0  # only this completion can have failed
        failure = Failure(reason=reason, sample=sample, message=f"{self._subject} {what}")
        return Result(failure=failure, retire=_OUT_OF_MEMORY if isinstance(error, MemoryError) else "")

    def _hint(self, error: BaseException) -> str:
        if isinstance(error, MemoryError):
            return f"; the limit is environment.score_memory_mib = {self._section.score_memory_mib}, raise it if needed"
        return secrets_hint(error, self._withheld)


class _CallFailed(Exception):
    """A call of an asynchronous reward failed. The cause is the error of the call: it may be SystemExit, with which a
    task would end the event loop."""


class _Unusable(Exception):
    """A call gave no usable reward. `sample` is the index of the completion, if only one of a batch has no reward."""

    def __init__(self, reason: RewardFailure, message: str, *, sample: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.sample = sample


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
