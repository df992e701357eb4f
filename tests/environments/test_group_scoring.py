"""A reward of any form gives each completion one finite number, or one failure with its reason. A completion that fails
does not keep the others from being scored."""

import asyncio
import math
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hostile_rewards import misbehave

from asyncrl import shown_text
from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments import group_scoring
from asyncrl.environments.group_scoring import GroupScoring
from asyncrl.environments.reward_function import reward_function, subject
from asyncrl.environments.scoring_messages import (
    NO_COMPLETION,
    Failure,
    Group,
    Outcome,
    Reply,
    Request,
    RewardFailure,
)
from asyncrl.environments.secrets import Secrets

TASK = Task(question="q", prompt="q", answer="a")
HANGS_S = 600.0


def request(*groups: tuple[str, ...]) -> Request:
    return Request(id=7, groups=tuple(Group(task=TASK, completions=completions) for completions in groups))


def replies(
    function: Callable[..., Any], *groups: tuple[str, ...], timeout_s: float = HANGS_S, **options: Any
) -> list[Reply]:
    """Returns the replies to a request, only the last of which is marked as such."""
    section = EnvironmentSection(reward="tasks:judge", score_timeout_s=timeout_s)
    sent: list[Reply] = []
    reward = reward_function(function, named=subject(section))
    GroupScoring(reward, section, send=sent.append, **options).score(request(*groups))
    assert {reply.id for reply in sent} == {7}
    assert [reply.last for reply in sent] == [False] * (len(sent) - 1) + [True]
    return sent


def outcomes_of(sent: list[Reply]) -> list[Outcome]:
    """Returns the outcomes in the order of the completions. Each of them is sent once."""
    pairs = [pair for reply in sent for pair in reply.outcomes]
    assert sorted(number for number, _ in pairs) == list(range(len(pairs)))
    return [outcome for _, outcome in sorted(pairs, key=lambda pair: pair[0])]


def scored(function: Callable[..., Any], *completions: str, **options: Any) -> list[Outcome]:
    sent = replies(function, completions, **options)
    assert not sent[-1].retire
    return outcomes_of(sent)


def failure_of(function: Callable[..., Any], *completions: str, **options: Any) -> Failure:
    """Returns the failure of the first completion that has one."""
    return next(each for each in scored(function, *completions, **options) if isinstance(each, Failure))


def test_rewards_come_in_the_order_of_the_completions_and_bools_are_numbers() -> None:
    assert scored(misbehave, "abc", "", "bool", "ab") == [3.0, 0.0, 1.0, 2.0]


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
def test_an_unusable_reward_is_a_failure_of_its_completion_only_and_names_the_setting(
    behaviour: str, reason: RewardFailure, message: str
) -> None:
    before, failure, after = scored(misbehave, "abc", behaviour, "ab")
    assert (before, after) == (3.0, 2.0)
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.of_call) == (reason, False)
    raised = re.match(r"raised (\w+)", message)
    assert failure.error == (raised[1] if raised else "")
    assert failure.message.startswith(f"environment.reward = tasks:judge {message}")


def test_a_coroutine_of_a_plain_function_is_named_and_closed() -> None:
    async def judge() -> float:
        return 1.0

    failure = failure_of(lambda task, completion: judge(), "a")
    assert failure.message.endswith("returned a coroutine; declare the function with `async def`")


@pytest.mark.fault("F19")
def test_running_out_of_memory_retires_the_process_and_leaves_the_other_completions_to_a_new_one() -> None:
    def exhausted(task: Task, completion: str) -> float:
        if completion == "b":
            raise MemoryError
        return 1.0

    sent = replies(exhausted, ("a", "b", "c"))
    assert "score_memory_mib" in sent[-1].retire
    first, failure = outcomes_of(sent)
    assert first == 1.0
    assert isinstance(failure, Failure)
    assert failure.reason == RewardFailure.RAISED
    assert "the limit is environment.score_memory_mib = 2048" in failure.message


