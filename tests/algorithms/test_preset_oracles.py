"""Presets without an off-policy correction, worked by hand from their papers: both signs of A, both sides of bounds.

u = current / proximal, and proximal = 0.2 unless a case sets it. A case gives every token's loss and d loss / d
log-prob before the aggregation, and the aggregation's divisor: T = 10 (token mean), N · length with N = 4 (sequence
mean), or N (sequence sum). d u / d lp = u, so a term −A · u has the gradient −A · u, and a clipped one has none.
`test_off_policy_oracles.py` has the other presets.
"""

import math

import msgspec
import pytest
from worked_sequences import Worked, assert_as_worked, log_weighted, with_choices

from asyncrl.algorithms.presets import PRESETS

LN3 = math.log(3)
T, N = 10, 4


def ppo_clip(over: float) -> tuple[Worked, ...]:
    """max(−A·u, −A·clamp(u, .8, 1.2)) at u = 1.5, 1.25, .5.

    A = 2: 1.2 bounds the first two at −2.4, without a gradient; below, −2 · .5 = −1 is larger than −2 · .8 and is kept.
    A = −2: there is no upper bound, so 2u = 3 and 2.5; below, 2 · .8 = 1.6 is larger than 2 · .5 and has no gradient.
    A bad token far above (u = 4) is not bounded either; the option `dual` bounds it.
    """
    return (
        Worked(advantage=2, current=(0.3, 0.25, 0.1), losses=(-2.4, -2.4, -1), gradients=(0, 0, -1), over=over),
        Worked(advantage=-2, current=(0.3, 0.25, 0.1), losses=(3, 2.5, 1.6), gradients=(3, 2.5, 0), over=over),
        Worked(advantage=-2, current=(0.8, 0.2, 0.2), losses=(8, 2, 2), gradients=(8, 2, 2), over=over),
    )


# hi = 1.28: u = 1.25 is now inside, −2 · 1.25; u = 1.5 is bounded at −2.56
CLIP_HIGHER = (
    Worked(advantage=2, current=(0.3, 0.25, 0.1), losses=(-2.56, -2.5, -1), gradients=(0, -2.5, -1), over=T),
    Worked(advantage=-2, current=(0.3, 0.25, 0.1), losses=(3, 2.5, 1.6), gradients=(3, 2.5, 0), over=T),
)

# S = −A · lp, for all ratios
PLAIN = {
    over: (
        Worked(
            advantage=2,
            current=(0.3, 0.1),
            losses=(-2 * math.log(0.3), -2 * math.log(0.1)),
            gradients=(-2, -2),
            over=over,
        ),
        Worked(advantage=-2, current=(0.5,), losses=(2 * math.log(0.5),), gradients=(2,), over=over),
    )
    for over in (T, N)
}

