"""Dashboards and rules query only metrics, labels and label values that the catalogue declares."""

import re
import subprocess
import sys
from datetime import timedelta
from typing import Any

import promql_parser as promql
import pytest
from queries import (
    BOARDS,
    REPOSITORY,
    alerts,
    annotation_questions,
    knobs_in,
    panel_questions,
    panels,
    parsed,
    ranges,
    rule_questions,
    selectors,
    variable_questions,
)

from asyncrl.metrics.catalogue import CATALOGUE, Kind, Metric, Role, ScrapedMetric

QUESTIONS = [*panel_questions(), *annotation_questions(), *variable_questions(), *rule_questions()]
DISCOVERED = {"run", "role", "replica", "node", "instance"}
OTHERS = ("vllm:", "ray_", "DCGM_FI_DEV_")
BUILT_IN = {"up", "ALERTS"}


def series() -> dict[str, Metric]:
    """Returns the metrics by the names of their series."""
    named: dict[str, Metric] = {}
    for metric in CATALOGUE:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        named |= {f"{metric.name}{suffix}": metric for suffix in suffixes}
    return named


SERIES = series()


def labels_of(name: str) -> set[str]:
    return DISCOVERED | set(SERIES[name].labels) | ({"le"} if name.endswith("_bucket") else set())


def ours(expr: promql.Expr) -> list[promql.VectorSelector]:
    return [selector for selector in selectors(expr) if selector.name in SERIES]


def test_every_metric_that_is_asked_for_exists() -> None:
    for question in QUESTIONS:
        found = selectors(parsed(question.expr))
        assert found, question
        for selector in found:
            name = selector.name or ""
            assert name in SERIES or name.startswith(OTHERS) or name in BUILT_IN, (name, question.asked_by)


def test_every_label_and_value_that_is_asked_for_exists() -> None:
    for question in QUESTIONS:
        for selector in ours(parsed(question.expr)):
            for matcher in selector.matchers.matchers:
                assert matcher.name in labels_of(selector.name or ""), (str(selector), question.asked_by)
                values = SERIES[selector.name or ""].labels.get(matcher.name)
                if values is not None:
                    assert set(matcher.value.split("|")) <= set(values), (str(selector), question.asked_by)


def test_what_is_kept_apart_by_a_label_has_it() -> None:
    for question in QUESTIONS:

        def visit(node: promql.Expr, asked_by: str = question.asked_by) -> None:
            if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                for selector in ours(node.expr):
                    assert set(node.modifier.labels) <= labels_of(selector.name or ""), (str(selector), asked_by)

        promql.walk(parsed(question.expr), pre_visit=visit)


def test_every_panel_looks_at_one_run() -> None:
    for question in [*panel_questions(), *annotation_questions()]:
        for selector in selectors(parsed(question.expr)):
            filters = {matcher.name for matcher in selector.matchers.matchers}
            assert "run" in filters, question


def test_what_moves_once_a_step_is_looked_at_over_the_range_of_steps() -> None:
    """Metrics that only the learner records (except its state seconds), leases, fates and weight updates change once
    per step."""
    with_steps = ("asyncrl_buffer_lease_wait", "asyncrl_ledger_", "asyncrl_weight_")
    for question in panel_questions():
        for name, range_ in ranges(parsed(question.expr)):
            metric = SERIES.get(name)
            if metric is None or isinstance(metric, ScrapedMetric):
                continue
            stepwise = metric.roles == {Role.LEARNER} or name.startswith(with_steps)
            assert range_ == timedelta(minutes=5 if stepwise else 1), question


def test_no_query_subtracts_the_clocks_of_two_machines() -> None:
    """`time()` is Prometheus' clock, and a timestamp comes from the clock of the process that is scraped."""
    for question in QUESTIONS:

        def visit(node: promql.Expr, asked_by: str = question.asked_by) -> None:
            assert not (isinstance(node, promql.Call) and node.func.name == "time"), asked_by

        promql.walk(parsed(question.expr), pre_visit=visit)


def test_no_comparison_holds_for_what_is_no_number() -> None:
    for question in QUESTIONS:

        def visit(node: promql.Expr, asked_by: str = question.asked_by) -> None:
            assert not (isinstance(node, promql.BinaryExpr) and str(node.op) == "!="), asked_by

        promql.walk(parsed(question.expr), pre_visit=visit)


