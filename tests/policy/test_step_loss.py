"""What the objective needs before the first gradient of a step: its shares and its calibrated bounds."""

import math
from typing import Any

import pytest
import torch

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import Aggregation, Objective, Penalty, Reinforce
from asyncrl.algorithms.presets import PRESETS, resolve_objective
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.step_loss import add_update_shares, calibrated_loss
from asyncrl.ranks.batching import empty_micro_batch
from asyncrl.ranks.plan import PlannedUpdate
from asyncrl.ranks.report import UpdatePlan

M2PO = ObjectiveLoss(PRESETS["m2po"].objective)


def rows(log_ratios: list[float], *, staleness: float = 0.0) -> BatchedDataDict:
    """Returns one row: a prompt of one token, then tokens with these values of log current/behaviour."""
    columns = torch.tensor([[0.0, *log_ratios]])
    mask = torch.ones_like(columns)
    mask[:, 0] = 0.0
    return BatchedDataDict(
        prev_logprobs=columns - 2.0,
        generation_logprobs=torch.full_like(columns, -2.0),
        advantages=torch.ones_like(columns),
        staleness=torch.full_like(columns, staleness),
        token_mask=mask,
        sample_mask=torch.ones(1),
    )


def planned(*parts: BatchedDataDict) -> list[PlannedUpdate]:
    plan = UpdatePlan(tokens=4, samples=1, valid_toks=4.0, valid_seqs=1.0, micro_batches=len(parts))
    return [PlannedUpdate(plan, list(parts))]


def bound_of(loss: Any) -> float:
    [gate] = loss.objective.gates
    return float(gate.hi)


def test_padding_of_a_rank_that_has_run_out_is_no_part_of_a_calibration() -> None:
    """k2 = .005, .02, .5: the mean of the first two, .0125, is within the budget .02; the mean of all, .175, is not."""
    data = rows([0.1, 0.2, 1.0])
    alone = bound_of(calibrated_loss(M2PO, planned(data), reduce=lambda sums: sums))
    assert 0.02 <= alone < 0.5
    for parts in ((data, empty_micro_batch()), (empty_micro_batch(), data)):
        assert bound_of(calibrated_loss(M2PO, planned(*parts), reduce=lambda sums: sums)) == alone


def test_a_rank_without_a_token_adds_nothing_to_the_sums() -> None:
    seen: list[torch.Tensor] = []

    def reduce(sums: torch.Tensor) -> torch.Tensor:
        seen.append(sums)
        return sums

    calibrated_loss(M2PO, planned(empty_micro_batch()), reduce=reduce)
    assert seen
    assert not any(sums.any() for sums in seen)


def test_a_cap_is_of_the_weights_that_the_loss_uses() -> None:
    """For a token one version old, the interpolated policy equals the sampler's. So all weights are 1 and need no
    cap."""
    loss = ObjectiveLoss(resolve_objective("a3po", {"weight": {"min_ess": 0.9}}))
    spread = torch.linspace(-2, 2, 20).tolist()

    def cap(staleness: float) -> float:
        found: Any = calibrated_loss(loss, planned(rows(spread, staleness=staleness)), reduce=lambda sums: sums)
        return float(found.objective.weight.hi)

    assert cap(1.0) == math.inf
    assert 1.0 <= cap(100.0) < 5.0


def test_tokens_are_counted_over_all_ranks_in_each_update_apart() -> None:
    """Two ranks, two updates. Group 7 has 2 and 3 tokens in the first update and 4 in the second, which also has group
    8."""
    loss = ObjectiveLoss(
        Objective(
            surrogate=Reinforce(),
            aggregation=Aggregation.PROMPT_MEAN,
            penalties=(Penalty(beta=0.1, kind="positive_nll"),),
        )
    )

    def row(tokens: int, *, group: int, reward: float) -> BatchedDataDict:
        data = rows([0.1] * tokens)
        data["group_ids"], data["rewards"] = torch.tensor([group]), torch.tensor([reward])
        return data

    first = [*planned(row(2, group=7, reward=1.0), row(1, group=9, reward=0.0)), *planned(row(4, group=7, reward=0.0))]
    second = [*planned(row(3, group=7, reward=2.0), empty_micro_batch()), *planned(row(5, group=8, reward=0.5))]
    counts: list[Any] = []
    for updates in (first, second):
        add_update_shares(loss, updates, gather=lambda own: counts.append(own) or [own])  # type: ignore[func-returns-value]
    for updates in (first, second):
        add_update_shares(loss, updates, gather=lambda own: counts)

    def shares(updates: list[PlannedUpdate], update: int, part: int) -> tuple[float, float]:
        data = updates[update].parts[part]
        return data["prompt_share"].item(), data["positive_share"].item()

    assert shares(first, 0, 0) == shares(second, 0, 0) == pytest.approx((1 / (2 * 5), 1 / 5))
    assert shares(first, 0, 1) == pytest.approx((1 / (2 * 1), 0.0))
    assert shares(first, 1, 0) == pytest.approx((1 / (2 * 4), 0.0))
    assert shares(second, 1, 0) == pytest.approx((1 / (2 * 5), 1 / 5))


def test_a_loss_that_counts_nothing_costs_no_collective() -> None:
    def gather(own: Any) -> list[Any]:
        raise AssertionError("a collective")

    add_update_shares(M2PO, planned(rows([0.1])), gather=gather)
