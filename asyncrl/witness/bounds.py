"""Checks the bounds of an objective that depend on all tokens of a step: of a gate with a budget, of weights with a
least effective share, of kernels and penalties that follow the effective share, and of choices of tokens by covariance.
Also computes the β of a penalty whose β follows the KL of the steps before.

The learner's ranks search these bounds on a grid, with sums over the ranks. The witness compares the bounds that the
ranks found with the definitions of the bounds, with all tokens of the step in one list.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from asyncrl.witness.objective import LARGEST_LOG_RATIO, Axes, Tokens, acts_on, are_chosen, covariance_ranks

CLOSE = 1e-4
"""Accepted relative difference of a bound. The grid on which the ranks search has a relative precision of 4e-6."""


def unlike_bounds(configured: Axes, used: Axes, tokens: Tokens) -> str:
    """Returns what is wrong with the bounds that a step used, in words; "" if nothing is. `configured` are the settings
    (axes) of the objective in the configuration, and `used` the same settings with the bounds that the ranks found."""
    gates = zip(configured["gates"], used["gates"], strict=True)
    problems = [_budget_problem(gate, own, tokens) for gate, own in gates if gate["budget"] is not None]
    choices = zip(_choices(configured), _choices(used), strict=True)
    problems += [_choice_problem(choice, own, tokens) for choice, own in choices]
    if configured["weight"] is not None and configured["weight"]["min_ess"] is not None:
        problems.append(_cap_problem(configured["weight"], used["weight"], tokens))
    share = effective_share(ratios_of(tokens, "current", "behaviour"))
    if configured["surrogate"]["kind"] == "weighted":
        for side in ("positive", "negative"):
            kernel, own = configured["surrogate"][side], used["surrogate"][side]
            if kernel.get("ess") and not math.isclose(own["hi"], min(kernel["hi"], share), rel_tol=CLOSE):
                problems.append(f"a kernel is capped at {own['hi']:.6g}, but the effective share is {share:.6g}")
    left = [penalty for penalty in used["penalties"] if penalty["ess"]]
    for penalty in (each for each in configured["penalties"] if each["ess"]):
        beta = left.pop(0)["beta"] if left else 0.0
        if abs(beta - penalty["beta"] * (1 - share)) > CLOSE * penalty["beta"]:
            problems.append(f"a penalty has β = {beta:.6g}, but the effective share is {share:.6g}")
    return "; ".join(filter(None, problems))


def next_beta(beta: float, control: Axes, kl_nats: float) -> float:
    """Returns the β of a penalty after a step with this KL (Ziegler et al. 2019, 1909.08593, section 2.2)."""
    error: float = max(-0.2, min(0.2, (kl_nats - control["target"]) / control["target"]))
    return max(1e-9, min(1e9, beta * (1 + float(control["gain"]) * error)))


def effective_share(ratios: Sequence[float]) -> float:
    """Returns (Σρ)² / (N · Σρ²) of the N ratios ρ, at most 1; 1 if there is no ratio."""
    return min(1.0, math.fsum(ratios) ** 2 / (len(ratios) * math.fsum(ratio**2 for ratio in ratios))) if ratios else 1.0


def ratios_of(tokens: Tokens, p: str, q: str) -> list[float]:
    """Returns the ratio p/q of each token; an empty list if `tokens` lacks one of the policies."""
    return [math.exp(min(a - b, LARGEST_LOG_RATIO)) for a, b in zip(tokens.get(p, ()), tokens.get(q, ()), strict=False)]


def sorted_k2(gate: Axes, tokens: Tokens) -> list[float]:
    """Returns (log p/q)² / 2 of the tokens that a gate may remove, the smallest first."""
    columns = zip(tokens[gate["p"]], tokens[gate["q"]], acts_on(gate, tokens), strict=True)
    return sorted((p - q) ** 2 / 2 for p, q, is_subject in columns if is_subject)


def _choices(axes: Axes) -> list[Axes | None]:
    """Returns the settings of the choices of tokens by covariance: of `dropped`, and of each penalty; None where there
    is no choice. Penalties with `ess` are left out: they choose no tokens, and a step may be trained without them."""
    return [axes["dropped"], *(each["tokens"] for each in axes["penalties"] if not each["ess"])]


def first_left_out(choice: Axes, tokens: Tokens) -> float:
    """Returns the largest `covariance_ranks` number of the tokens that a choice by covariance leaves out, −inf if it
    leaves out none. Tokens with a larger number are chosen: ⌊share · N⌋ of N tokens, but at least one."""
    ranks = sorted(covariance_ranks(choice, tokens), reverse=True)
    return [*ranks, -math.inf][min(len(ranks), max(1, int(choice["share"] * len(ranks) * (1 + 1e-12))))]


def _budget_problem(gate: Axes, used: Axes, tokens: Tokens) -> str:
    """Returns in words how the bound that a step used differs from the definition; "" if it does not. By the
    definition, the mean k2 of the tokens that the gate keeps is at most the budget. It would be above the budget if the
    gate also kept the removed token with the smallest k2 (M2PO, 2510.01161)."""
    subject = sorted_k2(gate, tokens)
    kept, total = 0, 0.0
    while kept < len(subject) and (total + subject[kept]) / (kept + 1) <= gate["budget"] * (1 + 1e-9):
        total += subject[kept]
        kept += 1
    least, most = (subject[kept - 1] if kept else 0.0), (subject[kept] if kept < len(subject) else math.inf)
    found = used["hi"]
    if (found == gate["hi"] and found <= most) or least * (1 - CLOSE) <= found <= most * (1 + CLOSE):
        return ""
    return f"a gate's budget gave the bound {found:.6g}, but by definition it is from {least:.6g} to {most:.6g}"


def _choice_problem(configured: Axes | None, used: Axes | None, tokens: Tokens) -> str:
    """Returns in words how the number of the tokens that were chosen by covariance, or the means of the step by which
    they were chosen, differ from the definition; "" if they do not."""
    if configured is None or used is None or not tokens["advantages"]:
        return "" if (configured is None) == (used is None) else "a choice of tokens by covariance is missing or added"
    choice = {**used, **configured}
    found = sum(are_chosen(choice, tokens))
    means = {"mean_logprob": fmean(tokens["proximal"]), "mean_advantage": fmean(tokens["advantages"])}
    expected = sum(are_chosen({**choice, "above": first_left_out(choice, tokens)}, tokens))
    if found == expected and all(abs(used[name] - mean) <= 1e-6 for name, mean in means.items()):
        return ""
    return f"{found} tokens are chosen by covariance, but by definition {expected}; the step's means are {means}"


def _cap_problem(weight: Axes, used: Axes, tokens: Tokens) -> str:
    """Returns in words how the cap of a weight that a step used differs from the definition; "" if it does not. By the
    definition, the effective share of the weights clamped to the cap is at least `min_ess`. With a larger cap, it would
    be below `min_ess`."""
    ratios, found = ratios_of(tokens, weight["p"], weight["q"]), used["hi"]

    def share(cap: float) -> float:
        return effective_share([min(max(ratio, weight["lo"]), cap) for ratio in ratios])

    too_large = share(found) < weight["min_ess"] * (1 - CLOSE) and found > 1
    too_small = found < weight["hi"] and share(found * (1 + 10 * CLOSE)) >= weight["min_ess"]
    if not (too_large or (too_small and found * (1 + 10 * CLOSE) > 1)):
        return ""
    return f"a weight's min_ess gave the cap {found:.6g}, which makes the effective share {share(found):.6g}"
