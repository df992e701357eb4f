"""`asyncrl down`: end what is left of a run."""

from typing import Annotated

import typer

from asyncrl.cli.options import RunningAddress, command_app, running_address

app = command_app()


@app.command()
def down(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    address: RunningAddress = None,
) -> None:
    """End a run: its deployments close when they see it, and its shared actors are gone at once.

    For what a killed deployment left behind; a run whose deployments end by themselves needs no `down`.
    """
    from asyncrl.deployment.launch import use_ray_token

    use_ray_token()
    from asyncrl.deployment.cluster import end_actors, join

    join(running_address(run, address), namespace=run)
    ended = end_actors(run)
    typer.echo(f"ended {', '.join(ended)}" if ended else f"nothing of run {run} was there")
