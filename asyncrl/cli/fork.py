"""`asyncrl fork RUN NEW`: begins a new run with the weights of a checkpoint of another run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from asyncrl.checkpoints.directory import CHECKPOINTS, complete_steps
from asyncrl.cli.options import AllowPublic, ConfigFiles, Overrides, RecordedRun, Trust, again, at_option
from asyncrl.cli.preflight import prepared
from asyncrl.cli.restarts import begun_directory
from asyncrl.cli.resume import check_recorded, check_trusted
from asyncrl.cli.start import run_in_terminal
from asyncrl.cli.terminal import say
from asyncrl.config.load import Layer, dump_config, load_config, parse_yaml
from asyncrl.deployment.forking import check_new, check_shapes, fork_point
from asyncrl.deployment.known_runs import existing_run, named_run
from asyncrl.deployment.resuming import no_checkpoint, step_of, unfinished_run
from asyncrl.errors import ConfigError
from asyncrl.learner.records import ForkPoint, known_info, saved_config

At = Annotated[
    str | None,
    at_option(help="Checkpoint to begin with, such as step-50. Default: the newest one that is undamaged."),
]
New = Annotated[
    Path, typer.Argument(metavar="NEW", help="Name of the new run, which is made in runs/, or its directory.")
]


def fork(
    run: RecordedRun,
    new: New,
    overrides: Overrides,
    files: ConfigFiles,
    at: At = None,
    allow_public: AllowPublic = False,
    trust: Trust = False,
) -> None:
    """Begin a new run with the weights of a checkpoint of another run. It does what `asyncrl up` does, with the
    configuration of the other run, and with the files and overrides that you give.

    The new run takes over the weights of the policy, and of the critic if both runs have one, and nothing else. Its
    steps count from 0 to learner.total_steps. The learning rate begins with its warm-up, the optimizer is new, and the
    prompts begin at the start of their order. All settings may differ, except for the shape of the model. The
    reference policy stays the model at model.path. run.mirror is not taken over.

    The other run is not changed, and may still train. run.json, the report and the audit of the new run name the
    checkpoint. asyncrl resume NEW continues the new run after its first checkpoint.

    A configuration with your own code, programs, servers or secrets needs --trust: the directory of the other run may
    come from elsewhere.

    \b
      asyncrl fork quickstart other-loss algorithm.loss=aipo        from its newest checkpoint
      asyncrl fork quickstart stale --at step-50 staleness.max_versions=8
      asyncrl fork /home/ann/runs/math mine -c mine.yaml --trust    with settings of a file
    """
    step, directory = None if at is None else step_of(at), named_run(new)
    here: Layer = {"run.dir": str(directory.parent), "run.name": directory.name}
    point: ForkPoint | None = None
    begun = begun_directory()
    if begun is not None and complete_steps(begun / CHECKPOINTS):
        # An earlier process of this command has begun the fork and saved a checkpoint, and then died. The fork is
        # resumed from this checkpoint, so the run from which it was forked is not read again.
        if (info := known_info(begun)) is not None and info.state == "finished":
            say(f"run {begun} is finished: {info.exit_reason}")
            return
        layers: list[Layer] = [saved_config(begun), *files, here]
    else:
        layers, point = _layers(existing_run(run), files, here, overrides, step=step, trust=trust)
        check_new(directory)
    config, prompts = prepared(layers, overrides, allow_public=allow_public)
    if config.run.dir / config.run.name != directory:
        raise ConfigError(
            f"run.dir and run.name name {config.run.dir / config.run.name}, but NEW names {directory}: leave out both "
            "settings"
        )
    run_in_terminal(
        config,
        prompts,
        command="up",
        address=config.ray.address,
        choose=unfinished_run if point is None else no_checkpoint,
        again=again("up", [directory / "config.yaml"], [], allow_public=allow_public),
        forked_from=point,
    )


def _layers(
    source: Path, files: list[Path], here: Layer, overrides: list[str], *, step: int | None, trust: bool
) -> tuple[list[Layer], ForkPoint]:
    """Returns the layers of the fork's configuration, and the checkpoint with which it begins. Raises ConfigError for a
    configuration that needs --trust, for another adapter or tiny model than that of the checkpoint, or if there is no
    such checkpoint, and RunError if `source` has no run.json."""
    saved = saved_config(source)
    check_recorded(source, saved)
    # The file is read once: its owner could change it after the check of trust.
    recorded: Any = parse_yaml(dump_config(load_config([saved])), source=str(saved))
    layers: list[Layer] = [recorded, {"run.mirror": None}, *files, here]
    config = load_config(layers, overrides)
    if not trust:
        check_trusted(source, config)
    point, manifest = fork_point(source, step=step)
    check_shapes(point, manifest, config)
    # Without the section `model.tiny`, a tiny model is used as it is. With it, the model would be built again if the
    # fork has other prompts, and the other run could not use it any more.
    return [*layers, {"model.tiny": None}], point
