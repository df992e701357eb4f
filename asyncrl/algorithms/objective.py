"""The axes of the one off-policy objective, as data. Torch-free: `asyncrl config check` reads them in milliseconds.

    L = Σ_t a_t · [ W_t · K_t · S(u_t, A_t, lp_t) + Σ_j β_j · P_j(t) ]

lp is the log-prob of a token under the weights that are trained, the only differentiable quantity. Its three
companions are data: `proximal`, the log-prob under the weights at the start of the step; `behaviour`, the one that the
sampler recorded; `reference`, that of the frozen first weights. `current` is lp without its gradient.

u = e^(lp − anchor) is the ratio that the surrogate S sees, W a detached importance weight, K ∈ {0, 1} the gates, P the
penalties, a the aggregation, always from counts over the whole step and all ranks: nothing else divides.

Bounds of ratios are ratios (0.8, 1.28, inf), never an ε whose meaning depends on the algorithm; bounds of divergences
are nats. `loss.py` has the tensors, `presets.py` the published algorithms as rows of data.
"""

import math
from enum import StrEnum
from typing import Literal

import msgspec

Anchor = Literal["current", "proximal", "behaviour"]
Source = Literal["current", "proximal", "behaviour", "reference"]
Pool = Literal["token", "mean", "sum", "min", "max"]
"""How a sequence's tokens share a value: each its own, or one of all. A mean of log-ratios is a geometric mean."""


