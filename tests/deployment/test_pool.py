"""The replicas of a deployment: lost ones are started again within a budget, silent ones are asked, and the number of
replicas changes."""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from joined_scene import MadeUpActors
from made_up_run import make_status
from ray.exceptions import RayActorError

from asyncrl.buffer.fleet import Cause, ReplicaState, actor_of
from asyncrl.config.schema import Config
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.status import OwnReplicas
from asyncrl.deployment.pool import ReplicaPool
from asyncrl.environments.secrets import Secrets
from asyncrl.errors import (
    CallTimeout,
    ConfigError,
    EngineDied,
    FirstParityError,
    GeneratorPoolExhausted,
    HandshakeError,
    ParityError,
    RunError,
)


class MadeUpPool:
    """A pool whose actors are made up: a call that generates runs until a test ends it. `model_path` is a folder.
    `before` is the pool of an earlier run, whose replicas are taken over."""

    def __init__(self, *, model_path: str = "model", before: "MadeUpPool | None" = None, **generator: Any) -> None:
        self.now_s = 0.0
        self.actors: MadeUpActors = MadeUpActors() if before is None else before.actors
        self.calls: list[tuple[Any, ...]] = []
        self.paused_s: list[float] = []
        model: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        model.set_result(model_path)
        self.pool: ReplicaPool = ReplicaPool(
            Config.model_validate({"generator": generator}),
            deployment="d",
            model_path=model,
            secrets=Secrets(),
            started=lambda _: None,
            new_actor=self.actors,
            kept=[] if before is None else before.pool.kept,
            clock=lambda: self.now_s,
            sleep=self._pause,
        )
        coordinator: Any = SimpleNamespace(call=self._call)
        self.pool.coordinator = coordinator

    async def _pause(self, seconds: float) -> None:
        self.paused_s.append(seconds)
        await asyncio.sleep(0)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> None:
        self.calls.append((method.__name__, *arguments))

    @property
    def made(self) -> list[str]:
        return self.actors.made

    @property
    def ended(self) -> list[str]:
        return self.actors.killed

    async def begin(self) -> list[str]:
        self.pool.make()
        await self.pool.start()
        await asyncio.sleep(0)
        return [replica.name for replica in self.pool.replicas]

    def own(self, *, wanted: int | None = None, **states: ReplicaState) -> OwnReplicas:
        """Returns what the coordinator says of replicas that have committed nothing, and have these states by name."""
        (view,) = make_status().replicas
        views = {
            each.name: msgspec.structs.replace(
                view,
                replica=each.name,
                actor=each.actor,
                state=states.get(each.name.replace("-", "_"), ReplicaState.HEALTHY),
            )
            for each in self.pool.replicas
        }
        scalings = 0 if wanted is None else wanted
        return OwnReplicas(wanted=wanted, scalings=scalings, scaled_because="the reason", views=views, reports={})

    async def look(self, own: OwnReplicas | None = None, *, until_done: bool = True) -> None:
        """Looks after the replicas, and waits until what it began is done."""
        await self.pool.look_after(own or self.own())
        begun = [replica.work for replica in self.pool.replicas if replica.work is not None]
        if begun and until_done:
            await asyncio.wait(begun)
        for _ in range(20):
            await asyncio.sleep(0)

    def kill(self, actor: str, error: Exception | None = None) -> None:
        self.actors.actors[actor].ends.set_exception(
            error or RayActorError(error_msg="the worker died.\n\tclass_name: GeneratorActor")
        )


@pytest.mark.asyncio
@pytest.mark.fault("F1")
async def test_a_replica_whose_process_dies_is_started_again_under_its_name() -> None:
    scene = MadeUpPool(replicas=2)
    first, second = await scene.begin()
    scene.kill(first)
    await asyncio.sleep(0)
    await scene.look()
    assert scene.ended == [first]
    assert scene.made == [first, second, actor_of(first, 2)]
    [(name, actor, cause, reason)] = scene.calls
    assert (name, actor, cause) == (Coordinator.restarting.__name__, first, Cause.PROCESS_DIED)
    assert "the worker died" in reason
    await scene.look()
    assert [replica.generates for replica in scene.pool.replicas] == [True, True]
    await scene.pool.end(grace_s=20.0)
    assert set(scene.ended) == {first, second, actor_of(first, 2)}


