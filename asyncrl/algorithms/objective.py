"""The axes of the off-policy objective, as data. Does not import torch, so `asyncrl config check` reads them quickly.

    L = Σ_t a_t · [ W_t · K_t · S(u_t, A_t, lp_t) + A_t · C_t + Σ_j β_j · P_j(t) ]

lp is the log-prob of a token under the weights that are trained. Only lp and the log-probs of other tokens at the same
position, which C and the entropy read, have a gradient. A is the token's advantage. The log-probs of three other
policies are data:

- `proximal`: the log-prob under the weights at the start of the step.
- `behaviour`: the log-prob that the sampler recorded.
- `reference`: the log-prob under the frozen initial weights.

`current` is lp without its gradient.

S is the surrogate. It reads the ratio u = e^(lp − anchor). W is a detached importance weight, K ∈ {0, 1} are the gates
and `dropped`, C is the centering, P are the penalties, and a is the aggregation. The aggregation uses counts over the
whole optimizer update and all ranks. Nothing else divides the loss, except that the penalty `positive_nll` has its own
divisor in place of the aggregation.

Bounds of ratios are ratios (0.8, 1.28, inf), not an ε whose meaning depends on the algorithm. Bounds of divergences are
in nats. `token_terms.py` and `loss.py` compute the tensors. `presets.py` has the published algorithms as rows of data.

`axes.py` makes docs/losses.md, `asyncrl losses --axes` and `asyncrl config schema` from the docstrings here. Each field
has a docstring, which describes every named value as "`value`: text". A paragraph that begins with "Stale tokens:" says
what happens to tokens that weights older than those of the step have sampled. A paragraph that begins with "Example:"
is a part of a configuration.
"""

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Literal

import msgspec

from asyncrl.algorithms.axis_errors import check_positive, check_ratio_bounds

Anchor = Literal["current", "proximal", "behaviour"]
Source = Literal["current", "proximal", "behaviour", "reference"]
"""`current`: the weights that are trained, without gradient. `proximal`: the weights at the start of the step.
`behaviour`: the weights that sampled the token, as the sampler reported it. `reference`: the frozen initial weights."""
Pool = Literal["token", "mean", "sum", "min", "max"]
"""`token`: each token has its own value. `mean`: all tokens of a sequence have the mean of their values. The mean of
log-ratios is the log of the geometric mean of the ratios. `sum`: all have the sum, which for log-ratios is the log of
the product of the ratios. `min`: all have the smallest value. `max`: all have the largest value."""


SMALLEST_BETA, LARGEST_BETA = 1e-9, 1e9
"""Limits of a β that is adapted after each step (`KLControl`), so that it never becomes 0 or infinite."""


