"""`asyncrl report RUN_DIR`: the run's curves and totals on one page."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import command_app
from asyncrl.deployment.report import write_report

app = command_app()


@app.command()
def command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's directory, such as runs/quickstart.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there, not to RUN_DIR/report.html.")
    ] = None,
) -> None:
    """Write one self-contained HTML page with a run's curves, totals and samples, also of a run that goes on."""
    typer.echo(str(write_report(run_dir, output=output)))
