"""Choices on the axes that no preset makes, worked by hand. A configuration may use them.

As in `test_preset_oracles.py`, losses and gradients are before the aggregation, and the step has T = 10 tokens.
"""

import math

import pytest
import torch
from worked_sequences import STEP_TOKENS, Worked, assert_as_worked, log_weighted

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import (
    Aggregation,
    Clipped,
    Gate,
    Linear,
    Objective,
    Penalty,
    Regression,
    Reinforce,
    Weight,
)
from asyncrl.data.batched_data_dict import BatchedDataDict

LN3 = math.log(3)
T = STEP_TOKENS


# d = ln(current / q) = ln 3 and −ln 3; each pair is (P, d P / d lp) of a token. `corrected_by` multiplies by r, the
# ratio of the current policy to the named one, including its gradient: (r · P)' = r · (P + P')
@pytest.mark.parametrize(
    ("penalty", "columns", "terms"),
    [
        (Penalty(beta=0.5, kind="k1"), {"reference": (0.1, 0.3)}, ((LN3, 1), (-LN3, 1))),
        (Penalty(beta=0.5, kind="k1", q="proximal"), {"proximal": (0.1, 0.3)}, ((LN3, 1), (-LN3, 1))),
        (
            Penalty(beta=0.5, kind="k2", q="behaviour"),
            {"behaviour": (0.1, 0.3)},
            ((LN3**2 / 2, LN3), (LN3**2 / 2, -LN3)),
        ),
        (Penalty(beta=0.5, kind="abs"), {"reference": (0.1, 0.3)}, ((LN3, 1), (LN3, -1))),
        (Penalty(beta=0.5, kind="k3+"), {"reference": (0.1, 0.3)}, ((1 / 3 - 1 + LN3, LN3), (3 - 1 - LN3, -LN3))),
        (
            Penalty(beta=0.5, kind="k1", corrected_by="current"),
            {"reference": (0.1, 0.3)},
            ((LN3, LN3 + 1), (-LN3, -LN3 + 1)),
        ),
        (
            Penalty(beta=0.5, kind="k1", corrected_by="behaviour"),
            {"reference": (0.1, 0.3), "behaviour": (0.15, 0.2)},
            ((2 * LN3, 2 * (LN3 + 1)), (-0.5 * LN3, 0.5 * (-LN3 + 1))),
        ),
    ],
)
def test_penalties(
    penalty: Penalty, columns: dict[str, tuple[float, ...]], terms: tuple[tuple[float, float], ...]
) -> None:
    assert_as_worked(
        Objective(surrogate=Linear(), anchor="current", penalties=(penalty,)),
        (
            Worked(
                advantage=0,
                current=(0.3, 0.1),
                losses=tuple(0.5 * value for value, _ in terms),
                gradients=tuple(0.5 * slope for _, slope in terms),
                over=T,
                **columns,  # type: ignore[arg-type]
            ),
        ),
    )


def test_penalties_know_neither_weights_nor_gates() -> None:
    """ρ = 4 is clamped to 2 and kept, ρ = 10 is gated: −2 · u · W + ½ · k2 against the reference, d = ln 3."""
    objective = Objective(
        surrogate=Linear(),
        weight=Weight(hi=2.0),
        gates=(Gate(stat="ratio", hi=5.0),),
        penalties=(Penalty(beta=0.5, kind="k2"),),
    )
    pull = LN3**2 / 4
    assert_as_worked(
        objective,
        (
            Worked(
                advantage=2,
                current=(0.3, 0.3),
                behaviour=(0.05, 0.02),
                reference=0.1,
                losses=(-6 + pull, pull),
                gradients=(-6 + 0.5 * LN3, 0.5 * LN3),
                over=T,
            ),
        ),
    )