class _Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all axes: immutable data that refuses unknown fields."""


class Reinforce(_Axis, frozen=True, kw_only=True, tag="reinforce", tag_field="kind"):
    """The surrogate S = −A · lp of advantage A and log-prob lp (Williams 1992): no ratio, no clip.

    Stale tokens: they have their full gradient, uncorrected. A `weight` or a gate against `behaviour` corrects it.

    Example: `algorithm: {loss: {surrogate: {kind: reinforce}, weight: {hi: 2.0}}}`
    """


class Linear(_Axis, frozen=True, kw_only=True, tag="linear", tag_field="kind"):
    """The surrogate S = −A · u of advantage A and ratio u: the importance-weighted objective without a clip.

    Stale tokens: with anchor `behaviour`, the gradient is multiplied by u, without a bound.

    Example: `algorithm: {loss: {surrogate: {kind: linear}, anchor: behaviour,
    gates: [{stat: ratio, p: current, lo: 0.5, hi: 2.0}]}}`
    """


class Clipped(_Axis, frozen=True, kw_only=True, tag="clipped", tag_field="kind"):
    """The surrogate S = max(−A · u, −A · clamp(u, lo, hi)) of advantage A and ratio u: the PPO clip (1707.06347).

    For tokens with A < 0, `dual` bounds S by −dual · A (1912.09729). `hi` has no effect on these tokens, so without
    `dual` a bad sample could dominate the step after the policy has made it much more likely. Capping u itself for
    these tokens (2505.07291) is the same function.

    Stale tokens: with anchor `behaviour`, the gradient is multiplied by u, and is 0 beyond the bound to which A pushes
    the token. With anchor `proximal`, the clip does not see staleness.

    Example: `algorithm: {loss: {surrogate: {kind: clipped, lo: 0.8, hi: 1.28, dual: 3.0}, anchor: behaviour}}`
    """

    lo: float = 0.8
    """Lower bound of the ratio: tokens with A < 0 and u < lo have no gradient. It is 1 − ε of PPO."""
    hi: float = 1.2
    """Upper bound of the ratio: tokens with A > 0 and u > hi have no gradient. It is 1 + ε of PPO."""
    dual: float | None = None
    """Ratio above which a token with A < 0 has no gradient, or null for no such bound."""

    def __post_init__(self) -> None:
        check_ratio_bounds("clip", self.lo, self.hi, "; for example, ε = 0.2 is lo 0.8 and hi 1.2")
        if self.dual is not None and not 1 < self.dual < math.inf:
            raise ValueError(f"dual is a ratio: it must be finite and above 1, or null for no bound, got {self.dual}")


class Clamp(_Axis, frozen=True, kw_only=True, tag="clamp", tag_field="kind"):
    """The kernel k(u) = clamp(u, lo, hi) of a `Weighted` surrogate. With lo = hi = 1, it is 1 for every ratio u.

    With `ess`, hi is lowered once a step to the effective share e = (Σρ)² / (N · Σρ²) of the step's tokens, with
    ρ = current/behaviour. e is at most 1 (P3O, 2605.12380).

    Stale tokens: with anchor `behaviour`, the gradient is multiplied by the ratio, at least lo and at most hi.

    Example: `algorithm: {loss: {surrogate: {kind: weighted, positive: {kind: clamp, hi: 5.0},
    negative: {kind: clamp, hi: 1.0}}, anchor: behaviour}}`
    """

    lo: float = 0.0
    """Lower bound of the kernel."""
    hi: float = math.inf
    """Upper bound of the kernel."""
    ess: bool = False
    """Lowers hi once a step to the effective share of the step's tokens. It needs lo 0, anchor `behaviour` and level
    `token`."""

    def __post_init__(self) -> None:
        if self.ess and not (self.lo == 0 and self.hi > 0):
            raise ValueError(
                f"a kernel with ess must have lo 0 and hi above 0, because its cap is the effective share, got "
                f"lo={self.lo}, hi={self.hi}"
            )
        if not self.ess:
            check_ratio_bounds("kernel", self.lo, self.hi)


class Inverse(_Axis, frozen=True, kw_only=True, tag="inverse", tag_field="kind"):
    """The kernel k(u) = min(1/u, hi) of a `Weighted` surrogate with the ratio u: a token counts less after it has
    become more likely (2510.06062).

    Stale tokens: it does not correct for them, because a correction multiplies by u. With anchor `behaviour`, tokens
    that have become rare since they were sampled count more, up to hi.

    Example: `algorithm: {loss: {surrogate: {kind: weighted, positive: {kind: inverse, hi: 3.0},
    negative: {kind: clamp, hi: 3.0}}, weight: {hi: 2.0}}}`
    """

    hi: float = math.inf
    """Upper bound of the kernel, at least 1."""

    def __post_init__(self) -> None:
        if not self.hi >= 1:
            raise ValueError(f"hi bounds the ratio 1/u: it must be at least 1, got hi={self.hi}")


class Gamma(_Axis, frozen=True, kw_only=True, tag="gamma", tag_field="kind"):
    """The kernel k(u) = u^shape · e^(rate · (1 − u)) of a `Weighted` surrogate with the ratio u: 1 at u = 1, and 0 in
    the limit u → ∞ (2602.10693).

    In the limit u → 0, it is 0 if shape > 0, and e^rate if shape = 0.

    Stale tokens: with anchor `behaviour`, the kernel falls smoothly to 0 for tokens that have become much more likely,
    and with shape > 0 also for tokens that have become rare.

    Example: `algorithm: {loss: {surrogate: {kind: weighted, positive: {kind: gamma, shape: 2.0, rate: 3.0},
    negative: {kind: gamma, shape: 3.0, rate: 2.0}}, anchor: behaviour}}`
    """

    shape: float
    """Power of u, at least 0."""
    rate: float
    """Rate of the exponential, above 0. The kernel is largest at u = shape / rate."""

    def __post_init__(self) -> None:
        if not (0 <= self.shape < math.inf and 0 < self.rate < math.inf):
            raise ValueError(
                f"a gamma kernel must have a finite shape ≥ 0 and a finite rate > 0, got {self.shape} and {self.rate}"
            )


Kernel = Clamp | Inverse | Gamma
"""k(u), the size of a token's gradient in a `weighted` surrogate, which has one kernel for A > 0 and one for A < 0."""


class Weighted(_Axis, frozen=True, kw_only=True, tag="weighted", tag_field="kind"):
    """The surrogate S = −A · sg(k(u)) · lp of advantage A, ratio u and log-prob lp: the kernel k sets the size of the
    token's gradient. There is one kernel for A > 0 and one for A < 0. sg is stop-gradient.

    Stale tokens: with anchor `behaviour`, the gradient is multiplied by k(u), and no token loses it while k(u) > 0.

    Example: `algorithm: {loss: {surrogate: {kind: weighted, positive: {kind: clamp, lo: 1.0, hi: 1.0},
    negative: {kind: clamp, hi: 1.0}}, anchor: behaviour}}`
    """

    positive: Kernel
    """The kernel of tokens with an advantage A > 0."""
    negative: Kernel
    """The kernel of tokens with an advantage A < 0."""