class _Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all axes are: data that refuses what it does not know."""


class Reinforce(_Axis, frozen=True, kw_only=True, tag="reinforce", tag_field="kind"):
    """S = −A · lp (Williams 1992): no ratio, no clip."""


class Linear(_Axis, frozen=True, kw_only=True, tag="linear", tag_field="kind"):
    """S = −A · u: the importance-weighted objective without a clip."""


class Clipped(_Axis, frozen=True, kw_only=True, tag="clipped", tag_field="kind"):
    """S = max(−A · u, −A · clamp(u, lo, hi)), the PPO clip (1707.06347).

    `dual` bounds S by −dual · A where A < 0, where hi never acts (1912.09729), or a sample that the policy has come to
    like much more than it did would dominate the step. Capping u itself there (2505.07291) is the same function.
    """

    lo: float = 0.8
    hi: float = 1.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.lo <= 1 <= self.hi:
            raise ValueError(
                f"clip bounds are ratios with 0 ≤ lo ≤ 1 ≤ hi, got lo={self.lo}, hi={self.hi}; ε = 0.2 is lo 0.8 and "
                "hi 1.2"
            )
        if self.dual is not None and not 1 < self.dual < math.inf:
            raise ValueError(f"dual is a finite ratio above 1, got {self.dual}")


class Clamp(_Axis, frozen=True, kw_only=True, tag="clamp", tag_field="kind"):
    """k(u) = clamp(u, lo, hi); with lo = hi = 1 the weight is 1 whatever u.

    With `ess`, hi is lowered once a step to the effective share e = (Σρ)² / (N · Σρ²) of the step's tokens,
    ρ = current/behaviour, which is at most 1 (P3O, 2605.12380).
    """

    lo: float = 0.0
    hi: float = math.inf
    ess: bool = False

    def __post_init__(self) -> None:
        if self.ess and not (self.lo == 0 and self.hi > 0):
            raise ValueError(
                f"a kernel capped at the effective share has lo 0 and hi above 0, got lo={self.lo}, hi={self.hi}"
            )
        if not self.ess and not 0 <= self.lo <= 1 <= self.hi:
            raise ValueError(f"kernel bounds are ratios with 0 ≤ lo ≤ 1 ≤ hi, got lo={self.lo}, hi={self.hi}")


class Inverse(_Axis, frozen=True, kw_only=True, tag="inverse", tag_field="kind"):
    """k(u) = min(1/u, hi): what has become likelier already counts less (2510.06062)."""

    hi: float = math.inf

    def __post_init__(self) -> None:
        if not self.hi >= 1:
            raise ValueError(f"the bound of 1/u is a ratio of at least 1, got hi={self.hi}")


class Gamma(_Axis, frozen=True, kw_only=True, tag="gamma", tag_field="kind"):
    """k(u) = u^shape · e^(rate · (1 − u)), 1 at u = 1 and falling to 0 on both sides (2602.10693)."""

    shape: float
    rate: float

    def __post_init__(self) -> None:
        if not (0 <= self.shape < math.inf and 0 < self.rate < math.inf):
            raise ValueError(f"a gamma kernel has finite shape ≥ 0 and rate > 0, got {self.shape} and {self.rate}")


class Weighted(_Axis, frozen=True, kw_only=True, tag="weighted", tag_field="kind"):
    """S = −A · sg(k(u)) · lp: every token keeps a gradient, the kernel k says how much, by the sign of A."""

    positive: Clamp | Inverse | Gamma
    negative: Clamp | Inverse | Gamma


class SoftGate(_Axis, frozen=True, kw_only=True, tag="soft_gate", tag_field="kind"):
    """S = −A · (4/τ) · σ(τ · (u − 1)): a clip without corners; τ by the sign of A (2511.20347)."""

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        if not (0 < self.positive < math.inf and 0 < self.negative < math.inf):
            raise ValueError(f"temperatures are positive and finite, got {self.positive} and {self.negative}")


class Quadratic(_Axis, frozen=True, kw_only=True, tag="quadratic", tag_field="kind"):
    """S = −A · u + |A| · (u − 1)² / (2 · width): a parabola in u in the place of the clip (CFPO, 2601.22801).

    Its gradient is 0 at u = 1 + width where A > 0 and at u = 1 − width where A < 0, and pulls back beyond.
    """

    width: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.width < math.inf:
            raise ValueError(f"width is a positive and finite distance of u from 1, got {self.width}")


class Regression(_Axis, frozen=True, kw_only=True, tag="regression", tag_field="kind"):
    """S = (β · log u − A)²: log u is fitted to A / β, with no importance weight (OAPL, 2602.19362)."""

    beta: float

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"a regression's beta is positive and finite, got {self.beta}")


Surrogate = Reinforce | Linear | Clipped | Weighted | SoftGate | Quadratic | Regression


class PreClip(_Axis, frozen=True, kw_only=True):
    """Bounds every token's ratio where it already moved the way A wants, before a sequence's are pooled: u ≤ hi where
    A > 0, u ≥ lo where A < 0 (2507.20673)."""

    lo: float
    hi: float

    def __post_init__(self) -> None:
        if not 0 < self.lo <= 1 <= self.hi:
            raise ValueError(f"pre-clip bounds are ratios with 0 < lo ≤ 1 ≤ hi, got lo={self.lo}, hi={self.hi}")


class Weight(_Axis, frozen=True, kw_only=True):
    """The detached importance weight p/q, by default ρ = proximal/behaviour. Outside [lo, hi] it is clamped, or the
    token's loss is zeroed; either way the token stays in every denominator.

    With `min_ess`, hi is lowered once a step until the effective share of the step's tokens is at least that, but never
    below 1.
    """

    p: Source = "proximal"
    q: Source = "behaviour"
    pool: Pool = "token"
    lo: float = 0.0
    hi: float = math.inf
    outside: Literal["clamp", "zero"] = "clamp"
    min_ess: float | None = None

    def __post_init__(self) -> None:
        # 1 must lie inside, so that on-policy tokens keep weight 1; equal bounds would make the correction inert
        if not (0 <= self.lo <= 1 <= self.hi and self.lo < self.hi):
            raise ValueError(f"weight bounds are ratios with 0 ≤ lo ≤ 1 ≤ hi, lo < hi, got lo={self.lo}, hi={self.hi}")
        if self.p == self.q:
            raise ValueError(f"the weight {self.p}/{self.q} is always 1")
        if self.min_ess is not None and not (
            0 < self.min_ess <= 1 and self.outside == "clamp" and self.pool == "token"
        ):
            raise ValueError("min_ess is a share in (0, 1], of token weights that are clamped")


_RANGES = {
    "ratio": (0.0, math.inf),
    "k2": (0.0, math.inf),
    "k3": (0.0, math.inf),
    "probability": (-1.0, 1.0),
    "binary_kl": (0.0, math.inf),
}
"""What a gate's stat can be, where that is not every number."""


