"""A reward of any form gives a group one finite number for each completion, or one failure with its reason."""

import asyncio
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
from hostile_rewards import misbehave

from asyncrl import shown_text
from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.group_scoring import GroupScoring
from asyncrl.environments.reward_function import reward_function
from asyncrl.environments.scoring_messages import Failure, Group, Request, Result, RewardFailure
from asyncrl.environments.secrets import Secrets

TASK = Task(question="q", prompt="q", answer="a")
HANGS_S = 600.0


def request(*groups: tuple[str, ...]) -> Request:
    return Request(id=7, groups=tuple(Group(task=TASK, completions=completions) for completions in groups))


def results(
    function: Callable[..., Any], *groups: tuple[str, ...], timeout_s: float = HANGS_S, **options: Any
) -> tuple[Result, ...]:
    section = EnvironmentSection(reward="tasks:judge", score_timeout_s=timeout_s)
    reply = GroupScoring(reward_function(function, section), section, **options).score(request(*groups))
    assert reply.id == 7
    return reply.results


def scored(function: Callable[..., Any], *completions: str, **options: Any) -> Result:
    [result] = results(function, completions, **options)
    return result


def failure_of(function: Callable[..., Any], *completions: str, **options: Any) -> Failure:
    result = scored(function, *completions, **options)
    assert result.rewards == ()
    assert result.failure is not None
    return result.failure


def test_rewards_come_in_the_order_of_the_completions_and_bools_are_numbers() -> None:
    result = scored(misbehave, "abc", "", "bool", "ab")
    assert result.rewards == (3.0, 0.0, 1.0, 2.0)
    assert result.failure is None


@pytest.mark.parametrize(
    ("behaviour", "reason", "message"),
    [
        ("raise", RewardFailure.RAISED, "raised RuntimeError: the verifier is broken ("),
        ("raise_unprintable", RewardFailure.RAISED, "raised Unprintable"),
        ("raise_system_exit", RewardFailure.RAISED, "raised SystemExit: 0 ("),
        ("nan", RewardFailure.NOT_FINITE, "returned nan; a reward is a finite number"),
        ("inf", RewardFailure.NOT_FINITE, "returned -inf; a reward is a finite number"),
        ("huge", RewardFailure.NOT_FINITE, "returned inf; a reward is a finite number"),
        ("none", RewardFailure.WRONG_TYPE, "returned None; a reward is a number"),
        ("string", RewardFailure.WRONG_TYPE, "returned a str; a reward is a number"),
        ("list", RewardFailure.WRONG_TYPE, "returned a list; name the second parameter `completions` to score a group"),
    ],
)
@pytest.mark.fault("F19")
def test_an_unusable_reward_is_a_failure_that_names_its_sample_and_the_setting(
    behaviour: str, reason: RewardFailure, message: str
) -> None:
    failure = failure_of(misbehave, "abc", behaviour, "ab")
    assert (failure.reason, failure.sample) == (reason, 1)
    assert failure.message.startswith(f"environment.reward = tasks:judge {message}")
    assert not scored(misbehave, behaviour).retire


def test_a_coroutine_of_a_plain_function_is_named_and_closed() -> None:
    async def judge() -> float:
        return 1.0

    failure = failure_of(lambda task, completion: judge(), "a")
    assert failure.message.endswith("returned a coroutine; declare the function with `async def`")


@pytest.mark.fault("F19")
def test_running_out_of_memory_retires_the_process() -> None:
    def exhausted(task: Task, completion: str) -> float:
        raise MemoryError

    result = scored(exhausted, "a")
    assert "score_memory_mib" in result.retire
    assert result.failure is not None
    assert result.failure.reason == RewardFailure.RAISED
    assert "the limit is environment.score_memory_mib = 2048" in result.failure.message


def test_an_own_score_is_named_by_the_environment() -> None:
    section = EnvironmentSection(name="tasks:Riddles")
    [result] = GroupScoring(reward_function(misbehave, section), section).score(request(("none",))).results
    assert result.failure is not None
    assert result.failure.message.startswith("environment.name = tasks:Riddles returned None")


# --- a whole group in one call ----------------------------------------------------------------------------------------


def lengths(task: Task, completions: tuple[str, ...]) -> list[int]:
    return [len(completion) for completion in completions]


