"""The run directory `runs/<name>/`: who runs here, with what, and what it wrote down.

    config.yaml          resolved, under comments with the versions of the packages and the git revision
    run.json  lock       who runs here; a second run is refused (F35)
    logs/<role>-<n>.log  one file a process
    logs/reward.log      what reward code prints, on the learner's machine
    metrics/             targets.json for Prometheus
    samples/step-N.jsonl whole groups of each step
    steps.jsonl  evals.jsonl  failures.json  summary.json  report.html

Only the learner writes here, while it holds `lock` by flock, and replicas on its machine to `logs/reward.log`. The
kernel releases the lock when the process dies, so that a dead holder needs no clean-up. An earlier run of the same name
is moved aside to `<name>.1`, `<name>.2`, …, never overwritten. If a start failed before it recorded anything, there is
only its log to keep, and the next run goes on in its directory. A log that cannot be written (F27) is reported and does
not end training.
"""

import fcntl
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

import msgspec

from asyncrl.atomic_write import write_atomically
from asyncrl.buffer.records import FailureCount
from asyncrl.config.load import dump_config
from asyncrl.config.schema import Config
from asyncrl.deployment.provenance import provenance
from asyncrl.errors import ConfigError, RunLocked
from asyncrl.learner.records import EvalRecord, RunInfo, SampleRecord, StepRecord, Summary

logger = logging.getLogger(__name__)

State = Literal["finished", "stopped", "failed"]
"""How a run ends that says so itself."""

OF_EVERY_START = {"config.yaml", "run.json", "lock", "logs", "metrics", "samples", "failures.json", "report.html"}
"""What a directory holds before its run has recorded anything."""


