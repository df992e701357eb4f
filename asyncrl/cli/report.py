"""`asyncrl report RUN`: the run's curves and totals on one page."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import command_app, print_warnings
from asyncrl.deployment.known_runs import as_it_is, check_there, ended_run, named_run
from asyncrl.views.report import write_report

app = command_app()


@app.command()
def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's directory, or the name of one in runs/, such as quickstart.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write it there, not to report.html in the run's directory."
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page with a run's curves, totals and samples, whether it goes on or has ended."""
    directory = named_run(run)
    check_there(directory)
    info = as_it_is(directory)
    if info is not None and info.state == "died":
        print_warnings([ended_run(directory) or ""])
    typer.echo(str(write_report(directory, output=output, info=info)))
