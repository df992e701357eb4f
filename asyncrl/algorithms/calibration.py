"""Bounds of an objective that depend on a statistic of the whole step, such as M2PO's threshold.

They are computed once a step, before the first gradient. All ranks get the same values.

The effective share of the tokens, (Σρ)² / (N · Σρ²) of N ratios ρ, is computed directly. For a gate's `budget` and a
weight's `min_ess`, a search finds the largest bound for which a condition on a mean or a share holds. The condition
holds for small bounds and fails for large ones. The search evaluates the condition on a grid of bounds and refines the
grid a few times. Each round sums a few numbers for each grid point over the ranks. Ranks do not exchange tokens.
"""

import math
from collections.abc import Callable, Sequence

import msgspec
import torch

from asyncrl.algorithms.diagnostics import MAX_FLOAT64_LOG_RATIO
from asyncrl.algorithms.objective import Clamp, Gamma, Gate, Inverse, Objective, Weight, Weighted, reads_effective_share
from asyncrl.algorithms.token_terms import acts_on

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Returns the sum of a small tensor over all ranks."""

# four rounds of 64 intervals narrow the range from 1e-12 to 1e18 to a relative precision of 4e-6
_GRID, _ROUNDS = 64, 4
_SMALLEST, _LARGEST = 1e-12, 1e18


class StepTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The trained tokens of one rank's step, flattened: their advantages, and their log-probs by the policy's name.

    Before the first gradient, the current policy equals the recomputed proximal policy. It differs from an interpolated
    proximal policy.
    """

    sources: dict[str, torch.Tensor]
    advantages: torch.Tensor

    def log_ratio(self, p: str, q: str) -> torch.Tensor:
        """Returns log p − log q of every token, float64."""
        return self.sources[p].double() - self.sources[q].double()

    def bounded_ratio(self, p: str, q: str) -> torch.Tensor:
        """Returns p/q of every token, float64, so bounded that the square of a ratio fits float64."""
        return self.log_ratio(p, q).clamp(-MAX_FLOAT64_LOG_RATIO, MAX_FLOAT64_LOG_RATIO).exp()


def needs_calibration(objective: Objective) -> bool:
    """Returns True if the objective has a bound or a penalty that depends on a statistic of the whole step."""
    weight = objective.weight
    return (
        any(gate.budget is not None for gate in objective.gates)
        or (weight is not None and weight.min_ess is not None)
        or reads_effective_share(objective)
    )


def calibrated(objective: Objective, *, tokens: StepTokens, reduce: Reduce) -> Objective:
    """Returns the configured `objective`, with the bounds and the β of penalties that depend on the tokens of this step
    filled in. They are equal on all ranks."""
    weight = objective.weight
    if weight is not None and weight.min_ess is not None:
        weight = _capped(weight, tokens=tokens, reduce=reduce)
    gates = tuple(
        gate if gate.budget is None else _budgeted(gate, tokens=tokens, reduce=reduce) for gate in objective.gates
    )
    objective = msgspec.structs.replace(objective, weight=weight, gates=gates)
    if reads_effective_share(objective):
        return _with_share(objective, share=_effective_share(tokens, reduce=reduce))
    return objective


def _effective_share(tokens: StepTokens, *, reduce: Reduce) -> float:
    """Returns e = (Σρ)² / (N · Σρ²) of ρ = current/behaviour over the tokens of all ranks; 1 if there are none."""
    ratio = tokens.bounded_ratio("current", "behaviour")
    sums = torch.stack([ratio.sum(), ratio.square().sum(), torch.tensor(float(ratio.numel()), dtype=torch.float64)])
    first, second, count = reduce(sums).tolist()
    return min(1.0, first**2 / (count * second)) if count else 1.0


