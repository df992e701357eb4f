"""The critic's loss: value, gradient and metrics by hand, and equal for every split of a batch."""

import math
from typing import get_args

import pytest
import torch

from asyncrl.algorithms.interfaces import LossType, MetricNormalization
from asyncrl.algorithms.value_loss import ClippedValueLoss, ValueAggregation, explained_variance
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import RunError


def batch(
    *, returns: list[list[float]], old: list[list[float]], mask: list[list[float]], samples: list[float] | None = None
) -> BatchedDataDict:
    return BatchedDataDict(
        {
            "returns": torch.tensor(returns),
            "values": torch.tensor(old),
            "token_mask": torch.tensor(mask),
            "sample_mask": torch.tensor(samples if samples is not None else [1.0] * len(mask)),
        }
    )


def run(
    loss_fn: ClippedValueLoss, values: torch.Tensor, data: BatchedDataDict, tokens: int
) -> tuple[torch.Tensor, dict[str, float]]:
    return loss_fn(values, data, sequences(data), torch.tensor(tokens))


def sequences(data: BatchedDataDict) -> torch.Tensor:
    return (data["sample_mask"] > 0).sum()


every_aggregation = pytest.mark.parametrize("aggregation", get_args(ValueAggregation))


def test_the_larger_of_plain_and_clipped_error_counts_and_the_clipped_one_has_no_gradient() -> None:
    """R = 1, clip 0.2, 3 tokens. V from 0 to 0.1: within the clip, both (0.9)². V from 0 to 0.5, towards R: clipped to
    0.2, and its 0.8² is larger. V from 0 to −0.5, away from R: clipped to −0.2, and the unclipped 1.5² is larger."""
    values = torch.tensor([[0.0, 0.1, 0.5, -0.5]], requires_grad=True)
    data = batch(returns=[[0, 1, 1, 1]], old=[[0, 0, 0, 0]], mask=[[0, 1, 1, 1]])
    loss, metrics = run(ClippedValueLoss(clip=0.2), values, data, 3)
    assert loss.item() == pytest.approx(0.5 * (0.81 + 0.64 + 2.25) / 3)
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist()[0] == pytest.approx([0, -0.9 / 3, 0, -1.5 / 3])
    assert metrics["value_clipped_ratio"] == pytest.approx(1 / 3)


def test_without_a_clip_it_is_half_the_squared_error_and_needs_no_old_values() -> None:
    values = torch.tensor([[0.0, 0.1, 0.5, -0.5]], requires_grad=True)
    data = batch(returns=[[0, 1, 1, 1]], old=[[0, 0, 0, 0]], mask=[[0, 1, 1, 1]])
    del data["values"]
    loss, metrics = run(ClippedValueLoss(clip=None), values, data, 3)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.81 + 0.25 + 2.25) / 3)
    assert values.grad is not None
    assert values.grad.tolist()[0] == pytest.approx([0, -0.9 / 3, -0.5 / 3, -1.5 / 3])
    assert metrics["value_clipped_ratio"] == 0


