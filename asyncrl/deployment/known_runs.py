"""Reads run directories: which runs live on this machine, which have ended and how, and which have died.

A run has died if its run.json has the state "running" but its process is gone, so that the end was not recorded. The
process holds the directory's `lock` while it lives. So another process that got the same pid is not mistaken for the
run. For a run on another host, only the contents of run.json are known.
"""

import contextlib
import difflib
import fcntl
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from asyncrl import run_files
from asyncrl.checkpoints.directory import CHECKPOINTS, HF, complete_steps, folder_of, folders
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.deployment.local_clusters import own_clusters
from asyncrl.errors import AsyncRLError, ClusterElsewhere, RunError
from asyncrl.learner.best_checkpoints import best_first
from asyncrl.learner.record_lines import known_info, read_config, read_lines
from asyncrl.learner.records import EvalRecord, RunInfo, StepRecord
from asyncrl.run_files import opened
from asyncrl.views.quantities import moment

RUNS = Path("runs")
"""Default of `run.dir`."""
_NAMES_SHOWN = 12


def live_runs(folder: Path = RUNS) -> list[RunInfo]:
    """Returns the runs whose run.json has the state "running", and whose process on this host lives."""
    return [info for directory, info in _runs(folder) if _lives(directory, info)]


def dead_runs(folder: Path = RUNS) -> list[Path]:
    """Returns the directories of runs whose run.json has the state "running", and whose process on this host is
    gone."""
    return [directory for directory, info in _runs(folder) if _lives(directory, info) is False]


def address_of(directory: Path) -> str | None:
    """Returns the Ray address of a run that lives on this host.

    None if the run does not live here, or if it has not recorded its address yet. Raises the error of `own_address`.
    """
    info = known_info(directory)
    if info is None or info.ray_address is None or not _lives(directory, info):
        return None
    return own_address(directory, info.ray_address)


def own_address(directory: Path, address: str, *, option: str = "") -> str:
    """Returns the address, as this machine's node has it, of the Ray cluster at `address`, which the directory names.

    Raises ClusterElsewhere unless this machine is a node of the cluster, and the node is this user's: a run directory
    may come from elsewhere, and a command that joins a cluster sends it the user's token. The host is looked up once,
    here, so a name cannot mean another machine when the command connects. `option` is the option with which the command
    joins the cluster anyway; default: --address.
    """
    host, _, port = address.rpartition(":")
    here = {cluster.address for cluster in own_clusters() if cluster.address.rpartition(":")[2] == port}
    if address == "auto" or address in here:
        return address
    with contextlib.suppress(OSError, UnicodeError):  # it is not a host
        names = {f"{found[4][0]}:{port}" for found in socket.getaddrinfo(host, None, socket.AF_INET)} if here else set()
        if same := names & here:
            return min(same)
    raise ClusterElsewhere(
        f"{directory} names the Ray cluster at {address}, but this machine is not a node of it, so your token is not "
        f"sent there; if it is the cluster of the run, pass {option or f'--address {address}'}"
    )


def named_run(run: Path, folder: Path = RUNS) -> Path:
    """Returns the directory of a run: `run` if it is a run's directory or has several parts, else `folder`/`run`."""
    return run if (run / "run.json").exists() or len(run.parts) > 1 else folder / run


def check_there(directory: Path) -> None:
    """Raises RunError with the names of the existing runs, if `directory` does not exist."""
    if directory.is_dir():
        return
    folder = directory.parent
    names = sorted(path.parent.name for path in folder.glob("*/run.json"))
    close = difflib.get_close_matches(directory.name, names, n=1)
    shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" if names[_NAMES_SHOWN:] else "")
    there_are = f"did you mean {close[0]}? Existing runs: {shown}" if close else f"existing runs: {shown or 'none'}"
    elsewhere = f". If run.dir is another folder, give the path: FOLDER/{directory.name}" if folder == RUNS else ""
    raise RunError(f"there is no run {directory.name} in {folder}/; {there_are}{elsewhere}")


def existing_run(run: Path) -> Path:
    """Returns the directory of a run, as `named_run` does. Raises the error of `check_there`."""
    directory = named_run(run)
    check_there(directory)
    return directory


