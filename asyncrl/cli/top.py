"""`asyncrl top RUN`: a live view of a run. It is `asyncrl status --watch` with its own options."""

from typing import Annotated

import typer

from asyncrl.cli.options import RunningAddress, RunningRun
from asyncrl.cli.status import WATCH_EVERY_S, watch_run


def top(
    run: RunningRun,
    address: RunningAddress = None,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.2, help="Time between two looks at the run.")
    ] = WATCH_EVERY_S,
    once: Annotated[bool, typer.Option("--once", help="Print the view once, and exit.")] = False,
) -> None:
    """Watch a run live: pools, speed, staleness, buffer, reward, and what limits the speed.

    Rates and times are those of the last 20 steps. The command reads the records in the run's directory and asks the
    run's buffer; it needs no Prometheus. You can start and stop it at any time: Ctrl-C ends the view, not the run.
    """
    watch_run(run, address=address, every_s=every, once=once)
