"""`asyncrl recipes`: lists the recipes that come with asyncrl, and copies them and the files for monitoring."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from asyncrl import recipes as shipped
from asyncrl.cli.terminal import command_app, say
from asyncrl.config.load import load_config
from asyncrl.config.recipes import description, files_beside, known_recipe, recipe_names
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

_HELP = """\
List the recipes: complete configurations that come with asyncrl. -c takes their names.

\b
  asyncrl recipes                     list them
  asyncrl up -c quickstart            run one
  asyncrl recipes copy quickstart     write it as quickstart.yaml, to change it
  asyncrl up -c quickstart.yaml       run your copy
"""

app = command_app()

RUNS_IN_REPOSITORY = "../../runs/"
"""The path by which prometheus.yml names the folder of the runs, relative to its own folder in the repository."""

Folder = Annotated[Path, typer.Argument(metavar="[TO]", help="Folder for the copies. It is made if it does not exist.")]


@app.callback(invoke_without_command=True, help=_HELP)
def show(context: typer.Context) -> None:
    """Prints a line for each recipe if there is no subcommand."""
    if context.invoked_subcommand is not None:
        return
    names = recipe_names()
    width = max(map(len, names), default=0)
    for name in names:
        file = shipped.RECIPES / f"{name}.yaml"
        try:
            needs = _gpus(load_config([file]))
        except ConfigError as error:
            say(f"cannot be read: {error}", label=f"{name:<{width}}")
        else:
            say(f"{needs:<7}  {description(file)}", label=f"{name:<{width}}")
    say()
    say("asyncrl up -c NAME runs a recipe, and asyncrl recipes copy NAME writes it into this folder.")


@app.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a recipe, such as quickstart.")],
    to: Folder = Path(),
) -> None:
    """Write a recipe and the files that it needs.

    These are modules and data. The folder is the working directory, or TO. No file is overwritten.

    \b
      asyncrl recipes copy quickstart            writes quickstart.yaml
      asyncrl recipes copy tiny_chat my/folder   writes my/folder/tiny_chat.yaml and my/folder/larger.csv
    """
    recipe = known_recipe(name)
    _write({file.name: file.read_text(encoding="utf-8") for file in [recipe, *files_beside(recipe)]}, to)
    if load_config([recipe]).ray.address is not None:
        say(f"the commands for several machines are at the top of {to / recipe.name}")
        return
    say(f"run it: {shlex.join(['asyncrl', 'up', '-c', str(to / recipe.name)])}")


@app.command()
def dashboards(to: Folder = Path("monitoring/dashboards")) -> None:
    """Write the three Grafana dashboards as JSON. Default of TO: monitoring/dashboards.

    In Grafana, import each file, and choose your Prometheus as its data source.
    """
    _write({file.name: file.read_text(encoding="utf-8") for file in sorted(shipped.DASHBOARDS.glob("*.json"))}, to)


@app.command()
def prometheus(to: Folder = Path("monitoring/prometheus")) -> None:
    """Write configurations of Prometheus, with the alert rules, and of Alertmanager. Default of TO:
    monitoring/prometheus.

    The configuration finds the run `quickstart` in the folder runs/ of the working directory, and any run with
    metrics.learner_port=9400. For another run, add a line to it. If you have a Prometheus already, name the files in
    TO/rules in its `rule_files`.
    """
    root = shipped.PROMETHEUS
    files = [root / "prometheus.yml", root / "alertmanager.yml", *sorted((root / "rules").glob("*.yml"))]
    texts = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}
    runs = os.path.relpath("runs", to)
    texts["prometheus.yml"] = texts["prometheus.yml"].replace(RUNS_IN_REPOSITORY, f"{runs}/")
    _write(texts, to)
    start = ["prometheus", f"--config.file={to / 'prometheus.yml'}", "--web.listen-address=127.0.0.1:9099"]
    say(f"start it: {shlex.join([*start, '--storage.tsdb.path=runs/prometheus'])}")


def _write(texts: Mapping[str, str], to: Path) -> None:
    """Writes each text to its path in the folder `to`, and prints the paths.

    A file that has this text already is left as it is. Raises ConfigError, before anything is written, if one of the
    files exists with another text. Raises it too if a file cannot be written.
    """
    paths = [to / name for name in texts]
    there = [path for path, text in zip(paths, texts.values(), strict=True) if path.is_file() and _has(path, text)]
    if existing := [str(path) for path in paths if os.path.lexists(path) and path not in there]:
        raise ConfigError(
            f"nothing was written: {', '.join(existing)} {'exist' if len(existing) > 1 else 'exists'} with other text, "
            "and no file is overwritten; name another folder, or move the old files away"
        )
    for path, text in zip(paths, texts.values(), strict=True):
        if path in there:
            say(f"{path} is there already, with the same text")
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8", newline="") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror}); name another folder") from None
        say(f"wrote {path}")


def _has(path: Path, text: str) -> bool:
    return path.read_bytes() == text.encode()


def _gpus(config: Config) -> str:
    """Returns how many GPUs the processes of a run need together, in words."""
    count = config.generator.gpus * config.generator.replicas + config.learner.gpus * config.learner.ranks
    if config.critic is not None:
        count += config.critic.gpus * config.critic.ranks
    return f"{count:g} GPU{'s' * (count != 1)}" if count else "no GPU"
