"""`asyncrl config`: shows, checks or describes a configuration. Starts no run, and imports no heavy library itself."""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.algorithms.axes_schema import with_axes
from asyncrl.algorithms.presets import baseline_of, own_loss
from asyncrl.cli.losses import axes_of_config
from asyncrl.cli.options import AllowPublic, ConfigFiles, Overrides
from asyncrl.cli.preflight import checked_config, look, timeouts_of_model
from asyncrl.cli.terminal import command_app, print_warnings, say
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.parts import part_configs
from asyncrl.config.schema import Config
from asyncrl.config.timeouts import with_timeouts
from asyncrl.errors import ConfigError

app = command_app(help="Show, check or describe a configuration, without starting anything.")


@app.command()
def show(files: ConfigFiles, overrides: Overrides) -> None:
    """Print the merged configuration as YAML, with all defaults. A comment in the section algorithm has all axes
    (parts) of the objective, as `asyncrl losses -c` prints them; a loss of your own has none. Comments mark the time
    limits that follow the size of the model. If an axis has a wrong value, a warning on stderr says so, and the comment
    with the axes is left out."""
    config = load_config(files, overrides)
    derived = timeouts_of_model(config)
    text = _marked(dump_config(with_timeouts(config, derived)), derived)
    if own_loss(config.algorithm) is None:
        try:
            text = _with_axes(text, config)
        except ConfigError as error:
            print_warnings([f"the comment with the axes of the objective is left out: {error}"])
    say(text.removesuffix("\n"))


def _with_axes(text: str, config: Config) -> str:
    """Adds all axes of the objective, after `algorithm.overrides`, as a comment to the end of the section
    `algorithm`."""
    axes = "".join(f"  # {line}\n" for line in axes_of_config(config).splitlines())
    comment = f"  # All axes of the objective, and the advantages:\n{axes}"
    return re.sub(r"^algorithm:\n.*?(?=^\S|\Z)", lambda found: found[0] + comment, text, flags=re.DOTALL | re.MULTILINE)


def _marked(text: str, keys: Collection[str]) -> str:
    """Adds a comment to the lines of a configuration in YAML whose key, in the form `section.name`, is in `keys`: the
    value was derived from the size of the model."""
    lines, section = text.split("\n"), ""
    for number, line in enumerate(lines):
        name = line.split(":")[0]
        if not name.startswith(" "):
            section = name
        elif f"{section}.{name.strip()}" in keys and name.startswith("  ") and name[2] != " ":
            lines[number] = f"{line}  # unset: derived from the size of the model"
    return "\n".join(lines)


@app.command()
def check(files: ConfigFiles, overrides: Overrides, allow_public: AllowPublic = False) -> None:
    """Check a configuration: keys, values, rules over several keys, whether the files, models, modules and tasks that
    it names exist, and whether the run's directory can be written. Then read the first rows of your dataset, import
    your own code, and call it: the reward in a separate process with the first row, losses and advantages with a small
    batch.

    Prints ok and a summary of the run if there are no problems. Otherwise prints all problems and exits with status 2.
    GPUs that this machine lacks are a note, because the configuration may be for another one. Sends no request to the
    Hugging Face Hub.
    """
    config, warnings = checked_config(files, overrides, allow_public=allow_public, starts=False)
    print_warnings([*warnings, *look(config)])
    say("ok")
    say("\n".join(summary(config)))


def summary(config: Config) -> Iterator[str]:
    """Yields lines that say what a run of this configuration trains, and how."""
    learner, generator = config.learner, config.generator
    sources = ", ".join(dict.fromkeys(_source(part) for part in part_configs(config).values()))
    samples = learner.groups_per_step * learner.group_size
    yield (
        f"  trains {config.model.path}{'' if config.model.lora is None else ' with an adapter'} on {sources}: "
        f"{learner.total_steps} steps of {learner.groups_per_step} prompts × {learner.group_size} completions = "
        f"{samples}, of at most {generator.max_completion_tokens} tokens each"
    )
    yield (
        f"  algorithm.loss = {config.algorithm.loss_name}, algorithm.advantage = {baseline_of(config.algorithm)}, data "
        f"of weights that are at most {config.staleness.max_versions} steps old"
    )
    yield (
        f"  {generator.replicas} generator replicas, {learner.ranks} learner ranks; everything is written to "
        f"{config.run.dir / config.run.name}"
    )


def _source(part: Config) -> str:
    """Returns where the prompts of `part` come from: the environment, the path of a file, the name of a dataset of the
    Hub, or the import path of a function."""
    if part.data.dataset == "environment":
        return part.environment.name
    return part.data.dataset if part.data.path is None else str(part.data.path)


@app.command()
def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it to FILE.")] = None,
) -> None:
    """Print the JSON schema of configuration files, also of the axes of a loss. Editors use it to complete and check
    YAML."""
    text = json.dumps(with_axes(Config.model_json_schema()), indent=2, ensure_ascii=False, allow_nan=False)
    if output is None:
        say(text)
    else:
        try:
            output.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {output}: {error.strerror}; name a file that can be written") from None
