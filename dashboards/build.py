"""`python dashboards/build.py [--check]` writes the three dashboards as JSON, and the alert rules of
deploy/prometheus/rules as an object of the Prometheus operator; or checks that the files are up to date.

The JSON is sorted and has fixed uids, so that a changed panel changes few lines. Grafana loads the files by
deploy/grafana/provisioning. A file can also be imported by hand, because the data source is a variable.
"""

import json
import sys
from pathlib import Path
from types import ModuleType

import flow
import learning
import overview
import yaml
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from panels import DATASOURCE, RUN, STEPS

FOLDER = Path(__file__).parent
DEPLOY = FOLDER.parent / "deploy"
BOARDS: dict[str, ModuleType] = {"overview": overview, "flow": flow, "learning": learning}
TAG = "asyncrl"
RESTART_FIELDS = {"useValueForTime": True, "titleFormat": "the run was resumed", "step": "10s"}
"""The value of the query is the time of the mark, in Unix milliseconds."""
RANGES, DEFAULT_RANGE = "1m,5m,15m,1h", "5m"


def board(module: ModuleType) -> str:
    """Returns one dashboard as JSON."""
    built = (
        dashboard.Dashboard(module.TITLE)
        .uid(module.UID)
        .description(module.DESCRIPTION)
        .tags([TAG])
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(_to_the_others())
        .annotation(_restarts())
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_values("run", "Run", "label_values(asyncrl_run_info, run)"))
        .with_variable(
            _values("replica", "Generators", 'label_values(asyncrl_generator_policy_version{run="$run"}, replica)')
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
        .with_variable(_step_range())
    )
    number = 0
    for title, panels in module.ROWS.items():
        built = built.with_row(dashboard.Row(title).id(number := number + 1))
        for panel in panels:
            built = built.with_panel(panel.id(number := number + 1))
    content = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    # The SDK's annotations lack the fields of Prometheus.
    content["annotations"]["list"][0] |= RESTART_FIELDS
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _restarts() -> dashboard.AnnotationQuery:
    """Returns the marks of the run's restarts: vertical lines in all panels."""
    return (
        dashboard.AnnotationQuery()
        .name("Restarts")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("purple")
        .expr(f"max(asyncrl_run_resumed_timestamp_seconds{{{RUN}}}) * 1000 > 0")
    )


def _step_range() -> dashboard.IntervalVariable:
    """Returns the variable `$step_range`, the range of panels whose metrics change once per step."""
    variable = dashboard.IntervalVariable(STEPS.removeprefix("$")).label("Range of panels per step")
    chosen = models.VariableOption(selected=True, text=DEFAULT_RANGE, value=DEFAULT_RANGE)
    return variable.values(RANGES).current(chosen)


def _to_the_others() -> dashboard.DashboardLink:
    """Returns links to the other dashboards, which keep the chosen run and time."""
    link = dashboard.DashboardLink("asyncrl").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(False).include_vars(True).keep_time(True)


def _values(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Returns a variable whose values are the answer to a query."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def rules() -> str:
    """Returns the rules of deploy/prometheus/rules as one PrometheusRule of the Prometheus operator."""
    files = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "asyncrl"},
        "spec": {"groups": groups},
    }
    header = "# `python dashboards/build.py` writes this file from deploy/prometheus/rules.\n"
    return header + yaml.safe_dump(rule, sort_keys=False, allow_unicode=True, width=120)


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or 1 when `--check` finds a file out of date."""
    check, stale = arguments == ["--check"], []
    files = {FOLDER / f"{name}.json": board(module) for name, module in BOARDS.items()}
    files[DEPLOY / "kuberay" / "monitoring" / "rules.yaml"] = rules()
    for path, text in files.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path))
    if stale:
        print(f"out of date: {', '.join(stale)}; run `python dashboards/build.py`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
