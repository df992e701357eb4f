"""`asyncrl status`: shows the state of a run, or how the run ended. With `--watch` it shows a live view, as
`asyncrl top` does.

Both commands read the run's records in its directory, and ask the run's buffer for its status.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.cli.options import (
    LINE_EVERY_STEPS,
    RunningAddress,
    RunningRun,
    named_address,
    print_notes,
    running_address,
)
from asyncrl.cli.terminal import print_warnings, say, sigterm_exits
from asyncrl.deployment.known_runs import as_it_is, check_there, ended_run, existing_run, named_run
from asyncrl.errors import AnotherRun, RunEnded, RunError

if TYPE_CHECKING:
    from asyncrl.coordinator.client import CoordinatorClient
    from asyncrl.coordinator.status import RunStatus

WATCH_EVERY_S = 2.0
"""Default time between two looks at a run."""


def joined_run(directory: Path, address: str | None) -> "CoordinatorClient":
    """Joins the cluster of a run, and returns a client of the run's coordinator.

    Raises AnotherRun if the run on the cluster is not the one of `directory`, unless the user has named the cluster.
    """
    from asyncrl.deployment.local_clusters import use_ray_token

    use_ray_token()
    from asyncrl.deployment.cluster import join
    from asyncrl.deployment.shared_actors import check_directory, find_run
    from asyncrl.learner.records import known_info

    join(running_address(directory, address), namespace=directory.name, folder=directory.parent)
    if named_address(address) is None and (info := known_info(directory)) is not None:
        check_directory(directory, info.nonce)
    return find_run(directory.name)


@contextlib.contextmanager
def onlooking() -> Iterator[None]:
    """Wraps a command that only observes or scales a run. SIGTERM makes the command exit. If the command has joined a
    Ray cluster, leaves that cluster at the end.

    Otherwise Ray would leave the cluster when the interpreter exits, and would sleep half a second before.
    """
    joined_before = _joined()
    with sigterm_exits():
        try:
            yield
        finally:
            if _joined() and not joined_before:
                sys.modules["ray"].shutdown()


def _joined() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


@onlooking()
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

    If the run has ended or died, the command shows how it ended, its warnings, and which processes and files it left on
    this machine.
    """
    import msgspec.json

    from asyncrl.deployment.known_runs import remains_of

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
        _say_records(directory, ended, json=json)
        return
    say(f"{connecting(directory, address)} ...", err=True)
    try:
        found, now = _status_of(directory, address)(), datetime.now(UTC)
    except AnotherRun as error:
        _say_records(directory, f"run {directory.name} has not recorded its end in {directory}", json=json)
        print_warnings([str(error)])
        return
    except RunError as error:
        if named_address(address) is None:
            check_there(directory)
        raise RunError(f"{ended}\n{error}" if ended else str(error)) from error
    from asyncrl.views.status_text import status_json, status_lines
    from asyncrl.views.watch import view_since_start

    if not directory.is_dir():
        print_warnings([f"{directory} is not on this machine: warnings that need the run's records are not shown"])
    view = view_since_start(directory, found)
    if json:
        encoded = status_json(found, view, now=now)
        say((msgspec.json.format(encoded, indent=2) if sys.stdout.isatty() else encoded).decode())
    else:
        say("\n".join(status_lines(found, view, now=now)))


def _say_records(directory: Path, state: str, *, json: bool) -> None:
    """Prints the state of a run as its records have it: run.json with `json`, else `state` and the health
    notes."""
    import msgspec.json

    if json:
        say(msgspec.json.encode(as_it_is(directory)).decode())
        return
    say(state)
    print_notes(directory)


@onlooking()
def watch_run(run: Path, *, address: str | None, every_s: float, once: bool = False) -> None:
    """Shows the live view of a run until the run ends or Ctrl-C; with `once`, shows it one time.

    The records of the run are shown at once, before Ray is imported. A run whose buffer cannot be reached is shown from
    its records only. If the run has ended, this function prints how it ended.
    """
    from asyncrl.views.console import ShownConsole
    from asyncrl.views.live import LiveDisplay, render
    from asyncrl.views.watch import watch

    directory = existing_run(run)
    if (ended := ended_run(directory)) is not None:
        say(ended)
        print_notes(directory)
        return
    buffer = _WatchedBuffer(directory, address)
    try:
        views = watch(directory, ask=buffer.ask, absence=lambda: buffer.absence)
        if once:
            say(f"{buffer.absence} ...", err=True)
            buffer.connect()
            ShownConsole().print(render(next(views)))
            return
        with LiveDisplay(ShownConsole(), every_steps=LINE_EVERY_STEPS) as display:
            display.update(next(views))
            buffer.connect()
            while (info := as_it_is(directory)) is not None and info.finished is None:
                display.update(next(views))
                time.sleep(every_s)
            buffer.disconnect()
            if info is not None:
                display.update(replace(next(views), phase=info.state))
        say(ended_run(directory) or "")
    except KeyboardInterrupt:
        return
    except RunEnded as error:
        say(str(error))


def _status_of(directory: Path, address: str | None) -> "Callable[[], RunStatus]":
    """Joins the cluster of a run, and returns a function that asks the run's buffer for its status."""
    import asyncio

    client = joined_run(directory, address)
    from asyncrl.coordinator.coordinator import Coordinator

    return lambda: asyncio.run(client.call(Coordinator.status))


class _WatchedBuffer:
    """A connection to the buffer of a run that is watched. `absence` is the text that the live view shows as the phase
    of the run while there is no status of the buffer."""

    def __init__(self, directory: Path, address: str | None) -> None:
        self._directory = directory
        self._address = address
        self._status: Callable[[], RunStatus | None] = lambda: None
        self.absence = connecting(directory, address)

    def connect(self) -> None:
        """Joins the run's cluster, which takes many seconds. Prints a warning if this is not possible."""
        from asyncrl.views.watch import NO_ANSWER

        try:
            self._status = _status_of(self._directory, self._address)
        except RunError as error:
            print_warnings([f"{error}; the view shows only the records in {self._directory}"])
        self.absence = NO_ANSWER

    def ask(self) -> "RunStatus | None":
        """Returns the buffer's status; None if it is not connected or does not answer."""
        try:
            return self._status()
        except (RunError, TimeoutError):
            return None

    def disconnect(self) -> None:
        """Makes `ask` return None, without a call to the cluster."""
        self._status = lambda: None


def connecting(directory: Path, address: str | None) -> str:
    where = running_address(directory, address)
    return f"connecting to the run's Ray{'' if where == 'auto' else f' at {where}'}"
