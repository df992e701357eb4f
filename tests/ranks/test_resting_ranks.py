"""Ranks whose processes go from one run to the next: what a rank drops, and which ranks a run takes over."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_ranks import Call, Method, Rank, rank_of

from asyncrl.config.load import load_config
from asyncrl.errors import RunError
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.actor import LOOPBACK
from asyncrl.ranks.group import PlacedRanks, RankGroup, fixed_at_start
from asyncrl.value.worker import ValueWorker

pytestmark = pytest.mark.slow  # imports torch


class Model:
    """Replaces a model. It refers to itself, as hooks of a real one do."""

    def __init__(self) -> None:
        self.own = self


class Worker:
    section = "learner"

    def __init__(self, *, config: Any, **_: Any) -> None:
        self.config, self.model = config, Model()

    def seed(self) -> int:
        return int(self.config.run.seed)

    def close(self) -> None: ...


def test_a_rank_that_has_rested_has_only_a_worker_of_the_next_run_and_the_variables_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    before = dict(os.environ)
    (tmp_path / "logs").mkdir()
    with rank_of(Worker, load_config([], ["run.seed=3"])) as actor:
        handlers = [*logging.root.handlers]
        actor.begin(load_config([], ["run.seed=3"]), incarnation=1, logs=tmp_path / "logs")
        assert len(logging.root.handlers) == len(handlers) + 1
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # as accelerate does
        actor.close()
        actor.rest()
        assert logging.root.handlers == handlers, "its log has ended"
        assert dict(os.environ) == before
        with pytest.raises(AssertionError, match="setup"):
            actor.call(Worker.seed)
        actor.begin(load_config([], ["run.seed=4"]))
        port = actor.open_rendezvous(LOOPBACK)
        actor.setup(model_path="model", host=LOOPBACK, port=port, named_rows=False)
        assert actor.call(Worker.seed) == 4


@pytest.mark.parametrize("part", [lambda worker: worker, lambda worker: worker.model], ids=["worker", "model"])
def test_a_rank_with_a_part_of_the_run_that_is_still_in_use_does_not_rest(part: Callable[[Any], Any]) -> None:
    with rank_of(Worker) as actor:
        used = actor.call(part)
        actor.close()
        with pytest.raises(RunError, match="learner rank 0 is still in use"):
            actor.rest()
        del used


class Scene:
    """The ranks of runs of one process. `kept` are those that rest, `ended` those that have ended."""

    def __init__(self) -> None:
        self.kept: list[PlacedRanks] = []
        self.ended: list[Any] = []

    def group(self, *overrides: str, worker: Any = PolicyWorker) -> RankGroup[Any]:
        group = RankGroup(
            worker, load_config([], [*overrides]), model_path="nowhere", kept=self.kept, place=self.place, grace_s=0.01
        )
        group.start()
        return group

    def place(self, worker: Any, config: Any) -> PlacedRanks:
        ended = self.ended

        class Placed(PlacedRanks):
            def kill(self) -> None:
                ended.extend(self.actors)

            def release(self) -> None:
                ended.append("released")

        return Placed([Rank("done") for _ in range(config.learner.ranks)], None, fixed_at_start(worker, config))


def ranks(group: RankGroup[Any]) -> list[Any]:
    return list(group._ranks)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_next_run_begins_in_the_processes_of_ranks_that_were_kept(scene: Scene) -> None:
    first = scene.group("learner.ranks=2")
    old = ranks(first)
    assert first.shutdown(keep=True)
    assert not scene.ended
    assert all(rank.close.calls and rank.rest.calls for rank in old)
    second = scene.group("learner.ranks=2", "run.seed=5", "algorithm.loss=opsm")
    assert ranks(second) == old
    assert not scene.kept, "no other group takes them over, too"
    assert all(len(rank.begin.calls) == len(rank.setup.calls) == 2 for rank in old), "a new worker, as at the start"
    second.shutdown()
    assert scene.ended == [*old, "released"]


@pytest.mark.parametrize(
    "override", ["learner.ranks=2", "learner.threads=3", "learner.cpus=2", "learner.node_labels={pool: a}"]
)
def test_ranks_that_were_started_for_other_settings_end_before_new_ones_start(override: str, scene: Scene) -> None:
    first = scene.group()
    old = ranks(first)
    first.shutdown(keep=True)
    assert set(ranks(scene.group(override))).isdisjoint(old)
    assert scene.ended == [*old, "released"]


def test_ranks_of_the_critic_are_not_those_of_the_policy(scene: Scene) -> None:
    first = scene.group()
    old = ranks(first)
    first.shutdown(keep=True)
    assert ranks(scene.group(worker=ValueWorker)) != old
    assert not scene.ended
    assert ranks(scene.group()) == old


def test_a_rank_that_has_died_at_rest_is_replaced_with_all_others(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    first = scene.group("learner.ranks=2")
    old = ranks(first)
    first.shutdown(keep=True)
    old[1].node_address = Method(RuntimeError("it was killed"))
    assert set(ranks(scene.group("learner.ranks=2"))).isdisjoint(old)
    assert scene.ended == [*old, "released"]
    assert "it was killed" in caplog.text


@pytest.mark.parametrize("method", ["close", "rest"])
def test_ranks_of_which_one_is_not_in_order_are_not_kept(method: str, scene: Scene) -> None:
    group = scene.group("learner.ranks=2")
    old = ranks(group)
    setattr(old[1], method, Method(RunError("it still sends")))
    group.shutdown(keep=True)
    assert not scene.kept
    assert scene.ended == [*old, "released"]


def test_ranks_that_a_failed_call_has_ended_are_not_kept(scene: Scene) -> None:
    group = scene.group()
    ranks(group)[0].call.remote = lambda *_, **__: Call(RuntimeError("it died"))
    with pytest.raises(RunError):
        group.call(PolicyWorker.trained_step)
    group.shutdown(keep=True)
    assert not scene.kept
