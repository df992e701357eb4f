"""`asyncrl eval -c FILE`: evaluates a model on the held-out prompts of a configuration, without training."""

import asyncio
import contextlib
import gc
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from asyncrl.atomic_write import write_atomically
from asyncrl.checkpoints.directory import CHECKPOINTS, HF, folders
from asyncrl.cli.options import ConfigFiles, Overrides, recorded_run
from asyncrl.cli.preflight import (
    check_model,
    model_directory,
    run_checks,
    search_user_modules,
    timeouts_of_model,
    try_hub,
)
from asyncrl.cli.terminal import command_app, print_warnings, say, sigterm_exits
from asyncrl.config.load import load_config
from asyncrl.config.rules import check_config
from asyncrl.config.schema import Config
from asyncrl.config.timeouts import with_timeouts
from asyncrl.deployment.fetching import is_url
from asyncrl.environments.secrets import hide_secrets
from asyncrl.errors import ConfigError

app = command_app()

OF_MODEL = "model.path="
"""Beginning of the override that names the model."""
_IN_MIRROR = re.compile(
    r"(?P<mirror>.+?)(?:/checkpoints/step-(?P<step>\d{1,15})(?:-[0-9a-f]{16})?(?:/hf)?)?/?", re.ASCII
)
"""The URL of a mirror, or of one of its checkpoints."""
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
"""Variables that keep notes of vLLM and torch out of the output, unless the user has set them. Errors are shown, on
stderr."""


@app.command()
def evaluate(
    files: ConfigFiles,
    overrides: Overrides,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Completions of each prompt: the same as eval.samples=N. 1: a greedy one. Default: eval.samples.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the results to this file, with every prompt, completion and reward.",
        ),
    ] = None,
) -> None:
    """Evaluate a model on the held-out prompts of a configuration: mean reward with its standard error over the
    prompts, pass@k, and the mean of each component of the reward.

    The prompts, the chat template, the limits and the reward are those of a run with this configuration, so the number
    is that of the run's own evaluations. The engine is vLLM. Nothing is trained, no Ray is started, and the directory
    of a run is not changed. The answers are the same each time: samples have seeds that follow from run.seed.

    model.path is a model's directory, a name on the Hugging Face Hub, or a checkpoint of a run. As an override, it may
    also be the URL of a mirror (run.mirror): its newest checkpoint, or URL/checkpoints/step-100. For a checkpoint with
    an adapter (model.lora), first write the whole model with `asyncrl export RUN FOLDER --merge`.

    \b
      asyncrl eval -c my.yaml                           the model with which a run would begin
      asyncrl eval -c my.yaml model.path=runs/my/checkpoints/step-100
                                                        a checkpoint of a run
      asyncrl eval -c my.yaml model.path=s3://bucket/my
                                                        the newest checkpoint in the mirror of a run
      asyncrl eval -c my.yaml --samples 8               pass@1, @2, @4 and @8
      asyncrl eval -c my.yaml eval.prompts=1000 --json result.json
                                                        more prompts; all answers in a file
    """
    with _with_local_model(overrides) as (local, url):
        _evaluate(_configured(files, local, samples=samples), model=url, json=json)


@contextlib.contextmanager
def _with_local_model(overrides: Sequence[str]) -> Iterator[tuple[list[str], str | None]]:
    """Yields the overrides, with a temporary directory in place of a `model.path` that is the URL of a mirror or of one
    of its checkpoints, and this URL, if there is one."""
    url = next((each.removeprefix(OF_MODEL) for each in reversed(overrides) if each.startswith(OF_MODEL)), "")
    if not is_url(url) or (parts := _IN_MIRROR.fullmatch(url)) is None:
        yield list(overrides), None
        return
    step = None if parts["step"] is None else int(parts["step"])
    with recorded_run(parts["mirror"], lambda mirror: mirror.checkpoint(step)) as directory:
        [checkpoint] = folders(directory / CHECKPOINTS).values()
        yield [*overrides, f"{OF_MODEL}{checkpoint}"], url


def _evaluate(config: Config, *, model: str | None, json: Path | None) -> None:
    """Evaluates the model of a checked configuration, prints the results, and writes them to `json`. `model` is the
    name of the model to show; None for `model.path`."""
    model = model or config.model.path
    from asyncrl.generation.vllm_engine import prepare_environment

    os.environ.update({name: value for name, value in QUIET.items() if not os.environ.get(name)})
    prepare_environment(config)  # before the first import of vLLM
    from asyncrl.deployment.model_evaluation import evaluate_model, result_lines

    say(f"model: {model}", err=True)
    report = partial(say, err=True)
    with sigterm_exits():
        results = asyncio.run(evaluate_model(config, report=report, reward_output=report))
    gc.collect()  # vLLM's objects print errors if they are deleted only when the interpreter exits
    for result in results:
        for line in result_lines(result):
            say(line)
    if json is not None:
        content = {"model": model, "seed": config.run.seed, "sets": results}
        write_atomically(json, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
        say(str(json), err=True)


def _configured(files: list[Path], overrides: list[str], *, samples: int | None) -> Config:
    """Returns the checked configuration of the evaluation. Its model is a directory with a complete model, or a model
    of the Hugging Face Hub; `model.tiny` and `model.lora` are unset. Raises ConfigError for other models."""
    config = load_config(files, overrides if samples is None else [*overrides, f"eval.samples={samples}"])
    search_user_modules(config, files)
    hide_secrets(config.environment, os.environ)
    if not any(each.prompts for each in config.eval.each_set().values()):
        raise ConfigError("eval.prompts = 0: there would be no prompt to evaluate; raise it")
    path = model_directory(config)
    if path is not None and (path / HF).is_dir():
        path = path / HF
    if path is not None and (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.path = {path}: has an adapter, not a whole model; write the model with the adapter in it, "
            "`asyncrl export RUN FOLDER --merge`, and evaluate that folder"
        )
    if config.model.tiny is not None and path is not None and not path.exists():
        raise ConfigError(
            f"model.path = {path}: there is no such folder; build the tiny model with `asyncrl model`, or name a "
            "checkpoint of a run"
        )
    # The model is evaluated as it is: it is not built, and it has no adapter.
    as_it_is = {"path": config.model.path if path is None else str(path), "tiny": None, "lora": None}
    config = config.model_copy(update={"model": config.model.model_copy(update=as_it_is)})
    config = with_timeouts(config, timeouts_of_model(config))
    print_warnings(run_checks(config, [check_config, check_model, try_hub]))
    return config
