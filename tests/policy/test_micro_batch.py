"""A micro-batch through a tiny model: measurements of objectives and of users' losses, and the entropy penalty."""

import copy
import enum
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny_groups import STEP, TEMPERATURE, VOCABULARY, make_group, rows_of, with_tops
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrl.algorithms.interfaces import LossInputType, LossType
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import Clipped, Objective, Penalty
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.shares import with_shares
from asyncrl.config.load import load_config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import BRANCH, NO_BRANCH, NO_VERSION, SUPPORT
from asyncrl.errors import CallRefused, MissingColumns
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.policy.micro_batch import OnPolicy, check_supports, loss_of, passed_columns
from asyncrl.ranks.batching import tokens_passed
from asyncrl.ranks.loss_pass import MicroBatchOutcome, UpdateContext, aligned
from asyncrl.ranks.packed import ATTENTION
from asyncrl.ranks.plan import plan_of


@functools.cache
def model() -> PreTrainedModel:
    torch.manual_seed(3)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
        )
    )


def on_policy(key: int, lengths: tuple[int, ...]) -> BatchedDataDict:
    """Returns a group that was sampled from the model. Every sample has another advantage."""
    data = make_group(key, lengths=lengths)
    with torch.no_grad():
        logprobs, _, _ = model_logprobs(
            model(), rows_of(data["input_ids"]), temperature=TEMPERATURE, with_entropy=False
        )
    data["generation_logprobs"] = aligned(logprobs)
    data["advantages"] = torch.tensor([1.0, -2.0, 0.5])[: data.size, None].expand_as(data["input_ids"])
    return data


def outcome(
    loss_fn: Any,
    data: BatchedDataDict,
    *,
    step: int | None = STEP,
    sole_update: bool = True,
    network: PreTrainedModel | None = None,
    packed: bool = False,
) -> MicroBatchOutcome:
    plan = plan_of(data)
    counts = {"global_valid_seqs": torch.tensor(plan.samples), "global_valid_toks": torch.tensor(plan.tokens)}
    context = UpdateContext(loss_fn=loss_fn, counts=counts, step=step, sole_update=sole_update)
    used = model() if network is None else network
    return loss_of(data, model=used, context=context, temperature=TEMPERATURE, packed=packed, on_policy=ON_POLICY)


ON_POLICY = OnPolicy(whole_samples=False)


