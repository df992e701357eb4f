"""The loss over batches: denominators are global, masked values have no effect, and every split gives the same
result."""

import math
from typing import Any

import pytest
import torch

from asyncrl.algorithms.interfaces import LossFunction, LossInputType, LossType, masked_mean
from asyncrl.algorithms.loss import ObjectiveLoss, build_loss, entropy, gather_logprobs
from asyncrl.algorithms.objective import Aggregation, Clipped, Gate, Objective, Penalty, Reinforce, Weight
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.shares import with_shares
from asyncrl.config.schema import AlgorithmSection, Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError, RunError

ROWS, TOKENS, VOCABULARY = 5, 7, 11
AGGREGATIONS = list(Aggregation)


def objective(aggregation: Aggregation) -> Objective:
    return Objective(
        surrogate=Clipped(lo=0.8, hi=1.28, dual=3.0),
        weight=Weight(lo=0.5, hi=5.0, outside="zero"),
        aggregation=aggregation,
        constant=4.0 if aggregation is Aggregation.SEQUENCE_SUM_CONSTANT else None,
    )


def make_batch(seed: int = 0) -> tuple[BatchedDataDict, torch.Tensor]:
    """Returns columns [B, S] and logits [B, S, V]. The third row is masked, and the fourth has no trained token."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    token_mask = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    for row, (start, end) in enumerate([(2, 7), (3, 5), (1, 6), (4, 4), (2, 3)]):
        token_mask[row, start:end] = 1
    data = BatchedDataDict(
        {
            "input_ids": torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=draw),
            "input_lengths": torch.tensor([7, 5, 6, 4, 3]),
            "prev_logprobs": -2.5 + 0.2 * normal(ROWS, TOKENS),
            "generation_logprobs": -2.5 + 0.5 * normal(ROWS, TOKENS),
            "advantages": normal(ROWS, 1).expand(ROWS, TOKENS).clone(),
            "token_mask": token_mask,
            "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64),
            "group_ids": torch.tensor([3, 8, 3, 8, 3]),
        }
    )
    return with_shares(data), 0.3 * normal(ROWS, TOKENS, VOCABULARY)


def counts(data: BatchedDataDict) -> dict[str, torch.Tensor]:
    tokens = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)).sum()
    return {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": tokens}


def loss_and_gradient(
    loss_fn: LossFunction, data: BatchedDataDict, logits: torch.Tensor, **global_counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    logits = logits.clone().requires_grad_()
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    loss, metrics = loss_fn(data=data, next_token_logprobs=logprobs, **(global_counts or counts(data)))
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad, metrics


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_logits_call_and_the_logprobs_call_agree(aggregation: Aggregation) -> None:
    data, logits = make_batch()
    loss_fn = ObjectiveLoss(objective(aggregation))
    by_logprobs, _, _ = loss_and_gradient(loss_fn, data, logits)
    by_logits, _ = loss_fn(logits, data, counts(data)["global_valid_seqs"], counts(data)["global_valid_toks"])
    torch.testing.assert_close(by_logits, by_logprobs, rtol=1e-6, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("split", [1, 2, 4])
def test_micro_batches_add_up_to_the_whole_batch(aggregation: Aggregation, split: int) -> None:
    data, logits = make_batch()
    loss_fn = ObjectiveLoss(objective(aggregation))
    whole, whole_gradient, whole_metrics = loss_and_gradient(loss_fn, data, logits)
    parts = [
        loss_and_gradient(loss_fn, data.slice(start, start + split), logits[start : start + split], **counts(data))
        for start in range(0, ROWS, split)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), whole)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), whole_gradient)
    for name in whole_metrics:
        assert sum(part[2][name] for part in parts) == whole_metrics[name]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_may_come_in_any_order(aggregation: Aggregation) -> None:
    data, logits = make_batch()
    loss_fn = ObjectiveLoss(objective(aggregation))
    whole, gradient, _ = loss_and_gradient(loss_fn, data, logits)
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled, shuffled_gradient, _ = loss_and_gradient(loss_fn, data.select_indices(order), logits[order])
    torch.testing.assert_close(shuffled, whole)
    torch.testing.assert_close(shuffled_gradient, gradient[order])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_more_padding_changes_nothing(aggregation: Aggregation) -> None:
    data, logits = make_batch()
    loss_fn = ObjectiveLoss(objective(aggregation))
    whole, gradient, _ = loss_and_gradient(loss_fn, data, logits)
    wide = BatchedDataDict(
        {name: torch.nn.functional.pad(column, (0, 3)) if column.ndim == 2 else column for name, column in data.items()}
    )
    padded, padded_gradient, _ = loss_and_gradient(loss_fn, wide, torch.nn.functional.pad(logits, (0, 0, 0, 3)))
    torch.testing.assert_close(padded, whole)
    torch.testing.assert_close(padded_gradient[:, :TOKENS], gradient)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("column", ["prev_logprobs", "generation_logprobs", "advantages"])
def test_nan_in_masked_slots_changes_neither_loss_nor_gradient(aggregation: Aggregation, column: str) -> None:
    data, logits = make_batch()
    loss_fn = ObjectiveLoss(objective(aggregation))
    whole, gradient, metrics = loss_and_gradient(loss_fn, data, logits)
    masked = (data["token_mask"] * data["sample_mask"].unsqueeze(1)) == 0
    data[column] = torch.where(masked, torch.nan, data[column])
    poisoned, poisoned_gradient, poisoned_metrics = loss_and_gradient(loss_fn, data, logits)
    torch.testing.assert_close(poisoned, whole)
    torch.testing.assert_close(poisoned_gradient, gradient)
    assert poisoned_metrics == metrics


def test_masked_samples_and_prompt_tokens_have_no_gradient() -> None:
    data, logits = make_batch()
    _, gradient, _ = loss_and_gradient(ObjectiveLoss(PRESETS["reinforce"].objective), data, logits)
    trained = (data["token_mask"] * data["sample_mask"].unsqueeze(1))[:, 1:] > 0
    assert torch.equal(gradient[:, :-1].abs().sum(-1) > 0, trained)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation.TOKEN_MEAN, -(3 * 1.0 + 1 * 2.0) / 4),
        (Aggregation.SEQUENCE_MEAN, -(1.0 + 2.0) / 2),
        (Aggregation.SEQUENCE_SUM, -(3 * 1.0 + 1 * 2.0) / 2),
        (Aggregation.SEQUENCE_SUM_CONSTANT, -(3 * 1.0 + 1 * 2.0) / (2 * 4)),
        (Aggregation.PROMPT_MEAN, -(3 * 1.0 + 1 * 2.0) / 4),
        (Aggregation.SUM, -(3 * 1.0 + 1 * 2.0)),
    ],
)
def test_aggregations_by_hand(aggregation: Aggregation, expected: float) -> None:
    """Two sequences of 3 and 1 tokens of one prompt, A = 1 and 2, all on-policy: the loss of each token is −A."""
    logprobs = torch.full((2, 3), -1.0)
    data = BatchedDataDict(
        {
            "input_ids": torch.zeros(2, 4, dtype=torch.int64),
            "prev_logprobs": torch.full((2, 4), -1.0),
            "generation_logprobs": torch.full((2, 4), -1.0),
            "advantages": torch.tensor([[1.0], [2.0]]).expand(2, 4),
            "token_mask": torch.tensor([[0.0, 1, 1, 1], [0, 1, 0, 0]]),
            "sample_mask": torch.ones(2),
            "group_ids": torch.zeros(2, dtype=torch.int64),
        }
    )
    data = with_shares(data)
    loss, _ = ObjectiveLoss(objective(aggregation))(data=data, next_token_logprobs=logprobs, **counts(data))
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.fault("F24")
def test_nothing_to_train_gives_zero_with_a_graph(aggregation: Aggregation) -> None:
    data, logits = make_batch()
    data["sample_mask"] = torch.zeros(ROWS, dtype=torch.float64)
    loss, gradient, metrics = loss_and_gradient(ObjectiveLoss(objective(aggregation)), data, logits)
    assert float(loss) == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert set(metrics.values()) == {0.0}


def test_padding_may_have_any_segment_id() -> None:
    data, logits = make_batch()
    whole, gradient, _ = loss_and_gradient(ObjectiveLoss(PRESETS["gspo"].objective), data, logits)
    data["segment_ids"] = torch.where(data["token_mask"] > 0, 0, -1)
    padded, padded_gradient, _ = loss_and_gradient(ObjectiveLoss(PRESETS["gspo"].objective), data, logits)
    torch.testing.assert_close(padded, whole)
    torch.testing.assert_close(padded_gradient, gradient)


def test_a_loss_reads_no_more_than_it_needs_and_names_what_is_missing() -> None:
    data, logits = make_batch()
    whole, _, _ = loss_and_gradient(ObjectiveLoss(PRESETS["reinforce"].objective), data, logits)
    few = BatchedDataDict({name: data[name] for name in ("input_ids", "advantages", "token_mask", "sample_mask")})
    bare, _, _ = loss_and_gradient(ObjectiveLoss(PRESETS["reinforce"].objective), few, logits)
    torch.testing.assert_close(bare, whole)
    for name, words in (
        ("dapo", "reads prev_logprobs, but"),
        ("grpo", "reads prev_logprobs, reference_policy_logprobs, but"),
        (
            "a3po",
            "reads generation_logprobs, staleness, but .*; `staleness` is computed",
        ),
    ):
        with pytest.raises(RunError, match=words):
            loss_and_gradient(ObjectiveLoss(PRESETS[name].objective), few, logits)


def test_the_push_is_what_the_advantage_asks_for_alone() -> None:
    """Every token is clipped (u = 2, A = 1), so there is no push, although the penalty has a gradient."""
    data, _ = make_batch()
    leaf = (data["prev_logprobs"] + math.log(2))[:, 1:].clone().requires_grad_()
    data["advantages"] = torch.ones_like(data["advantages"])
    data["reference_policy_logprobs"] = data["prev_logprobs"]
    terms = ObjectiveLoss(PRESETS["grpo"].objective).terms(data, logprobs_BT=leaf)
    [push] = torch.autograd.grad(terms.push_BT.sum(), leaf, retain_graph=True)
    [slopes] = torch.autograd.grad(terms.loss_BT.sum(), leaf)
    assert not push.any()
    assert slopes.any()


def test_an_infinite_surrogate_does_not_get_through_a_gate() -> None:
    """lp = −inf: −A · k · lp is inf, and 0 · inf would be NaN."""
    data, _ = make_batch()
    leaf = data["prev_logprobs"][:, 1:].clone()
    leaf[:, -1] = -torch.inf
    objective = Objective(surrogate=Reinforce(), gates=(Gate(stat="ratio", lo=0.5, p="current"),))
    loss, _ = ObjectiveLoss(objective)(data=data, next_token_logprobs=leaf, **counts(data))
    assert bool(torch.isfinite(loss))


def test_entropies_stand_in_for_logits() -> None:
    data, logits = make_batch()
    loss_fn = ObjectiveLoss(Objective(surrogate=Reinforce(), penalties=(Penalty(beta=0.5, kind="entropy"),)))
    whole, _ = loss_fn(logits, data, counts(data)["global_valid_seqs"], counts(data)["global_valid_toks"])
    logprobs = gather_logprobs(logits, input_ids_BS=data["input_ids"])
    found, _ = loss_fn(data=data, next_token_logprobs=logprobs, next_token_entropies=entropy(logits), **counts(data))
    torch.testing.assert_close(found, whole)
    with pytest.raises(TypeError, match=r"without next_token_entropies: .* or logits"):
        loss_fn(data=data, next_token_logprobs=logprobs, **counts(data))


def test_no_rows_have_no_entropies() -> None:
    assert entropy(torch.zeros(0, 5, 7)).shape == (0, 4)


def test_metrics_count_clipped_and_gated_tokens_of_the_mask_only() -> None:
    data, logits = make_batch()
    data["generation_logprobs"] = data["prev_logprobs"] - 10.0
    _, _, metrics = loss_and_gradient(ObjectiveLoss(objective(Aggregation.TOKEN_MEAN)), data, logits)
    assert metrics["gated_ratio"] == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_row_of_weight_1_is_two_rows_of_weight_one_half(aggregation: Aggregation) -> None:
    """The global counts are sums of the masks, so a fraction in the mask also scales the divisor."""
    data, logits = make_batch()
    twice = BatchedDataDict({name: torch.cat([column, column[:2]]) for name, column in data.items()})
    twice["sample_mask"][[0, 1, -2, -1]] = 0.5
    loss_fn = ObjectiveLoss(objective(aggregation))
    assert counts(twice) == counts(data)
    whole, gradient, metrics = loss_and_gradient(loss_fn, data, logits)
    halves, halved, same = loss_and_gradient(loss_fn, with_shares(twice), torch.cat([logits, logits[:2]]))
    torch.testing.assert_close(halves, whole)
    torch.testing.assert_close(halved[: len(logits)] + torch.cat([halved[-2:], torch.zeros_like(logits[2:])]), gradient)
    assert same == pytest.approx(metrics)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_one_mask_for_all_rows_is_no_weight(aggregation: Aggregation) -> None:
    """All rows have weight one half. The counts are then halves too, and they also divide if they are below 1."""
    data, logits = make_batch()
    loss_fn = ObjectiveLoss(objective(aggregation))
    whole, gradient, metrics = loss_and_gradient(loss_fn, data, logits)
    data["sample_mask"] = data["sample_mask"] / 16
    loss, halved, same = loss_and_gradient(loss_fn, with_shares(data), logits)
    if aggregation is Aggregation.SUM:
        whole, gradient = whole / 16, gradient / 16  # the sum has no divisor
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(halved, gradient)
    assert same == pytest.approx(metrics)


def test_a_preset_is_a_loss_function_with_its_kind() -> None:
    loss_fn = ObjectiveLoss(PRESETS["dapo"].objective)
    assert isinstance(loss_fn, LossFunction)
    assert (loss_fn.loss_type, loss_fn.input_type) == (LossType.TOKEN_LEVEL, LossInputType.LOGPROB)
    assert ObjectiveLoss(objective(Aggregation.SEQUENCE_SUM)).loss_type is LossType.SEQUENCE_LEVEL


class OwnLoss:
    """A loss of the user, named by import path."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT

    def __call__(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return torch.zeros(()), {}


class BareLoss:
    """A loss with only a call and no attributes, as the first version of the interface had it."""

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        return torch.zeros(()), {}


def bare_loss(next_token_logits: torch.Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any:
    return torch.zeros(()), {}


def make_loss(**options: Any) -> OwnLoss:
    return OwnLoss()


MADE = BareLoss()


def not_a_loss() -> int:
    return 3


@pytest.mark.parametrize("path", ["OwnLoss", "make_loss"])
def test_an_import_path_gives_the_user_s_loss(path: str) -> None:
    assert isinstance(build_loss(Config(algorithm=AlgorithmSection(loss=f"{__name__}:{path}"))), OwnLoss)


@pytest.mark.parametrize("path", ["BareLoss", "MADE"])
def test_a_loss_without_attributes_is_one(path: str) -> None:
    assert isinstance(build_loss(Config(algorithm=AlgorithmSection(loss=f"{__name__}:{path}"))), BareLoss)
    assert build_loss(Config(algorithm=AlgorithmSection(loss=f"{__name__}:bare_loss"))) is bare_loss


def test_a_masked_mean_is_a_sum_over_the_global_count_and_looks_at_nothing_masked() -> None:
    values = torch.tensor([[1.0, 2.0, math.nan], [3.0, 4.0, math.inf]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 0.0]])
    mean = masked_mean(values, mask, torch.tensor(20))
    assert mean.item() == pytest.approx((1.0 + 1.0 + 8.0) / 20)
    assert masked_mean(values, mask.bool(), torch.tensor(20)).item() == pytest.approx(7.0 / 20)
    mean.backward()
    assert values.grad is not None
    assert torch.equal(values.grad, mask / 20)
    assert masked_mean(values, torch.zeros(2, 3), torch.tensor(0)).item() == 0.0


def test_a_masked_mean_takes_a_dimension_numbers_and_factors_below_1_as_they_are() -> None:
    values = torch.tensor([[1.0, 2.0, math.nan], [3.0, 4.0, math.inf]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 0.0]])
    assert masked_mean(values, mask, 20).item() == pytest.approx(0.5)
    assert masked_mean(values, mask, 0.5).item() == pytest.approx(20.0)
    assert masked_mean(values, mask, global_normalization_factor=torch.tensor(0.25)).item() == pytest.approx(40.0)
    assert masked_mean(values, mask, 0).item() == 0.0
    assert masked_mean(values, mask).item() == pytest.approx(10 / 3.5), (
        "without a factor, the divisor is the sum of the mask"
    )
    rows = masked_mean(values, mask, dim=1)
    assert rows.tolist() == pytest.approx([2 / 1.5, 4.0])
    assert masked_mean(values, mask, torch.tensor([2.0, 4.0]), dim=-1).tolist() == pytest.approx([1.0, 2.0])
    assert masked_mean(values, torch.zeros(2, 3), dim=1).tolist() == [0.0, 0.0]
    rows.sum().backward()
    assert values.grad is not None
    assert values.grad.isfinite().all()


