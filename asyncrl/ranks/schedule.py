"""The learning rate of a step. It is a function of the step's number and the settings only, so a resumed run needs only
that number to continue the schedule. Does not import torch."""

import math

from asyncrl.config.schema import OptimizerSection


def learning_rate(section: OptimizerSection, *, step: int, total_steps: int) -> float:
    """Returns the learning rate of a step from 0 to total_steps − 1. After a linear warm-up, it is constant, or falls
    linearly or as a cosine to `final_fraction` of its peak at the last step.

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
