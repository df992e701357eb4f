"""Makes charts as inline SVG: lines, stacked shares over steps, and bars by version. Pure functions.

The functions compute coordinates in SVG units, and `chart.html.j2` has the markup. Colours are CSS variables of the
page (`report.css`). Light mode, dark mode and print therefore need no code here. A chart of lines or shares contains
its numbers as JSON for the script of the page, which shows them under the pointer. Without the script, the chart is
complete but does not show these numbers.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from asyncrl.views.page_templates import TEMPLATES
from asyncrl.views.quantities import number

WIDTH, HEIGHT = 380, 210
STEP = "step"
LEFT, RIGHT, TOP, BOTTOM = 54, 16, 12, 30
"""Margins in SVG units, with room for labels. The left margin is wide enough for a label such as -1.25e-4."""
# The script of the page (`charts.js`) reads the margins from the page.
TEMPLATES.globals["margins"] = f"{LEFT} {RIGHT} {TOP} {BOTTOM}"

AGE_COLORS = tuple(f"age-{index}" for index in range(7))
"""Colours by age, from the lowest staleness to the highest."""

DASHES = 3
"""Number of dash patterns besides the solid line."""

LARGEST = 1e300
"""Values of this size or more are not drawn, because the difference of two of them can overflow."""

MOST_VERSIONS = 300
"""Largest number of bars of one kind in a chart by version. A chart is too narrow for more, and a damaged record may
have any number of versions."""

LIMIT_LABEL_WIDTH = 48
VALUE_LABEL_WIDTH = 27
"""Widths, in SVG units, of the labels `limit 12` (beside the bars) and `100%` (above a bar)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One named line. `ys` has one entry per x; None and NaN leave a gap. `faint` lines are drawn behind the others and
    are not in the legend; `dots` draws the points without a line.

    `xs` are the line's own places on the x axis, in ascending order. None: those of the chart. `band` has the lowest
    and the highest value of an area around the line for each x; None leaves a gap. `dash` is the pattern of the line,
    which distinguishes lines of one colour: 0 is solid, up to `DASHES` are patterns of `report.css`.
    """

    name: str
    ys: Sequence[float | None]
    color: str
    style: Literal["line", "faint", "dots"] = "line"
    xs: Sequence[float] | None = None
    band: Sequence[tuple[float, float] | None] = ()
    dash: int = 0


class LegendEntry(NamedTuple):
    """A name in the legend of a chart, with the colour and the dash pattern of its line."""

    name: str
    color: str
    dash: int = 0


class Mark(NamedTuple):
    """A vertical line at a place on the x axis. `label` is its title under the pointer."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps data to SVG units on one axis. A `log` scale takes only values above 0."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        place = math.log10(value) if self.log else value
        return self.start + (place - low) / (high - low) * (self.end - self.start)


