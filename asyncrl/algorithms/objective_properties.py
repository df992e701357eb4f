"""Answers questions about an objective: whether it corrects for samples of older weights, and which of its parts act.

Does not import torch.
"""

from asyncrl.algorithms.objective import Objective, Regression, Reinforce, Weighted, uses_ratio


def pooled_sources(objective: Objective) -> frozenset[str]:
    """Returns the policies whose log-probs are used in a ratio, weight or gate of a whole sequence. `current` is the
    policy that is trained.

    An interpolated proximal policy is computed from the sampler's and the current log-probs.
    """
    found: set[str] = set()
    if uses_ratio(objective.surrogate) and objective.level != "token":
        found |= {"current", objective.anchor}
    for part in (objective.weight, *objective.gates):
        if part is not None and part.pool != "token":
            found |= {part.p, part.q}
    if objective.proximal == "interpolated" and "proximal" in found:
        found = found - {"proximal"} | {"current", "behaviour"}
    return frozenset(found)


def is_corrected(objective: Objective) -> bool:
    """Returns True if the objective corrects for samples of older weights, which staleness limits η > 0 need.

    It corrects if its ratio is against the sampler, if its weight divides by the sampler's probability, or if a gate
    compares a trained policy with the sampler. A clip against the proximal policy does not correct: with one update a
    step, its ratio is 1.
    """
    weight, trained = objective.weight, {"current", "proximal"}
    return (
        (uses_ratio(objective.surrogate) and objective.anchor == "behaviour")
        or (weight is not None and weight.p in trained and weight.q == "behaviour")
        or any("behaviour" in {gate.p, gate.q} and trained & {gate.p, gate.q} for gate in objective.gates)
    )


def corrects_twice(objective: Objective) -> bool:
    """Returns True if both the ratio and the weight correct for the sampler. The importance weight is then about ρ²."""
    weight = objective.weight
    return (
        uses_ratio(objective.surrogate)
        and objective.anchor == "behaviour"
        and weight is not None
        and weight.q == "behaviour"
    )


def is_product(objective: Objective) -> bool:
    """Returns True if the ratio or the weight is a product over a whole sequence.

    The spread of such a product grows with the sequence length, and a bound on the product does not change that. A
    regression reads only the logarithm of the product and does not use it as a weight.
    """
    weight = objective.weight
    multiplied = objective.level == "sequence_sum" and not isinstance(objective.surrogate, Regression)
    return multiplied or (weight is not None and weight.pool == "sum")


def inert_in_one_update(objective: Objective) -> list[str]:
    """Returns the parts that only compare the current policy with a recomputed proximal policy.

    If a step has a single update, the two policies are equal. Then a ratio is 1, and a divergence and its gradient
    are 0, so these parts have no effect.
    """
    if objective.proximal == "interpolated":
        return []
    same = {"current", "proximal"}
    found = (
        ["the surrogate's ratio or clip"] if uses_ratio(objective.surrogate) and objective.anchor == "proximal" else []
    )
    found += ["weight"] if objective.weight is not None and {objective.weight.p, objective.weight.q} == same else []
    found += [f"gates[{i}]" for i, gate in enumerate(objective.gates) if {gate.p, gate.q} == same]
    return found + [
        f"penalties[{i}]"
        for i, penalty in enumerate(objective.penalties)
        if penalty.kind in ("k2", "k3", "k3+") and penalty.q == "proximal"
    ]


def averages_advantages(objective: Objective) -> bool:
    """Returns True if every token of a sequence gets the gradient of the sequence's mean advantage. This happens when
    the gradient goes through a ratio of the whole sequence."""
    through_the_ratio = not isinstance(objective.surrogate, Reinforce | Weighted)
    return through_the_ratio and objective.level in ("sequence_mean", "sequence_sum")
