"""The records of a run: its summary, the weights that a failed run still saves, and Prometheus' targets."""

import asyncio
import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from buffer_scenes import Scene
from made_up_run import TOTALS, make_step
from prometheus_client import CollectorRegistry

from asyncrl import shown_text
from asyncrl.buffer.records import Failure, FailureCount
from asyncrl.common.roles import RunState
from asyncrl.common.tasks import Stopped
from asyncrl.common.version import Lineage, Version
from asyncrl.complete_directory import COMPLETE, unfinished
from asyncrl.config.schema import CheckpointSection, Config
from asyncrl.coordinator.coordinator import FailureReports, LearnerCalls
from asyncrl.coordinator.registry import EndpointChanges, Endpoints
from asyncrl.coordinator.status import RunSnapshot
from asyncrl.data.prompts import PromptCursor
from asyncrl.deployment import learner, shared_actors
from asyncrl.deployment import learner as targets_module
from asyncrl.deployment.inputs import Prompts
from asyncrl.deployment.learner import LEAVE_S, LearnerDeployment
from asyncrl.deployment.run_dir import RunDir
from asyncrl.deployment.screen import Screen
from asyncrl.errors import ActorGone, CheckpointError, FailureClass, Fenced, RunError, StallError
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.records import RunTotals, StepRecord
from asyncrl.metrics import server as server_module
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.metrics.discovery import Target
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.server import MetricsServer

DEADLINE_S = 120.0


def deployment_in(run: RunDir, config: Config) -> LearnerDeployment:
    nothing: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return LearnerDeployment(
        config,
        run_dir=run,
        model_path=nothing,
        prompts=nothing,
        screen=Screen(started_s=0.0, show=lambda view: None, report=lambda line: None),
    )


class Saved:
    """A run whose checkpoints `write` writes."""

    def __init__(self, write: Callable[[Path], None]) -> None:
        self._write = write

    def check_folder(self, folder: Path) -> None: ...

    def stage(self) -> None: ...

    def write(self, path: Path, snapshot: RunSnapshot, *, hf: bool) -> None:
        self._write(path)


def checkpoints_in(run: RunDir, write: Callable[[Path], None] = lambda path: None) -> Checkpoints:
    run.checkpoints.mkdir()
    return Checkpoints(
        CheckpointSection(),
        folder=run.checkpoints,
        run=Saved(write),
        sync_records=run.sync,
        metrics=LearnerMetrics(),
    )


def snapshot_after(step: int) -> RunSnapshot:
    """Returns the snapshot of an empty buffer."""
    buffer = msgspec.structs.replace(Scene().buffer.snapshot(), version=Version(1, step))
    return RunSnapshot(buffer=buffer, prompts=PromptCursor(issued=0, fingerprint=""))


