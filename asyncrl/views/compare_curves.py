"""Makes the charts of `asyncrl compare`: a line for each run, or for each group of runs with a band around their mean.

Each curve is drawn three times: over steps, which compares how much a step teaches, over trained tokens, and over time,
which compares how much an hour teaches. The time begins with the end of the first step and has no restarts, as that of
`samples_per_s`: the first run of a sweep starts engines, and later ones may take these over.
"""

import difflib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from asyncrl.config.schema import HELDOUT
from asyncrl.errors import ConfigError
from asyncrl.learner.records import StepRecord, running_s
from asyncrl.metrics.numbers import NUMBERS, Chart, Number, tracker_name
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


class Axis(StrEnum):
    """The quantity over which curves are drawn."""

    STEP = "step"
    TOKENS = "tokens"
    TIME = "time"


class Choice(NamedTuple):
    """The charts that are drawn: the curves of `curves_of` with these names, over these quantities. Without names, all
    but those on request."""

    names: Sequence[str] = ()
    axes: Sequence[Axis] = tuple(Axis)


EVERYTHING = Choice()


class Point(NamedTuple):
    """A point of a curve: the step, the number of trained tokens, the seconds of training since the end of the first
    step, and the value. `tokens` is None if the number is not known."""

    step: float
    tokens: float | None
    running_s: float
    value: float | None


Points = Callable[[Compared], Sequence[Point]]
"""A function that returns the points of one curve of a run."""
Curve = Sequence[tuple[float, float]]
"""The known points of a curve: pairs (place on the x axis, value), in the order of the places, each place once."""


class Figure(NamedTuple):
    """A chart: its title and unit (`chart`), its lines, the name of its x axis, and its SVG. `without` are the labels
    of groups without a line, because no part of the x axis has values of all of their runs."""

    chart: Chart
    lines: Sequence[Series]
    x_name: str
    markup: str
    without: Sequence[str]


def curves(groups: Sequence[Group], axis: Axis, names: Sequence[str] = ()) -> Iterator[Figure]:
    """Yields the charts with a line for each group over the quantity `axis`: those of `names` (`check_names`), or all
    but those on request."""
    runs = [run for group in groups for run in group.runs]
    unit_s, clock = clock_of(max(running_s(run.records.steps) for run in runs))
    x_name = {Axis.STEP: STEP, Axis.TOKENS: "trained tokens", Axis.TIME: f"{clock} since the first step"}[axis]

    def place(point: Point) -> float | None:
        return {Axis.STEP: point.step, Axis.TOKENS: point.tokens, Axis.TIME: point.running_s / unit_s}[axis]

    for chart, points_of in _chosen(runs, names):
        of_groups = [_line_of(group, chart, points_of, place) for group in groups]
        lines = [line for line in of_groups if line is not None and line.xs]
        without = [line.name for line in of_groups if line is not None and not line.xs]
        if lines or without:
            drawn = line_chart(chart.title, [], lines, unit=chart.unit, include=chart.include, x_name=x_name)
            yield Figure(chart, lines, x_name, drawn, without)


def notes_on_curves(groups: Sequence[Group], choice: Choice = EVERYTHING) -> list[str]:
    """Returns warnings about groups without a line in a chart although their runs have values."""
    return [
        f"{figure.chart.title}, by {axis}: no line for {', '.join(figure.without)}, because no part of the x axis has "
        "values of all runs"
        for axis in choice.axes
        for figure in curves(groups, axis, choice.names)
        if figure.without
    ]


def check_names(runs: Sequence[Compared], names: Sequence[str]) -> None:
    """Raises ConfigError if no run has a curve with one of the names."""
    known = curves_of(runs)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"--chart {name}: no run has this number; {meant}They have {', '.join(known)}")


def _chosen(runs: Sequence[Compared], names: Sequence[str]) -> list[tuple[Chart, Points]]:
    known = curves_of(runs)
    return [known[name] for name in dict.fromkeys(names or (name for name in known if name not in _ON_REQUEST))]


