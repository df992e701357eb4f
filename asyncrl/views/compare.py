"""Makes the page and the table of `asyncrl compare`: curves, totals and settings of several runs, from their records.

A run keeps its colour in all charts. Each curve is drawn twice: over steps, which compares how much a step teaches, and
over time, which compares how much an hour teaches.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from asyncrl.atomic_write import write_atomically
from asyncrl.config.load import flat_config
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.records import RunInfo, Summary
from asyncrl.metrics.numbers import NUMBERS, Chart
from asyncrl.views.charts import STEP, Series, line_chart
from asyncrl.views.page_templates import TEMPLATES
from asyncrl.views.quantities import change, duration, number
from asyncrl.views.report import RunRecords, read_run
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

RUN_COLORS = ("blue", "amber", "green", "violet", "red", "teal", "rose", "gray")
OWN_KEYS = ("run.name", "run.dir")
"""Settings that name a run. They always differ, so they are not compared."""
UNKNOWN = "–"


class Point(NamedTuple):
    """A point of a curve: the step, the seconds since the start of the run, and the value."""

    step: float
    wall_s: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One of the runs of a comparison, with its name and its colour on the page."""

    label: str
    color: str
    records: RunRecords
    summary: Summary


Points = Callable[[RunRecords], Sequence[Point]]
"""A function that returns the points of one curve of a run."""


class Row(NamedTuple):
    """A line of a table: a name, and a text for each run."""

    name: str
    values: Sequence[str]


def read_compared(paths: Sequence[Path], *, info_of: Callable[[Path], RunInfo | None]) -> list[Compared]:
    """Returns the runs of these run directories, in this order. `info_of` returns the content of run.json for a
    directory. For a run that was killed it has the state `died`, while the file still says `running`.

    Raises ConfigError if there are not two to eight different directories. Raises RunError if one is not a run
    directory, or if its run has trained no step.
    """
    if len(paths) < 2 or len(paths) > len(RUN_COLORS):
        count = f"{len(paths)} run{'s' * (len(paths) != 1)}"
        raise ConfigError(
            f"asyncrl compare: got {count}, but it compares 2 to {len(RUN_COLORS)}, each with its own colour; name "
            "other runs"
        )
    resolved = [path.resolve() for path in paths]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise ConfigError(f"asyncrl compare: {paths[index]} is named twice; name each run once")
    unique = len({path.name for path in resolved}) == len(paths)
    return [
        _read(path, label=path.resolve().name if unique else str(path), color=color, info=info_of(path))
        for path, color in zip(paths, RUN_COLORS, strict=False)
    ]


def _read(path: Path, *, label: str, color: str, info: RunInfo | None) -> Compared:
    records = read_run(path, info=info)
    if (totals := records.totals) is None:
        raise RunError(f"{path} has no trained step to compare; leave this run out, or wait for its first step")
    return Compared(label=label, color=color, records=records, summary=totals)


def compare_html(runs: Sequence[Compared]) -> str:
    """Returns the page as HTML."""
    return TEMPLATES.get_template("compare.html.j2").render(
        runs=runs,
        by_step=curves(runs, over_time=False),
        by_time=curves(runs, over_time=True),
        totals=totals(runs),
        differences=differences([run.records.config for run in runs]),
    )


def write_compare(runs: Sequence[Compared], output: Path) -> None:
    """Writes the page. Raises RunError if the file cannot be written."""
    try:
        write_atomically(output, compare_html(runs).encode())
    except OSError as error:
        raise RunError(
            f"--output {output}: cannot be written ({error.strerror}); name a file that can be written"
        ) from None


