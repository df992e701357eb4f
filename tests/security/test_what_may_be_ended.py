"""`down`, `clear` and a start end processes of the run only, whatever run.json names."""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from run_from_elsewhere import WAITS, gone_pid, rewrite, run_of, waiting

from asyncrl.deployment.known_runs import clear, remains_of
from asyncrl.deployment.run_dir import SESSION_MARK, directory_id, session_mark
from asyncrl.learner.records import known_info

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORKER = [sys.executable, "-c", WAITS, "ray.worker"]
"""A process with an argument as one of Ray."""


@pytest.fixture
def session(tmp_path: Path) -> Path:
    folder = tmp_path / "ray" / "session_1"
    (folder / "logs").mkdir(parents=True)
    return folder


@pytest.fixture
def run(tmp_path: Path, session: Path) -> Path:
    """A killed run, whose mark is in its session folder."""
    path = run_of(tmp_path, ray_session=str(session))
    info = known_info(path)
    assert info is not None
    (session / SESSION_MARK).write_bytes(session_mark(info.nonce, path))
    return path


@pytest.fixture
def worker(session: Path, run: Path) -> Iterator[psutil.Popen]:
    with (session / "logs" / "worker.err").open("wb") as stderr:
        yield from waiting(WORKER, stderr=stderr)


def pids(run: Path) -> list[int]:
    return [process.pid for process in remains_of(run).processes]


def test_a_worker_of_the_runs_session_is_ended(run: Path, worker: psutil.Popen) -> None:
    assert pids(run) == [worker.pid]
    clear(run)
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize(
    "named",
    ["/", "//", "", ".", "..", "/tmp", "/dev", "/proc/self/cwd/..", "pipe:", "session\0", "{session}/..",
     "{session}/logs", "{session}/../..", "{link}", "{relative}", "{other}"],
)  # fmt: skip
def test_a_folder_without_the_mark_of_the_run_is_no_session(
    named: str, run: Path, session: Path, worker: psutil.Popen, tmp_path: Path
) -> None:
    other = tmp_path / "ray" / "session_2"
    other.mkdir()
    (other / SESSION_MARK).write_text("0" * 16)
    (tmp_path / "link").symlink_to(tmp_path / "ray")
    given = {"session": session, "link": tmp_path / "link", "relative": session.relative_to(tmp_path), "other": other}
    rewrite(run, ray_session=named.format(**given))
    assert pids(run) == []
    assert worker.poll() is None


@pytest.mark.parametrize("kind", ["missing", "empty", "longer", "shorter", "symlink", "fifo", "folder"])
def test_a_session_folder_needs_the_nonce_of_the_run_in_a_file(
    kind: str, run: Path, session: Path, worker: psutil.Popen, tmp_path: Path
) -> None:
    mark = session / SESSION_MARK
    nonce = mark.read_text()
    mark.unlink()
    match kind:
        case "empty":
            mark.touch()
            rewrite(run, nonce="")
        case "longer":
            mark.write_text(f"{nonce}0")
        case "shorter":
            mark.write_text(nonce[:-1])
        case "symlink":
            (tmp_path / "elsewhere").write_text(nonce)
            mark.symlink_to(tmp_path / "elsewhere")
        case "fifo":
            os.mkfifo(mark)
        case "folder":
            mark.mkdir()
    assert pids(run) == []
    assert worker.poll() is None


COPIES = ("a copy", "a copy of its fields", "a copy that names a gone process", "a copy that claims the id")


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_the_directory_of_a_run_that_lives_has_none_of_its_processes(
    kind: str, run: Path, session: Path, worker: psutil.Popen, tmp_path: Path
) -> None:
    rewrite(run, pid=os.getpid())
    copy = tmp_path / "copies" / run.name
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kind == "a copy of its fields":
            copy.mkdir(parents=True)
            for name in ("run.json", "config.yaml"):
                shutil.copy(run / name, copy)
            (copy / "lock").touch()
        else:
            shutil.copytree(run, copy)
        if kind == "a copy that names a gone process":
            rewrite(copy, pid=gone_pid())
        if kind == "a copy that claims the id":
            rewrite(copy, pid=gone_pid(), directory=directory_id(copy))
        assert pids(copy) == []
        lines = clear(copy)
    assert worker.poll() is None
    assert any("is a copy of the directory" in line for line in lines) is (kind == COPIES[2])


