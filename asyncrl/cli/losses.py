"""`asyncrl losses`: lists the presets of `algorithm.loss`, prints the axes of one of them or of a configuration, or
describes the axes. An axis is one part of an objective, such as its surrogate, its importance weight or its penalties.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import typer

from asyncrl.algorithms.axes import Axis, all_axes, axis_named
from asyncrl.algorithms.checks import NEEDS_CRITIC
from asyncrl.algorithms.objective import is_corrected
from asyncrl.algorithms.presets import DEFAULT_BASELINE, PRESETS, Preset, advantage_of, own_loss, resolve_objective
from asyncrl.cli.options import ConfigFiles
from asyncrl.cli.terminal import say
from asyncrl.config.import_path import is_import_path
from asyncrl.config.load import dump_yaml, load_config, parse_yaml
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError


def losses(
    files: ConfigFiles,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME | KEY=VALUE",
            show_default=False,
            help="Without -c: a preset, or with --axes an axis. With -c: overrides of the configuration.",
        ),
    ] = None,
    axes: Annotated[bool, typer.Option("--axes", help="Show the axes and their values, or all of one axis.")] = False,
) -> None:
    """List the published objectives with paper and use, or print one of them as YAML. With -c, print all axes (parts,
    such as the surrogate) of the objective with which a configuration trains.

    You can paste the YAML into a configuration and change it. You can also name a preset and override some axes:

    \b
      algorithm:
        loss: gspo                            # a preset
        overrides: {surrogate: {hi: 1.001}}   # with another upper bound

    A mapping replaces only the fields that it names. The lists gates and penalties are replaced as a whole. An entry of
    the new list takes the fields that it does not name from the preset's entry with the same stat or kind.

    \b
      asyncrl losses gspo
      asyncrl losses -c mine.yaml algorithm.overrides.surrogate.hi=1.001
      asyncrl losses --axes surrogate
    """
    if files and axes:
        raise ConfigError(
            "--axes describes the axes and reads no configuration: leave out -c, or leave out --axes to see the values "
            "of the configuration's axes"
        )
    if files:
        say(axes_of_config(load_config(files, words or [])))
        return
    if len(words or []) > 1:
        raise ConfigError(f"{' '.join(words or [])}: name one preset, or give the overrides of a configuration with -c")
    name = words[0] if words else None
    if axes:
        say(_table_of_axes() if name is None else _axis(axis_named(name)))
        return
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


def axes_of_config(config: Config) -> str:
    """Returns the objective and the advantage estimator of a configuration as YAML, with the values of all axes of the
    objective. Raises ConfigError if the loss is the user's own."""
    if own := own_loss(config.algorithm):
        raise ConfigError(f"algorithm.loss = {own.path}: a loss of your own has no axes")
    objective = resolve_objective(config.algorithm.loss, config.algorithm.overrides)
    section = {"loss": msgspec.to_builtins(objective), "advantage": advantage_of(config.algorithm)}
    return dump_yaml({"algorithm": section}).removesuffix("\n")


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


def _table_of_axes() -> str:
    """Returns every axis with its named values or its options, each with the first sentence of its text."""
    lines = []
    for axis in all_axes():
        lines.append(f"{axis.name}: {_first(axis.text.meaning)}")
        named = {each.name: _first(each.text.meaning) for each in axis.choices}
        options = {each.name: _first(each.text.meaning) + _named(each) for each in axis.options}
        rows = named or options
        width = max(map(len, rows), default=0)
        lines += [f"  {key:<{width}}  {text}" for key, text in rows.items()]
    return "\n".join([*lines, "`asyncrl losses --axes NAME` shows all of one axis; docs/losses.md has the same."])


def _axis(axis: Axis) -> str:
    """Returns everything about one axis, with examples in YAML."""
    lines = [f"{axis.name} ({axis.kind}{f', default {axis.default}' if axis.default else ''})", axis.text.meaning]
    for each in axis.choices:
        lines += [f"\n{each.name}: {each.text.meaning}", *_options(each.options)]
        lines += [f"  stale tokens: {each.text.stale}"] if each.text.stale else []
        lines += [f"  presets: {', '.join(each.presets)}"] if each.presets else []
    if axis.options:
        lines += ["", *_options(axis.options)]
    lines += [f"\nstale tokens: {axis.text.stale}"] if axis.text.stale else []
    lines += [f"presets: {', '.join(axis.presets)}"] if axis.presets else []
    for place, example in axis.examples().items():
        lines += [f"\n# an example of {place}", dump_yaml(parse_yaml(example, source=place)).removesuffix("\n")]
    return "\n".join(lines)


def _options(options: Iterable[Axis], *, indent: str = "  ") -> Iterator[str]:
    for option in options:
        default = f", default {option.default}" if option.default else ""
        meaning = option.text.meaning.replace("\n\n", " ")
        yield f"{indent}{option.name} ({option.kind}{default}): {meaning}"
        yield from (f"{indent}  {each.name}: {each.text.meaning}" for each in option.choices if not each.options)
        yield from _options(option.options, indent=f"{indent}  ")


def _first(text: str) -> str:
    """Returns the first sentence of a text."""
    return re.split(r"(?<!Dr)(?<=[.]) (?=[A-Z`])|\n", text, maxsplit=1)[0]


def _named(option: Axis) -> str:
    return f" One of {', '.join(each.name for each in option.choices)}." if option.choices else ""
