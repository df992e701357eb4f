"""The last token of a row gets the row's reward, and whitening covers the whole step for every distribution over
ranks."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from asyncrl.algorithms.baselines import CriticBased, RewardKL
from asyncrl.algorithms.returns import gae, masked_moments, whiten
from asyncrl.algorithms.token_estimators import token_rewards, whitened_advantages
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import CallRefused
from asyncrl.value.estimators import GAE, VTrace

ROWS, TOKENS = 6, 8


def scene() -> BatchedDataDict:
    """Returns rows with a prompt of one token, environment tokens in the middle, a row without a trained token, and a
    masked sample. Values at tokens that are not trained are NaN."""
    random = torch.Generator().manual_seed(5)
    mask_BS = (torch.rand(ROWS, TOKENS, generator=random) < 0.7).float()
    mask_BS[:, 0], mask_BS[2], mask_BS[0] = 0.0, 0.0, torch.tensor([0.0, 1, 1, 0, 1, 0, 0, 0])
    columns = {
        name: torch.where(mask_BS > 0, torch.randn(ROWS, TOKENS, generator=random), torch.nan)
        for name in ("values", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    }
    return BatchedDataDict(
        **columns,
        token_mask=mask_BS,
        sample_mask=torch.tensor([1.0, 1, 1, 0, 1, 1]),
        input_lengths=torch.full((ROWS,), TOKENS),
        rewards=torch.randn(ROWS, generator=random),
    )


def over_ranks(data: BatchedDataDict, estimator: Any, *, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns advantages and returns of all rows, where each rank has its own rows and the sums of all ranks."""
    shards = data.shard_by_batch_size(ranks, allow_uneven_shards=True)
    given: list[torch.Tensor] = []
    for shard in shards:
        found = estimator(shard) if shard.size else None
        whitened_advantages(
            shard, found, rule=estimator.whitening, add_up=lambda moments: given.append(moments) or moments
        )
    total = torch.stack(given).sum(0)
    found = [
        whitened_advantages(
            shard, estimator(shard) if shard.size else None, rule=estimator.whitening, add_up=lambda _: total
        )
        for shard in shards
    ]
    assert [part is None for part in found] == [shard.size == 0 for shard in shards]
    parts = [part for part in found if part is not None]
    return torch.cat([part.advantages_BS for part in parts]), torch.cat([part.returns_BS for part in parts])


def test_the_reward_is_at_the_last_trained_token_beyond_which_the_environment_may_speak() -> None:
    data = scene()
    rewards_BS = token_rewards(data, data["rewards"])
    assert rewards_BS[0].tolist() == [0, 0, 0, 0, pytest.approx(float(data["rewards"][0])), 0, 0, 0]
    assert not rewards_BS[2].any()
    assert ((rewards_BS != 0).sum(1) == (data["token_mask"].sum(1) > 0)).all()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("estimator", [GAE(gamma=0.9, lam=0.8, value_lam=1.0), VTrace(gamma=0.9)])
def test_any_number_of_ranks_gives_the_same_advantages_with_mean_0_and_std_1(estimator: Any, ranks: int) -> None:
    data = scene()
    advantages_BS, returns_BS = over_ranks(data, estimator, ranks=ranks)
    found = estimator(data)
    mask_BS = data["token_mask"] * data["sample_mask"].unsqueeze(1)
    moments = masked_moments(found.advantages_BS, mask_BS)
    torch.testing.assert_close(advantages_BS, whiten(found.advantages_BS, mask_BS, moments=moments))
    torch.testing.assert_close(returns_BS, found.returns_BS)
    trained = advantages_BS[mask_BS > 0].double()
    assert float(trained.mean()) == pytest.approx(0, abs=1e-6)
    assert float(trained.std()) == pytest.approx(1, abs=1e-5)
    assert not advantages_BS[mask_BS == 0].any()


def test_policy_and_value_have_a_lambda_of_their_own_and_lengths_may_set_the_policy_s() -> None:
    data = scene()
    rewards_BS, values_BS, mask_BS = token_rewards(data, data["rewards"]), data["values"], data["token_mask"]
    found = GAE(gamma=0.9, lam=0.5, value_lam=1.0)(data)
    torch.testing.assert_close(
        found.advantages_BS, gae(rewards_BS, values_BS, mask_BS, gamma=0.9, lam=0.5).advantages_BS
    )
    torch.testing.assert_close(found.returns_BS, gae(rewards_BS, values_BS, mask_BS, gamma=0.9, lam=1.0).returns_BS)
    adaptive = GAE(gamma=0.9, lam=0.5, value_lam=1.0, length_alpha=0.5)(data)
    lam_B = torch.tensor(
        [max(0.0, 1 - 1 / (0.5 * length)) if length > 2 else 0.0 for length in mask_BS.sum(1).tolist()]
    )
    expected = gae(rewards_BS, values_BS, mask_BS, gamma=0.9, lam=lam_B)
    torch.testing.assert_close(adaptive.advantages_BS, expected.advantages_BS)
    torch.testing.assert_close(adaptive.returns_BS, found.returns_BS)