def random_batch() -> tuple[torch.Tensor, BatchedDataDict, int]:
    random = torch.Generator().manual_seed(0)
    columns = {name: torch.randn(6, 7, generator=random) for name in ("returns", "values")}
    mask = (torch.rand(6, 7, generator=random) < 0.7).float()
    data = BatchedDataDict({**columns, "token_mask": mask, "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1])})
    tokens = int((mask[:, 1:] * data["sample_mask"].unsqueeze(1)).sum())
    return torch.randn(6, 7, generator=random), data, tokens


@every_aggregation
def test_micro_batches_add_up_to_the_whole_batch_in_loss_gradient_and_metrics(aggregation: ValueAggregation) -> None:
    values, data, tokens = random_batch()
    loss_fn = ClippedValueLoss(clip=0.5, aggregation=aggregation)
    whole = values.clone().requires_grad_()
    loss, metrics = run(loss_fn, whole, data, tokens)
    loss.backward()
    parts = values.clone().requires_grad_()
    sums, total = dict.fromkeys(metrics, 0.0), 0.0
    for rows in ([0, 3, 5], [1], [2, 4]):
        part = data.select_indices(rows)
        part_loss, part_metrics = loss_fn(parts[rows], part, sequences(data), torch.tensor(tokens))
        part_loss.backward()
        total += float(part_loss.detach())
        sums = {name: sums[name] + value for name, value in part_metrics.items()}
    assert total == pytest.approx(loss.item())
    torch.testing.assert_close(parts.grad, whole.grad)
    assert sums == pytest.approx(metrics)


def test_a_sequence_mean_is_the_mean_over_sequences_of_their_tokens_means() -> None:
    """R = 0. The errors are 1, 3, 1 in a row of three tokens, 2 in a row of one, and a third row has no token. The
    result is ½ · (11/3 + 4 + 0) over three sequences. The token mean is ½ · (1 + 9 + 1 + 4) over four tokens."""
    values = torch.tensor([[9.0, 1, 3, 1], [9, 9, 2, 9], [9, 9, 9, 9]], requires_grad=True)
    zeros = [[0.0] * 4] * 3
    data = batch(returns=zeros, old=zeros, mask=[[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
    loss, _ = run(ClippedValueLoss(clip=None, aggregation="sequence_mean"), values, data, 4)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (11 / 3 + 4 + 0) / 3)
    assert values.grad is not None
    assert values.grad.flatten().tolist() == pytest.approx([0, 1 / 9, 3 / 9, 1 / 9, 0, 0, 2 / 3, 0, 0, 0, 0, 0])
    token_mean, _ = run(ClippedValueLoss(clip=None), values, data, 4)
    assert token_mean.item() == pytest.approx(0.5 * 15 / 4)


@every_aggregation
def test_the_clip_acts_before_the_aggregation(aggregation: ValueAggregation) -> None:
    """With one token in one sequence, both means are equal: as in the case by hand above, ½ · 0.8² without a
    gradient."""
    values = torch.tensor([[0.0, 0.5]], requires_grad=True)
    data = batch(returns=[[0, 1]], old=[[0, 0]], mask=[[0, 1]])
    loss, metrics = run(ClippedValueLoss(clip=0.2, aggregation=aggregation), values, data, 1)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 0.64)
    assert values.grad is not None
    assert not values.grad.any()
    assert metrics["value_clipped_ratio"] == 1


@every_aggregation
def test_wider_padding_changes_nothing(aggregation: ValueAggregation) -> None:
    """The output of a packed pass is only as wide as its own longest row."""
    values, data, tokens = random_batch()
    wider = BatchedDataDict(
        {name: torch.nn.functional.pad(data[name], (0, 4)) for name in ("returns", "values", "token_mask")}
        | {"sample_mask": data["sample_mask"]}
    )
    loss_fn = ClippedValueLoss(clip=0.5, aggregation=aggregation)
    loss, _ = run(loss_fn, values, data, tokens)
    wide, _ = run(loss_fn, torch.nn.functional.pad(values, (0, 4), value=7.0), wider, tokens)
    torch.testing.assert_close(wide, loss)


@every_aggregation
def test_a_row_of_weight_1_is_two_rows_of_weight_one_half(aggregation: ValueAggregation) -> None:
    values, data, _ = random_batch()
    twice = BatchedDataDict({name: torch.cat([column, column[:2]]) for name, column in data.items()})
    twice["sample_mask"][[0, 1, -2, -1]] = 0.5
    loss_fn = ClippedValueLoss(clip=0.5, aggregation=aggregation)
    counts = data["sample_mask"].sum(), (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)).sum()
    whole, metrics = loss_fn(values, data, *counts)
    halves, same = loss_fn(torch.cat([values, values[:2]]), twice, *counts)
    torch.testing.assert_close(halves, whole)
    assert same == pytest.approx(metrics)


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(RunError, match="'sum'; it must be one of token_mean, sequence_mean"):
        ClippedValueLoss(clip=None, aggregation="sum")  # type: ignore[arg-type]


@every_aggregation
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_masked_slots_are_not_read(junk: float, aggregation: ValueAggregation) -> None:
    values, data, tokens = random_batch()
    loss_fn = ClippedValueLoss(clip=0.5, aggregation=aggregation)
    trained = (data["token_mask"] * data["sample_mask"].unsqueeze(1)) > 0
    trained[:, 0] = False
    clean = values.clone().requires_grad_()
    loss, metrics = run(loss_fn, clean, data, tokens)
    loss.backward()
    assert clean.grad is not None
    assert not clean.grad[~trained].any(), "no gradient at prompts, padding, masked samples and first tokens"
    for name in ("returns", "values"):
        data[name] = torch.where(trained, data[name], junk)
    dirty = torch.where(trained, values, junk).requires_grad_()
    dirty_loss, dirty_metrics = run(loss_fn, dirty, data, tokens)
    dirty_loss.backward()
    assert torch.equal(dirty_loss, loss)
    assert dirty_metrics == metrics
    assert dirty.grad is not None
    assert torch.equal(dirty.grad, clean.grad)


@every_aggregation
@pytest.mark.fault("F24")
def test_a_batch_without_a_trained_token_is_zero(aggregation: ValueAggregation) -> None:
    values = torch.ones(1, 3, requires_grad=True)
    data = batch(returns=[[5, 5, 5]], old=[[0, 0, 0]], mask=[[1, 1, 1]], samples=[0.0])
    loss, metrics = run(ClippedValueLoss(clip=0.2, aggregation=aggregation), values, data, 0)
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad is not None
    assert not values.grad.any()
    assert set(metrics.values()) == {0.0}


def test_returns_and_old_values_carry_no_gradient() -> None:
    values, data, tokens = random_batch()
    data["returns"].requires_grad_()
    data["values"].requires_grad_()
    loss, _ = run(ClippedValueLoss(clip=0.5), values.requires_grad_(), data, tokens)
    loss.backward()
    assert data["returns"].grad is None
    assert data["values"].grad is None


def test_explained_variance_is_made_of_means_over_tokens() -> None:
    values, data, tokens = random_batch()
    loss_fn = ClippedValueLoss(clip=None)
    _, means = run(loss_fn, values, data, tokens)
    assert loss_fn.loss_type is LossType.TOKEN_LEVEL
    assert ClippedValueLoss(clip=None, aggregation="sequence_mean").loss_type is LossType.SEQUENCE_LEVEL
    assert {loss_fn.metric_normalizations[name] for name in means} == {MetricNormalization.TOKENS}
    trained = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)) > 0
    returns, error = data["returns"][:, 1:][trained], (data["returns"] - values)[:, 1:][trained]
    expected = 1 - float(error.var(correction=0) / returns.var(correction=0))
    assert explained_variance(means) == pytest.approx(expected, rel=1e-5)


