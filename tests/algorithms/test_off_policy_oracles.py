"""Presets that correct for the sampler's older weights, worked by hand from their papers: both sides of every bound.

u = current / proximal, ρ = proximal / behaviour, and proximal = 0.2 unless a case sets it. As in
`test_preset_oracles.py`, losses and gradients are before the aggregation, and `over` is the aggregation's divisor. The
step has T = 10 tokens and N = 4 sequences. A token that is weighted or left out still counts in both.
"""

import math

import msgspec
import pytest
from test_preset_oracles import WORKED as WITHOUT_CORRECTION
from worked_sequences import Worked, assert_as_worked, log_weighted

from asyncrl.algorithms.objective import Clamp, Weighted
from asyncrl.algorithms.presets import PRESETS

T, N = 10, 4

# u = 1.5, .5 with the PPO clip .8/1.2: losses −2.4, −1 and gradients 0, −1 where A = 2; 3, 1.6 and 3, 0 where A = −2
GOOD, GOOD_GRADIENT = (-2.4, -1.0), (0.0, -1.0)
BAD, BAD_GRADIENT = (3.0, 1.6), (3.0, 0.0)


def weighted(
    weights: tuple[float, float], *, behaviour: float | tuple[float, ...], over: float = T
) -> tuple[Worked, Worked]:
    """Returns both signs of A at u = 1.5 and .5, with each token's loss and gradient multiplied by its weight."""
    return (
        Worked(
            advantage=2,
            current=(0.3, 0.1),
            behaviour=behaviour,
            losses=(GOOD[0] * weights[0], GOOD[1] * weights[1]),
            gradients=(GOOD_GRADIENT[0] * weights[0], GOOD_GRADIENT[1] * weights[1]),
            over=over,
        ),
        Worked(
            advantage=-2,
            current=(0.3, 0.1),
            behaviour=behaviour,
            losses=(BAD[0] * weights[0], BAD[1] * weights[1]),
            gradients=(BAD_GRADIENT[0] * weights[0], BAD_GRADIENT[1] * weights[1]),
            over=over,
        ),
    )


DPPO_RATIOS = (2.5, 1.5, 0.4, 0.8, 20.5)

