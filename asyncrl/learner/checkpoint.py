"""Checkpoints of a run: the policy's weights, every so many steps and at the end, the newest few of them.

    <folder>/step-12/hf/    what vLLM and transformers load, and a later run with `model.path`

A checkpoint that cannot be written does not end training, and the one before it stays. When the last one cannot be
written, the run still writes what else it can before it fails.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncrl.config.schema import CheckpointSection
from asyncrl.errors import CheckpointError
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.policy.complete_directory import COMPLETE, discard, unfinished

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")


class Checkpoints:
    """`save_hf` writes a directory whole or not at all, and blocks."""

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
        self._saved = 0  # before the first step there is nothing to save
        self.unsaved: CheckpointError | None = None
        """Why the weights of the run's end are not saved."""

    def due(self, step: int) -> bool:
        """Whether one is to be written now that `step` steps are trained."""
        every = self._config.every_steps
        return every > 0 and step % every == 0

    async def save(self, step: int) -> None:
        """Writes the weights after `step` steps, unless they are written, and drops old ones. CheckpointError."""
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
        """Like `save`; a failure is logged: the next one may succeed."""
        try:
            await self.save(step)
        except CheckpointError as error:
            logger.error(
                "no checkpoint of step %d: %s\nthe run goes on; its weights will be lost unless they can be written "
                "when it ends: free space on the disk of %s",
                step,
                error,
                self._folder,
            )

    async def save_last(self, step: int) -> None:
        """Like `save`, at the run's end; a failure is kept in `unsaved` until the rest of the run is recorded."""
        try:
            await self.save(step)
        except CheckpointError as error:
            self.unsaved = error

    def _drop_unfinished(self, step: int) -> None:
        """A save that failed may have filled the disk, and an empty folder looks like a checkpoint."""
        folder = self._folder / f"step-{step}"
        shutil.rmtree(unfinished(folder / "hf"), ignore_errors=True)
        with contextlib.suppress(OSError):  # it is not there, or it holds something else
            folder.rmdir()

    def _drop_old(self) -> None:
        """All but the newest; what a save left that did not end is no checkpoint."""
        with self._warning():
            found = {int(match[1]): path for path in self._folder.iterdir() if (match := _STEP.fullmatch(path.name))}
            whole = sorted(step for step, path in found.items() if (path / "hf" / COMPLETE).exists())
            for step in found.keys() - whole[-self._config.keep :]:
                with self._warning():  # one that stays is no reason for others to stay
                    if step in whole:
                        discard(found[step] / "hf")
                    shutil.rmtree(found[step])

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self._folder, error)
