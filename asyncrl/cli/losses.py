"""`asyncrl losses`: the presets of `algorithm.loss`, or one of them axis by axis. Starts nothing."""

from typing import Annotated

import msgspec
import typer

from asyncrl.algorithms.objective import is_corrected
from asyncrl.algorithms.presets import PRESETS, Preset, resolve_objective
from asyncrl.cli.options import command_app
from asyncrl.config.dialect import dump_yaml

app = command_app()


@app.command()
def losses(name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show this one's axes.")] = None) -> None:
    """List the published objectives, with the paper and the use of each; or spell one out as YAML.

    What is printed for a name can be changed and used as it is:

    \b
      algorithm:
        loss: gspo                       # a preset,
        overrides: {surrogate: {hi: 1.001}}   # with another bound
    """
    if name is None:
        width = max(map(len, PRESETS))
        for title, rows in _sections().items():
            typer.echo(typer.style(title, bold=True))
            for key, preset in rows.items():
                typer.echo(f"  {key:<{width}}  {preset.use}  [{preset.source}]")
        return
    objective = resolve_objective(name, {})
    preset = PRESETS[name]
    typer.echo(f"# {name}: {preset.use}\n# {preset.source}; published with algorithm.advantage: {preset.baseline}")
    typer.echo(dump_yaml({"algorithm": {"loss": msgspec.to_builtins(objective)}}), nl=False)


def _sections() -> dict[str, dict[str, Preset]]:
    """Presets by whether they may train on samples of older weights."""
    titles = {
        True: "for samples of older weights",
        False: "for samples of the same weights (staleness.max_versions: 0)",
    }
    sections: dict[str, dict[str, Preset]] = {title: {} for title in titles.values()}
    for name, preset in PRESETS.items():
        sections[titles[is_corrected(preset.objective)]][name] = preset
    return sections
