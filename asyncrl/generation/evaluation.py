"""Answers to held-out questions. They belong to no group and are not counted in the ledger."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from asyncrl.buffer.records import Failure
from asyncrl.config.schema import HeldoutSet
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.data.prompts import Task
from asyncrl.errors import RolloutError, RunError
from asyncrl.generation.rollout import AnswerNumbers, Rollouts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of the samples of a held-out question. `non_greedy_tokens` is the number of tokens that were not the
    most probable ones, which must be 0 for a single greedy sample; None for several samples. `numbers` has the means of
    the samples' other numbers."""

    of_samples: tuple[float, ...]
    non_greedy_tokens: int | None = None
    numbers: AnswerNumbers | None = None


Answer = Rewards | Failure
"""The rewards of a held-out question, or the failure of its rollout."""
Answered = TypeVar("Answered")


async def evaluate(
    tasks: Sequence[Task], *, how: HeldoutSet, rollouts: Rollouts, coordinator: CoordinatorClient, at_once: int
) -> list[Answer]:
    """Generates answers to each task of a held-out set, as `how` says, and returns their rewards. A failure is reported
    to the coordinator when it occurs, because the evaluation may go on for minutes."""

    async def rewards(number: int, task: Task) -> Rewards:
        answers = await rollouts.answers(task, how, number=number)
        return Rewards(
            tuple(answer.reward for answer in answers),
            answers[0].non_greedy_tokens,
            mean_numbers([answer.numbers for answer in answers]),
        )

    async def report(failure: Failure) -> None:
        try:
            await coordinator.call(Coordinator.heldout_failed, uuid.uuid4().hex, failure)
        except (RunError, TimeoutError) as lost:
            logger.warning("the failure of a held-out question did not reach the buffer: %s", lost)

    return await answers_of(tasks, rewards, at_once=at_once, report=report)


async def answers_of(
    tasks: Sequence[Task],
    answer: Callable[[int, Task], Awaitable[Answered]],
    *,
    at_once: int,
    report: Callable[[Failure], Awaitable[None]],
) -> list[Answered | Failure]:
    """Returns what `answer` returns for each task and its number. At most `at_once` tasks run at a time.

    If a rollout fails with a RolloutError, its entry is the failure, which `report` gets, and the others go on.
    """
    limit = asyncio.Semaphore(at_once)

    async def one(number: int, task: Task) -> Answered | Failure:
        async with limit:
            try:
                return await answer(number, task)
            except RolloutError as error:
                logger.warning("held-out question %.40r failed (%s): %s", task.question, error.reason, error)
                failure = Failure.of(error, prompt=task.prompt)
                await report(failure)
                return failure

    return list(await asyncio.gather(*[one(number, task) for number, task in enumerate(tasks)]))


def mean_numbers(numbers: Sequence[AnswerNumbers]) -> AnswerNumbers | None:
    """Returns the means of the numbers; None without any. The mean of a component, or of the turns, is over the
    completions that have it.

    >>> cut = AnswerNumbers(components={"right": 0.0}, completion_tokens=8, truncated=1, turns=None)
    >>> mean_numbers([cut, AnswerNumbers(components={}, completion_tokens=4, truncated=0, turns=3)])
    AnswerNumbers(components={'right': 0.0}, completion_tokens=6.0, truncated=0.5, turns=3.0)
    """
    if not numbers:
        return None
    names = dict.fromkeys(name for each in numbers for name in each.components)
    turns = [each.turns for each in numbers if each.turns is not None]
    return AnswerNumbers(
        components={
            name: fmean(each.components[name] for each in numbers if name in each.components) for name in names
        },
        completion_tokens=fmean(each.completion_tokens for each in numbers),
        truncated=fmean(each.truncated for each in numbers),
        turns=fmean(turns) if turns else None,
    )


def prompts_at_once(slots: int, *, share: float, samples: int) -> int:
    """Returns how many prompts with `samples` samples each run at a time, at least 1, if the replica has room for
    `slots` samples and the evaluation may use the share `share` of it.

    >>> prompts_at_once(128, share=0.25, samples=8)
    4
    """
    return max(1, int(share * slots) // samples)
