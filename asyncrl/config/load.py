"""Loads a validated `Config` from files and the command line, and writes a `Config` as YAML.

Layers (files, or mappings from Python) are merged from left to right, then the overrides are applied in their order.
Mappings are merged key by key; any other value replaces the earlier value. Validation is strict about types: `true` is
not accepted as a number, nor `"8"` as an integer. All violations are reported in one error, each with the layer or
override that set the value. `checks.check_config` checks the rules that involve several fields.
"""

import functools
import json
import shlex
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from asyncrl.config.error_messages import ON_COMMAND_LINE, error_message, origin_of
from asyncrl.config.eval_sets import with_whole_sets
from asyncrl.config.field_types import PER_DEPLOYMENT
from asyncrl.config.plain_yaml import MOST_CHARACTERS, dump_yaml, parse_yaml, plain
from asyncrl.config.recipes import config_file, find_data, recipe_file, with_modules
from asyncrl.config.schema import Config, KeyPath, marked
from asyncrl.config.secret_values import secret_message, secret_values
from asyncrl.errors import ConfigError

_REPLACED: Collection[KeyPath] = {("algorithm", "advantage")}
"""Mappings that a later layer replaces if it has a `name`: their other keys are options of that name."""

Layer = Path | str | Mapping[str, object]
"""A part of a configuration: the path of a YAML file, the name of a recipe, or a mapping whose keys are sections or
dotted keys."""


def load_config(layers: Sequence[Layer], overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of `layers`, merged from left to right, with the overrides `a.b=c` applied last.

    A layer is the path of a YAML file, the name of a recipe such as `quickstart`, or a mapping. The keys of a mapping
    are sections, or dotted keys: `{"model": {"path": "models/my-llama"}, "learner.total_steps": 100}`. The value of an
    override is YAML: `staleness.max_versions=2`, `generator.stop=["\\n"]`, `data.path=null`.

    Raises ConfigError with one line for each problem. If any file or override cannot be read, it lists only those.
    Otherwise it lists the values that look like secrets, without showing them, or else the wrong keys and values.
    """
    merged, origins = _merged(layers, overrides)
    if secrets := list(secret_values(merged)):  # before any other error, which might show a value
        raise ConfigError("\n".join(secret_message(path, origin=origin_of(path, origins)) for path in secrets))
    try:
        # The detour over JSON is needed: in JSON mode, strict validation accepts text for paths and lists for tuples.
        return Config.model_validate_json(json.dumps(with_whole_sets(merged)), strict=True)
    except ValidationError as error:
        violations = error.errors(include_url=False)
        lines = [error_message(violation, origins=origins) for violation in violations]
        raise ConfigError("\n".join(lines)) from None


def config_origins(layers: Sequence[Layer], overrides: Sequence[str]) -> dict[KeyPath, str]:
    """Returns where each key was set last: `in FILE`, `in mapping 2` or `on the command line`. Keys with their default
    are left out."""
    return _merged(layers, overrides)[1]


def _merged(layers: Sequence[Layer], overrides: Sequence[str]) -> tuple[dict[str, object], dict[KeyPath, str]]:
    """Returns all layers and overrides merged into one tree, and where each key was set last."""
    merged: dict[str, object] = {}
    origins: dict[KeyPath, str] = {}
    problems: list[str] = []
    sources: list[tuple[str, Callable[[], dict[str, object]]]] = [
        *(_source(number, layer) for number, layer in enumerate(layers, start=1)),
        *((ON_COMMAND_LINE, functools.partial(_parse_override, override)) for override in overrides),
    ]
    for origin, read in sources:
        try:
            _merge(merged, read(), origin=origin, origins=origins)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return merged, origins


def dump_config(config: Config) -> str:
    """Returns the configuration with all defaults as YAML. `load_config` reads it back as an equal `Config`."""
    return dump_yaml(config.model_dump(mode="json"))


def shared_config(config: Config) -> dict[str, object]:
    """Returns the settings that must be equal in all deployments of a run, by dotted key.

    These are the settings that decide what the run computes. Settings of single machines are left out.
    """
    return {key: value for key, value in flat_config(config).items() if not is_own(key)}


def flat_config(config: Config) -> dict[str, object]:
    """Returns every setting by dotted key."""
    return _flatten(config.model_dump(mode="json"))


def first_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """Returns the first dotted key, in the order of the schema, in which two shared configs differ; None if they agree.

    A key that only one of the two has counts as a difference.
    """
    missing = object()
    return next((key for key in [*ours, *theirs] if ours.get(key, missing) != theirs.get(key, missing)), None)


def is_own(key: str) -> bool:
    """Returns whether the deployments of one run may have different values for a dotted key."""
    return any(f"{key}.".startswith(f"{own}.") for own in marked(PER_DEPLOYMENT))


def _flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat


def _read_layer(given: Path) -> dict[str, object]:
    """Returns the tree of a file or of a recipe. The files that it names are found from here, or beside it."""
    file, by_name = config_file(given)
    tree = _read_mapping(file)
    find_data(tree, folder=file.parent, folder_first=by_name)
    return with_modules(tree, folder=file.parent) if by_name else tree


def _read_mapping(file: Path) -> dict[str, object]:
    try:
        text = _text_of(file)
    except FileNotFoundError:
        recipe = f"; `-c {file.stem}` is the recipe of this name" if recipe_file(file.stem) is not None else ""
        raise ConfigError(f"{file}: no such file; name an existing file with -c{recipe}") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: is a directory; name a file with -c") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    data = parse_yaml(text, source=str(file), fix="; fix the file, or name a YAML config with -c")
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{file}: holds a {type(data).__name__}; a config must be a mapping of sections such as `run:`"
        )
    return data


def _text_of(file: Path) -> str:
    """Returns the text of a file. A pipe is read only if it is one of the shell's, such as that of `-c <(command)`."""
    mode = file.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or str(file).startswith(("/dev/", "/proc/"))):
        raise ConfigError(f"{file}: is a pipe or a device; name a regular file with -c")
    with file.open("rb") as opened:
        data = opened.read(MOST_CHARACTERS + 1)
    if len(data) > MOST_CHARACTERS:
        raise ConfigError(f"{file}: has more than {MOST_CHARACTERS:,} bytes; a config has a few thousand")
    return data.decode()


