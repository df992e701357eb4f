"""Computes the bounds of an objective that depend on all tokens of a step, and the KL by which the β of a penalty is
set, for check 6 of the audit. The functions follow the definitions of these numbers, with all tokens in one list."""

import math
from collections.abc import Sequence
from statistics import fmean

from asyncrl.witness.bounds import effective_share, first_left_out, ratios_of, sorted_k2
from asyncrl.witness.objective import Axes, Tokens, covariance_ranks

HALVINGS = 200
"""The search for the cap of a weight halves its range this many times."""


def with_bounds(axes: Axes, tokens: Tokens) -> Axes:
    """Returns the axes (the settings) of an objective with the bounds that follow from the tokens of a step: the `hi`
    of a gate with a budget (M2PO, 2510.01161), the cap of a weight with `min_ess`, the effective share of the tokens
    (P3O, 2605.12380), and the choices of tokens by covariance (2505.22617)."""
    found = {**axes, "gates": [_budgeted(gate, tokens) for gate in axes["gates"]]}
    weight = axes["weight"]
    if weight is not None and weight["min_ess"] is not None:
        found["weight"] = {**weight, "hi": max(1.0, min(weight["hi"], _cap(weight, tokens)))}
    share = effective_share(ratios_of(tokens, "current", "behaviour"))
    if axes["surrogate"]["kind"] == "weighted":
        sides = {
            side: {**kernel, "hi": min(kernel["hi"], share)} if kernel.get("ess") else kernel
            for side in ("positive", "negative")
            for kernel in (axes["surrogate"][side],)
        }
        found["surrogate"] = {**axes["surrogate"], **sides}
    found["penalties"] = [
        {**each, "beta": each["beta"] * (1 - share) if each["ess"] else each["beta"]}
        | {"tokens": _chosen(each["tokens"], tokens)}
        for each in axes["penalties"]
    ]
    found["dropped"] = _chosen(axes["dropped"], tokens)
    return found


def with_beta(axes: Axes, beta: float | None) -> Axes:
    """Returns the axes of an objective, in which the penalty with `control` has the coefficient `beta`. None changes
    nothing."""
    if beta is None:
        return axes
    penalties = [each if each["control"] is None else {**each, "beta": beta} for each in axes["penalties"]]
    return {**axes, "penalties": penalties}


def k3_of(log_ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of e^d − 1 − d over log-ratios d, and the mean size of its derivative, |e^d − 1|. Both are 0
    without a log-ratio."""
    return (
        fmean([*(math.expm1(d) - d for d in log_ratios)] or [0.0]),
        fmean([*(abs(math.expm1(d)) for d in log_ratios)] or [0.0]),
    )


def _chosen(choice: Axes | None, tokens: Tokens) -> Axes | None:
    """Adds to a choice of tokens by covariance the mean log-prob and mean advantage of the step, and the rank above
    which tokens are chosen. Without a choice or tokens, returns `choice` as it is."""
    if choice is None or not tokens["advantages"]:
        return choice
    means = {"mean_logprob": fmean(tokens["proximal"]), "mean_advantage": fmean(tokens["advantages"])}
    choice = {**choice, **means}
    left_out = first_left_out(choice, tokens)
    last = min((rank for rank in covariance_ranks(choice, tokens) if rank > left_out), default=left_out)
    return {**choice, "above": (left_out + last) / 2}


def _budgeted(gate: Axes, tokens: Tokens) -> Axes:
    """Returns a gate with the `hi` that its budget gives, if this is below its own. The tokens that the gate may remove
    are taken in the order of their k2 (half of the squared log-ratio), as long as their mean k2 is within the budget.
    `hi` lies between the k2 of the last token that is taken and that of the next one. If all are taken, it stays."""
    if gate["budget"] is None:
        return gate
    subject = sorted_k2(gate, tokens)
    kept, total = 0, 0.0
    while kept < len(subject) and total + subject[kept] <= gate["budget"] * (kept + 1):
        total += subject[kept]
        kept += 1
    if kept == len(subject):
        return gate
    return {**gate, "hi": min(gate["hi"], ((subject[kept - 1] if kept else 0.0) + subject[kept]) / 2)}


def _cap(weight: Axes, tokens: Tokens) -> float:
    """Returns the largest cap for which the effective share of the clamped weights (their effective sample size divided
    by their number) is at least `min_ess`; infinity if the weights need no cap."""
    ratios = ratios_of(tokens, weight["p"], weight["q"])

    def holds(cap: float) -> bool:
        clamped = [min(max(ratio, weight["lo"]), cap) for ratio in ratios]
        return bool(effective_share(clamped) >= weight["min_ess"])

    if holds(math.inf):
        return math.inf
    low, high = 0.0, max(ratios)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if middle > 0 and holds(middle) else (low, middle)
    return low
