"""The learner asks the witness about a drawn group, and ends a run whose counts are not those of the lease."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from learner_scenes import GROUP_SIZE, Scene, trained

from asyncrl.algorithms.advantages import Samples, compute_advantages, resolve_estimator
from asyncrl.algorithms.token_estimators import DiscountedReturns
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import WitnessFailed
from asyncrl.learner.witnessed_step import (
    GROUPS_EXCHANGED,
    Witnessed,
    is_witnessed,
    token_columns,
    token_findings,
    with_groups_exchanged,
    without_formula,
)
from asyncrl.value.estimators import GAE
from asyncrl.witness.judge import Finding, Request
from asyncrl.witness.step import Completion


@pytest.mark.asyncio
async def test_the_first_step_and_every_nth_one_are_witnessed() -> None:
    scene = Scene(witness={"every_steps": 2}, learner={"total_steps": 5})
    await scene.run()
    assert [request is not None for request in scene.trainer.requests] == [True, False, True, False, True]
    assert ["witness" in fields for fields in scene.trainer.fields] == [True, False, True, False, True]
    assert [is_witnessed(3, first=first, config=scene.config) for first in (True, False)] == [True, False]


@pytest.mark.asyncio
async def test_a_request_has_the_counts_of_each_update_and_the_advantages_of_the_drawn_group() -> None:
    scene = Scene(witness={"every_steps": 1}, learner={"total_steps": 1, "updates_per_step": 2})
    await scene.run()
    [request] = scene.trainer.requests
    assert request is not None
    assert [(counts.tokens, counts.sequences) for counts in request.counts] == [(3, 2), (3, 2)]
    assert request.advantages == pytest.approx((-(0.5**0.5), 0.5**0.5), abs=1e-5), "rewards of a group are 0 and 1"
    assert request.rewards == (0.0, 1.0)


@pytest.mark.asyncio
async def test_of_a_group_that_is_too_long_only_the_first_rows_are_witnessed() -> None:
    for group_tokens, rows in ((1, 0), (4, 1), (100, GROUP_SIZE)):
        scene = Scene(witness={"every_steps": 1, "group_tokens": group_tokens}, learner={"total_steps": 1})
        await scene.run()
        [request] = scene.trainer.requests
        assert request is not None
        assert request.advantages is not None
        assert len(request.advantages) == rows, group_tokens


@pytest.mark.asyncio
@pytest.mark.parametrize("on_failure", ["stop", "warn"])
async def test_a_step_that_does_not_train_its_lease_is_named(
    on_failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(witness={"every_steps": 0, "on_failure": on_failure}, learner={"total_steps": 2})
    train = scene.trainer.train_from_meta

    def with_fewer(*args: Any, **options: Any) -> Any:
        report = train(*args, **options)["report"]
        return {"report": replace(report, trained_tokens=report.trained_tokens - 1)}

    monkeypatch.setattr(scene.trainer, "train_from_meta", with_fewer)
    words = (
        "the ranks train 5 tokens of 4 samples in an update, but the groups of the step have 6 tokens of 4 samples "
        "that are not masked"
    )
    if on_failure == "stop":
        with pytest.raises(WitnessFailed, match=f"step 0: .*check `counts` found: {words}"):
            await scene.run()
        return
    await scene.run()
    assert words in caplog.text
    assert [step.diagnostics["witness_counts_ratio"] > 1 for step in scene.log.steps] == [True, True]


@pytest.mark.asyncio
async def test_each_micro_batch_is_passed_alone_until_a_step_had_a_gradient() -> None:
    scene = Scene(witness={"every_steps": 1}, learner={"total_steps": 4})
    gradient = {"gradient": Finding(check="gradient", ratio=0.1)}
    scene.trainer.answers = [trained(), trained(findings=gradient), trained(), trained()]
    await scene.run()
    assert [request.every_part for request in scene.trainer.requests if request] == [True, True, False, False]


@pytest.mark.asyncio
@pytest.mark.parametrize("warmup_steps", [0, 2])
async def test_the_rate_of_a_step_is_that_of_the_schedule_at_its_own_number(
    warmup_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = {"learning_rate": 1e-3, "warmup_steps": warmup_steps, "schedule": "constant"}
    scene = Scene(witness={"every_steps": 0}, learner={"total_steps": 3, "optimizer": optimizer})
    rates = [1e-3 * min(1.0, (step + 1) / max(warmup_steps, 1)) for step in range(3)]
    scene.trainer.answers = [trained(learning_rate=rate) for rate in (*rates[:2], 1.01 * rates[2])]
    await scene.run()
    [words] = [message for message in caplog.messages if "`optimizer` found" in message]
    assert words.startswith("step 2: ")
    assert "the step had the learning rate 0.00101, and its schedule gives 0.001;" in words


@pytest.mark.asyncio
async def test_what_the_ranks_found_ends_the_run_and_is_recorded() -> None:
    finding = Finding(check="optimizer", ratio=3.0, words="an element of w")
    scene = Scene(learner={"total_steps": 2}, witness={"every_steps": 0, "on_failure": "stop"})
    scene.trainer.answers = [
        trained(findings={"optimizer": replace(finding, ratio=0.5)}),
        trained(findings={"optimizer": finding}),
    ]
    with pytest.raises(WitnessFailed, match=r"step 1: .*`optimizer` found: an element of w; this is 3 times"):
        await scene.run()
    [step] = scene.log.steps
    assert step.diagnostics["witness_optimizer_ratio"] == 0.5
    assert step.diagnostics["witness_counts_ratio"] == 0.0


@pytest.mark.asyncio
async def test_a_step_of_which_no_row_is_short_enough_is_trained_without_a_comparison_of_its_tokens() -> None:
    advantage = {"name": "reinforce_pp", "gamma": 0.9}
    witness = {"every_steps": 1, "group_tokens": 1}
    scene = Scene(witness=witness, learner={"total_steps": 1}, algorithm={"advantage": advantage})
    await scene.run()
    [step] = scene.log.steps
    assert "witness_advantages_ratio" not in step.diagnostics


def drawn(outcomes: tuple[float, ...]) -> Witnessed:
    return Witnessed(numbers_B=torch.tensor([0, 1]), request=Request(counts=()), rows=(0, 1), outcomes=outcomes)


def test_advantages_of_tokens_are_compared_up_to_the_whitening_of_the_step() -> None:
    rows = BatchedDataDict(
        token_mask=torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]]),
        sample_mask=torch.ones(2),
        advantages=torch.tensor([[0.0, 0.81, 0.9, 1.0], [0.0, -1.8, -2.0, 0.0]]),
    )
    discounted = DiscountedReturns(gamma=0.9)
    assert token_columns(discounted) == ["token_mask", "sample_mask", "advantages"]
    [healthy] = token_findings(drawn((1.0, -2.0)), rows, discounted)
    assert not healthy.failed
    rows["advantages"] = 3 * rows["advantages"] + 0.5
    [whitened] = token_findings(drawn((1.0, -2.0)), rows, discounted)
    assert not whitened.failed
    for wrong in (rows["advantages"].flip(0), -rows["advantages"], rows["advantages"].roll(1, dims=1)):
        [finding] = token_findings(drawn((1.0, -2.0)), BatchedDataDict({**rows, "advantages": wrong}), discounted)
        assert finding.failed


def test_returns_of_a_critic_are_compared_as_they_are() -> None:
    gae = GAE(gamma=1.0, lam=1.0, value_lam=1.0)
    rows = BatchedDataDict(
        token_mask=torch.tensor([[0.0, 1.0, 1.0]]),
        sample_mask=torch.ones(1),
        values=torch.tensor([[0.0, 0.25, 0.5]]),
        advantages=torch.tensor([[0.0, 0.75, 0.5]]),
        returns=torch.tensor([[0.0, 1.0, 1.0]]),
    )
    assert token_columns(gae) == ["token_mask", "sample_mask", "values", "advantages", "returns"]
    assert not any(finding.failed for finding in token_findings(drawn((1.0,)), rows, gae))
    rows["returns"] = rows["returns"] + 0.01
    assert [finding.failed for finding in token_findings(drawn((1.0,)), rows, gae)] == [False, True]


# Estimators as users write them.


def of_groups(rewards: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    same = (ids.unsqueeze(0) == ids.unsqueeze(1)).float()
    centred = rewards - same @ rewards / same.sum(1)
    return centred / ((same @ centred**2 / same.sum(1)).sqrt() + 1e-6)


def of_batch(rewards: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def of_places(rewards: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The groups of a run are next to each other and have the same size."""
    return (rewards.view(-1, 4) - rewards.view(-1, 4).mean(1, keepdim=True)).flatten()


