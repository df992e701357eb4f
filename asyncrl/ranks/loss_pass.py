"""The part of a micro-batch's pass that does not depend on the model: from the loss to a gradient and metrics.

A loss is first differentiated only with respect to the model's outputs. The model's backward pass needs nothing but
these derivatives (slopes), and a loss that fails does not interrupt the collectives of that pass.

Legend: B rows, S tokens, T = S − 1 next tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch

from asyncrl.algorithms.diagnostics import MetricSums
from asyncrl.algorithms.interfaces import LossFunction, ValueLossFunction
from asyncrl.errors import LossFailed
from asyncrl.ranks.out_of_memory import is_out_of_memory
from asyncrl.ranks.witnessed import Watched
from asyncrl.user_code import describe_error

LossT = TypeVar("LossT", LossFunction, ValueLossFunction)
"""Type of the losses with which a model is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContext(Generic[LossT]):
    """The arguments that all passes of one update share.

    `counts` are the update's `global_valid_seqs` and `global_valid_toks`. `step` is the version of the weights; without
    it, no token counts as on-policy. `sole_update` is True in eval mode and if the step has only this update: the
    weights are then those of the step's start. `watched` notes what the passes do with the rows that the witness
    computes again; None if the step is not witnessed.
    """

    loss_fn: LossT
    counts: Mapping[str, torch.Tensor]
    step: int | None
    sole_update: bool
    watched: Watched | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchOutcome:
    """The result of one micro-batch.

    `differentiable` is a scalar whose gradient with respect to the weights is the loss's gradient. Its value may differ
    from the loss. If the loss failed, `failure` is set and this gradient is 0.
    """

    differentiable: torch.Tensor
    loss: float = 0.0
    sums: MetricSums = field(default_factory=MetricSums)
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: LossFailed | None = None


def checked_loss(returned: object) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns a loss's result with metrics as floats. Raises TypeError unless it is a scalar tensor and a dict of
    numbers."""
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(f"a loss must return (scalar, metrics), but this one returned a {type(returned).__name__}")
    loss, metrics = returned
    if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and isinstance(metrics, Mapping)):
        found = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(
            f"a loss must return a scalar tensor and a dict, but this one returned {found} and {type(metrics).__name__}"
        )
    return loss.squeeze(), {str(name): float(value) for name, value in metrics.items()}


def outcome_of(
    outputs: Mapping[str, torch.Tensor],
    loss: Callable[..., object],
    *,
    measure: Callable[[dict[str, torch.Tensor]], MetricSums] = lambda slopes: MetricSums(),
) -> MicroBatchOutcome:
    """Differentiates a loss with respect to the model's outputs, also in eval mode.

    `loss` gets copies of the outputs without their graph as keyword arguments, so a loss that fails never reaches the
    model. `measure` gets the derivatives of the loss (slopes) by the outputs' names, and returns measurements. An error
    of either becomes the outcome's failure, except a lack of memory: that is raised, as everywhere else in the pass.
    """
    leaves = {name: output.detach().requires_grad_() for name, output in outputs.items()}
    try:
        with torch.enable_grad():
            scalar, metrics = checked_loss(loss(**leaves))
            slopes = slopes_of(scalar, *leaves.values())
            value = float(scalar.detach())
        sums = measure(dict(zip(leaves, slopes, strict=True)))
    except Exception as error:
        if is_out_of_memory(error):
            # The batch is too large, and the loss has no fault. The driver ends all ranks and gives the advice (F26).
            raise
        failure = LossFailed(f"the loss failed: {describe_error(error)}")
        return MicroBatchOutcome(differentiable=without_slopes(*outputs.values()), failure=failure)
    parts = [with_slopes(output, slope) for output, slope in zip(outputs.values(), slopes, strict=True)]
    return MicroBatchOutcome(differentiable=torch.stack(parts).sum(), loss=value, sums=sums, metrics=metrics)


def without_slopes(*outputs: torch.Tensor) -> torch.Tensor:
    """Returns a scalar whose gradient is 0. It keeps the graph of the outputs, so that FSDP's hooks and collectives run
    as on the other ranks."""
    return 0.0 * torch.stack([output.sum() for output in outputs]).sum()


def aligned(logprobs_BT: torch.Tensor) -> torch.Tensor:
    """Returns [B, S] from [B, S − 1]: entry i belongs to token i, and entry 0 is 0."""
    return torch.nn.functional.pad(logprobs_BT, (1, 0))


def slopes_of(loss: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns ∂loss/∂leaf for each leaf; zeros for a leaf that the loss does not read."""
    if not loss.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def with_slopes(tensor: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """Returns a scalar 0 whose gradient with respect to `tensor` is `slopes`.

    Σ tensor · slopes would have the same gradient, but its product would be another copy of the logits in memory.
    """
    return cast(torch.Tensor, _WithSlopes.apply(tensor, slopes))  # type: ignore[no-untyped-call]


class _WithSlopes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slopes)
        return slopes.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slopes,) = ctx.saved_tensors
        return grads[0] * slopes, None
