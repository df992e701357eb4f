"""`asyncrl losses`: lists the presets of `algorithm.loss`, or prints the axes of one of them."""

from typing import Annotated

import msgspec
import typer

from asyncrl.algorithms.checks import NEEDS_CRITIC
from asyncrl.algorithms.objective import is_corrected
from asyncrl.algorithms.presets import DEFAULT_BASELINE, PRESETS, Preset, resolve_objective
from asyncrl.cli.terminal import say
from asyncrl.config.import_path import is_import_path
from asyncrl.config.load import dump_yaml
from asyncrl.errors import ConfigError


def losses(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Preset whose axes are printed.")] = None,
) -> None:
    """List the published objectives with paper and use, or print one of them as YAML.

    You can paste the YAML into a configuration and change it. You can also name a preset and override some axes:

    \b
      algorithm:
        loss: gspo                            # a preset
        overrides: {surrogate: {hi: 1.001}}   # with another upper bound

    A mapping replaces only the fields that it names. The lists gates and penalties are replaced as a whole. An entry of
    the new list takes the fields that it does not name from the preset's entry with the same stat or kind.
    """
    if name is None:
        width = max(map(len, PRESETS))
        for title, rows in _sections().items():
            say(label=title)
            for key, preset in rows.items():
                say(f"  {key:<{width}}  {preset.use}  [{preset.source}]")
        return
    if is_import_path(name):
        raise ConfigError(f"{name!r} is an import path, and only presets have axes; name a preset of `asyncrl losses`")
    objective = resolve_objective(name, {})
    preset = PRESETS[name]
    published = (
        "published with the advantages below"
        if preset.baseline
        else "published without its own advantages; the default is shown"
    )
    say(f"# {name}: {preset.use}\n# {preset.source}; {published}")
    section = {"loss": msgspec.to_builtins(objective), "advantage": preset.baseline or DEFAULT_BASELINE}
    printed: dict[str, object] = {"algorithm": section}
    if preset.critic is not None:
        printed["critic"] = msgspec.to_builtins(preset.critic)
    say(dump_yaml(printed).removesuffix("\n"))


def _sections() -> dict[str, dict[str, Preset]]:
    """Returns the presets in three sections: for samples of older weights, for samples of the current weights only, and
    published with a critic."""
    older, same, critic = (
        "for samples of older weights",
        "for samples of the current weights only (staleness.max_versions: 0)",
        "with a critic (`critic`, as in the recipe ppo), or with a group estimator in algorithm.advantage",
    )
    sections: dict[str, dict[str, Preset]] = {older: {}, same: {}, critic: {}}
    for name, preset in PRESETS.items():
        corrected = older if is_corrected(preset.objective) else same
        sections[critic if preset.baseline in NEEDS_CRITIC else corrected][name] = preset
    return sections