def line_chart(
    title: str,
    xs: Sequence[float],
    series: Sequence[Series],
    *,
    unit: str = "",
    include: Sequence[float] = (),
    log: bool = False,
    limit: tuple[str, float] | None = None,
    x_name: str = STEP,
    marks: Sequence[Mark] = (),
) -> Markup:
    """Returns a chart with lines over steps, or over the quantity `x_name`. `xs` are the places of the lines that have
    no places of their own. A single line needs no legend, unless it has places of its own: other charts of the page
    then have other lines too.

    The y axis covers all values of `include`. `limit` is the label and value of a horizontal line. `marks` beyond the x
    axis are not drawn. A `log` axis cannot show 0, so 0 is drawn at the bottom, a power of ten below the smallest other
    value.
    """
    drawn = [drawable(one.ys, log=log) for one in series]
    values = [y for ys in drawn for y in ys if y is not None]
    values += band_edges(series, values)
    if limit is not None:
        values.append(limit[1])
    places = [xs if one.xs is None else one.xs for one in series]
    everywhere = sorted({at for own in places for at in own})
    if not everywhere or not values:
        return _figure(title, unit, empty="nothing recorded")
    low, high, ticks = _y_axis([*values, *include], log=log)
    has_zero = log and 0 in values
    drawn = [[low if log and y == 0 else y for y in ys] for ys in drawn]
    x, y = _x_scale(everywhere), _Scale(low, high, HEIGHT - BOTTOM, TOP, log)
    legend = [LegendEntry(one.name, one.color, one.dash) for one in series if one.style != "faint"]
    faint_first = sorted(zip(series, places, drawn, strict=True), key=lambda each: each[0].style != "faint")
    return _figure(
        title,
        unit,
        y_ticks=[(y(tick), number(0 if has_zero and tick == low else tick)) for tick in ticks],
        x_ticks=_x_ticks(x, x_name=x_name),
        x_name=x_name,
        level=None if limit is None else (limit[0], y(limit[1])),
        marks=_marks(marks, x),
        bands=[(_band(one, own, x, y), one.color) for one, own in zip(series, places, strict=True) if one.band],
        lines=[
            _line(one, [(x(at), y(value) if value is not None else None) for at, value in zip(own, ys, strict=True)])
            for one, own, ys in faint_first
        ],
        legend=legend if len(legend) > 1 or any(one.xs is not None for one in series) else [],
        numbers=_numbers(xs, series, x_name=x_name),
    )


def share_chart(
    title: str,
    xs: Sequence[float],
    shares: Sequence[Mapping[str, float]],
    *,
    colors: Mapping[str, str],
    unit: str,
    marks: Sequence[Mark] = (),
) -> Markup:
    """Returns a chart with stacked shares over steps. `shares` has one mapping from state to share per x. `colors` has
    the drawn states, the lowest first, and their colours. `marks` are vertical lines; those beyond the x axis are not
    drawn.

    States whose share is always 0 are left out.
    """
    states = [state for state in colors if any(share.get(state, 0) > 0 for share in shares)]
    if not states:
        return _figure(title, "", empty="nothing recorded")
    x, y = _x_scale(xs), _Scale(0, 1, HEIGHT - BOTTOM, TOP)
    places = [x(at) for at in xs] if len(xs) > 1 else [LEFT, WIDTH - RIGHT]
    rows = list(shares) if len(xs) > 1 else [shares[0], shares[0]]
    floor = [0.0] * len(places)
    areas = []
    for state in states:
        ceiling = [base + row.get(state, 0.0) for base, row in zip(floor, rows, strict=True)]
        outline = [(at, y(top)) for at, top in zip(places, ceiling, strict=True)]
        outline += [(at, y(base)) for at, base in reversed(list(zip(places, floor, strict=True)))]
        areas.append((_join(outline), colors[state]))
        floor = ceiling
    series = [
        Series(name=state.replace("_", " "), ys=[row.get(state, 0.0) for row in shares], color=colors[state])
        for state in states
    ]
    return _figure(
        title,
        unit,
        areas=areas,
        marks=_marks(marks, x),
        y_ticks=_share_ticks(y),
        x_ticks=_x_ticks(x, x_name=STEP),
        x_name=STEP,
        legend=[LegendEntry(one.name, one.color) for one in series],
        numbers=_numbers(xs, series, x_name=STEP, percent=True),
    )