class RunDir:
    """The directory of the run that this process is, from `create` to `close`."""

    def __init__(self, path: Path, *, taken: "_Taken", info: RunInfo) -> None:
        self.path = path
        self.previous = taken.previous
        """Where the directory of the last run of this name went, if there was one."""
        self._lock = taken.lock
        self._info = info
        self._failing: set[Path] = set()
        self._end: tuple[State, str] = ("finished", "done")
        self.steps_written = 0

    @classmethod
    def create(cls, config: Config) -> "RunDir":
        """Take the directory of `config.run` for this process.

        Raises RunLocked when another process holds it, ConfigError when it cannot be made.
        """
        path = config.run.dir / config.run.name
        info = RunInfo(
            name=config.run.name,
            state="running",
            pid=os.getpid(),
            host=socket.gethostname(),
            started=_now(),
            nonce=secrets.token_hex(8),
        )
        try:
            run = cls(path, taken=_take(path, info), info=info)
            try:
                run._lay_out(config)
            except OSError:
                run._lock.close()
                raise
        except OSError as error:
            raise ConfigError(
                f"run.dir: cannot write the run's directory {path} ({error.strerror}); name a folder that is writable",
                key="run.dir",
            ) from error
        return run

    @property
    def info(self) -> RunInfo:
        return self._info

    @property
    def nonce(self) -> str:
        return self._info.nonce

    @property
    def closed(self) -> bool:
        """Whether run.json says how the run ended."""
        return self._lock.closed

    @property
    def targets_path(self) -> Path:
        return self.path / "metrics" / "targets.json"

    @property
    def failures_path(self) -> Path:
        return self.path / "failures.json"

    @staticmethod
    def reward_log(config: Config) -> Path:
        """Where replicas write what reward code prints; absolute, for they work in another folder than the command."""
        return (config.run.dir / config.run.name / "logs" / "reward.log").absolute()

    def log_path(self, role: str, number: int) -> Path:
        """Where process `number` of a role logs."""
        return self.path / "logs" / f"{role}-{number}.log"

    def started_ray(self, address: str, *, session: str | None = None) -> None:
        """Say in run.json where the run's Ray cluster is, and the folder of one that the run has started itself."""
        self._info = msgspec.structs.replace(self._info, ray_address=address, ray_session=session)
        self._write_info()

    def uses_shared_memory(self, names: Sequence[str]) -> None:
        """Say in run.json which files of /dev/shm an engine of the run uses: a killed engine leaves them there."""
        if self._lock.closed:
            return
        self._info = msgspec.structs.replace(self._info, shared_memory=sorted({*self._info.shared_memory, *names}))
        try:
            self._write_info()
        except OSError as error:
            logger.error("run.json does not name the run's files in /dev/shm: %s", error)

    def stopped(self, reason: str) -> None:
        """The run was asked to end before its last step: what `__exit__` writes unless there is an error."""
        self._end = ("stopped", reason)

    def asked_to_end(self) -> None:
        """Say so in run.json while the run closes: whatever kills it on the way, this is why it ended."""
        if self._lock.closed:
            return
        self._info = msgspec.structs.replace(self._info, exit_reason="asked to end by a signal")
        try:
            self._write_info()
        except OSError as error:
            logger.error("run.json does not say that the run was asked to end: %s", error)

    def append_step(self, record: StepRecord) -> None:
        self.steps_written += 1
        self._append(self.path / "steps.jsonl", [record])

    def append_eval(self, record: EvalRecord) -> None:
        self._append(self.path / "evals.jsonl", [record])

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """`samples/step-N.jsonl`; nothing when there are none."""
        if samples:
            self._append(self.path / "samples" / f"step-{step}.jsonl", samples)

    def write_failures(self, failures: Sequence[FailureCount]) -> None:
        """`failures.json`: failed rollouts by class and reason, with the first failure of each."""
        try:
            write_atomically(self.failures_path, _pretty(failures))
        except OSError as error:
            logger.error("cannot write %s: %s", self.failures_path, error)

    def write_summary(self, summary: Summary) -> None:
        write_atomically(self.path / "summary.json", _pretty(summary))

    def close(self, *, state: State, reason: str) -> None:
        """Say how the run ended and let go of the lock. A second call changes nothing."""
        if self._lock.closed:
            return
        self._info = msgspec.structs.replace(self._info, state=state, finished=_now(), exit_reason=reason)
        try:
            self._write_info()
        finally:
            self._lock.close()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            state, reason = self._end
            self.close(state=state, reason=reason)
            return
        try:
            if isinstance(error, KeyboardInterrupt):  # before `run_until_done` takes signals
                self.close(state="stopped", reason="asked to end by a signal, before the first step")
            self.close(state="failed", reason=f"{type(error).__name__}: {error}")
        except OSError as unwritten:
            logger.error("run.json does not say how the run ended: %s", unwritten)

    def _lay_out(self, config: Config) -> None:
        """run.json comes last: it is what makes the directory a run that a later one must not overwrite."""
        for folder in ("logs", "metrics", "samples"):
            (self.path / folder).mkdir(exist_ok=True)
        # these are of a start that failed, and not of this one
        for left in (self.path / "report.html", self.failures_path, self.targets_path):
            left.unlink(missing_ok=True)
        comments = "".join(f"# {key}: {value}\n" for key, value in provenance().items())
        write_atomically(self.path / "config.yaml", (comments + dump_config(config)).encode())
        self._write_info()

    def _write_info(self) -> None:
        write_atomically(self.path / "run.json", _pretty(self._info))

    def _append(self, path: Path, records: Sequence[msgspec.Struct]) -> None:
        """All of `records` or none: a torn line would swallow the next one. Reported once until it works again."""
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        try:
            with path.open("ab", buffering=0) as file:
                size = file.tell()
                try:
                    if file.write(lines) != len(lines):
                        raise OSError("only a part was written: the disk is full")
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            if path.parent not in self._failing:
                self._failing.add(path.parent)
                logger.error("cannot write %s (%s): records are lost until it can be written again", path, error)
        else:
            self._failing.discard(path.parent)


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """The lock on a run's directory, and where an ended run's was moved."""

    lock: BinaryIO
    previous: Path | None


def _take(path: Path, info: RunInfo) -> _Taken:
    """Lock `path`, moving the directory of an ended run with records aside first. RunLocked when its run is alive."""
    previous: Path | None = None
    while True:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().decode(errors="replace").strip() or "a process that has not said who it is yet"
            lock.close()
            raise RunLocked(
                f"run.name: {path} is held by {holder}; wait for it, end it, or choose another run.name"
            ) from None
        # Between open and flock the directory may have been moved aside by another process: our lock is then on the
        # moved one, and worth nothing.
        try:
            current = os.path.samestat(os.fstat(lock.fileno()), (path / "lock").stat())
        except FileNotFoundError:
            current = False
        if not current:
            lock.close()
        elif (path / "run.json").exists() and _has_records(path):
            previous = path.rename(_free_name(path))
            lock.close()
        else:
            lock.truncate(0)
            lock.write(f"pid {info.pid} on {info.host} since {info.started}\n".encode())
            lock.flush()
            return _Taken(lock=lock, previous=previous)


def _has_records(path: Path) -> bool:
    return any(entry.name not in OF_EVERY_START for entry in path.iterdir()) or any((path / "samples").glob("*"))


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


def _pretty(record: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
