"""The axes of the one off-policy objective, as data. Torch-free: `asyncrl config check` reads them in milliseconds.

    L = Σ_t a_t · W_t · S(u_t, A_t, lp_t)        u = e^(lp − prox),  ρ = e^(prox − beh)

lp is the differentiable log-prob, prox the one under the weights at the start of the step, beh the one that the
sampler recorded. S is the surrogate, the only place where the gradient's shape is decided; W the detached importance
weight ρ, bounded; a the aggregation, always from counts over the whole step and all ranks.

Bounds are ratio bounds (0.8, 1.28, inf), never an ε whose meaning depends on the algorithm. `loss.py` has the tensors,
`presets.py` the published algorithms as rows of data.
"""

import math
from enum import StrEnum
from typing import Literal

import msgspec


class Reinforce(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reinforce", tag_field="kind"):
    """S = −A · lp (Williams 1992): no ratio, no clip."""


class Clipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="clipped", tag_field="kind", kw_only=True):
    """S = max(−A · u, −A · clamp(u, lo, hi)), the PPO clip (1707.06347).

    `dual` bounds S by −dual · A where A < 0 (1912.09729), or a sample that the policy has come to like much more
    than it did would dominate the step.
    """

    lo: float = 0.8
    hi: float = 1.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.lo <= 1 <= self.hi:
            raise ValueError(f"clip bounds are ratios with 0 ≤ lo ≤ 1 ≤ hi, got lo={self.lo}, hi={self.hi}")
        if self.dual is not None and not self.dual >= self.hi:
            raise ValueError(f"dual is a ratio of at least hi={self.hi}, got {self.dual}")


class Weight(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The detached importance weight ρ = prox/beh of a token. Outside [lo, hi] it is clamped, or the token's loss is
    zeroed; either way the token stays in every denominator."""

    lo: float = 0.0
    hi: float = math.inf
    outside: Literal["clamp", "zero"] = "clamp"

    def __post_init__(self) -> None:
        # 1 must lie inside, so that on-policy tokens keep weight 1; equal bounds would make the correction inert
        if not (0 <= self.lo <= 1 <= self.hi and self.lo < self.hi):
            raise ValueError(f"weight bounds are ratios with 0 ≤ lo ≤ 1 ≤ hi, lo < hi, got lo={self.lo}, hi={self.hi}")


class Aggregation(StrEnum):
    """How token losses become one number. T: trained tokens of the whole step, N: its trained sequences."""

    TOKEN_MEAN = "token_mean"
    """Σ tokens / T."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over each sequence's own tokens, then Σ sequences / N."""
    SEQUENCE_SUM = "sequence_sum"
    """Σ tokens / N."""


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One choice on every axis."""

    surrogate: Reinforce | Clipped
    weight: Weight | None = None
    aggregation: Aggregation = Aggregation.TOKEN_MEAN


def is_corrected(objective: Objective) -> bool:
    """Whether the objective corrects for samples of older weights, so that η > 0 is sound.

    The clip does not count: its ratio is to the weights at the step's start, and with one update a step it is 1.
    """
    return objective.weight is not None
