"""`asyncrl losses`: the presets of `algorithm.loss`, or one of them axis by axis. Starts nothing."""

from typing import Annotated

import msgspec
import typer

from asyncrl.algorithms.baselines import CRITICS
from asyncrl.algorithms.checks import NEEDS_CRITIC
from asyncrl.algorithms.objective import is_corrected
from asyncrl.algorithms.presets import DEFAULT_BASELINE, PRESETS, Preset, resolve_objective
from asyncrl.cli.options import command_app
from asyncrl.config.dialect import dump_yaml
from asyncrl.config.import_path import is_import_path
from asyncrl.errors import ConfigError

app = command_app()


@app.command()
def losses(name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show this one's axes.")] = None) -> None:
    """List the published objectives, with the paper and the use of each; or spell one out as YAML.

    What is printed for a name can be changed and used as it is:

    \b
      algorithm:
        loss: gspo                       # a preset,
        overrides: {surrogate: {hi: 1.001}}   # with another bound
    A mapping replaces the fields that it names; gates and penalties are lists and replaced whole, but an entry keeps
    what it does not name of the preset's of the same stat or kind.
    """
    if name is None:
        width = max(map(len, PRESETS))
        for title, rows in _sections().items():
            typer.echo(typer.style(title, bold=True))
            for key, preset in rows.items():
                typer.echo(f"  {key:<{width}}  {preset.use}  [{preset.source}]")
        return
    if is_import_path(name):
        raise ConfigError(f"{name!r} is an import path: only presets have axes to show", key="algorithm.loss")
    objective = resolve_objective(name, {})
    preset = PRESETS[name]
    published = "its advantages are published with it" if preset.baseline else "published without advantages of its own"
    typer.echo(f"# {name}: {preset.use}\n# {preset.source}; {published}")
    section = {"loss": msgspec.to_builtins(objective), "advantage": preset.baseline or DEFAULT_BASELINE}
    printed: dict[str, object] = {"algorithm": section}
    if name in CRITICS:
        printed["critic"] = msgspec.to_builtins(CRITICS[name])
    typer.echo(dump_yaml(printed), nl=False)


def _sections() -> dict[str, dict[str, Preset]]:
    """Presets by whether they may train on samples of older weights, and those that were published with a critic."""
    older, same, critic = (
        "for samples of older weights",
        "for samples of the same weights (staleness.max_versions: 0)",
        "with a critic (`critic`, as in configs/ppo.yaml), or with algorithm.advantage naming a group estimator",
    )
    sections: dict[str, dict[str, Preset]] = {older: {}, same: {}, critic: {}}
    for name, preset in PRESETS.items():
        corrected = older if is_corrected(preset.objective) else same
        sections[critic if preset.baseline in NEEDS_CRITIC else corrected][name] = preset
    return sections