WORKED: dict[str, tuple[Worked, ...]] = {
    # ρ = 4 is clamped to 2, and ρ = .25 is kept, because there is no lower bound
    "tis": weighted((2, 0.25), behaviour=(0.05, 0.8)) + weighted((0.25, 2), behaviour=(0.8, 0.05)),
    # ρ = 4 and .625 are kept, ρ = 10 and .4 are zeroed
    "icepop": weighted((4, 0.625), behaviour=(0.05, 0.32))
    + weighted((0.625, 4), behaviour=(0.32, 0.05))
    + weighted((0, 0), behaviour=(0.02, 0.5))
    + weighted((0, 0), behaviour=(0.5, 0.02)),
    # one weight for the sequence, ρ₁ · ρ₂: 4 · .25 = 1, 2 · .625 = 1.25, .5 · .4 = .2, and 2 · 4 = 8 is clamped to 2
    "seq_tis": weighted((1, 1), behaviour=(0.05, 0.8))
    + weighted((1.25, 1.25), behaviour=(0.1, 0.32))
    + weighted((0.2, 0.2), behaviour=(0.4, 0.5))
    + weighted((2, 2), behaviour=(0.1, 0.05)),
    # √(ρ₁ · ρ₂): 4 · .25 → 1 is kept although each ratio is far from 1; 1.0005 and .9995 are kept, 1.002 and .998 are
    # not
    "geometric_rejection": weighted((1, 1), behaviour=(0.05, 0.8))
    + weighted((1, 1), behaviour=0.2 / 1.0005)
    + weighted((1, 1), behaviour=0.2 / 0.9995)
    + weighted((0, 0), behaviour=0.2 / 1.002)
    + weighted((0, 0), behaviour=0.2 / 0.998),
    # ρ has no cap: 4 and .025 (proximal .02, behaviour .8, u = 1.5); ρ = 10 is gated
    "decoupled_ppo": (
        *weighted((4, 0.25), behaviour=(0.05, 0.8)),
        *weighted((0, 4), behaviour=(0.02, 0.05)),
        *weighted((4, 0), behaviour=(0.05, 0.02)),
        Worked(
            advantage=-2, current=(0.03,), proximal=0.02, behaviour=0.8, losses=(0.075,), gradients=(0.075,), over=T
        ),
    ),
    # the proximal policy is behaviour^(1/d) · current^(1 − 1/d); `prev_logprobs` is not read:
    #   current .4, behaviour .1, d = 2 → .2: u = 2, ρ = 2, S = ρ · 2u = 8 where A < 0, ρ · −2.4 where A > 0
    #   d = 1 → behaviour: u = 4, ρ = 1; d = 0 → current: u = 1, ρ = 4
    #   current .8, behaviour .05, d = 4 → .05 · 16^¾ = .4: u = 2, ρ = 8 > 5 is gated
    #   current .1, behaviour .4, d = 2 → .2: u = .5, ρ = .5, S = ρ · −2u where A > 0, ρ · 1.6 where A < 0
    # the interpolated policy is detached: the gradient is ρ · −A · u, not (1/d) of it
    "a3po": (
        Worked(
            advantage=-2,
            current=(0.4, 0.4, 0.4, 0.8, 0.1),
            behaviour=(0.1, 0.1, 0.1, 0.05, 0.4),
            proximal=0.9,
            staleness=(2, 1, 0, 4, 2),
            losses=(8, 8, 8, 0, 0.8),
            gradients=(8, 8, 8, 0, 0),
            over=T,
        ),
        Worked(
            advantage=2,
            current=(0.4, 0.4, 0.4, 0.8, 0.1),
            behaviour=(0.1, 0.1, 0.1, 0.05, 0.4),
            proximal=0.9,
            staleness=(2, 1, 0, 4, 2),
            losses=(-4.8, -2.4, -8, 0, -0.5),
            gradients=(0, 0, -8, 0, -0.5),
            over=T,
        ),
    ),
    # clip .8/1.28 with dual 3, times ρ = 2 (behaviour .1); zero where ρ = 10
    #   A = 2: u = 1.5 → −2.56, 1.25 → −2.5, .5 → −1. A = −2: u = 4 → 6 without a gradient, 2.5 → 5, .5 → 1.6
    "decoupled_icepop": (
        Worked(
            advantage=2,
            current=(0.3, 0.25, 0.1),
            behaviour=0.1,
            losses=(-5.12, -5, -2),
            gradients=(0, -5, -2),
            over=T,
        ),
        Worked(
            advantage=-2,
            current=(0.8, 0.5, 0.1),
            behaviour=0.1,
            losses=(12, 10, 3.2),
            gradients=(0, 10, 0),
            over=T,
        ),
        Worked(advantage=-2, current=(0.5, 0.5), behaviour=(0.02, 0.5), losses=(0, 0), gradients=(0, 0), over=T),
        Worked(advantage=2, current=(0.1, 0.1), behaviour=(0.02, 0.5), losses=(0, 0), gradients=(0, 0), over=T),
    ),
    # D = mean ln(behaviour / current); a sequence is left out if A < 0 and D > .02. The mean divides by the length.
    "opsm": (
        # bad, current = behaviour / 2: D = ln 2
        Worked(advantage=-2, current=(0.3, 0.1), behaviour=(0.6, 0.2), losses=(0, 0), gradients=(0, 0), over=N * 2),
        # bad, D = (ln 2 − ln 3) / 2 < 0: one token became more likely and so keeps the other token, too
        Worked(advantage=-2, current=(0.3, 0.1), behaviour=(0.1, 0.2), losses=BAD, gradients=BAD_GRADIENT, over=N * 2),
        # bad, D = .015 and .025 for each token: the sum over two tokens would exceed the bound in both cases
        Worked(
            advantage=-2,
            current=(0.3, 0.1),
            behaviour=(0.3 * math.exp(0.015), 0.1 * math.exp(0.015)),
            losses=BAD,
            gradients=BAD_GRADIENT,
            over=N * 2,
        ),
        Worked(
            advantage=-2,
            current=(0.3, 0.1),
            behaviour=(0.3 * math.exp(0.025), 0.1 * math.exp(0.025)),
            losses=(0, 0),
            gradients=(0, 0),
            over=N * 2,
        ),
        # good: never left out
        Worked(advantage=2, current=(0.3, 0.1), behaviour=(0.6, 0.2), losses=GOOD, gradients=GOOD_GRADIENT, over=N * 2),
    ),
    # −A · r with r = current / behaviour, no clip. The step's bound is ½ ln² r ≤ .05, so r in [.729, 1.372]. A token
    # beyond it is left out if r > 1 and A > 0, or if r < 1 and A < 0. r = 1.5, 1.3, .5, .8
    "m2po": (
        Worked(
            advantage=2,
            current=(0.3, 0.26, 0.1, 0.16),
            behaviour=0.2,
            proximal=0.6,
            losses=(0, -2.6, -1, -1.6),
            gradients=(0, -2.6, -1, -1.6),
            over=T,
        ),
        Worked(
            advantage=-2,
            current=(0.3, 0.26, 0.1, 0.16),
            behaviour=0.2,
            proximal=0.6,
            losses=(3, 2.6, 0, 1.6),
            gradients=(3, 2.6, 0, 1.6),
            over=T,
        ),
    ),
    # −A · min(r, 5) · lp with the weight detached: r = 8, .5
    "aipo": (
        log_weighted(advantage=2, current=(0.4, 0.1), behaviour=(0.05, 0.2), gradients=(-10, -1)),
        log_weighted(advantage=-2, current=(0.4, 0.1), behaviour=(0.05, 0.2), gradients=(10, 1)),
    ),
    # the same with min(r, 2)
    "score_centering": (
        log_weighted(advantage=2, current=(0.4, 0.1), behaviour=(0.05, 0.2), gradients=(-4, -1)),
        log_weighted(advantage=-2, current=(0.4, 0.1), behaviour=(0.05, 0.2), gradients=(4, 1)),
    ),
    # the same with min(r, 1)
    "vtrace": (
        log_weighted(advantage=2, current=(0.4, 0.1), behaviour=(0.05, 0.2), gradients=(-2, -1)),
        log_weighted(advantage=-2, current=(0.4, 0.1), behaviour=(0.05, 0.2), gradients=(2, 1)),
    ),
    # good sequences have weight 1, bad ones min(r₁ · r₂, 1): 8 · .5 = 4 → 1, then 2 · .25 = .5
    "topr": (
        log_weighted(advantage=2, current=(0.4, 0.1), behaviour=(0.05, 0.2), gradients=(-2, -2)),
        log_weighted(advantage=-2, current=(0.4, 0.1), behaviour=(0.05, 0.2), gradients=(2, 2)),
        log_weighted(advantage=-2, current=(0.1, 0.1), behaviour=(0.05, 0.4), gradients=(1, 1)),
    ),
    # w = r₁ · r₂; φ = w² e^(3(1 − w)) where A > 0, w³ e^(2(1 − w)) where A < 0, detached. w = 4 · .5 = 2, then 2 · .25
    "vespo": (
        log_weighted(
            advantage=2, current=(0.4, 0.1), behaviour=(0.1, 0.2), gradients=(-8 * math.exp(-3), -8 * math.exp(-3))
        ),
        log_weighted(
            advantage=-2, current=(0.4, 0.1), behaviour=(0.1, 0.2), gradients=(16 * math.exp(-2), 16 * math.exp(-2))
        ),
        log_weighted(
            advantage=2,
            current=(0.4, 0.1),
            behaviour=(0.2, 0.4),
            gradients=(-0.5 * math.exp(1.5), -0.5 * math.exp(1.5)),
        ),
        log_weighted(advantage=-2, current=(0.4, 0.1), behaviour=(0.2, 0.4), gradients=(0.25 * math.e, 0.25 * math.e)),
    ),
    # −A · min(r, 20) · lp; zero where the probability moved by more than .2 in the direction in which A pushes it:
    #   .2 → .5, .2 → .3, .5 → .2, .5 → .4, and r = 20.5 with a move of .195
    "dppo_tv": (
        log_weighted(
            advantage=2,
            current=(0.5, 0.3, 0.2, 0.4, 0.205),
            behaviour=(0.2, 0.2, 0.5, 0.5, 0.01),
            gradients=(0, -3, -0.8, -1.6, -40),
        ),
        log_weighted(
            advantage=-2,
            current=(0.5, 0.3, 0.2, 0.4, 0.205),
            behaviour=(0.2, 0.2, 0.5, 0.5, 0.01),
            gradients=(5, 3, 0, 1.6, 40),
        ),
    ),
    # −A · r without a bound; zero where the probability moved by more than .2 in the direction in which A pushes it.
    # Every token, also a gated one, adds 1e-3 · ln² r, whose gradient is 2e-3 · ln r. r = 2.5, 1.5, .4, .8, 20.5
    "dppo_tv_k2": tuple(
        Worked(
            advantage=advantage,
            current=(0.5, 0.3, 0.2, 0.4, 0.205),
            behaviour=(0.2, 0.2, 0.5, 0.5, 0.01),
            losses=tuple(s + 1e-3 * math.log(r) ** 2 for s, r in zip(pushes, DPPO_RATIOS, strict=True)),
            gradients=tuple(s + 2e-3 * math.log(r) for s, r in zip(pushes, DPPO_RATIOS, strict=True)),
            over=T,
        )
        for advantage, pushes in ((2, (0, -3, -0.8, -1.6, -41)), (-2, (5, 3, 0, 1.6, 41)))
    ),
    # −A · r · lp with r detached; zero outside [.7, 6] for both signs of A: r = .65, .75, 5.5, 6.5
    "glm5": (
        log_weighted(
            advantage=2, current=(0.13, 0.15, 0.55, 0.65), behaviour=(0.2, 0.2, 0.1, 0.1), gradients=(0, -1.5, -11, 0)
        ),
        log_weighted(
            advantage=-2, current=(0.13, 0.15, 0.55, 0.65), behaviour=(0.2, 0.2, 0.1, 0.1), gradients=(0, 1.5, 11, 0)
        ),
    ),
    # with an effective share of .5: −A · min(r, .5) · lp + .5 · (1/r − 1 + ln r). The gradient of the second term is
    # .5 · (1 − 1/r). r = .25, 4: second terms (3 − ln 4)/2 and (ln 4 − .75)/2, with gradients −1.5 and .375
    "p3o": tuple(
        Worked(
            advantage=advantage,
            current=(0.05, 0.8),
            behaviour=0.2,
            losses=(
                -advantage * 0.25 * math.log(0.05) + (3 - math.log(4)) / 2,
                -advantage * 0.5 * math.log(0.8) + (math.log(4) - 0.75) / 2,
            ),
            gradients=(-advantage * 0.25 - 1.5, -advantage * 0.5 + 0.375),
            over=T,
        )
        for advantage in (2, -2)
    ),
    # (β · ln(r₁ · r₂) − A)² of the sequence, β = 1e-3, at each of its two tokens; the mean over the tokens counts it
    # once. r₁ · r₂ = 4 · .5 = 2: with d = 1e-3 · ln 2 − A, the log-prob of a token changes both terms by 2 · 1e-3 · d
    "oapl": tuple(
        Worked(
            advantage=advantage,
            current=(0.4, 0.1),
            behaviour=(0.1, 0.2),
            losses=((1e-3 * math.log(2) - advantage) ** 2,) * 2,
            gradients=(4e-3 * (1e-3 * math.log(2) - advantage),) * 2,
            over=N * 2,
        )
        for advantage in (2, -2)
    ),
    # as dppo_tv, but zero where KL(behaviour ‖ current) of the token against all other tokens is above .05:
    #   .2 → .4: .2 ln ½ + .8 ln(.8/.6) = .092; .5 → .3: .5 ln(5/3) + .5 ln(5/7) = .087
    #   .01 → .06: .01 ln(1/6) + .99 ln(.99/.94) = .033, although KL(current ‖ behaviour) = .059
    #   .4 → .3: .4 ln(4/3) + .6 ln(6/7) = .023
    "dppo_kl": (
        log_weighted(
            advantage=2, current=(0.4, 0.3, 0.06, 0.3), behaviour=(0.2, 0.5, 0.01, 0.4), gradients=(0, -1.2, -12, -1.5)
        ),
        log_weighted(
            advantage=-2, current=(0.4, 0.3, 0.06, 0.3), behaviour=(0.2, 0.5, 0.01, 0.4), gradients=(4, 0, 12, 1.5)
        ),
    ),
    # one weight current / behaviour without a cap; a sequence is left out where the mean of its tokens' KL(behaviour ‖
    # current) against all other tokens is above .003. The mean over the sequence divides by all of its tokens.
    #   .2 → .21 and .4 → .38: (.0003 + .0008) / 2; .25 → .3: .0062, a third of which is inside, and the half is not
    "flash_reinforce": tuple(
        log_weighted(
            advantage=advantage,
            current=current,
            behaviour=behaviour,
            gradients=tuple(-advantage * weight for weight in weights),
            over=N * len(current),
        )
        for advantage in (2, -2)
        for current, behaviour, weights in (
            ((0.21, 0.38), (0.2, 0.4), (1.05, 0.95)),
            ((0.3, 0.4, 0.5), (0.25, 0.4, 0.5), (1.2, 1, 1)),
            ((0.3, 0.4), (0.25, 0.4), (0, 0)),
        )
    ),
}


