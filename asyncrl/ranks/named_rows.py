"""Rows by name: the driver handles only the rows' names, and the ranks fetch the rows and write columns back.

Invariants: the driver divides the names among the ranks exactly as it would divide the rows (`BatchingPlan.cut`).
Either all ranks get their rows, or the call fails on all ranks (F37 in docs/faults.md). A token that is older than
the limit in its row's tags is never trained: it is masked in rows with the tag `MASKS_STALE`, and an error in others.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.codec import encode
from asyncrl.data_plane.interfaces import PAD_SEQLEN, KVBatchMeta
from asyncrl.data_plane.rows import Rows, open_client
from asyncrl.data_plane.sharding import shard_meta_for_dp
from asyncrl.errors import CallRefused, MissingColumns
from asyncrl.ranks.batching import check_token_staleness, without_stale
from asyncrl.ranks.collectives import Collectives
from asyncrl.ranks.model_rows import MIN_WIDTH
from asyncrl.ranks.plan import BatchingPlan, check_columns

STEP = "step"
"""Key in `extra_info`: the version of the weights that are trained with the rows."""
LIMIT = "max_staleness_versions"
"""Key in a row's tags: the staleness limit η of the ticket with which its group was generated, in versions."""
MASKS_STALE = "masks_stale_tokens"
"""Key in a row's tags: if it is True, tokens beyond the limit are masked from the loss and are no error."""


def write_columns(rows: Rows, meta: KVBatchMeta, columns: Mapping[str, Any]) -> None:
    """Adds columns to the rows and records them in `meta`. Columns are [B] or [B, S]. If `meta` has the lengths of the
    rows, padding is not sent."""
    fields = encode(columns, lengths=meta.sequence_lengths)
    rows.patiently(lambda client: client.put_samples(meta.sample_ids, meta.partition_id, fields=fields))
    name_fields(meta, fields)


def name_fields(meta: KVBatchMeta, names: Iterable[str]) -> None:
    """Records in `meta` that the rows have these columns."""
    meta.fields = list(dict.fromkeys([*(meta.fields or []), *names]))


def look_up_lengths(rows: Rows, meta: KVBatchMeta) -> None:
    """Sets the lengths of the rows in `meta` if it has none and the data plane knows them."""
    if meta.sequence_lengths is None and meta.size:
        meta.sequence_lengths = rows.patiently(lambda client: client.lengths_of(meta.sample_ids, meta.partition_id))


def stamp_width(rows: Rows, meta: KVBatchMeta) -> None:
    """Writes into `meta.extra_info` the width (the stamp) to which driver and ranks pad the step's rows. Also sets the
    lengths if `meta` has none.

    Idempotent. It replaces a stamp that is too narrow for the rows by a larger one. If the data plane does not know the
    rows' lengths, it sets no stamp. Without a stamp, rows that are read are as wide as the longest of them.
    """
    look_up_lengths(rows, meta)
    if meta.sequence_lengths:
        stamped = meta.extra_info.get(PAD_SEQLEN, MIN_WIDTH)
        meta.extra_info[PAD_SEQLEN] = max([stamped, *meta.sequence_lengths])


class NamedRows:
    """The rows of one call, which `meta` names. The ranks fetch their columns `fields`.

    `writes` maps columns of the ranks' results to the names under which the ranks write them to the data plane.
    """

    def __init__(
        self, meta: KVBatchMeta, rows: Rows, fields: Sequence[str], writes: Mapping[str, str] | None = None
    ) -> None:
        self.meta = meta
        self.size = meta.size
        self.step: int | None = meta.extra_info.get(STEP)
        self.writes = writes or {}
        self._rows = rows
        self._fields = fields

    def require(self, needed: Collection[str]) -> None:
        """Makes the ranks fetch the columns that training needs: those that the meta names, those that the loss needs
        (`needed`), and those of the constructor's `fields` that the rows have. Raises MissingColumns if the rows lack a
        column of the first two kinds. If the meta has a `STEP`, raises CallRefused unless it is an int and all rows
        have a `LIMIT` in their tags."""
        meta, needed = self.meta, set(needed)
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
        present = self._rows.patiently(lambda client: client.fields_of(meta.sample_ids, meta.partition_id))
        if present is None:
            present = {name for name in {*named, *self._fields} if self._has_field(name)}
        check_columns(present, named, reader="training")
        self._fields = list(dict.fromkeys([*named, *(name for name in self._fields if name in present)]))

    def _has_field(self, name: str) -> bool:
        """Returns True if the first row has a field, by reading it. Used if the client's `fields_of` returns None."""
        first, partition = self.meta.sample_ids[:1], self.meta.partition_id
        try:
            self._rows.patiently(lambda client: client.get_samples(first, partition, [name]))
        except KeyError:
            return False
        return True

    def cut(self, plan: BatchingPlan, *, ranks: int, rows_per_update: int | None) -> Sequence[KVBatchMeta]:
        """Returns one meta for each rank. Without `rows_per_update`, all rows are one update. Raises ValueError if the
        meta names a sample more than once."""
        repeated = [name for name, count in Counter(self.meta.sample_ids).items() if count > 1]
        if repeated:
            raise ValueError(
                f"the meta names the samples {repeated[:5]} more than once, but a row can be trained or scored only "
                "once in a call; remove the repeated names"
            )
        stamp_width(self._rows, self.meta)
        rows = self.size if rows_per_update is None else rows_per_update
        cut = plan.sharding(self.size, ranks=ranks, rows_per_update=rows)
        shards, _ = shard_meta_for_dp(self.meta, dp_world=ranks, **cut)
        for shard in shards:
            shard.fields = list(self._fields)
        return shards


class FetchedRows:
    """A rank's access to named rows. Every method is a collective. `meta` names this rank's rows; it may name none.

    If rows of a rank are lost because the process that stored them has ended, RowsLost is raised on all ranks, with the
    lost rows of all ranks. MissingColumns is raised for rows or columns that were never written, or were cleared.
    """

    def __init__(self, ranks: Collectives, config: Config) -> None:
        self._ranks = ranks
        self._rows = Rows(config, client=open_client(config))

    def fetch(self, meta: KVBatchMeta, *, step: int | None = None) -> BatchedDataDict:
        """Returns this rank's rows, with the cut into updates and micro-batches that the driver made. With a `step`, it
        masks tokens that are older than the limit in their row's tags if the tags say so (`MASKS_STALE`), and raises
        StalenessViolation for them otherwise."""
        data = BatchedDataDict()
        with self._ranks.together():
            if meta.size:
                try:
                    data = self._rows.patiently(lambda client: client.get_data(meta, meta.fields or []))
                except KeyError as error:
                    raise MissingColumns(
                        f"the rows do not have all of {meta.fields}: {error.args[0]}; write the missing columns first"
                    ) from error
            if step is not None:
                limits = [tags[LIMIT] for tags in meta.tags or []]
                data = without_stale(
                    data, step=step, limits=limits, masks=[tags.get(MASKS_STALE, False) for tags in meta.tags or []]
                )
                check_token_staleness(data, step=step, limits=limits, sample_ids=meta.sample_ids)
        data.micro_batch_indices = meta.extra_info.get("micro_batch_indices")
        data.micro_batch_lengths = meta.extra_info.get("micro_batch_lengths")
        data.elem_counts_per_gb = meta.extra_info.get("elem_counts_per_gb")
        return data

    def write(self, meta: KVBatchMeta, columns: Mapping[str, Any]) -> None:
        """Adds columns to this rank's rows on the data plane."""
        with self._ranks.together():
            if meta.size:
                write_columns(self._rows, meta, columns)
