"""The log files of a run's processes, in the folder `logs` of the run's directory.

    up-0.log  learner-0.log                    the command with the learner (`asyncrl.deployment.launch.log_to`)
    generator-HOST-PID.log                     a command `asyncrl generator`
    replica-NAME.log  replica-NAME.2.log       a replica, and its second process after it was started again
    gateway-NAME.log                           the gateway of a replica, with the name of the replica's process
    learner-rank-0.1.log  critic-rank-0.1.log  rank 0 of the model, in incarnation 1 of the run
    coordinator.log                            the coordinator, which holds the replay buffer
    reward-HOST.log                            the lines that reward code prints in the replicas of a machine

Only the learner makes the folder. Another process writes its file if the folder exists on its machine, because it runs
on the learner's machine or `run.dir` is on a shared mount. Each line opens the file anew, so that lines go to the
folder of the present run when the directory of an earlier run is moved aside.
"""

import contextlib
import fcntl
import logging
import os
import queue
import threading
from pathlib import Path
from typing import BinaryIO

from asyncrl.run_files import opened_to_append
from asyncrl.shown_text import LogForm, log_formatter

logger = logging.getLogger(__name__)

LOG_BYTES = 64 * 2**20
"""Size at which a log continues in a new file, bytes."""
LOG_FILES = 4
"""Number of earlier files of a log that are kept."""
WAITING_LINES = 10_000
"""Largest number of lines of a process that wait to be written. Further lines are only on stderr."""
LAST_LINES_S = 2.0
"""Longest wait for the last lines at the end of a process, seconds."""


def logs_folder(directory: Path) -> Path:
    """Returns the absolute path of the folder for the logs of the run in `directory`. It is absolute because Ray's
    actors have another working directory than the command."""
    return (directory / "logs").absolute()


def append_line(path: Path, line: bytes) -> None:
    """Appends a line to a log in a folder of a run's directory. Other processes of this machine may append to it too;
    on a mount, lines of several machines would overwrite each other. Follows no link in place of the folder.

    A log that has reached `LOG_BYTES` is renamed to `.1`, an older one to `.2`, and so on. `LOG_FILES` renamed ones are
    kept. Raises FileNotFoundError if the folder of the log does not exist, and another OSError if the line cannot be
    written.
    """
    while True:
        with opened_to_append(
            path, inside=path.parent.parent, buffering=0
        ) as file:  # one write, so lines of two processes do not mix
            if not _renamed_if_full(path, file):
                file.write(line)
                return


def make_room(path: Path) -> None:
    """Renames a log if it is full, as `append_line` does; creates it if there is none. Call it before the start of a
    process whose standard output is this log. Raises OSError if the log cannot be opened or renamed."""
    with opened_to_append(path, buffering=0) as file:
        _renamed_if_full(path, file)


def _renamed_if_full(path: Path, file: BinaryIO) -> bool:
    """Renames the log `path`, which is open as `file`, if it has reached `LOG_BYTES`. Returns True if `file` is not the
    file at `path` any more: it was renamed, now or before. A full file stays, and the return value is False, if another
    process renames it at this moment, or if the file system has no locks."""
    if os.fstat(file.fileno()).st_size < LOG_BYTES:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    with contextlib.suppress(FileNotFoundError):  # another process has renamed it, and no line was written since
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            older = [path.with_name(f"{path.name}.{number}") for number in range(1, LOG_FILES + 1)]
            for newer, old in zip(reversed([path, *older[:-1]]), reversed(older), strict=True):
                if newer.exists():
                    newer.replace(old)
    return True


class LogFile(logging.Handler):
    """Also writes all log records of this process to `path`, from now on until `close`, while its folder exists.

    A thread writes the lines, because a mount that does not answer would block the event loop, and with it the
    heartbeats of the process.
    """

    def __init__(self, path: Path, *, form: LogForm) -> None:
        super().__init__()
        self._path = path
        # the garbage collector may log while a line is put: the lock of `queue.Queue` would wait for its own thread
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._written, self._failing = False, False
        self.setFormatter(log_formatter(form))
        self._thread = threading.Thread(target=self._write_all, name="log file", daemon=True)
        self._thread.start()
        logging.getLogger().addHandler(self)
        if output := _file_of_stderr():
            logger.info("the output of libraries and of child processes of this process is in %s only", output)

    @property
    def path(self) -> str:
        """The file with the log of this process on its machine: the constructor's `path`, once lines were written to
        it. Before that, or if its folder does not exist, the file of stderr, which is in the folder of Ray's session
        for an actor; empty if stderr is not a file."""
        return str(self._path) if self._written else _file_of_stderr()

    def __enter__(self) -> "LogFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):  # only in this file: the command itself prints the error on stderr
            ended = (type(error), error, error.__traceback__)
            self.emit(logging.LogRecord(__name__, logging.ERROR, __file__, 0, "ended by an error", (), ended))
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # arguments that do not fit the text: the caller must not get this error
            self.handleError(record)
            return
        if self._lines.qsize() < WAITING_LINES:
            self._lines.put(line)

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        self._lines.put(None)
        self._thread.join(LAST_LINES_S)
        super().close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                append_line(self._path, f"{line}\n".encode(errors="backslashreplace"))
            except FileNotFoundError:
                self._written = False
            except OSError as error:
                if not self._failing:  # the warning comes to this handler too, and must not cause another warning
                    self._failing = True
                    logger.warning("cannot write %s (%s): its lines are only on stderr", self._path, error)
            else:
                self._written, self._failing = True, False


def _file_of_stderr() -> str:
    """Returns the path of the file to which stderr of this process goes; empty if stderr is not a file, or closed."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""
