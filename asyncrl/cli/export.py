"""`asyncrl export RUN FOLDER`: writes the trained weights of a run as other programs load them."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.checkpoints.directory import CHECKPOINTS, HF, complete_steps
from asyncrl.cli.options import RunOrMirror, at_option, recorded_run
from asyncrl.cli.preflight import model_directory, model_files
from asyncrl.cli.terminal import say
from asyncrl.config.schema import Config
from asyncrl.deployment.fetching import MirroredRun
from asyncrl.deployment.known_runs import best_of
from asyncrl.deployment.resuming import found_checkpoint, step_of
from asyncrl.errors import ConfigError
from asyncrl.learner.records import read_config
from asyncrl.policy.model_directory import counts_problem
from asyncrl.run_files import opened

BEST = "best"
"""Name for --at of the kept checkpoint with the highest held-out reward."""


def export(
    run: RunOrMirror,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write. An earlier export is replaced.")],
    at: Annotated[
        str | None,
        at_option(
            help="Checkpoint to export, such as step-140, or best: the one with the highest held-out reward. Default: "
            "the newest one that is undamaged.",
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Add the adapter to the model's weights, and write the whole model."),
    ] = False,
) -> None:
    """Write the trained weights of a checkpoint as a Hugging Face directory, which vLLM and transformers load.

    A run with model.lora has trained an adapter. Its directory has the adapter only, and names the model to which it
    belongs, for peft and vLLM. With --merge, the directory has the whole model, and needs neither. Merging loads the
    model in float32 into the memory of this process.

    \b
      asyncrl export quickstart speller                 the weights, or the adapter
      asyncrl export lora speller --merge               the model with the adapter in it
      asyncrl export lora speller --at step-100
      asyncrl export quickstart speller --at best       the best evaluation (checkpoint.keep_best)
      asyncrl export s3://bucket/quickstart speller     from the mirror of the run (run.mirror)
    """
    if re.match(r"[A-Za-z0-9+.-]{2,}:/", str(folder)):  # pathlib makes one slash of two
        raise ConfigError(f"{folder} is a URL, and only a folder works here; export to a folder, and copy it")

    def fetch(mirror: MirroredRun) -> None:
        mirror.records()
        mirror.checkpoint(_step(mirror.directory, mirror.steps, at, run=run))

    with recorded_run(run, fetch) as directory:
        config = read_config(directory)
        step = _step(directory, complete_steps(directory / CHECKPOINTS), at, run=run)
        checkpoint, manifest = found_checkpoint(directory, step)
        if config.model.lora is not None:
            _export_adapter(config, checkpoint, folder, merge=merge)
        elif merge:
            raise ConfigError(f"--merge: the run {run} has trained whole weights, and no adapter; leave out --merge")
        else:
            _copy_weights(checkpoint, folder, of_hf=[name for name in manifest.files if name.startswith(f"{HF}/")])
    say(str(folder))


def _step(directory: Path, steps: Sequence[int], at: str | None, *, run: str) -> int | None:
    """Returns the step of the checkpoint that --at names; None for the newest one. With `--at best`, this is the one of
    `steps` whose evaluation on the held-out set `checkpoint.best_eval` has the highest reward. `run` is the run's name
    on the command line."""
    if at != BEST:
        return None if at is None else step_of(at)
    name = read_config(directory).checkpoint.best_eval
    if (best := best_of(directory, steps, name=name)) is None:
        raise ConfigError(
            f"--at {BEST}: no checkpoint of the run {run} has an evaluation {name}; name a checkpoint, such as "
            "step-140, or run with eval.every_steps and checkpoint.keep_best"
        )
    return best.step


def _export_adapter(config: Config, checkpoint: Path, folder: Path, *, merge: bool) -> None:
    """Writes the adapter of a checkpoint to `folder`, or the model with the adapter in it."""
    import torch  # takes seconds

    from asyncrl.checkpoints.run import POLICY, parts_of
    from asyncrl.complete_directory import discard
    from asyncrl.policy.adapter_export import convert_adapter, merge_adapter

    lora, model = config.model.lora, config.model
    assert lora is not None, "the caller has checked it"
    local = model_directory(config)
    if local is not None and not local.is_dir():
        raise ConfigError(
            f"model.path = {model.path}: the adapter belongs to this model, which is not there; put it back, or run "
            "the command in the directory in which the run was started"
        )
    if (files := model_files(config)) is not None and (problem := counts_problem(files)) is not None:
        raise ConfigError(f"model.path = {model.path}: {problem}")
    base = os.path.abspath(model.path) if os.path.isdir(model.path) else model.path
    adapter = folder.with_name(f"{folder.name}.adapter") if merge else folder
    dtype: torch.dtype = getattr(torch, model.dtype)
    weights, _ = parts_of(checkpoint / POLICY)
    convert_adapter(
        lora,
        weights_path=weights,
        base=base,
        tokenizer_path=base,
        path=adapter,
        dtype=torch.float32 if merge else dtype,
    )
    if merge:
        try:
            merge_adapter(adapter, folder, base=base, dtype=dtype)
        finally:
            discard(adapter)


def _copy_weights(checkpoint: Path, folder: Path, *, of_hf: Sequence[str]) -> None:
    """Copies the checkpoint's Hugging Face directory `hf/` to `folder`: the files `of_hf`, which the checkpoint's
    manifest lists. The caller has compared them with the manifest."""
    from asyncrl.complete_directory import COMPLETE, finish, prepare, publish, unfinished

    if not (checkpoint / HF).is_dir():
        raise ConfigError(
            f"{checkpoint} has no folder {HF}/, because checkpoint.hf is false; export the checkpoint at the end of "
            "the run, which has it"
        )
    prepare(folder)
    for name in of_hf:
        if (to := unfinished(folder) / Path(name).relative_to(HF)).name != COMPLETE:
            to.parent.mkdir(parents=True, exist_ok=True)
            with opened(checkpoint / name, inside=checkpoint) as file, to.open("wb") as copy:
                shutil.copyfileobj(file, copy)
    finish(folder, save_id=checkpoint.name)
    publish(folder)
