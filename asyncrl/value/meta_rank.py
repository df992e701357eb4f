"""A rank of the critic that reads and writes its rows on the data plane."""

from asyncrl.algorithms.token_estimators import TokenEstimator
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.policy.meta_rank import MetaRank
from asyncrl.value.worker import ValueWorker


class ValueMetaRank(MetaRank[ValueWorker]):
    """A rank of the critic."""

    def write_values(self, meta: KVBatchMeta, *, micro_batch_size: int | None) -> None:
        """Adds the column `values` of the current critic."""
        found = self._worker.get_values(self._fetch(meta), micro_batch_size=micro_batch_size)
        self._write(meta, {"values": found["values"]})

    def write_advantages(self, meta: KVBatchMeta, estimator: TokenEstimator) -> None:
        """Adds the columns `advantages`, which are whitened over the rows of all ranks, and `returns`."""
        found = self._advantages(meta, estimator)
        columns = {} if found is None else {"advantages": found.advantages_BS, "returns": found.returns_BS}
        self._write(meta, columns)