def _with_share(objective: Objective, *, share: float) -> Objective:
    """Returns the objective with the effective share e filled in: as the cap of kernels with `ess`, and in the
    β · (1 − e) of penalties with `ess`. Such a penalty is removed if e is 1, because its β would be 0."""

    def capped(kernel: Clamp | Inverse | Gamma) -> Clamp | Inverse | Gamma:
        if isinstance(kernel, Clamp) and kernel.ess:
            return msgspec.structs.replace(kernel, hi=min(kernel.hi, share))
        return kernel

    surrogate = objective.surrogate
    if isinstance(surrogate, Weighted):
        surrogate = Weighted(positive=capped(surrogate.positive), negative=capped(surrogate.negative))
    penalties = tuple(
        msgspec.structs.replace(penalty, beta=penalty.beta * (1 - share)) if penalty.ess else penalty
        for penalty in objective.penalties
        if not penalty.ess or share < 1
    )
    return msgspec.structs.replace(objective, surrogate=surrogate, penalties=penalties)


def _budgeted(gate: Gate, *, tokens: StepTokens, reduce: Reduce) -> Gate:
    """Returns the gate with `hi` set to the largest τ for which the tokens with k2 ≤ τ have a mean k2 of at most the
    budget, where k2 is (log p − log q)² / 2. Only tokens to which the gate applies (`when`) count.

    This is τ* of M2PO (2510.01161), whose second moment is twice k2. The mean is over the tokens that are kept, as in
    the paper's algorithm. The authors' code gives another τ: it caps the outliers at τ instead of dropping them, and
    never uses a ratio band narrower than [.7, 1.5].
    """
    assert gate.budget is not None
    difference = tokens.log_ratio(gate.p, gate.q)
    subject = acts_on(gate, advantages=tokens.advantages, log_ratio=difference)
    stat = difference.square()[subject] / 2

    def sums(bound: float) -> tuple[float, float]:
        kept = stat[stat <= bound]
        return float(kept.sum()), float(kept.numel())

    budget = gate.budget
    bound = _largest(sums, holds=lambda total, count: total <= budget * count, reduce=reduce)
    return msgspec.structs.replace(gate, hi=min(gate.hi, bound))


def _capped(weight: Weight, *, tokens: StepTokens, reduce: Reduce) -> Weight:
    """Returns the weight with `hi` set to the largest cap for which the effective share of the clamped weights,
    (Σw)² / (N · Σw²), is at least `min_ess`. The cap is at least 1 and at most the configured `hi`."""
    assert weight.min_ess is not None
    ratio = tokens.bounded_ratio(weight.p, weight.q)
    [count] = reduce(torch.tensor([ratio.numel()], dtype=torch.float64)).tolist()

    def sums(bound: float) -> tuple[float, float]:
        clamped = ratio.clamp(weight.lo, bound)
        return float(clamped.sum()), float(clamped.square().sum())

    share = weight.min_ess
    bound = _largest(sums, holds=lambda first, second: first**2 >= share * count * second, reduce=reduce)
    return msgspec.structs.replace(weight, hi=max(1.0, min(weight.hi, bound)))


def _largest(
    sums: Callable[[float], tuple[float, float]], *, holds: Callable[[float, float], bool], reduce: Reduce
) -> float:
    """Returns the largest bound for which `holds` is true of the two numbers `sums(bound)`, added up over all ranks.
    Returns inf if it holds for inf, and the smallest bound of the grid if it never holds."""

    def held(bounds: Sequence[float]) -> list[bool]:
        rows = torch.tensor([sums(bound) for bound in bounds], dtype=torch.float64)
        return [holds(first, second) for first, second in reduce(rows).tolist()]

    if held([math.inf])[0]:
        return math.inf
    low, high = _SMALLEST, _LARGEST
    for _ in range(_ROUNDS):
        step = (high / low) ** (1 / _GRID)
        bounds = [low * step**index for index in range(_GRID + 1)]
        answers = held(bounds)
        last = max((index for index, answer in enumerate(answers) if answer), default=0)
        low, high = bounds[last], bounds[min(last + 1, _GRID)]
    return low