def _parse_override(override: str) -> dict[str, object]:
    key, equals, text = override.partition("=")
    is_file = override.endswith((".yaml", ".yml")) or Path(override).is_file()
    if not equals and (is_file or recipe_file(override)):
        kind = "file" if is_file else "recipe"
        raise ConfigError(
            f"{override!r} is the name of a {kind}, not an override; did you mean `-c {shlex.quote(override)}`?"
        )
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{override!r} is not an override; write section.key=value, e.g. staleness.max_versions=2")
    quoted = shlex.quote(json.dumps(text, ensure_ascii=False))
    fix = f"; the value is read as YAML, and text like this needs quotes: {key}={quoted}"
    try:
        return _nested({key: parse_yaml(text, source=f"override {override!r}", fix=fix)})
    except ConfigError:
        if secrets := list(secret_values(_nested({key: text}))):  # the error shows the text
            raise ConfigError(secret_message(secrets[0], origin=f" ({ON_COMMAND_LINE})")) from None
        raise


def _source(number: int, layer: Layer) -> tuple[str, Callable[[], dict[str, object]]]:
    """Returns where the keys of a layer stand, for messages, and a function that reads the layer."""
    if isinstance(layer, Mapping):
        return f"in mapping {number}", lambda: plain(_nested(layer), source=f"mapping {number}")
    return f"in {layer}", functools.partial(_read_layer, Path(layer))


def _nested(layer: Mapping[str, object]) -> dict[str, object]:
    """Returns a mapping as a tree in which dotted keys have become sections."""
    tree: dict[str, object] = {}
    for key, value in layer.items():
        section, *below = str(key).split(".")
        for name in reversed(below):
            value = {name: value}
        _merge(tree, {section: value}, origin="", origins={})
    return tree


def _merge(
    into: dict[str, object],
    layer: Mapping[str, object],
    *,
    origin: str,
    origins: dict[KeyPath, str],
    path: KeyPath = (),
) -> None:
    """Merges `layer` into `into` in place, and writes into `origins` where each key was set last."""
    for name, value in layer.items():
        origins[(*path, name)] = origin
        if not isinstance(value, Mapping):
            into[name] = value
            continue
        below = into.get(name)
        if not isinstance(below, dict) or ((*path, name) in _REPLACED and "name" in value):
            below = into[name] = {}
        _merge(below, value, origin=origin, origins=origins, path=(*path, name))
