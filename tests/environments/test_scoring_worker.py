import pytest
from hostile_rewards import misbehave

from asyncrl.data.prompts import Task
from asyncrl.environments.scoring_worker import MAX_FRAME_BYTES, Request, RewardFailure, encode, score_group

TASK = Task(question="q", prompt="q", answer="a")


def request(*completions: str) -> Request:
    return Request(id=7, task=TASK, completions=completions)


def test_rewards_come_in_the_order_of_the_completions_and_bools_are_numbers() -> None:
    reply = score_group(misbehave, request("abc", "", "bool", "ab"))
    assert reply.rewards == (3.0, 0.0, 1.0, 2.0)
    assert reply.failure is None
    assert reply.id == 7


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("raise", RewardFailure.RAISED),
        ("raise_unprintable", RewardFailure.RAISED),
        ("raise_system_exit", RewardFailure.RAISED),
        ("nan", RewardFailure.NOT_FINITE),
        ("inf", RewardFailure.NOT_FINITE),
        ("huge", RewardFailure.NOT_FINITE),
        ("none", RewardFailure.WRONG_TYPE),
        ("string", RewardFailure.WRONG_TYPE),
        ("list", RewardFailure.WRONG_TYPE),
    ],
)
def test_f19_an_unusable_reward_is_a_failure_that_names_its_sample(behaviour: str, reason: RewardFailure) -> None:
    reply = score_group(misbehave, request("abc", behaviour, "ab"))
    assert reply.rewards == ()
    assert reply.failure is not None
    assert (reply.failure.reason, reply.failure.sample) == (reason, 1)
    assert not reply.retire


def test_f19_running_out_of_memory_retires_the_process() -> None:
    def exhausted(task: Task, completion: str) -> float:
        raise MemoryError

    reply = score_group(exhausted, request("a"))
    assert reply.retire
    assert reply.failure is not None
    assert reply.failure.reason == RewardFailure.RAISED


def test_a_frame_beyond_the_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="beyond the limit"):
        encode(request("x" * (MAX_FRAME_BYTES + 1)))