@pytest.mark.asyncio
@pytest.mark.fault("F21")
async def test_a_run_whose_steps_were_all_skipped_has_no_summary(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        deployment._log.append_step(make_step(0, trained=False, trained_samples=0, trained_tokens=0))
        assert deployment._log.summary(TOTALS) is None
        deployment._log.append_step(make_step(0))
        deployment._log.append_step(make_step(1, trained=False, trained_samples=0, trained_tokens=0))
        summary = deployment._log.summary(TOTALS)
        assert summary is not None
        assert summary.steps == 1
        assert (run.path / "summary.json").exists()


@pytest.mark.asyncio
async def test_a_failed_run_keeps_what_it_has_trained_if_its_ranks_still_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    saved: list[str] = []

    def dead(path: Path) -> None:
        raise RunError("rank 0 is gone")

    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        await deployment._rescue_weights()
        deployment._checkpoints = checkpoints_in(run)
        deployment._save_hf = lambda path: saved.append(path.parent.name)
        deployment._log.append_step(make_step(0, trained=False, trained_samples=0, trained_tokens=0))
        await deployment._rescue_weights()
        assert saved == []
        deployment._log.append_step(make_step(0))
        deployment._log.append_step(make_step(1, trained=False, trained_samples=0, trained_tokens=0))
        await deployment._rescue_weights()
        assert saved == ["step-1"]
        deployment._log.append_step(make_step(1))
        deployment._save_hf = dead
        await deployment._rescue_weights()
        deployment._save_hf = lambda path: saved.append(path.parent.name)
        (run.checkpoints / "step-2").mkdir()
        await deployment._rescue_weights()
        assert saved == ["step-1"], "there is a checkpoint of this step"
    assert "could not be saved: rank 0 is gone" in caplog.text


@pytest.mark.asyncio
async def test_a_failed_run_first_waits_for_the_save_that_is_running(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    go_on, rescued = threading.Event(), list[Path]()

    def slow(path: Path) -> None:
        go_on.wait()
        path.mkdir()
        (path / COMPLETE).touch()

    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        deployment._checkpoints = checkpoints_in(run, slow)
        deployment._save_hf = rescued.append
        deployment._log.append_step(make_step(0))
        await deployment._checkpoints.begin(snapshot_after(1), last_step=False)
        rescue = asyncio.create_task(deployment._rescue_weights())
        go_on.set()
        await rescue
        assert not rescued, "the checkpoint of this step was being written"


@pytest.mark.asyncio
@pytest.mark.fault("F7")
async def test_a_run_that_fails_with_its_running_save_ends_and_leaves_no_unfinished_checkpoint(tmp_path: Path) -> None:
    """A rank died: the save ends with an error, and the ranks cannot save their weights either."""
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    died = threading.Event()

    def dies(path: Path) -> None:
        (unfinished(path) / "policy").mkdir(parents=True)
        died.wait()
        raise CheckpointError("learner rank 1 died in write_checkpoint")

    def no_ranks() -> int:
        raise RunError("the learner has no ranks")

    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        deployment._checkpoints = checkpoints_in(run, dies)
        deployment._trained_step = no_ranks
        deployment._log.append_step(make_step(0))
        await deployment._checkpoints.begin(snapshot_after(1), last_step=False)
        died.set()
        async with asyncio.timeout(DEADLINE_S):
            await deployment._rescue_weights()
        assert list(run.checkpoints.iterdir()) == []


@pytest.mark.asyncio
@pytest.mark.parametrize(("ranks_have", "saved_as"), [(None, "step-1"), (1, "step-1"), (2, "step-2")])
async def test_rescued_weights_have_the_number_of_the_last_update_that_the_ranks_applied(
    ranks_have: int | None, saved_as: str, tmp_path: Path
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    saved: list[str] = []
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        deployment._checkpoints = checkpoints_in(run)
        deployment._save_hf = lambda path: saved.append(path.parent.name)
        deployment._trained_step = lambda: ranks_have
        deployment._log.append_step(make_step(0))
        await deployment._rescue_weights()
    assert saved == [saved_as], "step 1 is recorded; the run may have failed after the update of step 2"


async def nothing(*_: object, **__: object) -> None:
    pass


async def no_nodes(**_: object) -> list[dict[str, Any]]:
    return []


def deployment_without_ray(
    run: RunDir,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    *,
    train: Callable[..., Awaitable[RunTotals]],
    ended: Callable[[], None] = lambda: None,
    failures: tuple[FailureCount, ...] = (),
    steps: Sequence[StepRecord] = (),
    states: list[object] | None = None,
) -> LearnerDeployment:
    """A learner deployment with a fake coordinator, which lists two endpoints and adds the run's states to `states`.

    It has recorded `steps`, trains with `train`, and calls `ended` when its ranks end.
    """

    async def call(method: object, *arguments: object, **__: object) -> object:
        if method is LearnerCalls.set_state and states is not None:
            states.append(arguments[1])
        if method is Endpoints.since:
            addresses = {"learner": "127.0.0.1:1", "buffer": "127.0.0.1:2"}
            return EndpointChanges(serial=2, whole=True, addresses=addresses)
        return failures if method is FailureReports.more_than else None

    async def run_of(*_: object, **__: object) -> Any:
        return SimpleNamespace(
            coordinator=SimpleNamespace(call=call), deployment=SimpleNamespace(id="learner-1"), lineage=Lineage()
        )

    rows = object()

    async def open_data_plane(*_: object, **__: object) -> object:
        return rows

    def policy(*_: object, dp_client: object, **__: object) -> Any:
        assert dp_client is rows, "another client would not notice that the index of the data plane has died"
        return SimpleNamespace(shutdown=ended)

    monkeypatch.setattr(learner, "open_data_plane", open_data_plane)
    monkeypatch.setattr(learner, "enter_run", run_of)
    monkeypatch.setattr(learner, "leave_run", nothing)
    monkeypatch.setattr(learner, "keep_attached", nothing)
    monkeypatch.setattr(targets_module, "ray_nodes", no_nodes)
    monkeypatch.setattr(learner, "TQPolicy", policy)
    deployment = deployment_in(run, config)
    deployment._prompts = asyncio.sleep(0, Prompts(train=(), heldout=()))
    deployment._model_path = finished_model = asyncio.get_running_loop().create_future()
    finished_model.set_result("model")
    deployment._log.steps = list(steps)
    monkeypatch.setattr(deployment, "_train", train)
    return deployment


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    supervised: bool,
    saved: bool,
    state: RunState,
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    states: list[object] = []

    async def fail(*_: object) -> RunTotals:
        raise error("a rank died")

    with RunDir.create(config) as run:
        if saved:
            (run.checkpoints / "step-2").mkdir(parents=True)
            (run.checkpoints / "step-2" / COMPLETE).touch()
        deployment = deployment_without_ray(run, config, monkeypatch, train=fail, states=states)
        deployment._supervised = lambda: supervised
        with pytest.raises(error):
            await deployment.run(asyncio.Event())
    assert states == [state]


@pytest.mark.asyncio
async def test_what_a_failed_run_has_trained_is_saved_while_its_ranks_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    done: list[str] = []

    async def fail(*_: object) -> RunTotals:
        raise StallError("nothing moves")

    async def rescue() -> None:
        done.append("saved")

    with RunDir.create(config) as run:
        deployment = deployment_without_ray(run, config, monkeypatch, train=fail, ended=lambda: done.append("ended"))
        monkeypatch.setattr(deployment, "_rescue_weights", rescue)
        with pytest.raises(StallError):
            await deployment.run(asyncio.Event())
    assert done == ["saved", "ended"]


@pytest.mark.asyncio
@pytest.mark.fault("F13")
@pytest.mark.parametrize("in_training", [False, True])
async def test_a_learner_that_was_replaced_ends_at_its_next_heartbeat(
    in_training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    training = asyncio.Event()

    async def train(*_: object) -> RunTotals:
        training.set()
        await asyncio.Event().wait()
        return TOTALS

    async def keep_attached(*arguments: Any, **options: Any) -> None:
        if in_training:
            await training.wait()
        # the fake coordinator's answer is that it is not attached
        await shared_actors.keep_attached(*arguments, **options)

    with RunDir.create(config) as run:
        deployment = deployment_without_ray(run, config, monkeypatch, train=train)
        if not in_training:
            deployment._model_path = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(learner, "keep_attached", keep_attached)
        with pytest.raises(Fenced, match=r"incarnation 1.*another learner has taken over"):
            async with asyncio.timeout(DEADLINE_S):
                await deployment.run(asyncio.Event())
    assert training.is_set() is in_training
    assert "has taken over" in deployment._failure


@pytest.mark.asyncio
async def test_the_error_that_the_run_gets_from_a_failed_learner_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train(*_: object) -> RunTotals:
        raise RunError("401 for sk-0123456789")

    monkeypatch.setattr(shown_text, "_redact", lambda text: text.replace("sk-0123456789", "<KEY>"))
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    with RunDir.create(config) as run:
        deployment = deployment_without_ray(run, config, monkeypatch, train=train)
        with pytest.raises(RunError):
            async with asyncio.timeout(DEADLINE_S):
                await deployment.run(asyncio.Event())
    assert deployment._failure == "RunError: 401 for <KEY>"


@pytest.mark.asyncio
async def test_a_step_of_closing_that_fails_does_not_keep_the_others_from_taking_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    done: list[str] = []

    async def train(*_: object) -> RunTotals:
        return TOTALS

    async def leave(*_: object, **__: object) -> None:
        done.append("left")

    def no_tracker() -> None:
        raise RunError("the tracker does not answer")

    with RunDir.create(config) as run:
        deployment = deployment_without_ray(
            run, config, monkeypatch, train=train, ended=lambda: done.append("ranks ended"), steps=[make_step(0)]
        )
        monkeypatch.setattr(learner, "leave_run", leave)
        deployment._log.close = no_tracker
        with pytest.raises(RunError, match="the tracker does not answer"):
            await deployment.run(asyncio.Event())
    assert done == ["left", "ranks ended"]


def full_disk(path: Path) -> None:
    raise CheckpointError("rank 0: OSError: No space left on device")


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_a_run_whose_last_weights_cannot_be_saved_records_the_rest_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})

    async def train(*_: object) -> RunTotals:
        deployment._log.append_step(make_step(0))
        deployment._checkpoints = checkpoints_in(run, full_disk)
        await deployment._checkpoints.save_last(snapshot_after(1))
        return TOTALS

    with RunDir.create(config) as run:
        deployment = deployment_without_ray(run, config, monkeypatch, train=train)
        with pytest.raises(CheckpointError, match=r"(?s)weights of step 1 are lost, .*No space left.*\nfree space on"):
            await deployment.run(asyncio.Event())
    assert (run.path / "summary.json").exists()
    assert "could not be saved" not in caplog.text, "the error is raised and not logged as well"


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_a_summary_without_room_is_said_and_does_not_hide_that_the_weights_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        deployment._log.append_step(make_step(0))
        monkeypatch.setattr(run, "write_summary", full_disk_error)
        assert deployment._log.summary(TOTALS) is not None
    assert "summary.json was not written: no space" in caplog.text


@pytest.mark.parametrize("trained", [1, 2])
@pytest.mark.asyncio
async def test_a_run_is_stopped_when_it_was_asked_to_end_before_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: int
) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "quick", "dir": str(tmp_path)},
            "learner": {"total_steps": 2, "optimizer": {"warmup_steps": 0}},
        }
    )
    stop = asyncio.Event()

    async def train(*_: object) -> RunTotals:
        for step in range(trained):
            deployment._log.append_step(make_step(step))
        stop.set()
        return TOTALS

    with RunDir.create(config) as run:
        deployment = deployment_without_ray(run, config, monkeypatch, train=train)
        await deployment.run(stop)
    info = json.loads((run.path / "run.json").read_bytes())
    stopped = ("stopped", "asked to end by a signal, after step 1 of 2")
    assert (info["state"], info["exit_reason"]) == (stopped if trained == 1 else ("finished", "done"))


