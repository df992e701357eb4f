"""The witness's advantages are those of the tensors: every named estimator, and every value of every axis."""

import random
from collections.abc import Iterator

import msgspec
import pytest
import torch

from asyncrl.algorithms.advantages import OutcomeEstimator, Samples
from asyncrl.algorithms.baselines import OUTCOMES, Outcome
from asyncrl.algorithms.filters import shaped_rewards
from asyncrl.algorithms.returns import discounted_returns, gae, kl_estimate, length_adaptive_lambda, vtrace
from asyncrl.config.schema import Config
from asyncrl.witness.advantages import (
    Scored,
    TokenColumns,
    discounted,
    equal_groups,
    generalised,
    of_samples,
    of_tokens,
    shaped,
    token_rewards,
)
from asyncrl.witness.advantages import vtrace as plain_vtrace

CLOSE = {"rel": 1e-9, "abs": 1e-12}


def estimators() -> Iterator[tuple[str, Outcome]]:
    yield from ((name, axes) for name, axes in OUTCOMES.items() if axes.baseline != "greedy")
    scales = (
        "none", "group_std", "leave_one_out_std", "batch_std", "group_mean", "informative_share", "nonzero_share",
    )  # fmt: skip
    for baseline in ("group_mean", "leave_one_out", "length_weighted_mean", "soft_value"):
        for scale in scales:
            for whiten in ("none", "samples", "tokens"):
                for single, divisor, eps_in in (("zero", "n-1", "std"), ("raw", "n", "variance")):
                    yield (
                        f"{baseline} {scale} {whiten} {single}",
                        Outcome(
                            baseline=baseline, scale=scale, whiten=whiten, single=single, divisor=divisor,
                            eps_in=eps_in, keep_mean=whiten == "tokens",
                        ),
                    )  # fmt: skip


def samples(seed: int, *, above_0: bool) -> tuple[Samples, list[Scored]]:
    """Returns the samples of a step: groups of several sizes, with equal rewards and empty completions among them."""
    draw = random.Random(seed)
    count = draw.randint(1, 14)
    groups = [draw.randint(0, 4) for _ in range(count)]
    rewards = [
        [draw.choice([0.0, 1.0]), draw.random() - (0.0 if above_0 else 0.5), draw.choice([0.25, 0.5])][seed % 3]
        for _ in range(count)
    ]
    tokens = [draw.randint(0 if seed % 4 == 0 else 1, 9) for _ in range(count)]
    other = [draw.choice([0.0, 1.0]) for _ in range(count)]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    of_tensors = Samples(
        rewards_N=column(rewards),
        group_ids_N=torch.tensor(groups),
        completion_tokens_N=torch.tensor(tokens),
        components={"right": column(rewards), "short": column(other)},
    )
    plain = [
        Scored(group=group, reward=reward, tokens=length, components={"right": reward, "short": short})
        for group, reward, length, short in zip(groups, rewards, tokens, other, strict=True)
    ]
    return of_tensors, plain


@pytest.mark.parametrize("axes", [pytest.param(axes, id=name) for name, axes in estimators()])
def test_the_advantages_are_those_of_the_tensors(axes: Outcome) -> None:
    plain_axes = msgspec.to_builtins(axes)
    for seed in range(6):
        of_tensors, plain = samples(seed, above_0=axes.refuses_negative_rewards)
        estimator = OutcomeEstimator(axes)
        assert of_samples(plain_axes, plain) == pytest.approx(estimator(of_tensors).tolist(), **CLOSE), seed
        assert equal_groups(plain_axes, plain) == (~estimator.varied(of_tensors)).tolist(), seed


def test_components_have_weights() -> None:
    axes = msgspec.structs.replace(OUTCOMES["gdpo"], weights={"right": 2.0, "short": 0.5})
    of_tensors, plain = samples(4, above_0=True)
    expected = OutcomeEstimator(axes)(of_tensors).tolist()
    assert of_samples(msgspec.to_builtins(axes), plain) == pytest.approx(expected, **CLOSE)


def test_overlong_samples_lose_reward() -> None:
    settings = {"algorithm": {"overlong": "penalise", "overlong_buffer_tokens": 4}}
    config = Config.model_validate({**settings, "generator": {"max_completion_tokens": 10}})
    lengths, truncated = [3, 6, 7, 8, 10, 3], [False, False, False, False, False, True]
    expected = shaped_rewards(
        torch.full((6,), 0.5), truncated_N=torch.tensor(truncated), completion_tokens_N=torch.tensor(lengths),
        config=config,
    )  # fmt: skip
    found = [
        shaped(0.5, tokens=length, truncated=cut, limit_tokens=10, buffer_tokens=4)
        for length, cut in zip(lengths, truncated, strict=True)
    ]
    assert found == pytest.approx(expected.tolist())


@pytest.mark.parametrize("seed", range(20))
def test_advantages_of_tokens_are_those_of_the_tensors(seed: int) -> None:
    draw = random.Random(seed)
    tokens = draw.randint(1, 8)
    rewards, values, log_ratios = ([draw.gauss(0, 1) for _ in range(tokens)] for _ in range(3))
    gamma, lam = draw.choice([1.0, 0.9]), draw.choice([1.0, 0.95, 0.0])
    mask = torch.ones(1, tokens + 1)

    def row(column: list[float]) -> torch.Tensor:
        return torch.tensor([[0.0, *column]], dtype=torch.float64)

    def trained(column: torch.Tensor) -> list[float]:
        found: list[float] = column[0, 1:].tolist()
        return found

    of_gae = gae(row(rewards), row(values), mask, gamma=gamma, lam=lam)
    assert generalised(rewards, values, gamma, lam) == pytest.approx(trained(of_gae.advantages_BS), **CLOSE)
    of_vtrace = vtrace(row(rewards), row(values), mask, log_ratios_BS=row(log_ratios), gamma=gamma)
    advantages, targets = plain_vtrace(rewards, values, log_ratios, gamma)
    assert advantages == pytest.approx(trained(of_vtrace.advantages_BS), **CLOSE)
    assert targets == pytest.approx(trained(of_vtrace.returns_BS), **CLOSE)
    returns = discounted_returns(row(rewards), mask, gamma=gamma)
    assert discounted(rewards, gamma) == pytest.approx(trained(returns), **CLOSE)
    rule = {"name": "gae", "kl": None, "gamma": gamma, "lam": lam, "value_lam": 1.0, "length_alpha": 0.3}
    own, _ = of_tokens(rule, 2.0, TokenColumns(policy=[0.0] * tokens, values=values))
    adapted = float(length_adaptive_lambda(mask, alpha=0.3)[0])
    assert own == pytest.approx(generalised([0.0] * (tokens - 1) + [2.0], values, gamma, adapted), **CLOSE)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_reward_of_a_sample_is_at_its_last_token_and_every_token_pays_for_its_kl(kind: str) -> None:
    policy, reference = [-0.5, -1.0, -2.0], [-0.7, -0.9, -2.5]
    kl = kl_estimate(torch.tensor(policy), torch.tensor(reference), kind=kind)  # type: ignore[arg-type]
    expected = (-0.1 * kl + torch.tensor([0.0, 0.0, 3.0])).tolist()
    assert token_rewards(3.0, {"beta": 0.1, "kind": kind}, policy, reference) == pytest.approx(expected, rel=1e-5)
    assert token_rewards(3.0, None, policy, []) == [0.0, 0.0, 3.0]
