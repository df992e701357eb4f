"""`asyncrl resume RUN`: continues a run from one of its checkpoints, with its saved configuration."""

from functools import partial
from pathlib import Path
from typing import Annotated

from asyncrl.cli.options import AllowPublic, Overrides, RunOrMirror, Trust, again, at_option, check_url
from asyncrl.cli.preflight import prepared
from asyncrl.cli.restarts import begun_directory
from asyncrl.cli.start import run_in_terminal
from asyncrl.cli.terminal import say
from asyncrl.config.load import load_config
from asyncrl.config.named_code import untrusted
from asyncrl.config.schema import Config
from asyncrl.deployment.fetching import fetched, is_url
from asyncrl.deployment.known_runs import existing_run, own_address
from asyncrl.deployment.resuming import chosen_checkpoint, step_of
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.records import read_info, saved_config

At = Annotated[
    str | None,
    at_option(help="Checkpoint to go back to, such as step-140. Default: the newest one that is undamaged."),
]


def resume(
    run: RunOrMirror, overrides: Overrides, at: At = None, allow_public: AllowPublic = False, trust: Trust = False
) -> None:
    """Continue a run from one of its checkpoints. It does what `asyncrl up` does, with the run's saved configuration.

    --at goes back to an earlier checkpoint. The checkpoints, records and samples of later steps are set aside, and not
    deleted: see docs/runs.md. A run that has finished also continues, if learner.total_steps is larger than the step
    of the checkpoint.

    A run that uses your own code, such as a reward, programs, such as MCP servers, or secrets, such as the key of a
    judge, needs --trust: the directory may come from elsewhere.

    With the URL of a mirror (run.mirror), the records and the newest checkpoint of the run are first fetched into
    runs/NAME, or into the folder NAME of another run.dir. The run is mirrored there again.

    \b
      asyncrl resume quickstart                           from its newest checkpoint
      asyncrl resume quickstart --at step-100             from step 100; later steps are trained again
      asyncrl resume quickstart --at step-100 learner.optimizer.learning_rate=1e-6
      asyncrl resume quickstart learner.total_steps=400   train a finished run further
      asyncrl resume s3://bucket/quickstart               on a machine that has nothing of the run
    """
    step = None if at is None else step_of(at)
    mirror = run if is_url(run) else None
    if mirror is not None:
        check_url(mirror)
    begun = begun_directory()
    if begun is not None:
        directory = begun  # not fetched again: the mirror's storage may not answer now
    else:
        report = partial(say, err=True)
        directory = existing_run(Path(run)) if mirror is None else fetched(mirror, overrides, step=step, report=report)
        directory = directory if directory.name else directory.resolve()
    saved = saved_config(directory)
    check_recorded(directory, saved)
    # The directory may have been moved since the run wrote its configuration.
    here = {"run.dir": str(directory.parent), "run.name": directory.name}
    if not trust:
        # the user has named the mirror; a mirror that only the configuration names may be of another person
        of_user = {} if mirror is None else {"run.mirror": None}
        check_trusted(directory, load_config([saved, {**here, **of_user}], overrides))
    here |= {} if mirror is None else {"run.mirror": mirror}
    config, prompts = prepared([saved, here], overrides, allow_public=allow_public)
    if config.run.dir / config.run.name != directory:
        raise ConfigError(
            f"run.dir and run.name name {config.run.dir / config.run.name}, but a run is resumed in its directory "
            f"{directory}: leave them out, or begin a new run with asyncrl up -c {saved}"
        )
    # Once the run has started, config.yaml has the overrides, so the command that resumes the run needs none.
    command = again("up", [saved], [], allow_public=allow_public)
    # If a process of this command has gone back to --at and has died, the restarted process continues from the newest
    # checkpoint, which the dead process may have saved.
    choose = partial(chosen_checkpoint, step=step if begun is None else None)
    run_in_terminal(config, prompts, command="up", address=config.ray.address, choose=choose, again=command)


def check_recorded(directory: Path, saved: Path) -> None:
    """Raises RunError if the directory has no `run.json`, or if this file cannot be read: then no run was recorded
    there, and `resume` would begin a new one. `saved` is the run's config.yaml, for the message."""
    if not (directory / "run.json").exists():
        raise RunError(
            f"{directory} has a configuration and no run.json, so no run was recorded there that could be resumed; put "
            f"run.json back, or begin a new run with asyncrl up -c {saved}"
        )
    read_info(directory)  # its error says why the file cannot be read


def check_trusted(directory: Path, config: Config) -> None:
    """Raises ConfigError or RunError if a run with this configuration needs --trust."""
    if refusal := untrusted(config):
        raise ConfigError(refusal)
    if config.ray.address is not None:
        own_address(directory, config.ray.address, option="--trust")