@pytest.mark.parametrize("name", list(WORKED))
def test_value_and_gradient_are_those_worked_by_hand(name: str) -> None:
    objective = PRESETS[name].objective
    gates = tuple(
        # sets the bound that the step's calibration would compute
        msgspec.structs.replace(gate, budget=None, hi=0.05) if gate.budget is not None else gate
        for gate in objective.gates
    )
    objective = msgspec.structs.replace(objective, gates=gates)
    if name == "p3o":
        capped, [pull] = Clamp(ess=True, hi=0.5), objective.penalties
        objective = msgspec.structs.replace(
            objective,
            surrogate=Weighted(positive=capped, negative=capped),
            penalties=(msgspec.structs.replace(pull, beta=0.5),),
        )
    for sequence in WORKED[name]:
        assert_as_worked(objective, (sequence,))
    assert_as_worked(objective, WORKED[name])


def test_every_preset_is_worked_by_hand_with_both_signs_of_the_advantage() -> None:
    worked = {**WITHOUT_CORRECTION, **WORKED}
    assert set(worked) == set(PRESETS)
    for name, sequences in worked.items():
        advantages = [sequence.advantage for sequence in sequences if isinstance(sequence.advantage, int | float)]
        assert {advantage > 0 for advantage in advantages} == {True, False}, name
