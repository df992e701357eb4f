"""Begins a new run with the weights of a checkpoint of another run, for `asyncrl fork`.

A fork takes over the weights of the policy, and those of the critic if both runs have one. Everything else is that of a
new run: its steps count from 0, so the learning rate begins with its warm-up, the optimizer has no moments, the prompts
begin at the start of their order, and the buffer is empty. The reference policy stays the model at `model.path`, as it
does when a run is resumed.

The other run is only read. It may still train, and may be of another person: only complete checkpoints are used, and
all of their files are compared with their checksums. `run.json` of the new run names the checkpoint (`ForkPoint`).
"""

from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.checkpoints.directory import CHECKPOINTS, MANIFEST, RunManifest, complete_steps, decoded, folder_of
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.deployment.resuming import found_checkpoint
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.records import ForkPoint, known_info, read_info
from asyncrl.run_files import UNREADABLE, read

if TYPE_CHECKING:
    from asyncrl.checkpoints.run import RunParts  # imports Ray, which reads RAY_AUTH_MODE when it is imported


def fork_point(directory: Path, *, step: int | None) -> tuple[ForkPoint, RunManifest]:
    """Returns the checkpoint after `step` steps of the run in `directory`, or its newest undamaged one if `step` is
    None, and its manifest.

    Raises the errors of `found_checkpoint`, CheckpointError if the checkpoint is of another run, and RunError if
    `run.json` cannot be read.
    """
    info = read_info(directory)
    path, manifest = found_checkpoint(directory, step)
    if manifest.nonce != info.nonce:
        raise CheckpointError(
            f"the checkpoint {path} is of a run with the nonce {manifest.nonce!r}, but the run in {directory} has the "
            f"nonce {info.nonce!r} (run.json): name the directory of the run that saved it"
        )
    return ForkPoint(
        run=info.name, nonce=info.nonce, directory=str(directory.absolute()), version=manifest.version
    ), manifest


def check_shapes(point: ForkPoint, manifest: RunManifest, config: Config) -> None:
    """Raises ConfigError if `config` has another adapter or another tiny model than the checkpoint.

    `model.path` may be another copy of the same model: the ranks compare its tensors with those of the checkpoint.
    """
    before, now = manifest.settings, shared_config(config)
    keys = {key for key in before.keys() | now.keys() if key.startswith("model.lora")}
    keys |= {key for key in before.keys() & now.keys() if key.startswith("model.tiny.")}
    for key in sorted(keys):
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"{key} = {now.get(key)!r}, but {point} has {before.get(key)!r}. A fork keeps the shape of the "
                "model: use the old value. To begin with another adapter, write the weights to a folder with asyncrl "
                "export, and start a run with asyncrl up and this folder as model.path"
            )


def check_new(directory: Path) -> None:
    """Raises ConfigError if `directory` exists, unless it is empty, or has a fork that ended before its first
    checkpoint, which `RunDir.create` moves aside."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    info = known_info(directory)
    if info is None or info.forked_from is None or complete_steps(directory / CHECKPOINTS):
        raise ConfigError(
            f"{directory} exists, and a fork is a new run: give it another name, or continue the run there with "
            f"asyncrl resume {directory}"
        )


def load_fork(parts: "RunParts", point: ForkPoint) -> None:
    """Loads the first weights of a fork into the ranks, which must have started. Raises CheckpointError if the other
    run has deleted or replaced the checkpoint meanwhile, or if the model of this run has other tensors."""
    from asyncrl.checkpoints.run import CRITIC

    path = folder_of(Path(point.directory) / CHECKPOINTS, point.version.step)
    try:
        manifest = _same(path, point)
        parts.load_weights(path, critic=any(name.startswith(f"{CRITIC}/") for name in manifest.files))
        _same(path, point)
    except CheckpointError as error:
        raise CheckpointError(
            f"the run cannot begin with the weights of {point}: {error}. If the other run has deleted the checkpoint "
            "(checkpoint.keep), fork a newer one. If the tensors differ, set model.path to the model of the other run"
        ) from error


def _same(path: Path, point: ForkPoint) -> RunManifest:
    """Returns the manifest of the checkpoint at `path`. Raises CheckpointError if it is not the one of `point`, whose
    files were compared with their checksums when the fork was begun."""
    try:
        manifest = decoded(read(path / MANIFEST), path=str(path))
    except UNREADABLE as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read ({error})") from error
    if (manifest.nonce, manifest.version) != (point.nonce, point.version):
        raise CheckpointError(f"{path} has been replaced: it is of version {manifest.version} now")
    return manifest
