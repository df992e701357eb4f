"""Prepares the policy's objective before the first pass of a step: columns, token counts, and calibrated bounds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncrl.algorithms.baselines import reward_kl
from asyncrl.algorithms.calibration import StepTokens, calibrated, needs_calibration
from asyncrl.algorithms.interfaces import LossFunction
from asyncrl.algorithms.loss import ObjectiveLoss, build_loss
from asyncrl.algorithms.presets import advantage_of
from asyncrl.algorithms.shares import SHARES, TokenCounts, add_shares, count_tokens
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
    if isinstance(loss_fn, ObjectiveLoss):
        if needs_calibration(loss_fn.objective):
            return True
        if loss_fn.objective.proximal == "interpolated":
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


def calibrated_loss(
    loss_fn: LossFunction, updates: Sequence[PlannedUpdate], *, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> LossFunction:
    """Returns the loss with its bounds calibrated on the tokens of the whole step. A collective if it has such
    bounds."""
    if not (isinstance(loss_fn, ObjectiveLoss) and needs_calibration(loss_fn.objective)):
        return loss_fn
    return ObjectiveLoss(calibrated(loss_fn.objective, tokens=step_tokens(loss_fn, updates), reduce=reduce))


def step_tokens(loss_fn: ObjectiveLoss, updates: Sequence[PlannedUpdate]) -> StepTokens:
    """Returns the trained tokens of this rank's step, with the log-probs that the objective reads."""
    # empty micro-batches lack the loss's columns, and they have no trained token
    parts = [part for update in updates for part in update.parts if trained_mask(part).any()]

    def flat(column: str) -> torch.Tensor:
        return torch.cat([torch.zeros(0), *(part[column].cpu()[trained_mask(part)] for part in parts)])

    current = flat(CURRENT)
    sources = loss_fn.sources(flat, logprobs=current) | {"current": current}
    return StepTokens(advantages=flat("advantages"), sources=sources)