class Gate(_Axis, frozen=True, kw_only=True):
    """Keeps a token's loss where lo ≤ stat ≤ hi, zeroes it elsewhere; the token stays in every denominator.

    With d = log p − log q of the token:

    | stat | value |
    |---|---|
    | `ratio`, `log_ratio` | e^d, d; pooled before the exponential |
    | `k1`, `k2`, `k3` | −d, d²/2, e^d − 1 − d: estimates of KL(q ‖ p) in nats, http://joschu.net/blog/kl-approx.html |
    | `probability` | p − q, the total variation of the token against all others |
    | `binary_kl` | KL(q ‖ p) of the token against all others |

    `when` restricts it to tokens with A < 0, or to those whose d moves further the way A pushes. With `budget`, hi is
    set once a step so that the mean of stat over the tokens that are kept is at most that (2510.01161).
    """

    stat: Literal["ratio", "log_ratio", "k1", "k2", "k3", "probability", "binary_kl"]
    pool: Pool = "token"
    lo: float = -math.inf
    hi: float = math.inf
    p: Source = "proximal"
    q: Source = "behaviour"
    when: Literal["always", "negative_advantage", "moving_away"] = "always"
    budget: float | None = None

    def __post_init__(self) -> None:
        same = 1.0 if self.stat == "ratio" else 0.0
        if not self.lo <= same <= self.hi:
            raise ValueError(f"a gate lets p = q pass: lo ≤ {same:g} ≤ hi, got lo={self.lo}, hi={self.hi}")
        if self.p == self.q:
            raise ValueError(f"the gate compares {self.p} with itself")
        if self.budget is not None and not (0 < self.budget < math.inf and self.stat == "k2" and self.pool == "token"):
            raise ValueError("a budget is positive, finite and of the k2 of tokens")
        least, most = _RANGES.get(self.stat, (-math.inf, math.inf))
        if self.budget is None and self.lo <= least and self.hi >= most:
            raise ValueError(f"no {self.stat} lies outside lo={self.lo}, hi={self.hi}: the gate needs a bound")


class Penalty(_Axis, frozen=True, kw_only=True):
    """β · P, added to every token's loss, untouched by advantages, weights and gates. With d = lp − q:

    k1 = d · k2 = d²/2 · k3 = e^(−d) − 1 + d · `k3+`: k3's value with k2's gradient · `entropy` = −H of the next token.

    `positive_nll` = −lp of the tokens of rows with a reward above 0. It is divided by the number of these tokens in the
    whole update, not by the aggregation (VAPO, 2504.05118, where β is μ = 0.1). It reads the column `rewards`.

    `corrected_by` multiplies P by e^(lp − that), gradient included, so that the estimate is of the policy's own KL.

    With `ess`, β is multiplied once a step by 1 − e, e being the effective share of `Clamp` (P3O, 2605.12380).
    """

    beta: float
    kind: Literal["k1", "k2", "k3", "k3+", "entropy", "positive_nll"]
    q: Literal["reference", "proximal", "behaviour"] = "reference"
    corrected_by: Literal["none", "current", "proximal", "behaviour"] = "none"
    ess: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(
                f"a penalty's beta is positive and finite, got {self.beta}; without one there is no penalty"
            )
        if self.kind == "positive_nll" and (self.q != "reference" or self.corrected_by != "none"):
            raise ValueError("positive_nll compares the policy with no other: remove q and corrected_by")


class Aggregation(StrEnum):
    """How token losses become one number. T: trained tokens of the whole step, N: its trained sequences, P: its prompt
    groups with a trained token."""

    TOKEN_MEAN = "token_mean"
    """Σ tokens / T."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over each sequence's own tokens, then Σ sequences / N."""
    SEQUENCE_SUM = "sequence_sum"
    """Σ tokens / N."""
    SEQUENCE_SUM_CONSTANT = "sequence_sum_constant"
    """Σ tokens / (N · C), C being `constant`."""
    PROMPT_MEAN = "prompt_mean"
    """Mean over each prompt group's own tokens, then Σ groups / P (prompt average of 2510.13786). It reads the column
    `group_ids`, equal for the rows of one prompt."""
    SUM = "sum"
    """Σ tokens."""


