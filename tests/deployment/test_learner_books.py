"""The records of a run: its summary, the weights that a failed run still saves, and Prometheus' targets."""

import asyncio
import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from buffer_scenes import Scene
from joined_scene import OneProcessCluster
from made_up_run import TOTALS, make_step
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.buffer.records import Failure
from asyncrl.common.roles import RunState
from asyncrl.common.tasks import Stopped, running
from asyncrl.common.version import Version
from asyncrl.complete_directory import COMPLETE, unfinished
from asyncrl.config.schema import CheckpointSection, Config
from asyncrl.coordinator.client import Call
from asyncrl.coordinator.registry import Registry
from asyncrl.coordinator.status import RunSnapshot
from asyncrl.data.prompts import PromptCursor
from asyncrl.deployment.inputs import Prompts
from asyncrl.deployment.learner import LEAVE_S, LearnerDeployment, Targets
from asyncrl.deployment.run_dir import RunDir
from asyncrl.deployment.screen import Screen
from asyncrl.deployment.training import Training
from asyncrl.errors import ActorGone, CallTimeout, CheckpointError, FailureClass, Fenced, RunError, StallError
from asyncrl.learner.records import EvalRecord, RecordSink, RunTotals, StepRecord
from asyncrl.learner.saving import Checkpoints
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.metrics.discovery import Target
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.server import REFRESH_HEADER
from asyncrl.shown_text import hide

DEADLINE_S = 120.0


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path)


def config_in(folder: Path, **sections: Any) -> Config:
    sections["run"] = {"name": "quick", "dir": str(folder)} | sections.get("run", {})
    return Config.model_validate(sections)


@dataclass
class Saved:
    """A run whose checkpoints `write` writes. Its ranks hold `ranks_have` trained steps, and `save_hf` saves them."""

    write_checkpoint: Callable[[Path], None] = lambda path: None
    save_hf: Callable[[Path], None] = lambda path: None
    ranks_have: Callable[[], int | None] = lambda: None

    @property
    def policy(self) -> Any:
        return SimpleNamespace(save_hf=self.save_hf, trained_step=self.ranks_have)

    def check_folder(self, folder: Path) -> None: ...

    def stage(self) -> None: ...

    def write(self, path: Path, snapshot: RunSnapshot, *, hf: bool) -> None:
        self.write_checkpoint(path)


def checkpoints_in(run: RunDir, saved: Any, *, clock: Callable[[], float] = time.monotonic) -> Checkpoints:
    run.checkpoints.mkdir(exist_ok=True)
    return Checkpoints(
        CheckpointSection(),
        folder=run.checkpoints,
        run=saved,
        sync_records=run.sync,
        metrics=LearnerMetrics(),
        clock=clock,
    )


def snapshot_after(step: int) -> RunSnapshot:
    """Returns the snapshot of an empty buffer."""
    buffer = msgspec.structs.replace(Scene().buffer.snapshot(), version=Version(1, step))
    return RunSnapshot(buffer=buffer, prompts=PromptCursor(issued=0, fingerprint=""))


Train = Callable[[Training], Awaitable[RunTotals]]


@dataclass(kw_only=True)
class OtherTraining(Training):
    """A training that `train` replaces. It calls `ended` when its ranks end."""

    train: Train
    ended: Callable[[], None] = lambda: None

    async def run(self, *_: object, ranks: AsyncExitStack, **__: object) -> RunTotals:
        ranks.callback(self.ended)
        return await self.train(self)


def deployed(
    run: RunDir,
    config: Config,
    *,
    train: Train,
    cluster: OneProcessCluster | None = None,
    ended: Callable[[], None] = lambda: None,
    model_path: Awaitable[str] | None = None,
    **options: Any,
) -> LearnerDeployment:
    """Returns a learner deployment in a cluster without Ray. It trains with `train`, and calls `ended` when its ranks
    end."""
    model: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    model.set_result("model")
    defaults = {"screen": Screen(started_s=0.0, show=lambda view: None, report=lambda line: None)}
    return LearnerDeployment(
        config,
        run_dir=run,
        model_path=model if model_path is None else model_path,
        prompts=asyncio.sleep(0, Prompts(train=(), heldout=())),
        cluster=(cluster or OneProcessCluster(config)).joined,
        new_training=partial(OtherTraining, train=train, ended=ended),
        **(defaults | options),
    )


def records(*steps: StepRecord) -> Train:
    """Returns a training that records these steps."""

    async def train(training: Training) -> RunTotals:
        for step in steps:
            for sink in training.sinks:
                sink.append_step(step)
        return TOTALS

    return train


