"""The rows of the groups of the learner's steps: reads them, and clears them when no checkpoint needs them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.learner_calls import LearnerCalls
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.clients import TRAIN_PARTITION
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.sample_ids import samples_of
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.policy.tq_policy import TQPolicy

SETTLE_S = 5.0
"""How long the end of a run waits until other processes have cleared their rows."""
POLL_S = 0.1


@dataclass(kw_only=True)
class StepRows:
    """Reads and clears rows, and counts those that are left. The fields are those of `LearnerLoop`."""

    config: Config
    incarnation: int
    policy: TQPolicy
    coordinator: CoordinatorClient
    checkpoints: Checkpoints
    metrics: LearnerMetrics
    clock: Callable[[], float]
    _released: int = field(default=0, init=False)
    """Number of ended saves after which retained rows were released."""

    async def read(self, meta: KVBatchMeta, columns: Sequence[str]) -> BatchedDataDict:
        """Returns these columns of the rows of `meta`, which stays as it is. Raises RowsLost if their row store has
        ended, and KeyError if they were cleared."""
        rows = meta.subset(range(meta.size))
        return await asyncio.to_thread(self.policy.read_from_dataplane, rows, select_fields=columns)

    async def clear(self, keys: Sequence[str]) -> None:
        """Clears the rows of groups that will not be trained any more. If a save has ended since the last call, also
        those that were retained for an earlier checkpoint."""
        if self.checkpoints.saves_ended != self._released:
            self._released = self.checkpoints.saves_ended
            complete = self.checkpoints.saved
            keys = [*keys, *await self.coordinator.call(LearnerCalls.release, self.incarnation, complete)]
        size = self.config.learner.group_size
        rows = [row for key in keys for row in samples_of(key, count=size)]
        await asyncio.to_thread(self.policy.discard_samples, rows, TRAIN_PARTITION)

    async def outstanding(self, *, until_none: bool = False) -> int:
        """Returns the number of rows of finished groups in the data plane.

        At the end of a run, generators may still be clearing rows that will not be trained. With `until_none`, the
        number is therefore read again until it is 0 or `SETTLE_S` have passed.
        """
        deadline_s = self.clock() + SETTLE_S
        while True:
            rows = (await asyncio.to_thread(self.policy.rows_outstanding)).get(TRAIN_PARTITION, 0)
            self.metrics.rows_outstanding(rows)
            if not (until_none and rows) or self.clock() > deadline_s:
                return rows
            await asyncio.sleep(POLL_S)
