"""`asyncrl learner`: starts the learner deployment of a run on a running Ray cluster."""

import asyncio
from functools import partial

from asyncrl.cli.before_start import prepare
from asyncrl.cli.options import (
    LINE_EVERY_STEPS,
    Address,
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
    ray_address,
    weights_named,
)
from asyncrl.cli.terminal import outlive_terminal, show_cursor
from asyncrl.run.roles import Role

app = command_app()


@app.command()
def learner(
    files: ConfigFiles, overrides: Overrides, address: Address = None, allow_public: AllowPublic = False
) -> None:
    """Start the learner of a run on a running Ray cluster. Generators may have started already, or may join later.

    A run has one learner. Only the learner writes to the run's directory. It ends cleanly on SIGTERM, on Ctrl-C, or
    when the terminal is closed.
    """
    outlive_terminal()
    config, warnings = checked_config(files, overrides, roles=[Role.LEARNER], allow_public=allow_public)
    print_warnings(warnings)

    from asyncrl.deployment.launch import (
        described_model,
        load_prompts,
        ready_model,
        recorded_run,
        run_until_done,
        use_ray_token,
    )
    from asyncrl.metrics.states import monotonic_at_process_start

    use_ray_token()
    loaded = prepare(config, roles=[Role.LEARNER])
    from asyncrl.deployment.cluster import check_admission, join

    # These two can fail. They come before the directory of an earlier run is moved aside for this run.
    where = ray_address(config, address)
    join(where, namespace=config.run.name)
    asyncio.run(check_admission(config, role=Role.LEARNER))
    clear_previous(config)
    with recorded_run(config, role="learner") as run_dir, weights_named(run_dir.path):
        print_previous(run_dir)
        from rich.console import Console

        from asyncrl.deployment.closing import asked_to_end, ended_at_once
        from asyncrl.deployment.learner import LearnerDeployment
        from asyncrl.learner.records import Summary
        from asyncrl.views.live import LiveDisplay

        run_dir.started_ray(where)
        console = Console()
        report = partial(console.print, markup=False, highlight=False)

        async def main(stop: asyncio.Event) -> Summary | None:
            prompts = asyncio.create_task(load_prompts(config, loaded))
            described = asyncio.create_task(described_model(config, prompts))
            deployment = LearnerDeployment(
                config,
                run_dir=run_dir,
                model_path=asyncio.create_task(ready_model(config, prompts, described, report=report)),
                prompts=prompts,
                started_s=monotonic_at_process_start(),
                show=display.update,
                report=report,
            )
            return await deployment.run(stop)

        with LiveDisplay(console, every_steps=LINE_EVERY_STEPS) as display:
            summary = run_until_done(
                main,
                asked=lambda: asked_to_end(run_dir, config.run.shutdown_grace_s),
                at_once=[show_cursor, partial(ended_at_once, run_dir)],
            )
    command = again("learner", files, overrides, address=address, allow_public=allow_public)
    print_outcome(summary, run_dir.path, config=config, again=command)
