"""A save or a delivery beside training on ranks that fail: the caller gets one error, and no rank is ended."""

from pathlib import Path
from typing import Any

import pytest
import ray
from fake_ranks import Rank, started
from test_first_cause import BROKEN

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.errors import ActorGone, CheckpointError, WeightError
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.actor import SAVING, SENDING


def save(*outcomes: Any, timeout_s: float = 60.0) -> list[Rank]:
    """Writes on ranks with these outcomes. Returns the ranks."""
    config = Config.model_validate({"checkpoint": {"timeout_s": timeout_s}})
    ranks = [Rank(outcome) for outcome in outcomes]
    group, ended = started(*ranks, config=config)
    try:
        group.beside(SAVING, PolicyWorker.write_checkpoint, Path("weights"), Path("optimizer"))
    finally:
        assert not ended, "a save must end no rank"
        assert all(
            rank.attempt.calls == [(PolicyWorker.write_checkpoint, Path("weights"), Path("optimizer"))]
            for rank in ranks
        )
    return ranks


def test_every_rank_writes_in_its_thread_for_saving() -> None:
    assert len(save("done", "done")) == 2


def test_a_rank_that_cannot_write_is_the_cause_and_not_the_connections_that_broke() -> None:
    with pytest.raises(CheckpointError, match="no space left"):
        save(BROKEN, CheckpointError("no space left"))


def test_a_rank_that_dies_while_it_writes_fails_only_the_save() -> None:
    with pytest.raises(CheckpointError, match="learner rank 1 died in write_checkpoint"):
        save(BROKEN, ray.exceptions.RayActorError())


def test_a_rank_that_waits_for_a_dead_one_does_not_hold_up_the_save() -> None:
    with pytest.raises(CheckpointError, match="learner rank 1 died in write_checkpoint"):
        save(None, ray.exceptions.RayActorError(), timeout_s=3600.0)


def test_a_disk_that_does_not_answer_fails_the_save_after_its_limit() -> None:
    with pytest.raises(CheckpointError, match=r"ranks \[1\] did not finish write_checkpoint within checkpoint.timeou"):
        save("done", None, timeout_s=0.01)


def send(*outcomes: Any) -> list[Any]:
    """Delivers weights from ranks with these outcomes, and checks that the group keeps its ranks."""
    transport: Any = "transport"
    ranks = [Rank(outcome, lane=SENDING) for outcome in outcomes]
    group, ended = started(*ranks)
    try:
        return group.beside(SENDING, PolicyWorker.deliver, transport, 0, Version(1, 2), None)
    finally:
        assert not ended, "a delivery must end no rank"
        assert all(
            rank.attempt.calls == [(PolicyWorker.deliver, "transport", 0, Version(1, 2), None)] for rank in ranks
        )


def test_every_rank_delivers_in_its_thread_beside_the_steps() -> None:
    assert send("a", "b") == ["a", "b"]


def test_a_rank_that_cannot_deliver_is_the_cause_and_no_rank_is_ended() -> None:
    with pytest.raises(WeightError, match="no route"):
        send("done", WeightError("no route"))


def test_a_rank_that_dies_while_it_delivers_is_named() -> None:
    with pytest.raises(ActorGone, match="learner rank 1 died in deliver"):
        send("done", ray.exceptions.RayActorError())
