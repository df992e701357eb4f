"""What the dashboards and the alert rules ask of Prometheus, read from the files that Grafana and Prometheus read."""

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
    """A query, and the panel, rule or variable that asks it."""

    asked_by: str
    expr: str


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """All but the rows' headlines."""
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
    """What a variable takes its values from: the first argument of `label_values`."""
    return [
        Question(f"{name} / ${variable['name']}", variable["query"].removeprefix("label_values(").rpartition(",")[0])
        for name, board in BOARDS.items()
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]


def rule_questions() -> list[Question]:
    return [Question(rule["alert"], rule["expr"]) for rule in alerts()]


def concrete(expr: str, *, run: str, interval: str, step_range: str = "") -> str:
    """The query as Grafana sends it, for one run and all of its generators. Without a range of its own, what moves once
    a step is looked at over `interval` as well."""
    values = {"$run": run, "$replica": ".*", "$__rate_interval": interval, "$step_range": step_range or interval}
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


def parsed(expr: str) -> promql.Expr:
    return promql.parse(concrete(expr, run="r", interval="1m", step_range="5m"))


def selectors(expr: promql.Expr) -> list[promql.VectorSelector]:
    """Every series that a query selects, those of ranges included."""
    found: list[promql.VectorSelector] = []

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, promql.VectorSelector):
            found.append(node)

    promql.walk(expr, pre_visit=visit)
    return found


def ranges(expr: promql.Expr) -> list[tuple[str, timedelta]]:
    """Each series that is looked at over a range, and the range."""
    found: list[tuple[str, timedelta]] = []

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.MatrixSelector):
            found.append((node.vector_selector.name or "", node.range))

    promql.walk(expr, pre_visit=visit)
    return found


def knobs_in(text: str) -> tuple[set[str], set[str]]:
    """What looks like a config key in a text: those that are, and those that are not."""
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
