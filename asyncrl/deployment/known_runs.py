"""Reads run directories: which runs live on this machine, which have ended and how, and which have died.

A run has died if its run.json has the state "running" but its process is gone, so that the end was not recorded. The
process holds the directory's `lock` while it lives. So another process that got the same pid, and does not hold the
lock, is not mistaken for the run. For a run on another host, only the contents of run.json are known.
"""

import contextlib
import difflib
import fcntl
import logging
import math
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from asyncrl import run_files
from asyncrl.atomic_write import write_atomically
from asyncrl.checkpoints.directory import CHECKPOINTS, HF, complete_steps, folder_of, folders
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.deployment.local_clusters import own_clusters
from asyncrl.deployment.run_dir import SESSION_MARK, directory_id, pretty, session_mark
from asyncrl.errors import AsyncRLError, ClusterElsewhere, RunError
from asyncrl.generation.shared_memory import SHARED_MEMORY, boot_id, removable, segments_of, sweep_shared_memory
from asyncrl.learner.records import EvalRecord, RunInfo, StepRecord, best_first, known_info, read_config, read_lines
from asyncrl.run_files import opened
from asyncrl.views.quantities import moment
from asyncrl.views.report import write_report

logger = logging.getLogger(__name__)

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
    """Returns the address of the Ray cluster at `address`, which the directory names, in the form that this machine's
    node of the cluster uses. Returns `auto` as it is.

    Raises ClusterElsewhere unless this machine is a node of the cluster, and the node is this user's: a run directory
    may come from elsewhere, and a command that joins a cluster sends it the user's token. The host is looked up once,
    here, so a name cannot mean another machine when the command connects. `option` is the option with which the command
    joins the cluster anyway; default: --address.
    """
    host, _, port = address.rpartition(":")
    here = {cluster.address for cluster in own_clusters() if cluster.address.rpartition(":")[2] == port}
    if address == "auto" or address in here:
        return address
    with contextlib.suppress(OSError, UnicodeError):  # the host has no address
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


def trained_runs(folder: Path) -> list[Path]:
    """Returns the directories in `folder` of the runs that have trained a step, in the order in which they began. A
    sweep begins its runs in the order of its settings."""
    found = [path.parent for path in folder.glob("*/steps.jsonl") if path.stat().st_size]
    infos = {run: known_info(run) for run in found}
    return sorted(found, key=lambda run: ("" if (info := infos[run]) is None else info.started, run.name))


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
    # Indented, because a line of the reason, which may come from elsewhere, could look like a line of the command.
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
    """Returns run.json of the run; None if there is no run. The state "running" is replaced by `died` if the run's
    process on this host is gone."""
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
    best = best_of(directory, complete_steps(checkpoints), name=name)
    return None if best is None else (folder_of(checkpoints, best.step), best)


def best_of(directory: Path, steps: Sequence[int], *, name: str) -> EvalRecord | None:
    """Returns the evaluation after one of `steps` with the highest reward on the held-out set `name`, of the run in
    `directory`; None if there is none."""
    best = best_first(read_lines(directory / "evals.jsonl", EvalRecord), steps, name=name)
    return best[0] if best else None


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
    with contextlib.suppress(OSError), opened(directory / "lock") as lock:  # an OSError: the run holds it
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def process_of(directory: Path) -> psutil.Process | None:
    """Returns the process of the run that lives on this machine, to which signals can be sent; None if there is none.

    It is the process that run.json names, if that process holds the directory's `lock`: a run directory may come from
    elsewhere, with the pid of any process.
    """
    info = known_info(directory)
    if info is None or _lives(directory, info) is not True:
        return None
    with contextlib.suppress(OSError, psutil.Error):
        inode = (directory / "lock").lstat().st_ino
        # A line has: number, FLOCK, ADVISORY, WRITE, pid, major:minor:inode, and the locked bytes.
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        if [str(info.pid), str(inode)] not in [[lock[4], lock[5].rpartition(":")[2]] for lock in locks]:
            return None
        return psutil.Process(info.pid)
    return None


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
    """Returns the time (ISO 8601) at which the run last wrote to run.json, steps.jsonl or a log; its start if they
    cannot be read."""
    logs, written = directory / "logs", [directory / "run.json", directory / "steps.jsonl"]
    with contextlib.suppress(OSError):  # links are not followed: the directory may come from elsewhere
        written += [logs / name for name in run_files.names(logs, inside=directory)]
    with contextlib.suppress(OSError):
        newest_s = max(path.lstat().st_mtime for path in written if path.exists())
        return datetime.fromtimestamp(newest_s, UTC).isoformat(timespec="seconds")
    return info.started


