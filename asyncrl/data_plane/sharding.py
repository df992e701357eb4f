"""Decides which data-parallel rank takes which rows, from their lengths. It touches no rows.

The cut is the same as that of `BatchedDataDict.shard_by_batch_size`, because both call the same functions. Each shard
carries its cut in `extra_info`, and ranks use it unchecked: `micro_batch_indices`, `micro_batch_lengths` and
`elem_counts_per_gb` have the same meaning as the attributes of a cut batch.
"""

from asyncrl.data.sharding import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    ShardPlan,
    caller_rows,
    plan_shards,
)
from asyncrl.data_plane.interfaces import CUT_KEYS, PAD_SEQLEN, KVBatchMeta


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
    sequence_packing_args: SequencePackingArgs | None = None,
    dynamic_batching_args: DynamicBatchingArgs | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """Returns a meta for each rank, and the indices with which `reorder_data` restores the caller's order of the
    concatenated results. The indices are None if the order did not change.

    Rows keep their tags and lengths. Each chunk of `batch_size` rows is divided among all ranks by itself; None: all
    rows are one chunk. `allow_uneven_shards` is for a cut without micro-batches: the last shards may have fewer rows or
    none. Raises ValueError for an empty meta, for missing lengths, and for both kinds of args together. Other arguments
    that do not fit raise the errors of `asyncrl.data.sharding`.
    """
    if meta.size == 0:
        raise ValueError("shard_meta_for_dp: the meta names no rows; there is nothing to divide among the ranks")
    if meta.sequence_lengths is None:
        raise ValueError(
            f"shard_meta_for_dp: the meta of {meta.size} rows has no sequence_lengths, which decide the cut; put "
            "input_lengths with the rows"
        )
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise ValueError("shard_meta_for_dp: sequence_packing_args and dynamic_batching_args exclude each other")
    lengths: list[int] = meta.sequence_lengths
    plans = plan_shards(
        meta.size,
        shards=dp_world,
        lengths=lambda _: lengths,
        width=lambda _: meta.extra_info.get(PAD_SEQLEN) or max(lengths),  # rows are padded to the stamped width
        batch_size=batch_size,
        allow_uneven_shards=allow_uneven_shards,
        dynamic=dynamic_batching_args,
        packing=sequence_packing_args,
    )
    order = caller_rows(plans)
    return [_shard(meta, plan) for plan in plans], None if order == list(range(meta.size)) else order


def _shard(meta: KVBatchMeta, plan: ShardPlan) -> KVBatchMeta:
    shard = meta.subset(plan.rows)
    for key in CUT_KEYS:
        shard.extra_info.pop(key, None)  # the meta may be a shard of an earlier cut, and still have its plan

    shard.extra_info["elem_counts_per_gb"] = list(plan.rows_per_chunk)
    if plan.micro_batch_indices is not None:
        shard.extra_info["micro_batch_indices"] = plan.micro_batch_indices
        shard.extra_info["micro_batch_lengths"] = plan.micro_batch_lengths
    return shard
