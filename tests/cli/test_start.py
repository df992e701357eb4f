"""The report says how a run ended, for every kind of end."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import pytest
import typer
from made_up_run import make_step
from rich.console import Console

from asyncrl.checkpoints.directory import MANIFEST, RunManifest, folder_of, write
from asyncrl.cli import restarts, start
from asyncrl.cli.options import choice
from asyncrl.cli.start import join_admitted, reported_run, shown_run
from asyncrl.common.version import Lineage, Version
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config, RunSection
from asyncrl.data_plane import calls
from asyncrl.deployment import cluster, shared_actors
from asyncrl.deployment.resuming import no_checkpoint, unfinished_run
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import (
    PREEMPTED,
    ActorGone,
    AnotherRun,
    CheckpointDamaged,
    ClusterUnreachable,
    LearnerNotRestored,
    RunError,
    RunLocked,
)


def config_in(path: Path) -> Config:
    return Config.model_validate({"run": {"name": "quick", "dir": str(path)}})


def test_the_report_of_a_finished_run_says_so(tmp_path: Path) -> None:
    with reported_run(config_in(tmp_path), role="up") as run_dir:
        pass
    assert '<span class="badge finished">' in (run_dir.path / "report.html").read_text()


def test_the_report_of_a_failed_run_names_the_cause(tmp_path: Path) -> None:
    with pytest.raises(RunError), reported_run(config_in(tmp_path), role="up") as run_dir:
        raise RunError("the buffer is gone")
    page = (run_dir.path / "report.html").read_text()
    assert '<span class="badge failed">' in page
    assert "the buffer is gone" in page


@pytest.mark.fault("F35")
def test_a_run_that_is_refused_leaves_the_other_ones_report_alone(tmp_path: Path) -> None:
    with reported_run(config_in(tmp_path), role="up") as run_dir:
        with pytest.raises(RunLocked), reported_run(config_in(tmp_path), role="up"):
            pass
        assert not (run_dir.path / "report.html").exists()


def test_a_report_that_cannot_be_made_hides_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(path: Path) -> Path:
        raise OverflowError("a number too large")

    monkeypatch.setattr(start, "write_report", broken)
    with pytest.raises(RunError, match="the run's own"), reported_run(config_in(tmp_path), role="up") as run_dir:
        raise RunError("the run's own")
    assert "was not written" in caplog.text
    assert "OverflowError: a number too large" in caplog.text
    log = run_dir.log_path("up", 0).read_text()
    assert re.search(r"was not written\nTraceback .*in broken\n.*OverflowError: a number too large", log, re.DOTALL), (
        log
    )
    assert re.search(r"ended by an error\nTraceback .*RunError: the run's own", log, re.DOTALL), log


@pytest.mark.fault("F29")
@pytest.mark.parametrize("stop_when", [False, True])
@pytest.mark.parametrize(
    ("by", "most_s"),
    [("SIGTERM", start.LEAST_AT_END_S), ("SIGINT", 30.0), (None, 30.0)],
    ids=["SIGTERM", "Ctrl-C", "-"],
)
def test_the_mirror_of_a_run_that_sigterm_ended_gets_no_second_grace_however_the_run_ends(
    by: str | None, most_s: float, stop_when: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s: list[float] = []

    class Mirror:
        def __init__(self, *_: object, **__: object) -> None: ...

        def start(self) -> None: ...

        def finish(self, *, within_s: float) -> None:
            waited_s.append(within_s)

    monkeypatch.setattr(start, "Mirror", Mirror)
    config = Config.model_validate(
        {
            "run": {
                "name": "quick",
                "dir": str(tmp_path),
                "mirror": f"file://{tmp_path}/mirror",
                "shutdown_grace_s": 30.0,
            }
        }
    )
    with reported_run(config, role="up") as run_dir:
        if by is not None:
            run_dir.asked_to_end(by, from_outside=by == "SIGTERM")
            run_dir.asked_s -= 29.0
            run_dir.stopped()
        if stop_when:
            run_dir.finished("ended after step 6 of 60, because …")
    assert waited_s == [most_s]


@pytest.mark.parametrize(
    ("asked", "code", "no_other"),
    [({"restarts": True}, restarts.RESTART_MENDS, 0), ({}, 1, 1), ({"from_outside": True}, PREEMPTED, 1)],
)
def test_a_run_that_was_asked_to_restart_is_started_again_and_another_that_was_asked_to_end_is_not(
    asked: dict[str, bool], code: int, no_other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(restarts, "starts_no_other", lambda: kept.append(1))

    async def run(config: Config, stop: asyncio.Event, *, run_dir: RunDir, **_: object) -> None:
        run_dir.asked_to_end("a test", **asked)
        run_dir.stopped()

    monkeypatch.setattr(start, "run_both", run)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(typer.Exit) as ended:
            start.run_in_terminal(config_in(tmp_path), None, command="up", address=None, again=["up"])
        assert (ended.value.exit_code, len(kept)) == (code, no_other)
        killed: list[tuple[int, int]] = []
        monkeypatch.setattr(restarts.os, "kill", lambda pid, number: killed.append((pid, number)))
        on_sigterm = signal.getsignal(signal.SIGTERM)
        assert callable(on_sigterm)
        on_sigterm(signal.SIGTERM, None)  # now that the run has ended
        assert (killed, len(kept)) == ([(os.getpid(), signal.SIGTERM)], no_other + 1)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("asked", "no_other"), [({"restarts": True}, 0), ({}, 1)])
def test_a_run_that_fails_after_it_was_asked_to_restart_may_be_started_again(
    asked: dict[str, bool], no_other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(restarts, "starts_no_other", lambda: kept.append(1))

    async def run(config: Config, stop: asyncio.Event, *, run_dir: RunDir, **_: object) -> None:
        run_dir.asked_to_end("a test", **asked)
        raise ActorGone("rank 0 has died")

    monkeypatch.setattr(start, "run_both", run)
    with pytest.raises(ActorGone):
        start.run_in_terminal(config_in(tmp_path), None, command="up", address=None, again=["up"])
    assert len(kept) == no_other


def test_the_log_has_the_reason_why_run_json_lacks_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunDir, **_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(RunDir, "close", full)
    with pytest.raises(RunError), reported_run(config_in(tmp_path), role="up") as run_dir:
        raise RunError("the run's own")
    assert "run.json was not updated with the end of the run: no space left" in run_dir.log_path("up", 0).read_text()


@pytest.mark.fault("F6")
@pytest.mark.parametrize("run_lives", [False, True])
@pytest.mark.parametrize("ended", ["stopped", "finished", "stopped, and damaged since"])
def test_a_directory_is_not_moved_aside_while_its_run_lives(
    ended: str, run_lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path)
    with RunDir.create(config) as run:
        run.append_step(make_step(0))
        settings = dict(shared_config(config))
        manifest = RunManifest(
            nonce=run.nonce, version=Version(1, 1), lineage=Lineage(), settings=settings, packages={}
        )
        checkpoint = folder_of(run.checkpoints, 1)
        write(checkpoint, manifest, fill=lambda _: None)
        if ended.endswith("damaged since"):
            (checkpoint / MANIFEST).write_bytes(b"x" * (checkpoint / MANIFEST).stat().st_size)
        if ended != "finished":
            run.stopped()

    async def check(_: Config, *, restores: str | None = None, **__: object) -> None:
        assert restores in (None, run.nonce)
        if restores is None and run_lives:
            raise LearnerNotRestored("run 'quick' has trained 1 steps; end the run")

    monkeypatch.setattr(cluster, "join", lambda *_, **__: None)
    monkeypatch.setattr(shared_actors, "check_admission", check)
    choose = join_admitted("auto", config, choose=unfinished_run)
    refusals = {"stopped, and damaged since": CheckpointDamaged, "finished": LearnerNotRestored if run_lives else None}
    if (refusal := refusals.get(ended)) is not None:
        with pytest.raises(refusal):
            RunDir.create(config, choose=choose)
        assert [path.name for path in tmp_path.iterdir()] == ["quick"]
        return
    with RunDir.create(config, choose=choose) as again:
        assert (again.resumed is None) == (again.previous is not None) == (ended == "finished")


@pytest.mark.parametrize("begun", [False, True])
def test_only_a_command_that_was_started_again_waits_for_the_head_of_its_cluster(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def join(address: str, **_: object) -> None:
        asked.append(address)
        if len(asked) < 3:
            raise ClusterUnreachable("no Ray cluster answers")

    async def admitted(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(restarts, "begun_before", lambda: begun)
    monkeypatch.setattr(cluster, "join", join)
    monkeypatch.setattr(calls.time, "sleep", lambda _: None)
    monkeypatch.setattr(shared_actors, "check_admission", admitted)
    if begun:
        assert join_admitted("h:1", config_in(tmp_path), choose=unfinished_run) is unfinished_run
        assert asked == ["h:1"] * 3
        return
    with pytest.raises(RunError, match="no Ray cluster answers") as refused:
        join_admitted("h:1", config_in(tmp_path), choose=unfinished_run)
    assert not refused.value.restart_mends
    assert asked == ["h:1"]


def test_a_head_that_does_not_come_back_is_an_error_that_a_restart_may_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise ClusterUnreachable("no Ray cluster answers")

    monkeypatch.setattr(restarts, "begun_before", lambda: True)
    monkeypatch.setattr(cluster, "join", gone)
    monkeypatch.setattr(calls.time, "sleep", lambda _: None)
    config = config_in(tmp_path).model_copy(update={"run": RunSection(dir=tmp_path, stall_timeout_s=1e-9)})
    with pytest.raises(ClusterUnreachable) as refused:
        join_admitted("h:1", config, choose=unfinished_run)
    assert refused.value.restart_mends


@pytest.mark.fault("F6")
@pytest.mark.parametrize("lost_weights", ["refuse", "new_run"])
@pytest.mark.parametrize("directory", ["its own", "of another run", "none"])
def test_a_run_without_weights_is_ended_only_with_the_key_and_only_by_a_learner_of_its_directory(
    directory: str, lost_weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path), "lost_weights": lost_weights}})
    nonce = "n0"
    if directory != "none":
        with RunDir.create(config) as run:
            run.append_step(make_step(0))
            run.stopped()
        nonce = run.nonce if directory == "its own" else nonce
    ended: list[str] = []

    async def check(_: Config, **__: object) -> None:
        if not ended:
            raise LearnerNotRestored("run 'quick' has trained 1 steps; end the run")

    def end(path: Path, wanted: str) -> None:
        if wanted != nonce:
            raise AnotherRun("another nonce")
        ended.append(path.name)

    monkeypatch.setattr(cluster, "join", lambda *_, **__: None)
    monkeypatch.setattr(shared_actors, "check_admission", check)
    monkeypatch.setattr(shared_actors, "end_lost_run", end)
    if (directory, lost_weights) != ("its own", "new_run"):
        with pytest.raises(AnotherRun if (directory, lost_weights) == ("of another run", "new_run") else RunError):
            join_admitted("auto", config, choose=unfinished_run)
        assert ended == []
        return
    choose = join_admitted("auto", config, choose=unfinished_run)
    assert ended == ["quick"]
    with RunDir.create(config, choose=choose) as again:
        assert again.resumed is None, "the run has no checkpoint"
        assert again.previous is not None


def test_a_restart_means_at_and_fresh_again_until_the_run_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_begun", bytearray(1))
    monkeypatch.setattr(restarts, "_started_s", (time.monotonic(),))
    with RunDir.create(config_in(tmp_path)):
        with pytest.raises(RunLocked), reported_run(config_in(tmp_path), role="up"):
            pass
        assert choice(fresh=True) is no_checkpoint
    with reported_run(config_in(tmp_path), role="up"):
        assert choice(fresh=True) is unfinished_run
    monkeypatch.setattr(restarts, "_started_s", ())
    assert choice(fresh=True) is no_checkpoint, "a new command"


def test_a_start_from_a_checkpoint_prints_how_the_learning_rate_jumps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = config_in(tmp_path)
    with RunDir.create(before) as run:
        run.append_step(make_step(0))
        settings = dict(shared_config(before))
        manifest = RunManifest(
            nonce=run.nonce, version=Version(1, 9), lineage=Lineage(), settings=settings, packages={}
        )
        write(folder_of(run.checkpoints, 9), manifest, fill=lambda _: None)
        run.stopped()
    now = before.model_copy(update={"learner": before.learner.model_copy(update={"total_steps": 400})})
    showing = shown_run(now, role="up", console=Console(quiet=True), started_s=0.0, choose=unfinished_run)
    with showing as (run_dir, _):
        assert run_dir.resumed is not None
    assert "at step 10, because learner.total_steps was 200 and is 400" in " ".join(capsys.readouterr().err.split())
