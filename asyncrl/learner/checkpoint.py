"""Checkpoints of a run: saves the policy's weights every `checkpoint.every_steps` steps and at the end of the run.

    <folder>/step-12/hf/    a Hugging Face directory, which vLLM, transformers and a later run (`model.path`) can load

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

from asyncrl.complete_directory import COMPLETE, discard, unfinished
from asyncrl.config.schema import CheckpointSection
from asyncrl.errors import CheckpointError
from asyncrl.metrics.recorders import LearnerMetrics

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")


class Checkpoints:
    """Saves checkpoints below `folder` and deletes old ones.

    `save_hf` writes the Hugging Face directory at the given path. It must write the whole directory or nothing, and it
    may block: it is called in a thread.
    """

    def __init__(
        self,
        config: CheckpointSection,
        *,
        folder: Path,
        save_hf: Callable[[Path], None],
        metrics: LearnerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._folder = folder
        self._save_hf = save_hf
        self._metrics = metrics
        self._clock = clock
        self._saved = 0  # the step of the newest saved weights; 0 are the initial weights, which need no checkpoint
        self.unsaved: CheckpointError | None = None
        """The error that prevented the save of the final weights; None when there was no such error."""

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step` trained steps."""
        every = self._config.every_steps
        return every > 0 and step % every == 0

    async def save(self, step: int) -> None:
        """Saves the weights after `step` steps, then deletes old checkpoints. Does nothing if they are saved already.

        Raises CheckpointError when the weights cannot be written.
        """
        if step == self._saved:
            return
        started_s = self._clock()
        try:
            await asyncio.to_thread(self._save_hf, self._folder / f"step-{step}" / "hf")
        except Exception:
            self._metrics.checkpoint_failed()
            await asyncio.to_thread(self._drop_unfinished, step)
            raise
        self._saved = step
        self._metrics.checkpoint_saved(step=step, duration_s=self._clock() - started_s, unix_time_s=time.time())
        await asyncio.to_thread(self._drop_old)

    async def save_or_go_on(self, step: int) -> None:
        """Saves like `save`, but logs a failure instead of raising it: the next checkpoint may succeed."""
        try:
            await self.save(step)
        except CheckpointError as error:
            logger.error(
                "the checkpoint of step %d was not written: %s\nThe run goes on. If the weights cannot be written at "
                "its end either, they are lost: free space on the disk of %s",
                step,
                error,
                self._folder,
            )

    async def save_last(self, step: int) -> None:
        """Saves like `save` at the end of the run, but stores a failure in `unsaved` instead of raising it.

        The caller raises it after all other records of the run are written.
        """
        try:
            await self.save(step)
        except CheckpointError as error:
            self.unsaved = error

    def _drop_unfinished(self, step: int) -> None:
        """Deletes the files of the failed save of `step`.

        The failed save may have filled the disk, so its files must go. Its empty folder must go too, because it would
        look like a checkpoint.
        """
        folder = self._folder / f"step-{step}"
        shutil.rmtree(unfinished(folder / "hf"), ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder does not exist, or it contains other files and must stay
            folder.rmdir()

    def _drop_old(self) -> None:
        """Deletes all but the newest `checkpoint.keep` complete checkpoints, and the remains of unfinished saves."""
        with self._warning():
            found = {int(match[1]): path for path in self._folder.iterdir() if (match := _STEP.fullmatch(path.name))}
            whole = sorted(step for step, path in found.items() if (path / "hf" / COMPLETE).exists())
            for step in found.keys() - whole[-self._config.keep :]:
                with self._warning():  # one folder that cannot be deleted must not keep the others from being deleted
                    if step in whole:  # moved away first, so that a kill during the deletion leaves no partial `hf`
                        discard(found[step] / "hf")
                    shutil.rmtree(found[step])

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Logs an OSError of its block as a warning, so that a failed deletion does not end the run."""
        try:
            yield
        except OSError as error:
            logger.warning("old checkpoints in %s could not be deleted: %s. Delete them by hand", self._folder, error)
