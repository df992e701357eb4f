"""The parts of the three dashboards: number, line and heat-map panels, and the queries that they share.

Every panel has a description and a unit.

Filters: `$run` is one run. `$replica` selects generators and filters only the queries on generators. On Kubernetes,
Prometheus finds Ray's nodes without a run's list, so their series have no label `run`; they are shown with every run.

Ranges: the range of a query is `$__rate_interval`, which fits the scrape interval of the data source. Metrics that
change once per step use `$step_range`, which the reader chooses: a range shorter than a step would show gaps.
"""

from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models

from asyncrl.metrics.numbers import GAUGES, panels
from asyncrl.metrics.state_colors import STATES

RUN = 'run="$run"'
REPLICA = 'run="$run", replica=~"$replica"'
RAY = 'run=~"$run|"'
OFTEN, STEPS = "$__rate_interval", "$step_range"
DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

HEALTHY, DOUBTFUL, BAD = "green", "yellow", "red"
BAD_NEWS = "/( down|^silent)$/"
"""Matches names of numbers that are always red, whatever their value."""


class Query(NamedTuple):
    """A PromQL expression, and the legend of its lines, which may contain `{{label}}`."""

    expr: str
    legend: str


Thresholds = list[tuple[float | None, str]]
"""Pairs (lowest value, colour) of a number panel. The first value is None and stands for all lower values."""


def number(
    title: str, description: str, *queries: Query, unit: str, thresholds: Thresholds, span: int = 4
) -> stat.Panel:
    """Returns a panel with the present value of each query. A run that has ended has no present value."""
    steps = [models.Threshold(value=value, color=colour) for value, colour in thresholds]
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(4)
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(options.BigValueGraphMode.NONE)
        .color_mode(options.BigValueColorMode.VALUE)
        .no_value("–")
        .override_by_regexp(BAD_NEWS, [_fixed_colour(BAD)])
    )
    return panel.targets([target.instant() for target in _targets(queries)])


def lines(
    title: str, description: str, *queries: Query, unit: str, span: int = 8, shares: bool = False, zero: bool = True
) -> timeseries.Panel:
    """Returns a panel with lines over time. `shares` are stacked and add up to 1. With `zero` the axis starts at 0."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .legend(
            common.VizLegendOptions()
            .display_mode(options.LegendDisplayMode.LIST)
            .placement(options.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI))
        .line_width(1)
        .fill_opacity(60 if shares else 5)
        .show_points(options.VisibilityMode.NEVER)
    )
    if zero:
        panel.axis_soft_min(0)
    if shares:
        panel.min(0).max(1)
        panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL).group("A"))
        for state, colour in STATES.items():
            panel.override_by_name(state, [_fixed_colour(colour.grafana)])
    return panel.targets(_targets(queries))


def declared(row: str) -> list[timeseries.Panel]:
    """Returns the panels of the numbers of a step that `asyncrl.metrics.numbers` declares for a row."""
    return [
        lines(
            panel.title,
            panel.description or shown[0][0].help,
            *(Query(now(GAUGES[number.name], RUN), legend) for number, legend in shown),
            unit=panel.unit,
        )
        for panel, shown in panels(row).items()
    ]


def heat(
    title: str, description: str, histogram: str, filters: str, *, unit: str, span: int = 8, over: str = OFTEN
) -> heatmap.Panel:
    """Returns a heat map: the number of values in each bucket of a histogram, over time."""
    expr = f"sum by (le) (increase({histogram}_bucket{{{filters}}}[{over}]))"
    query = _target(Query(expr, "{{le}}"), "A").format("heatmap")
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(8)
        .unit(unit)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().scheme("Viridis").steps(32))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .with_target(query)
    )


def now(gauge: str, filters: str, *, by: str = "") -> str:
    """Returns the query of a gauge: one line, or one line per value of the label `by`.

    `max` joins the series of all processes that a run of this name had one after the other. Each start has another
    port, and therefore other series.
    """
    return f"max{f' by ({by})' if by else ''} ({gauge}{{{filters}}})"


def rate(counter: str, filters: str, *, by: str = "", over: str = OFTEN) -> str:
    """Returns the query of a counter's rate per second, summed over processes."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}{{{filters}}}[{over}]))"


def of_gpus(metric: str) -> str:
    """Returns a metric of NVIDIA's DCGM exporter for each GPU of the nodes of the run's Ray.

    The exporter knows no run. The label `node` of Ray's metrics is the name of the host, which is the exporter's label
    `Hostname`, or on Kubernetes the name of the pod that has the GPU, which is its label `pod`."""
    nodes = f"on (node) ray_object_store_memory{{{RAY}}}"
    parts = [
        f'max by (node, gpu) (label_replace({metric}{{{RAY}}}, "node", "$1", "{label}", "(.+)") and {nodes})'
        for label in ("Hostname", "pod")
    ]
    return " or ".join(parts)


def mean(histogram: str, filters: str, *, by: str = "") -> str:
    """Returns the query of the recent mean of a histogram that gets values once per step or per weight update."""
    total, count = (rate(f"{histogram}_{part}", filters, by=by, over=STEPS) for part in ("sum", "count"))
    return f"{total} / {count}"


def quantiles(histogram: str, filters: str, *, name: str = "", over: str = OFTEN) -> list[Query]:
    """Returns the queries of the recent median and 95th percentile of a histogram."""
    buckets = rate(f"{histogram}_bucket", filters, by="le", over=over)
    return [
        Query(f"histogram_quantile({quantile}, {buckets})", f"{name} {legend}".strip())
        for quantile, legend in ((0.5, "median"), (0.95, "95th percentile"))
    ]


def state_shares(counter: str, filters: str) -> str:
    """Returns the query of each state's share of the time of all processes."""
    return f"{rate(counter, filters, by='state')} / on () group_left () {rate(counter, filters)}"


def _fixed_colour(colour: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})


def _targets(queries: tuple[Query, ...]) -> list[prometheus.Dataquery]:
    return [_target(query, chr(ord("A") + i)) for i, query in enumerate(queries)]


def _target(query: Query, ref: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref).range().datasource(DATASOURCE)
    )
