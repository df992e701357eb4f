"""`asyncrl config`: show, check or describe a configuration. Starts no run. Imports nothing heavy by itself."""

import json
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.before_start import look
from asyncrl.cli.options import AllowPublic, ConfigFiles, Overrides, checked_config, command_app, print_warnings
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

app = command_app(help="Show, check or describe a configuration, without starting anything.")


@app.command()
def show(files: ConfigFiles, overrides: Overrides) -> None:
    """Print the resolved configuration as YAML, defaults included."""
    typer.echo(dump_config(load_config(files, overrides)), nl=False)


@app.command()
def check(files: ConfigFiles, overrides: Overrides, allow_public: AllowPublic = False) -> None:
    """Check keys, values, the rules over several of them, and that the files, models, modules and tasks they name are
    here. Then import your own code, make the reward in a process of its own, and read the first rows of your dataset.

    Exits with 2 and all that is wrong, or prints ok. Asks no hub.
    """
    config, warnings = checked_config(files, overrides, allow_public=allow_public)
    print_warnings([*warnings, *look(config)])
    typer.echo("ok")


@app.command()
def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there.")] = None,
) -> None:
    """Print the JSON schema of configuration files, for editors that complete and check YAML."""
    text = json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False)
    if output is None:
        typer.echo(text)
    else:
        try:
            output.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {output}: {error.strerror}") from None
