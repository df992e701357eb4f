"""What a loss needs before the first gradient of a step: shares, calibrated bounds, and numbers of a user's loss."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import Aggregation, Objective, Penalty, Reinforce
from asyncrl.algorithms.presets import PRESETS, resolve_objective
from asyncrl.algorithms.step_statistics import StepStatistic, mean, total
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.step_loss import add_update_shares, needs_proximal, with_statistics
from asyncrl.ranks.batching import empty_micro_batch
from asyncrl.ranks.plan import CURRENT, PlannedUpdate, required_columns
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
    alone = bound_of(with_statistics(M2PO, planned(data), reduce=lambda sums: sums))
    assert 0.02 <= alone < 0.5
    for parts in ((data, empty_micro_batch()), (empty_micro_batch(), data)):
        assert bound_of(with_statistics(M2PO, planned(*parts), reduce=lambda sums: sums)) == alone


def test_a_rank_without_a_token_adds_nothing_to_the_sums() -> None:
    seen: list[torch.Tensor] = []

    def reduce(sums: torch.Tensor) -> torch.Tensor:
        seen.append(sums)
        return sums

    with_statistics(M2PO, planned(empty_micro_batch()), reduce=reduce)
    assert seen
    assert not any(sums.any() for sums in seen)


def test_a_cap_is_of_the_weights_that_the_loss_uses() -> None:
    """For a token one version old, the interpolated policy equals the sampler's. So all weights are 1 and need no
    cap."""
    loss = ObjectiveLoss(resolve_objective("a3po", {"weight": {"min_ess": 0.9}}))
    spread = torch.linspace(-2, 2, 20).tolist()

    def cap(staleness: float) -> float:
        found: Any = with_statistics(loss, planned(rows(spread, staleness=staleness)), reduce=lambda sums: sums)
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


class Own:
    """A user's loss that returns the numbers of the step that it gets."""

    input_type = "logprob"
    loss_type = "token_level"
    columns = ("generation_logprobs", "rewards", "staleness")
    statistics: ClassVar = {
        "ratio": StepStatistic(lambda tokens: tokens.log_ratio("proximal", "behaviour").exp(), mean),
        "reward": StepStatistic(lambda tokens: tokens.columns["rewards"] + 10 * tokens.columns["staleness"], mean),
        "tokens": StepStatistic(lambda tokens: torch.ones_like(tokens.advantages), total),
    }

    def __call__(self, *, statistics: dict[str, float], **_: Any) -> Any:
        return statistics


def test_a_loss_of_a_user_gets_numbers_of_all_updates_and_micro_batches() -> None:
    """e^.0 and e^log(3) have the mean 2. A row's reward counts once for each of its tokens."""
    first, second = rows([0.0, math.log(3.0)]), rows([math.log(2.0)], staleness=1.0)
    first["rewards"], second["rewards"] = torch.tensor([1.0]), torch.tensor([4.0])
    blocks: list[str] = []

    def together() -> AbstractContextManager[None]:
        blocks.append("entered")
        return nullcontext()

    def reduce(sums: torch.Tensor) -> torch.Tensor:
        blocks.append("reduced")
        return sums

    updates = [*planned(first, empty_micro_batch()), *planned(second)]
    loss: Any = with_statistics(Own(), updates, reduce=reduce, together=together)
    assert loss(data={}) == {"ratio": pytest.approx(2.0), "reward": pytest.approx((1 + 1 + 14) / 3), "tokens": 3.0}
    assert (loss.input_type, loss.columns) == ("logprob", Own.columns)
    assert blocks == ["entered", "reduced"] * 3


def test_a_loss_with_statistics_needs_the_log_probs_at_the_step_s_start() -> None:
    assert needs_proximal(Own(), updates=1)  # type: ignore[arg-type]
    needed = required_columns(Own(), updates=1)  # type: ignore[arg-type]
    assert {CURRENT, "advantages", "rewards"} <= needed
    assert not needs_proximal(object(), updates=1)  # type: ignore[arg-type]
