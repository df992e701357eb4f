"""The witness accepts the bounds that a step's calibration finds, and no others."""

import math
from typing import Literal

import msgspec
import pytest
import torch

from asyncrl.algorithms.calibration import calibrated
from asyncrl.algorithms.objective import (
    ByCovariance,
    Clamp,
    Gate,
    Linear,
    Objective,
    Penalty,
    Reinforce,
    Weight,
    Weighted,
)
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.step_statistics import StepTokens
from asyncrl.witness.bounds import next_beta, unlike_bounds

OBJECTIVES = {
    "m2po": PRESETS["m2po"].objective,
    "p3o": PRESETS["p3o"].objective,
    "budget of all tokens": Objective(
        surrogate=Linear(), anchor="behaviour", gates=(Gate(stat="k2", p="current", budget=0.05),)
    ),
    "budget of bad tokens": Objective(
        surrogate=Linear(),
        anchor="behaviour",
        gates=(Gate(stat="k2", p="current", budget=0.001, when="negative_advantage"),),
    ),
    "least effective share": Objective(surrogate=Reinforce(), weight=Weight(p="current", min_ess=0.9)),
    "kl_cov": PRESETS["kl_cov"].objective,
    "clip_cov": PRESETS["clip_cov"].objective,
    "many of the largest": Objective(surrogate=Reinforce(), dropped=ByCovariance(share=0.3, hi=1.0)),
    "many at random": Objective(surrogate=Reinforce(), dropped=ByCovariance(share=0.3, order="random", lo=0.1)),
    "nearly all of it": Objective(surrogate=Reinforce(), weight=Weight(p="current", hi=1.5, min_ess=0.999)),
}


def tokens(seed: int, apart: float) -> StepTokens:
    draw = torch.Generator().manual_seed(seed)
    current = -3 * torch.rand(200, generator=draw)
    behaviour = current + apart * torch.randn(200, generator=draw)
    sources = {"current": current, "behaviour": behaviour, "proximal": current}
    return StepTokens(advantages=torch.randn(200, generator=draw), sources=sources)


def lists_of(step: StepTokens) -> dict[str, list[float]]:
    columns = {**step.sources, "advantages": step.advantages}
    return {name: values.double().tolist() for name, values in columns.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("apart", [0.0, 0.01, 0.3, 1.0])
def test_the_bounds_of_a_step_are_accepted(name: str, apart: float) -> None:
    configured = OBJECTIVES[name]
    for seed in range(5):
        step = tokens(seed, apart)
        used = calibrated(configured, tokens=step, reduce=lambda values: values)
        assert unlike_bounds(*map(msgspec.to_builtins, (configured, used)), lists_of(step)) == "", seed


@pytest.mark.parametrize("name", OBJECTIVES)
def test_other_bounds_are_not(name: str) -> None:
    configured, step = OBJECTIVES[name], tokens(0, 0.5)
    used = calibrated(configured, tokens=step, reduce=lambda values: values)
    axes = msgspec.to_builtins(used)
    for factor in (0.7, 1.5):
        wrong = msgspec.to_builtins(used)
        if used.weight is not None and configured.weight is not None and configured.weight.min_ess is not None:
            wrong["weight"] = {**axes["weight"], "hi": max(1.0, factor * axes["weight"]["hi"])}
        elif configured.chosen():
            continue  # the test below changes their numbers
        elif used.gates and math.isfinite(used.gates[0].hi):
            wrong["gates"] = [{**axes["gates"][0], "hi": factor * axes["gates"][0]["hi"]}]
        else:
            assert isinstance(used.surrogate, Weighted)
            assert isinstance(used.surrogate.positive, Clamp)
            positive = {**axes["surrogate"]["positive"], "hi": factor * axes["surrogate"]["positive"]["hi"]}
            wrong["surrogate"] = {**axes["surrogate"], "positive": positive}
        if wrong != axes:
            assert unlike_bounds(msgspec.to_builtins(configured), wrong, lists_of(step)), factor


@pytest.mark.parametrize("order", ["largest", "random"])
def test_another_choice_of_tokens_is_not_accepted(order: Literal["largest", "random"]) -> None:
    choice = ByCovariance(share=0.2, order=order)
    penalties = (Penalty(beta=1.0, kind="k2", q="proximal", tokens=choice),)
    for configured in (
        Objective(surrogate=Reinforce(), dropped=choice),
        Objective(surrogate=Reinforce(), penalties=penalties),
    ):
        axes, step = msgspec.to_builtins(configured), tokens(2, 0.5)
        used = msgspec.to_builtins(calibrated(configured, tokens=step, reduce=lambda values: values))
        right = used["dropped"] or used["penalties"][0]["tokens"]
        assert unlike_bounds(axes, used, lists_of(step)) == ""
        size = 0.1 if order == "largest" else 1e8
        changes = [{"above": right["above"] + size}, {"above": right["above"] - size}, {"above": -math.inf}]
        changes += [{"mean_logprob": right["mean_logprob"] + 1e-3}, {"mean_advantage": right["mean_advantage"] - 1e-3}]
        for change in changes:
            wrong = {**right, **change}
            place = {"dropped": wrong}
            if configured.dropped is None:
                place = {"penalties": [{**used["penalties"][0], "tokens": wrong}]}
            assert "chosen by covariance" in unlike_bounds(axes, {**used, **place}, lists_of(step)), change
        missing = {"dropped": None, "penalties": [{**each, "tokens": None} for each in used["penalties"]]}
        assert "missing or added" in unlike_bounds(axes, {**used, **missing}, lists_of(step))


def test_a_beta_that_follows_a_kl_by_hand() -> None:
    """K_β = 0.1, so that β changes by 0.1 · (KL − target) / target, at most 2 %."""
    control = {"target": 0.5, "gain": 0.1}
    pairs = ((0.5, 2.0), (0.55, 2.02), (0.45, 1.98), (0.9, 2.04), (0.0, 1.96))
    assert [next_beta(2.0, control, kl) for kl, _ in pairs] == pytest.approx([beta for _, beta in pairs], rel=1e-12)
    assert (next_beta(1e-9, control, 0.0), next_beta(1e9, control, 5.0)) == (1e-9, 1e9)


def test_a_penalty_has_the_rest_of_the_effective_share() -> None:
    penalty = Penalty(beta=0.5, kind="k3", q="behaviour", ess=True)
    configured, step = Objective(surrogate=Reinforce(), penalties=(penalty,)), tokens(1, 0.5)
    used = calibrated(configured, tokens=step, reduce=lambda values: values)
    axes = msgspec.to_builtins(configured)
    assert unlike_bounds(axes, msgspec.to_builtins(used), lists_of(step)) == ""
    assert "a penalty has β = 0.5" in unlike_bounds(axes, axes, lists_of(step))
