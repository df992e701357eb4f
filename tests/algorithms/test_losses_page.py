"""docs/losses.md: it agrees with the code, every value of every axis has a text, and every example on it is a
configuration whose loss is built."""

import re
from pathlib import Path

import msgspec
import pytest

from asyncrl.algorithms import docs, objective
from asyncrl.algorithms.axes import Text, all_axes, axis_named, choice_texts, docstring
from asyncrl.algorithms.baselines import CRITIC_BASED, OUTCOMES, resolve_advantage
from asyncrl.algorithms.checks import check_algorithm
from asyncrl.algorithms.loss import ObjectiveLoss, build_loss
from asyncrl.algorithms.presets import PRESETS, advantage_of, own_loss
from asyncrl.cli.code_trials import call_loss
from asyncrl.config.load import load_config, parse_yaml
from asyncrl.errors import ConfigError

PAGE = docs.PATH.read_text()
EXAMPLES = re.findall(r"^An example of `([^`]*)`:\n\n```yaml\n([^`]*)```", PAGE, re.MULTILINE)
MODULES = re.findall(r"^```python\n# (\S*)\n([^`]*(?:`(?!``)[^`]*)*)```", PAGE, re.MULTILINE)
"""Path and text of each module of a user on the page."""
BLOCKS = re.findall(r"^```yaml\n([^`]*)```", PAGE, re.MULTILINE)


def test_the_page_agrees_with_the_code() -> None:
    assert docs.main(["--check"]) == 0


def test_a_page_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "PATH", tmp_path / "docs" / "losses.md")
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0


def test_every_axis_of_an_objective_and_every_value_is_on_the_page() -> None:
    axes = {axis.name: {each.name for each in axis.choices} for axis in all_axes()}
    assert {*objective.Objective.__struct_fields__, "kernel", "advantage", "zero_variance", "overlong"} == {*axes}
    assert axes["surrogate"] == {each.__struct_config__.tag for each in objective.Surrogate.__args__}
    assert axes["aggregation"] == {*objective.Aggregation}
    assert axes["advantage"] == {*OUTCOMES, *CRITIC_BASED}
    for name, values in axes.items():
        section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert all(f"| `{value}` |" in section for value in values)


def test_the_options_of_an_option_and_their_values_are_on_the_page() -> None:
    section = PAGE.split("\n## advantage\n")[1].split("\n## ")[0]
    [row] = [line for line in section.splitlines() if line.startswith("| `kl` |")]
    words = ["`beta`: ", "`kind` (default `k1`): ", "`k1`: d.", "`k2`: d²/2.", "`k3`: e^"]
    assert [word for word in words if word not in row] == []


def test_the_rules_for_all_values_of_zero_variance_are_not_part_of_one_value() -> None:
    axis = axis_named("zero_variance")
    texts = {each.name: each.text.meaning for each in axis.choices}
    assert texts["resample"].endswith("They count in the mean reward.")
    assert "The compared rewards" in axis.text.meaning
    assert "are refused with estimators" in axis.text.meaning


def test_every_axis_says_what_it_does_to_stale_tokens_and_has_an_example() -> None:
    for axis in all_axes():
        assert axis.text.stale or all(each.text.stale for each in axis.choices), axis.name
        assert axis.examples(), axis.name


@pytest.mark.parametrize(("place", "example"), EXAMPLES, ids=[place for place, _ in EXAMPLES])
def test_the_loss_of_each_example_is_built_and_passes_the_checks(place: str, example: str) -> None:
    config = load_config([parse_yaml(example, source=place)], ["generator.max_completion_tokens=32"])
    loss = build_loss(config)
    check_algorithm(config)
    assert isinstance(loss, ObjectiveLoss)
    if place in {each.name for each in axis_named("surrogate").choices}:
        assert msgspec.to_builtins(loss.objective)["surrogate"]["kind"] == place
    resolve_advantage(advantage_of(config.algorithm))


def test_each_block_of_yaml_on_the_page_is_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of your own on the page are called with a small batch, as `config check` does it."""
    for path, text in MODULES:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert len(BLOCKS) > len(EXAMPLES) > 15
    own = 0
    for block in BLOCKS:
        config = load_config([parse_yaml(block, source="page")])
        if own_loss(config.algorithm) is None:
            build_loss(config)
        else:
            own += 1
            call_loss(config)
    assert own == len(MODULES) > 0


def test_a_value_or_a_field_without_a_text_is_refused() -> None:
    with pytest.raises(LookupError, match="does not describe zero"):
        choice_texts(Text(meaning="Bounds. `clamp`: the bound."), ["clamp", "zero"])
    with pytest.raises(LookupError, match=r"Weight\.nothing has no docstring"):
        docstring("Weight.nothing", objective)


def test_a_name_inside_another_text_is_not_taken_for_a_value() -> None:
    texts = choice_texts(Text(meaning="KL. `k3`: that of k3. `k3+`: the value of `k3`, and more."), ["k3", "k3+"])
    assert texts["k3+"].meaning == "the value of `k3`, and more."
    assert texts["k3"].meaning == "that of k3."


def test_the_numbers_about_stale_tokens_are_those_of_the_formulas() -> None:
    def row(name: str, advantage: float) -> list[float]:
        return docs.stale_gradients(PRESETS[name].objective, advantage=advantage)

    ratios = list(docs.RATIOS)
    assert row("aipo", 1.0) == pytest.approx([min(ratio, 5.0) for ratio in ratios])
    assert row("tis", -1.0) == pytest.approx([min(ratio, 2.0) for ratio in ratios])
    assert row("decoupled_icepop", 1.0) == pytest.approx([ratio if 0.5 <= ratio <= 5 else 0.0 for ratio in ratios])
    assert row("topr", 1.0) == pytest.approx([1.0] * len(ratios))
    assert row("topr", -1.0) == pytest.approx([min(ratio, 1.0) for ratio in ratios])
    # a3po: one version old, so the proximal policy is the sampler: no weight, and a clip at 0.8 and 1.2
    assert row("a3po", 1.0) == pytest.approx([ratio if ratio < 1.2 else 0.0 for ratio in ratios])


def test_no_stale_token_has_a_gradient_of_the_other_sign() -> None:
    """The page explains the numbers 0 and above."""
    table = PAGE.split("\n## Stale tokens\n")[1].split("\n## ")[0]
    fixed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(fixed) > 5
    for name in fixed:
        for advantage in (1.0, -1.0):
            assert min(docs.stale_gradients(PRESETS[name].objective, advantage=advantage)) >= 0, name


def test_an_unknown_axis_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean 'weight'"):
        axis_named("wieght")
