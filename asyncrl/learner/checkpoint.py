"""When the run's checkpoints are written: every `checkpoint.every_steps` steps, and at the end of the run.

Only the newest `checkpoint.keep` checkpoints stay. When a checkpoint cannot be written, training goes on and the
previous checkpoint stays. When the checkpoint at the end of the run cannot be written, the run first writes its other
records and then fails.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncrl.checkpoints.directory import folder_of
from asyncrl.complete_directory import COMPLETE, discard, unfinished
from asyncrl.config.schema import CheckpointSection
from asyncrl.coordinator.snapshot import RunSnapshot
from asyncrl.errors import CheckpointError, RowsLost
from asyncrl.metrics.recorders import LearnerMetrics

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")


class Checkpoints:
    """Saves checkpoints below `folder` and deletes old ones.

    `write` writes the checkpoint of a snapshot's moment at the given path (`asyncrl.checkpoints.run`). It must write
    the whole directory or nothing, and it may block: it is called in a thread. `restored_step` is the step of the
    checkpoint from which the run was resumed.
    """

    def __init__(
        self,
        config: CheckpointSection,
        *,
        folder: Path,
        write: Callable[[Path, RunSnapshot], None],
        metrics: LearnerMetrics,
        restored_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._folder = folder
        self._write = write
        self._metrics = metrics
        self._clock = clock
        self._saved = restored_step  # the step of the newest checkpoint; step 0 needs none
        self.unsaved: CheckpointError | None = None
        """The error that prevented the save of the final weights; None when there was no such error."""

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step` trained steps."""
        every = self._config.every_steps
        return every > 0 and step % every == 0

    async def save(self, snapshot: RunSnapshot) -> None:
        """Saves the run as it is at `snapshot`, then deletes old checkpoints. Does nothing if its step is saved.

        Raises CheckpointError when it cannot be written, and RowsLost when rows of a ready group are lost.
        """
        step = snapshot.version.step
        if step == self._saved:
            return
        started_s = self._clock()
        try:
            await asyncio.to_thread(self._write, folder_of(self._folder, step), snapshot)
        except Exception:
            self._metrics.checkpoint_failed()
            await asyncio.to_thread(self._drop_unfinished, step)
            raise
        self._saved = step
        self._metrics.checkpoint_saved(step=step, duration_s=self._clock() - started_s, unix_time_s=time.time())
        await asyncio.to_thread(self._drop_old)

    async def save_or_go_on(self, snapshot: RunSnapshot) -> None:
        """Saves like `save`, but logs a failure instead of raising it: the next checkpoint may succeed."""
        try:
            await self.save(snapshot)
        except (CheckpointError, RowsLost) as error:
            logger.error(
                "the checkpoint of step %d was not written: %s\nThe run goes on. If the weights cannot be written at "
                "its end either, they are lost: free space on the disk of %s",
                snapshot.version.step,
                error,
                self._folder,
            )

    async def save_last(self, snapshot: RunSnapshot) -> None:
        """Saves like `save` at the end of the run, but stores a failure in `unsaved` instead of raising it.

        The caller raises it after all other records of the run are written.
        """
        try:
            await self.save(snapshot)
        except CheckpointError as error:
            self.unsaved = error

    def _drop_unfinished(self, step: int) -> None:
        """Deletes the files of the failed save of `step`, which may have filled the disk."""
        shutil.rmtree(unfinished(folder_of(self._folder, step)), ignore_errors=True)

    def _drop_old(self) -> None:
        """Deletes all but the newest `checkpoint.keep` complete checkpoints, and the remains of unfinished saves."""
        with self._warning():
            found = {int(match[1]): path for path in self._folder.iterdir() if (match := _STEP.fullmatch(path.name))}
            whole = sorted(step for step, path in found.items() if (path / COMPLETE).exists())
            for step in found.keys() - whole[-self._config.keep :]:
                with self._warning():  # one folder that cannot be deleted must not keep the others from being deleted
                    discard(found[step])  # renames it first, so that a kill leaves no part of a checkpoint
            for left in self._folder.glob("step-*.tmp"):
                with self._warning():
                    shutil.rmtree(left)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Logs an OSError of its block as a warning, so that a failed deletion does not end the run."""
        try:
            yield
        except OSError as error:
            logger.warning("old checkpoints in %s could not be deleted: %s. Delete them by hand", self._folder, error)