class Wrapped:
    """An objective in the form of a user's loss: asyncrl knows nothing of it except the call."""

    loss_type = LossType.SEQUENCE_LEVEL

    def __init__(self, objective: Objective, input_type: LossInputType) -> None:
        self._loss = ObjectiveLoss(objective)
        self.input_type = input_type

    def __call__(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        return self._loss(*arguments, **named)


@pytest.mark.parametrize("name", ["dapo", "opsm", "gspo", "sapo", "dr_grpo"])
def test_on_policy_every_token_is_pushed_alike_whatever_its_sequence_and_its_update_weigh(name: str) -> None:
    objective = PRESETS[name].objective
    loss = ObjectiveLoss(Objective(surrogate=Clipped()) if name == "dr_grpo" else objective)
    updates = [on_policy(0, (2, 19, 5)), on_policy(1, (1, 1, 1))]
    means = sum((outcome(loss, data).sums for data in updates[1:]), outcome(loss, updates[0]).sums).means()
    assert means["kernel_ess_ratio"] == pytest.approx(1.0, rel=1e-4)
    assert means["silent_ratio"] == 0.0


def test_a_users_loss_is_measured_with_what_it_divides_by() -> None:
    """κ ∝ 1/length: (2/2 + 6/6)² / (8 · (2/4 + 6/36)) for two sequences of 2 and 6 tokens."""
    loss = Wrapped(PRESETS["opsm"].objective, LossInputType.LOGPROB)
    means = outcome(loss, on_policy(0, (2, 6))).sums.means()
    assert means["kernel_ess_ratio"] == pytest.approx(4 / (8 * (1 / 2 + 1 / 6)), rel=1e-4)


def test_a_loss_without_attributes_gets_logits() -> None:
    objective, data = PRESETS["dapo"].objective, on_policy(0, (2, 6))

    def bare(next_token_logits: torch.Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any:
        assert next_token_logits.shape[:2] == data["input_ids"].shape
        return ObjectiveLoss(objective)(next_token_logits, data, global_valid_seqs, global_valid_toks)

    found = outcome(bare, data)
    assert found.loss == pytest.approx(outcome(Wrapped(objective, LossInputType.LOGPROB), data).loss, rel=1e-5)


def test_an_episode_with_branches_counts_once_and_has_one_ratio() -> None:
    """With GSPO, ln of the ratio of a sequence is the mean of ln ρ over all sampled tokens of its branches."""
    data = make_group(0, lengths=(4, 4))
    data["advantages"] = torch.tensor([1.0, -1.0])[:, None].expand_as(data["input_ids"])
    data["prev_logprobs"] = data["generation_logprobs"]
    starts_B = data["input_lengths"] - 2
    places_S = torch.arange(data["input_ids"].shape[1])
    inside_BS = places_S < data["input_lengths"].unsqueeze(1)
    data[BRANCH] = (places_S >= starts_B.unsqueeze(1)).int().masked_fill(~inside_BS, NO_BRANCH)
    data["token_mask"][torch.arange(2), starts_B] = 0  # the first token of a branch is read
    found = outcome(ObjectiveLoss(PRESETS["gspo"].objective), data)
    with torch.no_grad():
        logprobs_BT, _, _ = model_logprobs(
            model(),
            rows_of(data["input_ids"], branch_ids_BS=data[BRANCH]),
            temperature=TEMPERATURE,
            with_entropy=False,
        )
    log_rho_BT = logprobs_BT - data["generation_logprobs"][:, 1:]
    mask_BT = data["token_mask"][:, 1:]
    log_ratio_B = (log_rho_BT * mask_BT).sum(1) / mask_BT.sum(1)
    clip = PRESETS["gspo"].objective.surrogate
    assert isinstance(clip, Clipped)
    ratio_B = log_ratio_B.exp()
    advantage_B = torch.tensor([1.0, -1.0])
    clipped_B = ratio_B.clamp(clip.lo, clip.hi)
    wanted = -torch.minimum(ratio_B * advantage_B, clipped_B * advantage_B).mean()
    assert found.loss == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize(("name", "passed"), [("decoupled_icepop", 6 + 4 * 2), ("score_centering", 8 + 6 + 3 * 2)])
def test_branches_share_tokens_with_other_most_likely_tokens_unless_the_loss_is_centered(
    name: str, passed: int
) -> None:
    """Four branches have 6 tokens in common, of which the first branch sampled the last 4, and 2 of their own.
    With centering, the last three branches share them with each other only."""
    common, sampled_S = [3, 1, 4, 1, 5, 9], torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, *[0, 0, 0, 0, 0, 0, 1, 1] * 3])
    ids_1S = torch.tensor([[token for branch in range(4) for token in (*common, 10 + branch, 20 + branch)]])
    data = BatchedDataDict(
        input_ids=ids_1S,
        input_lengths=torch.tensor([32]),
        weight_versions=torch.where(sampled_S > 0, STEP, NO_VERSION).unsqueeze(0),
        generation_logprobs=-3.0 * sampled_S.float().unsqueeze(0),
        token_mask=sampled_S.float().unsqueeze(0),
        sample_mask=torch.ones(1),
        advantages=torch.ones(1, 32),
    )
    data[BRANCH] = torch.arange(4).repeat_interleave(8).unsqueeze(0).int()
    loss, seen = ObjectiveLoss(PRESETS[name].objective), []
    network = copy.deepcopy(model())
    network.set_attn_implementation(ATTENTION)
    network.model.register_forward_pre_hook(
        lambda _, inputs, named: seen.append(named["input_ids"].numel()), with_kwargs=True
    )
    outcome(loss, with_tops(data), network=network, packed=True)
    assert seen == [passed]
    assert tokens_passed([with_tops(data)], packed=True, wide=passed_columns(loss)) == (32, passed)


def with_supports(data: BatchedDataDict) -> BatchedDataDict:
    """Returns the rows with supports of the token itself and its two successors, and the log-probs of the model."""
    ids_BS = data["input_ids"]
    data[SUPPORT] = torch.stack([ids_BS, (ids_BS + 1) % VOCABULARY, (ids_BS + 2) % VOCABULARY], dim=-1).int()
    with torch.no_grad():
        logprobs, _, _ = model_logprobs(
            model(), rows_of(ids_BS, support_BSK=data[SUPPORT]), temperature=TEMPERATURE, with_entropy=False
        )
    data["generation_logprobs"] = aligned(logprobs)
    return data


