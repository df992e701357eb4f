"""A β that follows the KL of the steps before is the plain loop of 1909.08593 in float64, however the steps are cut."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from asyncrl.algorithms.calibration import after_step
from asyncrl.algorithms.diagnostics import MetricSums, off_policy_sums
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import KLControl, Objective, Penalty, Reinforce
from asyncrl.algorithms.presets import resolve_objective
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError

ROWS, TOKENS, STEPS = 12, 10, 8
COLUMNS = {"reference": "reference_policy_logprobs", "behaviour": "generation_logprobs"}


def controlled(**changed: Any) -> Objective:
    control = KLControl(**{"target": 0.2, "gain": 2.0} | changed)
    return Objective(surrogate=Reinforce(), penalties=(Penalty(beta=0.3, kind="k3", control=control),))


def beta_of(objective: Objective) -> float:
    [penalty] = objective.penalties
    return penalty.beta


def step_rows(step: int) -> tuple[BatchedDataDict, torch.Tensor]:
    """Returns the columns of a step, and the current log-probs [B, S], all in float64. Later steps are further away
    from the other policies."""
    draw = torch.Generator().manual_seed(step)
    lp = -torch.rand(ROWS, TOKENS, generator=draw, dtype=torch.float64) * 3
    mask = (torch.rand(ROWS, TOKENS, generator=draw) < 0.8).double()
    mask[:, 0] = 0
    apart = [torch.randn(ROWS, TOKENS, generator=draw, dtype=torch.float64) * 0.15 * step for _ in COLUMNS]
    rows = BatchedDataDict(
        input_ids=mask.long(),
        advantages=torch.randn(ROWS, 1, generator=draw, dtype=torch.float64).expand(ROWS, TOKENS).clone(),
        token_mask=mask,
        sample_mask=torch.ones(ROWS),
        **{column: lp + each for column, each in zip(COLUMNS.values(), apart, strict=True)},
    )
    return rows, lp


def measured(part: BatchedDataDict, lp: torch.Tensor) -> MetricSums:
    mask_BT = part["token_mask"][:, 1:] > 0
    return off_policy_sums(
        proximal_BT=lp[:, 1:],
        behaviour_BT=part["generation_logprobs"][:, 1:],
        reference_BT=part["reference_policy_logprobs"][:, 1:],
        entropy_BT=torch.zeros_like(lp[:, 1:]),
        mask_BT=mask_BT,
        on_policy_BT=torch.zeros_like(mask_BT),
    )


def plain_step(rows: BatchedDataDict, lp: torch.Tensor, *, beta: float, q: str) -> tuple[float, torch.Tensor, float]:
    """Returns the loss of a step with −A · lp and β · (e^(−d) − 1 + d), its gradient by the log-probs, and the KL."""
    places = [(r, t) for r in range(ROWS) for t in range(TOKENS) if rows["token_mask"][r, t]]
    loss, kl, gradient = 0.0, 0.0, torch.zeros_like(lp)
    for place in places:
        now, a, other = float(lp[place]), float(rows["advantages"][place]), float(rows[COLUMNS[q]][place])
        d = now - other
        loss += (-a * now + beta * (math.exp(-d) - 1 + d)) / len(places)
        gradient[place] = (-a + beta * (1 - math.exp(-d))) / len(places)
        kl += (math.exp(-d) - 1 + d if q == "reference" else math.exp(d) - 1 - d) / len(places)
    return loss, gradient, kl


@pytest.mark.parametrize("cut", [[12], [5, 7], [1] * 12])
@pytest.mark.parametrize("q", COLUMNS)
def test_the_loss_of_each_step_is_the_plain_loop_in_float64_however_it_is_cut(q: Any, cut: Sequence[int]) -> None:
    control = KLControl(target=0.2, gain=2.0)
    objective = Objective(surrogate=Reinforce(), penalties=(Penalty(beta=0.3, kind="k3", q=q, control=control),))
    beta, betas = 0.3, list[float]()
    for step in range(STEPS):
        rows, lp = step_rows(step)
        expected, gradient, kl = plain_step(rows, lp, beta=beta, q=q)
        current, total, sums = lp.clone().requires_grad_(), torch.zeros((), dtype=torch.float64), MetricSums()
        for part, own in zip(rows_cut(rows, cut), current.split(list(cut)), strict=True):
            values, _ = ObjectiveLoss(objective)(
                data=part,
                next_token_logprobs=own[:, 1:],
                global_valid_seqs=torch.tensor(float(ROWS)),
                global_valid_toks=rows["token_mask"].sum(),
            )
            total = total + values
            sums += measured(part, own.detach())
        [slopes] = torch.autograd.grad(total, current)
        assert float(total.detach()) == pytest.approx(expected, abs=1e-6)
        assert torch.allclose(slopes, gradient, atol=1e-6)
        means = sums.means()
        kl_nats = {"reference": means["kl_to_reference_nats"], "behaviour": means["kl_behaviour_k3_nats"]}
        objective = after_step(objective, kl_nats)
        betas.append(beta)
        beta = beta * (1 + 2.0 * min(max((kl - 0.2) / 0.2, -0.2), 0.2))
        assert beta_of(objective) == pytest.approx(beta, rel=1e-12)
    assert min(betas) < 0.1, "beta falls while the KL is small"
    assert betas[-1] > min(betas), "and it rises later"


def rows_cut(rows: BatchedDataDict, cut: Sequence[int]) -> list[BatchedDataDict]:
    starts = [sum(cut[:i]) for i in range(len(cut))]
    return [rows.slice(start, start + size) for start, size in zip(starts, cut, strict=True)]


def test_beta_changes_by_at_most_a_fifth_of_the_gain_and_stays_within_its_limits_by_hand() -> None:
    """With target 0.2: a KL of 0.22 is 10 % above it, and 2.0 or 0.0 are more than 20 % away."""
    for kl, factor in ((0.2, 1.0), (0.22, 1.01), (0.18, 0.99), (2.0, 1.02), (0.0, 0.98)):
        found = after_step(controlled(gain=0.1), {"reference": kl})
        assert beta_of(found) == pytest.approx(0.3 * factor, rel=1e-12), kl
    objective = controlled(gain=4.0)
    for kl, limit in ((0.0, 1e-9), (5.0, 1e9)):
        for _ in range(200):
            objective = after_step(objective, {"reference": kl})
        assert beta_of(objective) == limit


def test_beta_stays_without_the_kl_of_its_policy_and_other_penalties_always_do() -> None:
    assert after_step(controlled(), {"behaviour": 1.0}) == controlled()
    other = Penalty(beta=0.3, kind="k2", q="behaviour")
    both = Objective(surrogate=Reinforce(), penalties=(other, *controlled().penalties))
    assert after_step(both, {"behaviour": 5.0, "reference": 5.0}).penalties[0] == other
    assert after_step(both, {"reference": 5.0}).penalties[1].beta > 0.3
    constant = Objective(surrogate=Reinforce(), penalties=(other,))
    assert after_step(constant, {"behaviour": 5.0}) == constant


@pytest.mark.parametrize(
    ("penalties", "words"),
    [
        ([{"kind": "k3", "beta": 0.1, "control": {"target": 0.0}}], "must be finite and above 0"),
        ([{"kind": "k3", "beta": 0.1, "control": {"target": 0.1, "gain": 5.0}}], "above 0 and below 5"),
        ([{"kind": "entropy", "beta": 0.1, "control": {"target": 0.1}}], "the penalty has kind entropy"),
        ([{"kind": "k3", "q": "proximal", "beta": 0.1, "control": {"target": 0.1}}], "q proximal"),
        ([{"kind": "k3", "q": "behaviour", "ess": True, "beta": 0.1, "control": {"target": 0.1}}], "ess true"),
        ([{"kind": "k3", "beta": 1e-10, "control": {"target": 0.1}}], "stays within 1e-09 and 1e\\+09"),
        ([{"kind": kind, "beta": 0.1, "control": {"target": 0.1}} for kind in ("k2", "k3")], "two penalties have"),
        ([{"kind": "k3", "beta": 0.1, "control": {"goal": 0.1}}], "there is no field 'goal'"),
    ],
)
def test_a_control_that_could_not_act_is_refused(penalties: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_objective("decoupled_icepop", {"penalties": penalties})
