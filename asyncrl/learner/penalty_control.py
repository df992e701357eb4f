"""The loss of each step. It equals the loss of the step before, except for the β of a penalty with `control`, which
follows the KL.

The β of a step depends on recorded numbers of earlier steps only. The learner's process computes it and sends it to the
ranks with the loss, so it is equal on all ranks and for all micro-batches. The records of all steps before a checkpoint
are on the disk before it is written, so a resumed run computes the same β from the last record. Only the checkpoint at
the end of a run whose disk is full may have later steps than the records (F27): β then goes on from an older step.
"""

import logging
from collections.abc import Mapping

from asyncrl.algorithms.calibration import after_step, with_beta
from asyncrl.algorithms.interfaces import LossFunction
from asyncrl.algorithms.loss import ObjectiveLoss, build_loss
from asyncrl.config.schema import Config
from asyncrl.learner.records import StepRecord

logger = logging.getLogger(__name__)


def first_loss(config: Config, before: StepRecord | None = None) -> LossFunction:
    """Returns the loss of the first step after a start of the learner. `before` is the last record of a resumed run. A
    run whose records have no β, because `control` is new, begins with the configured β."""
    loss = build_loss(config)
    if before is None or not isinstance(loss, ObjectiveLoss) or loss.objective.controlled() is None:
        return loss
    if (beta := before.number("penalty_beta")) is None:
        return loss
    resumed = ObjectiveLoss(with_beta(loss.objective, beta))
    logger.info(
        "the penalty with control goes on from β = %.6g of step %d, not from the configured one", beta, before.step
    )
    return next_loss(resumed, before.kl_nats, step=before.step, config=config)


def next_loss(loss: LossFunction, kl_nats: Mapping[str, float], *, step: int, config: Config) -> LossFunction:
    """Returns the loss of the step after `step`. `kl_nats` has the KL of `step`, by the name of the other policy. A
    step that trains only the critic does not change the loss."""
    only_critic = config.critic is not None and step < config.critic.warmup_steps
    if only_critic or not isinstance(loss, ObjectiveLoss):
        return loss
    return ObjectiveLoss(after_step(loss.objective, kl_nats))
