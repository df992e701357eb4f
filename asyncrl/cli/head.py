"""`asyncrl head`: starts a local Ray cluster for the deployments of one run in other terminals, until it is stopped."""

import asyncio
from typing import Annotated

import typer

from asyncrl.cli.options import ConfigFiles, Overrides
from asyncrl.cli.terminal import outlive_terminal, print_warnings, say
from asyncrl.config.load import load_config
from asyncrl.shown_text import describe_process


def head(
    files: ConfigFiles,
    overrides: Overrides,
    generators: Annotated[
        int,
        typer.Option("--generators", metavar="N", min=1, help="Generator deployments that the cluster has room for."),
    ] = 1,
) -> None:
    """Start a Ray cluster that only this machine can reach, with room for the learner and the generators of a run.

    `asyncrl learner` and `asyncrl generator` of the same run find it by themselves in other terminals. Other runs may
    have heads of their own on this machine. The cluster ends with this command, which ends on Ctrl-C, on
    SIGTERM, or when the terminal is closed. A cluster of several machines is started with `ray start` (deploy/).

    \b
      asyncrl head      -c quickstart          # one terminal
      asyncrl learner   -c quickstart          # another
      asyncrl generator -c quickstart          # another, or several
    """
    outlive_terminal()
    config = load_config(files, overrides)

    from asyncrl.deployment.launch import log_to, run_until_done
    from asyncrl.deployment.local_clusters import HEAD, check_no_head, own_clusters, use_ray_token

    use_ray_token(own=True)
    print_warnings(check_no_head(config.run.dir / config.run.name, own_clusters()))
    describe_process(run=config.run.name, role="head")
    with log_to(None, form=config.run.log_format):
        from asyncrl.deployment.cluster import start_local

        async def main(stop: asyncio.Event) -> None:
            address = start_local(config, generators=generators, command=HEAD)
            say(f"Ray runs at {address} for run {config.run.name}; Ctrl-C ends it")
            await stop.wait()

        run_until_done(main)
