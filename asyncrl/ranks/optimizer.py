"""The optimizer of a rank."""

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