@pytest.mark.asyncio
async def test_a_run_that_an_evaluation_ended_is_finished_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})

    async def train(*_: object) -> RunTotals:
        return msgspec.structs.replace(TOTALS, stop_reason="ended after step 1 of 200, because …")

    with RunDir.create(config) as run:
        deployment = deployment_without_ray(run, config, monkeypatch, train=train, steps=[make_step(0)])
        await deployment.run(asyncio.Event())
    info = json.loads((run.path / "run.json").read_bytes())
    assert (info["state"], info["exit_reason"]) == ("finished", "ended after step 1 of 200, because …")
    assert json.loads((run.path / "summary.json").read_bytes())["stop_reason"] == info["exit_reason"]


def listed(run: RunDir) -> list[str]:
    """Returns the endpoints in the run's metrics/targets.json."""
    return [target for group in json.loads(run.targets_path.read_bytes()) for target in group["targets"]]


@pytest.mark.parametrize("end", ["done", "stopped", "stopped before the first step", "failed", "cancelled"])
@pytest.mark.asyncio
async def test_what_ended_in_order_is_listed_no_more_and_what_failed_still_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    stop, errors = asyncio.Event(), {"failed": StallError, "cancelled": asyncio.CancelledError}

    async def train(*_: object) -> RunTotals:
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

    with RunDir.create(config) as run:
        deployment = deployment_without_ray(run, config, monkeypatch, train=train, steps=[make_step(0)])
        with pytest.raises(errors[end]) if end in errors else contextlib.nullcontext():
            await deployment.run(stop)
        left = ["127.0.0.1:2", "127.0.0.1:1"] if end in errors else []
        assert listed(run) == left
        assert len(deployment._targets.current) == len(left), "the HTTP discovery has the same targets"


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.asyncio
async def test_a_run_that_ends_serves_until_who_discovers_over_http_has_the_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """The last request for the targets comes when everything else is closed. The run ends after the answer."""
    grace_s = 10 * DEADLINE_S
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path), "shutdown_grace_s": grace_s}})
    stop, closed = asyncio.Event(), asyncio.Event()
    servers: list[MetricsServer] = []

    def serve(*arguments: Any, **options: Any) -> MetricsServer:
        servers.append(MetricsServer(*arguments, **options))
        return servers[-1]

    async def ask() -> list[Any]:
        headers = {server_module.REFRESH_HEADER: "10"}
        question = urllib.request.Request(f"http://{servers[0].address}/sd", headers=headers)
        with await asyncio.to_thread(urllib.request.urlopen, question, timeout=DEADLINE_S) as answer:
            return list(json.loads(answer.read()))

    async def train(*_: object) -> RunTotals:
        async with asyncio.timeout(DEADLINE_S):
            while not await ask():
                pass
        if stopped:
            stop.set()
        return TOTALS

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(learner, "MetricsServer", serve)
    monkeypatch.setattr(server_module, "DISCOVERY_S", grace_s)
    with RunDir.create(config) as run:
        deployment = deployment_without_ray(
            run,
            config,
            monkeypatch,
            train=train,
            ended=lambda: loop.call_soon_threadsafe(closed.set),
            steps=[make_step(0)],
        )
        running = asyncio.create_task(deployment.run(stop))
        async with asyncio.timeout(DEADLINE_S):
            await closed.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            assert not running.done(), "the client still has the old list of targets"
            assert await ask() == []
            await running


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_run_that_was_asked_to_end_waits_within_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path), "shutdown_grace_s": LEAVE_S}})
    stop = asyncio.Event()

    async def train(*_: object) -> RunTotals:
        stop.set()
        return TOTALS

    async def never_told(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(MetricsServer, "told", never_told)
    with RunDir.create(config) as run:
        deployment = deployment_without_ray(run, config, monkeypatch, train=train)
        async with asyncio.timeout(DEADLINE_S):
            await deployment.run(stop)


@pytest.mark.parametrize(("save_s", "warns"), [(4.0, False), (30.0, True), (None, False)])
@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_grace_that_is_too_short_for_step_save_and_closing_is_named_when_the_run_is_asked_to_end(
    save_s: float | None, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path), "shutdown_grace_s": LEAVE_S + 5}})
    stop = asyncio.Event()

    async def train(*_: object) -> RunTotals:
        stop.set()
        await asyncio.sleep(0)
        return TOTALS

    with RunDir.create(config) as run:
        step = make_step(0, duration_s=1.0)
        deployment = deployment_without_ray(run, config, monkeypatch, train=train, steps=[step])
        monkeypatch.setattr(deployment, "_checkpoints", SimpleNamespace(expected_end_s=lambda: save_s, unsaved=None))
        async with asyncio.timeout(DEADLINE_S):
            await deployment.run(stop)
    said = "the run needs about 41 s to end: 1 s for its step, 30 s for its checkpoint and 10 s to close, but"
    assert (said in caplog.text) is warns
    assert ("run.shutdown_grace_s = 15 s" in caplog.text) is warns


