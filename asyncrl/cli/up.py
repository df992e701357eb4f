"""`asyncrl up`: the whole system on this machine, from one command."""

from asyncrl.cli.options import (
    LINE_EVERY_STEPS,
    ConfigFiles,
    Overrides,
    checked_config,
    command_app,
    print_outcome,
    print_warnings,
)

app = command_app()


@app.command()
def up(files: ConfigFiles, overrides: Overrides) -> None:
    """Start a local Ray, generators and a learner, show them live, and end them all when the run is done.

    Ctrl-C ends cleanly; what was recorded is in runs/NAME. For several machines, see `asyncrl generator --help`.
    """
    config, warnings = checked_config(files, overrides)
    print_warnings(warnings)

    from asyncrl.deployment.launch import monotonic_at_process_start, recorded_run, run_until_done, use_ray_token

    with recorded_run(config, role="up") as run_dir:
        from rich.console import Console

        if config.ray.address is not None:
            use_ray_token()

        from asyncrl.deployment.live import LiveDisplay
        from asyncrl.deployment.up import Up

        console = Console()
        with LiveDisplay(console, every_steps=LINE_EVERY_STEPS) as display:
            run = Up(
                config,
                run_dir=run_dir,
                started_s=monotonic_at_process_start(),
                show=display.update,
                report=console.print,
            )
            summary = run_until_done(run.run)
    print_outcome(summary, run_dir.path)