def test_what_was_sampled_from_supports_is_on_policy_and_its_entropy_is_that_of_the_supports() -> None:
    loss = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
    plain, data = on_policy(0, (2, 19, 5)), with_supports(on_policy(0, (2, 19, 5)))
    means = outcome(loss, data).sums.means()
    assert means["abs_log_rho_max_nats"] < 1e-5
    assert 0 < means["entropy_nats"] < math.log(3) < outcome(loss, plain).sums.means()["entropy_nats"]
    plain["generation_logprobs"] = data["generation_logprobs"]
    assert outcome(loss, plain).sums.means()["abs_log_rho_max_nats"] > 1, "log-probs over all tokens are others"


def test_rows_and_the_configuration_agree_on_supports_and_a_loss_of_logits_is_refused() -> None:
    plain, data = on_policy(0, (2, 4)), with_supports(on_policy(0, (2, 4)))
    loss = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
    check_supports(plain, loss, has_supports=False)
    with pytest.raises(CallRefused, match=r"have the column support_ids, but generator\.top_k is unset"):
        check_supports(data, loss, has_supports=False)
    check_supports(data, loss, has_supports=True)
    with pytest.raises(MissingColumns, match=r"training with generator\.top_k reads support_ids"):
        check_supports(plain, loss, has_supports=True)
    with pytest.raises(CallRefused, match="the loss Wrapped reads the logits of all tokens"):
        check_supports(data, Wrapped(loss.objective, LossInputType.LOGIT), has_supports=True)
    check_supports(data, Wrapped(loss.objective, LossInputType.LOGPROB), has_supports=True)
    assert not load_config([], []).has_supports
    assert load_config([], ["generator.top_k=3"]).has_supports


def test_logits_are_passed_by_the_keyword_that_a_loss_names_or_by_position() -> None:
    objective, data = ObjectiveLoss(PRESETS["dapo"].objective), on_policy(0, (2, 6))
    expected = outcome(Wrapped(PRESETS["dapo"].objective, LossInputType.LOGIT), data).loss

    def keyword_only(*, next_token_logits: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any:
        return objective(next_token_logits, data, global_valid_seqs, global_valid_toks)

    def other_name_and_order(data: Any, global_valid_seqs: Any, global_valid_toks: Any, logits: Any) -> Any:
        return objective(logits, data, global_valid_seqs, global_valid_toks)

    def any_keyword(data: Any, global_valid_seqs: Any, global_valid_toks: Any, **kwargs: Any) -> Any:
        assert kwargs["logits"] is kwargs["next_token_logits"]
        return objective(kwargs["logits"], data, global_valid_seqs, global_valid_toks)

    def name_of_its_own(scores: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any, **_: Any) -> Any:
        return objective(scores, data, global_valid_seqs, global_valid_toks)

    for loss in (keyword_only, other_name_and_order, any_keyword, name_of_its_own):
        assert outcome(loss, data).loss == expected, loss.__name__


class Foreign(enum.Enum):
    LOGPROB = "logprob"


@pytest.mark.parametrize("input_type", ["logprob", Foreign.LOGPROB, LossInputType.LOGPROB])
def test_the_input_type_is_compared_by_value(input_type: Any) -> None:
    loss = Wrapped(PRESETS["dapo"].objective, input_type)
    assert "silent_ratio" in outcome(loss, on_policy(0, (2, 6))).sums.means(), (
        "it got log-probs, so their slopes are measured"
    )


def test_an_unknown_input_type_is_named() -> None:
    with pytest.raises(ValueError, match="input_type is 'hidden_states'; it must be one of 'logit', 'logprob'"):
        outcome(Wrapped(PRESETS["dapo"].objective, "hidden_states"), on_policy(0, (2, 6)))  # type: ignore[arg-type]


class Kind:
    """A plain function as a loss with an input type."""

    def __init__(self, input_type: str, function: Any) -> None:
        self.input_type, self._function = input_type, function

    def __call__(self, **arguments: Any) -> Any:
        return self._function(**arguments)


def raising(**_: Any) -> Any:
    raise KeyError("prev_logprobs")


@pytest.mark.parametrize("input_type", ["logit", "logprob"])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, r"KeyError: 'prev_logprobs' \(.*test_micro_batch\.py:\d+\)"),
        (torch.ones(3), r"a loss must return \(scalar, metrics\), but this one returned a Tensor"),
        ((torch.ones(3), {}), r"a scalar tensor and a dict, but this one returned shape \[3\] and dict"),
        ((1.0, {}), "this one returned float and dict"),
        ((torch.ones(()), {"text": "no number"}), "ValueError: could not convert"),
    ],
)
def test_a_loss_that_fails_leaves_a_gradient_of_0_so_that_collectives_line_up(
    answer: Any, text: str, input_type: str
) -> None:
    loss: Any = raising if answer is None else lambda **_: answer
    found = outcome(Kind(input_type, loss), on_policy(0, (2, 6)))
    assert found.failure is not None
    assert re.search(text, str(found.failure))
    gradients = torch.autograd.grad(found.differentiable, list(model().parameters()))
    assert not any(gradient.any() for gradient in gradients)


