"""The processes and files that a killed run left are found and removed, and nothing else is touched."""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from made_up_run import make_step
from typer.testing import CliRunner
from written_runs import write_run

from asyncrl.cli.main import app
from asyncrl.cli.options import clear_previous
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.deployment.known_runs import COMMAND_CHARACTERS, clear, remains_of, stray_processes
from asyncrl.deployment.run_dir import SESSION_MARK, session_mark
from asyncrl.learner.records import known_info

pytestmark = pytest.mark.slow

WAITS = [sys.executable, "-c", "print(flush=True); import time; time.sleep(10_000)", "ray.worker"]
"""Command of a process that sleeps. It writes a line when it has started. Its last argument is of a Ray process."""


class Killed:
    """A run that was killed, and the folder of its Ray."""

    def __init__(self, folder: Path, **changed: object) -> None:
        self.session = folder / "ray" / "session_1"
        (self.session / "logs").mkdir(parents=True)
        self.path = write_run(folder / "runs", [make_step(0)], finish=False, end=None, name="killed")
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait(60)
        self.write(pid=gone.pid, ray_session=str(self.session))
        info = known_info(self.path)
        assert info is not None
        (self.session / SESSION_MARK).write_bytes(session_mark(info.nonce, self.path))
        self.write(**changed)
        self.said = f"run killed died without recording a reason (process {gone.pid} is gone) after step 1 of "

    def write(self, **changed: object) -> None:
        info = known_info(self.path)
        assert info is not None
        (self.path / "run.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(info, **changed)))


@pytest.fixture
def killed(tmp_path: Path) -> Killed:
    return Killed(tmp_path)


@pytest.fixture
def engine(killed: Killed) -> Iterator[psutil.Popen]:
    """A process whose stderr is a file of the run's Ray. Its stdout is a pipe."""
    with (killed.session / "logs" / "worker.err").open("wb") as stderr:
        yield from waiting(stderr=stderr)


@pytest.fixture
def bystander(tmp_path: Path) -> Iterator[psutil.Popen]:
    """A process of another run. The session folder of its Ray has a name with the same beginning."""
    other = tmp_path / "ray" / "session_10"
    other.mkdir(parents=True)
    with (other / "worker.err").open("wb") as stderr:
        yield from waiting(stderr=stderr)


def waiting(**streams: Any) -> Iterator[psutil.Popen]:
    process = psutil.Popen(WAITS, stdout=subprocess.PIPE, **streams)
    process.stdout.readline()
    yield process
    if psutil.pid_exists(process.pid):
        process.kill()
        process.wait(60)
    process.stdout.close()


@pytest.fixture
def segment() -> Iterator[str]:
    memory = SharedMemory(create=True, size=16)
    memory.close()  # a file that a process has mapped is not removed
    yield memory.name
    with contextlib.suppress(FileNotFoundError):  # the test removed it
        memory.unlink()


def test_processes_of_the_runs_ray_are_found_ended_and_named_and_others_are_left_alone(
    killed: Killed, engine: psutil.Popen, bystander: psutil.Popen
) -> None:
    remains = remains_of(killed.path)
    assert [process.pid for process in remains.processes] == [engine.pid]
    first, second = clear(killed.path)
    assert first.startswith(killed.said)
    assert second.startswith("ended and removed: ")
    assert second.endswith(f"(pid {engine.pid})")
    assert not psutil.pid_exists(engine.pid)
    assert bystander.poll() is None
    assert not remains_of(killed.path)
    assert clear(killed.path) == []


def test_the_next_run_of_another_name_says_what_a_killed_one_left(
    killed: Killed, engine: psutil.Popen, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Config.model_validate({"run": {"dir": str(killed.path.parent), "name": "other"}})
    clear_previous(other)
    said = capsys.readouterr().err
    assert f"run {killed.path.name} was killed and left" in said
    assert f"(pid {engine.pid}); `asyncrl down {killed.path}` ends that" in said
    assert engine.poll() is None


def test_its_end_is_written_down(killed: Killed) -> None:
    [line] = clear(killed.path)
    assert line.startswith(killed.said)
    info = known_info(killed.path)
    assert info is not None
    assert info.state == "died"
    assert line == f"run killed {info.exit_reason}"
    assert '<span class="badge died">died</span>' in (killed.path / "report.html").read_text()


def test_files_in_dev_shm_that_run_json_names_are_removed(killed: Killed, segment: str) -> None:
    killed.write(shared_memory=[segment, "psm_00000000"])
    assert str(remains_of(killed.path)) == f"/dev/shm/{segment}"
    assert clear(killed.path)[1:] == [f"ended and removed: /dev/shm/{segment}"]
    assert not Path("/dev/shm", segment).exists()


def test_nothing_of_a_run_that_may_live_is_touched(killed: Killed, engine: psutil.Popen) -> None:
    with (killed.path / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert clear(killed.path) == [], "a process holds the lock of the directory"
    for state in ("running", "failed"):
        killed.write(host="another.host", state=state)
        assert not remains_of(killed.path)
        assert clear(killed.path) == []
    killed.write(host=socket.gethostname(), state="failed", pid=os.getpid())
    assert not remains_of(killed.path), "the run may still be ending its own processes"
    assert clear(killed.path) == []
    assert engine.poll() is None


def test_a_run_without_a_ray_of_its_own_has_no_processes_that_could_be_told_from_others(
    killed: Killed, engine: psutil.Popen
) -> None:
    killed.write(ray_session=None)
    assert not remains_of(killed.path)
    assert engine.poll() is None


@pytest.fixture
def no_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable names a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.usefixtures("no_ray_address")
def test_status_names_what_is_left_and_down_ends_it(killed: Killed, engine: psutil.Popen) -> None:
    answer = CliRunner().invoke(app, ["status", str(killed.path)])
    assert answer.exit_code == 0
    dead, left, *_ = answer.stdout.splitlines()
    assert dead.startswith(killed.said)
    assert f"(pid {engine.pid}); run `asyncrl down {killed.path}` to end and remove these" in left
    answer = CliRunner().invoke(app, ["down", str(killed.path)])
    assert answer.exit_code == 0, answer.stderr
    dead, ended = answer.stdout.splitlines()
    assert dead.startswith(killed.said)
    assert f"(pid {engine.pid})" in ended
    assert not psutil.pid_exists(engine.pid)
    assert (
        CliRunner().invoke(app, ["down", str(killed.path)]).stdout
        == "run killed had no processes and no files to remove\n"
    )


def test_the_next_run_of_the_name_ends_what_is_left_and_says_so(
    killed: Killed, engine: psutil.Popen, capsys: pytest.CaptureFixture[str]
) -> None:
    clear_previous(load_config([killed.path / "config.yaml"], []))
    dead, ended = capsys.readouterr().err.splitlines()
    assert dead.startswith(f"note: {killed.said}")
    assert f"(pid {engine.pid})" in ended
    assert not psutil.pid_exists(engine.pid)


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[dict[str, psutil.Popen]]:
    """Processes with the names of Ray's daemons and of an engine, in `tmp_path`. This process is their parent."""
    with contextlib.ExitStack() as ending:
        found = {}
        for name in ("gcs_server", "raylet", "VLLM::Engine"):
            (tmp_path / name).symlink_to(sys.executable)
            command = [str(tmp_path / name), "-I", *WAITS[1:]]
            process = psutil.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path)
            ending.callback(process.wait, 60)
            ending.callback(process.kill)
            ending.enter_context(process.stdout)
            process.stdout.readline()
            found[name] = process
        yield found


def test_the_ray_of_another_program_is_described_by_folder_time_and_command(
    strangers: dict[str, psutil.Popen], tmp_path: Path
) -> None:
    [ray] = [each for each in stray_processes()[0] if str(tmp_path) in each]
    daemons = sorted((process.pid, name) for name, process in strangers.items() if name != "VLLM::Engine")
    named = ", ".join(f"{name} (pid {pid})" for pid, name in daemons)
    assert ray.startswith(f"{named} in {tmp_path}, started by `")
    assert f" by `{' '.join(psutil.Process().cmdline())[:COMMAND_CHARACTERS]}" in ray
    started = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
    assert ray.endswith(f"` (pid {os.getpid()}, since {started:%Y-%m-%d %H:%M} UTC)")


def test_an_engine_is_astray_only_if_its_parent_is_gone(
    strangers: dict[str, psutil.Popen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(str(tmp_path) in each for each in stray_processes()[1])

    def parent_of_orphans(_: psutil.Process) -> int:
        return 1

    parent_of_orphans.cache_activate = parent_of_orphans.cache_deactivate = lambda _: None  # type: ignore[attr-defined]
    monkeypatch.setattr(psutil.Process, "ppid", parent_of_orphans)
    [engine] = [each for each in stray_processes()[1] if str(tmp_path) in each]
    assert engine.startswith(f"VLLM::Engine (pid {strangers['VLLM::Engine'].pid}) in {tmp_path}, started ")
    assert engine.endswith(" by a process that is gone")
