"""A rank of the critic whose rows come from the data plane."""

from asyncrl.algorithms.returns import TokenAdvantages
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.policy.meta_rank import MetaRank
from asyncrl.value.estimators import TokenEstimator, whitened_advantages
from asyncrl.value.worker import ValueWorker


class ValueMetaRank(MetaRank[ValueWorker]):
    """A rank of the critic."""

    def write_values(self, meta: KVBatchMeta, *, micro_batch_size: int | None) -> None:
        """Adds the column `values`: the current critic's."""
        found = self._worker.get_values(self._fetch(meta), micro_batch_size=micro_batch_size)
        self._write(meta, {"values": found["values"]})

    def write_advantages(self, meta: KVBatchMeta, estimator: TokenEstimator) -> None:
        """Adds the columns `advantages`, whitened over the rows of all ranks, and `returns`."""
        data = self._fetch(meta)
        estimated: TokenAdvantages | None = None
        with self._worker.together():
            rule = estimator.whitening
            estimated = estimator(data) if data.size else None
        found = whitened_advantages(data, estimated, rule=rule, add_up=self._worker.add_up)
        if found is not None:
            self._write(meta, {"advantages": found.advantages_BS, "returns": found.returns_BS})
