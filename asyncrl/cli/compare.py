"""`asyncrl compare RUN RUN…`: writes a page that compares runs or groups of runs, and prints their numbers."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import recorded_run
from asyncrl.cli.terminal import print_warnings, say
from asyncrl.deployment.fetching import MirroredRun, is_url
from asyncrl.deployment.known_runs import as_it_is, named_run, trained_runs
from asyncrl.views.compare import (
    compare_html,
    compare_svg,
    light_colors,
    notes_on,
    settings_in_words,
    terminal_tables,
    write_output,
)
from asyncrl.views.compare_curves import Axis, Choice, check_names
from asyncrl.views.compare_numbers import all_runs, compare_csv
from asyncrl.views.compared_runs import named, read_compared
from asyncrl.views.console import console_for_tables


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...",
            help="Directories of runs, names of runs in runs/, such as quickstart, URLs of their mirrors, or folders "
            "of sweeps, which stand for all their runs.",
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
    chart: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NUMBER",
            help="Draw this number only, such as heldout, reward_mean, or a number that your objective logs. May be "
            "given several times.",
        ),
    ] = None,
    over: Annotated[
        list[Axis] | None, typer.Option(help="Draw over this quantity only. May be given several times.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Name of a group, or of a run, in the order of the groups. One for each."),
    ] = None,
) -> None:
    """Write a self-contained HTML page with the curves of several runs in the same charts, their totals, and the
    settings in which they differ. Print the totals. The runs may still be running. Of many runs or of groups, only the
    columns that fit into the terminal are printed; --csv writes all numbers.

    With --by run.seed, runs that differ only in their seed are one group: the page and the tables have means with 95 %
    t-intervals, curves with bands, and the difference of each group to the first one with a statistical test. The
    first group is that of the first run; the runs of a sweep's folder are in the order in which they began.

    \b
      asyncrl compare quickstart quickstart.1
      asyncrl compare runs/a runs/b runs/c -o page.html
      asyncrl compare --by run.seed runs/losses --csv numbers.csv
      asyncrl compare --by run.seed runs/losses --png figure.png --chart heldout --over step --label GRPO --label ours
      asyncrl compare quickstart s3://bucket/other
    """
    keys, choice = by or [], Choice(names=chart or (), axes=over or tuple(Axis))
    names = [name for run in runs for name in _runs_of(run)]
    with contextlib.ExitStack() as open_runs:
        directories = [open_runs.enter_context(recorded_run(run, MirroredRun.records)) for run in names]
        groups = read_compared(directories, info_of=as_it_is, by=keys, names=names)
    groups = named(groups, label) if label else groups
    check_names(all_runs(groups), choice.names)
    console = console_for_tables()
    for table in terminal_tables(groups, by=keys, width=console.width):
        console.print(table)
    print_warnings(notes_on(groups, choice, by=keys))
    for line in settings_in_words(groups, by=keys):
        say(line)
    written = [("--output", output, compare_html(groups, by=keys, choice=choice).encode())]
    written += [("--svg", svg, compare_svg(groups, choice).encode())] if svg else []
    if png:
        from asyncrl.views.compare_png import compare_png  # matplotlib takes a second to import

        written.append(("--png", png, compare_png(groups, choice, colors=light_colors())))
    written += [("--csv", csv, compare_csv(groups).encode())] if csv else []
    for option, path, content in written:
        write_output(option, path, content)
        say(str(path))


def _runs_of(run: str) -> list[str]:
    """Returns the runs for which an argument stands: those of a sweep's folder, else the argument itself."""
    if is_url(run) or ((named := named_run(Path(run))) / "run.json").exists():
        return [run]
    return [str(path) for path in trained_runs(Path(run)) or trained_runs(named)] or [run]