def test_no_panel_shows_a_rate_as_a_share() -> None:
    """A share must be a gauge or a quotient."""
    for board in BOARDS.values():
        for panel in panels(board):
            if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
                for target in panel["targets"]:
                    assert "rate(" not in target["expr"] or " / " in target["expr"], panel["title"]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_lines_have_names_and_numbers_are_of_this_moment(board: dict[str, Any]) -> None:
    for panel in panels(board):
        if panel["type"] == "timeseries":
            assert panel["options"]["legend"]["showLegend"] is True, panel["title"]
        if panel["type"] == "stat":
            assert all(target["instant"] and not target.get("range") for target in panel["targets"]), panel["title"]


def test_a_gauge_is_one_line_over_the_processes_that_a_run_has_had() -> None:
    """Each start of a learner has another port, and therefore other series."""
    for question in panel_questions():
        assert not isinstance(parsed(question.expr), promql.VectorSelector), question.asked_by


def test_firing_alerts_of_the_run_are_shown_and_those_of_no_run() -> None:
    [panel] = [panel for panel in panels(BOARDS["overview"]) if panel["title"] == "Alerts firing"]
    [selector] = selectors(parsed(panel["targets"][0]["expr"]))
    [runs] = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "run"]
    assert [bool(re.fullmatch(runs, run)) for run in ("r", "", "other")] == [True, True, False]


def test_every_metric_is_asked_for_somewhere() -> None:
    asked = {selector.name for question in QUESTIONS for selector in selectors(parsed(question.expr))}
    shown = {SERIES[name].name for name in asked if name in SERIES}
    assert {metric.name for metric in CATALOGUE} - shown == set()


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_is_described_and_filtered_and_its_data_source_is_a_variable(board: dict[str, Any]) -> None:
    assert board["uid"].startswith("asyncrl-")
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", "run", "replica", "step_range"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels(board):
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"]), panel["title"]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_restart_is_marked_at_its_time_in_milliseconds(board: dict[str, Any]) -> None:
    (restarts,) = board["annotations"]["list"]
    assert (restarts["name"], restarts["enable"], restarts["useValueForTime"]) == ("Restarts", True, True)
    assert restarts["expr"] == 'max(asyncrl_run_resumed_timestamp_seconds{run="$run"}) * 1000 > 0'


def test_uids_are_those_that_links_from_outside_use() -> None:
    uids = {name: board["uid"] for name, board in BOARDS.items()}
    assert uids == {"flow": "asyncrl-flow", "learning": "asyncrl-learning", "overview": "asyncrl-overview"}


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    def apart(start: str, size: str) -> bool:
        return one[start] + one[size] <= other[start] or other[start] + other[size] <= one[start]

    return not (apart("x", "w") or apart("y", "h"))


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_no_panel_lies_on_another_and_none_leaves_the_page(board: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert not [(a, b) for i, a in enumerate(places) for b in places[:i] if overlap(a, b)]


@pytest.mark.slow
def test_the_json_is_what_build_writes() -> None:
    built = subprocess.run(
        [sys.executable, "dashboards/build.py", "--check"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr


HAS_LIMIT = {
    "asyncrl_group_staleness_max_versions": "asyncrl_staleness_limit_versions",
    "asyncrl_weight_parity_nats": "asyncrl_weight_parity_limit_nats",
    "asyncrl_generator_policy_version": "asyncrl_weight_lag_limit_versions",
    "asyncrl_weight_load_seconds_sum": "asyncrl_weight_sync_timeout_seconds",
    "asyncrl_heartbeat_age_seconds": "asyncrl_stall_timeout_seconds",
    "asyncrl_buffer_oldest_group_age_seconds": "asyncrl_stall_timeout_seconds",
    "asyncrl_checkpoint_policy_version": "asyncrl_checkpoint_interval_versions",
}
"""Metrics whose limit is a gauge of the run. Alerts on them must use this gauge, not a number."""


def test_an_alert_holds_no_number_where_the_run_has_a_limit() -> None:
    for question in rule_questions():
        names = {selector.name for selector in selectors(parsed(question.expr))}
        for name in names & set(HAS_LIMIT):
            assert HAS_LIMIT[name or ""] in names, question.asked_by


def test_an_alert_says_what_it_means_and_which_knob_to_turn() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
        runbook = rule["annotations"]["runbook"]
        assert len(runbook) > 80, rule["alert"]
        assert knobs_in(runbook)[0] or "bug of asyncrl" in runbook, rule["alert"]


def test_every_knob_that_a_runbook_or_a_panel_names_exists() -> None:
    texts = {rule["alert"]: rule["annotations"]["runbook"] for rule in alerts()}
    texts |= {panel["title"]: panel["description"] for board in BOARDS.values() for panel in panels(board)}
    for where, text in texts.items():
        assert not knobs_in(text)[1], where