def test_a_renamed_directory_is_still_that_of_the_run(run: Path, worker: psutil.Popen) -> None:
    run = run.rename(run.with_name("renamed"))
    assert pids(run) == [worker.pid]


@pytest.mark.parametrize("owner", ["session", "mark"])
def test_a_session_of_another_user_is_none(
    owner: str, run: Path, session: Path, worker: psutil.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid():
        pytest.skip("only root can give a file to another user")
    os.chown(session if owner == "session" else session / SESSION_MARK, 65534, 65534)
    assert pids(run) == []
    assert worker.poll() is None


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "-c", "echo; read x"],
        [sys.executable, "-c", WAITS],
        [sys.executable, "-c", WAITS, "my_ray_worker", "rays.txt"],
        ["tail", "-f", "/dev/null", "/etc/hostname"],
    ],
    ids=["shell", "python", "other-names", "tail"],
)
def test_an_unrelated_program_that_writes_to_the_session_is_left_alone(
    command: list[str], run: Path, session: Path
) -> None:
    with (session / "logs" / "other.err").open("wb") as stderr:
        for process in waiting(command, stderr=stderr, stdin=-1):
            assert pids(run) == []
            assert process.poll() is None


@pytest.mark.parametrize("started", ["later", "", "not a time", "9999-12-31T23:59:59", "0001-01-01"])
def test_a_process_that_is_older_than_the_run_is_left_alone(started: str, run: Path, worker: psutil.Popen) -> None:
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat(timespec="seconds")
    rewrite(run, started=later if started == "later" else started)
    assert pids(run) == []
    assert worker.poll() is None


@pytest.mark.parametrize(("marked", "ended"), [(True, 1), (False, 0)])
def test_a_process_may_be_older_than_the_run_if_the_ray_of_its_session_is_too(
    marked: bool, ended: int, run: Path, session: Path, worker: psutil.Popen
) -> None:
    """A later run of a sweep uses the Ray of the run before. Only the mark shows that the session is the run's."""
    later, earlier = (datetime.now(UTC) + timedelta(hours=hours) for hours in (1, -1))
    rewrite(run, started=later.isoformat(timespec="seconds"), ray_since=earlier.isoformat(timespec="seconds"))
    if not marked:
        (session / SESSION_MARK).unlink()
    assert len(pids(run)) == ended
    clear(run)
    assert psutil.pid_exists(worker.pid) is not bool(ended)


def test_child_processes_of_a_worker_are_ended_with_it(run: Path, session: Path) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '10000'], stdout=2); " + WAITS
    with (session / "logs" / "worker.err").open("wb") as stderr:
        for worker in waiting([sys.executable, "-c", code, "ray.worker"], stderr=stderr):
            [child] = worker.children()
            assert sorted(pids(run)) == sorted([worker.pid, child.pid])


@pytest.mark.parametrize("changed", [{"host": "another.host"}, {"boot": "of-another-boot"}, {"boot": None}])
def test_a_run_of_another_machine_or_boot_has_no_processes_here(
    changed: dict[str, str | None], run: Path, worker: psutil.Popen
) -> None:
    rewrite(run, **({"state": "failed"} | changed))
    assert pids(run) == []
    assert clear(run) == []
    assert worker.poll() is None


def test_down_says_why_it_ends_nothing_of_a_run_without_a_boot(run: Path, worker: psutil.Popen) -> None:
    rewrite(run, boot=None)
    died, why = clear(run)
    assert "died without recording a reason" in died
    assert why.startswith("run.json does not say in which boot of the machine the run started, so no process was ended")
    info = known_info(run)
    assert info is not None
    assert info.state == "died"
    assert worker.poll() is None
    assert clear(run) == []
