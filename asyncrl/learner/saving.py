"""When the run's checkpoints are saved: every `checkpoint.every_steps` steps, every `checkpoint.every_minutes` minutes,
and at the end of the run.

Training waits while the state is copied in memory. The copies are written while the next steps run. Only one save runs
at a time: a checkpoint that is due meanwhile is postponed until the running save has ended.

Three kinds of checkpoints are not deleted: the newest `checkpoint.keep`, those of steps that are multiples of
`checkpoint.keep_every`, and the `checkpoint.keep_best` best ones. When a checkpoint cannot be written, training goes on
and the previous checkpoint stays. When the checkpoint at the end of the run cannot be written, the run first writes its
other records and then fails.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import msgspec
from safetensors.torch import load, save

from asyncrl.atomic_write import write_atomically
from asyncrl.buffer.records import Lease
from asyncrl.checkpoints.directory import HF, folder_of, kept_steps
from asyncrl.checkpoints.run import RunParts
from asyncrl.common.version import Version
from asyncrl.complete_directory import COMPLETE, discard, unfinished
from asyncrl.config.schema import CheckpointSection
from asyncrl.coordinator.status import RunSnapshot
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import GENERATED_FIELDS
from asyncrl.errors import AsyncRLError, CheckpointError
from asyncrl.learner.audit_records import AUDIT
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.run_files import FILE_BYTES, names, read

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")


@dataclass
class Checkpoints:
    """Saves checkpoints of `run` below `folder` and deletes old ones. It calls the methods of `run` in a thread,
    because they block.

    `sync_records` returns when the records of all steps, evaluations and the audit are on the disk. It raises
    CheckpointError if they cannot be written. It is called before each save, because the report and the audit need the
    records of all steps up to a checkpoint. `restored_step` is the step of the checkpoint from which the run was
    resumed. `best` gets the steps of all complete checkpoints, and returns the steps of the best ones, which are not
    deleted.
    """

    config: CheckpointSection
    _: KW_ONLY
    folder: Path
    run: RunParts
    sync_records: Callable[[], None]
    metrics: LearnerMetrics
    restored_step: int = 0
    best: Callable[[Sequence[int]], Collection[int]] = lambda steps: ()
    clock: Callable[[], float] = time.monotonic
    saves_ended: int = field(default=0, init=False)
    """Number of saves that have succeeded or failed."""
    unsaved: CheckpointError | None = field(default=None, init=False)
    """The error that prevented the save of the final weights; None when there was no such error."""

    def __post_init__(self) -> None:
        self.saved = self.restored_step
        """The step of the newest checkpoint. Step 0 needs no checkpoint, so a new run begins with 0."""
        self._saved_hf = True  # whether the newest checkpoint has `hf/`
        self._begun, self._begun_s = self.saved, self.clock()  # the step and the time at which the last save began
        self._postponed = False
        self._running: asyncio.Task[None] | None = None
        self._last_save_s: float | None = None

    async def check(self) -> None:
        """Raises CheckpointError if checkpoints cannot be written. Called before the first step, so that the run does
        not train steps that it cannot save."""
        await asyncio.to_thread(self.run.check_folder, self.folder)

    def due(self, step: int) -> bool:
        """Returns whether a save must begin at `step` trained steps.

        If a checkpoint is due while another save runs, logs that it is postponed. It is then due as soon as that save
        has ended.
        """
        if step == self._begun:
            return False
        steps, minutes = self.config.every_steps, self.config.every_minutes
        by_steps = steps > 0 and step % steps == 0
        by_time = minutes > 0 and self.clock() - self._begun_s >= 60 * minutes
        if not (by_steps or by_time or self._postponed):
            return False
        if self._running is None or self._running.done():
            return True
        if not self._postponed:
            self._postponed = True
            self.metrics.checkpoint_missed(outcome="postponed")
            logger.warning(
                "the checkpoint of step %d is postponed, because that of step %d is still being written after %.0f s. "
                "Training goes on. If this happens often, raise checkpoint.every_steps or use a faster disk",
                step,
                self._begun,
                self.clock() - self._begun_s,
            )
        return False

    async def begin(self, snapshot: RunSnapshot, *, last_step: bool) -> None:
        """Copies the state of the run at `snapshot`, and starts a task that writes it. Training must wait until this
        call returns. With `last_step`, the save also has the weights in Hugging Face format (`hf/`).

        Logs a CheckpointError of the copy, and any error of the write: the next checkpoint may succeed. Raises other
        errors of the copy.
        """
        await self._begin(snapshot, hf=self.config.hf or last_step, at_end=False)

    def expected_end_s(self) -> float | None:
        """Returns the seconds that the saves at the end of the run need if each takes as long as the last one; None
        before the first save of this process. The end waits for a running save, and then saves the last step."""
        if (save_s := self._last_save_s) is None:
            return None
        if self._running is None or self._running.done():
            return save_s
        return save_s + max(0.0, save_s - (self.clock() - self._begun_s))

    async def settle(self) -> None:
        """Waits until no save runs."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def save_last(self, snapshot: RunSnapshot) -> None:
        """Writes a checkpoint with `hf/` at the end of the run. Waits first for a save that is still being written.
        Does nothing if the newest checkpoint is of this step and has `hf/`.

        Does not raise if the save fails: it stores the error in `unsaved`, and the caller raises this error after it
        has written all other records of the run.
        """
        await self.settle()
        if snapshot.version.step == self.saved and self._saved_hf:
            return
        await self._begin(snapshot, hf=True, at_end=True)
        await self.settle()

    async def rescue(self, recorded_step: int) -> None:
        """Saves the newest weights of a run that failed after `recorded_step`, if its ranks can still do it. Logs an
        error and does not raise it.

        Does nothing if no step was trained, if the step has a checkpoint folder already, or if the save at the end of
        the run failed. Saves the weights only (`hf/`), because the failure may have come in the middle of a step. The
        weights then match no state of the buffer. The ranks may also hold the update of a step that failed before it
        was recorded.
        """
        if self.unsaved is not None:
            return
        await self.settle()  # a save that still runs may become the last whole checkpoint of this run
        try:
            trained_step = await asyncio.to_thread(self.run.policy.trained_step)
            step = max(recorded_step, trained_step or 0)
            folder = folder_of(self.folder, step)
            if step > 0 and not folder.exists():
                await asyncio.to_thread(self.run.policy.save_hf, folder / HF)
        except Exception as error:
            logger.error("the trained weights could not be saved: %s", error)

    async def _begin(self, snapshot: RunSnapshot, *, hf: bool, at_end: bool) -> None:
        step, started_s = snapshot.version.step, self.clock()
        self._begun, self._begun_s, self._postponed = step, started_s, False
        try:
            await self._keep_records(at_end=at_end)
            await asyncio.to_thread(self.run.stage)
        except CheckpointError as error:  # any other error means that the ranks cannot train either
            self.saves_ended += 1
            self._failed(step, error, at_end=at_end)
            return
        self.metrics.checkpoint_staged(self.clock() - started_s)
        writing = self._write(snapshot, hf=hf, started_s=started_s, at_end=at_end)
        self._running = asyncio.create_task(writing, name=f"save step {step}")

    async def _keep_records(self, *, at_end: bool) -> None:
        """Puts the records of all steps on the disk. At the end of the run, a failure is only logged, so that the
        weights are saved even without the records."""
        try:
            await asyncio.to_thread(self.sync_records)
        except CheckpointError as error:
            if not at_end:
                raise
            logger.error("the checkpoint at the end of the run may lack records: %s", error)

    async def _write(self, snapshot: RunSnapshot, *, hf: bool, started_s: float, at_end: bool) -> None:
        """Writes the copy of the state that `RunParts.stage` has made. Raises nothing, because training does not need
        the checkpoint."""
        step = snapshot.version.step
        path = folder_of(self.folder, step)
        try:
            await asyncio.to_thread(self.run.write, path, snapshot, hf=hf)
        except Exception as error:
            # the files of the failed save may have filled the disk
            await asyncio.to_thread(shutil.rmtree, unfinished(path), ignore_errors=True)
            self._failed(step, error, at_end=at_end)
            return
        finally:
            self.saves_ended += 1
        self.saved, self._saved_hf = step, hf
        self._last_save_s = self.clock() - started_s
        self.metrics.checkpoint_saved(step=step, duration_s=self._last_save_s)
        await asyncio.to_thread(self._drop_old)

    def _failed(self, step: int, error: Exception, *, at_end: bool) -> None:
        self.metrics.checkpoint_missed(outcome="failed")
        known = isinstance(error, AsyncRLError | OSError)
        if at_end:
            self.unsaved = error if isinstance(error, CheckpointError) else CheckpointError(f"{error!r}")
            return
        logger.error(
            "the checkpoint of step %d was not written: %s\nThe run goes on. If the weights cannot be written at its "
            "end either, they are lost: free space on the disk of %s",
            step,
            error,
            self.folder,
            exc_info=None if known else error,
        )

    def _drop_old(self) -> None:
        """Deletes all complete checkpoints except the newest `checkpoint.keep`, those of steps that are multiples of
        `checkpoint.keep_every`, and the best ones. Also deletes the remains of unfinished saves."""
        with self._warning():
            found = {int(match[1]): path for path in self.folder.iterdir() if (match := _STEP.fullmatch(path.name))}
            whole = sorted(step for step, path in found.items() if (path / COMPLETE).exists())
            for step in found.keys() - kept_steps(self.config, whole, best=self.best(whole)):
                with self._warning():  # one folder that cannot be deleted must not keep the others from being deleted
                    discard(found[step])  # renames it first, so a killed deletion leaves no incomplete checkpoint
            for left in self.folder.glob("step-*.tmp"):
                with self._warning():
                    shutil.rmtree(left)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Logs an OSError of its block as a warning, so that a failed deletion does not end the run."""
        try:
            yield
        except OSError as error:
            logger.warning("old checkpoints in %s could not be deleted: %s. Delete them by hand", self.folder, error)


# Keeps the weights of every version and the batch of every step, for the checks of `asyncrl audit` that compute steps
# again.
#
#     audit/model/                         config and tokenizer of the model; with `model.lora`, also the frozen weights
#     audit/weights/<version>/             the float32 weights, as the ranks save them in a checkpoint
#     audit/batches/<version>.msgpack      the lease of the step that began with the weights of this version
#     audit/batches/<version>.safetensors  the rows of the step, in the order of the lease, with the learner's columns
#
# Each step takes as much disk space as the model. So this is for small models, and off by default
# (`audit.keep_weights`).

ADDED_COLUMNS = ("advantages", "sample_mask")
"""Columns that the learner adds to the rows of every step."""
PREV_LOGPROBS = "prev_logprobs"
"""Column that the ranks add if the objective reads it."""


class KeptSteps:
    """The kept weights and batches in a run's directory."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._weights = run / AUDIT / "weights"
        self._batches = run / AUDIT / "batches"

    @property
    def model_folder(self) -> Path:
        """The folder with the files that describe the model."""
        return self._run / AUDIT / "model"

    def weights_path(self, version: Version) -> Path:
        """Returns the folder with the weights of a version, which the ranks save."""
        return self._weights / str(version)

    def keep_model(self, source: Path, *, with_weights: bool) -> None:
        """Copies the files of the model at `source` that describe it, so that the run can be audited where that folder
        does not exist. With `with_weights` also copies the weights: with `model.lora`, the weights that are kept for
        each version are only an adapter, and the audit needs the frozen weights too."""
        self.model_folder.mkdir(parents=True, exist_ok=True)
        kinds = (".json", ".jinja", ".txt", ".model", *((".safetensors",) if with_weights else ()))
        for path in sorted(source.iterdir()):
            is_index = path.name.endswith(".index.json") and not with_weights
            target = self.model_folder / path.name
            if path.suffix in kinds and path.is_file() and not is_index and not target.exists():
                part = target.with_suffix(".tmp")  # a killed copy leaves no file that looks whole
                shutil.copyfile(path, part)
                part.replace(target)

    def versions(self) -> list[Version]:
        """Returns the versions whose weights are kept, in order."""
        found = [name for name in names(self._weights, inside=self._run) if (self._weights / name / COMPLETE).exists()]
        return sorted(map(Version.parse, found))

    async def keep_batch(self, lease: Lease, reading: Awaitable[BatchedDataDict]) -> None:
        """Writes the lease of a step, and its rows, which `reading` returns.

        Rows that cannot be read are logged and not raised. The audit then finds that the batch is missing.
        """
        try:
            rows = await reading
        except Exception as error:
            logger.error(
                "the batch of step %d is not kept for the audit, because its rows cannot be read: %s: %s",
                lease.step,
                type(error).__name__,
                error,
            )
        else:
            await asyncio.to_thread(self.write_batch, lease, rows)

    def write_batch(self, lease: Lease, rows: BatchedDataDict) -> None:
        """Writes the lease and the rows of a step."""
        self._batches.mkdir(parents=True, exist_ok=True)
        lease_path, rows_path = self._paths(Version(lease.incarnation, lease.step))
        write_atomically(rows_path, save({name: column.contiguous() for name, column in rows.items()}))
        write_atomically(lease_path, msgspec.msgpack.encode(lease))

    def batch(self, version: Version) -> tuple[Lease, BatchedDataDict] | None:
        """Returns the lease and the rows of the step that began with the weights of `version`; None if they were not
        kept.

        Raises OSError, MsgspecError or SafetensorError if they cannot be read, and FileRefused, which is an OSError.
        """
        lease_path, rows_path = self._paths(version)
        if not (lease_path.exists() and rows_path.exists()):
            return None
        lease = msgspec.msgpack.decode(read(lease_path, inside=self._run, most=FILE_BYTES), type=Lease)
        return lease, BatchedDataDict(load(read(rows_path, inside=self._run, most=FILE_BYTES)))

    def _paths(self, version: Version) -> tuple[Path, Path]:
        return self._batches / f"{version}.msgpack", self._batches / f"{version}.safetensors"


def kept_columns(*, with_logprobs: bool, extra: Sequence[str]) -> Sequence[str]:
    """Returns the columns of a kept batch. `extra` are the columns that only some runs have (`Config.extra_columns`).
    With `with_logprobs`, the batch also has `PREV_LOGPROBS`."""
    return [*GENERATED_FIELDS, *extra, *ADDED_COLUMNS, *([PREV_LOGPROBS] if with_logprobs else [])]