@pytest.mark.asyncio
async def test_from_the_first_scrape_on_a_learner_shows_its_whole_life_and_the_limits_that_alerts_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate(
        {"run": {"name": "quick", "dir": str(tmp_path), "stall_timeout_s": 71.0}, "weights": {"load_timeout_s": 13.0}}
    )
    shown: dict[str, float] = {}

    async def run_of(*_: object, **__: object) -> Any:
        return SimpleNamespace(coordinator=None, deployment=None)

    def serve(registry: CollectorRegistry, **_: object) -> None:
        families = list(registry.collect())
        samples = [sample for family in families for sample in family.samples]
        shown.update({f"{sample.name}{''.join(sample.labels.values())}": sample.value for sample in samples})
        raise OSError("no port")

    monkeypatch.setattr(learner, "open_data_plane", nothing)
    monkeypatch.setattr(learner, "enter_run", run_of)
    monkeypatch.setattr(learner, "MetricsServer", serve)
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        deployment._prompts = asyncio.sleep(0, Prompts(train=(), heldout=()))
        before_s = time.monotonic()
        with pytest.raises(OSError, match="no port"):
            await deployment.run(asyncio.Event())
        after_s = time.monotonic()
    seconds = {state: shown[f"asyncrl_learner_state_seconds_total{state}"] for state in LEARNER_STATES}
    assert before_s <= seconds["starting"] == sum(seconds.values()) <= after_s, "this deployment has started_s = 0"
    assert shown["asyncrl_stall_timeout_seconds"] == shown["asyncrl_deadline_secondsrun.stall_timeout_s"] == 71.0
    assert shown["asyncrl_weight_sync_timeout_seconds"] == 13.0


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_targets_that_could_not_be_written_are_written_later_and_are_over_http_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    targets = [Target(role="buffer", replica="buffer", address="127.0.0.1:1")]
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        with monkeypatch.context() as full_disk:
            full_disk.setattr(targets_module, "write_targets", full_disk_error)
            deployment._targets.publish(targets)
        assert "is not up to date: no space" in caplog.text
        assert deployment._targets.current == targets
        assert not run.targets_path.exists()
        deployment._targets.publish(targets)
        assert json.loads(run.targets_path.read_bytes())[0]["targets"] == ["127.0.0.1:1"]
        deployment._targets.publish([])
        assert json.loads(run.targets_path.read_bytes()) == []


