"""Reads the queries of the dashboards and alert rules from the files that Grafana and Prometheus load."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import yaml
from pydantic import BaseModel

from asyncrl.config.schema import Config

REPOSITORY = Path(__file__).parents[2]
BOARDS = {path.stem: json.loads(path.read_bytes()) for path in sorted((REPOSITORY / "dashboards").glob("*.json"))}
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
RULES = {path.name: yaml.safe_load(path.read_text()) for path in sorted((PROMETHEUS / "rules").glob("*.yml"))}


class Question(NamedTuple):
    """A query, and the panel, rule or variable that it belongs to."""

    asked_by: str
    expr: str


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the panels of a dashboard without the titles of rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    return [rule for file in RULES.values() for group in file["groups"] for rule in group["rules"]]


def panel_questions() -> list[Question]:
    return [
        Question(f"{name} / {panel['title']} / {target['refId']}", target["expr"])
        for name, board in BOARDS.items()
        for panel in panels(board)
        for target in panel["targets"]
    ]


def variable_questions() -> list[Question]:
    """Returns the queries from which variables get their values: the first argument of `label_values`."""
    return [
        Question(f"{name} / ${variable['name']}", variable["query"].removeprefix("label_values(").rpartition(",")[0])
        for name, board in BOARDS.items()
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]


def annotation_questions() -> list[Question]:
    return [
        Question(f"{name} / {annotation['name']}", annotation["expr"])
        for name, board in BOARDS.items()
        for annotation in board["annotations"]["list"]
    ]


def rule_questions() -> list[Question]:
    return [Question(rule["alert"], rule["expr"]) for rule in alerts()]


def concrete(expr: str, *, run: str, interval: str, step_range: str = "") -> str:
    """Returns the query as Grafana sends it, for one run and all of its generators.

    `step_range` is the range of metrics that change once per step; the default is `interval`.
    """
    values = {"$run": run, "$replica": ".*", "$__rate_interval": interval, "$step_range": step_range or interval}
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


def parsed(expr: str) -> promql.Expr:
    return promql.parse(concrete(expr, run="r", interval="1m", step_range="5m"))


def selectors(expr: promql.Expr) -> list[promql.VectorSelector]:
    """Returns every selector of a query, including the selectors of ranges."""
    found: list[promql.VectorSelector] = []

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, promql.VectorSelector):
            found.append(node)

    promql.walk(expr, pre_visit=visit)
    return found


def ranges(expr: promql.Expr) -> list[tuple[str, timedelta]]:
    """Returns (metric, range) for each selector of a query that has a range."""
    found: list[tuple[str, timedelta]] = []

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.MatrixSelector):
            found.append((node.vector_selector.name or "", node.range))

    promql.walk(expr, pre_visit=visit)
    return found


def knobs_in(text: str) -> tuple[set[str], set[str]]:
    """Returns the words of a text that look like config keys: those that exist, and those that do not."""
    sections = "|".join(Config.model_fields)
    named = set(re.findall(rf"\b(?:{sections})(?:\.[a-z_]+)+", text))
    keys = set(_keys(Config))
    return named & keys, named - keys


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, f"{prefix}{name}.")