@pytest.mark.asyncio
async def test_the_cause_that_the_replica_names_reaches_the_buffer() -> None:
    scene = MadeUpPool()
    [only] = await scene.begin()
    scene.kill(only, EngineDied("the engine of replica a has died: killed"))
    await asyncio.sleep(0)
    await scene.look()
    assert [call[1:3] for call in scene.calls] == [(only, Cause.ENGINE_DIED)]
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
async def test_restarts_without_a_committed_group_wait_longer_and_longer_up_to_a_limit_and_then_the_pool_ends() -> None:
    scene = MadeUpPool(max_restarts=4)
    [only] = await scene.begin()
    for start in range(1, 5):
        scene.kill(actor_of(only, start), EngineDied("killed"))
        await asyncio.sleep(0)
        await scene.look()
        await scene.look()
    assert scene.paused_s == [1.0, 2.0, 4.0], "the first restart is made at once"
    scene.kill(actor_of(only, 5), EngineDied("killed"))
    await asyncio.sleep(0)
    await scene.look()
    with pytest.raises(
        GeneratorPoolExhausted,
        match=rf"only 0 replicas live, but generator.min_replicas is 1 .*{only}: killed .*started again 4 times within",
    ):
        await scene.look()
    names = [call[0] for call in scene.calls]
    ends = ["quarantine", "leave", "gave_up"]
    assert names == ["restarting"] * 4 + ends, "it does not come back, so the last end is no restart"
    assert scene.calls[-2] == ("leave", actor_of(only, 5))
    assert scene.calls[-1][1:] == (
        only,
        "killed; it is not started again, because it was started again 4 times within "
        "an hour (generator.max_restarts = 4)",
    )
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
async def test_a_replica_that_committed_groups_is_started_again_at_once_and_old_restarts_are_forgotten() -> None:
    scene = MadeUpPool(max_restarts=2)
    [only] = await scene.begin()
    for start in range(1, 7):
        own = scene.own()
        report = make_status().reports["generator-a"]
        committed = {only: msgspec.structs.replace(report, samples=10 * start)}
        await scene.look(msgspec.structs.replace(own, reports=committed))
        scene.kill(actor_of(only, start), EngineDied("killed"))
        await asyncio.sleep(0)
        await scene.look(msgspec.structs.replace(own, reports=committed))
        scene.now_s += 3601
    assert scene.paused_s == []
    assert scene.made[-1] == actor_of(only, 7)
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
async def test_an_error_that_every_start_would_have_is_not_tried_again() -> None:
    scene = MadeUpPool(replicas=2)
    first, second = await scene.begin()
    scene.kill(first, HandshakeError("another tokenizer"))
    await asyncio.sleep(0)
    await scene.look()
    await scene.look()
    assert scene.made == [first, second]
    assert [replica.name for replica in scene.pool.replicas] == [second]
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
@pytest.mark.fault("F26")
async def test_a_start_that_fails_is_tried_again() -> None:
    scene = MadeUpPool()
    [only] = await scene.begin()
    scene.actors.start_errors = [RunError("vLLM did not start: no memory")]
    scene.kill(only)
    await asyncio.sleep(0)
    await scene.look()
    await scene.look()
    assert scene.made == [only, actor_of(only, 2), actor_of(only, 3)]
    assert [call[2] for call in scene.calls] == [Cause.PROCESS_DIED, Cause.START_FAILED]
    assert [replica.generates for replica in scene.pool.replicas] == [True]
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
async def test_too_few_replicas_end_the_deployment_only_after_the_time_to_replace_them() -> None:
    scene = MadeUpPool(replicas=2, min_replicas=2, replace_timeout_s=60.0)
    first, _ = await scene.begin()
    scene.actors.starting = asyncio.Event().wait
    scene.kill(first)
    await asyncio.sleep(0)
    await scene.look(until_done=False)
    scene.now_s += 60.0
    await scene.look(until_done=False)
    scene.now_s += 0.1
    with pytest.raises(
        GeneratorPoolExhausted,
        match=rf"only 1 replicas live.*60 s\); {first} is being started after this error: .*the worker died",
    ):
        await scene.look()
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
async def test_the_log_of_a_lost_replica_is_named_but_not_again_for_its_next_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = MadeUpPool()
    [only] = await scene.begin()
    (report,) = make_status().reports.values()
    report = msgspec.structs.replace(report, node="gpu-7", log="/tmp/ray/session/logs/worker-1.err")
    own = scene.own()
    await scene.look(msgspec.structs.replace(own, reports={only: report}))
    for actor in (only, actor_of(only, 2)):
        scene.kill(actor)
        await asyncio.sleep(0)
        await scene.look()
    lost = [message for message in caplog.messages if "is lost" in message]
    assert ["; its log is gpu-7:/tmp/ray/session/logs/worker-1.err; " in message for message in lost] == [True, False]
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("state", [ReplicaState.SUSPECT, ReplicaState.QUARANTINED])
@pytest.mark.parametrize("answers", [True, False])
async def test_a_silent_replica_is_asked_and_replaced_only_if_it_does_not_answer(
    state: ReplicaState, answers: bool
) -> None:
    scene = MadeUpPool()
    [only] = await scene.begin()

    async def alive() -> None:
        if not answers:
            raise CallTimeout("no answer")

    scene.actors.alive = alive
    await scene.look(scene.own(**{only.replace("-", "_"): state}))
    assert [name for what, name in scene.actors.said if what == "check_alive"] == [only]
    await scene.look()
    assert scene.made == ([only] if answers else [only, actor_of(only, 2)])
    assert [call[2] for call in scene.calls] == ([] if answers else [Cause.NO_HEARTBEATS])
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
async def test_the_pool_grows_and_shrinks_to_the_wanted_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    scene = MadeUpPool(replicas=2)
    first, second = await scene.begin()
    await scene.look(scene.own(wanted=4))
    await scene.look(scene.own(wanted=4))
    assert caplog.messages.count("this deployment should have 4 replicas now: the reason") == 1
    names = [replica.name for replica in scene.pool.replicas]
    assert (names[:2], len(set(names))) == ([first, second], 4)
    assert all(replica.generates for replica in scene.pool.replicas)
    scene.kill(first)
    await asyncio.sleep(0)
    scene.actors.starting = asyncio.Event().wait
    await scene.look(scene.own(wanted=1))
    assert len(scene.pool.replicas) == 1
    assert set(scene.ended) >= set(names[2:])
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
async def test_a_pool_that_ends_waits_no_longer_than_the_grace_for_a_replica_that_is_drained() -> None:
    scene = MadeUpPool(replicas=2)
    both = await scene.begin()
    scene.actors.shutdown = asyncio.Event().wait
    await scene.look(scene.own(wanted=1))
    assert len(scene.pool.replicas) == 1
    scene.actors.shutdown = partial(asyncio.sleep, 0)
    await asyncio.wait_for(scene.pool.end(grace_s=0.05), timeout=30)
    assert set(scene.ended) == set(both)
    assert {call[1] for call in scene.calls if call[0] == "leave"} == set(both)


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_run_that_is_asked_to_end_ends_replicas_that_do_not_generate_and_starts_none_again() -> None:
    scene = MadeUpPool(replicas=3)
    lost, starting, generating = await scene.begin()
    scene.actors.starting = asyncio.Event().wait
    scene.kill(starting)
    await asyncio.sleep(0)
    await scene.look(until_done=False)
    async with asyncio.timeout(60):
        while f"{starting}.2" not in scene.made:
            await asyncio.sleep(0)
    scene.kill(lost, EngineDied("killed"))
    await asyncio.sleep(0)
    scene.pool.end_idle()
    assert [replica.name for replica in scene.pool.replicas] == [generating]
    async with asyncio.timeout(60):
        while {call[1] for call in scene.calls if call[0] == "leave"} != {lost, f"{starting}.2"}:
            await asyncio.sleep(0)
    made = len(scene.made)
    scene.pool.end_idle()
    assert len(scene.made) == made
    await scene.pool.end(grace_s=20.0)
    assert set(scene.ended) == {lost, starting, f"{starting}.2", generating}


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_groups_in_flight_get_the_grace_that_is_left() -> None:
    scene = MadeUpPool(replicas=1)
    (name,) = await scene.begin()
    drain = scene.actors.actors[name].drain
    scene.actors.actors[name].drain = partial(asyncio.sleep, 0)  # type: ignore[method-assign]
    end = asyncio.create_task(scene.pool.end(grace_s=600.0))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not end.done(), "a group is in flight"
    await drain()
    await end
    assert [what for what, _ in scene.actors.said] == ["drain", "shutdown", "kill"]


