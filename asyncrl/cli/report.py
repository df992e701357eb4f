"""`asyncrl report RUN`: writes an HTML page with the curves and totals of a run."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import RunOrMirror, check_writable, recorded_run
from asyncrl.cli.terminal import print_warnings, say
from asyncrl.deployment.fetching import is_url
from asyncrl.deployment.known_runs import as_it_is, ended_run
from asyncrl.deployment.resuming import SAMPLES
from asyncrl.views.report import write_report


def report(
    run: RunOrMirror,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write. Default: report.html in the run's directory; of a mirror, in the working directory.",
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML page with the curves, totals and samples of a run. The run may still be running."""
    if output is None and is_url(run):
        output = Path("report.html")
    if output is not None:
        check_writable("--output", output)
    with recorded_run(run, lambda mirror: mirror.records(SAMPLES)) as directory:
        info = as_it_is(directory)
        # The warning names the run's newest weights, which were not fetched from a mirror.
        if info is not None and info.state == "died" and not is_url(run):
            print_warnings([ended_run(directory) or ""])
        say(str(write_report(directory, output=output, info=info)))
