"""Makes the outputs of `asyncrl compare`: an HTML page, an SVG file with its charts, and tables for a terminal.

A run, or a group of runs that differ only in the settings of `--by`, keeps its colour in all charts.
"""

import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from asyncrl.atomic_write import write_atomically
from asyncrl.errors import RunError
from asyncrl.views.charts import HEIGHT, WIDTH
from asyncrl.views.compare_curves import EVERYTHING, Axis, Choice, Figure, curves, notes_on_curves
from asyncrl.views.compare_numbers import (
    DIFFERENCE_HEAD,
    all_runs,
    difference_rows,
    group_table,
    totals,
)
from asyncrl.views.compared_runs import RUN_COLORS, Group, Row, differences
from asyncrl.views.page_templates import TEMPLATES

SECTIONS = {
    Axis.STEP: ("By step", "How much a step teaches. Rewards are smoothed."),
    Axis.TOKENS: ("By trained tokens", "How much a token teaches."),
    Axis.TIME: (
        "By time",
        "How much an hour teaches. The time begins with the end of the first step, without the start of the run and of "
        "its engines, which a later run of a sweep may take over. The time of restarts is not counted either.",
    ),
}
"""The quantities on the x axis, each with the title and the text of its section."""
GAP, TITLE_HEIGHT, LEGEND_LINE = 24, 24, 18
"""Lengths in the SVG file, in SVG units: between charts, of a chart's title, and of a line of the legend."""

COLUMN_GAP, LONGEST_CELL = 2, 20
"""Numbers of characters in a terminal: between columns, and at most of a shown value of a setting, or of a group's
label if the terminal is narrow."""


def compare_html(groups: Sequence[Group], *, by: Sequence[str] = (), choice: Choice = EVERYTHING) -> str:
    """Returns the page as HTML. `by` are the settings by which the runs are grouped."""
    group_head, group_rows = group_table(groups)
    return TEMPLATES.get_template("compare.html.j2").render(
        groups=groups,
        runs=all_runs(groups),
        by=by,
        notes=notes_on(groups, choice, by=by),
        group_head=group_head,
        group_rows=group_rows,
        difference_head=DIFFERENCE_HEAD,
        difference_rows=difference_rows(groups) if by else [],
        totals=totals(all_runs(groups)),
        curves=[
            (*SECTIONS[axis], [figure.markup for figure in curves(groups, axis, choice.names)]) for axis in choice.axes
        ],
        setting_rows=settings_that_differ(groups, by=by),
    )


def notes_on(groups: Sequence[Group], choice: Choice, *, by: Sequence[str]) -> list[str]:
    """Returns warnings about groups whose runs do not fit together. `by` are the settings by which the runs are
    grouped."""
    merged = len(groups) == 1 and len(by) > 1  # with one setting, the mean over all runs is what the user asks for
    one_group = [f"all {len(all_runs(groups))} runs are one group, so no groups are compared; leave out a --by"]
    return [
        *(one_group if merged else []),
        *(group.note for group in groups if group.note),
        *notes_on_curves(groups, choice),
    ]


def settings_in_words(groups: Sequence[Group], *, by: Sequence[str]) -> list[str]:
    """Returns the lines of the terminal about settings: those that differ, and for what a label stands that does not
    show its settings in full."""
    between = ", ".join(row.name for row in settings_that_differ(groups, by=by)) or "none"
    stands_for = [
        f"{group.label}: {', '.join(group.settings) or group.runs[0].label}" for group in groups if not group.in_full
    ]
    if not by:
        return [f"settings that differ: {between}", *stands_for]
    within = dict.fromkeys(
        pair.partition("=")[0]
        for group in groups
        for run in group.runs
        for pair in run.seed
        if any(pair not in other.seed for other in group.runs)
    )
    return [
        f"settings that differ between groups: {between}; within groups: {', '.join(within) or 'none'}",
        *stands_for,
    ]


def settings_that_differ(groups: Sequence[Group], *, by: Sequence[str]) -> list[Row]:
    """Returns the settings besides those of `by` in which the groups differ, each with its value in each group."""
    return differences([group.runs[0].records.config for group in groups], but=by)


def compare_svg(groups: Sequence[Group], choice: Choice = EVERYTHING) -> str:
    """Returns an SVG file with the charts of the page on white ground: a row for each number, and a column for each of
    the quantities on the x axis. Its colours are those of the page in light mode, without variables of CSS, which many
    programs that draw SVG do not know."""
    columns = [list(curves(groups, axis, choice.names)) for axis in choice.axes]
    charts = [
        _placed(figure, x=GAP + column * (WIDTH + GAP), y=GAP + row * (HEIGHT + TITLE_HEIGHT + GAP) + TITLE_HEIGHT)
        for row, figures in enumerate(zip_longest(*columns))
        for column, figure in enumerate(figures)
        if figure is not None
    ]
    bottom = GAP + max(map(len, columns)) * (HEIGHT + TITLE_HEIGHT + GAP)
    legend = [
        (group.label, group.color, group.dash, bottom + (index + 1) * LEGEND_LINE) for index, group in enumerate(groups)
    ]
    css = _css()
    rules = "\n".join(line for line in css.splitlines() if re.match(r"\s*svg (text|\.)", line))
    drawn = TEMPLATES.get_template("compare.svg.j2").render(
        width=GAP + len(columns) * (WIDTH + GAP),
        height=bottom + (len(groups) + 1) * LEGEND_LINE,
        style=Markup(f"{rules} svg .title {{ font-size: 13px; font-weight: 600; fill: var(--ink); }}"),
        charts=charts,
        legend=legend,
    )
    light = light_colors()
    allowed = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "\ufffd", drawn)  # XML refuses these characters
    return re.sub(r"var\(--([\w-]+)\)", lambda found: light[found[1]], allowed)