# Cleans up after a run whose process is gone: its processes, its shared memory, and a run.json with state "running".
#
# Only processes of the run are ended. A process belongs to the run if its stdout or stderr is a file in the session
# folder of the Ray that the run started. Each Ray has its own folder, and its daemons, its workers and their child
# processes (vLLM's engine) write their output there. Environment variables cannot identify these processes, because Ray
# and vLLM overwrite the environment of a process when they set its name. A file in /dev/shm belongs to the run if
# run.json names it, or if a process of the run has mapped it.
#
# A run directory may come from elsewhere, and then its run.json may name anything. It may be a copy of the directory of
# a run that lives: no process holds the lock of the copy. So the session folder must be the user's and have a file with
# the run's nonce and the id of the run's directory, which the run wrote there. The processes must be the user's, be
# younger than the run or than its Ray, which an earlier run of a sweep may have started, and run a program of Ray, vLLM
# or asyncrl, or be descendants of such a process. A file in /dev/shm must be `removable`. If only run.json names it, it
# must also be as young as a process must be, and not be mapped by another process of the user.

EXIT_S = 10.0
CLOCK_S = 2.0
"""Tolerance of the comparison of start times: run.json has whole seconds, and a process's start time is rounded."""
TITLES = ("ray::", "ray-", "VLLM::")
"""Prefixes of the names that Ray and vLLM give their processes."""
_PROGRAMS = re.compile(r"/ray/|\b(ray|vllm|asyncrl|multiprocessing)\.\w")
"""A command of these packages: a program in a folder `ray`, or a module of one of the packages, as after -m or -c."""
RAY_DAEMONS = ("raylet", "gcs_server")
ENGINE = "VLLM::"
"""Prefix of the names that vLLM gives its processes."""
COMMAND_CHARACTERS = 160
"""Longest command of a process that is shown."""


@dataclass(frozen=True, kw_only=True)
class Remains:
    """Processes and files that a run left on this machine. `shared_memory` has names of files in /dev/shm."""

    processes: list[psutil.Process]
    shared_memory: list[str]

    def __bool__(self) -> bool:
        return bool(self.processes or self.shared_memory)

    def __str__(self) -> str:
        named = []
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                named.append(_named(process))
        return ", ".join(named + [str(SHARED_MEMORY / name) for name in self.shared_memory])


NOTHING = Remains(processes=[], shared_memory=[])


def remains_of(directory: Path) -> Remains:
    """Returns the processes and files that the run in `directory` left on this machine.

    Returns none if the run's process may live: it lives on this host, or the run is of another host. Returns none, too,
    if the run is of an earlier boot of this machine, or if `directory` is a copy of the run's directory.
    """
    info = as_it_is(directory)
    if info is None or info.state == "running" or (info.host, info.boot) != (socket.gethostname(), boot_id()):
        return NOTHING
    if info.state != "died" and psutil.pid_exists(info.pid):  # the run has ended, but may still end its own processes
        return NOTHING
    if _is_copy(directory, info):
        return NOTHING
    processes = _processes_of(directory, info)
    return Remains(processes=processes, shared_memory=sorted(_files_of(directory, info, processes)))


