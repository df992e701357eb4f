"""A driver that names rows and never holds them: its ranks fetch and write their own.

What must hold: rows are cut by their lengths as `RankDriver` cuts the rows themselves; a call that fails with RowsLost
changed nothing, and the ranks go on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction
from asyncrl.data.specs import LP_SEED_FIELDS
from asyncrl.data_plane.interfaces import PAD_SEQLEN, KVBatchMeta
from asyncrl.data_plane.sharding import shard_meta_for_dp
from asyncrl.policy.batching import MIN_WIDTH
from asyncrl.policy.interfaces import Timer
from asyncrl.policy.rank_driver import RankDriver, check_micro_batch_size, timed, trained


class MetaDriver(RankDriver):
    """Beside a `RankDriver`'s calls, the same on rows of the data plane."""

    def start(self) -> None:
        super().start()
        self._ranks.setup_data_plane()

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction | ValueLossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """`train` on the fields that `meta` names, with the same result. Clears nothing.

        With `extra_info["step"]` the version of the weights, tokens are checked against each row's
        `tags["max_staleness_versions"]`: StalenessViolation.
        """
        rows = meta.size if gbs is None else gbs
        with timed(timer, f"{self._training}/shard_data"):
            shards = self._shards(meta, rows_per_update=rows, micro_batch_size=mbs, stage="train_mb_tokens")
        with timed(timer, f"{self._training}/ranks"):
            records = self._ranks.call_each(
                "train",
                [(shard, loss_fn) for shard in shards],
                with_meta=True,
                rows_per_update=self._rank_rows(rows),
                micro_batch_size=mbs,
                eval_mode=eval_mode,
            )
        return trained(records, loss_fn)

    def _score(
        self, method: str, meta: KVBatchMeta, *, stage: str, micro_batch_size: int | None, timer: Timer | None
    ) -> None:
        """A stage that scores tokens and writes a column back."""
        with timed(timer, f"{stage}/shard_data"):
            shards = self._shards(
                meta, rows_per_update=meta.size, micro_batch_size=micro_batch_size, stage="logprob_mb_tokens"
            )
        with timed(timer, f"{stage}/ranks"):
            self._dispatch(method, shards, fields=LP_SEED_FIELDS, micro_batch_size=micro_batch_size)

    def _dispatch(self, method: str, shards: Sequence[KVBatchMeta], *, fields: Sequence[str], **options: Any) -> None:
        """A stage that reads `fields` and writes columns back."""
        for shard in shards:
            shard.fields = list(fields)
        self._ranks.call_each(method, [(shard,) for shard in shards], with_meta=True, **options)

    def _shards(
        self, meta: KVBatchMeta, *, rows_per_update: int, micro_batch_size: int | None, stage: str
    ) -> list[KVBatchMeta]:
        """A meta a rank, cut as `_cut` cuts rows."""
        check_micro_batch_size(micro_batch_size)
        self._stamp_pad_seqlen(meta)
        if rows_per_update == meta.size and meta.size % self._ranks.size:
            return shard_meta_for_dp(meta, dp_world=self._ranks.size, allow_uneven_shards=True)[0]
        packing, dynamic = self._packing_args(stage) if micro_batch_size is None else (None, None)
        shards, _ = shard_meta_for_dp(
            meta,
            dp_world=self._ranks.size,
            batch_size=rows_per_update,
            sequence_packing_args=packing,
            dynamic_batching_args=dynamic,
        )
        return shards

    def _stamp_pad_seqlen(self, meta: KVBatchMeta) -> None:
        """The width that driver and ranks pad the step's rows to. Idempotent."""
        if PAD_SEQLEN not in meta.extra_info:
            meta.extra_info[PAD_SEQLEN] = max([MIN_WIDTH, *(meta.sequence_lengths or [])])


def name_fields(meta: KVBatchMeta, names: Sequence[str] | Mapping[str, Any]) -> None:
    """The rows have these columns from now on."""
    meta.fields = list(dict.fromkeys([*(meta.fields or []), *names]))
