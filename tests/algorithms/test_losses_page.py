"""docs/losses.md: it agrees with the code, every value of every axis has a text, and every example on it is a
configuration whose loss is built."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.algorithms import docs, objective
from asyncrl.algorithms.axes import Text, all_axes, axis_named, choice_texts, docstring
from asyncrl.algorithms.baselines import CRITIC_BASED, OUTCOMES, resolve_advantage
from asyncrl.algorithms.checks import check_algorithm
from asyncrl.algorithms.interfaces import RUN_COLUMNS
from asyncrl.algorithms.loss import ObjectiveLoss, build_loss
from asyncrl.algorithms.presets import PRESETS, advantage_of, own_loss
from asyncrl.cli.code_trials import call_loss, run_columns
from asyncrl.config.load import load_config, parse_yaml
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError
from asyncrl.policy.step_loss import with_statistics
from asyncrl.ranks.plan import PlannedUpdate, plan_of

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
    settings = ["generator.max_completion_tokens=32", "generator.logprobs=4"]
    config = load_config([parse_yaml(example, source=place)], settings)
    loss = build_loss(config)
    check_algorithm(config)
    assert isinstance(loss, ObjectiveLoss)
    if place in {each.name for each in axis_named("surrogate").choices}:
        assert msgspec.to_builtins(loss.objective)["surrogate"]["kind"] == place
    resolve_advantage(advantage_of(config.algorithm))


def write_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the modules on the page into a folder in which Python then finds them."""
    for path, text in MODULES:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)


def test_each_block_of_yaml_on_the_page_is_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of your own on the page are called with a small batch, as `config check` does it."""
    write_modules(tmp_path, monkeypatch)
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


SEEN: dict[str, Any] = {}


class ReadsAll:
    """A loss that reads all columns of a run in which no episode has branches."""

    input_type = "logprob"
    loss_type = "token_level"
    columns = tuple(each.name for each in RUN_COLUMNS if each.name != "branch_ids")

    def __call__(self, *, data: Any, next_token_logprobs: Any, **counts: Any) -> Any:
        SEEN.update(data)
        return (next_token_logprobs * data["token_mask"][:, 1:]).sum(), {}


def test_the_columns_on_the_page_are_those_of_a_run_with_their_shapes() -> None:
    settings = {
        "generator.top_k": 8,
        "generator.logprobs": 4,
        "algorithm.advantage": {"name": "reinforce_pp", "kl": {"beta": 0.01}},
    }
    config = load_config([{"algorithm.loss": f"{__name__}:ReadsAll", **settings}])
    assert {*run_columns(config), "branch_ids"} == {each.name for each in RUN_COLUMNS}
    call_loss(config)
    for each in RUN_COLUMNS:
        if each.name != "branch_ids":
            assert SEEN[each.name].ndim == len(each.shape.split(","))
            assert str(SEEN[each.name].dtype) == f"torch.{each.dtype}"
        assert f"| `{each.name}` | {each.shape} | {each.dtype} |" in PAGE


@pytest.mark.parametrize("cut", [[12], [5, 7], [1] * 12])
def test_kl_cov_on_the_page_is_the_plain_loop_in_float64_however_the_step_is_cut(
    cut: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients of 12 rows of 9 tokens, of which 20 % have the penalty."""
    write_modules(tmp_path, monkeypatch)
    own = load_config([{"algorithm.loss": {"name": "mine.kl_cov:KLCov", "share": 0.2, "beta": 0.7}}])
    draw = torch.Generator().manual_seed(3)
    old, lp = (-torch.rand(12, 10, generator=draw, dtype=torch.float64) * 3 for _ in range(2))
    advantages = torch.randn(12, 1, generator=draw, dtype=torch.float64).expand(12, 10)
    mask = (torch.rand(12, 10, generator=draw) < 0.8).double()
    mask[:, 0] = 0
    rows = {"prev_logprobs": old, "advantages": advantages, "token_mask": mask, "sample_mask": torch.ones(12)}
    whole = BatchedDataDict(**rows, input_ids=mask.long())
    starts = [sum(cut[:i]) for i in range(len(cut))]
    parts: list[Any] = [whole.slice(start, start + size) for start, size in zip(starts, cut, strict=True)]
    trained = [(row, token) for row in range(12) for token in range(1, 10) if mask[row, token]]
    loss: Any = with_statistics(build_loss(own), [PlannedUpdate(plan_of(whole), parts)], reduce=lambda sums: sums)
    current = lp[:, 1:].clone().requires_grad_()
    counts = {"global_valid_seqs": torch.tensor(12.0), "global_valid_toks": torch.tensor(float(len(trained)))}
    total = sum(
        loss(data=part, next_token_logprobs=current[start : start + part.size], **counts)[0]
        for start, part in zip(starts, parts, strict=True)
    )
    [slopes] = torch.autograd.grad(total, current)

    means = [sum(float(column[place]) for place in trained) / len(trained) for column in (old, advantages)]
    apart = {place: (float(old[place]) - means[0]) * (float(advantages[place]) - means[1]) for place in trained}
    chosen = sorted(trained, key=lambda place: apart[place])[-int(0.2 * len(trained)) :]
    expected, gradient = 0.0, torch.zeros_like(lp)
    for place in trained:
        difference = float(lp[place] - old[place])
        expected -= float(advantages[place]) * math.exp(difference)
        gradient[place] = -float(advantages[place]) * math.exp(difference)
        if place in chosen:
            expected += 0.7 * abs(difference)
            gradient[place] += math.copysign(0.7, difference)
    assert float(total.detach()) == pytest.approx(expected / len(trained), abs=1e-6)
    assert torch.allclose(slopes, gradient[:, 1:] / len(trained), atol=1e-6)
