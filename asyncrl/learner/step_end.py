"""The end of a step: writes its records and samples and clears its rows, while the next step is leased and trained."""

import asyncio
import logging
from collections.abc import Sequence

from asyncrl.buffer.ledger import LedgerEntry
from asyncrl.buffer.records import Lease
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.learner.batch import sample_ids
from asyncrl.learner.recording import EndedStep, StepRecorder
from asyncrl.learner.run_log import RunLog
from asyncrl.learner.step_rows import StepRows
from asyncrl.learner.trained_step import trained_step

logger = logging.getLogger(__name__)


class StepEnd:
    """Ends the steps of a run in order, one at a time. `logged_columns` are the columns of a logged sample."""

    def __init__(self, *, recorder: StepRecorder, log: RunLog, rows: StepRows, logged_columns: Sequence[str]) -> None:
        self._recorder = recorder
        self._log = log
        self._rows = rows
        self._logged_columns = logged_columns
        self._running: asyncio.Task[None] | None = None

    async def begin(
        self, step: EndedStep, over: Sequence[str], *, meta: KVBatchMeta, ledger: LedgerEntry | None
    ) -> None:
        """Begins the end of a step: records it, writes samples of its rows `meta`, and clears the rows of the groups
        `over`. `ledger` is the entry of its ack; None if the step was skipped.

        Raises the error of the step before it.
        """
        await self.settle()
        ending = self._end(step, over, meta, ledger)
        self._running = asyncio.create_task(ending, name=f"end of step {step.lease.step}")

    async def settle(self) -> None:
        """Waits until the step that ends has ended. Raises its error."""
        running, self._running = self._running, None
        if running is not None:
            await running

    async def settle_after_error(self) -> None:
        """Like `settle`, but logs the error of the step that ends, because the run ends with another one."""
        try:
            await self.settle()
        except Exception as error:
            logger.error("the end of the step before it failed too: %s: %s", type(error).__name__, error)

    async def _end(self, step: EndedStep, over: Sequence[str], meta: KVBatchMeta, ledger: LedgerEntry | None) -> None:
        if ledger is None:
            self._recorder.skipped(step)
        else:
            self._recorder.trained(step)
            record = trained_step(step.lease, samples=step.samples, report=step.report, ledger=ledger)
            self._log.append_audit(record)
            await self._write_samples(step.lease, meta)
        await self._rows.clear(over)
        await self._rows.outstanding()

    async def _write_samples(self, lease: Lease, meta: KVBatchMeta) -> None:
        """Writes all samples of the first `learner.groups_logged` groups to the run's sample file.

        An error is logged and not raised: the step is trained, and a sample that cannot be read must not end the run.
        """
        places = self._recorder.logged_samples(lease)
        if not places:
            return
        row_of = {name: row for row, name in enumerate(meta.sample_ids)}
        names = [sample_ids(lease.groups[group])[sample] for group, sample in places]
        try:
            rows = await self._rows.read(meta.subset([row_of[name] for name in names]), self._logged_columns)
            self._recorder.write_samples(lease, places, rows)
        except Exception as error:
            logger.warning("the samples of step %d were not logged: %s: %s", lease.step, type(error).__name__, error)