@pytest.mark.asyncio
async def test_a_replica_that_was_given_up_is_not_replaced_by_another_one_until_the_next_scaling() -> None:
    scene = MadeUpPool(replicas=2, max_restarts=0)
    first, _ = await scene.begin()
    scene.kill(first)
    await asyncio.sleep(0)
    for _ in range(3):
        await scene.look(scene.own(wanted=2))
    assert len(scene.made) == 2
    await scene.look(msgspec.structs.replace(scene.own(wanted=2), scaled_because="the autoscaler's reason"))
    assert len(scene.made) == 2, "only a person tries again"
    again = msgspec.structs.replace(scene.own(wanted=2), scalings=7)
    await scene.look(again)
    assert len(scene.made) == 3, "`asyncrl scale` with the same number tries again"
    await scene.look(msgspec.structs.replace(scene.own(wanted=3), scalings=8))
    assert len(scene.made) == 4
    left = {replica.actor for replica in scene.pool.replicas}
    await scene.pool.end(grace_s=20.0)
    assert {call[1] for call in scene.calls if call[0] == "leave"} >= left, "they do not come back"


@pytest.mark.asyncio
async def test_the_autoscaler_removes_a_replica_that_was_given_up_before_one_that_generates() -> None:
    scene = MadeUpPool(replicas=3, max_restarts=0)
    first, *_ = await scene.begin()
    scene.kill(first)
    await asyncio.sleep(0)
    await scene.look(scene.own(wanted=3))

    async def autoscaled(replicas: int) -> None:
        own = scene.own(wanted=replicas)
        await scene.look(msgspec.structs.replace(own, scalings=3, scaled_because=f"to {replicas} replicas"))

    numbers = []
    for replicas in (2, 1, 2):
        await autoscaled(replicas)
        numbers.append(len(scene.pool.replicas))
    assert numbers == [2, 1, 2]
    await scene.pool.end(grace_s=20.0)


