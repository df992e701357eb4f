"""Reward code that attacks its generator fails its own completion: it ends neither the generator, nor the scorer."""

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import AsyncIterator, Sequence

import psutil
import pytest
from boundary_rewards import FORGED_NAMES, MEMORY, MESSAGES, NAMES, SIGNALS, TEXTS
from scoring_processes import pids

from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring import Scorer
from asyncrl.environments.scoring_messages import MAX_COMPONENTS, MAX_FAILURE_CHARS, RewardFailure
from asyncrl.errors import DataError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TASK = Task(question="q", prompt="q", answer="abc")


@contextlib.asynccontextmanager
async def scoring(reward: str, *, timeout_s: float = 30.0) -> AsyncIterator[Scorer]:
    scorer = Scorer(EnvironmentSection(reward=f"boundary_rewards:{reward}", score_timeout_s=timeout_s))
    try:
        await scorer.start()
        yield scorer
    finally:
        await scorer.close()


def failure_in(scores: Sequence[Score]) -> DataError:
    """Returns the failure of a group of one attack and one completion that is scored. The failure can be recorded."""
    failure, score = scores
    assert score == 3.0
    assert isinstance(failure, DataError)
    assert len(str(failure).encode()) <= 4 * MAX_FAILURE_CHARS
    assert "boundary_rewards" in str(failure)
    return failure


async def failures(scorer: Scorer, attacks: list[str]) -> list[DataError]:
    """Returns the failures of groups with one attack each, whose other completion is scored."""
    return [failure_in(await scorer.score(TASK, [attack, "abc"])) for attack in attacks]


@pytest.fixture(scope="module")
def attacked() -> dict[str, Sequence[Score]]:
    """Returns the scores of a group for each attack, which has a scorer of its own. Most attacks end with their time
    limit, so some of them wait for it at the same time."""
    limits_s = dict.fromkeys(MEMORY, 1.0) | dict.fromkeys(MESSAGES, 2.0)
    at_once = asyncio.Semaphore(4)

    async def scores_of(attack: str, timeout_s: float) -> Sequence[Score]:
        async with at_once, scoring("attack", timeout_s=timeout_s) as scorer:
            return await scorer.score(TASK, [attack, "abc"])

    async def all_scores() -> list[Sequence[Score]]:
        return await asyncio.gather(*(scores_of(attack, limit_s) for attack, limit_s in limits_s.items()))

    return dict(zip(limits_s, asyncio.run(all_scores()), strict=True))


@pytest.mark.parametrize("attack", list(MEMORY))
@pytest.mark.fault("F32")
def test_writing_to_the_shared_memory_fails_the_completion(attack: str, attacked: dict[str, Sequence[Score]]) -> None:
    assert failure_in(attacked[attack]).reason in (RewardFailure.TIMEOUT, RewardFailure.RAISED)


def signals_have_scopes() -> bool:
    """Returns whether the kernel has version 6 of Landlock (Linux 6.12)."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) >= 6


@pytest.mark.skipif(not signals_have_scopes(), reason="the kernel cannot keep signals back")
@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_reward_code_can_send_signals_only_to_its_own_processes() -> None:
    other = psutil.Popen(["sleep", "300"])
    try:
        other.suspend()
        async with scoring("attack") as scorer:
            [pid] = pids(scorer)
            for attack, failure in zip(SIGNALS, await failures(scorer, list(SIGNALS)), strict=True):
                if attack != "all_processes":  # this call of Linux does not report what it may not do
                    assert "permitted" in str(failure) or "exit status 1" in str(failure), attack
            assert pids(scorer) == [pid]
        assert other.status() == psutil.STATUS_STOPPED
    finally:
        other.kill()
        other.wait(60)


@pytest.mark.parametrize("reward", ["attack", "attack_group"])
@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_names_and_texts_that_cannot_be_recorded_fail_their_completion_and_the_process_goes_on(
    reward: str,
) -> None:
    async with scoring(reward) as scorer:
        [pid] = pids(scorer)
        for failure in await failures(scorer, list(NAMES)):
            assert failure.reason == RewardFailure.WRONG_TYPE
            assert str(failure).isprintable()
        assert pids(scorer) == [pid]
    async with scoring("attack") as scorer:
        [pid] = pids(scorer)
        assert {failure.reason for failure in await failures(scorer, list(TEXTS))} == {RewardFailure.RAISED}
        assert pids(scorer) == [pid]


@pytest.mark.parametrize("attack", list(MESSAGES))
@pytest.mark.fault("F32")
def test_a_forged_message_fails_the_completion(attack: str, attacked: dict[str, Sequence[Score]]) -> None:
    assert failure_in(attacked[attack]).reason in (RewardFailure.CRASHED, RewardFailure.TIMEOUT)


@pytest.mark.asyncio
@pytest.mark.fault("F32")
async def test_a_process_that_never_returns_an_outcome_is_given_up_without_another_error() -> None:
    """The reward ends as many processes in a row as are given to it, by asking for another one."""
    attack = "retires_without_an_outcome"
    async with scoring("attack") as scorer:
        scores = await scorer.score(TASK, [attack] * 5)
        assert [score.reason for score in scores if isinstance(score, DataError)] == [RewardFailure.CRASHED] * 5
        assert await scorer.score(TASK, ["abc"]) == [3.0]


@pytest.mark.parametrize("attack", list(FORGED_NAMES))
@pytest.mark.asyncio
@pytest.mark.fault("F32")
async def test_a_forged_name_is_refused_like_a_returned_one(attack: str) -> None:
    async with scoring("attack", timeout_s=5.0) as scorer:
        [failure] = await scorer.score(TASK, [attack])
        assert isinstance(failure, DataError)
        assert failure.reason == RewardFailure.WRONG_TYPE
        assert str(failure).isprintable()


@pytest.mark.parametrize("prefix", ["a", "length of", "é"])
@pytest.mark.asyncio
async def test_names_that_differ_for_each_completion_are_limited_for_the_whole_run(prefix: str) -> None:
    async with scoring("new_name") as scorer:
        rewarded = await scorer.score(TASK, [prefix] * MAX_COMPONENTS)
        assert not any(isinstance(score, DataError) for score in rewarded)
        [failure] = await scorer.score(TASK, [prefix])
        assert isinstance(failure, DataError)
        assert "and the same ones for all completions" in str(failure)