async def awaited_lengths(task: Task, completions: tuple[str, ...]) -> list[int]:
    await asyncio.sleep(0)
    return lengths(task, completions)


class Array:
    """Stands for a NumPy array, whose elements become Python numbers only by `tolist`."""

    def tolist(self) -> list[float]:
        return [0.5, 0.25]


@pytest.mark.parametrize("function", [lengths, awaited_lengths])
def test_a_batched_reward_is_called_once_with_the_whole_group(function: Callable[..., Any]) -> None:
    calls: list[tuple[str, ...]] = []

    def noted(task: Task, completions: tuple[str, ...]) -> Any:
        calls.append(completions)
        return function(task, completions)

    async def noted_and_awaited(task: Task, completions: tuple[str, ...]) -> Any:
        return await noted(task, completions)

    outer = noted_and_awaited if asyncio.iscoroutinefunction(function) else noted
    assert scored(outer, "abc", "", "ab").rewards == (3.0, 0.0, 2.0)
    assert calls == [("abc", "", "ab")]


def test_a_batched_reward_may_return_an_array() -> None:
    assert scored(lambda task, completions: Array(), "a", "b").rewards == (0.5, 0.25)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("value", "reason", "sample", "message"),
    [
        ([1.0, 2.0], RewardFailure.WRONG_TYPE, None, "returned 2 rewards for 3 completions"),
        ([], RewardFailure.WRONG_TYPE, None, "returned 0 rewards for 3 completions"),
        (1.0, RewardFailure.WRONG_TYPE, None, "returned a float for 3 completions; a reward with the parameter"),
        ("abc", RewardFailure.WRONG_TYPE, None, "returned a str for 3 completions"),
        ({"a": 1, "b": 2, "c": 3}, RewardFailure.WRONG_TYPE, None, "returned a dict for 3 completions"),
        ([1.0, None, 2.0], RewardFailure.WRONG_TYPE, 1, "returned None at index 1; a reward is a number"),
        ([1.0, 2.0, {}], RewardFailure.WRONG_TYPE, 2, "returned a dict at index 2; a reward is a number"),
        ([math.nan, 2.0, 3.0], RewardFailure.NOT_FINITE, 0, "returned nan at index 0; a reward is a finite number"),
    ],
)
def test_an_unusable_batch_names_its_length_its_index_and_its_type(
    value: object, reason: RewardFailure, sample: int | None, message: str, asynchronous: bool
) -> None:
    async def awaited(task: Task, completions: tuple[str, ...]) -> object:
        return value

    failure = failure_of(awaited if asynchronous else lambda task, completions: value, "a", "b", "c")
    assert (failure.reason, failure.sample) == (reason, sample)
    assert failure.message.startswith(f"environment.reward = tasks:judge {message}")


def test_a_batch_of_one_fails_for_that_completion() -> None:
    assert failure_of(lambda task, completions: None, "a").sample == 0
    assert failure_of(lambda task, completions: 1 / 0, "a").sample == 0
    assert failure_of(lambda task, completions: 1 / 0, "a", "b").sample is None


# --- all completions at once ------------------------------------------------------------------------------------------


def test_an_async_reward_scores_all_completions_of_a_group_at_once() -> None:
    everyone = asyncio.Barrier(3)

    async def judge(task: Task, completion: str) -> float:
        await everyone.wait()  # if completions were scored one by one, the first would wait forever
        return len(completion)

    assert scored(judge, "abc", "", "ab", timeout_s=60.0).rewards == (3.0, 0.0, 2.0)


def test_groups_of_an_async_reward_are_scored_at_once_and_fail_alone() -> None:
    everyone = asyncio.Barrier(5)

    async def judge(task: Task, completion: str) -> Any:
        await everyone.wait()
        return misbehave(task, completion)

    first, second, third = results(judge, ("abc", "ab"), ("a", "raise"), ("",), timeout_s=60.0)
    assert (first.rewards, third.rewards) == ((3.0, 2.0), (0.0,))
    assert second.failure is not None
    assert second.failure.sample == 1