def version_bars(title: str, counts: Sequence[tuple[str, str, Mapping[int, int]]], *, limit: int | None) -> Markup:
    """Returns a chart with bars side by side: the share of each number of versions.

    `counts` has (name, colour, {versions: count}) for each kind of bar. `limit` is the staleness limit η, which is
    drawn as a line if it is below `MOST_VERSIONS`; None draws no line. The last of `MOST_VERSIONS` bars stands for all
    larger numbers too.
    """
    counts = [(name, color, _within(histogram)) for name, color, histogram in counts]
    totals = [sum(histogram.values()) for _, _, histogram in counts]
    if not any(totals):
        return _figure(title, "", empty="nothing trained")
    last = max(0, *(max(histogram, default=0) for _, _, histogram in counts))
    if limit is not None and limit < MOST_VERSIONS:
        last = max(last, limit)
    else:
        limit = None
    slot = (WIDTH - LEFT - RIGHT - LIMIT_LABEL_WIDTH) / (last + 1)
    width = slot * 0.84 / len(counts)
    y = _Scale(0, 1, HEIGHT - BOTTOM, TOP)
    lefts = [LEFT + slot * (versions + 0.08) for versions in range(last + 1)]
    bars = []
    for versions, left in enumerate(lefts):
        for index, (name, color, histogram) in enumerate(counts):
            share = histogram.get(versions, 0) / max(1, totals[index])
            label = _percent(share) if share > 0 and width > VALUE_LABEL_WIDTH else ""
            tip = f"{name}, {versions} versions: {share:.1%}"
            bar = {"x": left + index * width, "y": y(share), "width": width}
            bars.append(bar | {"color": color, "tip": tip, "label": label})
    every = max(1, math.ceil((last + 1) / 12))
    return _figure(
        title,
        "share",
        y_ticks=_share_ticks(y),
        x_ticks=[(left + slot * 0.42, str(versions)) for versions, left in enumerate(lefts)][::every],
        x_name="versions",
        bars=bars,
        border=None if limit is None else (f"limit {limit}", LEFT + slot * (limit + 1)),
        legend=[LegendEntry(name, color) for name, color, _ in counts],
    )


def _within(histogram: Mapping[int, int]) -> Mapping[int, int]:
    """Returns a histogram whose numbers of versions are from 0 to `MOST_VERSIONS` - 1. Counts of smaller and larger
    numbers are added to the nearest of these."""
    if all(0 <= versions < MOST_VERSIONS for versions in histogram):
        return histogram
    within: dict[int, int] = {}
    for versions, count in histogram.items():
        nearest = min(max(versions, 0), MOST_VERSIONS - 1)
        within[nearest] = within.get(nearest, 0) + count
    return within


def nice_ticks(low: float, high: float, *, about: int = 4) -> list[float]:
    """Returns evenly spaced round numbers that cover the range from `low` to `high`, with about `about` intervals.

    >>> nice_ticks(0.0, 0.93)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    >>> nice_ticks(3, 187)
    [0.0, 50.0, 100.0, 150.0, 200.0]
    """
    size = max(abs(low), abs(high))
    # Means of equal numbers can differ by rounding in their last digits. Such a difference is not a range to draw.
    span = high - low if high - low > 1e-6 * size else size or 1.0
    raw = span / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    # The factors 0.999 and 1e-9 are tolerances: rounding must not add a tick or choose a larger step.
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def drawable(ys: Sequence[float | None], *, log: bool = False) -> list[float | None]:
    """Returns the values with None in place of those that cannot be drawn: NaN, values as large as `LARGEST`, and with
    `log` negative values."""
    drawable = [y if y is not None and abs(y) < LARGEST and (y >= 0 or not log) else None for y in ys]
    if not log:
        return drawable
    # Denormal numbers become 0, because the power of ten below them would be 0.
    return [0.0 if y is not None and y < sys.float_info.min else y for y in drawable]


def _y_axis(values: Sequence[float], *, log: bool) -> tuple[float, float, list[float]]:
    low, high = min(values), max(values)
    if log:
        positive = [value for value in values if value > 0] or [1.0]
        first, last = math.floor(math.log10(min(positive))) - (low == 0), math.ceil(math.log10(max(positive)))
        last = max(last, first + 1)
        every = max(1, math.ceil((last - first) / 5))
        return 10.0**first, 10.0**last, [10.0**power for power in range(first, last + 1, every)]
    ticks = nice_ticks(low, high)
    return ticks[0], ticks[-1], ticks


def _marks(marks: Sequence[Mark], x: _Scale) -> list[tuple[float, str]]:
    """Returns the place and the label of each mark that is on the axis."""
    return [(x(mark.at), mark.label) for mark in marks if x.low <= mark.at <= x.high]


