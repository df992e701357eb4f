"""The optimizer of a rank, and its learning rate. The rate is a function of the step only, so a resumed run needs no
state to continue it."""

import math

import torch

from asyncrl.config.schema import OptimizerSection


def adamw(model: torch.nn.Module, section: OptimizerSection, *, device: torch.device) -> torch.optim.AdamW:
    """Returns AdamW for the parameters of the model that are trained, with the settings of the section.

    `device` is where the parameters will be when the optimizer steps. They need not be there yet: a rank loads its
    model on the CPU and makes the optimizer before accelerate moves both. On a GPU, AdamW is one kernel, which takes
    0.42 to 0.44 times the time (docs/gpu.md). On a CPU it is torch's default, a loop over the parameters.

    A checkpoint has no hyperparameters (`asyncrl.ranks.checkpoint`), so a load does not change this choice.
    """
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        fused=True if device.type == "cuda" else None,
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
    )


def learning_rate(section: OptimizerSection, *, step: int, total_steps: int) -> float:
    """Returns the rate of a step from 0 to total_steps − 1: linear warm-up, then the schedule down to `final_fraction`
    at the last step.

    >>> section = OptimizerSection(learning_rate=1.0, schedule="linear", final_fraction=0.5, warmup_steps=2)
    >>> [learning_rate(section, step=step, total_steps=5) for step in range(5)]
    [0.5, 1.0, 1.0, 0.75, 0.5]
    """
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    progress = min(1.0, (step - section.warmup_steps) / max(1, total_steps - 1 - section.warmup_steps))
    match section.schedule:
        case "constant":
            return section.learning_rate
        case "linear":
            remaining = 1.0 - progress
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.learning_rate * (section.final_fraction + (1.0 - section.final_fraction) * remaining)
