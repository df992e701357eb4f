"""What run directories below the current directory say of runs: which live on this host, and how one has ended."""

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from asyncrl.learner.records import RunInfo
from asyncrl.views.quantities import moment

RUNS = Path("runs")
"""Where `run.dir` is unless a config says otherwise."""


def live_runs(folder: Path = RUNS) -> list[RunInfo]:
    """Runs that say that they are running, and whose process on this host is there."""
    return [info for path in sorted(folder.glob("*/run.json")) for info in _read(path) if _lives(info)]


def address_of(name: str, folder: Path = RUNS) -> str | None:
    """The Ray address of the run of this name that lives on this host; None when none does, or it is not known yet."""
    return next((info.ray_address for info in _read(folder / name / "run.json") if _lives(info)), None)


def named_run(run: Path, folder: Path = RUNS) -> Path:
    """The run's directory: `run` when it is one, else the one of that name in `folder`."""
    return run if run.exists() else folder / run


def ended_run(name: str, folder: Path = RUNS) -> str | None:
    """Where the report of a run that lives no more is, and how it ended; None when there is none here, or the run may
    live: it writes a report while it goes on as well, and of another host's processes nothing is known."""
    path = folder / name
    if not (path / "report.html").exists():
        return None
    for info in _read(path / "run.json"):
        if info.finished is not None:
            return f"run {name} {info.state} {moment(info.finished)} ({info.exit_reason}): see {path / 'report.html'}"
        if info.host == socket.gethostname() and not psutil.pid_exists(info.pid):
            return f"an earlier run is recorded: see {path / 'report.html'}"
    return None


def _read(path: Path) -> Iterator[RunInfo]:
    """None or one: a directory of another version, or one that goes away while it is read, is not ours to judge."""
    try:
        yield msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except (OSError, msgspec.MsgspecError):
        return


def _lives(info: RunInfo) -> bool:
    return info.state == "running" and info.host == socket.gethostname() and psutil.pid_exists(info.pid)
