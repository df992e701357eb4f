"""Half precision: token-level objectives compute in float32 from bfloat16 inputs; pooled objectives refuse such inputs
and name the column. Statistics of advantages are computed in float64."""

import msgspec
import pytest
import torch
from test_preset_metamorphic import counts, padded, rows, runnable

from asyncrl.algorithms.advantages import Samples, resolve_estimator
from asyncrl.algorithms.baselines import Whitening
from asyncrl.algorithms.loss import ObjectiveLoss, interpolated_policy
from asyncrl.algorithms.objective import Gate, Linear, Objective, Reinforce, Weight, pooled_sources
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.returns import TokenAdvantages
from asyncrl.algorithms.token_estimators import whitened_advantages
from asyncrl.algorithms.token_terms import Segments, token_terms, wide
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ImpreciseColumns

LOGPROBS = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
TOKEN_LEVEL = [name for name in PRESETS if not pooled_sources(PRESETS[name].objective)]
POOLED = [name for name in PRESETS if name not in TOKEN_LEVEL]


def evaluated(objective: Objective, data: BatchedDataDict) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = data["logprobs"].clone().requires_grad_()
    columns = BatchedDataDict({name: column for name, column in data.items() if name != "logprobs"})
    outputs = {"next_token_logprobs": leaf[:, 1:], "next_token_centering": data["centering"][:, 1:]}
    loss, _ = ObjectiveLoss(objective)(data=columns, **outputs, **counts(rows()))
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def rounded(dtype: torch.dtype) -> BatchedDataDict:
    """Returns the rows of the metamorphic tests with every number rounded to `dtype`."""
    data = padded(rows())
    return BatchedDataDict({name: column.to(dtype) for name, column in data.items()})


