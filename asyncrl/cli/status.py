"""`asyncrl status`: shows the state of a run, or how the run ended. With `--watch` it shows a live view, as
`asyncrl top` does.

Both read the run's records in its directory, and ask the run's buffer for its status.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.cli.options import (
    LINE_EVERY_STEPS,
    RunningAddress,
    RunningRun,
    named_address,
    print_headline,
    print_warnings,
    running_address,
)
from asyncrl.errors import RunEnded, RunError

if TYPE_CHECKING:
    from asyncrl.coordinator.status import RunStatus

WATCH_EVERY_S = 2.0
"""Default time between two looks at a run."""


def status(
    run: RunningRun,
    address: RunningAddress = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print all fields as JSON: indented on a terminal, else in one line.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show a live view until the run ends, as `asyncrl top` does.")
    ] = False,
) -> None:
    """Show the state of a run: versions, buffer, generators, ledger, and what limits its speed.

    If the run has ended or died, the command shows how it ended, its most important warning, and which processes and
    files it left on this machine.
    """
    import msgspec.json

    from asyncrl.deployment.known_runs import as_it_is, check_there, ended_run, named_run
    from asyncrl.deployment.remains import remains_of

    if watch and json:
        raise typer.BadParameter("--json prints one status: leave out --watch")
    if watch:
        watch_run(run, address=address, every_s=WATCH_EVERY_S)
        return
    directory = named_run(run)
    ended = ended_run(directory)
    if ended is not None and (remains := remains_of(directory)):
        ended += f"\nit left {remains}; run `asyncrl down {run}` to end and remove these"
    if ended is not None and named_address(address) is None:
        if json:
            typer.echo(msgspec.json.encode(as_it_is(directory)).decode())
            return
        typer.echo(ended)
        print_headline(directory)
        return
    try:
        found = _status_of(directory, address)()
    except RunError as error:
        if named_address(address) is None:
            check_there(directory)
        raise RunError(f"{ended}\n{error}" if ended else str(error)) from error
    from asyncrl.views.run_facts import setting_at
    from asyncrl.views.status import status_json, status_lines
    from asyncrl.views.watch import steps_of

    if not directory.is_dir():
        print_warnings([f"{directory} is not on this machine: warnings that need the run's records are not shown"])
    steps, setting = steps_of(directory, found), setting_at(directory)
    if json:
        encoded = status_json(found, steps=steps, setting=setting)
        typer.echo((msgspec.json.format(encoded, indent=2) if sys.stdout.isatty() else encoded).decode())
    else:
        typer.echo("\n".join(status_lines(found, steps=steps, setting=setting)))


def watch_run(run: Path, *, address: str | None, every_s: float, once: bool = False) -> None:
    """Shows the live view of a run until the run ends or Ctrl-C; with `once`, shows it one time.

    A run whose buffer cannot be reached is shown from its records. Raises RunError if the run has ended already.
    """
    from rich.console import Console

    from asyncrl.deployment.known_runs import check_there, ended_run, named_run
    from asyncrl.views.live import LiveDisplay, render

    directory = named_run(run)
    check_there(directory)
    if (ended := ended_run(directory)) is not None:
        raise RunError(ended)
    try:
        ask = _watched(directory, address)
        from asyncrl.views.watch import watch  # it imports Ray, which needs the token that `_watched` sets

        views = watch(directory, ask=ask)
        if once:
            Console().print(render(next(views)))
            return
        with LiveDisplay(Console(), every_steps=LINE_EVERY_STEPS) as display:
            while ended_run(directory) is None:
                display.update(next(views))
                time.sleep(every_s)
        typer.echo(ended_run(directory))
    except KeyboardInterrupt:
        return
    except RunEnded as error:
        typer.echo(str(error))


def _status_of(directory: Path, address: str | None) -> "Callable[[], RunStatus]":
    """Joins the cluster of a run, and returns a function that asks the run's buffer for its status."""
    import asyncio

    from asyncrl.deployment.ray_token import use_ray_token

    use_ray_token()
    from asyncrl.coordinator.coordinator import Coordinator
    from asyncrl.deployment.cluster import find_run, join

    join(running_address(directory, address), namespace=directory.name)
    client = find_run(directory.name)
    return lambda: asyncio.run(client.call(Coordinator.status))


def _watched(directory: Path, address: str | None) -> "Callable[[], RunStatus | None]":
    """Returns a function that asks the run's buffer for its status, and returns None if the buffer does not answer."""
    try:
        ask = _status_of(directory, address)
    except RunError as error:
        print_warnings([f"{error}; the view shows only the records in {directory}"])
        return lambda: None

    def answer() -> "RunStatus | None":
        try:
            return ask()
        except (RunError, TimeoutError):  # the view says that the buffer does not answer
            return None

    return answer
