"""A rank that fetches its own rows from the data plane and writes columns back under the same keys.

Invariants: either all ranks get their rows, or the call fails on all ranks (F37). A token that is older than its ticket
allows is never trained.
"""

import copy
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from asyncrl.algorithms.baselines import Whitening
from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction
from asyncrl.algorithms.returns import TokenAdvantages
from asyncrl.algorithms.token_estimators import TokenEstimator, check_estimate, whitened_advantages
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.codec import encode
from asyncrl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from asyncrl.errors import CallRefused, MissingColumns
from asyncrl.policy.batching import check_staleness
from asyncrl.policy.sharded_worker import ShardedWorker
from asyncrl.policy.step_report import RankRecord
from asyncrl.policy.worker import PolicyWorker

STEP = "step"
"""Key in `extra_info`: the version of the weights that are trained with the rows."""
LIMIT = "max_staleness_versions"
"""Key in a row's tags: the η of its ticket, in versions."""

WorkerT = TypeVar("WorkerT", bound=ShardedWorker[Any])


class MetaRank(Generic[WorkerT]):
    """Every method is a collective. `meta` names this rank's rows; it may name none.

    If a rank cannot fetch its rows, RowsLost is raised on all ranks, with the lost rows of all ranks. MissingColumns is
    raised if rows or columns were never written or have been cleared.
    """

    def __init__(self, worker: WorkerT, client: DataPlaneClient) -> None:
        self._worker = worker
        self._client = client

    def train(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction | ValueLossFunction,
        *,
        rows_per_update: int,
        micro_batch_size: int | None,
        eval_mode: bool,
    ) -> RankRecord:
        """Calls the worker's `train` with the fields of `meta`. If `extra_info` has a step, raises StalenessViolation
        for a token beyond the limit in its row's tags."""
        step: int | None = meta.extra_info.get(STEP)
        data = self._fetch(meta, step=step)
        return self._worker.train(
            data,
            loss_fn,
            rows_per_update=rows_per_update,
            micro_batch_size=micro_batch_size,
            eval_mode=eval_mode,
            step=step,
        )

    def _fetch(self, meta: KVBatchMeta, *, step: int | None = None) -> BatchedDataDict:
        """Returns this rank's rows with the driver's cut. With a `step`, checks their tokens against their limits."""
        data = BatchedDataDict()
        with self._worker.together():
            if meta.size:
                try:
                    data = self._client.get_data(meta, meta.fields or [])
                except KeyError as error:
                    raise MissingColumns(
                        f"the rows do not have all of {meta.fields}: {error.args[0]}; write the missing columns first"
                    ) from error
            if step is not None:
                limits = [tags[LIMIT] for tags in meta.tags or []]
                check_staleness(data, step=step, limits=limits, sample_ids=meta.sample_ids)
        data.micro_batch_indices = meta.extra_info.get("micro_batch_indices")
        data.micro_batch_lengths = meta.extra_info.get("micro_batch_lengths")
        data.elem_counts_per_gb = meta.extra_info.get("elem_counts_per_gb")
        return data

    def _advantages(self, meta: KVBatchMeta, estimator: TokenEstimator) -> TokenAdvantages | None:
        """Returns the estimator's result for this rank's rows, whitened over the rows of all ranks; None without
        rows."""
        data = self._fetch(meta)
        estimated: TokenAdvantages | None = None
        # all checks are inside `together`, so that no rank waits in the sum of the moments for a rank that has failed
        with self._worker.together():
            rule = estimator.whitening
            if not isinstance(rule, Whitening):
                raise CallRefused(f"an estimator's whitening is {rule!r}; it must be a Whitening")
            if data.size:
                self._worker.check_rows(data)
                estimated = estimator(copy.copy(data))
                check_estimate(data, estimated)
        return whitened_advantages(data, estimated, rule=rule, add_up=self._worker.add_up)

    def _write(self, meta: KVBatchMeta, columns: Mapping[str, Any]) -> None:
        with self._worker.together():
            if meta.size:
                fields = encode(columns, lengths=meta.sequence_lengths)
                self._client.put_samples(meta.sample_ids, meta.partition_id, fields=fields)


class PolicyMetaRank(MetaRank[PolicyWorker]):
    """A rank of the policy."""

    def write_logprobs(self, meta: KVBatchMeta, *, micro_batch_size: int | None) -> None:
        """Adds the column `prev_logprobs`: log-probs under the current weights."""
        scored = self._worker.get_logprobs(self._fetch(meta), micro_batch_size=micro_batch_size)
        self._write(meta, {"prev_logprobs": scored["logprobs"]})

    def write_reference_logprobs(self, meta: KVBatchMeta, *, micro_batch_size: int | None) -> None:
        """Adds the column `reference_policy_logprobs`: log-probs under the initial weights."""
        data = self._fetch(meta)
        scored = self._worker.get_reference_policy_logprobs(data, micro_batch_size=micro_batch_size)
        self._write(meta, {"reference_policy_logprobs": scored["reference_logprobs"]})

    def write_advantages(self, meta: KVBatchMeta, estimator: TokenEstimator) -> None:
        """Adds the column `advantages`, whitened over the rows of all ranks."""
        found = self._advantages(meta, estimator)
        self._write(meta, {} if found is None else {"advantages": found.advantages_BS})
