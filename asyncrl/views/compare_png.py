"""Draws the charts of `asyncrl compare` as a PNG image, by matplotlib, which has its own fonts.

The colours and the dash patterns of the lines are those of the page in light mode.
"""

import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from asyncrl.views.charts import band_edges, drawable, nice_ticks
from asyncrl.views.compare_curves import EVERYTHING, Choice, curves
from asyncrl.views.compare_curves import Figure as Drawn
from asyncrl.views.compared_runs import Group

CHART_INCHES = (4.2, 2.6)
"""Width and height of a chart."""
DOTS_PER_INCH = 150
DASHES: Sequence[Any] = ("solid", (0, (7, 3)), (0, (2, 3)), (0, (9, 3, 2, 3)))
"""Line styles of matplotlib, by the number of the dash pattern."""
LINE_WIDTH = 1.4
BAND_OPACITY = 0.18
PLAIN: dict[str, Any] = {"parse_math": False}
"""Options of a text. A run's name may contain dollar signs, which matplotlib would read as a formula."""


def compare_png(groups: Sequence[Group], choice: Choice = EVERYTHING, *, colors: Mapping[str, str]) -> bytes:
    """Returns a PNG image with the charts of the page on white ground: a row for each number, and a column for each of
    the quantities on the x axis. `colors` has the colours (#rrggbb) by their names."""
    columns = [list(curves(groups, axis, choice.names)) for axis in choice.axes]
    rows = list(zip_longest(*columns))
    width, height = CHART_INCHES
    image = Figure((width * len(columns), height * len(rows) + 0.25 * len(groups)), DOTS_PER_INCH, layout="constrained")
    places = image.subplots(len(rows), len(columns), squeeze=False)
    for of_row, figures in zip(places, rows, strict=True):
        for place, figure in zip(of_row, figures, strict=True):
            if figure is None:
                place.remove()
            else:
                _draw(place, figure, colors)
    drawn = [Line2D([], [], color=colors[group.color], linestyle=DASHES[group.dash]) for group in groups]
    legend = image.legend(drawn, [group.label for group in groups], loc="outside lower left", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # matplotlib warns of characters without a glyph, and draws boxes
        image.savefig(file, format="png")
    return file.getvalue()


def _draw(place: Axes, figure: Drawn, colors: Mapping[str, str]) -> None:
    chart, all_ys = figure.chart, [drawable(line.ys) for line in figure.lines]
    place.set_title(f"{chart.title} ({chart.unit})" if chart.unit else chart.title, loc="left", fontsize=9, **PLAIN)
    place.set_xlabel(figure.x_name, fontsize=8)
    place.tick_params(labelsize=8)
    place.spines[["top", "right"]].set_visible(False)
    for line, ys in zip(figure.lines, all_ys, strict=True):
        color, xs = colors[line.color], list(line.xs or ())
        point = "." if len(xs) == 1 else None
        place.plot(
            xs, _floats(ys), color=color, linestyle=DASHES[line.dash], linewidth=LINE_WIDTH, marker=point, clip_on=False
        )
        if line.band:
            low, high = zip(*(edge or (None, None) for edge in line.band), strict=True)
            place.fill_between(xs, _floats(low), _floats(high), color=color, alpha=BAND_OPACITY, linewidth=0)
    if values := [y for ys in all_ys for y in ys if y is not None]:
        values += [*band_edges(figure.lines, values), *chart.include]
        ticks = nice_ticks(min(values), max(values))  # the y axis of the page, which cuts a wide band
        place.set_ylim(ticks[0], ticks[-1])


def _floats(values: Iterable[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
