"""AdamW, the clipping of gradients and the schedule of the learning rate, by their formulas, for single elements."""

import math
from typing import NamedTuple

from asyncrl.config.schema import OptimizerSection

RELATIVE = 1e-3
"""Accepted difference of the change of a weight in a step, as a share of the change. The rounding of moments in float32
makes a difference of 1e-6, and up to 1e-4 for moments near 0."""
ROUNDINGS = 2
"""Accepted difference of a new value, in units of the rounding of float32 at this value."""


class Element(NamedTuple):
    """One number of a weight before an optimizer's step: its value, its gradient before the clipping, its two moments,
    and the number of steps that made these."""

    value: float
    gradient: float
    first: float
    second: float
    steps: int


def rate_of_step(settings: OptimizerSection, *, step: int, total_steps: int) -> float:
    """Returns the learning rate of step 0, 1, …: it rises linearly over the warm-up, and then falls from its peak to
    `final_fraction` of the peak at the last step, linearly or as half a cosine, or stays at the peak."""
    peak = settings.learning_rate
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    steps_of_fall = max(1, total_steps - 1 - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / steps_of_fall)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[settings.schedule]
    lowest = peak if settings.schedule == "constant" else peak * settings.final_fraction
    return lowest + (peak - lowest) * left


def stepped(element: Element, settings: OptimizerSection, *, rate: float, norm: float) -> float:
    """Returns the value of an element after a step of AdamW (1711.05101) with the learning rate `rate`. `norm` is that
    of all gradients together. If it is larger than `max_grad_norm`, all gradients are scaled down to this limit."""
    (first_decay, second_decay), t = settings.betas, element.steps + 1
    gradient = element.gradient * min(1.0, settings.max_grad_norm / (norm + 1e-6))
    first = first_decay * element.first + (1 - first_decay) * gradient
    second = second_decay * element.second + (1 - second_decay) * gradient**2
    direction = (first / (1 - first_decay**t)) / (math.sqrt(second / (1 - second_decay**t)) + settings.eps)
    return element.value - rate * settings.weight_decay * element.value - rate * direction


def difference(element: Element, expected: float, found: float, *, rate: float) -> float:
    """Returns the difference of a new value from the expected one, divided by the accepted difference. AdamW usually
    changes a value by about `rate`. So the accepted difference is at least the rounding of a number of this size: where
    a gradient cancels the first moment, the change of a value near 0 is smaller than this rounding."""
    rounding = ROUNDINGS * 2**-23 * max(abs(element.value), abs(expected), rate, 2**-126)
    return abs(found - expected) / (RELATIVE * abs(expected - element.value) + rounding)
