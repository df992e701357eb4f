"""Checkpoints of a run: the policy's weights, every so many steps and at the end, the newest few of them.

    <folder>/step-12/hf/    what vLLM and transformers load, and a later run with `model.path`

What must hold: one that cannot be written costs nothing but itself: training goes on, and the last one stays.
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
from asyncrl.policy.complete_directory import COMPLETE, discard

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
            raise
        self._saved = step
        self._metrics.checkpoint_saved(step=step, duration_s=self._clock() - started_s, unix_time_s=time.time())
        await asyncio.to_thread(self._drop_old)

    async def save_or_go_on(self, step: int) -> None:
        """Like `save`; a failure is logged: the next one may succeed."""
        try:
            await self.save(step)
        except CheckpointError as error:
            logger.error("no checkpoint of step %d: %s", step, error)

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