@pytest.mark.asyncio
async def test_prometheus_finds_the_runs_processes_and_rays_nodes_again_once_ray_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    node = {"NodeID": "0123456789", "Alive": True, "NodeManagerAddress": "127.0.0.1", "MetricsExportPort": 2}
    answers = iter([RunError("Ray does not list its nodes"), [node]])

    async def nodes(*, timeout_s: float) -> Any:
        answer = next(answers)
        if isinstance(answer, RunError):
            raise answer
        return answer

    endpoints = Endpoints()
    endpoints.set("learner", "127.0.0.1:1")

    async def changes(_: object, since: int) -> EndpointChanges:
        return endpoints.since(since)

    found = asyncio.Event()
    monkeypatch.setattr(targets_module, "TARGETS_EVERY_S", 0.0)
    monkeypatch.setattr(targets_module, "ray_nodes", nodes)
    monkeypatch.setattr(targets_module, "write_targets", lambda path, **arguments: found.set())
    with RunDir.create(config) as run:
        deployment = deployment_in(run, config)
        coordinator: Any = SimpleNamespace(call=changes)
        discovering = asyncio.create_task(deployment._targets.follow(coordinator, timeout_s=1.0))
        await asyncio.wait_for(found.wait(), DEADLINE_S)
        discovering.cancel()
    assert "targets are not up to date: Ray does not list its nodes" in caplog.text
    assert deployment._targets.current == [
        Target(role="learner", replica="learner", address="127.0.0.1:1"),
        Target(role="ray", replica="ray-01234567", address="127.0.0.1:2"),
    ]