def test_a_masked_mean_of_half_precision_is_summed_in_float32() -> None:
    values = torch.linspace(-3, 2, 4096).bfloat16().requires_grad_()
    mean = masked_mean(values, torch.ones(4096), 4096)
    assert mean.dtype == torch.float32
    assert torch.equal(mean, masked_mean(values.detach().float(), torch.ones(4096), 4096))
    assert masked_mean(values, torch.ones(4096).bfloat16()).dtype == torch.float32
    mean.backward()
    assert values.grad is not None
    assert torch.equal(values.grad, torch.full((4096,), 1 / 4096).bfloat16())


def test_the_constant_of_dr_grpo_is_the_longest_completion_unless_it_is_set() -> None:
    config = Config.model_validate({"algorithm": {"loss": "dr_grpo"}, "generator": {"max_completion_tokens": 32}})
    unset = build_loss(config)
    assert isinstance(unset, ObjectiveLoss)
    assert unset.objective.constant == 32.0
    own = build_loss(Config.model_validate({"algorithm": {"loss": "dr_grpo", "overrides": {"constant": 7}}}))
    assert isinstance(own, ObjectiveLoss)
    assert own.objective.constant == 7.0


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"loss": f"{__name__}:not_a_loss"}, ["int", "LossFunction"]),
        ({"loss": f"{__name__}:OwnLoss", "overrides": {"weight": None}}, ["overrides", "OwnLoss"]),
        ({"loss": "dapoo"}, ["dapoo", "did you mean 'dapo'"]),
    ],
)
def test_an_impossible_loss_is_refused_with_what_and_why(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_loss(Config.model_validate({"algorithm": section}))
    for word in words:
        assert word in str(caught.value)
