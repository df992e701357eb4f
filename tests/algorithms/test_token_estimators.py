"""Compares REINFORCE++ with a KL to a reference in the reward with a loop over rows in plain Python. The whitening
covers the whole step for every distribution of the rows over ranks."""

import math
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.algorithms.advantages import OutcomeEstimator, Samples, compute_advantages, resolve_estimator
from asyncrl.algorithms.baselines import DiscountedOutcome, RewardKL
from asyncrl.algorithms.returns import TokenAdvantages
from asyncrl.algorithms.token_estimators import (
    OUTCOME,
    DiscountedReturns,
    check_estimate,
    resolve_estimators,
    whitened_advantages,
)
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import trained_mask
from asyncrl.errors import CallRefused, ConfigError

ROWS, TOKENS, GROUP = 6, 9, 2
REWARDS = [1.0, 0.0, 2.0, 2.0, -1.0, 0.5]


def scene() -> BatchedDataDict:
    """Returns rows with a prompt token, environment tokens in the middle, a row without a trained token, and a masked
    sample. Log-probs of tokens that are not trained are NaN."""
    random = torch.Generator().manual_seed(11)
    mask_BS = (torch.rand(ROWS, TOKENS, generator=random) < 0.6).float()
    mask_BS[:, 0], mask_BS[2], mask_BS[0] = 0.0, 0.0, torch.tensor([0.0, 0, 1, 1, 0, 1, 0, 0, 0])
    columns = {
        name: torch.where(mask_BS > 0, torch.randn(ROWS, TOKENS, generator=random) - 1, torch.nan)
        for name in ("prev_logprobs", "reference_policy_logprobs")
    }
    return BatchedDataDict(
        **columns,
        token_mask=mask_BS,
        sample_mask=torch.tensor([1.0, 1, 1, 0, 1, 1]),
        input_lengths=torch.full((ROWS,), TOKENS),
    )


def oracle(
    data: BatchedDataDict, *, beta: float, kind: str, gamma: float, baseline: bool, whiten: str
) -> list[list[float]]:
    """Computes eqs. 8 to 10 of 2501.03262, one token at a time. eps is 1e-6, and a variance divides by n − 1."""
    trained = (data["token_mask"] * data["sample_mask"].unsqueeze(1)).tolist()
    policy, reference = data["prev_logprobs"].tolist(), data["reference_policy_logprobs"].tolist()
    found = [[0.0] * TOKENS for _ in range(ROWS)]
    for row in range(ROWS):
        group = [REWARDS[i] for i in range(ROWS) if i // GROUP == row // GROUP]
        outcome = REWARDS[row] - (sum(group) / len(group) if baseline else 0.0)
        running, last = 0.0, True
        for t in reversed(range(TOKENS)):
            if trained[row][t]:
                d = policy[row][t] - reference[row][t]
                kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]
                running = -beta * kl + (outcome if last else 0.0) + gamma * running
                found[row][t], last = running, False
    if whiten == "none":
        return found
    lengths = [sum(row) for row in trained]
    weighted = [
        (found[row][t], 1 / lengths[row] if whiten == "samples" else 1.0)
        for row in range(ROWS)
        for t in range(TOKENS)
        if trained[row][t]
    ]
    count = sum(weight for _, weight in weighted)
    mean = sum(weight * value for value, weight in weighted) / count
    std = math.sqrt(sum(weight * (value - mean) ** 2 for value, weight in weighted) / (count - 1))
    return [
        [(found[row][t] - mean) / (std + 1e-6) if trained[row][t] else 0.0 for t in range(TOKENS)]
        for row in range(ROWS)
    ]


def over_ranks(data: BatchedDataDict, estimator: Any, *, ranks: int) -> torch.Tensor:
    """Returns the advantages of all rows, where each rank has its own rows and the sums of all ranks."""
    shards = data.shard_by_batch_size(ranks, allow_uneven_shards=True)
    given: list[torch.Tensor] = []

    def answers(add_up: Any) -> list[TokenAdvantages | None]:
        rule = estimator.whitening
        return [
            whitened_advantages(shard, estimator(shard) if shard.size else None, rule=rule, add_up=add_up)
            for shard in shards
        ]

    answers(lambda moments: given.append(moments) or moments)
    total = torch.stack(given).sum(0)
    found = answers(lambda _: total)
    assert [part is None for part in found] == [shard.size == 0 for shard in shards]
    return torch.cat([part.advantages_BS for part in found if part is not None])


