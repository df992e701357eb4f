"""Plans a call: cuts rows into the parts of ranks, updates and micro-batches, and says which columns rows must have.

Invariant: in every update, all ranks run the same number of micro-batches, because their collectives must match.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction
from asyncrl.algorithms.loss import SOURCE_COLUMNS, ObjectiveLoss
from asyncrl.algorithms.step_statistics import statistics_of
from asyncrl.config.schema import LearnerSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.sharding import DynamicBatchingArgs, SequencePackingArgs, require
from asyncrl.data.specs import LP_SEED_FIELDS, trained_mask
from asyncrl.errors import MissingColumns
from asyncrl.ranks.batching import empty_micro_batch
from asyncrl.ranks.model_rows import MIN_WIDTH
from asyncrl.ranks.report import UpdatePlan, global_plan

CURRENT = SOURCE_COLUMNS["proximal"]
"""The column `prev_logprobs`: log-probs under the weights at the step's start. Before the step's first update, these
are the current weights, so that the training pass itself can compute the column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingPlan:
    """How rows share passes through the model.

    In mode `padded`, `rows` rows share a pass. In the modes `dynamic` and `packed`, rows with at most `tokens` tokens
    together share a pass.
    """

    mode: Literal["padded", "dynamic", "packed"]
    rows: int
    tokens: int

    @classmethod
    def of(cls, learner: LearnerSection, *, micro_batch_size: int | None = None) -> "BatchingPlan":
        """Returns the plan of `learner`. If `micro_batch_size` is given, that number of rows shares a pass.

        Raises AssertionError if `micro_batch_size` is below 1.
        """
        require(
            micro_batch_size is None or micro_batch_size > 0,
            f"micro_batch_size (mbs) is {micro_batch_size}; it must be at least 1",
        )
        if micro_batch_size is not None:
            return cls(mode="padded", rows=micro_batch_size, tokens=learner.micro_batch_tokens)
        return cls(mode=learner.batching, rows=learner.micro_batch_size, tokens=learner.micro_batch_tokens)

    @property
    def packing(self) -> SequencePackingArgs | None:
        """The arguments for packed rows, as a new dict; None in other modes.

        The limit of a micro-batch is the plan's `tokens`. The rows of a group are neighbours, and a pass computes their
        prompt once if they are in the same micro-batch. The limit counts the prompt with every row, so a pass computes
        at most `tokens` tokens.
        """
        if self.mode != "packed":
            return None
        return SequencePackingArgs(
            max_tokens_per_microbatch=self.tokens,
            input_key="input_ids",
            input_lengths_key="input_lengths",
            algorithm="neighbours_together",
            sequence_length_pad_multiple=1,
        )

    @property
    def dynamic(self) -> DynamicBatchingArgs | None:
        """The arguments for rows of similar lengths, as a new dict; None in other modes."""
        if self.mode != "dynamic":
            return None
        return DynamicBatchingArgs(
            max_tokens_per_microbatch=self.tokens,
            sequence_length_round=MIN_WIDTH,
            input_key="input_ids",
            input_lengths_key="input_lengths",
        )

    def sharding(self, rows: int, *, ranks: int, rows_per_update: int | None) -> dict[str, Any]:
        """Returns the arguments with which `shard_by_batch_size` cuts rows, or `shard_meta_for_dp` their names, for the
        ranks. Both cut in the same way.

        Shards are uneven if one update has all rows and the ranks cannot share them evenly.
        """
        if rows_per_update == rows and rows % ranks > 0:
            return {"allow_uneven_shards": True}
        return {
            "batch_size": rows_per_update,
            "sequence_packing_args": self.packing,
            "dynamic_batching_args": self.dynamic,
        }

    def cut(
        self, rows: BatchedDataDict, *, ranks: int, rows_per_update: int | None
    ) -> tuple[Sequence[BatchedDataDict], list[int] | None]:
        """Returns one shard for each rank, and the indices that restore the order of the rows (None: order is kept).
        Raises the errors of `asyncrl.data.sharding`."""
        found: Any = rows.shard_by_batch_size(
            ranks, **self.sharding(rows.size, ranks=ranks, rows_per_update=rows_per_update)
        )
        return found if isinstance(found, tuple) else (found, None)

    def updates(self, rows: BatchedDataDict, *, rows_per_update: int) -> list[list[BatchedDataDict]]:
        """Returns the micro-batches of every update of a rank's rows.

        If the driver has cut updates and micro-batches, its cut is used. Otherwise an update has `rows_per_update`
        rows.
        """
        if rows.micro_batch_indices is None:
            starts = range(0, rows.size, max(rows_per_update, 1))
            return [self.micro_batches(rows.slice(start, start + rows_per_update)) for start in starts]
        return [self._parts(rows.get_batch(i)) for i in range(len(rows.micro_batch_indices))]

    def number_of_updates(self, rows: BatchedDataDict, *, rows_per_update: int) -> int:
        """Returns the number of updates into which a rank's rows are cut."""
        if rows.elem_counts_per_gb is not None:
            return len(rows.elem_counts_per_gb)
        return -(-rows.size // max(rows_per_update, 1))

    def micro_batches(self, rows: BatchedDataDict) -> list[BatchedDataDict]:
        """Cuts the rows of one update into micro-batches. Padding beyond the longest row of a micro-batch is removed.

        In the modes `padded` and `dynamic`, the micro-batches with the longest rows come first: if one does not fit
        into memory, it fails at once.
        """
        if rows.size == 0:
            return []
        if self.mode == "padded":
            order = rows["input_lengths"].argsort(descending=True, stable=True)
            starts = range(0, rows.size, self.rows)
            parts = [rows.select_indices(order[start : start + self.rows]) for start in starts]
        else:
            [shard], _ = self.cut(rows, ranks=1, rows_per_update=None)
            parts = self._parts(shard)
            if self.mode == "dynamic":
                parts.reverse()
        for part in parts:
            part.truncate_tensors(1, max(int(part["input_lengths"].max()), MIN_WIDTH))
        return parts

    def _parts(self, update: BatchedDataDict) -> list[BatchedDataDict]:
        """Returns the micro-batches of an update whose rows store how they are cut into micro-batches."""
        if self.mode == "packed":
            return [*update.make_microbatch_iterator_for_packable_sequences()]
        return [*update.make_microbatch_iterator_with_dynamic_shapes()]


class PlannedUpdate(NamedTuple):
    """One optimizer update: the plan of all ranks together, and this rank's micro-batches."""

    plan: UpdatePlan
    parts: list[BatchedDataDict]


def planned_updates(
    cuts: Sequence[list[BatchedDataDict]], *, gather: Callable[[Any], list[Any]]
) -> list[PlannedUpdate]:
    """Returns the updates that all ranks run, from `cuts`, the micro-batches of each update on this rank. A rank with
    fewer micro-batches than others runs empty ones in addition. A collective."""
    own = [replace(global_plan([plan_of(part) for part in parts]), micro_batches=len(parts)) for parts in cuts]
    ranks: list[list[UpdatePlan]] = gather(own)
    updates = []
    for i in range(max(map(len, ranks))):
        plan = global_plan([rank[i] for rank in ranks if i < len(rank)])
        parts = cuts[i] if i < len(cuts) else []
        updates.append(
            PlannedUpdate(plan, [*parts, *(empty_micro_batch() for _ in range(plan.micro_batches - len(parts)))])
        )
    return updates


def plan_of(part: BatchedDataDict) -> UpdatePlan:
    """Returns the plan of one micro-batch. A trained sample with an empty completion counts as a sample with no
    tokens."""
    sample_mask_B = part["sample_mask"].double()
    return UpdatePlan(
        tokens=int(trained_mask(part).sum()),
        samples=int((sample_mask_B > 0).sum()),
        valid_toks=float((part["token_mask"][:, 1:].double() * sample_mask_B.unsqueeze(1)).sum()),
        valid_seqs=float(sample_mask_B.sum()),
        micro_batches=1,
    )


def required_columns(
    loss_fn: LossFunction | ValueLossFunction, *, updates: int, eval_mode: bool = False
) -> frozenset[str]:
    """Returns the columns that the rows need for training with `loss_fn`: `LP_SEED_FIELDS` (token ids, lengths,
    masks), and those that the loss names in `columns`.

    A call with one update or in eval mode does not need `prev_logprobs`, but computes them in its own pass, because the
    weights at its start are the current weights. With several updates, this is only true for the first one. A loss with
    statistics of the whole step (`statistics_of`) needs `prev_logprobs` in any case, because they are read before the
    pass. Such a loss and an `ObjectiveLoss` also need `advantages`. Raises TypeError if `columns` is a string.
    """
    columns = getattr(loss_fn, "columns", ())
    if isinstance(columns, str):
        raise TypeError(f"the loss's columns are the string {columns!r}; they must be a collection of names")
    needed = {*LP_SEED_FIELDS, *columns}
    if updates == 1 or eval_mode:
        needed.discard(CURRENT)
    statistics = statistics_of(loss_fn)
    if isinstance(loss_fn, ObjectiveLoss) or statistics:
        needed.add("advantages")
    if statistics:
        needed.add(CURRENT)
    return frozenset(needed)


def check_columns(present: Collection[str], needed: Collection[str], *, reader: str) -> None:
    """Raises MissingColumns if a column in `needed` is not present. The message names the missing columns and their
    `reader`."""
    missing = sorted({*needed} - {*present})
    if not missing:
        return
    hint = ""
    if CURRENT in missing:
        hint += f"; a call with several updates (gbs < rows) needs {CURRENT}: call get_logprobs() to compute it"
    if "staleness" in missing:
        hint += "; staleness is computed from weight_versions if the meta's extra_info has a step"
    raise MissingColumns(
        f"{reader} reads {', '.join(missing)}, but the rows do not have them; they have "
        f"{', '.join(sorted(present))}{hint}"
    )