def full_disk_error(_: object, **arguments: Any) -> None:
    raise OSError("no space")


@pytest.mark.asyncio
async def test_a_run_whose_prompts_all_failed_ends_with_the_first_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    failure = Failure(failure_class=FailureClass.DATA, reason="reward_raised", message="KeyError: 'KEY' (tasks.py:30)")

    failures = (FailureCount(rollouts=7, groups=7, first=failure),)

    async def nothing_left(*_: object) -> RunTotals:
        return TOTALS

    with RunDir.create(config) as run:
        deployment = deployment_without_ray(run, config, monkeypatch, train=nothing_left, failures=failures)
        with pytest.raises(
            RunError, match=r"rollouts failed \(reward_raised 7 rollouts\).*KeyError: 'KEY' \(tasks\.py:30\)"
        ):
            await deployment.run(asyncio.Event())
        assert "reward_raised" in run.failures_path.read_text()


@pytest.mark.asyncio
async def test_a_run_whose_prompts_ran_out_before_its_first_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})

    async def nothing_left(*_: object) -> RunTotals:
        return TOTALS

    with RunDir.create(config) as run:
        deployment = deployment_without_ray(run, config, monkeypatch, train=nothing_left)
        with pytest.raises(RunError, match=r"the prompts ran out before there were learner\.groups_per_step"):
            await deployment.run(asyncio.Event())
