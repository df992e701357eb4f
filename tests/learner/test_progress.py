"""The errors that end a waiting learner name the number of failures, the limit and the cause."""

import pytest
from made_up_run import make_status

from asyncrl.buffer.records import Failure, FailureCount, FailureStreak, LeaseWait
from asyncrl.config.schema import Config
from asyncrl.errors import FailureClass, RunError, StallError
from asyncrl.learner.progress import check_progress

CONFIG = Config.model_validate({"generator": {"max_data_failures": 16}})


def failed(message: str, *, reason: str = "reward_raised") -> Failure:
    return Failure(failure_class=FailureClass.DATA, reason=reason, message=message, prompt="0+3=")


def ended_by(first: Failure, last: Failure) -> str:
    status = make_status(failure_streak=FailureStreak(groups=16, first=first, last=last))
    check_progress(status, waits=LeaseWait.NOT_ENOUGH_READY, config=CONFIG)
    with pytest.raises(RunError) as raised:
        check_progress(status, waits=LeaseWait.TOO_MANY_FAILURES, config=CONFIG)
    return str(raised.value)


def test_a_reward_that_fails_too_often_is_named_with_its_cause() -> None:
    cause = failed("environment.reward = tasks:judge raised KeyError: 'X' (tasks.py:30)")
    assert ended_by(cause, cause) == (
        "your reward failed 16 times in a row (generator.max_data_failures = 16): environment.reward = tasks:judge "
        "raised KeyError: 'X' (tasks.py:30) for prompt '0+3='. Fix the cause and start again."
    )


def test_a_last_cause_that_is_another_one_is_named_too() -> None:
    words = ended_by(failed("one"), failed("two", reason="prompt_length"))
    assert words.startswith("generating a group failed 16 times in a row")
    assert "one for prompt '0+3='; the last failure: two for prompt '0+3='." in words


def test_a_run_that_stands_still_names_the_failures_that_came_before() -> None:
    count = FailureCount(rollouts=7, groups=0, first=failed("took longer than 120 s", reason="rollout_timeout"))
    status = make_status(failures=(count,), quiet_s=10_000.0)
    with pytest.raises(
        StallError, match=r"; failures: rollout_timeout 7 rollouts; the first cause: took longer than 120 s"
    ):
        check_progress(status, waits=LeaseWait.NOT_ENOUGH_READY, config=CONFIG)
