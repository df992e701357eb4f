"""GAE and V-trace over trained tokens, by hand; whitening by global moments."""

import doctest
import math

import pytest
import torch
from returns_scene import ROWS, TOKENS, gae_of, scene, vtrace_of

from asyncrl.algorithms import returns
from asyncrl.algorithms.baselines import Whitening
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.returns import (
    discounted_returns,
    gae,
    kl_estimate,
    length_adaptive_lambda,
    masked_moments,
    vtrace,
    whiten,
)
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import RunError


def test_gae_carries_its_accumulators_across_environment_tokens_by_hand() -> None:
    """Trained at 1 and 4. δ₄ = 1 − 0.5 = 0.5; δ₁ = 0 + 0.5·0.5 − 0.2 = 0.05; A₁ = 0.05 + 0.5·0.5·0.5 = 0.175."""
    rewards_BS = torch.tensor([[0.0, 0.0, 7.0, 7.0, 1.0, 7.0]])
    values_BS = torch.tensor([[0.0, 0.2, 7.0, 7.0, 0.5, 7.0]])
    found = gae(rewards_BS, values_BS, torch.tensor([[0, 1, 0, 0, 1, 0]]), gamma=0.5, lam=0.5)
    torch.testing.assert_close(found.advantages_BS, torch.tensor([[0, 0.175, 0, 0, 0.5, 0]]))
    torch.testing.assert_close(found.returns_BS, torch.tensor([[0, 0.375, 0, 0, 1.0, 0]]))


def test_vtrace_by_hand() -> None:
    """ρ₁ = min(2, e^log 3) = 2, c₁ = 1, ρ₂ = c₂ = 0.5. v₂ = 0.4 + 0.5·(1 − 0.4) = 0.7. δ₁ = 2·(0.4 − 0.1) = 0.6;
    v₁ = 0.1 + 0.6 + 1·(0.7 − 0.4) = 1.0. A₁ = 0.7 − 0.1 = 0.6, A₂ = 1 − 0.4 = 0.6. The objective applies ρ to them."""
    found = vtrace(
        torch.tensor([[0.0, 0.0, 1.0]]),
        torch.tensor([[0.0, 0.1, 0.4]]),
        torch.ones(1, 3),
        log_ratios_BS=torch.tensor([[9.0, math.log(3), math.log(0.5)]]),
        gamma=1.0,
        rho_bar=2.0,
    )
    torch.testing.assert_close(found.returns_BS, torch.tensor([[0, 1.0, 0.7]]))
    torch.testing.assert_close(found.advantages_BS, torch.tensor([[0, 0.6, 0.6]]))


def test_the_vtrace_preset_on_vtrace_advantages_is_the_papers_policy_gradient() -> None:
    """π/μ = 3 and 0.5, ρ̄ = c̄ = 1, γ = 1. v₂ = 0.4 + 0.5·(1 − 0.4) = 0.7; the paper (1802.01561, eq. 1 and section
    4.2) ascends ρ_t·(r_t + v_{t+1} − V_t)·∇ log π: 1·(0.7 − 0.1) = 0.6 and 0.5·(1 − 0.4) = 0.3, over two tokens."""
    mask_BS = torch.tensor([[0.0, 1.0, 1.0]])
    log_ratios_BS = torch.tensor([[9.0, math.log(3), math.log(0.5)]])
    found = vtrace(
        torch.tensor([[0.0, 0.0, 1.0]]),
        torch.tensor([[0.0, 0.1, 0.4]]),
        mask_BS,
        log_ratios_BS=log_ratios_BS,
        gamma=1.0,
    )
    data = BatchedDataDict(
        generation_logprobs=torch.full((1, 3), -2.0),
        advantages=found.advantages_BS,
        token_mask=mask_BS,
        sample_mask=torch.ones(1),
    )
    leaf_BT = (log_ratios_BS - 2.0)[:, 1:].requires_grad_()
    loss, _ = ObjectiveLoss(PRESETS["vtrace"].objective)(
        data=data,
        next_token_logprobs=leaf_BT,
        global_valid_seqs=torch.tensor(1.0),
        global_valid_toks=torch.tensor(2.0),
    )
    loss.backward()
    torch.testing.assert_close(leaf_BT.grad, torch.tensor([[-0.6, -0.3]]) / 2)


def test_on_policy_vtrace_targets_are_the_returns_of_gae_at_lambda_one() -> None:
    data = scene(2)
    on_policy = vtrace_of(data, log_ratios_BS=torch.zeros(ROWS, TOKENS))
    torch.testing.assert_close(on_policy.returns_BS, gae_of(data, gamma=0.9, lam=1.0).returns_BS)