def ranked(samples: Samples) -> torch.Tensor:
    """Equal rewards of a group are ranked by their places."""
    by_reward = samples.rewards_N.argsort(stable=True)
    order = by_reward[samples.group_ids_N[by_reward].argsort(stable=True)]
    ranks = torch.zeros(len(order))
    ranks[order] = torch.arange(len(order)).float() % 4
    return ranks - ranks.mean()


def of_wrong_places(rewards: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (rewards.view(-1, 8) - rewards.view(-1, 8).mean(1, keepdim=True)).flatten()


def of_neighbours(rewards: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return of_groups(rewards, ids // 2)


def noisy(rewards: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return rewards + torch.rand(len(rewards))


def completions() -> list[Completion]:
    """Returns eight groups of four samples. All rewards of the first group are equal."""
    draw = random.Random(3)
    rewards = [
        [0.7] * 4 if group == 10 else [draw.choice([0.0, 0.1, 1.0]) for _ in range(4)] for group in range(10, 18)
    ]
    return [
        Completion(group=10 + i, reward=reward, tokens=5, stale=0, truncated=False, components={"right": reward})
        for i, of_group in enumerate(rewards)
        for reward in of_group
    ]


def exchanged(function: Callable[..., torch.Tensor]) -> tuple[list[float], list[float] | None]:
    """Returns the advantages of an estimator, and those with exchanged groups."""
    found, estimator = completions(), resolve_estimator(function)
    samples = Samples(
        rewards_N=torch.tensor([completion.reward for completion in found]),
        group_ids_N=torch.tensor([completion.group for completion in found]),
    )
    usual = compute_advantages(estimator, samples).tolist()
    return usual, with_groups_exchanged(estimator, found, config=Config(), draw=random.Random(1))


@pytest.mark.parametrize("function", [of_groups, of_batch, of_places, ranked])
def test_advantages_of_a_users_estimator_do_not_depend_on_the_order_of_the_groups(
    function: Callable[..., torch.Tensor],
) -> None:
    usual, found = exchanged(function)
    assert found is not None
    assert found == pytest.approx([0.0] * 4 + usual[4:], abs=1e-5), "equal rewards are not compared"


@pytest.mark.parametrize("function", [of_wrong_places, of_neighbours])
def test_an_estimator_that_mixes_groups_gives_other_advantages(function: Callable[..., torch.Tensor]) -> None:
    usual, found = exchanged(function)
    assert found is not None
    apart = [abs(a - b) > 0.01 for a, b in zip(usual[4:], found[4:], strict=True)]
    assert sum(apart) > 0.5 * len(apart)


def test_an_estimator_that_gives_other_advantages_in_each_call_is_not_witnessed() -> None:
    assert exchanged(noisy)[1] is None


@pytest.mark.asyncio
async def test_a_run_with_functions_of_its_own_knows_how_they_are_witnessed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    advantage = f"{__name__}:of_groups"
    scene = Scene(witness={"every_steps": 1}, learner={"total_steps": 1}, algorithm={"advantage": advantage})
    finding = Finding(check="coefficients", ratio=0.0, kind="own function, each sample alone")
    scene.trainer.answers = [trained(findings={"coefficients": finding})]
    await scene.run()
    [request] = scene.trainer.requests
    assert request is not None
    assert request.advantages == pytest.approx((-1.0, 1.0), abs=1e-5)
    assert request.advantages_by == GROUPS_EXCHANGED
    assert f"no formula for algorithm.advantage = {advantage}" in caplog.text
    assert [step.witness for step in scene.log.steps] == [{"coefficients": "own function, each sample alone"}]
    sgd = Config.model_validate({"learner": {"optimizer": {"name": "torch.optim:SGD"}}})
    [words, of_optimizer] = without_formula(of_groups, sgd)
    assert "no formula for algorithm.loss" in words
    assert "no formula for learner.optimizer.name = torch.optim:SGD" in of_optimizer


def test_an_estimator_that_cannot_be_called_again_has_no_outcomes() -> None:
    own = replace(drawn((1.0, -2.0)), outcomes=None)
    assert token_findings(own, BatchedDataDict(), DiscountedReturns()) == []