def ended_run(directory: Path) -> str | None:
    """Returns how the run in `directory` ended or died, and where its report or its weights are.

    None if there is no run, or if the run may still live.
    """
    info = as_it_is(directory)
    if info is None or info.finished is None:
        return None
    # Indented, because a line of a received reason could look like a line of the command.
    reason = "\n  ".join((info.exit_reason or "no reason").splitlines())
    if info.state == "died":
        weights = newest_weights(directory)
        saved = f"newest weights: {weights}" if weights is not None else "no weights were saved"
        return f"run {directory.name} {reason}; {saved}"
    report = directory / "report.html"
    see = f": see {report}" if report.exists() else ""
    return f"run {directory.name} {info.state} {moment(info.finished)} ({reason}){see}"


def may_have_died(directory: Path) -> bool:
    """Returns whether run.json of the run has the state "running", but its process is gone or on another host."""
    info = known_info(directory)
    return info is not None and info.state == "running" and _lives(directory, info) is not True


def has_checkpoint(config: Config) -> bool:
    """Returns whether the directory of the run has a complete checkpoint. Its contents are not checked."""
    return bool(complete_steps(config.run.dir / config.run.name / CHECKPOINTS))


def as_it_is(directory: Path) -> RunInfo | None:
    """Returns run.json of the run, with the state `died` if its process is gone; None if there is no run."""
    info = known_info(directory)
    if info is None or _lives(directory, info) is not False:
        return info
    return msgspec.structs.replace(
        info,
        state="died",
        finished=_last_sign_of_life(directory, info),
        exit_reason=f"died without recording a reason (process {info.pid} is gone) {_trained(directory)}",
    )


def newest_weights(directory: Path) -> Path | None:
    """Returns the folder with the newest complete weights of the run, of a checkpoint or of a save after a failure;
    None if there is none."""
    weights = {step: path / HF for step, path in folders(directory / CHECKPOINTS).items()}
    saved = [step for step, path in weights.items() if (path / COMPLETE).exists()]
    return weights[max(saved)] if saved else None


def best_checkpoint(directory: Path, *, name: str = HELDOUT) -> tuple[Path, EvalRecord] | None:
    """Returns the complete checkpoint of the run with the highest reward on the held-out set `name`, and its
    evaluation; None if no checkpoint has one."""
    checkpoints = directory / CHECKPOINTS
    evals = read_lines(directory / "evals.jsonl", EvalRecord)
    best = best_first(evals, complete_steps(checkpoints), name=name)
    return (folder_of(checkpoints, best[0].step), best[0]) if best else None


def _runs(folder: Path) -> Iterator[tuple[Path, RunInfo]]:
    for path in sorted(folder.glob("*/run.json")):
        if (info := known_info(path.parent)) is not None:
            yield path.parent, info


def _lives(directory: Path, info: RunInfo) -> bool | None:
    """Returns whether the run's process lives. None if run.json records how the run ended, or if it is of another host.

    If `lock` is free, a process with the run's pid is another process.
    """
    if info.state != "running" or info.host != socket.gethostname():
        return None
    if not psutil.pid_exists(info.pid):
        return False
    with contextlib.suppress(OSError), opened(directory / "lock") as lock:  # fails if the run holds the lock
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def _trained(directory: Path) -> str:
    """Returns after which step the run ended, as far as its records can be read."""
    try:
        steps = [record.version_after for record in read_lines(directory / "steps.jsonl", StepRecord)]
    except (OSError, AsyncRLError):
        return "after an unknown number of steps"
    if not steps:
        return "before the first step"
    try:
        return f"after step {steps[-1]} of {read_config(directory).learner.total_steps}"
    except (OSError, AsyncRLError):
        return f"after step {steps[-1]}"


def _last_sign_of_life(directory: Path, info: RunInfo) -> str:
    """Returns the time (ISO 8601) at which the run last wrote to its directory."""
    logs, written = directory / "logs", [directory / "run.json", directory / "steps.jsonl"]
    with contextlib.suppress(OSError):  # links are not followed: the directory may come from elsewhere
        written += [logs / name for name in run_files.names(logs, inside=directory)]
    with contextlib.suppress(OSError):
        newest_s = max(path.lstat().st_mtime for path in written if path.exists())
        return datetime.fromtimestamp(newest_s, UTC).isoformat(timespec="seconds")
    return info.started
