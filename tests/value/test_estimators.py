"""A row's reward is earned at its end, and a step is whitened as one however its rows are dealt to ranks."""

from typing import Any

import pytest
import torch

from asyncrl.algorithms.returns import gae, masked_moments, whiten
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import CallRefused
from asyncrl.value.estimators import GAE, VTrace, token_rewards, whitened_advantages

ROWS, TOKENS = 6, 8


def scene() -> BatchedDataDict:
    """A prompt of one token, environment tokens in the middle, a row without a trained token, a masked sample; what is
    not trained is no number."""
    random = torch.Generator().manual_seed(5)
    mask_BS = (torch.rand(ROWS, TOKENS, generator=random) < 0.7).float()
    mask_BS[:, 0], mask_BS[2], mask_BS[0] = 0.0, 0.0, torch.tensor([0.0, 1, 1, 0, 1, 0, 0, 0])
    columns = {
        name: torch.where(mask_BS > 0, torch.randn(ROWS, TOKENS, generator=random), torch.nan)
        for name in ("values", "prev_logprobs", "generation_logprobs")
    }
    return BatchedDataDict(
        **columns,
        token_mask=mask_BS,
        sample_mask=torch.tensor([1.0, 1, 1, 0, 1, 1]),
        input_lengths=torch.full((ROWS,), TOKENS),
        rewards=torch.randn(ROWS, generator=random),
    )


def over_ranks(data: BatchedDataDict, estimator: Any, *, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of all rows, each rank knowing its own rows and the sums of all."""
    shards = data.shard_by_batch_size(ranks, allow_uneven_shards=True)
    given: list[torch.Tensor] = []
    for shard in shards:
        found = estimator(shard) if shard.size else None
        whitened_advantages(shard, found, add_up=lambda moments: given.append(moments) or moments)
    total = torch.stack(given).sum(0)
    found = [
        whitened_advantages(shard, estimator(shard) if shard.size else None, add_up=lambda _: total) for shard in shards
    ]
    assert [part is None for part in found] == [shard.size == 0 for shard in shards]
    parts = [part for part in found if part is not None]
    return torch.cat([part.advantages_BS for part in parts]), torch.cat([part.returns_BS for part in parts])


def test_the_reward_is_at_the_last_trained_token_beyond_which_the_environment_may_speak() -> None:
    data = scene()
    rewards_BS = token_rewards(data)
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
    rewards_BS, values_BS, mask_BS = token_rewards(data), data["values"], data["token_mask"]
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
        whitened_advantages(data, GAE(gamma=1.0, lam=1.0, value_lam=1.0)(data), add_up=lambda moments: moments)
