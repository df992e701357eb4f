"""Scores groups in the scoring process, with a reward function of any form.

Each completion gets an outcome: one finite float, the components of its reward, or one failure. The failure of one
completion does not end the scoring of the others. But some completions get no outcome from this process if the function
ends it, or leaves it unusable (`Reply.retire`).
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.reward_function import RewardFunction, caller, subject
from asyncrl.environments.reward_terms import TermFailed
from asyncrl.environments.reward_values import Unusable, components, listed, number
from asyncrl.environments.scoring_messages import (
    MAX_COMPONENT_NAME_CHARS,
    NO_COMPLETION,
    Failure,
    Group,
    Outcome,
    Reply,
    Request,
    RewardFailure,
    sendable,
)
from asyncrl.environments.secrets import secrets_hint
from asyncrl.user_code import describe_error

CANCEL_GRACE_S = 1.0
"""Seconds that cancelled coroutines get to end. If one of them does not end, its process is replaced."""

SEND_EVERY_S = 0.005
"""Seconds. If the last outcomes were sent longer ago, the new ones are sent before their request ends, so that they are
not lost if a later completion ends the process. A message for each completion would cost as much as a fast reward. The
outcomes of asynchronous rewards, which are not fast, are sent at once."""

_OUT_OF_MEMORY = "ran out of environment.score_memory_mib"


class _Call(NamedTuple):
    """A call of the reward function. `number` is the number of its first completion in the request."""

    number: int
    task: Task
    completions: tuple[str, ...]


@dataclass
class GroupScoring:
    """Scores requests one after the other, in the thread that created the object.

    Calls `send` with the replies to a request, and `begin` with the number of a completion when its scoring begins. For
    an asynchronous reward, `begin` is called as `_Steps` describes it.
    `withheld` names the environment variables that exist in the generator's process only; errors name them as hints.
    Asynchronous rewards always run in the same event loop, so that a client that they keep between calls stays usable.
    """

    reward: RewardFunction
    section: EnvironmentSection
    _: KW_ONLY
    send: Callable[[Reply], None]
    begin: Callable[[int], None] = lambda number: None
    withheld: Collection[str] = ()

    def __post_init__(self) -> None:
        self._form = self.reward.form
        self._subject = subject(self.section)
        self._runner = asyncio.Runner() if self.reward.form.asynchronous else None
        self._request = 0
        self._unsent: list[tuple[int, Outcome]] = []
        self._sent_s = 0.0
        self._unended: set[int] = set()  # the `number` of each call that has not ended, begun or not
        self._retire = ""

    def score(self, request: Request) -> None:
        """Scores the groups of a request and sends the outcomes, the last of them with `Reply.last`."""
        begun_s = time.monotonic()
        self._request, self._unsent, self._sent_s, self._retire = request.id, [], begun_s, ""
        calls = list(self._calls(request.groups))
        self._unended = {call.number for call in calls}
        if self._runner is None:
            self._one_by_one(calls)
        else:
            try:
                self._runner.run(self._at_once(calls))
            except BaseException as error:  # the reward stopped or broke the event loop
                self._retire = "broke its event loop"
                for call in calls:
                    if call.number in self._unended:
                        self._end(call, self._failed(call, error))
        scored_s = time.monotonic() - begun_s
        outcomes = tuple(self._unsent)
        self.send(Reply(id=request.id, outcomes=outcomes, last=True, scored_s=scored_s, retire=self._retire))

    def _calls(self, groups: Iterable[Group]) -> Iterator[_Call]:
        number = 0
        for group in groups:
            parts = [group.completions] if self._form.batched else [(text,) for text in group.completions]
            for completions in parts:
                yield _Call(number, group.task, completions)
                number += len(completions)

    def _one_by_one(self, calls: Iterable[_Call]) -> None:
        for call in calls:
            self.begin(call.number)
            try:
                outcomes = self._outcomes(call, self.reward.function(call.task, self._argument(call)))
            except BaseException as error:  # also SystemExit and the like, because this is the user's code
                outcomes = self._failed(call, error)
            self._end(call, outcomes)
            if self._retire:
                return  # a new process scores the other completions, with the whole memory limit for them

    async def _at_once(self, calls: Sequence[_Call]) -> None:
        """Starts all calls at once and waits for them."""
        self.begin(NO_COMPLETION)
        await asyncio.gather(*map(self._await, calls))

    async def _await(self, call: _Call) -> None:
        """Makes a call, and cancels it at its time limit."""
        count, timeout_s = len(call.completions), self.section.score_timeout_s
        made = asyncio.create_task(_Steps(self._awaited(call), number=call.number, begin=self.begin))
        await asyncio.wait([made], timeout=self._form.limit_s(timeout_s, count))
        if made.done():
            outcomes = made.result()
        else:
            made.cancel()
            _, stubborn = await asyncio.wait([made], timeout=CANCEL_GRACE_S)
            if stubborn:
                self._retire = "has a reward call that did not end when it was cancelled"
            overran = Unusable(RewardFailure.TIMEOUT, self._form.overran(timeout_s, count))
            outcomes = self._failed(call, overran)
        self._end(call, outcomes)

    async def _awaited(self, call: _Call) -> list[Outcome]:
        """Makes a call. Errors of the reward become failures, because a SystemExit would end the event loop."""
        try:
            return self._outcomes(call, await self.reward.function(call.task, self._argument(call)))
        except GeneratorExit:  # the event loop was broken, and Python discards this coroutine
            raise
        except BaseException as error:
            return self._failed(call, error)

    def _argument(self, call: _Call) -> str | tuple[str, ...]:
        return call.completions if self._form.batched else call.completions[0]

    def _end(self, call: _Call, outcomes: Sequence[Outcome]) -> None:
        self._unended.discard(call.number)
        self._unsent += enumerate(outcomes, start=call.number)
        now_s = time.monotonic()
        if self._runner is not None or now_s - self._sent_s >= SEND_EVERY_S:
            self.send(Reply(id=self._request, outcomes=tuple(self._unsent), last=False))
            self._unsent, self._sent_s = [], now_s

    def _outcomes(self, call: _Call, value: object) -> list[Outcome]:
        """Returns the outcomes of the completions of a call that returned `value`. Raises Unusable if it is not a list
        of the right length."""
        if not self._form.batched:
            return [self._outcome(value)]
        values = listed(value, len(call.completions))
        return [self._outcome(each, at=f" at index {index}") for index, each in enumerate(values)]

    def _outcome(self, value: object, *, at: str = "") -> Outcome:
        try:
            if isinstance(value, Mapping):
                return components(value, weights=self.reward.weights, at=at)
            return number(value, at=at)
        except Unusable as unusable:
            return Failure(reason=unusable.reason, message=sendable(f"{self._subject} {unusable}"))

    def _failed(self, call: _Call, error: BaseException) -> list[Outcome]:
        """Returns the outcomes of a call that failed as a whole."""
        who = caller(self.section)
        if isinstance(error, TermFailed):
            who, error = error.who, error.cause
        if isinstance(error, MemoryError):
            self._retire = _OUT_OF_MEMORY
        raised = ""
        if isinstance(error, Unusable):
            reason, what = error.reason, str(error)
        else:
            reason, raised = RewardFailure.RAISED, sendable(type(error).__name__)[:MAX_COMPONENT_NAME_CHARS]
            what = f"raised {describe_error(error)}{self._hint(error)}"
        count = len(call.completions)
        return [Failure(reason=reason, message=sendable(f"{who} {what}"), of_call=count > 1, error=raised)] * count

    def _hint(self, error: BaseException) -> str:
        if isinstance(error, MemoryError):
            return f"; the limit is environment.score_memory_mib = {self.section.score_memory_mib}, raise it if needed"
        return secrets_hint(error, self.withheld)


class _Steps(Coroutine[Any, Any, list[Outcome]]):
    """A coroutine that calls `begin` with `number` before each of its steps, and with `NO_COMPLETION` after it.

    An event loop runs one coroutine at a time. So the call that blocks the loop, or ends the process, is known.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, list[Outcome]], *, number: int, begin: Callable[[int], None]
    ) -> None:
        self._coroutine = coroutine
        self._number = number
        self._begin = begin

    def send(self, value: Any, /) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        self._begin(self._number)
        try:
            return step(*given)
        finally:
            self._begin(NO_COMPLETION)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, list[Outcome]]:
        return self._coroutine.__await__()