def test_a_bonus_for_entropy_raises_it() -> None:
    """One trained token out of 10, p = (.8, .2), A = 0: the loss is −β · H / 10. dH/dz_i = −p_i · (ln p_i + H)."""
    logits = torch.tensor([[[math.log(0.8), math.log(0.2)], [0.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    column = torch.zeros(1, 2, dtype=torch.float64)
    data = BatchedDataDict(
        {
            "input_ids": torch.zeros(1, 2, dtype=torch.int64),
            "generation_logprobs": column,
            "prev_logprobs": column,
            "advantages": column,
            "token_mask": torch.tensor([[0.0, 1.0]]),
            "sample_mask": torch.ones(1),
        }
    )
    loss_fn = ObjectiveLoss(Objective(surrogate=Reinforce(), penalties=(Penalty(beta=0.5, kind="entropy"),)))
    loss, _ = loss_fn(logits, data, torch.tensor(1.0), torch.tensor(float(T)))
    loss.backward()
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    assert float(loss.detach()) == pytest.approx(-0.05 * entropy, rel=1e-5)
    assert logits.grad is not None
    expected = [0.05 * p * (math.log(p) + entropy) for p in (0.8, 0.2)]
    assert logits.grad[0, 0].tolist() == pytest.approx(expected, rel=1e-5)
    assert not logits.grad[0, 1].any()


def test_a_weight_of_the_current_policy_is_data() -> None:
    """−A · sg(current / behaviour) · lp, r = 4 and .5."""
    assert_as_worked(
        Objective(surrogate=Reinforce(), weight=Weight(p="current")),
        (log_weighted(advantage=2, current=(0.4, 0.1), behaviour=(0.1, 0.2), gradients=(-8, -1)),),
    )


def test_a_ratio_about_the_current_policy_is_one() -> None:
    assert_as_worked(
        Objective(surrogate=Linear(), anchor="current"),
        (Worked(advantage=2, current=(0.4, 0.1), losses=(-2, -2), gradients=(-2, -2), over=T),),
    )


# proximal .2, behaviour (.05, .4): d = ln 4 and −ln 2; k2 = .961 and .240, k3 = e^d − 1 − d = 1.614 and .193
@pytest.mark.parametrize(
    ("gate", "gradients"),
    [
        (Gate(stat="log_ratio", hi=1.0), (0, -2)),
        (Gate(stat="log_ratio", lo=-0.5), (-2, 0)),
        (Gate(stat="log_ratio", pool="max", hi=1.0), (0, 0)),
        (Gate(stat="log_ratio", pool="min", hi=1.0), (-2, -2)),
        (Gate(stat="ratio", pool="min", lo=0.6), (0, 0)),
        (Gate(stat="ratio", pool="min", lo=0.4), (-2, -2)),
        (Gate(stat="ratio", pool="sum", hi=1.9), (0, 0)),
        (Gate(stat="ratio", pool="mean", hi=1.9), (-2, -2)),
        (Gate(stat="k3", hi=1.5), (0, -2)),
        (Gate(stat="k3", hi=0.19), (0, 0)),
        (Gate(stat="k3", pool="mean", hi=1.0), (-2, -2)),
        (Gate(stat="k1", hi=0.5), (-2, 0)),
        (Gate(stat="k2", hi=0.4), (0, -2)),
    ],
)
def test_gates(gate: Gate, gradients: tuple[float, float]) -> None:
    assert_as_worked(
        Objective(surrogate=Reinforce(), gates=(gate,)),
        (log_weighted(advantage=2, current=(0.3, 0.1), behaviour=(0.05, 0.4), gradients=gradients),),
    )


# ρ = 4 and .5. Over the sequence: the minimum, the maximum, the geometric mean √2 and the product 2
@pytest.mark.parametrize(("pool", "weight"), [("min", 0.5), ("max", 4.0), ("mean", math.sqrt(2)), ("sum", 2.0)])
def test_pooled_weights(pool: str, weight: float) -> None:
    assert_as_worked(
        Objective(surrogate=Reinforce(), weight=Weight(pool=pool)),  # type: ignore[arg-type]
        (log_weighted(advantage=2, current=(0.3, 0.1), behaviour=(0.05, 0.4), gradients=(-2 * weight, -2 * weight)),),
    )


# u = 2 and 4.5. The ratio s of the sequence is the mean 3 or the product 9. hi = 1.0004 clips the first token (A > 0);
# the second token has the loss 2 · s. If s is the product, d s / d lp is s for both tokens; if s is the mean with
# gradient, it is s/2 for both. If only the token's own log-prob has a gradient, the second loss moves only the second
# token
@pytest.mark.parametrize(
    ("level", "losses", "gradients"),
    [
        ("sequence_mean_token", (-2.0008, 6), (0, 6)),
        ("sequence_mean", (-2.0008, 6), (3, 3)),
        ("sequence_sum", (-2.0008, 18), (18, 18)),
        ("token", (-2.0008, 9), (0, 9)),
    ],
)
def test_levels_where_advantages_differ_between_a_sequence_s_tokens(
    level: str, losses: tuple[float, float], gradients: tuple[float, float]
) -> None:
    assert_as_worked(
        Objective(surrogate=Clipped(lo=1 - 3e-4, hi=1 + 4e-4), level=level),  # type: ignore[arg-type]
        (Worked(advantage=(2, -2), current=(0.4, 0.9), losses=losses, gradients=gradients, over=T),),
    )


# β = .5, u = 4 and .5. Residual of a token: .5 · ln u − 2. Residual of the sequence: .5 · ln 2 − 2, and the log-prob of
# each of the two tokens moves it
@pytest.mark.parametrize(
    ("level", "residuals", "moved"),
    [
        ("token", (math.log(2) - 2, -0.5 * math.log(2) - 2), 1),
        ("sequence_sum", (0.5 * math.log(2) - 2,) * 2, 2),
    ],
)
def test_a_regression_of_the_log_ratio(level: str, residuals: tuple[float, float], moved: int) -> None:
    assert_as_worked(
        Objective(surrogate=Regression(beta=0.5), level=level),  # type: ignore[arg-type]
        (
            Worked(
                advantage=2,
                current=(0.8, 0.1),
                losses=(residuals[0] ** 2, residuals[1] ** 2),
                gradients=(moved * residuals[0], moved * residuals[1]),
                over=T,
            ),
        ),
    )


def test_the_sum_divides_by_nothing() -> None:
    assert_as_worked(
        Objective(surrogate=Linear(), aggregation=Aggregation.SUM),
        (Worked(advantage=2, current=(0.3, 0.1), losses=(-3, -1), gradients=(-3, -1), over=1),),
    )
