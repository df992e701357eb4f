"""A generator deployment requests the resources of the config from Ray, and sends heartbeats from its start on."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from joined_scene import MadeUpActors, OneProcessCluster
from made_up_run import make_status

from asyncrl.common.roles import RunState
from asyncrl.common.tasks import cancelled
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import Call
from asyncrl.coordinator.registry import OVER
from asyncrl.coordinator.status import OwnReplicas, RunStatus
from asyncrl.deployment import pool
from asyncrl.deployment.inputs import Prompts
from asyncrl.deployment.pool import COUNT_EVERY_S, GeneratorDeployment, Progress, Replica
from asyncrl.errors import CallTimeout, ConfigError, RunError, RunMismatch, StallError


def deployment_of(
    config: Config, *, cluster: OneProcessCluster | None = None, actors: MadeUpActors | None = None, **options: Any
) -> GeneratorDeployment:
    """Returns a deployment in a cluster without Ray."""
    options = {"prompts": finished(Prompts(train=(), heldout=()))} | options
    return GeneratorDeployment(
        config,
        model_path=finished("model"),
        cluster=(cluster or OneProcessCluster(config)).joined,
        new_actor=actors or MadeUpActors(),
        **options,
    )


def finished(result: Any) -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def judge_key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The secret JUDGE_API_KEY of this process's environment, which a test chooses."""
    key: str | None = request.param
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("JUDGE_API_KEY", key)
    return key


def test_replicas_say_when_they_generate_and_then_how_much() -> None:
    now_s = [0.0]
    progress = Progress(clock=lambda: now_s[0])
    status = make_status()
    busy = own_replicas_of(status)
    (view,) = status.replicas
    waiting = msgspec.structs.replace(
        busy, views={view.replica: msgspec.structs.replace(view, reserved_groups=0, version=None)}
    )
    assert progress.line(status, waiting) is None
    assert progress.line(status, busy) == "generating with the weights of step 3"
    assert progress.line(status, busy) is None
    for _ in range(2):
        now_s[0] += COUNT_EVERY_S
        line = progress.line(status, busy)
        assert line == "1,234 samples generated, 2 groups in flight; the learner is at step 3 of 9"
        assert progress.line(status, busy) is None


