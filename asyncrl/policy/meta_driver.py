"""A driver that handles only the names of rows. Its ranks fetch the rows and write columns back.

Invariants: rows are cut by their lengths in the same way as `RankDriver` cuts the rows themselves. If a call fails with
RowsLost or CallRefused, nothing has changed, and the ranks stay usable. The one exception: if the loss of an update
fails, the earlier updates of the call stay applied.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction
from asyncrl.algorithms.token_estimators import TokenEstimator
from asyncrl.config.schema import Config
from asyncrl.data.specs import LP_SEED_FIELDS
from asyncrl.data_plane.clients import open_client
from asyncrl.data_plane.interfaces import PAD_SEQLEN, DataPlaneClient, KVBatchMeta
from asyncrl.data_plane.sharding import shard_meta_for_dp
from asyncrl.errors import CallRefused
from asyncrl.policy.batching import MIN_WIDTH
from asyncrl.policy.interfaces import Timer
from asyncrl.policy.meta_rank import LIMIT, STEP
from asyncrl.policy.rank_driver import RankDriver, check_micro_batch_size, ignore_arguments, timed, trained
from asyncrl.policy.step_plan import check_columns


class MetaDriver(RankDriver):
    """Adds to a `RankDriver` the same calls for rows on the data plane that `config.data_plane` selects."""

    _train_fields: tuple[str, ...]
    """Columns that training reads if the rows have them, even if a meta does not name them."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self._client: DataPlaneClient | None = None

    @property
    def dp_client(self) -> DataPlaneClient:
        """The data-plane client of this process. The first use opens it."""
        if self._client is None:
            self._client = open_client(self._config)
        return self._client

    def start(self) -> None:
        super().start()
        self._group.setup_data_plane()

    def shutdown(self) -> bool:
        if self._client is not None:
            self._client.close()
        return super().shutdown()

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction | ValueLossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Trains like `train`, on the rows' training columns and the fields that `meta` names, with the same result. It
        clears no rows.

        Raises MissingColumns, before any rank is called, if the rows lack a column that the loss reads or that `meta`
        names. If `extra_info["step"]` is set to the version of the weights, the age of every token is checked against
        its row's `tags["max_staleness_versions"]`, and a token beyond it raises StalenessViolation.
        """
        ignore_arguments("train_from_meta", (), kwargs)
        rows = meta.size if gbs is None else gbs
        needed = self._needed_columns(loss_fn, rows=meta.size, rows_per_update=rows, eval_mode=eval_mode)
        with timed(timer, f"{self._training}/shard_data"):
            fields = self._fields_to_train(meta, needed)
            shards = self._shards(meta, rows_per_update=rows, micro_batch_size=mbs, stage="train_mb_tokens")
        with timed(timer, f"{self._training}/ranks"):
            records = self._dispatch(
                "train",
                shards,
                fields=fields,
                shared=[loss_fn],
                rows_per_update=self._rank_rows(rows),
                micro_batch_size=mbs,
                eval_mode=eval_mode,
            )
        return trained(records)

    def _fields_to_train(self, meta: KVBatchMeta, needed: frozenset[str]) -> list[str]:
        """Returns the columns that the ranks fetch for training: the columns that `meta` names, the training columns
        that the rows have, and the columns that the loss needs."""
        if STEP in meta.extra_info:
            if not isinstance(meta.extra_info[STEP], int):
                raise CallRefused(f"the meta's extra_info[{STEP!r}] is {meta.extra_info[STEP]!r}; it must be an int")
            needed = needed - {"staleness"} | {"weight_versions"}
            if any(LIMIT not in tags for tags in meta.tags or [{}]):
                raise CallRefused(
                    f"the meta's extra_info has {STEP!r}, so the age of its tokens must be checked, but some rows "
                    f"have no {LIMIT!r} in their tags; add it with stamp_tags()"
                )
        named = [*(meta.fields or []), *sorted(needed)]
        present = self.dp_client.fields_of(meta.sample_ids, meta.partition_id)
        if present is None:
            present = {name for name in {*named, *self._train_fields} if self._has_field(meta, name)}
        check_columns(present, named, reader="training")
        return list(dict.fromkeys([*named, *(name for name in self._train_fields if name in present)]))

    def _has_field(self, meta: KVBatchMeta, name: str) -> bool:
        """Returns True if the first row has a field, by reading it. Used for a client without `fields_of`."""
        try:
            self.dp_client.get_samples(meta.sample_ids[:1], meta.partition_id, [name])
        except KeyError:
            return False
        return True

    def _score(
        self, method: str, meta: KVBatchMeta, *, stage: str, micro_batch_size: int | None, timer: Timer | None
    ) -> None:
        """Runs a stage that scores tokens and writes a column back."""
        with timed(timer, f"{stage}/shard_data"):
            shards = self._shards(
                meta, rows_per_update=meta.size, micro_batch_size=micro_batch_size, stage="logprob_mb_tokens"
            )
        with timed(timer, f"{stage}/ranks"):
            self._dispatch(method, shards, fields=LP_SEED_FIELDS, micro_batch_size=micro_batch_size)

    def _estimate(self, meta: KVBatchMeta, estimator: TokenEstimator, *, timer: Timer | None) -> None:
        """Runs the stage that computes token-level advantages from the columns that `estimator` reads."""
        with timed(timer, "get_advantages/shard_data"):
            shards = self._shards(meta, rows_per_update=meta.size, micro_batch_size=None, stage="logprob_mb_tokens")
        with timed(timer, "get_advantages/ranks"):
            self._dispatch("write_advantages", shards, fields=estimator.reads, shared=[estimator])

    def _dispatch(
        self, method: str, shards: Sequence[KVBatchMeta], *, fields: Sequence[str], **options: Any
    ) -> list[Any]:
        """Runs a method of the meta ranks that reads `fields` of the rows."""
        for shard in shards:
            shard.fields = list(fields)
        return self._ranks.call_each(method, [(shard,) for shard in shards], with_meta=True, **options)

    def _shards(
        self, meta: KVBatchMeta, *, rows_per_update: int, micro_batch_size: int | None, stage: str
    ) -> list[KVBatchMeta]:
        """Returns one meta for each rank, cut in the same way as `_cut` cuts rows."""
        check_micro_batch_size(micro_batch_size)
        repeated = [name for name, count in Counter(meta.sample_ids).items() if count > 1]
        if repeated:
            raise ValueError(
                f"the meta names the samples {repeated[:5]} more than once, but a row can be trained or scored only "
                "once in a call; remove the repeated names"
            )
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
        """Stamps the width to which driver and ranks pad the step's rows. Also sets the lengths if `meta` has none.

        Idempotent. A stamp that is too narrow for the rows is raised. If the data plane does not know the rows'
        lengths, there is no stamp, and reads are as wide as the longest row.
        """
        if meta.sequence_lengths is None and meta.size:
            meta.sequence_lengths = self.dp_client.lengths_of(meta.sample_ids, meta.partition_id)
        if meta.sequence_lengths:
            stamped = meta.extra_info.get(PAD_SEQLEN, MIN_WIDTH)
            meta.extra_info[PAD_SEQLEN] = max([stamped, *meta.sequence_lengths])


def name_fields(meta: KVBatchMeta, names: Sequence[str] | Mapping[str, Any]) -> None:
    """Records in `meta` that the rows have these columns."""
    meta.fields = list(dict.fromkeys([*(meta.fields or []), *names]))
