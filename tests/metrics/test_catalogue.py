"""The catalogue follows the naming rules, and docs/metrics.md is up to date."""

import doctest
import re
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.metrics import catalogue, docs
from asyncrl.metrics.catalogue import CATALOGUE, SECONDS, Kind, Metric, ScrapedMetric

RECIPES = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_what_a_recipe_lets_last_lies_within_the_buckets(recipe: Path) -> None:
    """A quantile beyond the last bucket would be shown as the bound of that bucket."""
    config = load_config([recipe], [])
    longest_s = max(config.run.stall_timeout_s, config.generator.rollout_timeout_s, config.weights.load_timeout_s)
    assert longest_s <= SECONDS[-1]


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_declaration_keeps_the_naming_rules(metric: Metric) -> None:
    assert re.fullmatch(r"asyncrl_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert (len(metric.buckets) > 0) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help.endswith(".")
    assert metric.roles
    assert not {"run", "role", "replica"} & set(metric.labels), "these come from service discovery"


def test_names_are_unique() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)


def test_an_attribute_has_the_name_of_its_metric_without_the_prefix() -> None:
    groups = [each for each in vars(catalogue).values() if isinstance(each, type)]
    attributes = [(name, value) for group in groups for name, value in vars(group).items() if isinstance(value, Metric)]
    assert [f"asyncrl_{name}" for name, _ in attributes] == [metric.name for _, metric in attributes]
    numbers = [metric.name for metric in catalogue.Learner.numbers.values()]
    assert sorted([*numbers, *(metric.name for _, metric in attributes)]) == sorted(each.name for each in CATALOGUE)


def test_units_in_names_are_those_declared() -> None:
    for metric in CATALOGUE:
        for suffix in ("seconds", "bytes", "versions", "nats", "ratio"):
            if metric.name.removesuffix("_total").endswith(f"_{suffix}"):
                assert metric.unit.endswith(suffix), metric.name


def test_scraped_metrics_are_counters_with_one_closed_label() -> None:
    for metric in CATALOGUE:
        if isinstance(metric, ScrapedMetric):
            assert metric.kind is Kind.COUNTER
            (values,) = metric.labels.values()
            assert values


def test_a_unit_is_read_from_the_name_where_it_has_one() -> None:
    assert doctest.testmod(catalogue).failed == 0


def test_docs_are_current() -> None:
    assert docs.main(["--check"]) == 0


def test_docs_name_every_metric() -> None:
    page = docs.markdown()
    assert all(f"`{metric.name}`" in page for metric in CATALOGUE)


def test_every_metric_is_one_row_whose_last_cell_has_its_whole_help() -> None:
    """A `|` inside a cell would end the cell, and the page would not show the rest of the row."""
    rows = [line for line in docs.markdown().splitlines() if line.startswith("| `asyncrl_")]
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    assert {len(row) for row in cells} == {6}
    told = {row[0].strip(" `"): row[-1].strip().replace("\\|", "|") for row in cells}
    assert told == {metric.name: metric.help for metric in CATALOGUE}