class Objective(_Axis, frozen=True, kw_only=True):
    """One choice on every axis."""

    surrogate: Surrogate
    anchor: Anchor = "proximal"
    level: Literal["token", "sequence_mean", "sequence_sum", "sequence_mean_token"] = "token"
    """u of a token, the geometric mean of its sequence's, or their product. `sequence_mean_token` has the value of
    `sequence_mean`, and the gradient of the token's own log-prob alone: sg(mean) · π/sg(π) (GSPO-token, 2507.18071),
    so that every token's advantage pushes that token."""
    pre_clip: PreClip | None = None
    weight: Weight | None = None
    gates: tuple[Gate, ...] = ()
    penalties: tuple[Penalty, ...] = ()
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant: float | None = None
    """C of `sequence_sum_constant`; unset: `generator.max_completion_tokens`."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """`interpolated`: behaviour + (1 − 1/d) · (sg lp − behaviour) for a token that is d versions old, sg lp for d = 0
    (2512.06547): no forward pass of its own."""

    def __post_init__(self) -> None:
        if self.constant is not None and not 0 < self.constant < math.inf:
            raise ValueError(f"constant divides the loss and is positive and finite, got {self.constant}")
        if self.constant is not None and self.aggregation is not Aggregation.SEQUENCE_SUM_CONSTANT:
            raise ValueError(f"constant belongs to sequence_sum_constant, the aggregation is {self.aggregation}")
        if not uses_ratio(self.surrogate):
            idle = [name for name, unset in _OF_THE_RATIO.items() if getattr(self, name) != unset]
            if idle:
                unset = ", ".join(f"{name}: {_OF_THE_RATIO[name] or 'null'}" for name in idle)
                raise ValueError(f"the surrogate looks at no ratio, so that nothing reads {', '.join(idle)}: {unset}")
        if _kernels_with_ess(self.surrogate) and (self.anchor, self.level) != ("behaviour", "token"):
            raise ValueError(
                "the effective share is of tokens' ratios to the sampler, and so must be the ratio that it caps: set "
                f"anchor to behaviour and level to token, got {self.anchor} and {self.level}"
            )
        if self.level == "sequence_mean_token" and isinstance(self.surrogate, Weighted):
            raise ValueError(
                "level sequence_mean_token differs from sequence_mean in the ratio's gradient only, and a weighted "
                "surrogate takes no gradient of its ratio: set level to sequence_mean"
            )
        if self.proximal == "interpolated" and "proximal" not in self.sources():
            raise ValueError("nothing reads the proximal policy, so that interpolating it does nothing: remove it")

    def sources(self) -> set[str]:
        """Whose log-probs it needs besides the current ones."""
        pairs: list[tuple[str, str]] = [(gate.p, gate.q) for gate in self.gates]
        pairs += [(self.weight.p, self.weight.q)] if self.weight is not None else []
        pairs += [(p.q, p.corrected_by) for p in self.penalties if p.kind not in ("entropy", "positive_nll")]
        pairs += [("current", "behaviour")] if reads_effective_share(self) else []
        used = {source for pair in pairs for source in pair} - {"current", "none"}
        return used | ({self.anchor} - {"current"} if uses_ratio(self.surrogate) else set())


_OF_THE_RATIO = {"anchor": "proximal", "level": "token", "pre_clip": None}
"""Axes that only the surrogate's ratio reads, with what they are unless they are named."""


def uses_ratio(surrogate: Surrogate) -> bool:
    """Whether S depends on u at all: a kernel that is clamped to one number does not."""
    if isinstance(surrogate, Weighted):
        return not all(isinstance(k, Clamp) and k.lo == k.hi for k in (surrogate.positive, surrogate.negative))
    return not isinstance(surrogate, Reinforce)


def _kernels_with_ess(surrogate: Surrogate) -> bool:
    kernels = (surrogate.positive, surrogate.negative) if isinstance(surrogate, Weighted) else ()
    return any(isinstance(kernel, Clamp) and kernel.ess for kernel in kernels)


def reads_effective_share(objective: Objective) -> bool:
    """Whether a kernel or a penalty depends on the effective share of the step's tokens."""
    return _kernels_with_ess(objective.surrogate) or any(penalty.ess for penalty in objective.penalties)


def pooled_sources(objective: Objective) -> frozenset[str]:
    """Whose log-probs reach a ratio, weight or gate of a whole sequence; `current` are those that are trained.

    An interpolated proximal policy is made of the sampler's log-probs and the current ones.
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
    """Whether the objective corrects for samples of older weights, so that η > 0 is sound: its ratio is against the
    sampler, its weight divides by the sampler's probability, or a gate compares the two. A proximal clip alone does
    not: with one update a step its ratio is 1."""
    weight, trained = objective.weight, {"current", "proximal"}
    return (
        (uses_ratio(objective.surrogate) and objective.anchor == "behaviour")
        or (weight is not None and weight.p in trained and weight.q == "behaviour")
        or any("behaviour" in {gate.p, gate.q} and trained & {gate.p, gate.q} for gate in objective.gates)
    )


def corrects_twice(objective: Objective) -> bool:
    """Whether both the ratio and the weight correct for the sampler: the importance weight is then about ρ²."""
    weight = objective.weight
    return (
        uses_ratio(objective.surrogate)
        and objective.anchor == "behaviour"
        and weight is not None
        and weight.q == "behaviour"
    )


def is_product(objective: Objective) -> bool:
    """Whether the ratio or the weight is a product over a whole sequence: its spread grows with the length, whatever
    bound is put on it afterwards. A regression reads the product's logarithm and weighs nothing by it."""
    weight = objective.weight
    multiplied = objective.level == "sequence_sum" and not isinstance(objective.surrogate, Regression)
    return multiplied or (weight is not None and weight.pool == "sum")


def inert_in_one_update(objective: Objective) -> list[str]:
    """What only compares the current policy with a recomputed proximal one: the two are one in a step's only update, so
    that a ratio is 1, a divergence and its gradient 0."""
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