class SoftGate(_Axis, frozen=True, kw_only=True, tag="soft_gate", tag_field="kind"):
    """The surrogate S = −A · (4/τ) · σ(τ · (u − 1)) of advantage A and ratio u: a smooth clip. σ is the sigmoid, and τ
    is `positive` where A > 0 and else `negative` (2511.20347).

    Stale tokens: with anchor `behaviour`, the gradient is multiplied by 4 · u · σ · (1 − σ). It is that of `linear` at
    u = 1, and vanishes smoothly far from 1.

    Example: `algorithm: {loss: sapo, overrides: {anchor: behaviour, surrogate: {negative: 1.5}}}`
    """

    positive: float = 1.0
    """Temperature τ of tokens with A > 0. A larger τ narrows the band of ratios with a gradient."""
    negative: float = 1.05
    """Temperature τ of the other tokens."""

    def __post_init__(self) -> None:
        check_positive("positive (a temperature)", self.positive)
        check_positive("negative (a temperature)", self.negative)


class Quadratic(_Axis, frozen=True, kw_only=True, tag="quadratic", tag_field="kind"):
    """The surrogate S = −A · u + |A| · (u − 1)² / (2 · width) of advantage A and ratio u: a parabola in u instead of
    the clip (CFPO, 2601.22801).

    Its gradient is 0 at u = 1 + width where A > 0, and at u = 1 − width where A < 0. Beyond this point, the gradient
    pulls u back.

    Stale tokens: with anchor `behaviour`, the gradient is multiplied by u · (1 − |u − 1| / width) while A pushes u away
    from 1. Older tokens beyond 1 ± width are pulled back to the sampler.

    Example: `algorithm: {loss: cfpo, overrides: {anchor: behaviour, surrogate: {width: 0.5}}}`
    """

    width: float = 0.2
    """Distance of u from 1 at which the gradient is 0."""

    def __post_init__(self) -> None:
        check_positive("width (a distance of u from 1)", self.width)


class Regression(_Axis, frozen=True, kw_only=True, tag="regression", tag_field="kind"):
    """The surrogate S = (β · log u − A)² of advantage A and ratio u: log u is fitted to A / β, without an importance
    weight (OAPL, 2602.19362).

    Stale tokens: with anchor `behaviour`, a token of any age is drawn to the same target. The gradient is
    linear in log u, and 0 at log u = A / β.

    Example: `algorithm: {loss: oapl, overrides: {surrogate: {beta: 0.01}}}`
    """

    beta: float
    """β in units of the advantage per nat: a larger β keeps the policy nearer to the anchor."""

    def __post_init__(self) -> None:
        check_positive("the beta of a regression", self.beta)


Surrogate = Reinforce | Linear | Clipped | Weighted | SoftGate | Quadratic | Regression


class PreClip(_Axis, frozen=True, kw_only=True):
    """Bounds the ratio u of every token before the ratios of a sequence are pooled (2507.20673).

    Only the side to which the advantage A pushes the ratio has a bound: u ≤ hi where A > 0, and u ≥ lo where A < 0.

    Stale tokens: with anchor `behaviour`, a token whose ratio is beyond the bound enters the pooled ratio with the
    bound, and its own log-prob has no gradient.

    Example: `algorithm: {loss: gmpo, overrides: {anchor: behaviour, pre_clip: {lo: 0.7, hi: 1.4}}}`
    """

    lo: float
    """Lower bound of the ratio of tokens with A < 0, above 0."""
    hi: float
    """Upper bound of the ratio of tokens with A > 0."""

    def __post_init__(self) -> None:
        if not 0 < self.lo <= 1 <= self.hi:
            raise ValueError(
                f"pre-clip bounds are ratios and must satisfy 0 < lo ≤ 1 ≤ hi, got lo={self.lo}, hi={self.hi}"
            )


class Weight(_Axis, frozen=True, kw_only=True):
    """The detached importance weight p/q. The default is ρ = proximal/behaviour.

    Outside [lo, hi], the weight is clamped, or the token's surrogate is zeroed, as `outside` says. In both cases the
    token stays in every denominator, and keeps its penalties.

    With `min_ess`, hi is lowered once a step until the effective share (Σw)² / (N · Σw²) of the weights w of the step's
    N tokens is at least `min_ess`. hi is never lowered below 1.

    Stale tokens: with q `behaviour`, the surrogate is multiplied by how much more likely the newer weights make the
    token. Without a weight, only the ratio and the gates can correct for them.

    Example: `algorithm: {loss: tis, overrides: {weight: {lo: 0.5, hi: 4.0, outside: zero}}}`
    """

    p: Source = "proximal"
    """The policy in the numerator."""
    q: Source = "behaviour"
    """The policy in the denominator."""
    pool: Pool = "token"
    """The weight of a sequence's tokens, from their log-ratios."""
    lo: float = 0.0
    """Lower bound of the weight, at most 1."""
    hi: float = math.inf
    """Upper bound of the weight, at least 1."""
    outside: Literal["clamp", "zero"] = "clamp"
    """Treatment of weights outside [lo, hi]. `clamp`: the weight is the bound, so the token keeps a gradient. `zero`:
    the token's surrogate is 0."""
    min_ess: float | None = None
    """Smallest effective share, above 0 and at most 1, to which hi is fitted once a step; null for a fixed hi. It needs
    outside `clamp` and pool `token`."""

    def __post_init__(self) -> None:
        # 1 must be inside, so that on-policy tokens keep weight 1; with equal bounds, the weight would be a constant
        if not (0 <= self.lo <= 1 <= self.hi and self.lo < self.hi):
            raise ValueError(
                f"weight bounds are ratios and must satisfy 0 ≤ lo ≤ 1 ≤ hi and lo < hi, got lo={self.lo}, hi={self.hi}"
            )
        if self.p == self.q:
            raise ValueError(f"the weight {self.p}/{self.q} is always 1: choose two different policies for p and q")
        if self.min_ess is not None and not (
            0 < self.min_ess <= 1 and self.outside == "clamp" and self.pool == "token"
        ):
            raise ValueError(
                "min_ess must be above 0 and at most 1, and it needs outside: clamp and pool: token; set these, or "
                "remove min_ess"
            )