@pytest.mark.parametrize("estimate", [lambda d: gae_of(d, gamma=0.9, lam=0.7), vtrace_of])
@pytest.mark.parametrize("column", ["rewards", "values", "log_ratios"])
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_what_stands_in_masked_slots_changes_nothing(estimate: object, column: str, junk: float) -> None:
    data = scene(3)
    clean = estimate(data)  # type: ignore[operator]
    dirty = estimate({**data, column: torch.where(data["mask"], data[column], junk)})  # type: ignore[operator]
    for name in ("advantages_BS", "returns_BS"):
        assert torch.equal(getattr(dirty, name), getattr(clean, name))
        assert not getattr(clean, name)[~data["mask"]].any()
        assert not getattr(clean, name)[1].any(), "a row without a trained token"


def test_the_first_token_is_never_trained_and_its_value_never_read() -> None:
    data = scene(4)
    with_first = {**data, "mask": data["mask"].clone().index_fill_(1, torch.tensor([0]), True)}
    for name in ("advantages_BS", "returns_BS"):
        assert torch.equal(
            getattr(gae_of(with_first, gamma=1.0, lam=0.9), name), getattr(gae_of(data, gamma=1.0, lam=0.9), name)
        )


def test_rows_may_have_their_own_lambda() -> None:
    data = scene(5)
    lam_B = torch.tensor([0.0, 0.3, 0.5, 0.9, 1.0])
    together = gae_of(data, gamma=0.95, lam=lam_B)
    for row, lam in enumerate(lam_B.tolist()):
        alone = gae_of(data, gamma=0.95, lam=lam)
        torch.testing.assert_close(together.advantages_BS[row], alone.advantages_BS[row])
    with pytest.raises(RunError, match="lam has 3 entries for 5 rows"):
        gae_of(data, gamma=0.95, lam=lam_B[:3])


def test_returns_at_lambda_one_are_discounted_rewards_whatever_the_critic_says() -> None:
    data = scene(7)
    rewards_T = data["rewards"][0, 1:]
    expected = [sum(0.9**k * float(reward) for k, reward in enumerate(rewards_T[t:])) for t in range(len(rewards_T))]
    assert gae_of(data, gamma=0.9, lam=1.0).returns_BS[0, 1:].tolist() == pytest.approx(expected)


def test_a_length_adaptive_lambda_counts_trained_tokens_and_is_never_negative() -> None:
    mask_BS = torch.zeros(4, 101)
    mask_BS[0, 1:] = 1  # 1 − 1 / (0.05 · 100)
    mask_BS[1, 1:81:2] = 1  # 40 trained tokens between environment tokens: 1 − 1 / 2
    mask_BS[2, 1:11] = 1  # 1 − 1 / 0.5 would be −1
    mask_BS[:, 0] = 1
    assert length_adaptive_lambda(mask_BS, alpha=0.05).tolist() == pytest.approx([0.8, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 2.0), (1.0, 0.0), (math.inf, 1.0)])
def test_vtrace_bounds_that_break_its_contraction_are_refused(rho_bar: float, c_bar: float) -> None:
    with pytest.raises(RunError, match=r"rho_bar ≥ c_bar > 0"):
        vtrace_of(scene(), rho_bar=rho_bar, c_bar=c_bar)


def test_columns_of_another_shape_are_refused_instead_of_broadcast() -> None:
    data = scene()
    with pytest.raises(RunError, match=r"\(5, 1\), but the token mask has shape \(5, 9\)"):
        gae_of({**data, "rewards": data["rewards"][:, :1]}, gamma=1.0, lam=1.0)


def test_nothing_here_carries_gradient() -> None:
    data = scene()
    values_BS = data["values"].requires_grad_()
    assert not gae_of({**data, "values": values_BS}, gamma=1.0, lam=0.9).returns_BS.requires_grad
    assert not vtrace_of({**data, "values": values_BS}).advantages_BS.requires_grad


# --- whitening --------------------------------------------------------------------------------------------------


def test_whitening_is_by_the_mean_and_std_of_the_masked_slots() -> None:
    data = scene(8)
    chosen = data["values"][data["mask"]]
    whitened_BS = whiten(data["values"], data["mask"], moments=masked_moments(data["values"], data["mask"]))
    torch.testing.assert_close(whitened_BS[data["mask"]], (chosen - chosen.mean()) / chosen.std(), rtol=1e-5, atol=1e-5)
    assert not whitened_BS[~data["mask"]].any()


def test_moments_of_parts_add_up_to_those_of_the_whole() -> None:
    data = scene(9)
    values_BS, mask_BS = data["values"], data["mask"]
    moments = masked_moments(values_BS[:2], mask_BS[:2]) + masked_moments(values_BS[2:], mask_BS[2:])
    parts = [whiten(values_BS[rows], mask_BS[rows], moments=moments) for rows in (slice(2), slice(2, None))]
    whole_BS = whiten(values_BS, mask_BS, moments=masked_moments(values_BS, mask_BS))
    torch.testing.assert_close(torch.cat(parts), whole_BS)


