"""Which data-parallel rank takes which rows, decided from lengths alone. No rows are touched.

The cut is that of `BatchedDataDict.shard_by_batch_size`: both call the same functions. It travels in each shard's
`extra_info`, and ranks trust it: `micro_batch_indices`, `micro_batch_lengths` and `elem_counts_per_gb` are what the
attributes of those names are on a cut batch.
"""

from collections.abc import Sequence
from typing import Any

from asyncrl.data.sharding import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    ShardPlan,
    caller_rows,
    check_modes,
    plan_dynamic,
    plan_even,
    plan_packed,
    plan_uneven,
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
    """A meta a rank, and the indices with which `reorder_data` restores the caller's order of concatenated results.

    The indices are None when that order was kept. Rows keep their tags and lengths. `allow_uneven_shards` is for a
    plain cut: later shards may be short or empty. ValueError for an empty meta, for lengths that are missing, and for
    both kinds of args; what else does not fit is an error of `asyncrl.data.sharding`.
    """
    if meta.size == 0:
        raise ValueError("shard_meta_for_dp: the meta names no rows")
    if meta.sequence_lengths is None:
        raise ValueError(f"shard_meta_for_dp: the meta of {meta.size} rows has no sequence_lengths to cut by")
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise ValueError("shard_meta_for_dp: sequence_packing_args and dynamic_batching_args exclude each other")
    check_modes(
        batch_size=batch_size,
        allow_uneven_shards=allow_uneven_shards,
        dynamic=dynamic_batching_args is not None,
        packed=sequence_packing_args is not None,
    )
    lengths = meta.sequence_lengths
    if sequence_packing_args is not None:
        plans = plan_packed(
            lengths,
            shards=dp_world,
            args=sequence_packing_args,
            batch_size=batch_size,
            allow_uneven_shards=allow_uneven_shards,
        )
    elif dynamic_batching_args is not None:
        plans = plan_dynamic(
            lengths,
            shards=dp_world,
            args=dynamic_batching_args,
            batch_size=batch_size,
            width=_width(meta.extra_info, lengths),
        )
    elif allow_uneven_shards:
        plans = plan_uneven(meta.size, shards=dp_world)
    else:
        plans = plan_even(meta.size, shards=dp_world, batch_size=batch_size)
    order = caller_rows(plans)
    return [_shard(meta, plan) for plan in plans], None if order == list(range(meta.size)) else order


def _width(extra_info: dict[str, Any], lengths: Sequence[int]) -> int:
    """Width that the rows will be padded to: of the input, as far as a micro-batch can be wide."""
    stamped: int | None = extra_info.get(PAD_SEQLEN)
    return max(lengths) if stamped is None else stamped


def _shard(meta: KVBatchMeta, plan: ShardPlan) -> KVBatchMeta:
    shard = meta.subset(plan.rows)
    for key in CUT_KEYS:
        shard.extra_info.pop(key, None)  # of an earlier cut of the same rows
    shard.extra_info["elem_counts_per_gb"] = list(plan.rows_per_chunk)
    if plan.micro_batch_indices is not None:
        shard.extra_info["micro_batch_indices"] = plan.micro_batch_indices
        shard.extra_info["micro_batch_lengths"] = plan.micro_batch_lengths
    return shard
