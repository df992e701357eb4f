"""`asyncrl model -c FILE`: build the tiny model that a configuration describes, or find that it is there."""

import typer

from asyncrl.cli.options import ConfigFiles, Overrides, checked_config, command_app, print_warnings

app = command_app()


@app.command()
def model(files: ConfigFiles, overrides: Overrides) -> None:
    """Build `model.tiny` at `model.path` and warm it up on the dataset's training part; `asyncrl up` does so itself.

    Does nothing when the directory holds a model of the same recipe, or a model of another make.
    """
    config, warnings = checked_config(files, overrides, roles=())
    print_warnings(warnings)

    from asyncrl.policy.tiny_model import ensure_model  # torch and transformers, after all that can be refused

    typer.echo(ensure_model(config, report=lambda line: typer.echo(line, err=True)))