def test_a_trained_token_whose_value_is_no_number_is_an_error_and_no_advantage_of_0() -> None:
    data = scene()
    data["values"][0, 1] = torch.nan
    with pytest.raises(CallRefused, match="not finite"):
        whitened_advantages(
            data, GAE(gamma=1.0, lam=1.0, value_lam=1.0)(data), rule=CriticBased(), add_up=lambda moments: moments
        )


def trained_rows(data: BatchedDataDict, values_BS: torch.Tensor) -> list[list[float]]:
    """Returns the values at the trained tokens, for each row that has a trained token."""
    mask_BS = (data["token_mask"] * data["sample_mask"].unsqueeze(1)) > 0
    rows = [values_BS[i][mask_BS[i]].double().tolist() for i in range(len(values_BS))]
    return [row for row in rows if row]


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("estimator", [GAE(gamma=0.9, lam=0.8, value_lam=1.0), VTrace(gamma=0.9)])
def test_whitening_over_samples_counts_every_completion_once(estimator: Any, ranks: int) -> None:
    rule = CriticBased(whiten="samples", divisor="n", eps=0.0)
    data = scene()
    plain = trained_rows(data, estimator(data).advantages_BS)
    weighted = [(value, 1 / len(row) / len(plain)) for row in plain for value in row]
    middle = sum(share * value for value, share in weighted)
    std = sum(share * (value - middle) ** 2 for value, share in weighted) ** 0.5
    by_sample = dataclasses.replace(estimator, whitening=rule)
    advantages_BS, returns_BS = over_ranks(data, by_sample, ranks=ranks)
    found = [value for row in trained_rows(data, advantages_BS) for value in row]
    assert found == pytest.approx([(value - middle) / std for value, _ in weighted], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(returns_BS, estimator(data).returns_BS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_whitening_advantages_are_as_estimated_and_0_where_nothing_is_trained(ranks: int) -> None:
    data, estimator = scene(), GAE(gamma=0.9, lam=0.8, value_lam=1.0, whitening=CriticBased(whiten="none"))
    advantages_BS, _ = over_ranks(data, estimator, ranks=ranks)
    assert trained_rows(data, advantages_BS) == trained_rows(data, estimator(data).advantages_BS)
    mask_BS = (data["token_mask"] * data["sample_mask"].unsqueeze(1)) > 0
    assert not advantages_BS[~mask_BS].any()


def test_the_mean_of_token_advantages_may_be_kept() -> None:
    data, estimator = scene(), GAE(gamma=0.9, lam=0.8, value_lam=1.0)
    data["rewards"] = data["rewards"] + 5
    kept = dataclasses.replace(estimator, whitening=CriticBased(keep_mean=True))
    plain = [value for row in trained_rows(data, estimator(data).advantages_BS) for value in row]
    (white, _), (shifted, _) = (over_ranks(data, each, ranks=2) for each in (estimator, kept))
    mean = sum(plain) / len(plain)
    moved = [value for row in trained_rows(data, shifted - white) for value in row]
    assert moved == pytest.approx([mean] * len(plain), rel=1e-5)
    assert mean > 1


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_to_the_reference_is_paid_at_every_trained_token(kind: Any) -> None:
    """GAE with λ = 1, γ = 1 and values of 0: the advantage of a token is the sum of its own and all later rewards."""
    data = scene()
    data["values"] = torch.zeros_like(data["values"])
    estimator = GAE(gamma=1.0, lam=1.0, value_lam=1.0, kl=RewardKL(beta=0.3, kind=kind))
    assert {"prev_logprobs", "reference_policy_logprobs"} <= set(estimator.reads)
    advantages_BS = estimator(data).advantages_BS
    for b in range(ROWS):
        left, first = 0.0, True
        for t in reversed(range(TOKENS)):
            if data["token_mask"][b, t] == 0:
                assert advantages_BS[b, t] == 0
                continue
            d = float(data["prev_logprobs"][b, t]) - float(data["reference_policy_logprobs"][b, t])
            left -= 0.3 * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]
            left += float(data["rewards"][b]) if first else 0.0
            first = False
            assert float(advantages_BS[b, t]) == pytest.approx(left, rel=1e-5, abs=1e-6)


def test_v_trace_pays_the_kl_as_gae_does() -> None:
    """If policy and sampler agree, V-trace's advantages equal GAE's with λ = 1."""
    data = scene()
    data["generation_logprobs"] = data["prev_logprobs"]
    kl = RewardKL(beta=0.3, kind="k3")
    by_ratio = VTrace(gamma=0.9, kl=kl)
    assert {"prev_logprobs", "generation_logprobs", "reference_policy_logprobs"} <= set(by_ratio.reads)
    assert len(set(by_ratio.reads)) == len(by_ratio.reads)
    expected = GAE(gamma=0.9, lam=1.0, value_lam=1.0, kl=kl)(data)
    torch.testing.assert_close(by_ratio(data).advantages_BS, expected.advantages_BS)
    torch.testing.assert_close(by_ratio(data).returns_BS, expected.returns_BS)


def test_without_a_kl_the_reference_is_not_read() -> None:
    for estimator in (GAE(gamma=1.0, lam=1.0, value_lam=1.0), VTrace(gamma=1.0)):
        assert "reference_policy_logprobs" not in estimator.reads