SKIPPED = {"trained": False, "trained_samples": 0, "trained_tokens": 0}


@pytest.mark.asyncio
@pytest.mark.fault("F21")
async def test_a_run_whose_steps_were_all_skipped_has_no_summary(config: Config) -> None:
    with RunDir.create(config) as run:
        assert await deployed(run, config, train=records(make_step(0, **SKIPPED))).run(asyncio.Event()) is None
        assert not (run.path / "summary.json").exists()
        one = records(make_step(0), make_step(1, **SKIPPED))
        summary = await deployed(run, config, train=one).run(asyncio.Event())
        assert summary is not None
        assert summary.steps == 1
        assert (run.path / "summary.json").exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["finished", "failed", "asked to end", "of no sweep"])
async def test_ranks_are_kept_for_the_next_run_only_if_this_one_has_finished(end: str, tmp_path: Path) -> None:
    config = config_in(tmp_path, learner={"total_steps": 1})  # asked to end in the last step, a run is not stopped
    stop, kept, trainings = asyncio.Event(), list[Any](), list[Training]()

    async def train(training: Training) -> RunTotals:
        trainings.append(training)
        if end == "failed":
            raise StallError("nothing moves")
        if end == "asked to end":
            stop.set()
        return await records(make_step(0))(training)

    keeps: list[bool] = []
    with RunDir.create(config) as run, contextlib.suppress(StallError):
        options = {} if end == "of no sweep" else {"kept": kept}
        deployment = deployed(run, config, train=train, ended=lambda: keeps.append(trainings[0].keeps), **options)
        await deployment.run(stop)
    assert keeps == [end == "finished"], "when the ranks end"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("steps", "saved_before", "saves"),
    [
        ([], None, []),
        ([make_step(0, **SKIPPED)], None, []),
        ([make_step(0), make_step(1, **SKIPPED)], None, ["step-1"]),
        ([make_step(0), make_step(1)], "step-2", []),
    ],
    ids=["no step", "a skipped step", "a step", "a step that has a checkpoint"],
)
async def test_a_failed_run_keeps_what_it_has_trained_while_its_ranks_are_there(
    steps: list[StepRecord], saved_before: str | None, saves: list[str], config: Config
) -> None:
    done: list[str] = []

    async def train(training: Training) -> RunTotals:
        training.checkpoints = checkpoints_in(run, Saved(save_hf=lambda path: done.append(path.parent.name)))
        if saved_before is not None:
            (run.checkpoints / saved_before).mkdir()
        await records(*steps)(training)
        raise StallError("nothing moves")

    with RunDir.create(config) as run:
        deployment = deployed(run, config, train=train, ended=lambda: done.append("ended"))
        with pytest.raises(StallError):
            await deployment.run(asyncio.Event())
    assert done == [*saves, "ended"]


@pytest.mark.asyncio
async def test_weights_that_a_failed_run_cannot_save_are_logged_and_its_own_error_is_raised(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    def dead(path: Path) -> None:
        raise RunError("rank 0 is gone")

    async def train(training: Training) -> RunTotals:
        training.checkpoints = checkpoints_in(run, Saved(save_hf=dead))
        await records(make_step(0))(training)
        raise StallError("nothing moves")

    with RunDir.create(config) as run, pytest.raises(StallError):
        await deployed(run, config, train=train).run(asyncio.Event())
    assert "could not be saved: rank 0 is gone" in caplog.text


@pytest.mark.asyncio
async def test_a_failed_run_first_waits_for_the_save_that_is_running(config: Config) -> None:
    go_on, done = threading.Event(), list[str]()

    def slow(path: Path) -> None:
        go_on.wait()
        path.mkdir()
        (path / COMPLETE).touch()
        done.append("checkpoint written")

    async def later() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        go_on.set()

    async def train(training: Training) -> RunTotals:
        ranks = Saved(slow, save_hf=lambda _: done.append("weights saved"), ranks_have=lambda: done.append("asked"))
        training.checkpoints = checkpoints_in(run, ranks)
        await records(make_step(0))(training)
        await training.checkpoints.begin(snapshot_after(1), last_step=False)
        waiting.append(asyncio.create_task(later()))
        raise StallError("nothing moves")

    waiting: list[asyncio.Task[None]] = []
    with RunDir.create(config) as run, pytest.raises(StallError):
        await deployed(run, config, train=train).run(asyncio.Event())
    assert done == ["checkpoint written", "asked"], "the checkpoint of this step was being written"


@pytest.mark.asyncio
@pytest.mark.fault("F7")
async def test_a_run_that_fails_with_its_running_save_ends_and_leaves_no_unfinished_checkpoint(config: Config) -> None:
    """A rank died: the save ends with an error, and the ranks cannot save their weights either."""
    died = threading.Event()

    def dies(path: Path) -> None:
        (unfinished(path) / "policy").mkdir(parents=True)
        died.wait()
        raise CheckpointError("learner rank 1 died in write_checkpoint")

    def no_ranks() -> int:
        raise RunError("the learner has no ranks")

    async def train(training: Training) -> RunTotals:
        training.checkpoints = checkpoints_in(run, Saved(dies, ranks_have=no_ranks))
        await records(make_step(0))(training)
        await training.checkpoints.begin(snapshot_after(1), last_step=False)
        died.set()
        raise ActorGone("learner rank 1 died")

    with RunDir.create(config) as run:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ActorGone):
                await deployed(run, config, train=train).run(asyncio.Event())
        assert list(run.checkpoints.iterdir()) == []


