"""`asyncrl up`: starts the whole system on this machine with one command."""

import asyncio
import time
from functools import partial

from asyncrl.cli.before_start import prepare
from asyncrl.cli.options import (
    LINE_EVERY_STEPS,
    AllowPublic,
    ConfigFiles,
    Overrides,
    again,
    checked_config,
    clear_previous,
    command_app,
    print_outcome,
    print_previous,
    print_warnings,
    weights_named,
)
from asyncrl.cli.terminal import outlive_terminal, show_cursor
from asyncrl.run.roles import Role

app = command_app()


@app.command()
def up(files: ConfigFiles, overrides: Overrides, allow_public: AllowPublic = False) -> None:
    """Start a local Ray, generators and a learner, show the run live, and end all of them when the run is done.

    Ctrl-C, or closing the terminal, ends the run cleanly. Its records and weights are in runs/NAME. For several
    machines, see `asyncrl generator --help`.
    """
    outlive_terminal()
    config, warnings = checked_config(files, overrides, allow_public=allow_public)
    print_warnings(warnings)

    from asyncrl.deployment.launch import recorded_run, run_until_done, use_ray_token
    from asyncrl.metrics.states import monotonic_at_process_start

    use_ray_token(own=config.ray.address is None)
    prompts = prepare(config)
    if config.ray.address is not None:
        from asyncrl.deployment.cluster import check_admission, join

        # These two can fail. They come before the directory of an earlier run is moved aside for this run.
        join(config.ray.address, namespace=config.run.name)
        asyncio.run(check_admission(config, role=Role.LEARNER))
    clear_previous(config)
    with recorded_run(config, role="up") as run_dir, weights_named(run_dir.path):
        print_previous(run_dir)
        from rich.console import Console

        from asyncrl.views.live import LiveDisplay, starting_view

        console, started_s = Console(), monotonic_at_process_start()
        with LiveDisplay(console, every_steps=LINE_EVERY_STEPS) as display:
            display.update(starting_view(config, phase="importing Ray", elapsed_s=time.monotonic() - started_s))

            from asyncrl.deployment.closing import asked_to_end, ended_at_once
            from asyncrl.deployment.up import Up

            run = Up(
                config,
                run_dir=run_dir,
                started_s=started_s,
                show=display.update,
                report=partial(console.print, markup=False, highlight=False),
                prompts=prompts,
            )
            summary = run_until_done(
                run.run,
                asked=lambda: asked_to_end(run_dir, config.run.shutdown_grace_s),
                at_once=[show_cursor, partial(ended_at_once, run_dir)],
            )
    print_outcome(summary, run_dir.path, config=config, again=again("up", files, overrides, allow_public=allow_public))