def test_whitening_reads_no_masked_slot() -> None:
    data = scene(10)
    dirty_BS = torch.where(data["mask"], data["values"], math.nan)
    whitened_BS = whiten(dirty_BS, data["mask"], moments=masked_moments(dirty_BS, data["mask"]))
    clean_BS = whiten(data["values"], data["mask"], moments=masked_moments(data["values"], data["mask"]))
    assert torch.equal(whitened_BS, clean_BS)
    assert clean_BS.any()


@pytest.mark.parametrize("count", [0, 1, 3, 4097])
@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e6])
@pytest.mark.fault("F20")
def test_whitened_equal_values_are_exactly_zero(count: int, value: float) -> None:
    """The sum of squares less the square of the sum leaves a rounding error, which must not become advantages."""
    values_N = torch.full((4100,), value, dtype=torch.float64)
    mask_N = torch.arange(4100) < count
    assert not whiten(values_N, mask_N, moments=masked_moments(values_N, mask_N)).any()


def test_a_small_spread_far_from_zero_is_whitened_all_the_same() -> None:
    values_N = torch.tensor([100.0, 100.01])
    whitened_N = whiten(values_N, torch.ones(2), moments=masked_moments(values_N, torch.ones(2)))
    assert whitened_N.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-3)


def test_examples_in_docstrings_of_returns_are_true() -> None:
    results = doctest.testmod(returns)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("keep_mean", [False, True])
@pytest.mark.parametrize("divisor", ["n-1", "n"])
@pytest.mark.parametrize("eps_in", ["std", "variance"])
@pytest.mark.parametrize("by_sample", [False, True])
def test_whitening_by_a_rule_is_a_loop_over_tokens(eps_in: str, divisor: str, keep_mean: bool, by_sample: bool) -> None:
    """By sample, the tokens of a row count once together: each 1 / their number."""
    rows = [[1.0, 4.0, 2.0], [7.0], [0.5, -1.0]]
    eps = 0.3
    counts = [[1 / len(row) if by_sample else 1.0] * len(row) for row in rows]
    flat = [
        (value, count) for row, many in zip(rows, counts, strict=True) for value, count in zip(row, many, strict=True)
    ]
    total = sum(count for _, count in flat)
    middle = sum(count * value for value, count in flat) / total
    squares = sum(count * (value - middle) ** 2 for value, count in flat)
    variance = squares / (total - 1 if divisor == "n-1" else total)
    std = math.sqrt(variance + eps) if eps_in == "variance" else math.sqrt(variance) + eps
    expected = [(value - middle) / std + keep_mean * middle for value, _ in flat]

    mask_BS = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    values_BS = torch.full((3, 3), math.nan)
    values_BS[mask_BS] = torch.tensor([value for value, _ in flat])
    weights_BS = 1 / mask_BS.sum(1, keepdim=True).expand_as(mask_BS) if by_sample else None
    moments = masked_moments(values_BS, mask_BS, weights=weights_BS)
    rule = Whitening(eps=eps, eps_in=eps_in, divisor=divisor, keep_mean=keep_mean)  # type: ignore[arg-type]
    whitened_BS = whiten(values_BS, mask_BS, moments=moments, rule=rule)
    assert whitened_BS[mask_BS].tolist() == pytest.approx(expected, rel=1e-6)
    assert whitened_BS[~mask_BS].tolist() == [0.0] * 3


def test_equal_values_are_whitened_to_0_or_keep_their_mean() -> None:
    values, mask = torch.full((2, 3), 0.1), torch.ones(2, 3)
    moments = masked_moments(values, mask)
    assert not whiten(values, mask, moments=moments).any()
    assert whiten(values, mask, moments=moments, rule=Whitening(keep_mean=True)).flatten().tolist() == pytest.approx(
        [0.1] * 6
    )


# --- REINFORCE++ with the KL to a reference in the reward -------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_returns_are_a_loop_over_trained_tokens(kind: str, gamma: float) -> None:
    """2501.03262, eq. 8 for γ = 1: A_t = r − β · Σ_{i ≥ t} KL(i), with d = log π − log π_ref of each trained token."""
    beta, reward = 0.2, 3.0
    policy, reference, trained = [-9.0, -1.0, -0.5, math.nan, -2.0], [-9.0, -1.5, -0.2, 0.0, -1.0], [1, 2, 4]
    expected = [0.0] * 5
    running = 0.0
    for t in reversed(trained):
        d = policy[t] - reference[t]
        kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]
        running = -beta * kl + (reward if t == trained[-1] else 0.0) + gamma * running
        expected[t] = running
    mask_BS = torch.tensor([[float(t in trained) for t in range(5)]])
    kl_BS = kl_estimate(torch.tensor([policy]), torch.tensor([reference]), kind=kind)  # type: ignore[arg-type]
    rewards_BS = -beta * kl_BS
    rewards_BS[0, trained[-1]] += reward
    assert discounted_returns(rewards_BS, mask_BS, gamma=gamma)[0].tolist() == pytest.approx(expected, rel=1e-5)
