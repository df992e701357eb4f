"""Several rewards of one completion (`environment.rewards`), as one function that returns all of them by name."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.data.prompts import Task
from asyncrl.environments.reward_function import Form, RewardFunction
from asyncrl.environments.reward_values import listed


class TermFailed(Exception):
    """One of several rewards raised `cause`, or the reward of an episode with tools did. `who` is the setting that
    names the reward, for the message."""

    def __init__(self, who: str, cause: Exception) -> None:
        super().__init__(who)
        self.who = who
        self.cause = cause


def combined(terms: Mapping[str, RewardFunction], *, weights: Mapping[str, float]) -> RewardFunction:
    """Returns one function that calls all `terms`, and returns a dict of their values by name for each completion.

    It takes a whole group if one of them does, and it is async if one of them is. If a term raises, the
    function raises TermFailed.
    """
    batched = any(term.form.batched for term in terms.values())
    form = Form(batched=batched, asynchronous=any(term.form.asynchronous for term in terms.values()))

    def of_group(task: Task, completions: Sequence[str]) -> list[dict[str, Any]]:
        columns = [_column(name, term, task, completions) for name, term in terms.items()]
        return [dict(zip(terms, values, strict=True)) for values in zip(*columns, strict=True)]

    async def of_group_awaited(task: Task, completions: Sequence[str]) -> list[dict[str, Any]]:
        columns = await asyncio.gather(
            *[_awaited_column(name, term, task, completions) for name, term in terms.items()]
        )
        return [dict(zip(terms, values, strict=True)) for values in zip(*columns, strict=True)]

    def of_one(task: Task, completion: str) -> dict[str, Any]:
        return of_group(task, [completion])[0]

    async def of_one_awaited(task: Task, completion: str) -> dict[str, Any]:
        return (await of_group_awaited(task, [completion]))[0]

    if form.asynchronous:
        return RewardFunction(function=of_group_awaited if batched else of_one_awaited, form=form, weights=weights)
    return RewardFunction(function=of_group if batched else of_one, form=form, weights=weights)


def _column(name: str, term: RewardFunction, task: Task, completions: Sequence[str]) -> list[Any]:
    """Returns the values of one term for the completions."""
    with _named(name):
        if term.form.batched:
            return listed(term.function(task, completions), len(completions))
        return [term.function(task, completion) for completion in completions]


async def _awaited_column(name: str, term: RewardFunction, task: Task, completions: Sequence[str]) -> list[Any]:
    if not term.form.asynchronous:
        return _column(name, term, task, completions)
    with _named(name):
        if term.form.batched:
            return listed(await term.function(task, completions), len(completions))
        return list(await asyncio.gather(*[term.function(task, completion) for completion in completions]))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise TermFailed(f"environment.rewards: {name}", error) from error