@pytest.mark.asyncio
@pytest.mark.parametrize(("ranks_have", "saved_as"), [(None, "step-1"), (1, "step-1"), (2, "step-2")])
async def test_rescued_weights_have_the_number_of_the_last_update_that_the_ranks_applied(
    ranks_have: int | None, saved_as: str, config: Config
) -> None:
    saved: list[str] = []

    async def train(training: Training) -> RunTotals:
        ranks = Saved(save_hf=lambda path: saved.append(path.parent.name), ranks_have=lambda: ranks_have)
        training.checkpoints = checkpoints_in(run, ranks)
        await records(make_step(0))(training)
        raise StallError("nothing moves")

    with RunDir.create(config) as run, pytest.raises(StallError):
        await deployed(run, config, train=train).run(asyncio.Event())
    assert saved == [saved_as], "step 1 is recorded; the run may have failed after the update of step 2"


@pytest.mark.asyncio
@pytest.mark.fault("F34")
@pytest.mark.parametrize(
    ("error", "supervised", "saved", "state"),
    [
        (ActorGone, True, True, RunState.STARTING),
        (ActorGone, False, True, RunState.FAILED),
        (ActorGone, True, False, RunState.FAILED),
        (RuntimeError, True, True, RunState.STARTING),
        (CheckpointError, True, True, RunState.FAILED),
    ],
)
async def test_the_generators_stay_only_if_the_learner_is_started_again(
    config: Config, error: type[Exception], supervised: bool, saved: bool, state: RunState
) -> None:
    cluster = OneProcessCluster(config)

    async def fail(_: Training) -> RunTotals:
        raise error("a rank died")

    with RunDir.create(config) as run:
        if saved:
            (run.checkpoints / "step-2").mkdir(parents=True)
            (run.checkpoints / "step-2" / COMPLETE).touch()
        deployment = deployed(run, config, cluster=cluster, train=fail, supervised=lambda: supervised)
        with pytest.raises(error):
            await deployment.run(asyncio.Event())
    assert [arguments[1] for arguments in cluster.called("set_state")] == [state]
    assert cluster.coordinator.registry.message == f"{error.__name__}: a rank died"


@pytest.mark.asyncio
@pytest.mark.fault("F13")
@pytest.mark.parametrize("in_training", [False, True])
async def test_a_learner_that_was_replaced_ends_at_its_next_heartbeat(in_training: bool, config: Config) -> None:
    cluster, training = OneProcessCluster(config), asyncio.Event()

    async def train(_: Training) -> RunTotals:
        training.set()
        await asyncio.Event().wait()
        return TOTALS

    async def replaced(_: Call) -> None:
        if in_training:
            await training.wait()
        cluster.replace_learner()

    cluster.before["keep"] = replaced
    with RunDir.create(config) as run:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        model_path = None if in_training else never
        deployment = deployed(run, config, cluster=cluster, train=train, model_path=model_path)
        with pytest.raises(Fenced, match=r"incarnation 1.*another learner has taken over"):
            async with asyncio.timeout(DEADLINE_S):
                await deployment.run(asyncio.Event())
    assert training.is_set() is in_training
    ((_, state, message),) = cluster.called("set_state")
    assert state is RunState.FAILED
    assert "has taken over" in message


@pytest.fixture
def hidden_key() -> Iterator[str]:
    """A secret that is hidden in all text that this process shows."""
    key = "sk-0123456789"
    hide(lambda text: text.replace(key, "<KEY>"))
    yield key
    hide(str)


