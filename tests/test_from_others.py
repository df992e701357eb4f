"""docs/from-others.md: its keys and defaults are those of the schema, its axes build losses, and its adapters are
rewards."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.algorithms.baselines import Outcome, resolve_advantage
from asyncrl.algorithms.loss import build_loss
from asyncrl.config.load import flat_config, load_config, parse_yaml

PAGE = (Path(__file__).parents[1] / "docs" / "from-others.md").read_text()
KEYS = re.findall(r"^\| `([a-z_]+\.[a-z_.]+)` \| ([^|]*) \|", PAGE, re.MULTILINE)
AXES = re.findall(r"`((?:overrides|loss|advantage): [^`]*)`", PAGE)


def test_the_defaults_of_asyncrl_are_those_of_the_schema() -> None:
    defaults = flat_config(load_config([]))
    assert len(KEYS) > 10
    for key, default in KEYS:
        assert defaults[key] == parse_yaml(f"value: {default.strip()}", source=key)["value"], key


@pytest.mark.parametrize("text", AXES)
def test_each_choice_of_axes_builds_a_loss(text: str) -> None:
    algorithm = parse_yaml(text, source="page")
    if "package" not in text:
        base: dict[str, Any] = {"loss": "tis"} if "overrides" in algorithm else {}
        build_loss(load_config([{"algorithm": base | algorithm}]))


@pytest.mark.parametrize("text", [text for text in AXES if text.startswith("advantage: ")])
def test_the_estimators_of_the_page_exist_and_have_the_eps_of_trl(text: str) -> None:
    """TRL adds 1e-4 to every standard deviation by which it divides."""
    estimator = resolve_advantage(parse_yaml(text, source="page")["advantage"])  # type: ignore[arg-type]
    assert isinstance(estimator, Outcome)
    assert estimator.eps == 1e-4 or not estimator.divides_by_std


def test_the_adapters_of_rewards_give_the_rewards() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    task = SimpleNamespace(prompt="2+2=", answer="4", metadata={"level": 1})

    def of_trl(prompts: list[str], completions: list[str], **columns: list[str]) -> list[float]:
        return [float(text == answer) for text, answer in zip(completions, columns["answer"], strict=True)]

    def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float(solution_str == ground_truth) + extra_info["level"]

    async def of_prime_rl(completion: list[dict[str, str]], answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    assert found["of_trl"](task, ["4", "5"], of_trl) == [1.0, 0.0]
    assert found["of_verl"](task, "4", of_verl) == 2.0
    assert found["of_prime_rl"](task, "4", of_prime_rl) == 1.0
