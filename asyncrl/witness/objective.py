"""The derivatives of an objective's loss by the log-prob and the entropy of each token.

The learner builds the loss from tensors and lets autograd derive it. This module states the derivatives themselves,
with loops over Python's floats, by the formulas of the papers and of `asyncrl/algorithms/objective.py`. The objective
is given as the mapping of its settings, the axes (`asyncrl losses NAME` prints them), with all defaults filled in.

    L = Σ_t a_t · [ W_t · K_t · S(u_t, A_t, lp_t) + A_t · C_t + Σ_j β_j · P_j(t) ]

For token t, a is the coefficient of the aggregation, W the importance weight, K the gates (0 or 1), S the surrogate, u
its ratio, A the advantage, lp the log-prob, C the centering, and P the penalties.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

Axes = Mapping[str, Any]
Tokens = Mapping[str, Sequence[float]]
"""Columns of trained tokens: `advantages`, and the log-probs of each policy by its name."""

ALWAYS_1: Axes = {"kind": "clamp", "lo": 1.0, "hi": 1.0}
"""The kernel in the centering of a surrogate that has no kernel, as `reinforce`."""
LARGEST_LOG_RATIO = 40.0
"""A ratio above e^40 comes from a broken log-prob. It counts as e^40 and carries no gradient."""
TINY = 1.1754943508222875e-38
"""The smallest normal number of float32. It replaces 1 − p for a token whose probability p is so near to 1 that 1 − p
is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The trained tokens of one sample; each list has one entry for each of them.

    `current`, `proximal`, `behaviour` and `reference` are log-probs in nats: under the weights that are trained, the
    weights at the step's start, those of the sampler and those of the reference policy. A list that the objective
    does not read may be empty. `staleness` is in versions. `token_weights` are the entries of the token mask, and
    `weight` is the sample mask. `group` is the id of the prompt's group.
    """

    group: int
    reward: float
    weight: float
    token_weights: Sequence[float]
    advantages: Sequence[float]
    current: Sequence[float]
    proximal: Sequence[float] = ()
    behaviour: Sequence[float] = ()
    reference: Sequence[float] = ()
    staleness: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.current)


class Counts(NamedTuple):
    """Weighted counts of a whole update, over all ranks: trained tokens, trained sequences, trained tokens by prompt
    group, and trained tokens of samples with a reward above 0."""

    tokens: float
    sequences: float
    tokens_by_group: Mapping[int, float] = {}
    positive_tokens: float = 0.0


class Derivatives(NamedTuple):
    """∂L/∂log-prob, ∂L/∂entropy and ∂L/∂C of each token, where C is the centering."""

    logprobs: list[float]
    entropies: list[float]
    centering: list[float]


def derivatives(axes: Axes, sample: Sample, counts: Counts, *, apart_nats: float = 0.0) -> Derivatives:
    """Returns the derivatives of the loss of an update by each trained token of one sample.

    `apart_nats` moves the log-probs of the trained policies away from those of the sampler and the reference. A caller
    evaluates both signs of a rounding error, because a token at the edge of a clip may be on either side of it.
    """
    sources = _sources(axes, sample, apart_nats)
    # `_hash` must get the log-probs of the sampler as they were recorded, without `apart_nats`
    tokens, columns = range(len(sample)), {"advantages": sample.advantages, **sources, "behaviour": sample.behaviour}
    divisor = _divisor(axes, sample, counts)
    averaging = [sample.weight * weight / divisor for weight in sample.token_weights]
    kept = _weights(axes["weight"], sources)
    removed = [_gated(gate, columns | sources) for gate in axes["gates"]]
    removed += [] if axes["dropped"] is None else [are_chosen(axes["dropped"], columns)]
    sizes = [0.0 if any(gone[t] for gone in removed) else averaging[t] * kept[t] for t in tokens]
    log_ratios, moves, is_shared = _log_ratios(axes, sources, sample)
    pairs = [_slopes(axes["surrogate"], log_ratios[t], sample.advantages[t]) for t in tokens]
    by_ratios = [size * by_ratio for size, (_, by_ratio) in zip(sizes, pairs, strict=True)]
    if is_shared:
        by_ratios = [math.fsum(by_ratios)] * len(sample)
    found = [sizes[t] * pairs[t][0] + by_ratios[t] * moves[t] for t in tokens]
    entropies = [0.0] * len(sample)
    for penalty in axes["penalties"]:
        chosen = [True] * len(sample) if penalty["tokens"] is None else are_chosen(penalty["tokens"], columns)
        for t in (t for t in tokens if chosen[t]):
            if penalty["kind"] == "entropy":
                entropies[t] -= averaging[t] * penalty["beta"]
            elif penalty["kind"] != "positive_nll":
                found[t] += averaging[t] * penalty["beta"] * _penalty_slope(penalty, sources, t)
            elif sample.reward > 0:
                found[t] -= penalty["beta"] * sample.weight * sample.token_weights[t] / counts.positive_tokens
    centering = [0.0 if axes["centering"] is None else averaging[t] * sample.advantages[t] for t in tokens]
    return Derivatives(logprobs=found, entropies=entropies, centering=centering)


def centers(axes: Axes, log_p: Sequence[float], log_q: Sequence[float], *, has_rest: bool) -> list[float]:
    """Returns g_v = q_v · w(p_v/q_v) − α · p_v of the listed tokens v, for the centering C = Σ_v g_v · log p_v (score
    centering, 2609.20807). q is the sampler's distribution, p that of the trained policy, and w the kernel of the
    surrogate. α = ρ · w(1/ρ), where ρ is the mass of q outside of the list over that of p, both at least 1e-6. α is 0
    if all tokens that the sampler can choose are in the list (`has_rest` is False)."""
    w = partial(_kernel, axes["surrogate"].get("positive", ALWAYS_1))
    rest_q, rest_p = (max(1 - math.fsum(map(math.exp, logs)), 1e-6) for logs in (log_q, log_p))
    alpha = rest_q / rest_p * w(math.log(rest_p / rest_q)) if has_rest else 0.0
    return [math.exp(q) * w(p - q) - alpha * math.exp(p) for p, q in zip(log_p, log_q, strict=True)]


def _sources(axes: Axes, sample: Sample, apart_nats: float) -> dict[str, Sequence[float]]:
    """Returns the log-probs by the policy's name. An interpolated proximal policy is behaviour + (1 − 1/d) · (current −
    behaviour) for a token that is d > 0 versions old, and current for d = 0 (A-3PO, 2512.06547). `apart_nats` is
    subtracted from the log-probs of sampler and reference, and half of it from recomputed proximal ones."""
    behaviour, reference = ([value - apart_nats for value in own] for own in (sample.behaviour, sample.reference))
    proximal = [value - apart_nats / 2 for value in sample.proximal]
    if axes["proximal"] == "interpolated":
        ages = zip(sample.current, behaviour, sample.staleness, strict=True)
        proximal = [now if age == 0 else old + (1 - 1 / age) * (now - old) for now, old, age in ages]
    return {"current": sample.current, "proximal": proximal, "behaviour": behaviour, "reference": reference}


def _divisor(axes: Axes, sample: Sample, counts: Counts) -> float:
    """Returns the number by which the weighted loss of each token of a sample is divided before all losses are
    added."""
    prompts = sum(tokens > 0 for tokens in counts.tokens_by_group.values())
    by_aggregation: Mapping[str, float] = {
        "token_mean": counts.tokens,
        "sequence_mean": counts.sequences * sum(sample.token_weights),
        "sequence_sum": counts.sequences,
        "sequence_sum_constant": counts.sequences * (axes["constant"] or 1.0),
        "prompt_mean": prompts * counts.tokens_by_group.get(sample.group, 0.0),
        "sum": 1.0,
    }
    return by_aggregation[axes["aggregation"]]


POOLS: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "sum": math.fsum, "min": min, "max": max}
"""The functions that give all tokens of a sequence one value, by the name of the pool."""


def _pooled(values: Sequence[float], how: str) -> list[float]:
    """Returns each token's own value if `how` is `token`, else the one value that all tokens of the sequence share."""
    return [*values] if how == "token" or not values else [POOLS[how](values)] * len(values)


