"""`asyncrl compare RUN RUN…`: writes a page that compares runs or groups of runs, and prints their numbers."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import recorded_run
from asyncrl.cli.terminal import print_warnings, say
from asyncrl.deployment.fetching import MirroredRun
from asyncrl.deployment.known_runs import as_it_is
from asyncrl.views.compare import (
    compare_html,
    compare_svg,
    light_colors,
    settings_that_differ,
    terminal_tables,
    write_output,
)
from asyncrl.views.compare_numbers import compare_csv
from asyncrl.views.compared_runs import read_compared
from asyncrl.views.console import ShownConsole


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...",
            help="Directories of runs, names of runs in runs/, such as quickstart, or URLs of their mirrors.",
        ),
    ],
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Runs that differ only in this setting are one group. May be given several times."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")] = Path(
        "compare.html"
    ),
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the charts to this SVG file too.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the charts to this PNG file too.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the numbers to this CSV file too.")] = None,
) -> None:
    """Write a self-contained HTML page with the curves of several runs in the same charts, their totals, and the
    settings in which they differ. Print the totals. The runs may still be running. Of many runs or of groups, only the
    columns that fit into the terminal are printed; --csv writes all numbers.

    With --by run.seed, runs that differ only in their seed are one group: the page and the tables have means with 95 %
    t-intervals, curves with bands, and the difference of each group to the first one with a statistical test.

    \b
      asyncrl compare quickstart quickstart.1
      asyncrl compare runs/a runs/b runs/c -o page.html
      asyncrl compare --by run.seed runs/*-s? --png figure.png --csv numbers.csv
      asyncrl compare quickstart s3://bucket/other
    """
    keys = by or []
    with contextlib.ExitStack() as open_runs:
        directories = [open_runs.enter_context(recorded_run(run, MirroredRun.records)) for run in runs]
        groups = read_compared(directories, info_of=as_it_is, by=keys, names=runs)
    console = ShownConsole()
    for table in terminal_tables(groups, by=keys, width=console.width):
        console.print(table)
    print_warnings([group.note for group in groups if group.note])
    settings = [row.name for row in settings_that_differ(groups, by=keys)]
    say(f"settings that differ: {', '.join(settings) or 'none'}")
    written = [("--output", output, compare_html(groups, by=keys).encode())]
    written += [("--svg", svg, compare_svg(groups).encode())] if svg else []
    if png:
        from asyncrl.views.compare_png import compare_png  # matplotlib takes a second to import

        written.append(("--png", png, compare_png(groups, colors=light_colors())))
    written += [("--csv", csv, compare_csv(groups).encode())] if csv else []
    for option, path, content in written:
        write_output(option, path, content)
        say(str(path))