def _x_scale(xs: Sequence[float]) -> _Scale:
    return _Scale(xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1, LEFT, WIDTH - RIGHT)


def _x_ticks(x: _Scale, *, x_name: str) -> list[tuple[float, str]]:
    ticks = [tick for tick in nice_ticks(x.low, x.high) if x.low <= tick <= x.high]
    return [(x(tick), number(tick)) for tick in ticks if x_name != STEP or tick == int(tick)]


def _share_ticks(y: _Scale) -> list[tuple[float, str]]:
    return [(y(tick), _percent(tick)) for tick in (0, 0.25, 0.5, 0.75, 1)]


def _percent(share: float) -> str:
    return f"{share:.0%}"


def band_edges(series: Sequence[Series], values: Sequence[float]) -> list[float]:
    """Returns the edges of all bands. An edge beyond the lines' `values` by more than their range is moved to this
    distance: the interval of two runs is about ten times as wide as the distance of the runs, so with all of it the
    curves would look flat."""
    edges = [edge for one in series for interval in one.band if interval is not None for edge in interval]
    edges = [edge for edge in edges if abs(edge) < LARGEST]
    if not values or not edges:
        return edges
    low, high = min(values), max(values)
    room = high - low if high > low else math.inf
    return [min(max(edge, low - room), high + room) for edge in edges]


def _band(one: Series, places: Sequence[float], x: _Scale, y: _Scale) -> str:
    """Returns the path of the area around a line. Edges beyond the axis are drawn at its end."""
    parts: list[list[tuple[float, tuple[float, float]]]] = [[]]
    for at, interval in zip(places, one.band, strict=True):
        if interval is None:
            parts.append([])
        else:
            low, high = (y(min(max(edge, y.low), y.high)) for edge in interval)
            parts[-1].append((x(at), (low, high)))
    outlines = [
        [(at, low) for at, (low, _) in part] + [(at, high) for at, (_, high) in reversed(part)]
        for part in parts
        if len(part) > 1
    ]
    return "".join("M" + _join(outline).replace(" ", "L") + "Z" for outline in outlines)


def _line(one: Series, points: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    """Returns a line with a break at each gap. A single point between two gaps becomes a dot, like all points of the
    style `dots`."""
    runs: list[list[tuple[float, float]]] = [[]]
    for at, place in points:
        if place is None or one.style == "dots":
            runs.append([])
        if place is not None:
            runs[-1].append((at, place))
    return {
        "style": f"{one.style} dash-{one.dash}" if one.dash else one.style,
        "color": one.color,
        "path": "".join("M" + _join(run).replace(" ", "L") for run in runs if len(run) > 1),
        "dots": [run[0] for run in runs if len(run) == 1],
    }


def _join(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _numbers(xs: Sequence[float], series: Sequence[Series], *, x_name: str, percent: bool = False) -> dict[str, Any]:
    """Returns the numbers for the page's script, rounded to the four digits that it shows."""

    def rounded(places: Sequence[float]) -> list[float | None]:
        return [_four_digits(at) for at in places] if x_name != STEP else list(places)

    return {
        "x": x_name,
        "xs": rounded(xs),
        "percent": percent,
        "series": [
            {"name": one.name, "color": one.color, "ys": [_four_digits(y) for y in drawable(one.ys, log=False)]}
            | ({} if one.xs is None else {"xs": rounded(one.xs)})
            for one in series
        ],
    }


def _four_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _figure(title: str, unit: str, **parts: Any) -> Markup:
    """Returns the chart with these parts of `chart.html.j2`. A chart with the part `empty` shows only this text."""
    frame = {"left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM}
    lists = dict.fromkeys(("areas", "bands", "bars", "lines", "legend", "marks"), ())
    others = dict.fromkeys(("empty", "level", "border", "numbers"))
    values = {"title": title, "unit": unit, "width": WIDTH, "height": HEIGHT, **frame, **lists, **others, **parts}
    return Markup(TEMPLATES.get_template("chart.html.j2").render(values))
