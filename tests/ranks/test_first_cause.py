"""The error that the driver raises when ranks fail: the first cause, with the rank, within the deadline."""

from typing import Any

import pytest
import ray
from fake_ranks import Rank, started

from asyncrl.config.schema import Config
from asyncrl.errors import RunError, StalenessViolation
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.group import RankGroup


def limited(stall_timeout_s: float) -> Config:
    config = Config()
    return config.model_copy(update={"run": config.run.model_copy(update={"stall_timeout_s": stall_timeout_s})})


def train(*outcomes: Any, deadline_s: float = 60.0) -> list[Any]:
    """Trains on ranks with these outcomes, which end together if one fails."""
    ranks = [Rank(outcome) for outcome in outcomes]
    group, ended = started(*ranks, config=limited(deadline_s))
    try:
        return group.call(PolicyWorker.train)
    except BaseException:
        assert ended == ranks
        raise


BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")


def test_answers_come_in_rank_order() -> None:
    assert train("a", "b") == ["a", "b"]


@pytest.mark.fault("F34")
def test_a_rank_that_waits_for_ever_does_not_hide_another_s_failure() -> None:
    with pytest.raises(StalenessViolation, match="too old"):
        train(None, StalenessViolation("too old"))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.fault("F34")
def test_the_cause_is_raised_and_not_the_connection_that_it_broke(order: int) -> None:
    with pytest.raises(RunError, match=r"learner rank \d failed in train: ValueError: first"):
        train(*[BROKEN, ValueError("first")][::order])


@pytest.mark.fault("F34")
def test_a_dead_rank_comes_before_the_connections_that_it_broke() -> None:
    with pytest.raises(RunError, match="learner rank 1 died in train"):
        train(BROKEN, ray.exceptions.RayActorError())


@pytest.mark.fault("F34")
def test_when_only_connections_broke_that_is_what_is_raised() -> None:
    with pytest.raises(RunError, match=r"learner rank 0 failed in train: RuntimeError: .*closed by peer"):
        train(BROKEN, None)


def test_past_the_deadline_the_silent_ranks_the_limit_and_the_knob_are_named() -> None:
    with pytest.raises(RunError, match=r"ranks \[1, 2\] did not finish train within run.stall_timeout_s=0.01 s"):
        train("a", None, None, deadline_s=0.01)


def test_a_group_that_was_not_started_says_so() -> None:
    group = RankGroup(PolicyWorker, Config(), model_path="nowhere")
    with pytest.raises(RunError, match="no ranks"):
        group.call(PolicyWorker.finish_training)
    assert group.shutdown()


@pytest.mark.fault("F34")
@pytest.mark.parametrize(
    ("outcome", "mends"), [(ray.exceptions.RayActorError(), True), (None, True), (StalenessViolation("too old"), False)]
)
def test_a_call_of_another_thread_after_ranks_have_failed_names_the_failure_and_is_mended_like_it(
    outcome: Any, mends: bool
) -> None:
    """The thread that delivers weights may see the death of a rank first, while the learner goes on to its next call.
    The run must start again, whichever error ends it."""
    group, _ = started(Rank(outcome), config=limited(0.05))
    with pytest.raises(RunError) as first:
        group.call(PolicyWorker.train)
    with pytest.raises(RunError, match="ended after a call had failed") as second:
        group.call(PolicyWorker.trained_step)
    assert first.value.restart_mends is second.value.restart_mends is mends
    assert str(first.value) in str(second.value)
    group.shutdown()
    with pytest.raises(RunError, match="or were not started"):
        group.call(PolicyWorker.trained_step)


@pytest.mark.fault("F26")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_a_rank_without_memory_ends_the_run_with_advice(error: Exception) -> None:
    with pytest.raises(RunError, match=r"rank 1 ran out of memory in train: lower .*micro_batch_size"):
        train(BROKEN, error)


@pytest.mark.fault("F26")
def test_a_rank_that_was_killed_may_have_had_too_little_memory() -> None:
    with pytest.raises(RunError, match=r"memory of its machine was full: lower learner\.micro_batch_size"):
        train(BROKEN, ray.exceptions.RayActorError())