_RANGES = {
    "ratio": (0.0, math.inf),
    "k2": (0.0, math.inf),
    "k3": (0.0, math.inf),
    "probability": (-1.0, 1.0),
    "binary_kl": (0.0, math.inf),
}
"""The range of possible values of a gate's stat. A stat that is not listed can be any number."""


class Gate(_Axis, frozen=True, kw_only=True):
    """Keeps a token's surrogate where lo ≤ stat ≤ hi, and zeroes it elsewhere if the gate acts on the token (`when`).
    The token stays in every denominator, and keeps its penalties.

    The stat compares two policies: d = log p − log q of the token. With several gates, a token keeps its surrogate only
    if all of them keep it.

    Stale tokens: the gate does not use a token's age. With q `behaviour`, it zeroes the surrogate of a token on which
    the policy has drifted too far from the sampler. It does not scale the gradient of the other tokens.

    Example: `algorithm: {loss: decoupled_ppo, overrides: {gates: [{stat: k2, pool: mean, hi: 0.05}]}}`
    """

    stat: Literal["ratio", "log_ratio", "k1", "k2", "k3", "probability", "binary_kl"]
    """The quantity that is compared with the bounds. `ratio`: e^d, where d is pooled before the exponential.
    `log_ratio`: d. `k1`: −d, an estimate of KL(q ‖ p) in nats. `k2`: d²/2, another estimate. `k3`: e^d − 1 − d, a third
    estimate (http://joschu.net/blog/kl-approx.html). `probability`: p − q; its size is the total variation of the token
    against all other tokens (2602.04879). `binary_kl`: q · log(q/p) + (1 − q) · log((1 − q)/(1 − p)), which is KL(q ‖
    p) of the token against all other tokens (2602.04879)."""
    pool: Pool = "token"
    """The stat of a sequence's tokens, from their own stats."""
    lo: float = -math.inf
    """Lower bound, in the unit of the stat."""
    hi: float = math.inf
    """Upper bound, in the unit of the stat."""
    p: Source = "proximal"
    """The newer policy of the comparison."""
    q: Source = "behaviour"
    """The older policy of the comparison."""
    when: Literal["always", "negative_advantage", "moving_away"] = "always"
    """The tokens on which the gate acts. `always`: all. `negative_advantage`: tokens with an advantage A < 0.
    `moving_away`: tokens that A pushes further from d = 0 (A · d > 0)."""
    budget: float | None = None
    """Lowers hi once a step so that the mean of stat over the kept tokens is at most `budget` (2510.01161); null for a
    fixed hi. It needs stat `k2` and pool `token`."""

    def __post_init__(self) -> None:
        same = 1.0 if self.stat == "ratio" else 0.0
        if not self.lo <= same <= self.hi:
            raise ValueError(
                f"a gate must keep tokens with p = q, so lo ≤ {same:g} ≤ hi, got lo={self.lo}, hi={self.hi}"
            )
        if self.p == self.q:
            raise ValueError(f"the gate compares {self.p} with itself: choose two different policies for p and q")
        if self.budget is not None and not (0 < self.budget < math.inf and self.stat == "k2" and self.pool == "token"):
            raise ValueError("a budget must be finite and above 0, and it needs stat: k2 and pool: token")
        least, most = _RANGES.get(self.stat, (-math.inf, math.inf))
        if self.budget is None and self.lo <= least and self.hi >= most:
            raise ValueError(
                f"the gate never acts, because {self.stat} is never outside lo={self.lo}, hi={self.hi}: set a tighter "
                "bound, or remove the gate"
            )


