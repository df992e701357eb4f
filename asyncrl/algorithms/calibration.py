"""Numbers of an objective that are not constant: bounds, factors of a β and choices of tokens that depend on a
statistic of the whole step, such as M2PO's threshold, and the β of a penalty that is adapted to the KL after each step.

An objective declares these statistics like a loss of a user (`step_statistics.py`). `calibrated` puts the numbers of a
step into the objective, and `after_step` puts in the β of the next step.
"""

from collections.abc import Mapping
from functools import partial

import msgspec
import torch

from asyncrl.algorithms.objective import (
    LARGEST_BETA,
    SMALLEST_BETA,
    ByCovariance,
    ChosenByCovariance,
    Clamp,
    Gamma,
    Gate,
    Inverse,
    Objective,
    Weight,
    Weighted,
    reads_effective_share,
)
from asyncrl.algorithms.step_statistics import (
    Reduce,
    StepStatistic,
    StepTokens,
    bound_of_largest,
    bound_of_mean,
    cap_of_share,
    effective_share,
    mean,
    step_numbers,
)
from asyncrl.algorithms.token_terms import acts_on, covariance_ranks

_SHARE = "effective_share"
_LOGPROB, _ADVANTAGE = "mean_logprob", "mean_advantage"
MOST_APART = 0.2
"""The error KL / target − 1, by which a β is adapted, is clamped to ± this number (1909.08593, section 2.2)."""


def objective_statistics(objective: Objective) -> dict[str, StepStatistic]:
    """Returns the statistics of the step on which bounds, penalties and choices of tokens of the objective depend. The
    key is the axis that reads the statistic, such as `gates.0`, or the statistic's own name if several axes may read
    it."""
    found: dict[str, StepStatistic] = {}
    weight = objective.weight
    if weight is not None and weight.min_ess is not None:
        found["weight"] = _cap(weight, share=weight.min_ess)
    found |= {
        f"gates.{i}": _bound(gate, budget=gate.budget)
        for i, gate in enumerate(objective.gates)
        if gate.budget is not None
    }
    if reads_effective_share(objective):
        found[_SHARE] = StepStatistic(lambda tokens: tokens.bounded_ratio("current", "behaviour"), effective_share)
    if choices := objective.chosen():
        found[_LOGPROB] = StepStatistic(lambda tokens: tokens.sources["proximal"], mean)
        found[_ADVANTAGE] = StepStatistic(lambda tokens: tokens.advantages, mean)
        for place, choice in choices.items():
            found[place] = StepStatistic(partial(_ranks, choice), bound_of_largest(choice.share))
    return found


def needs_calibration(objective: Objective) -> bool:
    """Returns True if the objective has a bound, a penalty or a choice of tokens that depends on a statistic of the
    whole step."""
    return bool(objective_statistics(objective))


def calibrated(objective: Objective, *, tokens: StepTokens, reduce: Reduce) -> Objective:
    """Returns the configured `objective`, with the bounds, the β of penalties and the choices of tokens that depend on
    the tokens of this step filled in. The result is equal on all ranks."""
    return _filled(objective, step_numbers(objective_statistics(objective), tokens=tokens, reduce=reduce))


def after_step(objective: Objective, kl_nats: Mapping[str, float]) -> Objective:
    """Returns the objective of the next step: the penalty with `control` has the β that follows from its β and from the
    KL of this step (`KLControl`). `kl_nats` has the KL to each policy q, by the name of q. If it lacks the q of the
    penalty, β does not change."""
    penalty = objective.controlled()
    if penalty is None or penalty.control is None or penalty.q not in kl_nats:
        return objective
    error = min(max(kl_nats[penalty.q] / penalty.control.target - 1, -MOST_APART), MOST_APART)
    beta = penalty.beta * (1 + penalty.control.gain * error)
    return with_beta(objective, min(max(beta, SMALLEST_BETA), LARGEST_BETA))


def with_beta(objective: Objective, beta: float) -> Objective:
    """Returns the objective with another β of the penalty with `control`."""
    penalties = tuple(
        each if each.control is None else msgspec.structs.replace(each, beta=beta) for each in objective.penalties
    )
    return msgspec.structs.replace(objective, penalties=penalties)


def _filled(objective: Objective, numbers: Mapping[str, float]) -> Objective:
    weight = objective.weight
    if weight is not None and "weight" in numbers:
        weight = msgspec.structs.replace(weight, hi=max(1.0, min(weight.hi, numbers["weight"])))
    gates = tuple(
        msgspec.structs.replace(gate, hi=min(gate.hi, numbers[f"gates.{i}"])) if f"gates.{i}" in numbers else gate
        for i, gate in enumerate(objective.gates)
    )
    penalties = tuple(
        msgspec.structs.replace(penalty, tokens=_chosen(f"penalties.{i}", penalty.tokens, numbers))
        for i, penalty in enumerate(objective.penalties)
    )
    dropped = _chosen("dropped", objective.dropped, numbers)
    objective = msgspec.structs.replace(objective, weight=weight, gates=gates, penalties=penalties, dropped=dropped)
    return _with_share(objective, share=numbers[_SHARE]) if _SHARE in numbers else objective


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


def _ranks(choice: ByCovariance, tokens: StepTokens) -> torch.Tensor:
    advantages, means = tokens.advantages, (tokens.statistics[_LOGPROB], tokens.statistics[_ADVANTAGE])
    ranks = covariance_ranks(choice, sources=tokens.sources, advantages=advantages, means=means)
    return ranks.clamp(min=torch.finfo(ranks.dtype).min)  # a value of a statistic must be finite


def _chosen(place: str, choice: ByCovariance | None, numbers: Mapping[str, float]) -> ByCovariance | None:
    if choice is None:
        return None
    return ChosenByCovariance(
        share=choice.share,
        order=choice.order,
        lo=choice.lo,
        hi=choice.hi,
        mean_logprob=numbers[_LOGPROB],
        mean_advantage=numbers[_ADVANTAGE],
        above=numbers[place],
    )


def _bound(gate: Gate, *, budget: float) -> StepStatistic:
    """Returns the statistic for the largest τ for which the tokens with k2 ≤ τ have a mean k2 of at most the budget.
    k2 is (log p − log q)² / 2. Only tokens to which the gate applies (`when`) count.

    This is τ* of M2PO (2510.01161), whose second moment is twice k2. The mean is over the tokens that are kept, as in
    the paper's algorithm. The authors' code gives another τ: it caps the outliers at τ instead of dropping them, and
    never uses a ratio band narrower than [.7, 1.5].
    """

    def k2(tokens: StepTokens) -> torch.Tensor:
        difference = tokens.log_ratio(gate.p, gate.q)
        subject = acts_on(gate, advantages=tokens.advantages, log_ratio=difference)
        return difference.square()[subject] / 2

    return StepStatistic(k2, bound_of_mean(budget))


def _cap(weight: Weight, *, share: float) -> StepStatistic:
    """Returns the statistic for the largest cap with which the effective share of the clamped weights,
    (Σw)² / (N · Σw²), is at least `share`. `_filled` keeps the cap between 1 and the configured `hi`."""
    return StepStatistic(lambda tokens: tokens.bounded_ratio(weight.p, weight.q), cap_of_share(share, lo=weight.lo))