def wrong(nats: float) -> FirstParityError:
    return FirstParityError(f"replica a: after loading the weights … differ by {nats} nats", nats=nats)


async def fail(scene: MadeUpPool, name: str, start: int, error: Exception) -> None:
    scene.kill(actor_of(name, start), error)
    await asyncio.sleep(0)
    await scene.look()


async def looked_twice(scene: MadeUpPool) -> None:
    """The first look begins to replace the replica, and the second one finds the outcome."""
    await scene.look()
    await scene.look()


@pytest.mark.asyncio
@pytest.mark.parametrize(("first", "second"), [(5.2, 5.2), (0.3, 0.3001), (math.inf, math.inf), (1e-3, 1.005e-3)])
@pytest.mark.parametrize("between", [None, EngineDied("killed")], ids=["in a row", "with another failure between"])
async def test_two_starts_with_the_same_wrong_first_weights_end_the_run_with_the_family(
    first: float, second: float, between: Exception | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "zebra"}')
    scene = MadeUpPool(model_path=str(tmp_path), max_restarts=10)
    [name] = await scene.begin()
    errors = [wrong(first), *([between] if between else []), wrong(second)]
    for start, error in enumerate(errors[:-1], start=1):
        await fail(scene, name, start, error)
    scene.kill(actor_of(name, len(errors)), errors[-1])
    await asyncio.sleep(0)
    with pytest.raises(ConfigError, match=f"of the family zebra: .* was {second:.3g} nats in two starts of {name}"):
        await looked_twice(scene)
    assert len(scene.made) == len(errors), "there was no further start"


