"""`asyncrl losses`: the YAML that it prints for a preset is that algorithm, and the list has three sections."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncrl.algorithms.axes import all_axes
from asyncrl.algorithms.checks import NEEDS_CRITIC
from asyncrl.algorithms.objective import Objective
from asyncrl.algorithms.presets import PRESETS, baseline_of, resolve_objective
from asyncrl.cli.main import app
from asyncrl.config.load import parse_yaml
from asyncrl.config.schema import AlgorithmSection, CriticSection

runner = CliRunner()


@pytest.mark.parametrize("name", list(PRESETS))
def test_what_is_printed_for_a_preset_is_the_preset_objective_and_advantages(name: str) -> None:
    printed: dict[str, dict[str, object]] = parse_yaml(runner.invoke(app, ["losses", name]).output, source="printed")  # type: ignore[assignment]
    section = AlgorithmSection.model_validate(printed["algorithm"])
    assert resolve_objective(section.loss, {}) == PRESETS[name].objective
    assert baseline_of(section) == baseline_of(AlgorithmSection(loss=name))


def test_a_preset_with_a_critic_of_its_own_shows_what_is_set_there() -> None:
    printed = parse_yaml(runner.invoke(app, ["losses", "vapo"]).output, source="printed")
    assert printed["critic"] == {"value_lam": 1.0, "length_alpha": 0.05}
    CriticSection.model_validate(printed["critic"])
    assert "critic" not in parse_yaml(runner.invoke(app, ["losses", "ppo"]).output, source="printed")


def test_presets_that_need_a_critic_are_listed_apart() -> None:
    *_, critic = runner.invoke(app, ["losses"]).output.split("with a critic (`critic`, as in the recipe ppo)")
    listed = {line.split()[0] for line in critic.splitlines()[1:]}
    assert listed == {name for name, preset in PRESETS.items() if preset.baseline in NEEDS_CRITIC}


def test_with_a_configuration_all_axes_of_its_objective_are_printed(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("algorithm: {loss: gspo, overrides: {surrogate: {hi: 1.5}}}\n")
    arguments = ["losses", "-c", str(tmp_path / "mine.yaml"), "algorithm.advantage.name=group_norm"]
    result = runner.invoke(app, [*arguments, "algorithm.advantage.eps=0.1"])
    assert result.exit_code == 0, result.output
    printed: dict[str, dict[str, Any]] = parse_yaml(result.output, source="printed")  # type: ignore[assignment]
    assert resolve_objective(printed["algorithm"]["loss"], {}) == resolve_objective("gspo", {"surrogate": {"hi": 1.5}})
    assert printed["algorithm"]["loss"].keys() == set(Objective.__struct_fields__)
    assert printed["algorithm"]["advantage"] == {"name": "group_norm", "eps": 0.1}
    own = runner.invoke(app, ["losses", "-c", str(tmp_path / "mine.yaml"), "algorithm.loss=mine:loss"])
    assert "algorithm.loss = mine:loss: a loss of your own has no axes" in own.stderr


def test_axes_are_refused_with_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("algorithm: {loss: gspo}\n")
    result = runner.invoke(app, ["losses", "-c", str(tmp_path / "mine.yaml"), "--axes", "surrogate"])
    assert result.exit_code == 2
    assert "--axes describes the axes and reads no configuration: leave out -c" in result.stderr


def test_two_names_are_refused() -> None:
    assert "gspo ppo: name one preset" in runner.invoke(app, ["losses", "gspo", "ppo"]).stderr


def test_an_import_path_is_said_to_be_one() -> None:
    result = runner.invoke(app, ["losses", "mine:loss"])
    assert result.exit_code == 2
    assert "'mine:loss' is an import path" in result.stderr


def test_axes_lists_every_axis_with_its_values() -> None:
    output = runner.invoke(app, ["losses", "--axes"]).output
    for axis in all_axes():
        assert f"\n{axis.name}: " in f"\n{output}"
        assert all(f"\n  {each.name} " in output for each in axis.choices)
    assert "One of ratio, log_ratio, k1, k2, k3, probability, binary_kl." in output


@pytest.mark.parametrize("name", [axis.name for axis in all_axes()])
def test_axes_with_a_name_prints_all_of_this_axis_and_its_examples_are_yaml(name: str) -> None:
    result = runner.invoke(app, ["losses", "--axes", name])
    assert result.exit_code == 0
    assert "stale tokens: " in result.output
    _, *examples = result.output.split("\n# an example of ")
    assert examples
    for example in examples:
        assert "algorithm" in parse_yaml(example.partition("\n")[2], source=name)


def test_axes_with_a_name_prints_the_options_of_an_option_below_it() -> None:
    output = runner.invoke(app, ["losses", "--axes", "advantage"]).output
    below = output.partition("\n  kl (mapping or null, default null): ")[2].partition("\n  gamma ")[0].splitlines()
    assert below[1].startswith("    beta (number): ")
    assert below[2].startswith("    kind (name, default k1): ")
    assert below[3:] == ["      k1: d.", "      k2: d²/2.", "      k3: e^(−d) − 1 + d."]


def test_an_axis_that_does_not_exist_is_refused() -> None:
    result = runner.invoke(app, ["losses", "--axes", "gate"])
    assert result.exit_code == 2
    assert "there is no such axis; the axes are surrogate, kernel," in result.stderr
