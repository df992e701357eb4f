"""`asyncrl report RUN`: writes an HTML page with the curves and totals of a run."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import RecordedRun
from asyncrl.cli.terminal import print_warnings, say
from asyncrl.deployment.known_runs import as_it_is, ended_run, existing_run
from asyncrl.views.report import write_report


def report(
    run: RecordedRun,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File to write. Default: report.html in the run's directory."
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML page with the curves, totals and samples of a run. The run may still be running."""
    directory = existing_run(run)
    info = as_it_is(directory)
    if info is not None and info.state == "died":
        print_warnings([ended_run(directory) or ""])
    say(str(write_report(directory, output=output, info=info)))