def living_processes(directory: Path) -> list[psutil.Process]:
    """Returns the processes of a run that lives on this machine: its command, and all processes of the Ray that the
    command started. Returns an empty list if the command is gone or on another host."""
    info = known_info(directory)
    if info is None or not _lives(directory, info):
        return []
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):  # the command has just ended
        command = psutil.Process(info.pid)
        found = [command, *command.children(recursive=True)]
    return list(dict.fromkeys([*found, *_processes_of(directory, info)]))


def clear(directory: Path) -> list[str]:
    """Ends the processes and removes the files of a run whose process is gone, and records its end in run.json and in
    the report.

    Returns a line for each action; none if there was nothing to do, or if a process holds the directory.
    """
    with _held(directory) as held:
        if not held:
            return []
        lines, info = [], as_it_is(directory)
        if remains := remains_of(directory):
            lines.append(f"ended and removed: {remains}")
            for process in remains.processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(remains.processes, timeout=EXIT_S)
            sweep_shared_memory(remains.shared_memory)
        if info is not None and info != known_info(directory):
            lines.insert(0, f"run {directory.name} {info.exit_reason}")
            if info.boot is None and boot_id() is not None:
                lines.append(
                    "run.json does not say in which boot of the machine the run started, so no process was ended and "
                    "no file was removed; `asyncrl doctor` lists processes that were left"
                )
            elif _is_copy(directory, info):
                lines.append(
                    f"{directory} is a copy of the directory of the run, which may live, so no process was ended and "
                    "no file was removed; run `asyncrl down` for the directory in which the run started"
                )
            try:
                write_atomically(directory / "run.json", pretty(info))
                write_report(directory)
            except Exception as error:  # an unreadable record must not prevent the cleanup
                logger.warning("%s does not record how the run ended: %s", directory, error)
        return lines


def _is_copy(directory: Path, info: RunInfo) -> bool:
    """Returns whether the run started in another directory. Its process may hold the lock there."""
    return info.directory is not None and info.directory != directory_id(directory)


def stray_processes() -> tuple[list[str], list[str]]:
    """Returns two lists of descriptions: of this user's Ray daemons, and of this user's vLLM engines whose parent
    process has ended. These processes may belong to a run of another folder, or to another program.

    A description has the pids, the working directory, the start time, and the command of the parent process if it still
    runs. Daemons of one parent have one description.
    """
    ray: dict[tuple[str, str], list[str]] = {}
    engines = []
    for process in _own_processes():
        with contextlib.suppress(psutil.Error):  # the process has just ended
            name = process.name()
            if name in RAY_DAEMONS:
                ray.setdefault((process.cwd(), _starter(process)), []).append(_named(process))
            elif name.startswith(ENGINE) and process.ppid() == 1:
                engines.append(f"{_named(process)} in {process.cwd()}, {_starter(process)}")
    return [f"{', '.join(named)} in {folder}, {starter}" for (folder, starter), named in ray.items()], engines


def _starter(process: psutil.Process) -> str:
    """Returns in words which process started `process`, and since when that parent runs. If the parent is gone, says
    when `process` was started."""
    parent = process.parent()
    if parent is None or parent.pid == 1:
        return f"started {_start_of(process)} by a process that is gone"
    command = " ".join(parent.cmdline()) or parent.name()
    shown = command if len(command) <= COMMAND_CHARACTERS else f"{command[:COMMAND_CHARACTERS]} …"
    return f"started by `{shown}` (pid {parent.pid}, since {_start_of(parent)})"


def _start_of(process: psutil.Process) -> str:
    return moment(datetime.fromtimestamp(process.create_time(), UTC).isoformat())


def _named(process: psutil.Process) -> str:
    return f"{process.name()} (pid {process.pid})"


