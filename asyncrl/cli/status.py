"""`asyncrl status`: one screen about a run, from its buffer."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import RunningAddress, command_app, running_address
from asyncrl.errors import RunError

app = command_app()


@app.command()
def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    address: RunningAddress = None,
    json: Annotated[
        bool, typer.Option("--json", help="Everything that is known, as JSON: one line, unless on a terminal.")
    ] = False,
) -> None:
    """Show where a run stands: versions, buffer, generators, ledger, who waits for whom."""
    import asyncio

    import msgspec.json

    from asyncrl.deployment.known_runs import ended_run, named_run
    from asyncrl.deployment.launch import use_ray_token

    use_ray_token()
    from asyncrl.deployment.cluster import find_run, join
    from asyncrl.metrics.discovery import targets_of
    from asyncrl.metrics.scrape import scrape
    from asyncrl.views.run_facts import setting_at
    from asyncrl.views.status import status_json, status_lines
    from asyncrl.views.top import ANSWER_S

    try:
        join(running_address(run, address), namespace=run)
        found = asyncio.run(find_run(run).status())
    except RunError as error:
        ended = ended_run(run)
        raise RunError(f"{ended}\n{error}" if ended else str(error)) from error
    scraped = scrape(targets_of(found.targets), run=run, timeout_s=ANSWER_S)
    setting = setting_at(named_run(Path(run)))
    if json:
        encoded = status_json(found, scraped=scraped, setting=setting)
        typer.echo((msgspec.json.format(encoded, indent=2) if sys.stdout.isatty() else encoded).decode())
    else:
        typer.echo("\n".join(status_lines(found, scraped=scraped, setting=setting)))
