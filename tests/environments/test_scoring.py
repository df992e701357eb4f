import asyncio
import contextlib
import os
import pickle
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from scoring_processes import pids, replaced

from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments import scoring_child
from asyncrl.environments.scoring import Scorer
from asyncrl.environments.scoring_messages import Group, RewardFailure
from asyncrl.environments.scoring_process import GIVEN_UP_AFTER, closed, started
from asyncrl.environments.secrets import Secrets
from asyncrl.errors import ConfigError, DataError, InfraError

pytestmark = pytest.mark.integration

TASK = Task(question="q", prompt="q", answer="abc", metadata={"pids_file": ""})


def section(reward: str = "hostile_rewards:misbehave", *, timeout_s: float = 30.0) -> EnvironmentSection:
    return EnvironmentSection(reward=reward, score_timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def scoring(environment: EnvironmentSection) -> AsyncIterator[Scorer]:
    scorer = Scorer(environment)
    try:
        await scorer.start()
        yield scorer
    finally:
        await scorer.close()


async def failure_of(scorer: Scorer, *completions: str, task: Task = TASK) -> DataError:
    """Returns the only failure in a group, all of whose other completions must have a reward."""
    [failure] = [score for score in await scorer.score(task, completions) if isinstance(score, DataError)]
    return failure


def assert_gone(pid: int) -> None:
    """Fails unless the process dies. Its new parent may not have reaped it yet."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        assert poll.poll(60_000), f"process {pid} is alive"
    finally:
        os.close(process)


@pytest.mark.asyncio
async def test_groups_are_scored_in_a_process_without_secrets_and_heavy_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SOME_API_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("SSL_CERT_FILE", "/certificates")
    async with scoring(section()) as scorer:
        assert await scorer.score(TASK, ["abc", "", "é\n\x00"]) == [3.0, 0.0, 3.0]
        assert await scorer.score(TASK, []) == []
        assert await scorer.score(TASK, ["environment", "heavy_imports", "certificates"]) == [0.0, 0.0, 1.0]
        assert pids(scorer) != [os.getpid()]


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_a_raising_or_lying_reward_fails_its_completion_and_the_process_goes_on() -> None:
    async with scoring(section()) as scorer:
        [pid] = pids(scorer)
        failure = await failure_of(scorer, "abc", "raise")
        assert failure.reason == RewardFailure.RAISED
        assert re.fullmatch(
            r"environment.reward = hostile_rewards:misbehave raised RuntimeError: the verifier is broken "
            r"\(.*hostile_rewards.py:\d+\)",
            str(failure),
        )
        assert failure.completion == "raise"
        again = pickle.loads(pickle.dumps(failure))
        assert (again.completion, again.error) == ("raise", "RuntimeError")
        assert (await failure_of(scorer, "nan")).reason == RewardFailure.NOT_FINITE
        assert (await failure_of(scorer, "string")).reason == RewardFailure.WRONG_TYPE
        assert await scorer.score(TASK, ["fork_and_return", "ab"]) == [1.0, 2.0]
        assert await scorer.score(TASK, ["abc"]) == [3.0]
        assert pids(scorer) == [pid]


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_what_kills_the_process_fails_its_completion_and_a_new_process_scores_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scoring(section()) as scorer:
        for count, (behaviour, status) in enumerate([("segfault", "SIGSEGV"), ("exit", "exit status 0")], start=1):
            first, failure, last = await scorer.score(TASK, ["abc", behaviour, "ab"])
            assert (first, last) == (3.0, 2.0)
            assert isinstance(failure, DataError)
            assert failure.reason == RewardFailure.CRASHED
            assert failure.completion == behaviour
            assert "hostile_rewards:misbehave ended its scoring process: the process " in str(failure)
            assert status in str(failure)
            assert await scorer.score(TASK, ["abc"]) == [3.0]
            assert replaced(caplog) == count


@pytest.mark.parametrize("message", ["send_garbage", "send_another_reply", "send_a_pickle", "send_without_end"])
@pytest.mark.asyncio
@pytest.mark.fault("F32")
async def test_a_malformed_or_huge_message_fails_its_group_and_the_process_is_replaced(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scoring_child, "MAX_REPLY_BYTES", 2**20)
    task = Task(question="q", prompt="q", answer="", metadata={"pids_file": str(tmp_path / "unpickled")})
    async with scoring(section()) as scorer:
        failure = await failure_of(scorer, message, task=task)
        assert failure.reason == RewardFailure.CRASHED
        assert "ended its scoring process: the process sent a " in str(failure)
        assert not (tmp_path / "unpickled").exists()
        assert await scorer.score(TASK, ["abc"]) == [3.0]
        assert replaced(caplog) == 1


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_a_crash_is_noticed_although_a_child_holds_the_socket_and_the_child_is_killed(tmp_path: Path) -> None:
    task = Task(question="q", prompt="q", answer="", metadata={"pids_file": str(tmp_path / "pids")})
    async with scoring(section()) as scorer:
        failure = await failure_of(scorer, "die_with_a_child", task=task)
        assert failure.reason == RewardFailure.CRASHED
        assert "exit status 3" in str(failure)
        assert_gone(int((tmp_path / "pids").read_text()))
        assert await scorer.score(TASK, ["abc"]) == [3.0]


@pytest.mark.parametrize("behaviour", ["hang", "hang_in_c", "print_without_end"])
@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_what_does_not_end_is_killed_by_the_wall_clock_and_replaced(behaviour: str) -> None:
    async with scoring(section(timeout_s=0.5)) as scorer:
        [pid] = pids(scorer)
        failure = await failure_of(scorer, "abc", behaviour, "abc")
        assert failure.reason == RewardFailure.TIMEOUT
        assert failure.completion == behaviour
        assert str(failure) == (
            "environment.reward = hostile_rewards:misbehave took longer than environment.score_timeout_s = 0.5 s for "
            "one completion; raise it, or make the reward an async or batched function"
        )
        assert_gone(pid)
        assert pids(scorer) != [pid], "a new process has scored the last completion"


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_a_completion_that_took_too_long_is_scored_once_more(tmp_path: Path) -> None:
    """D25: on a busy machine, completions of a healthy reward exceed their limit."""
    task = Task(question="q", prompt="q", answer="", metadata={"file": str(tmp_path / "scored")})
    async with scoring(section("judges:late_once", timeout_s=1.0)) as scorer:
        assert await scorer.score(task, ["abc", "late"]) == [3.0, 4.0]
    assert (tmp_path / "scored").read_text().split() == ["abc", "late", "late"]


@pytest.mark.asyncio
async def test_a_batched_call_that_took_too_long_is_made_once_more(tmp_path: Path) -> None:
    task = Task(question="q", prompt="q", answer="", metadata={"file": str(tmp_path / "scored")})
    async with scoring(section("judges:late_once_batched", timeout_s=0.5)) as scorer:
        assert await scorer.score(task, ["late", "abc"]) == [4.0, 3.0]
    assert (tmp_path / "scored").read_text().split() == ["late", "late", "abc"]


WITH_HANG_AND_CRASH = ["a", "ab", "hang", "abc", "crash", "abcd"]


async def score_with_a_hang_and_a_crash(reward: str, noted: Path) -> None:
    """Fails unless all other completions have a reward. The reward notes what it scores in the file `noted`."""
    task = Task(question="q", prompt="q", answer="", metadata={"file": str(noted)})
    async with scoring(section(f"judges:{reward}", timeout_s=3.0)) as scorer:
        scores = await scorer.score(task, WITH_HANG_AND_CRASH)
        assert [score for score in scores if not isinstance(score, DataError)] == [1.0, 2.0, 3.0, 4.0]
        failures = [score for score in scores if isinstance(score, DataError)]
        assert [(each.reason, each.completion) for each in failures] == [
            (RewardFailure.TIMEOUT, "hang"),
            (RewardFailure.CRASHED, "crash"),
        ]


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_known_rewards_are_kept_when_a_process_is_killed_and_are_not_computed_again(tmp_path: Path) -> None:
    """A plain reward and an asynchronous one wait for their time limits at the same time."""
    rewards = ("noted", "noted_async")
    await asyncio.gather(*(score_with_a_hang_and_a_crash(reward, tmp_path / reward) for reward in rewards))
    for reward in rewards:
        noted = (tmp_path / reward).read_text().split()
        assert sorted(noted) == sorted([*WITH_HANG_AND_CRASH, "hang"]), (
            "each was scored once, and what took too long once more"
        )


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_a_reward_that_always_hangs_costs_a_group_one_time_limit_and_not_one_for_each_completion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scoring(section(timeout_s=0.5)) as scorer:
        for count, expected in ((GIVEN_UP_AFTER, GIVEN_UP_AFTER), (1, GIVEN_UP_AFTER + 1)):
            scores = await scorer.score(TASK, ["hang"] * 8)
            errors = [score for score in scores if isinstance(score, DataError)]
            assert [each.reason for each in errors] == [RewardFailure.TIMEOUT] * 8
            assert [each.completion for each in errors] == ["hang"] * count + [""] * (8 - count)
            assert replaced(caplog) == expected
        assert (await scorer.score(TASK, ["abc", "hang"]))[0] == 3.0, "a reward that ends sometimes is not given up"
        assert [isinstance(score, DataError) for score in await scorer.score(TASK, ["hang", "abc"])] == [True, False]


@pytest.mark.asyncio
async def test_a_group_that_fails_anyway_is_given_up_at_the_first_hang(caplog: pytest.LogCaptureFixture) -> None:
    environment = EnvironmentSection(reward="hostile_rewards:misbehave", score_timeout_s=0.5, on_error="fail")
    async with scoring(environment) as scorer:
        scores = await scorer.score(TASK, ["abc", "hang", "hang", "abc"])
        assert [getattr(score, "completion", score) for score in scores] == ["", "hang", "", ""]
        assert replaced(caplog) == 1


@pytest.mark.parametrize(("on_error", "tries"), [("fail", 1), ("mask", GIVEN_UP_AFTER)])
@pytest.mark.fault("F19")
def test_of_groups_that_are_scored_together_only_the_one_that_ends_the_process_is_given_up(
    on_error: Literal["fail", "mask"], tries: int
) -> None:
    environment = section(timeout_s=10.0).model_copy(update={"on_error": on_error})
    groups = [Group(task=TASK, completions=texts) for texts in (("exit",) * 5, ("abc", "ab"), ("exit",), ("abc",))]
    with started(environment, secrets=Secrets(), output=print) as process:
        given_up, second, third, fourth = process.score(groups)
    assert [getattr(score, "completion", score) for score in given_up] == ["exit"] * tries + [""] * (5 - tries)
    assert (second, fourth) == ([3.0, 2.0], [3.0])
    assert [getattr(score, "completion", score) for score in third] == ["exit"]


@pytest.mark.fault("F19")
def test_a_group_behind_others_in_a_request_has_its_own_time_limits() -> None:
    groups = [Group(task=TASK, completions=("0.6", "0.6"))] * 3
    for reward, timeout_s in (("judges:each", 1.0), ("judges:batch", 1.0)):
        with started(section(reward, timeout_s=timeout_s), secrets=Secrets(), output=print) as process:
            scores = [score for group in process.score(groups) for score in group]
        assert not any(isinstance(score, DataError) for score in scores), (
            "3.6 s in total, within the limit of each call"
        )


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_a_timeout_kills_all_that_the_reward_has_started(tmp_path: Path) -> None:
    task = Task(question="q", prompt="q", answer="", metadata={"pids_file": str(tmp_path / "pids")})
    async with scoring(section(timeout_s=6.0)) as scorer:
        assert (await failure_of(scorer, "fork_and_hang", task=task)).reason == RewardFailure.TIMEOUT
        started = (tmp_path / "pids").read_text().split()
        assert len(started) == 2
        for pid in started:
            assert_gone(int(pid))


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_memory_is_limited_and_the_process_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    environment = EnvironmentSection(reward="hostile_rewards:misbehave", score_timeout_s=30, score_memory_mib=256)
    async with scoring(environment) as scorer:
        failure = await failure_of(scorer, "eat_memory")
        assert failure.reason == RewardFailure.RAISED
        assert "MemoryError" in str(failure)
        assert replaced(caplog) == 1
        assert await scorer.score(TASK, ["abc"]) == [3.0]


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_a_process_with_too_many_children_is_replaced_but_its_rewards_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scoring(section()) as scorer:
        assert await scorer.score(TASK, ["leave_children"]) == [1.0]
        assert replaced(caplog) == 1
        assert await scorer.score(TASK, ["abc"]) == [3.0]


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_a_process_that_died_idle_is_replaced_without_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with scoring(section()) as scorer:
        [pid] = pids(scorer)
        os.kill(pid, signal.SIGKILL)
        assert_gone(pid)
        assert await scorer.score(TASK, ["abc"]) == [3.0]
        assert replaced(caplog) == 1


@pytest.mark.asyncio
async def test_a_hanging_group_holds_up_one_process_of_several() -> None:
    environment = EnvironmentSection(reward="hostile_rewards:misbehave", score_timeout_s=60, score_workers=2)
    async with scoring(environment) as scorer:
        assert len(set(pids(scorer))) == 2
        hanging = asyncio.ensure_future(scorer.score(TASK, ["hang"]))
        scores = await asyncio.gather(*(scorer.score(TASK, ["x" * n]) for n in range(20)))
        assert scores == [[float(n)] for n in range(20)]
        assert not hanging.done()
        await scorer.close()
        with pytest.raises(InfraError, match=str(closed())):
            await hanging


@pytest.mark.asyncio
async def test_close_ends_the_processes_and_whoever_scores_or_waits_in_line_is_told() -> None:
    async with scoring(section(timeout_s=60)) as scorer:
        [pid] = pids(scorer)
        waiting = [asyncio.ensure_future(scorer.score(TASK, [text])) for text in ("hang", "abc", "abc")]
        await asyncio.sleep(0)  # lets each score add its group to the queue
        await scorer.close()
        assert_gone(pid)
        for future in waiting:
            with pytest.raises(InfraError) as caught:
                await future
            assert caught.value.reason == "scorer_closed"
        with pytest.raises(InfraError):
            await scorer.score(TASK, ["abc"])
        await scorer.close()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("hostile_rewards:lenght", "did you mean 'length'"),
        ("no_such_module:reward", "no module 'no_such_module'"),
        ("hostile_rewards:NOT_CALLABLE", "not a callable"),
        ("exact_macth", "did you mean 'exact_match'"),
    ],
)
@pytest.mark.asyncio
@pytest.mark.fault("F28")
async def test_a_reward_that_does_not_exist_is_a_config_error_at_start(reward: str, message: str) -> None:
    scorer = Scorer(section(reward))
    with pytest.raises(ConfigError, match=message) as caught:
        await scorer.start()
    assert "environment.reward" in str(caught.value)
    assert pids(scorer) == []
    await scorer.close()


@pytest.mark.asyncio
async def test_the_environments_own_scoring_is_used_without_a_reward() -> None:
    environment = EnvironmentSection(name="reasoning_gym", options={"task": "spell_backward"})
    async with scoring(environment) as scorer:
        task = Task(question="q", prompt="q", answer="cba", metadata={"word": "abc"})
        assert await scorer.score(task, ["cba", " cba\n", "cbb", ""]) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.fault("F19")
def test_a_scoring_process_dies_with_its_parent_in_the_middle_of_a_hang() -> None:
    program = """
import asyncio
from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.scoring import Scorer
from scoring_processes import pids

async def main():
    scorer = Scorer(EnvironmentSection(reward="hostile_rewards:misbehave", score_timeout_s=600))
    await scorer.start()
    print(*pids(scorer), flush=True)
    await scorer.score(Task(question="", prompt="", answer=""), ["hang_in_c"])

asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        assert_gone(pid)