def _ratio(log_ratio: float, lo: float = 0.0, hi: float = math.inf) -> float:
    return min(max(math.exp(min(log_ratio, LARGEST_LOG_RATIO)), lo), hi)


def _weights(weight: Axes | None, sources: Tokens) -> list[float]:
    """Returns W_t of each token: the ratio p/q, bounded or zeroed outside its bounds; 1 without a weight."""
    if weight is None:
        return [1.0] * len(sources["current"])
    logs = [p - q for p, q in zip(sources[weight["p"]], sources[weight["q"]], strict=True)]
    lo, hi, is_zeroed = weight["lo"], weight["hi"], weight["outside"] == "zero"
    return [
        0.0 if is_zeroed and not _log(lo) <= log_ratio <= _log(hi) else _ratio(log_ratio, lo, hi)
        for log_ratio in _pooled(logs, weight["pool"])
    ]


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _gated(gate: Axes, tokens: Tokens) -> list[bool]:
    """Returns True for each token that the gate removes: K_t = 0."""
    p, q, lo, hi = tokens[gate["p"]], tokens[gate["q"]], gate["lo"], gate["hi"]
    if gate["stat"] == "ratio":
        lo, hi = _log(lo), _log(hi)
    values = _pooled([STATISTICS[gate["stat"]](a, b) for a, b in zip(p, q, strict=True)], gate["pool"])
    return [subject and not lo <= value <= hi for subject, value in zip(acts_on(gate, tokens), values, strict=True)]


