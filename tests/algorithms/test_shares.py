"""Coefficients from counts of a whole update: computed by hand, equal for every split, and read by the loss."""

import math

import pytest
import torch

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import Aggregation, Clipped, Gate, Linear, Objective, Penalty, Reinforce, Weight
from asyncrl.algorithms.presets import resolve_objective
from asyncrl.algorithms.shares import TokenCounts, add_shares, count_tokens, with_shares
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError, RunError

PROMPT_MEAN = Objective(surrogate=Reinforce(), aggregation=Aggregation.PROMPT_MEAN)
IMITATION = Penalty(beta=0.1, kind="positive_nll")


def batch() -> BatchedDataDict:
    """Trained tokens by row: 3 and 1 of group 70, 2 of group −4, 4 of a masked row of group −4, and none of group 9.
    The last row of group 70 is masked by its token mask. Every log-prob is −1."""
    lengths, width = [3, 1, 2, 4, 2, 0], 6
    token_mask = torch.tensor([[0.0] * 2 + [1.0] * n + [0.0] * (width - 2 - n) for n in lengths], dtype=torch.float64)
    return BatchedDataDict(
        group_ids=torch.tensor([70, 70, -4, -4, 9, 70]),
        rewards=torch.tensor([1.0, 0.0, 0.5, 1.0, -1.0, 1.0], dtype=torch.float64),
        advantages=torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], dtype=torch.float64)[:, None].expand(6, width),
        token_mask=token_mask,
        sample_mask=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
    )


def evaluated(objective: Objective, data: BatchedDataDict) -> tuple[float, torch.Tensor]:
    leaf = torch.full(data["token_mask"].shape, -1.0, dtype=torch.float64, requires_grad=True)
    one = torch.tensor(1.0)
    loss, _ = ObjectiveLoss(objective)(
        data=data, next_token_logprobs=leaf[:, 1:], global_valid_seqs=one, global_valid_toks=one
    )
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad


def test_tokens_are_counted_by_group_and_by_the_sign_of_the_reward() -> None:
    assert count_tokens(batch()) == TokenCounts(by_group={-4: 2, 70: 4}, positive=5)


def test_the_first_token_of_a_row_never_counts() -> None:
    data = batch()
    data["token_mask"] = torch.ones_like(data["token_mask"])
    assert count_tokens(data).by_group == {70: 3 * 5, -4: 5}


def test_each_prompt_group_weighs_the_same_however_many_tokens_it_has() -> None:
    """Each token's loss is A: (3 · 1 + 1 · 2)/4 for group 70 and 4 for group −4, over 2 groups with a trained token."""
    loss, gradient = evaluated(PROMPT_MEAN, with_shares(batch()))
    assert loss == pytest.approx((5 / 4 + 4) / 2)
    assert [row[row != 0].tolist() for row in gradient] == [[-1 / 8] * 3, [-2 / 8], [-4 / 4] * 2, [], [], []]


def test_the_likelihood_of_good_rows_is_over_their_own_tokens_whatever_the_aggregation() -> None:
    """Rows 0 and 2 are good and have 5 tokens: a gradient of −0.1/5 at each, and the value 0.1 · 1. All advantages are
    0."""
    data = with_shares(batch())
    data["advantages"] = torch.zeros_like(data["advantages"])
    for aggregation in Aggregation:
        constant = 3.0 if aggregation is Aggregation.SEQUENCE_SUM_CONSTANT else None
        objective = Objective(surrogate=Reinforce(), penalties=(IMITATION,), aggregation=aggregation, constant=constant)
        loss, gradient = evaluated(objective, data)
        assert loss == pytest.approx(0.1), aggregation
        expected = -0.02 * data["token_mask"] * torch.tensor([1.0, 0, 1, 0, 0, 0])[:, None]
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+", "positive_nll"])
@pytest.mark.parametrize(
    "shape",
    [
        {"surrogate": Clipped()},
        {"surrogate": Linear(), "weight": Weight(lo=0.9, hi=1.1, outside="zero")},
        {"surrogate": Reinforce(), "gates": (Gate(stat="ratio", hi=1.1),)},
        {"surrogate": Linear(), "level": "sequence_mean_token"},
    ],
)
def test_penalties_stand_alone_where_every_advantage_is_zero(kind: str, shape: dict[str, object]) -> None:
    """Clips, gates and weights do not change the penalties: here every token is outside all three."""
    data = with_shares(batch())
    data["advantages"] = torch.zeros_like(data["advantages"])
    for name, log_ratio in (("prev_logprobs", 2.0), ("generation_logprobs", 4.0), ("reference_policy_logprobs", 1.0)):
        data[name] = torch.full_like(data["token_mask"], -1.0 - log_ratio)
    objective = Objective(penalties=(Penalty(beta=0.5, kind=kind),), **shape)  # type: ignore[arg-type]
    _, gradient = evaluated(objective, data)
    good = torch.tensor([1.0, 0, 1, 0, 0, 0]) if kind == "positive_nll" else data["sample_mask"]
    assert torch.equal(gradient != 0, (data["token_mask"] * good[:, None]) != 0)