def light_colors() -> dict[str, str]:
    """Returns the colours of the page in light mode, by their names."""
    css = _css()
    return dict(re.findall(r"--([\w-]+): (#\w+);", css[: css.index("@media")]))


def _css() -> str:
    return str(TEMPLATES.get_template("report.css").render())


def _placed(figure: Figure, *, x: float, y: float) -> dict[str, object]:
    """Returns the parts of a chart for `compare.svg.j2`: `svg` has its markup without the start of its first tag."""
    start, end = figure.markup.index("<svg"), figure.markup.rindex("</svg>")
    svg = Markup(figure.markup[start + len("<svg") : end + len("</svg>")])
    return {
        "x": x,
        "y": y,
        "width": WIDTH,
        "height": HEIGHT,
        "svg": svg,
        "title": figure.chart.title,
        "unit": figure.chart.unit,
    }


def write_output(option: str, output: Path, content: bytes) -> None:
    """Writes `content` to the file `output`, which the user named with the command's option `option`. Raises RunError
    if it cannot be written."""
    try:
        write_atomically(output, content)
    except OSError as error:
        raise RunError(
            f"{option} {output}: cannot be written ({error.strerror}); name a file that can be written"
        ) from None


def terminal_tables(groups: Sequence[Group], *, by: Sequence[str] = (), width: int) -> list[Table]:
    """Returns the numbers as tables for lines of `width` characters: with `by` those of the groups and their
    differences, else the totals of the runs. Up to `len(RUN_COLORS)` runs are columns. If there are more, each run is a
    row, as each group is; the table then has the columns that fit, and its caption the number of the other columns."""
    if not by and len(groups) <= len(RUN_COLORS):
        return [_table(["", *(group.label for group in groups)], totals(all_runs(groups)))]
    head, rows = group_table(groups)
    label, runs, *numbers = map(list, zip(head, *([row.name, *row.values] for row in rows), strict=True))
    learned = [column for column in numbers if column[0].startswith(("reward", "held-out reward"))]
    differing = [[row.name.rpartition(".")[2], *map(_cut, row.values)] for row in settings_that_differ(groups, by=by)]
    # with --by, the label of a group has the settings in which it differs; without, the label is the run's name
    first = [runs, *learned] if by else [*learned, *differing]
    tables = [_fitting(label, [*first, *(column for column in numbers if column not in learned)], width=width)]
    if by and (rows := difference_rows(groups)):
        tables.append(_table([f"minus {groups[0].label}", *DIFFERENCE_HEAD[1:]], rows))
    return tables


def _cut(value: str) -> str:
    return value if len(value) <= LONGEST_CELL else f"{value[: LONGEST_CELL - 1]}…"


def _fitting(label: Sequence[str], columns: Sequence[Sequence[str]], *, width: int) -> Table:
    """Returns a table of the label and as many columns as fit into `width` characters, at least one. Each column is a
    head and its cells; the words of a head may be on lines of their own. The caption has the number of columns that are
    left out."""
    widths = [min(max(map(len, label)), max(LONGEST_CELL, width // 3))]
    for head, *cells in columns:
        widths.append(max(map(len, [*head.split(), *cells])))
        if len(widths) > 2 and sum(widths) + COLUMN_GAP * (len(widths) - 1) > width:
            widths.pop()
            break
    shown = [label, *columns[: len(widths) - 1]]
    heads, *rows = zip(*shown, strict=True)
    table = _table(heads, [Row(name, values) for name, *values in rows], widths=widths)
    if left_out := 1 + len(columns) - len(shown):
        table.caption = Text(f"columns that do not fit here: {left_out}; --csv FILE writes all numbers")
        table.caption_justify = "left"
    return table


def _table(head: Sequence[str], rows: Sequence[Row], *, widths: Sequence[int | None] = ()) -> Table:
    """Returns a table. A column without a width is as wide as the terminal allows."""
    table = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0), header_style="bold")
    for index, (name, width) in enumerate(zip_longest(head, widths)):
        table.add_column(Text(name), justify="right" if index else "left", overflow="fold", width=width)
    for row in rows:
        table.add_row(Text(row.name), *map(Text, row.values))
    return table