@pytest.mark.asyncio
@pytest.mark.parametrize(("first", "second"), [(5.2, 4.1), (0.3, 0.31), (math.inf, 1.0)])
async def test_other_differences_of_the_first_weights_are_a_start_that_is_repeated(first: float, second: float) -> None:
    scene = MadeUpPool(max_restarts=10)
    [name] = await scene.begin()
    for start, error in enumerate([wrong(first), wrong(second), ParityError("later weights")], start=1):
        await fail(scene, name, start, error)
    assert len(scene.made) == 4
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
async def test_one_wrong_replica_of_several_that_generate_is_given_up_alone() -> None:
    scene = MadeUpPool(replicas=2, min_replicas=1)
    name, other = await scene.begin()
    next(each for each in scene.pool.replicas if each.name == other).samples = 5
    await fail(scene, name, 1, wrong(0.5))
    await fail(scene, name, 2, wrong(0.5))
    await scene.look()
    assert [replica.name for replica in scene.pool.replicas] == [other]
    await scene.pool.end(grace_s=20.0)


# --- the next run of the process -----------------------------------------------------------------------------------


async def ended_in_order(scene: MadeUpPool) -> None:
    """Ends the run of a pool that has finished."""
    scene.pool.keeps = True
    await scene.pool.end(grace_s=20.0)


@pytest.mark.asyncio
async def test_the_next_run_takes_over_the_actors_of_a_run_that_has_finished() -> None:
    first = MadeUpPool(replicas=2)
    names = await first.begin()
    await ended_in_order(first)
    assert first.ended == []
    assert sorted(first.actors.said) == sorted((what, name) for what in ("drain", "rest") for name in names)
    second = MadeUpPool(before=first, replicas=2)
    assert await second.begin() == names
    assert second.made == names, "no actor was made"
    assert first.pool.kept == [], "an actor has one run"
    assert [second.actors.actors[name].given["model_path"] for name in names] == ["model"] * 2
    await second.pool.end(grace_s=20.0)
    assert sorted(second.ended) == sorted(names)


@pytest.mark.asyncio
async def test_a_run_that_has_not_finished_leaves_no_actor() -> None:
    scene = MadeUpPool(replicas=2)
    names = await scene.begin()
    await scene.pool.end(grace_s=20.0)
    assert sorted(scene.ended) == sorted(names)
    assert scene.pool.kept == []


@pytest.mark.asyncio
async def test_an_actor_that_has_failed_or_whose_engine_is_not_in_order_ends_with_its_run() -> None:
    scene = MadeUpPool(replicas=3)
    failed, torn, good = await scene.begin()
    scene.kill(failed)
    await asyncio.sleep(0)
    scene.actors.rest_errors = [RunError("its last weights are not whole")]
    await ended_in_order(scene)
    assert sorted(scene.ended) == sorted([failed, torn])
    assert [replica.name for replica in scene.pool.kept] == [good]


@pytest.mark.asyncio
async def test_replicas_beyond_the_number_of_the_configuration_end_with_their_run() -> None:
    scene = MadeUpPool()
    await scene.begin()
    await scene.look(scene.own(wanted=2))
    await ended_in_order(scene)
    assert (len(scene.pool.kept), len(scene.ended)) == (1, 1)


@pytest.mark.asyncio
async def test_an_engine_that_cannot_be_taken_over_ends_before_a_new_one_starts() -> None:
    first = MadeUpPool()
    [only] = await first.begin()
    await ended_in_order(first)
    second = MadeUpPool(before=first)
    second.actors.start_errors = [RunError("a new engine of this run would have other settings")]
    assert await second.begin() == [only]
    assert second.ended == [only], "the old engine would hold the memory of the new one"
    assert second.made == [only, actor_of(only, 2)]
    await second.pool.end(grace_s=20.0)
