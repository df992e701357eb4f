"""What the three dashboards are made of: number, line and heat-map panels, and the queries that recur in them.

Every panel is described and has a unit. Filters: `$run` is one run; `$replica` chooses generators, and only the queries
of generators look at it. A Ray whose nodes Prometheus finds by itself, as on Kubernetes, knows of no run and is shown
with each. A query's range is `$__rate_interval`, so that it fits the data source's scrape interval; of
what moves once a step it is `$step_range`, which the reader chooses: a shorter one than a step would show gaps.
"""

from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models

RUN = 'run="$run"'
REPLICA = 'run="$run", replica=~"$replica"'
RAY = 'run=~"$run|"'
OFTEN, STEPS = "$__rate_interval", "$step_range"
DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

STATE_COLOURS = {
    "starting": "#b8b8b8",
    "generating": "green",
    "forward_backward": "green",
    "optimizer": "blue",
    "log_probs": "super-light-blue",
    "publish": "purple",
    "paused_for_weights": "purple",
    "checkpoint": "dark-purple",
    "waiting_for_groups": "yellow",
    "blocked_on_staleness": "yellow",
    "blocked_on_capacity": "red",
    "starved_of_prompts": "orange",
    "idle": "#808080",
    "other": "#808080",
    "nobody_waits": "green",
    "learner_waits": "yellow",
    "generators_wait": "blue",
    "both_wait": "orange",
}
"""Those of `asyncrl up`: green works, yellow waits for the other side, red is short of room."""

HEALTHY, DOUBTFUL, BAD = "green", "yellow", "red"
BAD_NEWS = "/( down|^silent)$/"
"""Names of numbers that are red whatever they are."""


class Query(NamedTuple):
    """PromQL, and the name of its lines: text with `{{label}}`."""

    expr: str
    legend: str


Thresholds = list[tuple[float | None, str]]
"""From which value on a number has a colour; the first is None, from the lowest on."""


def number(
    title: str, description: str, *queries: Query, unit: str, thresholds: Thresholds, span: int = 4
) -> stat.Panel:
    """The value of this moment: of a run that has ended there is none."""
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
    """Lines over time. `shares` add up to 1 and are stacked; with `zero` the axis begins there."""
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
        for state, colour in STATE_COLOURS.items():
            panel.override_by_name(state, [_fixed_colour(colour)])
    return panel.targets(_targets(queries))


def heat(
    title: str, description: str, histogram: str, filters: str, *, unit: str, span: int = 8, over: str = OFTEN
) -> heatmap.Panel:
    """How many values fell into each bucket of a histogram, over time."""
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
    """A gauge. One line, and one a value of `by`, over the processes that a run of this name has had one after the
    other: each start has a port, and so series, of its own."""
    return f"max{f' by ({by})' if by else ''} ({gauge}{{{filters}}})"


def rate(counter: str, filters: str, *, by: str = "", over: str = OFTEN) -> str:
    """A counter's pace, a second, added up over processes."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}{{{filters}}}[{over}]))"


def mean(histogram: str, filters: str, *, by: str = "") -> str:
    """The mean of what a histogram of steps or of weights saw lately."""
    total, count = (rate(f"{histogram}_{part}", filters, by=by, over=STEPS) for part in ("sum", "count"))
    return f"{total} / {count}"


def quantiles(histogram: str, filters: str, *, name: str = "", over: str = OFTEN) -> list[Query]:
    """The median and the 95th percentile of what a histogram saw lately."""
    buckets = rate(f"{histogram}_bucket", filters, by="le", over=over)
    return [
        Query(f"histogram_quantile({quantile}, {buckets})", f"{name} {legend}".strip())
        for quantile, legend in ((0.5, "median"), (0.95, "95th percentile"))
    ]


def state_shares(counter: str, filters: str) -> str:
    """Of all processes' time, the share of each state."""
    return f"{rate(counter, filters, by='state')} / on () group_left () {rate(counter, filters)}"


def _fixed_colour(colour: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})


def _targets(queries: tuple[Query, ...]) -> list[prometheus.Dataquery]:
    return [_target(query, chr(ord("A") + i)) for i, query in enumerate(queries)]


def _target(query: Query, ref: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref).range().datasource(DATASOURCE)
    )
