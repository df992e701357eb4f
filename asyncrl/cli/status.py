"""`asyncrl status`: shows the state of a run, read from the run's buffer, or how the run ended."""

import sys
from typing import Annotated

import typer

from asyncrl.cli.options import (
    RunningAddress,
    RunningRun,
    command_app,
    named_address,
    print_headline,
    running_address,
)
from asyncrl.errors import RunError

app = command_app()


@app.command()
def status(
    run: RunningRun,
    address: RunningAddress = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print all fields as JSON: indented on a terminal, else in one line.")
    ] = False,
) -> None:
    """Show the state of a run: versions, buffer, generators, ledger, and what limits its speed.

    If the run has ended or died, the command shows how it ended, its most important warning, and which processes and
    files it left on this machine.
    """
    import asyncio

    import msgspec.json

    from asyncrl.deployment.known_runs import as_it_is, check_there, ended_run, named_run
    from asyncrl.deployment.ray_token import use_ray_token
    from asyncrl.deployment.remains import remains_of

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
    use_ray_token()
    from asyncrl.deployment.cluster import find_run, join
    from asyncrl.metrics.discovery import targets_of
    from asyncrl.metrics.scrape import scrape
    from asyncrl.views.run_facts import setting_at
    from asyncrl.views.status import status_json, status_lines
    from asyncrl.views.top import ANSWER_S

    name = directory.name
    try:
        join(running_address(directory, address), namespace=name)
        found = asyncio.run(find_run(name).status())
    except RunError as error:
        if named_address(address) is None:
            check_there(directory)
        raise RunError(f"{ended}\n{error}" if ended else str(error)) from error
    scraped = scrape(targets_of(found.targets), run=name, timeout_s=ANSWER_S)
    setting = setting_at(directory)
    if json:
        encoded = status_json(found, scraped=scraped, setting=setting)
        typer.echo((msgspec.json.format(encoded, indent=2) if sys.stdout.isatty() else encoded).decode())
    else:
        typer.echo("\n".join(status_lines(found, scraped=scraped, setting=setting)))
