"""A driver that names rows and never holds them: its ranks fetch and write their own.

Invariants: rows are cut by their lengths as `RankDriver` cuts the rows themselves. A call that fails with RowsLost or
CallRefused changed nothing, but for the updates before the one whose loss failed, and the ranks go on.
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
    """Beside a `RankDriver`'s calls, the same on rows of the data plane that `config.data_plane` names."""

    _train_fields: tuple[str, ...]
    """Columns that training reads where the rows have them, whatever a meta names."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self._client: DataPlaneClient | None = None

    @property
    def dp_client(self) -> DataPlaneClient:
        """This process's access to the rows. It is opened by the first use."""
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
        """`train` on the rows' training columns and the fields that `meta` names, with the same result. Clears nothing.

        MissingColumns before a rank is called when the rows lack a column that the loss reads or that `meta` names.
        With `extra_info["step"]` the version of the weights, tokens are checked against each row's
        `tags["max_staleness_versions"]`: StalenessViolation.
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
        """The columns that ranks fetch to train: those that `meta` names, those of training that the rows have, and
        those that the loss needs."""
        if STEP in meta.extra_info:
            if not isinstance(meta.extra_info[STEP], int):
                raise CallRefused(f"the meta's extra_info[{STEP!r}] is {meta.extra_info[STEP]!r}; it must be an int")
            needed = needed - {"staleness"} | {"weight_versions"}
            if any(LIMIT not in tags for tags in meta.tags or [{}]):
                raise CallRefused(
                    f"the meta's extra_info has {STEP!r}, so that the age of its tokens is checked, but not every row "
                    f"has {LIMIT!r} in its tags: stamp_tags() writes it"
                )
        named = [*(meta.fields or []), *sorted(needed)]
        present = self.dp_client.fields_of(meta.sample_ids, meta.partition_id)
        if present is None:
            present = {name for name in {*named, *self._train_fields} if self._has_field(meta, name)}
        check_columns(present, named, reader="training")
        return list(dict.fromkeys([*named, *(name for name in self._train_fields if name in present)]))

    def _has_field(self, meta: KVBatchMeta, name: str) -> bool:
        """Whether the first row has a field, for a client that cannot tell: the field of that row is read."""
        try:
            self.dp_client.get_samples(meta.sample_ids[:1], meta.partition_id, [name])
        except KeyError:
            return False
        return True

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

    def _estimate(self, meta: KVBatchMeta, estimator: TokenEstimator, *, timer: Timer | None) -> None:
        """The stage that makes token-level advantages of the columns that `estimator` reads."""
        with timed(timer, "get_advantages/shard_data"):
            shards = self._shards(meta, rows_per_update=meta.size, micro_batch_size=None, stage="logprob_mb_tokens")
        with timed(timer, "get_advantages/ranks"):
            self._dispatch("write_advantages", shards, fields=estimator.reads, shared=[estimator])

    def _dispatch(
        self, method: str, shards: Sequence[KVBatchMeta], *, fields: Sequence[str], **options: Any
    ) -> list[Any]:
        """A stage of the meta ranks that reads `fields` of the rows."""
        for shard in shards:
            shard.fields = list(fields)
        return self._ranks.call_each(method, [(shard,) for shard in shards], with_meta=True, **options)

    def _shards(
        self, meta: KVBatchMeta, *, rows_per_update: int, micro_batch_size: int | None, stage: str
    ) -> list[KVBatchMeta]:
        """A meta a rank, cut as `_cut` cuts rows."""
        check_micro_batch_size(micro_batch_size)
        repeated = [name for name, count in Counter(meta.sample_ids).items() if count > 1]
        if repeated:
            raise ValueError(
                f"the meta names the samples {repeated[:5]} more than once; a row is trained and scored once"
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
        """Stamps the width that driver and ranks pad the step's rows to, and lengths where `meta` has none. Idempotent.

        A stamp that is too narrow for the rows grows. Rows whose lengths the data plane does not have are not stamped:
        they are read as wide as the longest of them.
        """
        if meta.sequence_lengths is None and meta.size:
            meta.sequence_lengths = self.dp_client.lengths_of(meta.sample_ids, meta.partition_id)
        if meta.sequence_lengths:
            stamped = meta.extra_info.get(PAD_SEQLEN, MIN_WIDTH)
            meta.extra_info[PAD_SEQLEN] = max([stamped, *meta.sequence_lengths])


def name_fields(meta: KVBatchMeta, names: Sequence[str] | Mapping[str, Any]) -> None:
    """The rows have these columns from now on."""
    meta.fields = list(dict.fromkeys([*(meta.fields or []), *names]))