def test_a_loss_may_change_its_columns_and_the_diagnostics_are_those_of_the_rows() -> None:
    def loss(*, next_token_logprobs: torch.Tensor, data: Any, **_: Any) -> Any:
        data.clear()
        return next_token_logprobs.sum() * 0.1, {}

    data = on_policy(0, (2, 6))
    found = outcome(Kind("logprob", loss), data)
    assert found.failure is None
    assert found.sums.pairs["importance_weight_mean"][1] == 8
    assert "silent_ratio" in found.sums.means()
    assert "advantages" in data


def test_a_complex_loss_fails_like_any_other() -> None:
    found = outcome(Kind("logprob", lambda **_: (torch.ones(()) * 1j, {})), on_policy(0, (2, 6)))
    assert found.failure is not None


def test_only_a_sole_update_gives_the_loss_this_pass_as_the_start_of_the_step() -> None:
    seen: list[bool] = []

    def loss(*, next_token_logits: torch.Tensor, data: Any, **_: Any) -> Any:
        seen.append("prev_logprobs" in data)
        return next_token_logits.sum() * 0, {}

    for sole_update in (True, False):
        found = outcome(loss, on_policy(0, (2, 6)), sole_update=sole_update)
        assert found.sums.pairs["importance_weight_mean"][1] == 8, "the distance to the sampler is still measured"
    assert seen == [True, False]


