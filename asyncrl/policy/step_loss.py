"""Prepares the policy's loss before the first pass of a step: columns, token counts, and statistics of the step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from asyncrl.algorithms.baselines import reward_kl
from asyncrl.algorithms.calibration import calibrated
from asyncrl.algorithms.interfaces import LossFunction, with_arguments
from asyncrl.algorithms.loss import SOURCE_COLUMNS, ObjectiveLoss, build_loss
from asyncrl.algorithms.presets import advantage_of
from asyncrl.algorithms.shares import SHARES, TokenCounts, add_shares, count_tokens
from asyncrl.algorithms.step_statistics import Reduce, StepTokens, statistics_of, step_numbers
from asyncrl.config.schema import Config
from asyncrl.data.specs import trained_mask
from asyncrl.ranks.plan import CURRENT, PlannedUpdate


def needs_reference(loss_fn: LossFunction) -> bool:
    """Returns True if the loss is an objective of asyncrl that reads `reference_policy_logprobs`. Returns False for
    other losses, of which this is not known."""
    return isinstance(loss_fn, ObjectiveLoss) and "reference" in loss_fn.objective.sources()


def holds_reference(config: Config) -> bool:
    """Returns True if the objective or the advantages of a configuration read log-probs under the initial weights, so
    that the ranks must keep these weights."""
    return needs_reference(build_loss(config)) or reward_kl(advantage_of(config.algorithm)) is not None


def needs_proximal(loss_fn: LossFunction, *, updates: int) -> bool:
    """Returns True if the log-probs at the step's start need a forward pass of their own, before the weights change."""
    if statistics_of(loss_fn):
        return True
    if isinstance(loss_fn, ObjectiveLoss) and loss_fn.objective.proximal == "interpolated":
        return False
    return updates > 1


def add_update_shares(
    loss_fn: LossFunction, updates: Sequence[PlannedUpdate], *, gather: Callable[[Any], list[Any]]
) -> None:
    """Adds to every micro-batch the coefficients that the loss reads as columns (`asyncrl.algorithms.shares`), from
    counts of its update over all ranks. A collective if the loss reads any of them."""
    if not (isinstance(loss_fn, ObjectiveLoss) and loss_fn.columns & set(SHARES)):
        return
    own = [sum(map(count_tokens, update.parts), TokenCounts()) for update in updates]
    ranks: list[list[TokenCounts]] = gather(own)
    for i, update in enumerate(updates):
        counts = sum((rank[i] for rank in ranks), TokenCounts())
        for part in update.parts:
            add_shares(part, counts)


def with_statistics(
    loss_fn: LossFunction,
    updates: Sequence[PlannedUpdate],
    *,
    reduce: Reduce,
    together: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> LossFunction:
    """Returns the loss with the numbers of the whole step that it declares: an objective with calibrated bounds, or a
    user's loss that gets them in the argument `statistics`. A collective if it declares any."""
    declared = statistics_of(loss_fn)
    if not declared:
        return loss_fn
    tokens = step_tokens(loss_fn, updates)
    if isinstance(loss_fn, ObjectiveLoss):
        return ObjectiveLoss(calibrated(loss_fn.objective, tokens=tokens, reduce=reduce))
    numbers = step_numbers(declared, tokens=tokens, reduce=reduce, together=together)
    found: LossFunction = with_arguments(loss_fn, statistics=numbers)
    return found


def step_tokens(loss_fn: LossFunction, updates: Sequence[PlannedUpdate]) -> StepTokens:
    """Returns the trained tokens of this rank's step, with the log-probs and the columns that the loss reads."""
    # empty micro-batches lack the loss's columns, and they have no trained token
    parts = [part for update in updates for part in update.parts if trained_mask(part).any()]

    def flat(name: str) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for part in parts:
            mask, column = trained_mask(part), part[name].cpu()
            found.append((column if column.ndim > 1 else column.unsqueeze(1).expand_as(mask))[mask.cpu()])
        return torch.cat(found) if found else torch.zeros(0)

    current, advantages = flat(CURRENT), flat("advantages")
    if isinstance(loss_fn, ObjectiveLoss):
        sources = loss_fn.sources(flat, logprobs=current) | {"current": current}
        return StepTokens(advantages=advantages, sources=sources)
    named = {*getattr(loss_fn, "columns", ())}
    sources = {name: flat(column) for name, column in SOURCE_COLUMNS.items() if column in named}
    columns = {name: flat(name) for name in named - {*SOURCE_COLUMNS.values()}}
    return StepTokens(
        advantages=advantages, sources=sources | {"current": current, "proximal": current}, columns=columns
    )