class ByCovariance(_Axis, frozen=True, kw_only=True):
    """Chooses a share of the step's tokens by their covariance c = (lp − mean lp) · (A − mean A) of log-prob and
    advantage (2505.22617). lp is the proximal log-prob, and the means are over all trained tokens of the step. The few
    tokens with a large c lower the entropy most. The choice is made once a step, before its first update. The authors'
    code makes it anew in each micro-batch.

    Of the tokens with lo ≤ c ≤ hi, the first k in the `order` are chosen. k is ⌊share · N⌋ for the N trained tokens of
    the step, or 1 if that is 0. If the k-th token and the next one are equal in the order, all tokens that are equal to
    them are left out, so it may be that no token is chosen.

    Stale tokens: c does not depend on staleness. Stale tokens count in the means and in N like fresh ones.

    Example: `algorithm: {loss: decoupled_ppo, overrides: {dropped: {share: 0.0002, order: random, lo: 1.0, hi: 5.0}}}`
    """

    share: float
    """The share of the step's trained tokens that is chosen, above 0 and at most 1."""
    order: Literal["largest", "random"] = "largest"
    """The order in which tokens are chosen. `largest`: by c, the largest first. `random`: by a hash of the log-prob
    that the sampler recorded. So the choice does not depend on micro-batches and ranks, and stays the same if the step
    is computed again."""
    lo: float = -math.inf
    """Lower bound of c. A token with a smaller c is not chosen."""
    hi: float = math.inf
    """Upper bound of c. A token with a larger c is not chosen."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share:g}: a share of the step's tokens must be above 0 and at most 1")
        if not self.lo < self.hi:
            raise ValueError(f"bounds of a covariance must satisfy lo < hi, got lo={self.lo}, hi={self.hi}")


class ChosenByCovariance(ByCovariance, frozen=True, kw_only=True):
    """The choice of one step, with the numbers that `calibration.py` has found. A token with lo ≤ c ≤ hi is chosen if
    its c, or in random order its hash, is larger than `above`."""

    mean_logprob: float
    mean_advantage: float
    above: float


class KLControl(_Axis, frozen=True, kw_only=True):
    """Lets β of the next step follow the KL of this step: proportional control in log space (Ziegler et al. 2019,
    1909.08593).

    After a step, β is multiplied by 1 + gain · clamp(KL / target − 1, −0.2, 0.2), and stays within 1e-9 and 1e9. KL is
    a number of the step's record: `kl_to_reference_nats` with q `reference`, and `kl_to_behaviour_nats` with q
    `behaviour`. Both are means over the trained tokens by the estimator k3, for any kind of the penalty. The paper's
    KL is that of a whole answer: divide its target by the number of tokens of an answer. β does not change after a step
    that was skipped, that trained no token, or that trained only a critic. A resumed run goes on with the β of its
    records, and a fork begins with `beta`.
    """

    target: float
    """The KL at which β does not change, in nats for each token, above 0."""
    gain: float = 0.1
    """K_β of the paper, above 0 and below 5: in a step, β changes by at most the share gain / 5."""

    def __post_init__(self) -> None:
        check_positive("the target of a control (a KL in nats)", self.target)
        if not 0 < self.gain < 5:
            raise ValueError(f"gain is {self.gain:g}: it must be above 0 and below 5, so that β stays above 0")


class Penalty(_Axis, frozen=True, kw_only=True):
    """β · P, added to every token's loss. Advantages, weights and gates do not change it. d = lp − log q, where lp is
    the token's log-prob and q another policy.

    Stale tokens: a penalty is not weighted by their age. With q `behaviour`, it grows with the token's distance from
    its sampler, and pulls the policy back to it.

    Example: `algorithm: {loss: aipo, overrides: {penalties: [{kind: k3, beta: 0.001, corrected_by: behaviour}]}}`
    """

    beta: float
    """β, above 0. With `control`, it is that of the first step."""
    kind: Literal["k1", "k2", "k3", "k3+", "abs", "entropy", "positive_nll"]
    """The penalty P. `k1`: d. `k2`: d²/2. `k3`: e^(−d) − 1 + d. `k3+`: the value of k3, and the gradient of k2.
    `abs`: |d|, and 0 up to |d| = 1e-5, which may be rounding.
    `entropy`: −H, where H is the entropy of the next token's distribution. `positive_nll`: −lp of the tokens in rows
    with a reward above 0, divided by the number of these tokens in the whole update, not by the aggregation (VAPO,
    2504.05118, where β is μ = 0.1). It reads the column `rewards`."""
    q: Literal["reference", "proximal", "behaviour"] = "reference"
    """The other policy. `reference`: the frozen initial weights. `proximal`: the weights at the start of the step.
    `behaviour`: the sampler of the token."""
    corrected_by: Literal["none", "current", "proximal", "behaviour"] = "none"
    """A policy c by which P is corrected. P is multiplied by e^(lp − log c), which has a gradient too, so that P
    estimates the current policy's own KL although c sampled the tokens. `none`: no factor. `current`: the factor is 1,
    but it has a gradient. `proximal`: the factor corrects for the updates within a step. `behaviour`: the factor also
    corrects for stale tokens."""
    ess: bool = False
    """Multiplies β once a step by 1 − e, where e is the effective share (Σρ)² / (N · Σρ²) of the step's tokens with
    ρ = current/behaviour (P3O, 2605.12380)."""
    tokens: ByCovariance | None = None
    """The tokens that have the penalty, or null for all tokens. It cannot be combined with `ess`."""
    control: KLControl | None = None
    """How β is adapted after each step, or null for a constant β. It needs a kind that compares the policy with q
    `reference` or `behaviour`, cannot be combined with `ess`, and only one penalty can have it."""

    def __post_init__(self) -> None:
        check_positive("a penalty's beta", self.beta, "; to train without the penalty, remove it")
        if self.tokens is not None and (self.kind == "positive_nll" or self.ess):
            raise ValueError(
                "a penalty with ess, or of kind positive_nll, is computed from all tokens: remove tokens, or ess and "
                "positive_nll"
            )
        if self.kind == "positive_nll" and (self.q != "reference" or self.corrected_by != "none"):
            raise ValueError("positive_nll does not compare the policy with another policy: remove q and corrected_by")
        if self.control is not None:
            self._check_controlled()

    def _check_controlled(self) -> None:
        if self.kind in ("entropy", "positive_nll") or self.q == "proximal" or self.ess:
            raise ValueError(
                f"control follows a KL to the reference or to the sampler, but the penalty has kind {self.kind}, q "
                f"{self.q} and ess {str(self.ess).lower()}: set kind to k1, k2, k3, k3+ or abs, q to reference or "
                "behaviour, and ess to false, or remove control"
            )
        if not SMALLEST_BETA <= self.beta <= LARGEST_BETA:
            raise ValueError(
                f"beta is {self.beta:g}, but with control it stays within {SMALLEST_BETA:g} and {LARGEST_BETA:g}: "
                "set it within these"
            )


class Aggregation(StrEnum):
    """How the losses of tokens become one number. All counts are those of a whole optimizer update, over all ranks."""

    TOKEN_MEAN = "token_mean"
    """The sum over all tokens, divided by the number of trained tokens."""
    SEQUENCE_MEAN = "sequence_mean"
    """The mean over the trained tokens of each sequence, then the sum over sequences, divided by the number of trained
    sequences."""
    SEQUENCE_SUM = "sequence_sum"
    """The sum over all tokens, divided by the number of trained sequences."""
    SEQUENCE_SUM_CONSTANT = "sequence_sum_constant"
    """The sum over all tokens, divided by the number of trained sequences and by `constant`."""
    PROMPT_MEAN = "prompt_mean"
    """The mean over the trained tokens of each prompt group, then the mean over the groups that have a trained token
    (the prompt average of 2510.13786). It reads the column `group_ids`, which is equal for the rows of one prompt."""
    SUM = "sum"
    """The sum over all tokens, not divided."""


class Objective(_Axis, frozen=True, kw_only=True):
    """An off-policy objective: one choice on each axis."""

    surrogate: Surrogate
    """S, the part of the loss that the advantage A multiplies."""
    anchor: Anchor = "proximal"
    """The policy in the denominator of the ratio u = e^(lp − anchor) that the surrogate reads. `current`: the trained
    weights without gradient, so u is 1 and only its gradient remains. `proximal`: the weights at the start of the step,
    so u shows the updates within the step. `behaviour`: the sampler, so u shows the token's staleness as well.

    Stale tokens: only with `behaviour` do the ratio and the surrogate depend on a token's staleness.

    Example: `algorithm: {loss: {surrogate: {kind: clipped}, anchor: behaviour}}`"""
    level: Literal["token", "sequence_mean", "sequence_sum", "sequence_mean_token"] = "token"
    """The ratio u. `token`: the token's own ratio. `sequence_mean`: the geometric mean over its sequence.
    `sequence_sum`: the product over its sequence. `sequence_mean_token`: the value of `sequence_mean`, but with the
    gradient of the token's own log-prob only, sg(mean) · π/sg(π) (GSPO-token, 2507.18071). Then a token's advantage
    pushes only that token.

    Stale tokens: with anchor `behaviour`, all levels but `token` judge a sequence as a whole. A mean hides single
    tokens that have drifted. A product is the unbiased correction, and its spread grows with the length.

    Example: `algorithm: {loss: gspo_token, overrides: {weight: {hi: 2.0}}}`"""
    pre_clip: PreClip | None = None
    """Bounds of the ratios of tokens before `level` pools them, or null for none."""
    weight: Weight | None = None
    """W, the importance weight of the surrogate, or null for none."""
    gates: tuple[Gate, ...] = ()
    """K, the conditions under which a token keeps its surrogate. An empty list keeps all tokens."""
    dropped: ByCovariance | None = None
    """Tokens that lose their surrogate, like those that a gate does not keep, or null for none. They stay in every
    denominator, and keep their penalties."""
    centering: Literal["score"] | None = None
    """C, the expected score of the sampler, which is subtracted from the token's own score; null for none. It needs
    `generator.logprobs`, and the surrogate `reinforce`, or a `weighted` one at level `token` whose two kernels are the
    same `clamp` with a finite hi and without `ess`, with anchor `behaviour` if it has a ratio. It cannot be combined
    with `weight`, `gates`, `dropped` and `pre_clip`, because they change the expectation.

    `score`: C = Σ_{v ∈ H} sg(q_v · w(p_v/q_v) − α · p_v) · log p_v, with the sampler's distribution q and the trained
    one p at the token's place (score centering, 2609.20807). H are the `generator.logprobs` most likely tokens v of q.
    w is the kernel of the surrogate: 1 with `reinforce`, and clamp(u, lo, hi) with a `weighted` one. The rest of q is
    taken to have the shape of p: α = ρ · w(1/ρ), where ρ is the mass of q outside H divided by that of p, both at least
    1e-6. α is 0 if q has no token outside H, as with a `generator.top_k` of at most `generator.logprobs`. sg is
    stop-gradient. Under q, the expected gradient of a token is then the covariance of its advantage and its weighted
    score. The product of their means, which has no information about rewards, is gone.

    Stale tokens: p moves away from their q, so the subtracted part grows with their age. With `reinforce`, their
    gradient is centered but not corrected.

    Example: `algorithm: {loss: score_centering, overrides: {surrogate: {positive: {hi: 4.0}, negative: {hi: 4.0}}}}`"""
    penalties: tuple[Penalty, ...] = ()
    """P, the terms that are added to the loss without the advantage. An empty list adds nothing."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """a, the coefficients with which the losses of tokens are summed. All counts are those of a whole optimizer update,
    over all ranks.

    Stale tokens: they count in every denominator like fresh ones, also if a gate or a weight of 0 removes their
    surrogate.

    Example: `algorithm: {loss: decoupled_icepop, overrides: {aggregation: sequence_mean}}`"""
    constant: float | None = None
    """The constant divisor of the aggregation `sequence_sum_constant`. If it is not set, it is
    `generator.max_completion_tokens`.

    Stale tokens: no effect.

    Example: `algorithm: {loss: decoupled_icepop, overrides: {aggregation: sequence_sum_constant, constant: 512}}`"""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """How the proximal log-probs are computed. `recomputed`: a forward pass at the start of the step. `interpolated`:
    behaviour + (1 − 1/d) · (sg lp − behaviour) for a token that is d versions old, and sg lp for d = 0 (2512.06547).
    This needs no forward pass of its own.

    Stale tokens: with `interpolated`, a token that is one version old has the sampler as its proximal policy, and an
    older one a policy between the sampler and the current one.

    Example: `algorithm: {loss: decoupled_ppo, overrides: {proximal: interpolated}}`"""

    def __post_init__(self) -> None:
        if self.constant is not None:
            check_positive("constant (a divisor of the loss)", self.constant)
        if contradictions := list(self._contradictions()):
            raise ValueError("\n".join(contradictions))

    def _contradictions(self) -> Iterator[str]:
        """Yields a sentence for each group of axes that cannot be combined."""
        if self.constant is not None and self.aggregation is not Aggregation.SEQUENCE_SUM_CONSTANT:
            yield (
                f"constant is an option of aggregation sequence_sum_constant, but aggregation is {self.aggregation}: "
                "remove constant, or change aggregation"
            )
        if not uses_ratio(self.surrogate):
            idle = [name for name, unset in _OF_THE_RATIO.items() if getattr(self, name) != unset]
            if idle:
                unset = ", ".join(f"{name}: {_OF_THE_RATIO[name] or 'null'}" for name in idle)
                yield (f"the surrogate does not use a ratio, so {', '.join(idle)} would have no effect: set {unset}")
        if _kernels_with_ess(self.surrogate) and (self.anchor, self.level) != ("behaviour", "token"):
            yield (
                "a kernel with ess is capped at the effective share of the tokens' ratios to the sampler, so its own "
                f"ratio must be that ratio: set anchor to behaviour and level to token, got {self.anchor} and "
                f"{self.level}"
            )
        if self.level == "sequence_mean_token" and isinstance(self.surrogate, Weighted):
            yield (
                "level sequence_mean_token differs from sequence_mean only in the gradient of the ratio, but a "
                "weighted surrogate has no gradient through its ratio: set level to sequence_mean"
            )
        if self.proximal == "interpolated" and "proximal" not in self.sources():
            yield ("proximal is interpolated, but no part of the objective reads the proximal policy: remove proximal")

        if self.centering is not None and (wrong := _uncentered(self)):
            yield (
                f"centering is {self.centering}, but the expected score of the sampler is not known with "
                f"{', '.join(wrong)}: set surrogate to {{kind: reinforce}}, or to {{kind: weighted, positive: {{kind: "
                "clamp, hi: C}, negative: {kind: clamp, hi: C}} with the same finite C, anchor: behaviour and level: "
                "token; set weight, dropped and pre_clip to null, and gates to []; or remove centering"
            )

        if sum(penalty.control is not None for penalty in self.penalties) > 1:
            yield "two penalties have control, but a step records only one β: remove control from one of them"

        if self.chosen() and self.proximal == "interpolated":
            yield (
                "dropped and the tokens of penalties are chosen by the log-probs at the step's start, but proximal is "
                "interpolated: set proximal to recomputed"
            )

    def controlled(self) -> Penalty | None:
        """Returns the penalty that has `control`; None if there is none."""
        return next((penalty for penalty in self.penalties if penalty.control is not None), None)

    def chosen(self) -> dict[str, ByCovariance]:
        """Returns each `ByCovariance` of the objective. The key is the axis that has it, such as `penalties.0`."""
        found = {"dropped": self.dropped} | {f"penalties.{i}": each.tokens for i, each in enumerate(self.penalties)}
        return {place: choice for place, choice in found.items() if choice is not None}

    def sources(self) -> set[str]:
        """Returns the names of the policies whose log-probs the objective needs, other than the current policy."""
        pairs: list[tuple[str, str]] = [(gate.p, gate.q) for gate in self.gates]
        pairs += [(self.weight.p, self.weight.q)] if self.weight is not None else []
        pairs += [(p.q, p.corrected_by) for p in self.penalties if p.kind not in ("entropy", "positive_nll")]
        pairs += [("current", "behaviour")] if reads_effective_share(self) else []
        pairs += [("proximal", "behaviour" if c.order == "random" else "none") for c in self.chosen().values()]
        used = {source for pair in pairs for source in pair} - {"current", "none"}
        return used | ({self.anchor} - {"current"} if uses_ratio(self.surrogate) else set())


_OF_THE_RATIO = {"anchor": "proximal", "level": "token", "pre_clip": None}
"""Axes that only the ratio of the surrogate reads, with their default values."""


def uses_ratio(surrogate: Surrogate) -> bool:
    """Returns True if the surrogate depends on the ratio u. `Reinforce` does not, and neither does a `Weighted` one
    whose two kernels are each clamped to a single number."""
    if isinstance(surrogate, Weighted):
        return not all(isinstance(k, Clamp) and k.lo == k.hi for k in (surrogate.positive, surrogate.negative))
    return not isinstance(surrogate, Reinforce)


def centered_kernel(objective: Objective) -> tuple[float, float]:
    """Returns the bounds (lo, hi) of the kernel w(u) = clamp(u, lo, hi) of an objective with `centering`; (1, 1)
    with the surrogate `reinforce`."""
    surrogate = objective.surrogate
    kernel = surrogate.positive if isinstance(surrogate, Weighted) else None
    return (kernel.lo, kernel.hi) if isinstance(kernel, Clamp) else (1.0, 1.0)


def _uncentered(objective: Objective) -> list[str]:
    """Returns the parts of an objective with which the expected score of the sampler is not known, in words for an
    error."""
    surrogate, found = objective.surrogate, list[str]()
    if not isinstance(surrogate, Reinforce | Weighted):
        found.append(f"surrogate: {{kind: {surrogate.__struct_config__.tag}}}")
    elif not isinstance(surrogate, Reinforce):
        kernel = surrogate.positive
        if surrogate.negative != kernel or not isinstance(kernel, Clamp) or kernel.ess or kernel.hi == math.inf:
            found.append(f"the kernels {surrogate.positive} and {surrogate.negative}")
    if uses_ratio(surrogate) and (objective.anchor, objective.level) != ("behaviour", "token"):
        found.append(f"anchor: {objective.anchor} and level: {objective.level}")
    unset = {"weight": None, "gates": (), "dropped": None, "pre_clip": None}
    return found + [name for name, none in unset.items() if getattr(objective, name) != none]


def _kernels_with_ess(surrogate: Surrogate) -> bool:
    kernels = (surrogate.positive, surrogate.negative) if isinstance(surrogate, Weighted) else ()
    return any(isinstance(kernel, Clamp) and kernel.ess for kernel in kernels)


def reads_effective_share(objective: Objective) -> bool:
    """Returns True if a kernel or a penalty depends on the effective share of the step's tokens."""
    return _kernels_with_ess(objective.surrogate) or any(penalty.ess for penalty in objective.penalties)