def _processes_of(directory: Path, info: RunInfo) -> list[psutil.Process]:
    """Returns the processes that may be ended as remains of a run. They are this user's, write their output into the
    session folder of the run's Ray, and are younger than the run or than this Ray. They run a program of Ray, vLLM,
    asyncrl or multiprocessing, or are descendants of such a process."""
    folder = _session_of(directory, info)
    if folder is None:
        return []
    of_session, start_s = [], _start_s(directory, info)
    for process in _own_processes():
        with contextlib.suppress(psutil.Error):  # the process has just ended
            writes_there = any(output.startswith(f"{folder}/") for output in _outputs(process))
            if writes_there and process.pid != os.getpid() and process.create_time() > start_s - CLOCK_S:
                of_session.append(process)
    own = set(filter(_is_of_a_run, of_session))
    for process in list(own):
        with contextlib.suppress(psutil.Error):
            own.update(process.children(recursive=True))
    return [process for process in of_session if process in own]


def _session_of(directory: Path, info: RunInfo) -> str | None:
    """Returns the real path of the session folder of the Ray that the run started; None if run.json names no folder of
    this user with the mark of the run."""
    if info.ray_session is None or not os.path.isabs(info.ray_session):
        return None
    try:
        if os.lstat(info.ray_session).st_uid != os.getuid():
            return None
        mark = os.open(Path(info.ray_session) / SESSION_MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(mark, "rb") as file:
            of_user = os.fstat(mark).st_uid == os.getuid()
            mine = session_mark(info.nonce, directory)
            marked = of_user and file.read(len(mine) + 1) == mine
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    return os.path.realpath(info.ray_session) if marked and info.nonce else None


def _is_of_a_run(process: psutil.Process) -> bool:
    """Returns whether the name or the command of a process is one of Ray, vLLM, asyncrl or Python's multiprocessing,
    which starts some processes of a run. Other programs may use multiprocessing too."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return command.startswith(TITLES) or _PROGRAMS.search(command) is not None


def _files_of(directory: Path, info: RunInfo, processes: Sequence[psutil.Process]) -> set[str]:
    """Returns the names of the files in /dev/shm that may be removed as remains of a run: files that run.json names and
    that no other process of this user maps, and files that the run's `processes` map."""
    start_s = _start_s(directory, info)
    named = {name for name in info.shared_memory if (path := removable(name)) and _is_younger(path, start_s)}
    used: set[str] = set()
    for process in _own_processes() if named else ():
        with contextlib.suppress(psutil.Error, OSError):
            used |= set() if process in processes else set(segments_of([process]))
    mapped: set[str] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            mapped |= set(segments_of([process]))
    return {name for name in (named - used) | mapped if removable(name)}


def _is_younger(path: Path, start_s: float) -> bool:
    with contextlib.suppress(OSError):
        return path.lstat().st_ctime > start_s - CLOCK_S
    return False


def _start_s(directory: Path, info: RunInfo) -> float:
    """Returns the Unix time of the run's first start, or of the start of its Ray if that is earlier. Returns infinity
    for a year that the system does not have."""
    with contextlib.suppress(ValueError, OverflowError):
        start_s = datetime.fromisoformat(info.started).timestamp()
        if info.ray_since is not None and _session_of(directory, info) is not None:
            start_s = min(start_s, datetime.fromisoformat(info.ray_since).timestamp())
        return start_s
    return math.inf


def _own_processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["uids"]):
        if process.info["uids"] is not None and process.info["uids"].real == os.getuid():
            yield process


def _outputs(process: psutil.Process) -> list[str]:
    """Returns the paths of the process's stdout and stderr."""
    found = []
    for number in (1, 2):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{process.pid}/fd/{number}"))
    return found


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[bool]:
    """Holds the lock of the run's directory, so that no run can start there within the block.

    Yields False if a process holds the lock, or if there is no lock.
    """
    with contextlib.ExitStack() as opened:
        try:
            lock = opened.enter_context(run_files.opened(directory / "lock"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held = False
        else:
            held = True
        yield held