WORKED: dict[str, tuple[Worked, ...]] = {
    "ppo": ppo_clip(T),
    # sequences with a positive reward add 0.1 · −lp, divided by their 5 tokens: this equals 0.2 · −lp, divided by 10
    "vapo": (
        *CLIP_HIGHER,
        Worked(
            advantage=2,
            current=(0.3, 0.1),
            reward=0.5,
            losses=(-2.56 - 0.2 * math.log(0.3), -1 - 0.2 * math.log(0.1)),
            gradients=(-0.2, -1.2),
            over=T,
        ),
        Worked(
            advantage=-2, current=(0.25,), reward=1.0, losses=(2.5 - 0.2 * math.log(0.25),), gradients=(2.3,), over=T
        ),
        Worked(advantage=-2, current=(0.25,), reward=-1.0, losses=(2.5,), gradients=(2.5,), over=T),
    ),
    "dapo": CLIP_HIGHER,
    # N · C with C = 5, for all lengths
    "dr_grpo": ppo_clip(N * 5),
    # k3 = e^−d − 1 + d with d = ln(current / reference), e^−d = reference / current = 1/3, 1, 3; d k3 / d lp = 1 − e^−d
    "grpo": (
        Worked(
            advantage=2,
            current=(0.3, 0.25, 0.1),
            reference=(0.1, 0.25, 0.3),
            losses=(-2.4 + 0.04 * (1 / 3 - 1 + LN3), -2.4, -1 + 0.04 * (3 - 1 - LN3)),
            gradients=(0.04 * (1 - 1 / 3), 0, -1 + 0.04 * (1 - 3)),
            over=N * 3,
        ),
        # the same for a bad sequence of one token, whose mean divides by one token
        Worked(
            advantage=-2,
            current=(0.3,),
            reference=0.1,
            losses=(3 + 0.04 * (1 / 3 - 1 + LN3),),
            gradients=(3 + 0.04 * (1 - 1 / 3),),
            over=N * 1,
        ),
    ),
    # k2 = d² / 2, d k2 / d lp = d = ln 3, −ln 3
    "reinforce_pp": (
        Worked(
            advantage=2,
            current=(0.3, 0.1),
            reference=(0.1, 0.3),
            losses=(-2.4 + 0.01 * LN3**2 / 2, -1 + 0.01 * LN3**2 / 2),
            gradients=(0.01 * LN3, -1 - 0.01 * LN3),
            over=T,
        ),
        Worked(
            advantage=-2,
            current=(0.3, 0.1),
            reference=(0.1, 0.3),
            losses=(3 + 0.01 * LN3**2 / 2, 1.6 + 0.01 * LN3**2 / 2),
            gradients=(3 + 0.01 * LN3, -0.01 * LN3),
            over=T,
        ),
    ),
    "reinforce": PLAIN[T],
    "opo": PLAIN[T],
    "gpg": PLAIN[T],
    "maxrl": ppo_clip(T),
    "gdpo": ppo_clip(T),
    "rloo": PLAIN[N],
    # −A · lp + τ/2 · (ln current/proximal)², τ = 0.1; its gradient is −A + τ · ln(current/proximal), at ratios 3 and
    # 1/3
    # c = A · ln(proximal / .2) with the means ln .2 and 0. Only the token with c = 2 ln 2 = 1.39 has |ln u| added
    "kl_cov": (
        Worked(
            advantage=2,
            current=(0.6, 0.3, 0.05),
            proximal=(0.4, 0.2, 0.1),
            losses=(-3 + math.log(1.5), -3, -1),
            gradients=(-3 + 1, -3, -1),
            over=T,
        ),
        Worked(
            advantage=-2,
            current=(0.6, 0.3, 0.05),
            proximal=(0.4, 0.2, 0.1),
            losses=(3, 3, 1 + math.log(2)),
            gradients=(3, 3, 1 - 1),
            over=T,
        ),
    ),
    # c = 2 ln 2 is between 1 and 5. c = 0, c = −2 ln 2 and c = 2 ln 20 = 5.99 are not, and the PPO clip is left
    "clip_cov": (
        Worked(
            advantage=2,
            current=(0.6, 0.3, 0.05),
            proximal=(0.4, 0.2, 0.1),
            losses=(0, -2.4, -1),
            gradients=(0, 0, -1),
            over=T,
        ),
        Worked(
            advantage=-2,
            current=(0.6, 0.15, 0.015),
            proximal=(0.4, 0.1, 0.01),
            losses=(3, 0, 3),
            gradients=(3, 0, 3),
            over=T,
        ),
    ),
    "kimi": (
        Worked(
            advantage=2,
            current=(0.3, 0.1),
            proximal=(0.1, 0.3),
            losses=(-2 * math.log(0.3) + 0.05 * LN3**2, -2 * math.log(0.1) + 0.05 * LN3**2),
            gradients=(-2 + 0.1 * LN3, -2 - 0.1 * LN3),
            over=T,
        ),
        Worked(
            advantage=-2,
            current=(0.3,),
            proximal=0.1,
            losses=(2 * math.log(0.3) + 0.05 * LN3**2,),
            gradients=(2 + 0.1 * LN3,),
            over=T,
        ),
    ),
    # u = 4, 2.5, .5: a bad token's loss is at most 3 · 2, without a gradient above; a good token's is as without dual
    "dual_clip": (
        Worked(advantage=-2, current=(0.8, 0.5, 0.1), losses=(6, 5, 1.6), gradients=(0, 5, 0), over=T),
        Worked(advantage=2, current=(0.8, 0.5, 0.1), losses=(-2.4, -2.4, -1), gradients=(0, 0, -1), over=T),
    ),
    # u = 4.5, 3.5, .5, with u itself capped at 4
    "two_sided": (
        Worked(advantage=-2, current=(0.9, 0.7, 0.1), losses=(8, 7, 1.6), gradients=(0, 7, 0), over=T),
        Worked(advantage=2, current=(0.9, 0.7, 0.1), losses=(-2.4, -2.4, -1), gradients=(0, 0, -1), over=T),
    ),
    # s = (∏ u)^(1/length), d s / d lp_t = s / length. Every token of the sequence has the loss S(s), so the gradient,
    # summed over the tokens of the sequence, is −A · s. The mean over the tokens then divides by the length
    "gspo": (
        # A > 0: u = (.4, .1) → s = .2, below lo but not bounded there; u = (2, 4.5) → s = 3, bounded at 1.0004
        Worked(advantage=2, current=(0.08, 0.02), losses=(-0.4, -0.4), gradients=(-0.4, -0.4), over=N * 2),
        Worked(advantage=2, current=(0.4, 0.9), losses=(-2.0008, -2.0008), gradients=(0, 0), over=N * 2),
        # A < 0: the bounds act on the other sides, 2 · .9997
        Worked(advantage=-2, current=(0.08, 0.02), losses=(1.9994, 1.9994), gradients=(0, 0), over=N * 2),
        Worked(advantage=-2, current=(0.4, 0.9), losses=(6, 6), gradients=(6, 6), over=N * 2),
        # s of one token is its u: 1.0003 and .9998 lie inside for both signs
        Worked(advantage=2, current=(0.20006,), losses=(-2.0006,), gradients=(-2.0006,), over=N),
        Worked(advantage=-2, current=(0.19996,), losses=(1.9996,), gradients=(1.9996,), over=N),
    ),
    # s_t = sg(s) · π/sg(π): it has the value of gspo, and a token's loss has a gradient only at that token, −A · s.
    # With one advantage for the sequence this is gspo's gradient; `test_axes_by_hand.py` has advantages that differ
    "gspo_token": (
        Worked(advantage=2, current=(0.08, 0.02), losses=(-0.4, -0.4), gradients=(-0.4, -0.4), over=N * 2),
        Worked(advantage=2, current=(0.4, 0.9), losses=(-2.0008, -2.0008), gradients=(0, 0), over=N * 2),
        Worked(advantage=-2, current=(0.08, 0.02), losses=(1.9994, 1.9994), gradients=(0, 0), over=N * 2),
        Worked(advantage=-2, current=(0.4, 0.9), losses=(6, 6), gradients=(6, 6), over=N * 2),
    ),
    # like gspo with wider bounds, but the aggregation does not divide by the length
    "luspo": (
        Worked(advantage=2, current=(0.08, 0.02), losses=(-0.4, -0.4), gradients=(-0.4, -0.4), over=N),
        Worked(advantage=2, current=(0.4, 0.9), losses=(-2.005, -2.005), gradients=(0, 0), over=N),
        Worked(advantage=-2, current=(0.08, 0.02), losses=(1.996, 1.996), gradients=(0, 0), over=N),
        Worked(advantage=-2, current=(0.4, 0.9), losses=(6, 6), gradients=(6, 6), over=N),
        Worked(advantage=2, current=(0.2004,), losses=(-2.004,), gradients=(-2.004,), over=N),
        Worked(advantage=-2, current=(0.1997,), losses=(1.997,), gradients=(1.997,), over=N),
    ),
    # log u = (.8, −.8). A > 0: bounded above at .4, s = e^((.4 − .8)/2); the bounded token has no gradient, the other
    # as in gspo. A < 0: bounded below at −.4, s = e^((.8 − .4)/2), and the second token has no gradient
    "gmpo": (
        Worked(
            advantage=2,
            current=(0.2 * math.exp(0.8), 0.2 * math.exp(-0.8)),
            losses=(-2 * math.exp(-0.2),) * 2,
            gradients=(0, -2 * math.exp(-0.2)),
            over=N * 2,
        ),
        Worked(
            advantage=-2,
            current=(0.2 * math.exp(0.8), 0.2 * math.exp(-0.8)),
            losses=(2 * math.exp(0.2),) * 2,
            gradients=(2 * math.exp(0.2), 0),
            over=N * 2,
        ),
    ),
    # −A · min(u, 5) · lp with the weight detached: the gradient is −A · min(u, 5), at u = 8, 1.5, .5
    "cispo": (
        log_weighted(advantage=2, current=(0.8, 0.3, 0.1), proximal=(0.1, 0.2, 0.2), gradients=(-10, -3, -1)),
        log_weighted(advantage=-2, current=(0.8, 0.1), proximal=(0.1, 0.2), gradients=(10, 1)),
    ),
    # A > 0: the weight is 1/u, at most 3; u > 1.2 is gated. u = .5 → 2, .25 → 3 (not 4), 1.5 → gated, 1.1 → 1/1.1
    # A < 0: the weight is u, at most 3; u < .8 is gated. u = 4 → 3, 2 → 2, .5 → gated, .9 → .9
    "aspo": (
        log_weighted(advantage=2, current=(0.1, 0.05, 0.3, 0.22), gradients=(-4, -6, 0, -2 / 1.1)),
        log_weighted(advantage=-2, current=(0.8, 0.4, 0.1, 0.18), gradients=(6, 4, 0, 1.8)),
    ),
    # −A·u + |A| (u − 1)² / .4, d/d lp = u · (−A + |A| (u − 1) / .2): 0 at u = 1.2 where A > 0, at .8 where A < 0
    "cfpo": (
        Worked(advantage=2, current=(0.3, 0.1, 0.24), losses=(-1.75, 0.25, -2.2), gradients=(4.5, -3.5, 0), over=N * 3),
        Worked(advantage=-2, current=(0.3, 0.1, 0.16), losses=(4.25, 2.25, 1.8), gradients=(10.5, -1.5, 0), over=N * 3),
    ),
    # σ(ln 3) = 3/4 and σ(−ln 1.5) = 2/5. So u = 1 + ln 3 / τ and 1 − ln 1.5 / τ give f = (4/τ) · 3/4 and (4/τ) · 2/5,
    # and d f / d lp = 4 · σ · (1 − σ) · u = .75 u and .96 u. τ is 1 where A > 0, and 1.05 where A < 0
    "sapo": (
        Worked(
            advantage=2,
            current=(0.2 * (1 + LN3), 0.2 * (1 - math.log(1.5))),
            losses=(-2 * 3, -2 * 1.6),
            gradients=(-2 * 0.75 * (1 + LN3), -2 * 0.96 * (1 - math.log(1.5))),
            over=N * 2,
        ),
        Worked(
            advantage=-2,
            current=(0.2 * (1 + LN3 / 1.05), 0.2 * (1 - math.log(1.5) / 1.05)),
            losses=(2 * 3 / 1.05, 2 * 1.6 / 1.05),
            gradients=(2 * 0.75 * (1 + LN3 / 1.05), 2 * 0.96 * (1 - math.log(1.5) / 1.05)),
            over=N * 2,
        ),
    ),
}


@pytest.mark.parametrize("name", list(WORKED))
def test_value_and_gradient_are_those_worked_by_hand(name: str) -> None:
    objective = PRESETS[name].objective
    if name == "dr_grpo":
        objective = msgspec.structs.replace(objective, constant=5.0)
    objective = with_choices(objective, above=1.0)
    for sequence in WORKED[name]:
        assert_as_worked(objective, (sequence,))
    assert_as_worked(objective, WORKED[name])