def curves_of(runs: Sequence[Compared]) -> dict[str, tuple[Chart, Points]]:
    """Returns the curves of the runs by name, in the order of their charts: those of every run, with held-out rewards
    after the first one, the numbers that a user's own objective logs, and then the other numbers of a step."""
    sets = dict.fromkeys([HELDOUT, *(record.name for run in runs for record in run.records.evals)])
    heldout: dict[str, tuple[Chart, Points]] = {
        name if name == HELDOUT else f"{HELDOUT}.{name}": (
            Chart(f"Held-out reward{of_set(name)}"),
            partial(_heldout, name=name),
        )
        for name in sets
    }
    first, *others = CURVES
    logged = dict.fromkeys(name for run in runs for record in run.records.steps for name in record.diagnostics)
    own = [name for name in logged if name not in _RECORDED and tracker_name(name).startswith("diagnostics/")]
    found = {first: CURVES[first]} | heldout | {name: CURVES[name] for name in others}
    found |= {name: (Chart(name, "mean of a step"), partial(_per_step, read=mean_of(name))) for name in own}
    recorded = {*StepRecord.__struct_fields__, *logged}
    return found | {name: curve for name, curve in _ON_REQUEST.items() if name in recorded}


def _line_of(group: Group, chart: Chart, points_of: Points, place: Callable[[Point], float | None]) -> Series | None:
    """Returns the line of a group; None if it has no points. The line of several runs is the mean of those that have
    points, with its t-interval as a band, over the part of the axis where all of these have values; without points if
    there is no such part. The band has no values that the number of the chart cannot have."""
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
    return draw(
        xs=xs,
        ys=[mean.mean if mean else None for mean in means],
        band=[
            (max(mean.low, chart.least), min(mean.high, chart.most))
            if mean and mean.low is not None and mean.high is not None
            else None
            for mean in means
        ],
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
        Point(end.step, run.tokens_at[end.version_after], running_s(run.records.steps, end), value)
        for end, value in zip(ends, values, strict=True)
    ]


def _heldout(run: Compared, *, name: str) -> Sequence[Point]:
    return [
        Point(record.version, run.tokens_at.get(record.version), _running_at(run, record.wall_s), record.reward_mean)
        for record in run.records.evals
        if record.name == name
    ]


def _running_at(run: Compared, wall_s: float) -> float:
    """Returns the seconds of training until `wall_s` seconds after the start of the run; 0 before the first step's
    end."""
    steps = run.records.steps
    after = bisect_right(steps, wall_s, key=lambda record: record.wall_s)
    if after == 0:
        return 0.0
    last = steps[after - 1]
    at = running_s(steps, last) + wall_s - last.wall_s
    return min(at, running_s(steps, steps[after])) if after < len(steps) else at


def of_set(name: str) -> str:
    """Returns the end of a title that names a held-out set; empty for the set `heldout`, which every run has."""
    return "" if name == HELDOUT else f": {name}"


def _as_in_report(number: Number) -> tuple[Chart, Points]:
    """Returns the curve of a number, in a chart of its own with the axis that it has in the report."""
    chart = Chart(number.name, number.unit)
    if number.line is not None:
        of_report = number.line.chart
        alone = sum(other.line is not None and other.line.chart == of_report for other in NUMBERS) == 1
        chart = of_report if alone else replace(of_report, title=number.name)
    return chart, partial(_per_step, read=mean_of(number.name))


_RECORDED = {number.name: _as_in_report(number) for number in NUMBERS}
CURVES: Mapping[str, tuple[Chart, Points]] = {
    "reward_mean": (Chart("Reward", "mean of a step"), partial(_per_step, read=mean_of("reward_mean"), smoothed=True)),
    "samples_per_s": (Chart("Trained samples", "per second", (0,), least=0), partial(_speed, what="samples")),
    "tokens_per_s": (Chart("Trained tokens", "per second", (0,), least=0), partial(_speed, what="tokens")),
    "token_staleness": (
        Chart("Age of trained tokens", "versions, mean", (0,), least=0),
        partial(_per_step, read=mean_age),
    ),
    "ess_ratio": _RECORDED["ess_ratio"],
    "entropy_nats": _RECORDED["entropy_nats"],
}
"""The curves of every run by name, in the order of their charts. Those of held-out rewards come after the first one."""
_ON_REQUEST = {name: curve for name, curve in _RECORDED.items() if name not in CURVES}
"""The other numbers of a step, which are drawn if the user names them."""