def acts_on(gate: Axes, tokens: Tokens) -> list[bool]:
    """Returns True for each token that the gate may remove."""
    columns = zip(tokens[gate["p"]], tokens[gate["q"]], tokens["advantages"], strict=True)
    if gate["when"] == "moving_away":
        return [advantage * (p - q) > 0 for p, q, advantage in columns]
    return [gate["when"] == "always" or advantage < 0 for _, _, advantage in columns]


def are_chosen(choice: Axes, tokens: Tokens) -> list[bool]:
    """Returns True for each token that a choice by covariance takes (Clip-Cov and KL-Cov, 2505.22617)."""
    return [rank > choice["above"] for rank in covariance_ranks(choice, tokens)]


def covariance_ranks(choice: Axes, tokens: Tokens) -> list[float]:
    """Returns a number for each token; the tokens with the largest numbers are chosen. With the order `largest` it is
    the covariance: the deviations of log-prob and advantage from their means over the step, multiplied. Otherwise it is
    the hash of the log-prob that the sampler recorded. It is −inf if the covariance is outside of `lo` and `hi`."""
    mean_lp, mean_advantage = choice["mean_logprob"], choice["mean_advantage"]
    pairs = zip(tokens["proximal"], tokens["advantages"], strict=True)
    apart = [(lp - mean_lp) * (advantage - mean_advantage) for lp, advantage in pairs]
    ranks = apart if choice["order"] == "largest" else map(_hash, tokens["behaviour"])
    return [rank if choice["lo"] <= c <= choice["hi"] else -math.inf for rank, c in zip(ranks, apart, strict=True)]


def _hash(value: float) -> int:
    """Returns an integer of 32 bits that depends on all bits of a float32 (https://github.com/skeeto/hash-prospector)."""
    [bits] = struct.unpack("<I", struct.pack("<f", value + 0.0))
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = (bits ^ (bits >> shift)) * factor % 2**32
    return int(bits ^ (bits >> 15))


