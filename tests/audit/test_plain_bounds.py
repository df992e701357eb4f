"""The plain bounds of a step are those of their definitions, and those that the first path searches."""

from typing import Any

import msgspec
import pytest
import torch

from asyncrl.algorithms.calibration import calibrated
from asyncrl.algorithms.presets import resolve_objective
from asyncrl.algorithms.step_statistics import StepTokens
from asyncrl.audit.plain_bounds import with_bounds
from asyncrl.witness.bounds import unlike_bounds
from asyncrl.witness.objective import are_chosen

GATE = {"stat": "k2", "p": "current", "q": "behaviour", "when": "moving_away"}
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "a budget": ("m2po", {}),
    "a budget that keeps all": ("m2po", {"gates": [GATE | {"budget": 1e3}]}),
    "a budget that keeps none": ("m2po", {"gates": [GATE | {"budget": 1e-12}]}),
    "an effective share": ("p3o", {}),
    "a share of the weights": ("decoupled_ppo", {"weight": {"min_ess": 0.9}, "gates": []}),
    "tokens with the largest covariance": ("kl_cov", {"penalties": [{"kind": "abs", "tokens": {"share": 0.1}}]}),
    "random tokens": ("clip_cov", {"dropped": {"share": 0.05, "lo": 0.5}}),
    "fewer tokens than the share": ("clip_cov", {"dropped": {"share": 0.9, "lo": 1.0}}),
    "a share that needs no cap": ("decoupled_ppo", {"weight": {"min_ess": 0.01}, "gates": []}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_the_bounds_are_those_of_the_definitions_and_of_the_first_path(name: str, seed: int) -> None:
    objective = resolve_objective(*OBJECTIVES[name])
    draw = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(200, generator=draw) * 4
    current = behaviour + torch.randn(200, generator=draw) / 2
    columns = {"current": current, "proximal": current, "behaviour": behaviour, "reference": behaviour}
    advantages = torch.randn(200, generator=draw)
    tokens = {key: column.double().tolist() for key, column in columns.items()}
    tokens["advantages"] = advantages.double().tolist()
    configured = msgspec.to_builtins(objective)
    found = with_bounds(configured, tokens)
    assert unlike_bounds(configured, found, tokens) == ""
    searched = calibrated(objective, tokens=StepTokens(sources=columns, advantages=advantages), reduce=lambda own: own)
    first = msgspec.to_builtins(searched)
    for kernel in ("positive", "negative"):
        if found["surrogate"]["kind"] == "weighted":
            assert found["surrogate"][kernel]["hi"] == pytest.approx(first["surrogate"][kernel]["hi"], rel=1e-4)
    if found["weight"] is not None:
        assert found["weight"]["hi"] == pytest.approx(first["weight"]["hi"], rel=1e-4)
    assert [each["beta"] for each in found["penalties"]] == pytest.approx([each["beta"] for each in first["penalties"]])
    for choice, searched_choice in [(found["dropped"], first["dropped"])] + [
        (own["tokens"], other["tokens"]) for own, other in zip(found["penalties"], first["penalties"], strict=True)
    ]:
        assert (choice is None) == (searched_choice is None)
        if choice is not None:
            chosen = are_chosen(choice, tokens)
            assert chosen == are_chosen(searched_choice, tokens)
            assert any(chosen)
    for gate, used in zip(found["gates"], first["gates"], strict=True):
        columns_of_tokens = (tokens[key] for key in ("current", "behaviour", "advantages"))
        subject = [(p - q) ** 2 / 2 for p, q, a in zip(*columns_of_tokens, strict=True) if a * (p - q) > 0]
        assert [k2 <= gate["hi"] for k2 in subject] == [k2 <= used["hi"] for k2 in subject]