@pytest.mark.asyncio
async def test_the_error_that_the_run_gets_from_a_failed_learner_shows_no_secret(
    config: Config, hidden_key: str
) -> None:
    cluster = OneProcessCluster(config)

    async def train(_: Training) -> RunTotals:
        raise RunError(f"401 for {hidden_key}")

    with RunDir.create(config) as run, pytest.raises(RunError):
        async with asyncio.timeout(DEADLINE_S):
            await deployed(run, config, cluster=cluster, train=train).run(asyncio.Event())
    assert cluster.coordinator.registry.message == "RunError: 401 for <KEY>"


@pytest.mark.asyncio
async def test_a_step_of_closing_that_fails_does_not_keep_the_others_from_taking_place(config: Config) -> None:
    cluster, done, closing = OneProcessCluster(config), list[str](), list[bool]()

    async def train(training: Training) -> RunTotals:
        closing.append(True)
        return await records(make_step(0))(training)

    async def left(_: Call) -> None:
        done.append("left")

    def show(_: object) -> None:
        if closing:
            raise RunError("the screen does not answer")

    cluster.before["detach"] = left
    screen = Screen(started_s=0.0, show=show, report=lambda line: None)
    with RunDir.create(config) as run:
        deployment = deployed(
            run, config, cluster=cluster, train=train, ended=lambda: done.append("ranks ended"), screen=screen
        )
        with pytest.raises(RunError, match="the screen does not answer"):
            await deployment.run(asyncio.Event())
    assert done == ["left", "ranks ended"]


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_a_run_whose_last_weights_cannot_be_saved_records_the_rest_and_fails(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(path: Path) -> None:
        raise CheckpointError("rank 0: OSError: No space left on device")

    async def train(training: Training) -> RunTotals:
        training.checkpoints = checkpoints_in(run, Saved(full_disk))
        await records(make_step(0))(training)
        await training.checkpoints.save_last(snapshot_after(1))
        return TOTALS

    lost = r"(?s)weights of step 1 are lost, .*No space left.*\nfree space on"
    with RunDir.create(config) as run, pytest.raises(CheckpointError, match=lost):
        await deployed(run, config, train=train).run(asyncio.Event())
    assert (run.path / "summary.json").exists()
    assert "could not be saved" not in caplog.text, "the error is raised and not logged as well"


@pytest.mark.asyncio
async def test_the_caller_gets_each_record_after_it_was_written(config: Config) -> None:
    seen: list[tuple[StepRecord | EvalRecord, int]] = []
    evaluation = EvalRecord(version=1, wall_s=2.0, prompts=3, reward_mean=0.5)

    def lines(name: str) -> int:
        return len((run.path / name).read_bytes().splitlines())

    class Caller(RecordSink):
        def append_step(self, record: StepRecord) -> None:
            seen.append((record, lines("steps.jsonl")))

        def append_eval(self, record: EvalRecord) -> None:
            seen.append((record, lines("evals.jsonl")))

    async def train(training: Training) -> RunTotals:
        await records(make_step(0), make_step(1))(training)
        for sink in training.sinks:
            sink.append_eval(evaluation)
        return TOTALS

    with RunDir.create(config) as run:
        screen = Screen(started_s=0.0, show=lambda view: None, report=lambda line: None, records=Caller())
        await deployed(run, config, train=train, screen=screen).run(asyncio.Event())
    assert seen == [(make_step(0), 1), (make_step(1), 2), (evaluation, 1)]


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_a_summary_without_room_is_said_and_does_not_hide_that_the_weights_are_lost(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    with RunDir.create(config) as run:
        (run.path / "summary.json").mkdir()  # so that the file cannot be written
        assert await deployed(run, config, train=records(make_step(0))).run(asyncio.Event()) is not None
    assert "summary.json was not written: " in caplog.text


@pytest.mark.parametrize("trained", [1, 2])
@pytest.mark.asyncio
async def test_a_run_is_stopped_when_it_was_asked_to_end_before_its_last_step(tmp_path: Path, trained: int) -> None:
    config = config_in(tmp_path, learner={"total_steps": 2, "optimizer": {"warmup_steps": 0}})
    stop = asyncio.Event()

    async def train(training: Training) -> RunTotals:
        stop.set()
        return await records(*map(make_step, range(trained)))(training)

    with RunDir.create(config) as run:
        await deployed(run, config, train=train).run(stop)
    info = json.loads((run.path / "run.json").read_bytes())
    stopped = ("stopped", "asked to end by a signal, after step 1 of 2")
    assert (info["state"], info["exit_reason"]) == (stopped if trained == 1 else ("finished", "done"))


@pytest.mark.asyncio
async def test_asyncrl_down_ends_a_run_that_was_asked_to_restart(tmp_path: Path) -> None:
    config = config_in(tmp_path, buffer={"heartbeat_timeout_s": 0.5})
    cluster, stop = OneProcessCluster(config), asyncio.Event()
    with RunDir.create(config) as run:

        async def train(training: Training) -> RunTotals:
            async with asyncio.timeout(DEADLINE_S):
                cluster.coordinator.registry.ask_to_end(restart=True)
                await stop.wait()
                info = json.loads((run.path / "run.json").read_bytes())
                assert info["exit_reason"] is None, "with a reason, `asyncrl down` would only wait for the end"
                cluster.coordinator.registry.ask_to_end()
                while run.starts_again:
                    await asyncio.sleep(0.01)  # a heartbeat brings the answer
                cluster.coordinator.registry.ask_to_end(restart=True)
            return await records(make_step(0))(training)

        await deployed(run, config, train=train, cluster=cluster).run(stop)
        assert run.end is RunState.STOPPED


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.asyncio
async def test_a_run_whose_learner_shall_restart_ends_as_stopped_and_its_generators_stay(
    tmp_path: Path, restart: bool
) -> None:
    config = config_in(tmp_path, buffer={"heartbeat_timeout_s": 0.5})
    cluster, stop = OneProcessCluster(config), asyncio.Event()

    async def train(training: Training) -> RunTotals:
        cluster.coordinator.registry.ask_to_end(restart=restart)
        async with asyncio.timeout(DEADLINE_S):
            await stop.wait()
        return await records(make_step(0))(training)

    with RunDir.create(config) as run:
        await deployed(run, config, train=train, cluster=cluster).run(stop)
        assert run.end is (RunState.STARTING if restart else RunState.STOPPED)
    assert cluster.coordinator.registry.state is run.end
    info = json.loads((run.path / "run.json").read_bytes())
    by = "a pod of the learner that is about to end" if restart else "`asyncrl down`"
    assert (info["state"], info["exit_reason"]) == ("stopped", f"asked to end by {by}, after step 1 of 200")


@pytest.mark.asyncio
async def test_a_run_that_an_evaluation_ended_is_finished_and_says_why(config: Config) -> None:
    async def train(training: Training) -> RunTotals:
        totals = await records(make_step(0))(training)
        return msgspec.structs.replace(totals, stop_reason="ended after step 1 of 200, because …")

    with RunDir.create(config) as run:
        await deployed(run, config, train=train).run(asyncio.Event())
    info = json.loads((run.path / "run.json").read_bytes())
    assert (info["state"], info["exit_reason"]) == ("finished", "ended after step 1 of 200, because …")
    assert json.loads((run.path / "summary.json").read_bytes())["stop_reason"] == info["exit_reason"]


def listed(run: RunDir) -> list[str]:
    """Returns the endpoints in the run's metrics/targets.json."""
    return targets_in(run.targets_path.read_bytes())


def targets_in(groups: bytes) -> list[str]:
    return [target for group in json.loads(groups) for target in group["targets"]]


@dataclass
class Client:
    """A client of a learner's HTTP endpoint, which asks for the targets every `refresh_s` seconds."""

    cluster: OneProcessCluster
    refresh_s: int = 10
    answers: list[list[str]] = field(default_factory=list)

    async def get(self, path: str) -> bytes:
        address = self.cluster.coordinator.registry.endpoints["learner"].address
        question = urllib.request.Request(f"http://{address}{path}", headers={REFRESH_HEADER: str(self.refresh_s)})
        with await asyncio.to_thread(urllib.request.urlopen, question, timeout=DEADLINE_S) as answer:
            body: bytes = answer.read()
            return body

    async def targets(self) -> list[str]:
        return targets_in(await self.get("/sd"))


@pytest.mark.parametrize("end", ["done", "stopped", "stopped before the first step", "failed", "cancelled"])
@pytest.mark.asyncio
async def test_what_ended_in_order_is_listed_no_more_and_what_failed_still_is(config: Config, end: str) -> None:
    cluster = OneProcessCluster(config)
    client, over_http = Client(cluster), list[list[str]]()
    stop, errors = asyncio.Event(), {"failed": StallError, "cancelled": asyncio.CancelledError}

    async def train(training: Training) -> RunTotals:
        await records(make_step(0))(training)
        async with asyncio.timeout(DEADLINE_S):
            while not run.targets_path.exists():
                await asyncio.sleep(0)
        if end in errors:
            raise errors[end]
        if end != "done":
            stop.set()
        if end == "stopped before the first step":
            raise Stopped
        return TOTALS

    async def at_the_end(_: Call) -> None:
        over_http.append(await client.targets())

    cluster.before["detach"] = at_the_end
    with RunDir.create(config) as run:
        with pytest.raises(errors[end]) if end in errors else contextlib.nullcontext():
            await deployed(run, config, cluster=cluster, train=train).run(stop)
        found = cluster.coordinator.registry.endpoints
        left = [found[process].address for process in ("buffer", "learner")] if end in errors else []
        assert listed(run) == left
        assert over_http == [left], "the HTTP discovery has the same targets"


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.asyncio
async def test_a_run_that_ends_serves_until_who_discovers_over_http_has_the_empty_list(
    tmp_path: Path, stopped: bool
) -> None:
    """The last request for the targets comes when everything else is closed. The run ends after the answer."""
    config = config_in(tmp_path, run={"shutdown_grace_s": 10 * DEADLINE_S})
    cluster, stop, closed = OneProcessCluster(config), asyncio.Event(), asyncio.Event()
    client = Client(cluster)

    async def train(training: Training) -> RunTotals:
        await records(make_step(0))(training)
        async with asyncio.timeout(DEADLINE_S):
            while not await client.targets():
                pass
        if stopped:
            stop.set()
        return TOTALS

    with RunDir.create(config) as run:
        deployment = deployed(run, config, cluster=cluster, train=train, ended=closed.set)
        running = asyncio.create_task(deployment.run(stop))
        async with asyncio.timeout(DEADLINE_S):
            await closed.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            assert not running.done(), "the client still has the old list of targets"
            assert await client.targets() == []
            await running


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_run_that_was_asked_to_end_waits_within_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path, run={"shutdown_grace_s": LEAVE_S})
    cluster, stop = OneProcessCluster(config), asyncio.Event()
    monkeypatch.setattr("asyncrl.metrics.server.DISCOVERY_S", 10 * DEADLINE_S)

    async def train(training: Training) -> RunTotals:
        async with asyncio.timeout(DEADLINE_S):
            while not await Client(cluster).targets():  # the client never gets the empty list
                pass
        stop.set()
        return TOTALS

    with RunDir.create(config) as run:
        async with asyncio.timeout(DEADLINE_S):
            await deployed(run, config, cluster=cluster, train=train).run(stop)


HELDOUT: Any = SimpleNamespace(wanted=True)
NO_HELDOUT: Any = SimpleNamespace(wanted=False)


async def freed(
    folder: Path, *, heldout: Any = HELDOUT, step_s: float = 1.0, restarts: bool = False, **run_section: Any
) -> list[str]:
    """Asks a run to end during its first step. Returns in order when its engines are free and when it was trained."""
    config = config_in(folder, run={"shutdown_grace_s": 2 * LEAVE_S} | run_section)
    stop, happened = asyncio.Event(), list[str]()

    async def step_and_save(training: Training) -> RunTotals:
        training.checkpoints, training.heldout = checkpoints_in(run, Saved()), heldout
        await records(make_step(0, duration_s=step_s))(training)
        run.asked_to_end("a pod", restarts=restarts)
        stop.set()
        for _ in range(100):
            await asyncio.sleep(0)
        happened.append(f"trained, {training.grace_left_s():.0f} s left")
        return TOTALS

    async def engines() -> None:
        await deployment.engines_free(stop)
        happened.append("engines are free")

    with RunDir.create(config) as run:
        deployment = deployed(run, config, train=step_and_save, ended=lambda: happened.append("ranks end"))
        async with asyncio.timeout(DEADLINE_S), running(engines()) as free:
            await deployment.run(stop)
            stop.set()
            await free
    return happened


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_engines_stay_for_the_evaluation_of_the_last_weights_and_are_free_before_the_ranks_end(
    tmp_path: Path,
) -> None:
    assert await freed(tmp_path) == ["trained, 10 s left", "engines are free", "ranks end"]


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize(
    "options",
    [
        {"heldout": None},
        {"heldout": NO_HELDOUT},
        {"step_s": 2 * LEAVE_S},
        {"shutdown_grace_s": LEAVE_S},
        {"mirror": "memory://quick"},
        {"restarts": True},
    ],
    ids=[
        "ranks start",
        "no held-out prompts",
        "a step that is too long",
        "a grace that is too short",
        "a mirror",
        "a restart",
    ],
)
async def test_engines_are_free_at_the_request_to_end_if_no_evaluation_is_possible(
    options: dict[str, Any], tmp_path: Path
) -> None:
    first, *then = await freed(tmp_path, **options)
    assert (first, then) == ("engines are free", ["trained, 0 s left", "ranks end"])


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_engines_are_free_in_time_although_the_learner_still_trains(tmp_path: Path) -> None:
    may_end = asyncio.Event()
    config = config_in(tmp_path, run={"shutdown_grace_s": LEAVE_S + 0.05})
    stop = asyncio.Event()

    async def long_step(training: Training) -> RunTotals:
        training.checkpoints, training.heldout = checkpoints_in(run, Saved()), HELDOUT
        await records(make_step(0, duration_s=0.01))(training)
        stop.set()
        await may_end.wait()
        assert training.grace_left_s() == 0.0
        return TOTALS

    with RunDir.create(config) as run:
        deployment = deployed(run, config, train=long_step)
        async with asyncio.timeout(DEADLINE_S), running(deployment.run(stop)) as learner:
            await deployment.engines_free(stop)
            assert not learner.done()
            may_end.set()
            await learner


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize("error", [StallError("nothing moves"), Stopped()])
async def test_engines_are_free_when_the_training_fails_after_the_request_to_end(
    error: Exception, tmp_path: Path
) -> None:
    config, stop, happened = config_in(tmp_path, run={"shutdown_grace_s": 600.0}), asyncio.Event(), list[str]()

    async def fail(training: Training) -> RunTotals:
        training.checkpoints, training.heldout = checkpoints_in(run, Saved()), HELDOUT
        await records(make_step(0))(training)
        stop.set()
        await asyncio.sleep(0)
        raise error

    with RunDir.create(config) as run:
        deployment = deployed(run, config, train=fail, ended=lambda: happened.append("ranks end"))
        async with asyncio.timeout(DEADLINE_S), running(deployment.engines_free(stop)) as free:
            with contextlib.suppress(StallError):
                await deployment.run(stop)
            await free


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize("fails", [False, True])
async def test_admission_ends_with_the_request_to_end_although_the_step_still_runs(
    fails: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, stop, asked = config_in(tmp_path), asyncio.Event(), asyncio.Event()
    cluster = OneProcessCluster(config)

    async def pause(_: Call) -> None:
        asked.set()
        if fails:
            raise CallTimeout("the buffer's pause took longer than 30 s")

    async def train(training: Training) -> RunTotals:
        await records(make_step(0))(training)
        assert not cluster.coordinator.buffer.paused
        stop.set()
        await asked.wait()
        await asyncio.sleep(0)
        return TOTALS

    cluster.before["pause"] = pause
    with RunDir.create(config) as run:
        async with asyncio.timeout(DEADLINE_S):
            assert await deployed(run, config, cluster=cluster, train=train).run(stop) is not None
    assert cluster.coordinator.buffer.paused is not fails
    assert ("generators may begin groups until the last step has ended" in caplog.text) is fails


@pytest.mark.parametrize(("save_s", "warns"), [(4.0, False), (30.0, True), (None, False)])
@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_grace_that_is_too_short_for_step_save_and_closing_is_named_when_the_run_is_asked_to_end(
    save_s: float | None, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_in(tmp_path, run={"shutdown_grace_s": LEAVE_S + 5})
    stop, now_s = asyncio.Event(), [0.0]

    def write(path: Path) -> None:
        now_s[0] += save_s or 0.0

    async def train(training: Training) -> RunTotals:
        training.checkpoints = checkpoints_in(run, Saved(write), clock=lambda: now_s[0])
        await records(make_step(0, duration_s=1.0))(training)
        if save_s is not None:
            await training.checkpoints.save_last(snapshot_after(1))
        stop.set()
        await asyncio.sleep(0)
        return TOTALS

    with RunDir.create(config) as run:
        async with asyncio.timeout(DEADLINE_S):
            await deployed(run, config, train=train).run(stop)
    said = "the run needs about 41 s to end: 1 s for its step, 30 s for its checkpoint and 10 s to close, but"
    assert (said in caplog.text) is warns
    assert ("run.shutdown_grace_s = 15 s" in caplog.text) is warns


@pytest.mark.asyncio
async def test_from_the_first_scrape_on_a_learner_shows_its_whole_life_and_the_limits_that_alerts_read(
    tmp_path: Path,
) -> None:
    config = config_in(tmp_path, run={"stall_timeout_s": 71.0}, weights={"load_timeout_s": 13.0})
    cluster, shown = OneProcessCluster(config), dict[str, float]()

    async def scrape(call: Call) -> None:
        cluster.coordinator.registry.set_endpoint("learner", call.arguments[1], **call.options)
        text = (await Client(cluster).get("/metrics")).decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        shown.update({f"{sample.name}{''.join(sample.labels.values())}": sample.value for sample in samples})
        raise RunError("the first scrape is enough")

    cluster.before["set_endpoint"] = scrape
    with RunDir.create(config) as run:
        deployment = deployed(run, config, cluster=cluster, train=records())
        before_s = time.monotonic()
        with pytest.raises(RunError, match="the first scrape is enough"):
            await deployment.run(asyncio.Event())
        after_s = time.monotonic()
    seconds = {state: shown[f"asyncrl_learner_state_seconds_total{state}"] for state in LEARNER_STATES}
    assert before_s <= seconds["starting"] == sum(seconds.values()) <= after_s, "this deployment has started_s = 0"
    assert shown["asyncrl_stall_timeout_seconds"] == shown["asyncrl_deadline_secondsrun.stall_timeout_s"] == 71.0
    assert shown["asyncrl_weight_sync_timeout_seconds"] == 13.0


@pytest.mark.fault("F27")
def test_targets_that_could_not_be_written_are_written_later_and_are_over_http_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "metrics"
    folder.touch()  # a file in the place of the folder, so that no file can be written there
    targets = Targets(run="quick", path=folder / "targets.json")
    of_buffer = [Target(role="buffer", replica="buffer", address="127.0.0.1:1", node="a1")]
    targets.publish(of_buffer)
    assert f"{folder / 'targets.json'} is not up to date: " in caplog.text
    assert targets_in(targets.groups()) == ["127.0.0.1:1"]
    folder.unlink()
    folder.mkdir()
    targets.publish(of_buffer)
    assert targets_in((folder / "targets.json").read_bytes()) == ["127.0.0.1:1"]
    targets.publish([])
    assert json.loads((folder / "targets.json").read_bytes()) == []


@pytest.mark.asyncio
async def test_prometheus_finds_the_runs_processes_and_rays_nodes_again_once_ray_answers_again(
    tmp_path: Path, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    node = {"NodeID": "0123456789", "Alive": True, "NodeManagerAddress": "127.0.0.1", "MetricsExportPort": 2}
    answers = iter(
        [RunError("Ray does not list its nodes"), [{**node, "NodeManagerHostname": "b2", "Resources": {"CPU": 4}}]]
    )

    async def nodes(*, timeout_s: float) -> Any:
        if isinstance(answer := next(answers), RunError):
            raise answer
        return answer

    cluster = OneProcessCluster(config)
    await cluster.client.call(Registry.set_endpoint, "learner", "127.0.0.1:1", node="a1")
    path = tmp_path / "targets.json"
    targets = Targets(run="quick", path=path, ray_nodes=nodes)
    following = asyncio.create_task(targets.follow(cluster.client, timeout_s=1.0, every_s=0.0))
    async with asyncio.timeout(DEADLINE_S):
        while not path.exists():
            await asyncio.sleep(0)
    following.cancel()
    assert "targets are not up to date: Ray does not list its nodes" in caplog.text
    assert targets.current == [
        Target(role="buffer", replica="buffer", address="127.0.0.1:2", node="h"),
        Target(role="learner", replica="learner", address="127.0.0.1:1", node="a1"),
        Target(role="ray", replica="ray-01234567", address="127.0.0.1:2", node="b2"),
    ]


@pytest.mark.asyncio
async def test_a_run_whose_prompts_all_failed_ends_with_the_first_cause(config: Config) -> None:
    cluster = OneProcessCluster(config)
    failure = Failure(failure_class=FailureClass.DATA, reason="reward_raised", message="KeyError: 'KEY' (tasks.py:30)")
    for number in range(7):
        cluster.coordinator.heldout_failed(f"report {number}", failure)
    with RunDir.create(config) as run:
        with pytest.raises(
            RunError, match=r"rollouts failed \(reward_raised 7 rollouts\).*KeyError: 'KEY' \(tasks\.py:30\)"
        ):
            await deployed(run, config, cluster=cluster, train=records()).run(asyncio.Event())
        assert "reward_raised" in run.failures_path.read_text()


@pytest.mark.asyncio
async def test_a_run_whose_prompts_ran_out_before_its_first_step_fails(config: Config) -> None:
    with (
        RunDir.create(config) as run,
        pytest.raises(RunError, match=r"the prompts ran out before there were learner\.groups_per_step"),
    ):
        await deployed(run, config, train=records()).run(asyncio.Event())
