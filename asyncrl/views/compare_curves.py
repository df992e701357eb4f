"""Makes the charts of `asyncrl compare`: a line for each run, or for each group of runs with a band around their mean.

Each curve is drawn three times: over steps, which compares how much a step teaches, over trained tokens, and over time,
which compares how much an hour teaches.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from asyncrl.config.schema import HELDOUT
from asyncrl.metrics.numbers import NUMBERS, Chart
from asyncrl.views.charts import STEP, Series, line_chart
from asyncrl.views.compared_runs import Compared, Group
from asyncrl.views.report_panels import (
    CURVE_POINTS,
    SHARE_POINTS,
    Steps,
    bins_of,
    mean_of,
    smooth,
    trained_per_second,
    windows_of,
)
from asyncrl.views.report_staleness import clock_of, mean_age
from asyncrl.views.seed_statistics import estimate


class Axis(Enum):
    """The quantity over which curves are drawn."""

    STEP = "step"
    TOKENS = "tokens"
    TIME = "time"


class Point(NamedTuple):
    """A point of a curve: the step, the number of trained tokens, the seconds since the start of the run, and the
    value. `tokens` is None if the number is not known."""

    step: float
    tokens: float | None
    wall_s: float
    value: float | None


Points = Callable[[Compared], Sequence[Point]]
"""A function that returns the points of one curve of a run."""
Curve = Sequence[tuple[float, float]]
"""The known points of a curve: pairs (place on the x axis, value), in the order of the places, each place once."""


class Figure(NamedTuple):
    """A chart: its title and unit (`chart`), its lines, the name of its x axis, and its SVG."""

    chart: Chart
    lines: Sequence[Series]
    x_name: str
    markup: str


def curves(groups: Sequence[Group], axis: Axis) -> Iterator[Figure]:
    """Yields the charts with a line for each group over the quantity `axis`."""
    runs = [run for group in groups for run in group.runs]
    unit_s, clock = clock_of(max(run.records.steps[-1].wall_s for run in runs))
    x_name = {Axis.STEP: STEP, Axis.TOKENS: "trained tokens", Axis.TIME: clock}[axis]

    def place(point: Point) -> float | None:
        return {Axis.STEP: point.step, Axis.TOKENS: point.tokens, Axis.TIME: point.wall_s / unit_s}[axis]

    sets = dict.fromkeys([HELDOUT, *(record.name for run in runs for record in run.records.evals)])
    heldout: list[tuple[Chart, Points]] = [
        (Chart(f"Held-out reward{of_set(name)}"), partial(_heldout, name=name)) for name in sets
    ]
    for chart, points_of in (*CURVES[:1], *heldout, *CURVES[1:]):
        lines = [line for group in groups if (line := _line_of(group, points_of, place)) is not None]
        if lines:
            drawn = line_chart(chart.title, [], lines, unit=chart.unit, include=chart.include, x_name=x_name)
            yield Figure(chart, lines, x_name, drawn)


def _line_of(group: Group, points_of: Points, place: Callable[[Point], float | None]) -> Series | None:
    """Returns the line of a group; None if it has no points. The line of several runs is the mean of those that have
    points, with its t-interval as a band, over the part of the axis where all of these have values."""
    points = [[(place(point), point.value) for point in points_of(run)] for run in group.runs]
    draw = partial(Series, name=group.label, color=group.color, dash=group.dash)
    if len(points) == 1:
        known = [(x, value) for x, value in points[0] if x is not None]
        return draw(xs=[x for x, _ in known], ys=[value for _, value in known]) if known else None
    found = [curve for each in points if (curve := _known(each))]
    if not found:
        return None
    xs = common_places(found)
    means = [estimate([value_at(curve, x) for curve in found]) for x in xs]
    return (
        draw(
            xs=xs,
            ys=[mean.mean if mean else None for mean in means],
            band=[
                (mean.low, mean.high) if mean and mean.low is not None and mean.high is not None else None
                for mean in means
            ],
        )
        if xs
        else None
    )


def _known(points: Sequence[tuple[float | None, float | None]]) -> Curve:
    known = {x: y for x, y in points if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)}
    return sorted(known.items())


def common_places(found: Sequence[Curve]) -> list[float]:
    """Returns the x coordinates of the points of all curves, in the range that all curves cover; if there are many, at
    most `CURVE_POINTS` of them. Outside of this range, the mean would jump where a run begins or ends."""
    first, last = max(curve[0][0] for curve in found), min(curve[-1][0] for curve in found)
    places = sorted({x for curve in found for x, _ in curve if first <= x <= last})
    return places[:: -(len(places) // CURVE_POINTS + 1)][::-1]


def value_at(curve: Curve, x: float) -> float:
    """Returns the value of a curve at a place between its ends, on the straight line between two points.

    >>> value_at([(0, 1.0), (10, 2.0)], 5)
    1.5
    """
    index = bisect_left(curve, x, key=lambda point: point[0])
    right, high = curve[index]
    if right == x:
        return high
    left, low = curve[index - 1]
    return low + (high - low) * ((x - left) / (right - left))


def _per_step(run: Compared, *, read: Callable[[Steps], float | None], smoothed: bool = False) -> Sequence[Point]:
    """Returns means over bins of steps, each at the last step of its bin."""
    bins = bins_of(run.records.steps, CURVE_POINTS)
    values = [read(chunk) for chunk in bins]
    return _at_ends(run, bins, smooth(values) if smoothed else values)


def _speed(run: Compared, *, what: str) -> Sequence[Point]:
    """Returns the trained samples or tokens (`what`) per second in each window of steps, at the window's last step."""
    windows, read = windows_of(run.records.steps, SHARE_POINTS), trained_per_second(what)
    return _at_ends(run, windows, [read(window) for window in windows])


def _at_ends(run: Compared, chunks: Sequence[Steps], values: Sequence[float | None]) -> Sequence[Point]:
    ends = [chunk[-1] for chunk in chunks]
    return [
        Point(end.step, run.tokens_at[end.version_after], end.wall_s, value)
        for end, value in zip(ends, values, strict=True)
    ]


def _heldout(run: Compared, *, name: str) -> Sequence[Point]:
    return [
        Point(record.version, run.tokens_at.get(record.version), record.wall_s, record.reward_mean)
        for record in run.records.evals
        if record.name == name
    ]


def of_set(name: str) -> str:
    """Returns the end of a title that names a held-out set; empty for the set `heldout`, which every run has."""
    return "" if name == HELDOUT else f": {name}"


def _as_in_report(name: str) -> tuple[Chart, Points]:
    """Returns the curve of a number, in the chart that it has in the report."""
    chart = next(number.line.chart for number in NUMBERS if number.name == name and number.line is not None)
    return chart, partial(_per_step, read=mean_of(name))


CURVES: Sequence[tuple[Chart, Points]] = (
    (Chart("Reward", "mean of a step"), partial(_per_step, read=mean_of("reward_mean"), smoothed=True)),
    (Chart("Trained samples", "per second", (0,)), partial(_speed, what="samples")),
    (Chart("Trained tokens", "per second", (0,)), partial(_speed, what="tokens")),
    (Chart("Age of trained tokens", "versions, mean", (0,)), partial(_per_step, read=mean_age)),
    _as_in_report("ess_ratio"),
    _as_in_report("entropy_nats"),
)
"""The curves of every run, in the order of their charts. The charts of held-out rewards come after the first one."""