def test_explained_variance_of_equal_returns_was_not_measured() -> None:
    means = dict.fromkeys(("return_mean", "return_square_mean", "value_error_mean"), 1.0)
    assert math.isnan(explained_variance({**means, "value_error_square_mean": 2.0}))


@pytest.mark.parametrize("equal", [0.1, 0.7, -2.3, 1e-4])
@pytest.mark.parametrize("tokens", [333, 5000])
def test_the_rounding_of_equal_returns_is_no_variance(equal: float, tokens: int) -> None:
    shape = (1, tokens + 1)
    data = BatchedDataDict(returns=torch.full(shape, equal), token_mask=torch.ones(shape), sample_mask=torch.ones(1))
    _, means = run(ClippedValueLoss(clip=None), torch.randn(shape), data, tokens)
    assert math.isnan(explained_variance(means))


@pytest.mark.parametrize("clip", [0.0, -0.1, math.nan])
def test_a_clip_that_is_not_positive_is_refused(clip: float) -> None:
    with pytest.raises(RunError, match="must be above 0"):
        ClippedValueLoss(clip=clip)


@pytest.mark.parametrize(("clip", "missing"), [(0.2, "returns and values"), (None, "returns")])
def test_a_column_that_is_missing_is_named(clip: float | None, missing: str) -> None:
    with pytest.raises(RunError, match=f"reads {missing}, but the rows do not have"):
        ClippedValueLoss(clip=clip)(torch.zeros(1, 2), BatchedDataDict(), torch.tensor(1), torch.tensor(1))