# The functions below derive properties of an objective, such as whether it corrects for samples of older weights.


def pooled_sources(objective: Objective) -> frozenset[str]:
    """Returns the policies whose log-probs are used in a ratio, weight or gate of a whole sequence. `current` is the
    policy that is trained.

    `current` and `behaviour` replace an interpolated `proximal`, which is computed from their log-probs.
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
    """Returns True if the objective corrects for samples of older weights, which a run with `staleness.max_versions`
    above 0 needs.

    It corrects if its ratio is against the sampler, if its weight divides the probability under the current or the
    proximal policy by the sampler's, or if a gate compares one of these two policies with the sampler. A clip against
    the proximal policy does not correct: with one update a step, its ratio is 1.
    """
    weight, trained = objective.weight, {"current", "proximal"}
    return (
        (uses_ratio(objective.surrogate) and objective.anchor == "behaviour")
        or (weight is not None and weight.p in trained and weight.q == "behaviour")
        or any("behaviour" in {gate.p, gate.q} and trained & {gate.p, gate.q} for gate in objective.gates)
    )


def corrects_twice(objective: Objective) -> bool:
    """Returns True if both the ratio and the weight correct for the sampler. If ρ is the ratio of the learner's to the
    sampler's probability, a token then has an importance weight of about ρ²."""
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
    """Returns the names of the parts that only compare the current policy with a recomputed proximal policy.

    If a step has a single update, the two policies are equal. Then a ratio is 1, and a divergence and its gradient
    are 0, so these parts have no effect. A penalty of kind `k1` is not among them, because its gradient is not 0.
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
        if penalty.kind in ("k2", "k3", "k3+", "abs") and penalty.q == "proximal"
    ]


def averages_advantages(objective: Objective) -> bool:
    """Returns True if every token of a sequence gets the gradient of the sequence's mean advantage. This happens when
    the gradient goes through a ratio of the whole sequence."""
    through_the_ratio = not isinstance(objective.surrogate, Reinforce | Weighted)
    return through_the_ratio and objective.level in ("sequence_mean", "sequence_sum")