def as_float32(data: BatchedDataDict) -> BatchedDataDict:
    return BatchedDataDict({name: column.float() for name, column in data.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_log_probs_in_half_precision_give_what_the_same_numbers_give_in_float32(name: str, dtype: torch.dtype) -> None:
    """The results are equal bit for bit. Only the gradient, which has the dtype of its leaf, is rounded once at the
    end."""
    half = rounded(dtype)
    loss, gradient = evaluated(runnable(name), half)
    expected, expected_gradient = evaluated(runnable(name), as_float32(half))
    assert loss.dtype is torch.float32
    assert torch.equal(loss, expected)
    assert gradient.dtype is dtype
    assert torch.equal(gradient, expected_gradient.to(dtype))


@pytest.mark.parametrize("column", LOGPROBS)
@pytest.mark.parametrize("name", ["decoupled_icepop", "grpo", "a3po"])
def test_one_column_in_half_precision_is_widened_beside_others_in_float32(name: str, column: str) -> None:
    half = as_float32(rounded(torch.bfloat16))
    expected = evaluated(runnable(name), half)
    half[column] = half[column].bfloat16()
    found = evaluated(runnable(name), half)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("objective", "sources"),
    [
        (PRESETS["decoupled_icepop"].objective, set()),
        (PRESETS["gspo"].objective, {"current", "proximal"}),
        (PRESETS["gspo_token"].objective, {"current", "proximal"}),
        (PRESETS["vespo"].objective, {"current", "behaviour"}),
        (PRESETS["seq_tis"].objective, {"proximal", "behaviour"}),
        (PRESETS["geometric_rejection"].objective, {"proximal", "behaviour"}),
        (PRESETS["opsm"].objective, {"current", "behaviour"}),
        (Objective(surrogate=Linear(), gates=(Gate(stat="k2", hi=1.0, pool="max"),)), {"proximal", "behaviour"}),
        (Objective(surrogate=Reinforce(), weight=Weight(pool="min")), {"proximal", "behaviour"}),
        (
            Objective(surrogate=Reinforce(), weight=Weight(pool="sum"), proximal="interpolated"),
            {"current", "behaviour"},
        ),
    ],
)
def test_an_objective_knows_whose_log_probs_it_pools(objective: Objective, sources: set[str]) -> None:
    assert pooled_sources(objective) == sources


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", POOLED)
def test_a_pooled_objective_refuses_each_column_in_half_precision_by_name(name: str, dtype: torch.dtype) -> None:
    objective = runnable(name)
    columns = {"proximal": "prev_logprobs", "behaviour": "generation_logprobs", "current": "logprobs"}
    for source in pooled_sources(objective):
        data = padded(rows())
        data[columns[source]] = data[columns[source]].to(dtype)
        named = "next_token_logprobs" if source == "current" else columns[source]
        with pytest.raises(ImpreciseColumns, match=f"{named} is {str(dtype).removeprefix('torch.')}: .* in float32"):
            evaluated(objective, data)


def test_columns_that_are_not_pooled_may_be_in_half_precision() -> None:
    """GSPO compares the current policy with the proximal one; a reference penalty is computed for each token."""
    grounded = msgspec.structs.replace(PRESETS["gspo"].objective, penalties=PRESETS["grpo"].objective.penalties)
    data = padded(rows())
    for column in ("reference_policy_logprobs", "generation_logprobs", "advantages"):
        data[column] = data[column].bfloat16()
    loss, _ = evaluated(grounded, data)
    assert torch.isfinite(loss)


def test_logits_in_half_precision_are_refused_where_log_probs_are_pooled() -> None:
    data = BatchedDataDict(
        input_ids=torch.zeros(1, 3, dtype=torch.int64),
        prev_logprobs=torch.zeros(1, 3),
        advantages=torch.ones(1, 3),
        token_mask=torch.ones(1, 3),
        sample_mask=torch.ones(1),
    )
    logits, one = torch.zeros(1, 3, 4), torch.tensor(1.0)
    loss_fn = ObjectiveLoss(PRESETS["gspo"].objective)
    loss_fn(logits, data, one, one)
    with pytest.raises(ImpreciseColumns, match="next_token_logits is bfloat16"):
        loss_fn(logits.bfloat16(), data, one, one)


def long_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probs of 16 sequences of 4,096 tokens under two policies. Most are near 0, as for a trained model."""
    draw = torch.Generator().manual_seed(0)
    old = -6 * torch.rand(16, 4096, generator=draw) ** 4
    return (old + 0.01 * torch.randn(16, 4096, generator=draw)).clamp(max=0.0), old


def pushed(name: str, current: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of Σ tokens with respect to `current`, in float64. Both other policies are `old`."""
    leaf = current.clone().requires_grad_()
    terms = token_terms(
        PRESETS[name].objective,
        logprobs_BT=leaf,
        sources={"proximal": old, "behaviour": old},
        advantages_BT=torch.ones_like(old),
        segments=Segments(torch.ones_like(old, dtype=torch.bool)),
        centering_BT=torch.zeros_like(old),
    )
    [gradient] = torch.autograd.grad(terms.push_BT.sum(), leaf)
    return gradient.double()


def test_a_long_sequence_s_gradient_is_added_up_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256: GSPO's gradient over 4,096 tokens was 256/4096 of its true value."""
    current, old = (column.bfloat16() for column in long_rows())
    half, wide = pushed("gspo", current, old), pushed("gspo", current.float(), old.float())
    assert torch.equal(half, wide.bfloat16().double())


def test_a_product_of_rounded_ratios_is_another_number() -> None:
    """This is why pooled log-probs in half precision are refused and not widened: the numbers themselves are already
    rounded. The limit 0.05 is far below the found error (0.4) and far above float32's own rounding over 4,096 tokens
    (4096 · 2⁻²⁴)."""
    current, old = long_rows()
    exact = pushed("vespo", current, old)
    from_rounded = pushed("vespo", current.bfloat16().float(), old.bfloat16().float())
    assert (from_rounded - exact).norm() > 0.05 * exact.norm()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_interpolated_policy_of_fresh_tokens_is_exactly_the_current_one(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, behaviour = (-10 * torch.rand(2, 4096, generator=generator, dtype=torch.float64)).to(dtype)
    found = interpolated_policy(logprobs, behaviour=behaviour, staleness=torch.zeros(4096))
    assert torch.equal(found, wide(logprobs))


@pytest.mark.parametrize("scale", ["informative_share", "nonzero_share"])
@pytest.mark.parametrize("groups", [3, 7, 11])
def test_shares_of_samples_are_computed_in_float64(scale: str, groups: int) -> None:
    rewards_N = torch.zeros(2 * groups, dtype=torch.float64)
    rewards_N[0] = 1.0
    samples = Samples(rewards_N=rewards_N, group_ids_N=torch.arange(groups).repeat_interleave(2))
    found = resolve_estimator({"name": "group_mean", "scale": scale})(samples)
    share = (2 if scale == "informative_share" else 1) / (2 * groups)
    assert found[0].item() == pytest.approx(0.5 / share, rel=1e-14)


@pytest.mark.parametrize("tokens", [3, 7, 13])
def test_the_weights_of_a_sample_s_tokens_are_computed_in_float64(tokens: int) -> None:
    mask_BS = torch.zeros(1, 16)
    mask_BS[0, :tokens] = 1.0
    data = BatchedDataDict(token_mask=mask_BS, sample_mask=torch.ones(1))
    found = TokenAdvantages(advantages_BS=mask_BS.double(), returns_BS=mask_BS.double())
    seen: list[torch.Tensor] = []

    def add_up(sums: torch.Tensor) -> torch.Tensor:
        seen.append(sums)
        return sums

    whitened_advantages(data, found, rule=Whitening(whiten="samples"), add_up=add_up)
    assert seen[0][0].item() == pytest.approx(1.0, abs=1e-14)