def test_outcomes_are_sent_before_the_end_if_the_scoring_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are known if a later completion ends the process."""
    now_s = [0.0]

    def judge(task: Task, completion: str) -> float:
        now_s[0] += float(completion)
        return float(completion)

    monkeypatch.setattr(group_scoring, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    slow = replies(judge, ("2", "3", "4"))
    assert [reply.outcomes for reply in slow] == [((0, 2.0),), ((1, 3.0),), ((2, 4.0),), ()]
    fast = replies(judge, ("0.002", "0.002", "0.002", "0"))
    assert [len(reply.outcomes) for reply in fast] == [3, 1], "fast completions are sent together"


def test_an_own_score_is_named_by_the_environment() -> None:
    section, sent = EnvironmentSection(name="tasks:Riddles"), list[Reply]()
    reward = reward_function(misbehave, named=subject(section))
    GroupScoring(reward, section, send=sent.append).score(request(("none",)))
    [failure] = outcomes_of(sent)
    assert isinstance(failure, Failure)
    assert failure.message.startswith("environment.name = tasks:Riddles returned None")


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
    assert scored(outer, "abc", "", "ab") == [3.0, 0.0, 2.0]
    assert calls == [("abc", "", "ab")]


def test_a_batched_reward_may_return_an_array() -> None:
    assert scored(lambda task, completions: Array(), "a", "b") == [0.5, 0.25]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("value", "reason", "failed", "message"),
    [
        ([1.0, 2.0], RewardFailure.WRONG_TYPE, None, "returned 2 rewards for 3 completions"),
        ([], RewardFailure.WRONG_TYPE, None, "returned 0 rewards for 3 completions"),
        (1.0, RewardFailure.WRONG_TYPE, None, "returned a float for 3 completions; a reward with the parameter"),
        ("abc", RewardFailure.WRONG_TYPE, None, "returned a str for 3 completions"),
        ({"a": 1, "b": 2, "c": 3}, RewardFailure.WRONG_TYPE, None, "returned a dict for 3 completions"),
        ([1.0, None, 2.0], RewardFailure.WRONG_TYPE, 1, "returned None at index 1; a reward is a number"),
        ([1.0, 2.0, {}], RewardFailure.WRONG_TYPE, 2, "returned an empty dict at index 2; name each component"),
        ([math.nan, 2.0, 3.0], RewardFailure.NOT_FINITE, 0, "returned nan at index 0; a reward is a finite number"),
    ],
)
@pytest.mark.fault("F19")
def test_an_unusable_batch_fails_as_a_whole_and_an_unusable_number_in_it_fails_its_completion(
    value: object, reason: RewardFailure, failed: int | None, message: str, asynchronous: bool
) -> None:
    async def awaited(task: Task, completions: tuple[str, ...]) -> object:
        return value

    found = scored(awaited if asynchronous else lambda task, completions: value, "a", "b", "c")
    failures = [each for each in found if isinstance(each, Failure)]
    assert [place for place, each in enumerate(found) if isinstance(each, Failure)] == (
        [0, 1, 2] if failed is None else [failed]
    )
    assert {(each.reason, each.of_call) for each in failures} == {(reason, failed is None)}
    assert failures[0].message.startswith(f"environment.reward = tasks:judge {message}")


def test_a_batch_of_one_fails_for_that_completion() -> None:
    assert not failure_of(lambda task, completions: None, "a").of_call
    assert not failure_of(lambda task, completions: 1 / 0, "a").of_call
    assert failure_of(lambda task, completions: 1 / 0, "a", "b").of_call


# --- all completions at once ------------------------------------------------------------------------------------------


def test_an_async_reward_scores_all_completions_of_a_group_at_once() -> None:
    everyone = asyncio.Barrier(3)

    async def judge(task: Task, completion: str) -> float:
        await everyone.wait()  # if completions were scored one by one, the first would wait forever
        return len(completion)

    assert scored(judge, "abc", "", "ab", timeout_s=60.0) == [3.0, 0.0, 2.0]


@pytest.mark.fault("F19")
def test_groups_of_an_async_reward_are_scored_at_once_and_a_completion_fails_alone() -> None:
    everyone = asyncio.Barrier(7)

    async def judge(task: Task, completion: str) -> Any:
        await everyone.wait()
        return misbehave(task, completion)

    groups = (("abc", "ab"), ("a", "raise", "raise_system_exit", "none"), ("",))
    found = outcomes_of(replies(judge, *groups, timeout_s=60.0))
    assert [each for each in found if not isinstance(each, Failure)] == [3.0, 2.0, 1.0, 0.0]
    assert [isinstance(each, Failure) for each in found] == [False] * 3 + [True] * 3 + [False]


def test_the_progress_of_an_async_reward_is_the_completion_whose_code_runs_at_the_moment() -> None:
    seen: list[int] = []
    turns = {"a": asyncio.Event(), "b": asyncio.Event()}

    async def judge(task: Task, completion: str) -> float:
        at.append((completion, seen[-1]))
        if completion == "a":
            await turns["a"].wait()
        else:
            turns["a"].set()
        at.append((completion, seen[-1]))
        return 1.0

    at: list[tuple[str, int]] = []
    replies(judge, ("a", "b"), begin=seen.append)
    assert at == [("a", 0), ("b", 1), ("b", 1), ("a", 0)]
    assert seen == [NO_COMPLETION, 0, NO_COMPLETION, 1, NO_COMPLETION, 0, NO_COMPLETION]


def test_an_async_reward_runs_in_the_same_event_loop_for_all_groups() -> None:
    loops = set()

    async def judge(task: Task, completion: str) -> float:
        loops.add(asyncio.get_running_loop())
        return 1.0

    section, sent = EnvironmentSection(reward="tasks:judge"), list[Reply]()
    scoring = GroupScoring(reward_function(judge, named=subject(section)), section, send=sent.append)
    for _ in range(3):
        sent.clear()
        scoring.score(request(("a", "b")))
        assert outcomes_of(sent) == [1.0, 1.0]
    assert len(loops) == 1


@pytest.mark.fault("F19")
def test_an_async_reward_that_takes_too_long_is_cancelled_and_the_others_and_the_process_go_on() -> None:
    cancelled = []

    async def judge(task: Task, completion: str) -> float:
        try:
            await (asyncio.Event().wait() if completion == "hang" else asyncio.sleep(0))
        except asyncio.CancelledError:
            cancelled.append(completion)
            raise
        return 1.0

    before, failure, after = scored(judge, "a", "hang", "b", timeout_s=0.1)
    assert (before, after) == (1.0, 1.0)
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.of_call) == (RewardFailure.TIMEOUT, False)
    assert failure.message == (
        "environment.reward = tasks:judge took longer than environment.score_timeout_s = 0.1 s for one completion; "
        "raise it"
    )
    assert cancelled == ["hang"]


def test_an_async_reward_that_ignores_its_cancellation_retires_the_process() -> None:
    async def judge(task: Task, completion: str) -> float:
        while completion == "hang":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    sent = replies(judge, ("a", "hang"), timeout_s=0.1)
    first, failure = outcomes_of(sent)
    assert first == 1.0
    assert isinstance(failure, Failure)
    assert failure.reason == RewardFailure.TIMEOUT
    assert sent[-1].retire == "has a reward call that did not end when it was cancelled"


def test_an_async_reward_that_stops_its_loop_fails_for_all_completions_that_have_not_ended() -> None:
    async def judge(task: Task, completion: str) -> float:
        if completion == "stop":
            for _ in range(9):  # until the first completion has ended
                await asyncio.sleep(0)
            asyncio.get_running_loop().stop()
            await asyncio.Event().wait()
        if completion == "wait":
            await asyncio.Event().wait()
        return 1.0

    sent = replies(judge, ("a", "stop", "wait"))
    assert sent[-1].retire == "broke its event loop"
    first, *failed = outcomes_of(sent)
    assert first == 1.0
    assert [each.reason for each in failed if isinstance(each, Failure)] == [RewardFailure.RAISED] * 2


def test_a_batched_async_reward_has_the_time_of_all_its_completions() -> None:
    async def judge(task: Task, completions: tuple[str, ...]) -> list[float]:
        await asyncio.Event().wait()
        return []

    failure = failure_of(judge, "a", "b", timeout_s=0.1)
    assert (failure.reason, failure.of_call) == (RewardFailure.TIMEOUT, True)
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