def own_replicas_of(status: RunStatus) -> OwnReplicas:
    return OwnReplicas(
        wanted=1,
        scalings=0,
        scaled_because="",
        views={view.replica: view for view in status.replicas},
        reports=status.reports,
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("judge_key", ["sk-1"], indirect=True)
async def test_a_replica_gets_the_secrets_of_the_command_with_its_start_and_a_path_that_holds_anywhere(
    in_an_empty_folder: Path, judge_key: str
) -> None:
    config = Config.model_validate({"environment": {"secrets": ["JUDGE_API_KEY"]}, "run": {"dir": "runs", "name": "a"}})
    actors, stop = MadeUpActors(), asyncio.Event()
    await deployment_of(config, actors=actors, started=lambda _: stop.set()).run(stop)
    (actor,) = actors.actors.values()
    assert actor.given["secrets"].environment == {"JUDGE_API_KEY": judge_key}
    assert actor.given["logs"] == in_an_empty_folder / "runs" / "a" / "logs"


@pytest.mark.asyncio
async def test_an_engine_that_starts_too_slowly_is_an_error_with_its_limit() -> None:
    actors = MadeUpActors()
    actors.start_errors = [CallTimeout("starting generator-a took longer than 7 s")]
    deployment = deployment_of(Config.model_validate({"generator": {"startup_timeout_s": 7.0}}), actors=actors)
    with pytest.raises(RunError, match=r"generator-\w+ was not ready within generator\.startup_timeout_s = 7 s"):
        await deployment.run(asyncio.Event())


@pytest.mark.asyncio
@pytest.mark.parametrize("judge_key", [None], indirect=True)
@pytest.mark.usefixtures("judge_key")
async def test_a_secret_that_the_command_lacks_is_an_error_before_replicas_are_made() -> None:
    with pytest.raises(ConfigError, match="export JUDGE_API_KEY"):
        deployment_of(Config.model_validate({"environment": {"secrets": ["JUDGE_API_KEY"]}}))


def test_a_replica_asks_for_the_gpus_that_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Actor:
        def options(self, **options: Any) -> "Actor":
            asked.update(options)
            return self

        def remote(self, **_: Any) -> None:
            """Stands for the call that returns the actor's handle."""

    monkeypatch.setattr(pool.ray, "remote", lambda _: Actor())
    config = Config.model_validate({"generator": {"gpus": 2.0, "tensor_parallel_size": 2}})
    pool.ReplicaActor(config, replica="generator-a", name="generator-a-1", deployment="d")
    assert asked["num_gpus"] == 2.0


@pytest.mark.asyncio
async def test_a_replica_that_was_made_ends_if_the_next_one_cannot_be_made() -> None:
    actors = MadeUpActors()
    actors.make_errors = [None, RunError("no second one")]
    deployment = deployment_of(Config.model_validate({"generator": {"replicas": 2}}), actors=actors)
    with pytest.raises(RunError, match="no second one"):
        await deployment.run(asyncio.Event())
    assert len(actors.made) == 1
    assert actors.killed == actors.made


@pytest.mark.asyncio
@pytest.mark.parametrize("begun", [False, True])
async def test_a_replica_that_was_not_told_to_start_is_ended_without_a_word(
    begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config, actors = Config(), MadeUpActors()
    cluster = OneProcessCluster(config)

    async def refuse(_: Call) -> None:
        raise RunMismatch("another run")

    if begun:
        actors.start_errors = [RunError("no engine")]
    else:
        cluster.before["attach"] = refuse
    with pytest.raises(RunError if begun else RunMismatch):
        await deployment_of(config, cluster=cluster, actors=actors).run(asyncio.Event())
    assert [what for what, _ in actors.said] == (["shutdown", "kill"] if begun else ["kill"])
    assert caplog.text == ""


@pytest.mark.asyncio
async def test_the_buffer_hears_of_a_deployment_while_its_engines_start_and_end() -> None:
    kept, stop, actors = asyncio.Event(), asyncio.Event(), MadeUpActors()
    config = Config.model_validate({"buffer": {"heartbeat_timeout_s": 0.005}})
    cluster = OneProcessCluster(config)

    async def keep(_: Call) -> None:
        kept.set()

    async def shutdown() -> None:
        kept.clear()
        await kept.wait()

    cluster.before["keep"], actors.starting, actors.shutdown = keep, asyncio.Event().wait, shutdown
    deployment = deployment_of(config, cluster=cluster, actors=actors)
    running = asyncio.create_task(deployment.run(stop))
    async with asyncio.timeout(60):
        await kept.wait()
        stop.set()
        await running
    assert cluster.calls[-1].method == "detach", "no heartbeat may follow the detach"


@pytest.mark.asyncio
@pytest.mark.fault("F5")
@pytest.mark.parametrize(
    ("state", "step", "learner", "ends"),
    [
        (RunState.RUNNING, 3, True, True),
        (RunState.CLOSING, 3, False, True),
        (RunState.CLOSING, 3, True, False),
        (RunState.STARTING, 3, False, True),
        (RunState.STARTING, 3, True, False),
        (RunState.STARTING, 0, False, False),
    ],
)
async def test_a_deployment_ends_when_nothing_moves_or_no_learner_comes_back(
    state: RunState, step: int, learner: bool, ends: bool
) -> None:
    config = Config()
    cluster, asked = OneProcessCluster(config), list[RunState]()
    quiet_s = config.run.stall_timeout_s + 1.0

    def status() -> RunStatus:
        asked.append(state if len(asked) < 2 else RunState.FINISHED)
        return make_status(state=asked[-1], quiet_s=quiet_s, version=Version(1, step), learner_attached=learner)

    cluster.answers["brief_status"] = status
    deployment = deployment_of(config, cluster=cluster, watch_every_s=0.0)
    async with asyncio.timeout(60):
        if ends:
            with pytest.raises(StallError, match="attached" if learner else "gone"):
                await deployment.run(asyncio.Event())
        else:
            await deployment.run(asyncio.Event())
    assert len(asked) == (1 if ends else 3)


@pytest.mark.asyncio
@pytest.mark.parametrize("state", OVER)
async def test_a_deployment_ends_with_its_run_and_returns_how_the_run_ended(state: RunState) -> None:
    config = Config()
    cluster = OneProcessCluster(config)
    cluster.answers["brief_status"] = lambda: make_status(state=state)
    async with asyncio.timeout(60):
        assert await deployment_of(config, cluster=cluster, watch_every_s=0.0).run(asyncio.Event()) is state


@pytest.mark.asyncio
@pytest.mark.parametrize("state", OVER)
async def test_a_deployment_that_sees_the_end_first_keeps_the_replicas_of_a_finished_run(state: RunState) -> None:
    config, actors, kept, looks = Config(), MadeUpActors(), list[Replica](), itertools.count()
    cluster = OneProcessCluster(config)
    cluster.answers["brief_status"] = lambda: make_status(state=RunState.RUNNING if next(looks) < 5 else state)
    async with asyncio.timeout(60):
        await deployment_of(config, cluster=cluster, actors=actors, kept=kept, watch_every_s=0.0).run(asyncio.Event())
    assert len(kept) == (state is RunState.FINISHED)


@pytest.mark.asyncio
async def test_a_kept_replica_gets_the_next_run_before_its_prompts_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    actors, kept = MadeUpActors(), list[Replica]()
    cluster = OneProcessCluster(Config())
    cluster.answers["brief_status"] = lambda: make_status(state=RunState.FINISHED)
    async with asyncio.timeout(60):
        await deployment_of(Config(), cluster=cluster, actors=actors, kept=kept).run(asyncio.Event())
    [replica] = kept
    following = Config.model_validate({"run": {"name": "following"}})
    prompts: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    deployment = deployment_of(following, actors=actors, kept=kept, prompts=prompts)
    run = asyncio.create_task(deployment.run(asyncio.Event()))
    while not actors.taken_over:
        await asyncio.sleep(0)
    await cancelled(run)
    assert actors.taken_over == {replica.actor: tmp_path / "runs" / "following" / "logs"}


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_replicas_stay_after_a_request_to_end_until_the_deployment_ends_and_are_not_started_again() -> None:
    config = Config.model_validate({"generator": {"replicas": 2}})
    actors, stop, asked, looks = MadeUpActors(), asyncio.Event(), asyncio.Event(), list[int]()
    cluster = OneProcessCluster(config)

    async def look(_: Call) -> None:
        looks.append(len(actors.made))
        if len(looks) == 2:
            asked.set()
            next(iter(actors.actors.values())).ends.set_exception(RunError("the engine died"))
        if len(looks) == 5:
            assert actors.killed == actors.made[:1], "the other one may be needed"
            stop.set()

    cluster.before["own_replicas"] = look
    deployment = deployment_of(
        config, cluster=cluster, actors=actors, asked=asked.is_set, grace_left_s=lambda: 5.0, watch_every_s=0.0
    )
    async with asyncio.timeout(60):
        assert await deployment.run(stop) is None
    assert looks == [2] * 5, "none is started again"
    assert actors.killed == actors.made


class Preempted:
    """The answers of a run whose learner SIGTERM has ended. `clock` moves by 10 s with each of them, and `states` has
    their states. The last one stays."""

    def __init__(self, states: Sequence[RunState]) -> None:
        self.states, self.asked, self.now_s = states, 0, 0.0

    def clock(self) -> float:
        return self.now_s

    def status(self) -> RunStatus:
        state = self.states[min(self.asked, len(self.states) - 1)]
        self.asked, self.now_s = self.asked + 1, self.now_s + 10.0
        gone = state is RunState.PREEMPTED
        return make_status(state=state, quiet_s=1e6 * gone, learner_attached=not gone, version=Version(1, 3))


async def run_of(states: Sequence[RunState], *, wait_s: float) -> tuple[RunState | None, int]:
    """Runs a deployment that asks a run with these states. Returns its last state, and how often it has asked."""
    config = Config.model_validate({"generator": {"wait_for_learner_s": wait_s}})
    cluster, run = OneProcessCluster(config), Preempted(states)
    cluster.answers["brief_status"] = run.status
    async with asyncio.timeout(60):
        deployment = deployment_of(config, cluster=cluster, watch_every_s=0.0, clock=run.clock)
        return await deployment.run(asyncio.Event()), run.asked


@pytest.mark.asyncio
@pytest.mark.parametrize(("wait_s", "asked"), [(0.0, 1), (25.0, 4)])
async def test_a_deployment_waits_for_the_next_learner_only_as_long_as_it_should(
    wait_s: float, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert await run_of([RunState.PREEMPTED], wait_s=wait_s) == (RunState.PREEMPTED, asked)
    assert caplog.text.count("generator.wait_for_learner_s") == (wait_s > 0)


@pytest.mark.asyncio
async def test_a_deployment_serves_the_learner_that_continues_a_preempted_run_and_then_waits_anew() -> None:
    back = [RunState.PREEMPTED, RunState.PREEMPTED, RunState.STARTING, RunState.RUNNING]
    assert await run_of([*back, *back, RunState.FINISHED], wait_s=15.0) == (RunState.FINISHED, 9)
    # 20 s are longer than the wait
    assert await run_of([RunState.PREEMPTED, *back], wait_s=15.0) == (RunState.PREEMPTED, 3)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [RunState.FINISHED, RunState.STOPPED, RunState.FAILED])
async def test_a_deployment_waits_for_no_learner_of_a_run_that_is_over(end: RunState) -> None:
    assert await run_of([end], wait_s=1000.0) == (end, 1)
    assert await run_of([RunState.PREEMPTED, end], wait_s=1000.0) == (end, 2), "`asyncrl down` ends the wait"


@pytest.mark.asyncio
async def test_a_signal_to_a_deployment_ends_its_wait_for_a_learner() -> None:
    config = Config.model_validate({"generator": {"wait_for_learner_s": 1000.0}})
    cluster, run, stop = OneProcessCluster(config), Preempted([RunState.PREEMPTED]), asyncio.Event()

    def status() -> RunStatus:
        if run.asked == 3:
            stop.set()
        return run.status()

    cluster.answers["brief_status"] = status
    async with asyncio.timeout(60):
        assert await deployment_of(config, cluster=cluster, watch_every_s=0.0, clock=run.clock).run(stop) is None
    assert run.asked == 4
