"""Plans a step: cuts this rank's rows into micro-batches, and computes what the objective needs before the first pass.

Invariant: in every update, all ranks run the same number of micro-batches, because their collectives must match.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from asyncrl.algorithms.calibration import StepTokens, calibrated, needs_calibration
from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction
from asyncrl.algorithms.loss import SOURCE_COLUMNS, ObjectiveLoss, interpolated_proximal
from asyncrl.algorithms.shares import SHARES, TokenCounts, add_shares, count_tokens
from asyncrl.config.schema import LearnerSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.masks import trained_mask
from asyncrl.data.specs import LP_SEED_FIELDS
from asyncrl.errors import MissingColumns
from asyncrl.policy.batching import count_trained, empty_micro_batch, micro_batches, valid_sums
from asyncrl.policy.step_report import UpdatePlan, global_plan

CURRENT = SOURCE_COLUMNS["proximal"]
"""Before the first gradient, the weights at the step's start are the current weights."""


class PlannedUpdate(NamedTuple):
    """One optimizer update: the plan of all ranks together, and this rank's micro-batches."""

    plan: UpdatePlan
    parts: list[BatchedDataDict]


def cut_updates(
    data: BatchedDataDict, learner: LearnerSection, *, rows_per_update: int, micro_batch_size: int | None = None
) -> list[list[BatchedDataDict]]:
    """Returns the micro-batches of every update of `data`, which are a rank's rows.

    If the driver has cut updates and micro-batches, its cut is used. Otherwise an update has `rows_per_update` rows.
    `learner` then says how rows share passes; if `micro_batch_size` is given, that number of rows shares a pass.
    """
    if data.micro_batch_indices is None:
        if micro_batch_size is not None:
            learner = learner.model_copy(update={"batching": "padded", "micro_batch_size": micro_batch_size})
        starts = range(0, data.size, max(rows_per_update, 1))
        return [micro_batches(data.slice(start, start + rows_per_update), learner) for start in starts]
    batches = [data.get_batch(i) for i in range(len(data.micro_batch_indices))]
    if learner.batching == "packed":
        return [[*batch.make_microbatch_iterator_for_packable_sequences()] for batch in batches]
    return [[*batch.make_microbatch_iterator_with_dynamic_shapes()] for batch in batches]


def planned_updates(
    cuts: Sequence[list[BatchedDataDict]], *, gather: Callable[[Any], list[Any]]
) -> list[PlannedUpdate]:
    """Returns the updates of all ranks. A rank with fewer micro-batches runs empty ones in addition. A collective."""
    own = []
    for parts in cuts:
        counts, sums = [count_trained(part) for part in parts], [valid_sums(part) for part in parts]
        own.append(
            UpdatePlan(
                tokens=sum(tokens for tokens, _ in counts),
                samples=sum(samples for _, samples in counts),
                valid_toks=sum(tokens for tokens, _ in sums),
                valid_seqs=sum(sequences for _, sequences in sums),
                micro_batches=len(parts),
            )
        )
    ranks: list[list[UpdatePlan]] = gather(own)
    updates = []
    for i in range(max(map(len, ranks))):
        plan = global_plan([rank[i] for rank in ranks if i < len(rank)])
        parts = cuts[i] if i < len(cuts) else []
        updates.append(
            PlannedUpdate(plan, [*parts, *(empty_micro_batch() for _ in range(plan.micro_batches - len(parts)))])
        )
    return updates


def required_columns(
    loss_fn: LossFunction | ValueLossFunction, *, updates: int, eval_mode: bool = False
) -> frozenset[str]:
    """Returns the columns that training with `loss_fn` reads, as far as the loss names them in `columns`.

    A call with one update computes `prev_logprobs` in its own pass, because the weights at its start are the current
    weights. With several updates, this is only true for the first one. A bound that is calibrated over the step also
    needs the column before the pass.
    """
    columns = getattr(loss_fn, "columns", ())
    if isinstance(columns, str):
        raise TypeError(f"the loss's columns are the string {columns!r}; they must be a collection of names")
    needed = {*LP_SEED_FIELDS, *columns}
    if updates == 1 or eval_mode:
        needed.discard(CURRENT)
    if isinstance(loss_fn, ObjectiveLoss):
        needed.add("advantages")
        if needs_calibration(loss_fn.objective):
            needed.add(CURRENT)
    return frozenset(needed)


def check_columns(present: Collection[str], needed: Collection[str], *, reader: str) -> None:
    """Raises MissingColumns, with `reader` and the columns, if a column in `needed` is not present."""
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


def needs_reference(loss_fn: LossFunction) -> bool:
    """Returns True if the loss reads `reference_policy_logprobs`. It can be known only for an objective of asyncrl."""
    return isinstance(loss_fn, ObjectiveLoss) and "reference" in loss_fn.objective.sources()


def needs_proximal(loss_fn: LossFunction, *, updates: int) -> bool:
    """Returns True if the log-probs at the step's start need a forward pass of their own, before the weights change."""
    if isinstance(loss_fn, ObjectiveLoss):
        if needs_calibration(loss_fn.objective):
            return True
        if loss_fn.objective.proximal == "interpolated":
            return False
    return updates > 1


def add_update_shares(
    loss_fn: LossFunction, updates: Sequence[PlannedUpdate], *, gather: Callable[[Any], list[Any]]
) -> None:
    """Adds the columns of `asyncrl.algorithms.shares` that the loss reads to every micro-batch, from counts of its
    update over all ranks. A collective if the loss reads any of them."""
    if not (isinstance(loss_fn, ObjectiveLoss) and loss_fn.columns & set(SHARES)):
        return
    own = [sum(map(count_tokens, update.parts), TokenCounts()) for update in updates]
    ranks: list[list[TokenCounts]] = gather(own)
    for i, update in enumerate(updates):
        counts = sum((rank[i] for rank in ranks), TokenCounts())
        for part in update.parts:
            add_shares(part, counts)


def calibrated_loss(
    loss_fn: LossFunction, updates: Sequence[PlannedUpdate], *, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> LossFunction:
    """Returns the loss with its bounds calibrated on the tokens of the whole step. A collective if it has such
    bounds."""
    if not (isinstance(loss_fn, ObjectiveLoss) and needs_calibration(loss_fn.objective)):
        return loss_fn
    # empty micro-batches lack the loss's columns, and they have no trained token
    parts = [part for update in updates for part in update.parts if trained_mask(part).any()]

    def flat(column: str) -> torch.Tensor:
        return torch.cat([torch.zeros(0), *(part[column].cpu()[trained_mask(part)] for part in parts)])

    objective = loss_fn.objective
    sources = {name: flat(column) for name, column in SOURCE_COLUMNS.items() if column in loss_fn.columns}
    sources["current"] = flat(CURRENT)
    if objective.proximal == "interpolated":
        sources["proximal"] = interpolated_proximal(
            logprobs_BT=sources["current"], behaviour_BT=sources["behaviour"], staleness_BT=flat("staleness")
        )
    tokens = StepTokens(advantages=flat("advantages"), sources=sources)
    return ObjectiveLoss(calibrated(objective, tokens=tokens, reduce=reduce))