def test_the_progress_of_an_async_reward_is_the_first_completion_that_is_left() -> None:
    seen: list[int] = []
    order = ["d", "a", "c", "b"]
    turns = {text: asyncio.Event() for text in order}

    async def judge(task: Task, completion: str) -> float:
        if completion != order[0]:
            await turns[completion].wait()
        following = order[order.index(completion) + 1 :]
        if following:
            turns[following[0]].set()
        return 1.0

    results(judge, ("a", "b"), ("c", "d"), begin=seen.append)
    assert seen == [0, 0, 1, 1, 0]


def test_an_async_reward_runs_in_the_same_event_loop_for_all_groups() -> None:
    loops = set()

    async def judge(task: Task, completion: str) -> float:
        loops.add(asyncio.get_running_loop())
        return 1.0

    section = EnvironmentSection(reward="tasks:judge")
    scoring = GroupScoring(reward_function(judge, section), section)
    for _ in range(3):
        assert [result.rewards for result in scoring.score(request(("a", "b"))).results] == [(1.0, 1.0)]
    assert len(loops) == 1


def test_the_first_failure_of_an_async_reward_cancels_the_others() -> None:
    cancelled: list[str] = []

    async def judge(task: Task, completion: str) -> Any:
        if completion == "hang":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(completion)
                raise
        return misbehave(task, completion)

    for behaviour in ("raise", "raise_system_exit", "none"):
        result = scored(judge, "hang", behaviour, "hang")
        assert result.failure is not None
        assert result.failure.sample == 1
        assert not result.retire
        assert cancelled == ["hang", "hang"]
        cancelled.clear()


def test_an_async_reward_that_takes_too_long_is_cancelled_and_the_process_goes_on() -> None:
    cancelled = []

    async def judge(task: Task, completion: str) -> float:
        try:
            await (asyncio.Event().wait() if completion == "hang" else asyncio.sleep(0))
        except asyncio.CancelledError:
            cancelled.append(completion)
            raise
        return 1.0

    result = scored(judge, "a", "hang", "b", timeout_s=0.1)
    assert result.failure is not None
    assert (result.failure.reason, result.failure.sample) == (RewardFailure.TIMEOUT, 1)
    assert result.failure.message == (
        "environment.reward = tasks:judge took longer than environment.score_timeout_s = 0.1 s for one completion; "
        "raise it"
    )
    assert cancelled == ["hang"]
    assert not result.retire


def test_an_async_reward_that_ignores_its_cancellation_retires_the_process() -> None:
    async def judge(task: Task, completion: str) -> float:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    result = scored(judge, "a", "b", timeout_s=0.1)
    assert result.failure is not None
    assert result.failure.reason == RewardFailure.TIMEOUT
    assert result.retire == "has a reward call that did not end when it was cancelled"


def test_an_async_reward_that_stops_its_loop_is_a_failure() -> None:
    async def judge(task: Task, completion: str) -> float:
        asyncio.get_running_loop().stop()
        await asyncio.Event().wait()
        return 1.0

    result = scored(judge, "a", "b")
    assert result.failure is not None
    assert result.failure.reason == RewardFailure.RAISED
    assert result.retire


def test_a_batched_async_reward_has_the_time_of_all_its_completions() -> None:
    async def judge(task: Task, completions: tuple[str, ...]) -> list[float]:
        await asyncio.Event().wait()
        return []

    failure = failure_of(judge, "a", "b", timeout_s=0.1)
    assert (failure.reason, failure.sample) == (RewardFailure.TIMEOUT, None)
    assert "environment.score_timeout_s = 0.1 s × 2 completions = 0.2 s; raise it" in failure.message


# --- environment variables --------------------------------------------------------------------------------------------


def lacks_a_key(task: Task, completion: str) -> str:
    return os.environ["A_KEY_THAT_IS_NOT_SET"]


def test_a_lookup_in_the_environment_that_fails_gets_the_setting_that_passes_the_variable() -> None:
    assert failure_of(lacks_a_key, "a").message.endswith(
        "; add A_KEY_THAT_IS_NOT_SET to environment.secrets: reward code sees only the variables that are named there"
    )


def test_a_secret_is_redacted_before_a_long_error_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-0123456789"
    monkeypatch.setattr(shown_text, "_redact", Secrets({"KEY": secret}).redact)

    def judge(task: Task, completion: str) -> float:
        raise ValueError("x" * 490 + secret + "y" * 100)

    message = failure_of(judge, "a").message
    assert "<KEY>" in message
    assert "sk-" not in message