def test_counts_of_micro_batches_and_ranks_add_up_to_those_of_the_batch() -> None:
    data = batch()
    parts = [count_tokens(data.select_indices(torch.tensor(rows))) for rows in ([5, 0], [3], [1, 2, 4])]
    assert sum(parts, TokenCounts()) == count_tokens(data)


def test_a_part_gets_the_coefficients_of_its_whole_update() -> None:
    data, whole = batch(), with_shares(batch())
    for rows in ([0, 2], [4, 5, 1], [3]):
        part = data.select_indices(torch.tensor(rows))
        add_shares(part, count_tokens(data))
        for column in ("prompt_share", "positive_share"):
            assert torch.equal(part[column], whole[column][torch.tensor(rows)])


def test_packed_rows_bring_their_columns_a_token() -> None:
    data, whole = batch(), with_shares(batch())
    rows, width = data["token_mask"].shape
    packed = BatchedDataDict(
        {name: column.reshape(1, -1) for name, column in data.items() if column.ndim == 2},
        sample_mask=torch.ones(1, dtype=torch.float64),
        segment_ids=torch.arange(rows).repeat_interleave(width)[None],
    )
    packed["token_mask"] = (data["token_mask"] * data["sample_mask"][:, None]).reshape(1, -1)
    for name in ("group_ids", "rewards"):
        packed[name] = data[name].repeat_interleave(width)[None]
    objective = Objective(surrogate=Reinforce(), penalties=(IMITATION,), aggregation=Aggregation.PROMPT_MEAN)
    loss, gradient = evaluated(objective, with_shares(packed))
    expected, expected_gradient = evaluated(objective, whole)
    assert loss == pytest.approx(expected)
    torch.testing.assert_close(gradient.reshape(rows, width), expected_gradient)


@pytest.mark.fault("F24")
def test_an_update_without_a_trained_or_a_good_token_is_zero_with_a_graph() -> None:
    data = batch()
    data["sample_mask"] = torch.zeros_like(data["sample_mask"])
    objective = Objective(surrogate=Reinforce(), penalties=(IMITATION,), aggregation=Aggregation.PROMPT_MEAN)
    loss, gradient = evaluated(objective, with_shares(data))
    assert (loss, gradient.any()) == (0.0, False)
    data = batch()
    data["rewards"] = torch.full_like(data["rewards"], math.nan)
    assert not with_shares(data)["positive_share"].any()


def test_log_probs_that_are_masked_may_be_nan() -> None:
    data = with_shares(batch())
    objective = Objective(surrogate=Reinforce(), penalties=(IMITATION,), aggregation=Aggregation.PROMPT_MEAN)
    trained = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:] > 0
    leaf = torch.where(trained, -1.0, math.nan).requires_grad_()
    one = torch.tensor(1.0)
    loss, _ = ObjectiveLoss(objective)(
        data=data, next_token_logprobs=leaf, global_valid_seqs=one, global_valid_toks=one
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(evaluated(objective, data)[0])
    assert leaf.grad is not None
    assert bool(torch.isfinite(leaf.grad).all())


def test_a_loss_says_what_it_counts_by_and_where_its_coefficients_come_from() -> None:
    assert ObjectiveLoss(PROMPT_MEAN).columns == {"group_ids"}
    imitation = Objective(surrogate=Reinforce(), penalties=(IMITATION,))
    assert ObjectiveLoss(imitation).columns == {"rewards"}
    with pytest.raises(RunError, match=r"prompt_share.*Policy.train, which adds it.*with_shares"):
        evaluated(PROMPT_MEAN, batch())
    bare = BatchedDataDict({name: column for name, column in batch().items() if name not in ("group_ids", "rewards")})
    with pytest.raises(RunError, match=r"reads group_ids, but the rows do not have them; .*`group_ids` has one int"):
        evaluated(PROMPT_MEAN, bare)
    with pytest.raises(RunError, match="`rewards` has one number for each row"):
        evaluated(imitation, bare)


@pytest.mark.parametrize("idle", [{"q": "proximal"}, {"corrected_by": "current"}])
@pytest.mark.fault("F28")
def test_the_likelihood_of_good_rows_compares_with_no_other_policy(idle: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="remove q and corrected_by"):
        resolve_objective("dapo", {"penalties": [{"kind": "positive_nll", "beta": 0.1, **idle}]})