def estimated(advantage: dict[str, Any], *, ranks: int) -> torch.Tensor:
    """Applies both parts of an estimator in the order in which a run applies them."""
    of_samples, of_tokens = resolve_estimators(advantage)
    assert of_tokens is not None
    data = scene()
    samples = Samples(rewards_N=torch.tensor(REWARDS), group_ids_N=torch.arange(ROWS) // GROUP)
    data[OUTCOME] = compute_advantages(of_samples, samples)
    return over_ranks(BatchedDataDict({name: data[name] for name in of_tokens.reads}), of_tokens, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("name", "gamma"), [("reinforce_pp", 1.0), ("reinforce_pp_baseline", 0.9)])
def test_any_number_of_ranks_gives_the_advantages_of_a_loop_over_tokens(
    name: str, gamma: float, kind: str, ranks: int
) -> None:
    found = estimated({"name": name, "kl": {"beta": 0.3, "kind": kind}, "gamma": gamma}, ranks=ranks)
    expected = oracle(
        scene(), beta=0.3, kind=kind, gamma=gamma, baseline=name == "reinforce_pp_baseline", whiten="tokens"
    )
    for row in range(ROWS):
        assert found[row].tolist() == pytest.approx(expected[row], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("whiten", ["none", "samples"])
def test_the_other_whitenings_are_those_of_a_loop_over_tokens(whiten: str) -> None:
    found = estimated({"name": "reinforce_pp", "kl": {"beta": 0.3}, "whiten": whiten}, ranks=2)
    data = scene()
    expected = oracle(data, beta=0.3, kind="k1", gamma=1.0, baseline=False, whiten=whiten)
    inside_BS = (data["token_mask"] * data["sample_mask"].unsqueeze(1)) > 0
    for row in range(ROWS):
        of_row = torch.where(inside_BS[row], found[row], 0.0)
        assert torch.equal(of_row, found[row])
        assert found[row].tolist() == pytest.approx(expected[row], rel=1e-4, abs=1e-5)


def test_a_discount_alone_gives_tokens_advantages_of_their_own_and_reads_no_log_prob() -> None:
    of_samples, of_tokens = resolve_estimators({"name": "reinforce_pp", "gamma": 0.5, "whiten": "none"})
    axes = DiscountedOutcome(gamma=0.5)
    assert of_samples == OutcomeEstimator(axes)
    assert of_tokens == DiscountedReturns(gamma=0.5, whitening=axes)
    assert of_tokens.reads == ("input_lengths", "token_mask", "sample_mask", OUTCOME)
    rows = BatchedDataDict({"token_mask": torch.tensor([[0.0, 1, 0, 1]]), OUTCOME: torch.tensor([4.0])})
    assert of_tokens(rows).advantages_BS.tolist() == [[0.0, 2.0, 0.0, 4.0]]


def test_without_kl_and_discount_a_sample_has_one_advantage() -> None:
    for advantage in ("reinforce_pp", {"name": "reinforce_pp_baseline", "gamma": 1.0}, "group_norm"):
        of_samples, of_tokens = resolve_estimators(advantage)
        assert of_samples == resolve_estimator(advantage)
        assert of_tokens is None


def test_an_estimator_of_samples_alone_refuses_a_kl_and_names_the_call_that_takes_it() -> None:
    for options in ({"kl": {"beta": 0.1}}, {"gamma": 0.5}):
        with pytest.raises(ConfigError, match="gets no tokens; call `resolve_estimators`"):
            resolve_estimator({"name": "reinforce_pp", **options})


def test_the_part_of_a_sample_keeps_its_other_axes_and_is_whitened_once() -> None:
    options: dict[str, Any] = {"baseline": "leave_one_out", "single": "raw", "eps": 0.1, "divisor": "n"}
    advantage = {"name": "reinforce_pp", "kl": {"beta": 1, "kind": "k3"}, "keep_mean": True, **options}
    of_samples, of_tokens = resolve_estimators(advantage)
    kl = RewardKL(beta=1.0, kind="k3")
    axes = DiscountedOutcome(kl=kl, **options)
    assert of_samples == OutcomeEstimator(axes)
    whitening = msgspec.structs.replace(axes, whiten="tokens", keep_mean=True)
    assert of_tokens == DiscountedReturns(kl=kl, whitening=whitening)


def test_an_answer_of_another_shape_is_refused_with_both_shapes() -> None:
    data, right = scene(), torch.zeros(ROWS, TOKENS)
    check_estimate(data, TokenAdvantages(advantages_BS=right, returns_BS=right))
    wrong = torch.zeros(ROWS)
    with pytest.raises(CallRefused, match=r"returned advantages of shape \(6,\) for rows of shape \(6, 9\)"):
        check_estimate(data, TokenAdvantages(advantages_BS=wrong, returns_BS=right))
    with pytest.raises(CallRefused, match="returned returns"):
        check_estimate(data, TokenAdvantages(advantages_BS=right, returns_BS=wrong))
    broken = right.clone()
    place = tuple(int(index) for index in trained_mask(data).nonzero()[0])
    broken[place] = math.nan
    for columns in ((broken, right), (right, broken)):
        with pytest.raises(CallRefused, match=f"not finite, the first at row {place[0]}, token {place[1]}: nan"):
            check_estimate(data, TokenAdvantages(advantages_BS=columns[0], returns_BS=columns[1]))
    broken = torch.where(trained_mask(data), right, math.nan)
    check_estimate(data, TokenAdvantages(advantages_BS=broken, returns_BS=broken))
