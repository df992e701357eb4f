"""`asyncrl config`: shows, checks or describes a configuration. Starts no run, and imports no heavy library itself."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.before_start import look
from asyncrl.cli.options import AllowPublic, ConfigFiles, Overrides, checked_config, print_warnings, timeouts_of_model
from asyncrl.cli.terminal import command_app, say
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import Config
from asyncrl.config.timeouts import with_timeouts
from asyncrl.errors import ConfigError

app = command_app(help="Show, check or describe a configuration, without starting anything.")


@app.command()
def show(files: ConfigFiles, overrides: Overrides) -> None:
    """Print the merged configuration as YAML, with all defaults. A comment marks the time limits that follow the size
    of the model."""
    config = load_config(files, overrides)
    derived = timeouts_of_model(config)
    say(_marked(dump_config(with_timeouts(config, derived)).removesuffix("\n"), derived))


def _marked(text: str, keys: Collection[str]) -> str:
    """Adds a comment to the lines of YAML with these keys, each of a section and a name."""
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
    it names exist, and whether the run's directory can be written. Then import your own code, create the reward in a
    separate process, and read the first rows of your dataset.

    Prints ok if there are no problems. Otherwise prints all problems and exits with status 2. GPUs that this machine
    lacks are a note, because the configuration may be for another one. Sends no request to the Hugging Face Hub.
    """
    config, warnings = checked_config(files, overrides, allow_public=allow_public, starts=False)
    print_warnings([*warnings, *look(config)])
    say("ok")


@app.command()
def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it to FILE.")] = None,
) -> None:
    """Print the JSON schema of configuration files. Editors use it to complete and check YAML."""
    text = json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False)
    if output is None:
        say(text)
    else:
        try:
            output.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {output}: {error.strerror}; name a file that can be written") from None
