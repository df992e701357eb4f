"""`asyncrl top RUN`: a live view of a run, read from its metrics endpoints."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import LINE_EVERY_STEPS, command_app
from asyncrl.errors import RunEnded, RunError

app = command_app()


@app.command()
def top(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Directory of a run, or the name of a run in runs/, such as quickstart."),
    ],
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.2,
            show_default=False,
            help="Time between two reads of the metrics. Default: 2, with --once 10.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Read the metrics twice, print the change between the two, and exit.")
    ] = False,
) -> None:
    """Watch a run live: pools, speed, staleness, buffer, reward, and what limits the speed.

    Rates and times are those of the last half minute. The command reads the endpoints that the run lists in
    metrics/targets.json. It needs neither Ray nor Prometheus. You can start and stop it at any time: Ctrl-C ends the
    view, not the run.
    """
    from rich.console import Console

    from asyncrl.deployment.known_runs import check_there, ended_run, named_run
    from asyncrl.views.live import LiveDisplay, render
    from asyncrl.views.top import watch

    directory = named_run(run)
    check_there(directory)
    ended = ended_run(directory)
    if ended is not None:
        raise RunError(ended)
    views = watch(directory, every_s=every or (10.0 if once else 2.0))
    seen = False
    try:
        if once:
            Console().print(render(next(views)))
            return
        with LiveDisplay(Console(), every_steps=LINE_EVERY_STEPS) as display:
            for view in views:
                display.update(view)
                seen = True
    except KeyboardInterrupt:
        return
    except RunError as error:
        if not seen and not isinstance(error, RunEnded):
            raise
        typer.echo(ended_run(directory) or str(error))