def _difference(p: float, q: float) -> float:
    return min(max(p - q, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)


def _binary_kl(p: float, q: float) -> float:
    """Returns q · log(q/p) + (1 − q) · log((1 − q)/(1 − p)). The arguments are log p and log q."""
    rest_p, rest_q = max(-math.expm1(p), TINY), max(-math.expm1(q), TINY)
    return -math.exp(q) * _difference(p, q) + rest_q * (math.log(rest_q) - math.log(rest_p))


STATISTICS: Mapping[str, Callable[[float, float], float]] = {
    "ratio": lambda p, q: p - q,  # its bounds are compared as logarithms too
    "log_ratio": lambda p, q: p - q,
    "k1": lambda p, q: -_difference(p, q),
    "k2": lambda p, q: _difference(p, q) ** 2 / 2,
    "k3": lambda p, q: math.exp(_difference(p, q)) - 1 - _difference(p, q),
    "probability": lambda p, q: math.exp(p) - math.exp(q),
    "binary_kl": _binary_kl,
}
"""The statistics of gates from log p and log q."""


def _log_ratios(axes: Axes, sources: Tokens, sample: Sample) -> tuple[list[float], list[float], bool]:
    """Returns the log of the ratio u of each token, ∂ log u / ∂ lp by the log-prob of each token, and whether this is
    the derivative of one u that all tokens share. Otherwise it is that of the token's own u."""
    size, surrogate = len(sample), axes["surrogate"]
    # a surrogate without a ratio does not read its anchor, which may then have no log-probs
    anchor = sources[axes["anchor"]] or sources["current"]
    own = [now - then for now, then in zip(sources["current"], anchor, strict=True)]
    slopes = [1.0] * size
    if axes["pre_clip"] is not None and surrogate["kind"] != "reinforce":
        lo, hi = math.log(axes["pre_clip"]["lo"]), math.log(axes["pre_clip"]["hi"])
        for t, advantage in enumerate(sample.advantages):
            if (advantage > 0 and own[t] > hi) or (advantage < 0 and own[t] < lo):
                own[t], slopes[t] = (hi if advantage > 0 else lo), 0.0
    mean, total = _pooled(own, "mean"), _pooled(own, "sum")
    by_level: Mapping[str, tuple[list[float], list[float], bool]] = {
        "token": (own, slopes, False),
        "sequence_mean": (mean, [slope / size for slope in slopes], True),
        "sequence_sum": (total, slopes, True),
        # sg(mean) · π/sg(π): the mean's value with the token's own gradient (2507.18071)
        "sequence_mean_token": (mean, [1.0] * size, False),
    }
    return by_level[axes["level"]]


def _slopes(surrogate: Axes, log_ratio: float, advantage: float) -> tuple[float, float]:
    """Returns the derivatives of the surrogate S of a token: ∂S/∂lp by its log-prob with the ratio u fixed, and
    ∂S/∂ log u."""
    limit = LARGEST_LOG_RATIO / 2 if surrogate["kind"] == "quadratic" else LARGEST_LOG_RATIO
    ratio = math.exp(min(log_ratio, limit))
    moves = log_ratio <= limit
    match surrogate["kind"]:
        case "reinforce":  # S = −A · lp
            return -advantage, 0.0
        case "weighted":  # S = −A · k(u) · lp, with k fixed
            kernel = surrogate["positive"] if advantage > 0 else surrogate["negative"]
            return -advantage * _kernel(kernel, log_ratio), 0.0
        case "regression":  # S = (β · log u − A)²
            return 0.0, 2 * surrogate["beta"] * (surrogate["beta"] * log_ratio - advantage)
        case "linear":  # S = −A · u
            return 0.0, -advantage * ratio * moves
        case "clipped":  # S = max(−A · u, −A · clamp(u, lo, hi)), and at most −dual · A where A < 0
            dual = surrogate["dual"]
            flat = (advantage > 0 and ratio > surrogate["hi"]) or (
                advantage < 0 and (ratio < surrogate["lo"] or (dual is not None and ratio > dual))
            )
            return 0.0, 0.0 if flat else -advantage * ratio * moves
        case "soft_gate":  # S = −A · (4/τ) · σ(τ · (u − 1))
            tau = surrogate["positive"] if advantage > 0 else surrogate["negative"]
            gate = 1 / (1 + math.exp(min(-tau * (ratio - 1), 700.0)))
            return 0.0, -4 * advantage * gate * (1 - gate) * ratio * moves
        case "quadratic":  # S = −A · u + |A| · (u − 1)² / (2 · width)
            return 0.0, (-advantage + abs(advantage) * (ratio - 1) / surrogate["width"]) * ratio * moves
    raise ValueError(f"the witness has no formula for the surrogate {surrogate['kind']}")


def _kernel(kernel: Axes, log_ratio: float) -> float:
    match kernel["kind"]:
        case "clamp":
            return _ratio(log_ratio, kernel["lo"], kernel["hi"])
        case "inverse":
            return _ratio(-log_ratio, 0.0, kernel["hi"])
        case "gamma":
            return math.exp(kernel["shape"] * log_ratio + kernel["rate"] * (1 - _ratio(log_ratio)))
    raise ValueError(f"the witness has no formula for the kernel {kernel['kind']}")


def _penalty_slope(penalty: Axes, sources: Tokens, t: int) -> float:
    """Returns ∂P/∂lp, the derivative of a penalty by the log-prob of token t, for penalties that compare log-probs."""
    now = sources["current"][t]
    d = now - sources[penalty["q"]][t]
    bounded = min(-d, LARGEST_LOG_RATIO)
    k3 = math.exp(bounded) - 1 + d
    k3_slope = 1 - math.exp(bounded) * (-d <= LARGEST_LOG_RATIO)
    pairs = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (k3, k3_slope), "k3+": (k3, d)}
    # |d| of at most 1e-5 nats may be the rounding of two passes, whose sign is not a direction
    pairs["abs"] = (abs(d), math.copysign(1.0, d)) if abs(d) > 1e-5 else (0.0, 0.0)
    value, slope = pairs[penalty["kind"]]
    if penalty["corrected_by"] == "none":
        return slope
    log_ratio = now - sources[penalty["corrected_by"]][t]
    ratio = math.exp(min(log_ratio, LARGEST_LOG_RATIO))
    return slope * ratio + value * ratio * (log_ratio <= LARGEST_LOG_RATIO)
