"""Cleans up after a run whose process is gone: its processes, its shared memory, and a run.json with state "running".

Only processes of the run are ended. A process belongs to the run if its stdout or stderr is a file in the session
folder of the Ray that the run started. Each Ray has its own folder, and its daemons, its workers and their child
processes (vLLM's engine) write their output there. Environment variables cannot identify these processes, because Ray
and vLLM overwrite the environment of a process when they set its name. A file in /dev/shm belongs to the run if
run.json names it, or if a process of the run has mapped it.

A run directory may come from elsewhere, and then its run.json may name anything. It may be a copy of the directory of a
run that lives: no process holds the lock of the copy. So the session folder must be the user's and have a file with the
run's nonce and the id of the run's directory, which the run wrote there. The processes must be the user's, be younger
than the run, and run a program of Ray, vLLM or asyncrl, or be descendants of such a process. A file in /dev/shm must be
`removable`, be younger than the run, and not be mapped by another process of the user.
"""

import contextlib
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

import psutil

from asyncrl import run_files
from asyncrl.atomic_write import write_atomically
from asyncrl.deployment.known_runs import as_it_is
from asyncrl.deployment.run_dir import SESSION_MARK, directory_id, pretty, session_mark
from asyncrl.generation.shared_memory import SHARED_MEMORY, boot_id, removable, segments_of, sweep_shared_memory
from asyncrl.learner.record_lines import known_info
from asyncrl.learner.records import RunInfo
from asyncrl.views.quantities import moment
from asyncrl.views.report import write_report

logger = logging.getLogger(__name__)

EXIT_S = 10.0
CLOCK_S = 2.0
"""Tolerance of the comparison of start times: run.json has whole seconds, and a process's start time is rounded."""
TITLES = ("ray::", "ray-", "VLLM::")
"""Prefixes of the names that Ray and vLLM give their processes."""
_PROGRAMS = re.compile(r"/ray/|\b(ray|vllm|asyncrl|multiprocessing)\.\w")
"""A command of these packages: a program of Ray, a script in its folder, or a module after -m or -c."""
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

    Returns none if the run's process lives, or if the run is of another host, where it may live, of another boot, or of
    another directory, of which this one is a copy.
    """
    info = as_it_is(directory)
    if info is None or info.state == "running" or (info.host, info.boot) != (socket.gethostname(), boot_id()):
        return NOTHING
    if info.state != "died" and psutil.pid_exists(info.pid):  # the run has ended, but may still end its own processes
        return NOTHING
    if _is_copy(directory, info):
        return NOTHING
    processes = _processes_of(directory, info)
    return Remains(processes=processes, shared_memory=sorted(_files_of(info, processes)))


def clear(directory: Path) -> list[str]:
    """Ends the processes and removes the files of a run whose process is gone, and records its end in run.json and in
    the report.

    Returns a line for each action; none if there was nothing to do.
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
    """Describes this user's Ray daemons, and vLLM engines whose parent process is gone. They may belong to a run of
    another folder, or to another program.

    A description has the pids, the working directory, the start time, and the command of the parent process. Daemons of
    one parent have one description.
    """
    ray: dict[tuple[str, str], list[str]] = {}
    engines = []
    for process in _own_processes():
        with contextlib.suppress(psutil.Error):  # it has just ended
            name = process.name()
            if name in RAY_DAEMONS:
                ray.setdefault((process.cwd(), _starter(process)), []).append(_named(process))
            elif name.startswith(ENGINE) and process.ppid() == 1:
                engines.append(f"{_named(process)} in {process.cwd()}, {_starter(process)}")
    return [f"{', '.join(named)} in {folder}, {starter}" for (folder, starter), named in ray.items()], engines


def _starter(process: psutil.Process) -> str:
    """Returns the process that started `process`, and its start time. If it is gone, the start time of `process`."""
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
    """Returns the processes that may be ended as remains of a run: the module's docstring has the conditions."""
    folder = _session_of(directory, info)
    if folder is None:
        return []
    of_session = []
    for process in _own_processes():
        with contextlib.suppress(psutil.Error):  # it has just ended
            writes_there = any(output.startswith(f"{folder}/") for output in _outputs(process))
            if writes_there and process.pid != os.getpid() and process.create_time() > _start_s(info) - CLOCK_S:
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
    """Returns whether a process runs a program of Ray, vLLM or asyncrl."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return command.startswith(TITLES) or _PROGRAMS.search(command) is not None


def _files_of(info: RunInfo, processes: Sequence[psutil.Process]) -> set[str]:
    """Returns the names in /dev/shm that may be removed as remains of a run with these processes."""
    named = {name for name in info.shared_memory if (path := removable(name)) and _is_younger(path, info)}
    used: set[str] = set()
    for process in _own_processes() if named else ():
        with contextlib.suppress(psutil.Error, OSError):
            used |= set() if process in processes else set(segments_of([process]))
    mapped: set[str] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            mapped |= set(segments_of([process]))
    return {name for name in (named - used) | mapped if removable(name)}


def _is_younger(path: Path, info: RunInfo) -> bool:
    with contextlib.suppress(OSError):
        return path.lstat().st_ctime > _start_s(info) - CLOCK_S
    return False


def _start_s(info: RunInfo) -> float:
    """Returns the Unix time of the run's first start; infinity for a year that the system does not have."""
    with contextlib.suppress(ValueError, OverflowError):
        return datetime.fromisoformat(info.started).timestamp()
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