def terminal_table(runs: Sequence[Compared]) -> Table:
    """Returns the totals as a table for a terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", *(run.label for run in runs)):
        table.add_column(Text(name), justify="right" if name else "left", overflow="fold")
    for row in totals(runs):
        table.add_row(Text(row.name), *map(Text, row.values))
    return table


def curves(runs: Sequence[Compared], *, over_time: bool) -> Iterator[str]:
    """Yields the charts with a line for each run, over steps or over the time since the start of each run."""
    unit_s, clock = clock_of(max(run.records.steps[-1].wall_s for run in runs))

    def line(run: Compared, points: Sequence[Point]) -> Series:
        xs = [point.wall_s / unit_s if over_time else point.step for point in points]
        return Series(name=run.label, color=run.color, xs=xs, ys=[point.value for point in points])

    sets = dict.fromkeys([HELDOUT, *(record.name for run in runs for record in run.records.evals)])
    heldout: list[tuple[Chart, Points]] = [
        (Chart(f"Held-out reward{_of_set(name)}"), partial(_heldout, name=name)) for name in sets
    ]
    for chart, points_of in (*CURVES[:1], *heldout, *CURVES[1:]):
        lines = [line(run, points) for run in runs if (points := points_of(run.records))]
        if lines:
            x_name = clock if over_time else STEP
            yield line_chart(chart.title, [], lines, unit=chart.unit, include=chart.include, x_name=x_name)


def totals(runs: Sequence[Compared]) -> list[Row]:
    """Returns the rows of the table of totals. Rows in which no run has a number, or every run has 0, are left out."""

    def row(name: str, text: Callable[[Summary], str]) -> Row:
        return Row(name, [text(run.summary) for run in runs])

    def optional(value: float | None) -> str:
        return UNKNOWN if value is None else number(value)

    sets = dict.fromkeys(name for run in runs for name in run.summary.heldout_sets)
    rows = [
        Row("state", [run.records.info.state for run in runs]),
        row("steps", lambda total: f"{total.steps:,}"),
        row("time", lambda total: duration(total.wall_s)),
        row("reward, first to last steps", lambda total: change(total.reward_first, total.reward_last)),
        row("held-out reward", lambda total: change(total.heldout_first, total.heldout_last)),
        *(row(f"held-out reward{_of_set(name)}", partial(_ends_of, name=name)) for name in sets),
        row("trained samples per second", lambda total: number(total.samples_per_s)),
        row("trained tokens", lambda total: number(total.trained_tokens)),
        row("oldest trained token, versions", lambda total: f"{total.max_token_staleness} of {total.staleness_limit}"),
        row("effective sample size, mean", lambda total: optional(total.ess_ratio_mean)),
        row("effective sample size, lowest", lambda total: optional(total.ess_ratio_lowest)),
        row("learner busy", lambda total: f"{total.learner_busy_ratio:.0%}"),
        row("generators busy", lambda total: f"{total.generator_busy_ratio:.0%}"),
        row("log-prob parity, nats", lambda total: optional(total.parity_max_nats)),
        row("restarts", lambda total: f"{total.restarts:,}"),
    ]
    return [each for each in rows if {*each.values} not in ({UNKNOWN}, {"0"})]


def differences(configs: Sequence[Config]) -> list[Row]:
    """Returns the settings in which the configurations differ, each with its value in each of them. Dotted keys of the
    first configuration come first, in the order of the schema."""
    flat = [flat_config(config) for config in configs]
    missing = object()
    rows = []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [settings.get(key, missing) for settings in flat]
        if key not in OWN_KEYS and any(value != values[0] for value in values):
            rows.append(Row(key, [UNKNOWN if value is missing else _as_text(value) for value in values]))
    return rows


def _as_text(value: object) -> str:
    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _per_step(run: RunRecords, *, read: Callable[[Steps], float | None], smoothed: bool = False) -> Sequence[Point]:
    """Returns means over bins of steps, each at the last step of its bin."""
    bins = bins_of(run.steps, CURVE_POINTS)
    values = [read(chunk) for chunk in bins]
    return _at_ends(bins, smooth(values) if smoothed else values)


def _speed(run: RunRecords, *, what: str) -> Sequence[Point]:
    """Returns the trained samples or tokens (`what`) per second in each window of steps, at the window's last step."""
    windows, read = windows_of(run.steps, SHARE_POINTS), trained_per_second(what)
    return _at_ends(windows, [read(window) for window in windows])


def _at_ends(chunks: Sequence[Steps], values: Sequence[float | None]) -> Sequence[Point]:
    ends = [chunk[-1] for chunk in chunks]
    return [Point(end.step, end.wall_s, value) for end, value in zip(ends, values, strict=True)]


def _of_set(name: str) -> str:
    """Returns the end of a title that names a held-out set; empty for the set `heldout`, which every run has."""
    return "" if name == HELDOUT else f": {name}"


def _ends_of(total: Summary, *, name: str) -> str:
    ends = total.heldout_sets.get(name)
    return UNKNOWN if ends is None else change(ends.first, ends.last)


def _heldout(run: RunRecords, *, name: str) -> Sequence[Point]:
    return [Point(record.version, record.wall_s, record.reward_mean) for record in run.evals if record.name == name]


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
"""The curves of every run, in the order of their charts. Those of held-out rewards follow the first."""
