"""`asyncrl compare RUN RUN…`: writes an HTML page that compares runs, and prints their totals."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.terminal import say
from asyncrl.deployment.known_runs import as_it_is, existing_run
from asyncrl.views.compare import differences, read_compared, terminal_table, write_compare
from asyncrl.views.console import ShownConsole


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN...", help="Directories of runs, or the names of runs in runs/, such as quickstart."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")] = Path(
        "compare.html"
    ),
) -> None:
    """Write a self-contained HTML page with the curves of several runs in the same charts, their totals, and the
    settings in which they differ. Print the totals. The runs may still be running.

    \b
      asyncrl compare quickstart quickstart.1
      asyncrl compare runs/a runs/b runs/c -o page.html
    """
    compared = read_compared([existing_run(run) for run in runs], info_of=as_it_is)
    ShownConsole().print(terminal_table(compared))
    keys = [row.name for row in differences([run.records.config for run in compared])]
    say(f"settings that differ: {', '.join(keys) or 'none'}")
    write_compare(compared, output)
    say(str(output))
