"""Gradients of the objective, worked by hand. Values alone would not show a missing detach or a wrong ratio."""

import math

import pytest
import torch

from asyncrl.algorithms.objective import Clipped, Objective, Reinforce, Weight
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.token_terms import Segments, token_terms


def gradient(
    objective: Objective, *, ratio: float = 1.0, rho: float = 1.0, advantage: float = 1.0
) -> tuple[float, float, bool, bool]:
    """Returns S · W, its gradient by lp, clipped and gated, for one token with u = `ratio` and prox/beh = `rho`."""
    prox = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    logprobs = (prox.detach() + math.log(ratio)).requires_grad_()
    behaviour = (prox.detach() - math.log(rho)).requires_grad_()
    advantages = torch.tensor([[advantage]], dtype=torch.float64, requires_grad=True)
    terms = token_terms(
        objective,
        logprobs_BT=logprobs,
        sources={"proximal": prox, "behaviour": behaviour, "reference": prox},
        advantages_BT=advantages,
        segments=Segments(torch.ones(1, 1, dtype=torch.bool)),
    )
    terms.loss_BT.sum().backward()
    for constant in (prox, behaviour, advantages):
        assert constant.grad is None, "only the current log-probs carry gradient"
    return float(terms.loss_BT.detach()), float(logprobs.grad), bool(terms.clipped_BT), bool(terms.gated_BT)


# (ratio u, A) → (S, ∂S/∂lp, clipped); bounds .8/1.28, dual 3
CLIPPED = [
    (1.0, 2.0, -2.0, -2.0, False),
    (1.1, 2.0, -2.2, -2.2, False),
    (1.5, 2.0, -2.56, 0.0, True),  # a good token that is already more likely: clipped, no gradient
    (0.5, 2.0, -1.0, -1.0, False),  # a good token that became less likely: gradient, no clip
    (1.1, -2.0, 2.2, 2.2, False),
    (0.5, -2.0, 1.6, 0.0, True),  # a bad token that is already rare: clipped, no gradient
    (2.0, -2.0, 4.0, 4.0, False),  # a bad token that became more likely: gradient
    (4.0, -2.0, 6.0, 0.0, True),  # a bad token beyond the dual clip: no gradient
]


@pytest.mark.parametrize(("ratio", "advantage", "value", "slope", "clipped"), CLIPPED)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, value: float, slope: float, clipped: bool) -> None:
    found = gradient(Objective(surrogate=Clipped(lo=0.8, hi=1.28, dual=3.0)), ratio=ratio, advantage=advantage)
    assert found[:2] == pytest.approx((value, slope))
    assert found[2] is clipped


def test_without_a_dual_clip_a_bad_token_is_pushed_without_bound() -> None:
    assert gradient(PRESETS["dapo"].objective, ratio=4.0, advantage=-2.0)[:3] == (
        pytest.approx(8.0),
        pytest.approx(8.0),
        False,
    )


def test_reinforce_by_hand() -> None:
    value, slope, clipped, gated = gradient(PRESETS["reinforce"].objective, ratio=1.3, rho=7.0, advantage=2.0)
    assert value == pytest.approx(-2.0 * (-1.0 + math.log(1.3)))
    assert (slope, clipped, gated) == (-2.0, False, False)


@pytest.mark.parametrize(
    ("preset", "rho", "weight", "gated"),
    [
        ("decoupled_icepop", 0.4, 0.0, True),
        ("decoupled_icepop", 0.6, 0.6, False),
        ("decoupled_icepop", 4.0, 4.0, False),
        ("decoupled_icepop", 6.0, 0.0, True),
        ("icepop", 0.4, 0.0, True),
        ("icepop", 2.0, 2.0, False),
        ("decoupled_ppo", 0.01, 0.01, False),
        ("decoupled_ppo", 5.5, 0.0, True),
        ("tis", 0.01, 0.01, False),
        ("tis", 3.0, 2.0, False),
        ("dapo", 3.0, 1.0, False),
    ],
)
def test_the_weight_is_the_proximal_over_the_behaviour_policy_within_the_preset_s_bounds(
    preset: str, rho: float, weight: float, gated: bool
) -> None:
    value, slope, _, was_gated = gradient(PRESETS[preset].objective, ratio=1.1, rho=rho, advantage=2.0)
    assert slope == pytest.approx(weight * -2.2)
    assert value == pytest.approx(weight * -2.2)
    assert was_gated is gated


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("log_ratio", [80.0, -80.0])
@pytest.mark.fault("F22")
def test_a_log_ratio_of_80_gives_no_inf(preset: str, log_ratio: float) -> None:
    for lp, beh in ((log_ratio, 0.0), (0.0, -log_ratio), (log_ratio, -log_ratio)):
        logprobs = torch.tensor([[lp]], requires_grad=True)
        terms = token_terms(
            PRESETS[preset].objective,
            logprobs_BT=logprobs,
            sources={
                "proximal": torch.zeros(1, 1),
                "behaviour": torch.tensor([[beh]]),
                "reference": torch.tensor([[-beh]]),
            },
            advantages_BT=torch.tensor([[-1.0]]),
            segments=Segments(torch.ones(1, 1, dtype=torch.bool)),
            centering_BT=torch.zeros(1, 1),
        )
        terms.loss_BT.sum().backward()
        assert torch.isfinite(terms.loss_BT).all()
        assert torch.isfinite(logprobs.grad).all()


@pytest.mark.fault("F22")
def test_an_unbounded_weight_and_ratio_together_give_no_inf() -> None:
    terms = token_terms(
        Objective(surrogate=Clipped(), weight=Weight()),
        logprobs_BT=torch.tensor([[160.0]], requires_grad=True),
        sources={"proximal": torch.tensor([[80.0]]), "behaviour": torch.tensor([[0.0]])},
        advantages_BT=torch.tensor([[-1.0]]),
        segments=Segments(torch.ones(1, 1, dtype=torch.bool)),
    )
    assert torch.isfinite(terms.loss_BT).all()


def test_a_gated_token_stays_zero_when_its_surrogate_is_huge() -> None:
    assert gradient(Objective(surrogate=Reinforce(), weight=Weight(lo=0.5, hi=2.0, outside="zero")), rho=9.0)[:2] == (
        0.0,
        0.0,
    )