def test_a_model_in_bfloat16_gives_losses_log_probs_and_logits_in_float32() -> None:
    given: list[torch.Tensor] = []

    class Watched(Wrapped):
        def __call__(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
            given.append(arguments[0] if arguments else named["next_token_logprobs"])
            return super().__call__(*arguments, **named)

    data = on_policy(0, (2, 6))
    half = copy.deepcopy(model()).to(torch.bfloat16)
    counts = {"global_valid_seqs": torch.tensor(2), "global_valid_toks": torch.tensor(8)}
    for input_type in LossInputType:
        loss_fn = Watched(PRESETS["gspo"].objective, input_type)
        context = UpdateContext(loss_fn=loss_fn, counts=counts, step=STEP, sole_update=True)
        loss_of(data, model=half, context=context, temperature=TEMPERATURE, packed=False, on_policy=ON_POLICY)
    assert [tensor.dtype for tensor in given] == [torch.float32] * 2


def test_diagnostics_of_columns_in_bfloat16_are_those_of_the_same_numbers_in_float32() -> None:
    data = on_policy(0, (2, 6))
    data["prev_logprobs"] = (data["generation_logprobs"] + 0.3).bfloat16()
    data["generation_logprobs"] = data["generation_logprobs"].bfloat16()
    data["staleness"] = torch.zeros_like(data["advantages"])
    loss = ObjectiveLoss(PRESETS["dapo"].objective)
    half = outcome(loss, data)
    for column in ("prev_logprobs", "generation_logprobs"):
        data[column] = data[column].float()
    wide = outcome(loss, data)
    assert half.sums == wide.sums


@pytest.mark.parametrize(
    ("whole_samples", "expected"), [(False, [[0, 0, 1], [0, 1, 1]]), (True, [[0, 0, 0], [0, 1, 1]])]
)
def test_with_a_kept_cache_only_samples_of_one_version_are_on_policy(
    whole_samples: bool, expected: list[list[int]]
) -> None:
    """D17: tokens after an update have keys and values of the weights before it."""
    none = NO_VERSION
    data = BatchedDataDict(weight_versions=torch.tensor([[none, none, STEP - 1, STEP], [none, none, STEP, STEP]]))
    found = OnPolicy(whole_samples=whole_samples).mask(data, step=STEP)
    assert found.int().tolist() == expected
    without = BatchedDataDict(input_ids=torch.zeros(2, 4, dtype=torch.long))
    assert OnPolicy(whole_samples=False).mask(without, step=None).tolist() == [[False] * 3] * 2


def test_a_penalty_is_no_push() -> None:
    data = on_policy(0, (2, 6))
    data["prev_logprobs"] = data["generation_logprobs"] - math.log(2)
    data["reference_policy_logprobs"] = data["generation_logprobs"] - 0.5
    data["advantages"] = torch.ones_like(data["advantages"])
    found = outcome(ObjectiveLoss(PRESETS["grpo"].objective), data)
    means = found.sums.means()
    assert (means["silent_ratio"], means["kernel_ess_ratio"]) == (1.0, 0.0)
    assert means["clipped_positive_ratio"] == 1.0
    [weight, *_] = torch.autograd.grad(found.differentiable, list(model().parameters()))
    assert weight.any(), "the penalty still has a gradient"


@pytest.mark.parametrize("kind", ["k3", "entropy", "positive_nll"])
def test_a_penalty_trains_the_model_where_every_advantage_is_zero(kind: Any) -> None:
    data = on_policy(0, (2, 6))
    data["reference_policy_logprobs"] = data["generation_logprobs"] - 0.5
    data["rewards"] = torch.tensor([1.0, 0.0])
    data = with_shares(data)
    data["advantages"] = torch.zeros_like(data["advantages"])
    loss = ObjectiveLoss(Objective(surrogate=Clipped(), penalties=(Penalty(beta=0.5, kind=kind),)))
    found = outcome(loss, data)
    [weight, *_] = torch.autograd.grad(found.differentiable, list(model().parameters()))
    assert weight.any()
    assert "silent_ratio" not in found.sums.means(), "no advantage pushes a token"


def test_without_a_step_nothing_is_stale_and_no_bucket_is_made_up() -> None:
    means = outcome(ObjectiveLoss(PRESETS["dapo"].objective), on_policy(0, (2, 6)), step=None).sums.means()
    assert "silent_ratio" in means
    assert not [name for name in means if "staleness" in name]


def test_a_penalty_on_entropy_has_the_gradient_of_the_one_made_of_logits_and_a_kernel() -> None:
    objective = Objective(surrogate=Clipped(), penalties=(Penalty(beta=0.3, kind="entropy"),))
    data = on_policy(0, (2, 6, 4))
    chunked = outcome(ObjectiveLoss(objective), data)
    logits = outcome(Wrapped(objective, LossInputType.LOGIT), data)
    assert chunked.loss == pytest.approx(logits.loss, rel=1e-5)
    parameters = list(model().parameters())
    for found, expected in zip(
        torch.autograd.grad(chunked.differentiable, parameters),
        torch.autograd.grad(logits.differentiable, parameters),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert chunked.sums.means()["kernel_ess_ratio"] == pytest.approx(1.0, rel=1e-4)
    assert "silent_ratio" not in logits.sums.means(), "a loss that takes logits is not measured"


def test_kl_to_the_reference_is_that_of_its_column_and_missing_without_one() -> None:
    data = on_policy(0, (2, 19, 5))
    loss = ObjectiveLoss(PRESETS["dapo"].objective)
    assert "kl_to_reference_nats" not in outcome(loss, data).sums.means()
    data["reference_policy_logprobs"] = data["generation_logprobs"] + math.log(2)
    sums = outcome(loss, data).sums
    assert sums.pairs["kl_to_reference_nats"][1] == sums.pairs["importance_weight_mean"][1] == 26
    assert sums.means()["kl_to_reference_nats"] == pytest.approx(1 - math.log(2), rel=1e-4)
