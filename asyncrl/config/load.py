"""From files and command line to a validated `Config`, and back to YAML.

Files are merged left to right, then the overrides in their order: mappings merge key by key, everything else is
replaced. Validation is strict about types (`true` is no number, `"8"` no integer) and reports every violation at
once, with the file or override that set it. Rules over several fields are `checks.check_config`'s.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from asyncrl.config.dialect import dump_yaml, parse_yaml
from asyncrl.config.explain import ON_COMMAND_LINE, explain
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

KeyPath = tuple[str, ...]

# What may differ between the deployments of one run: places, sizes of pools and hardware. All else must agree.
_OWN_SECTIONS = ("metrics", "ray")
_OWN_KEYS = frozenset(
    {
        "run.dir",
        "generator.replicas",
        "generator.min_replicas",
        "generator.cpus",
        "generator.gpus",
        "generator.node_labels",
        "generator.kv_cache_gib",
        "generator.gpu_memory_utilization",
        "generator.tensor_parallel_size",
        "generator.max_concurrent_groups",
        "generator.max_starts_per_s",
        "generator.enforce_eager",
        "generator.startup_timeout_s",
        "learner.cpus",
        "learner.gpus",
        "learner.node_labels",
        "learner.threads",
        "critic.cpus",
        "critic.gpus",
        "critic.node_labels",
    }
)


def load_config(files: Sequence[Path], overrides: Sequence[str]) -> Config:
    """The configuration of `files`, merged left to right, with `a.b=c` overrides on top.

    An override's value is YAML: `staleness.max_versions=2`, `generator.stop=["\\n"]`, `data.path=null`.

    Raises ConfigError with a line for everything that is wrong: first of files and overrides that cannot be read,
    then of keys and values.
    """
    merged, origins = _merged(files, overrides)
    try:
        # JSON is the mode in which strict validation still takes text for paths and lists for tuples.
        return Config.model_validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        violations = error.errors(include_url=False)
        lines = [explain(violation, origins=origins) for violation in violations]
        key = ".".join(map(str, violations[0]["loc"])) if len(violations) == 1 else ""
        raise ConfigError("\n".join(lines), key=key) from None


def config_origins(files: Sequence[Path], overrides: Sequence[str]) -> dict[KeyPath, str]:
    """What set each key last, `in FILE` or `on the command line`; keys that are left at their default are not there."""
    return _merged(files, overrides)[1]


def _merged(files: Sequence[Path], overrides: Sequence[str]) -> tuple[dict[str, object], dict[KeyPath, str]]:
    """The layers as one tree, and what set each key."""
    merged: dict[str, object] = {}
    origins: dict[KeyPath, str] = {}
    problems: list[str] = []
    for file in files:
        try:
            _merge(merged, _read_mapping(file), origin=f"in {file}", origins=origins)
        except ConfigError as error:
            problems.append(str(error))
    for override in overrides:
        try:
            _merge(merged, _parse_override(override), origin=ON_COMMAND_LINE, origins=origins)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return merged, origins


def dump_config(config: Config) -> str:
    """YAML of the resolved configuration, defaults included; `load_config` reads it back as an equal `Config`."""
    return dump_yaml(config.model_dump(mode="json"))


def shared_config(config: Config) -> dict[str, object]:
    """What every deployment of one run must agree on, by dotted key: the run's meaning, without its machines."""
    return {key: value for key, value in flat_config(config).items() if not is_own(key)}


def flat_config(config: Config) -> dict[str, object]:
    """Every setting by dotted key."""
    return _flatten(config.model_dump(mode="json"))


def first_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """The first dotted key that two shared configs disagree on, in schema order; None when they agree.

    A key that only one of them has counts as a difference.
    """
    missing = object()
    for key in [*ours, *theirs]:
        if ours.get(key, missing) != theirs.get(key, missing):
            return key
    return None


def is_own(key: str) -> bool:
    """Whether deployments of one run may have different values of a dotted key: it speaks of their machines."""
    section, _, name = key.partition(".")
    return section in _OWN_SECTIONS or f"{section}.{name.partition('.')[0]}" in _OWN_KEYS


def _flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat


def _read_mapping(file: Path) -> dict[str, object]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; give an existing one with -c") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: is a directory; name a file with -c") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    data = parse_yaml(text, source=str(file), mend="; mend it there, or name a YAML config with -c")
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: holds {type(data).__name__}; a config is a mapping of sections such as `run:`")
    return _plain(data, source=str(file))


def _parse_override(override: str) -> dict[str, object]:
    key, equals, text = override.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError(f"{override!r} is not an override; write section.key=value, e.g. staleness.max_versions=2")
    quoted = shlex.quote(json.dumps(text, ensure_ascii=False))
    mend = f"; values are YAML, in which text like this needs quotes: {key}={quoted}"
    tree: object = parse_yaml(text, source=f"override {override!r}", mend=mend)
    for name in reversed(names):
        tree = {name: tree}
    assert isinstance(tree, dict)
    return _plain(tree, source=f"override {override!r}")


def _plain(data: dict[str, object], *, source: str) -> dict[str, object]:
    """A copy that shares nothing, or ConfigError for what YAML can say and JSON cannot (sets, bytes, cycles)."""
    try:
        copy = json.loads(json.dumps(data))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: only text, numbers, lists and mappings are allowed: {error}") from None
    assert isinstance(copy, dict)
    return copy


def _merge(
    into: dict[str, object],
    layer: Mapping[str, object],
    *,
    origin: str,
    origins: dict[KeyPath, str],
    path: KeyPath = (),
) -> None:
    """Merge `layer` into `into` in place, and note in `origins` who set each key last."""
    for name, value in layer.items():
        origins[(*path, name)] = origin
        if not isinstance(value, Mapping):
            into[name] = value
            continue
        below = into.get(name)
        if not isinstance(below, dict):
            below = into[name] = {}
        _merge(below, value, origin=origin, origins=origins, path=(*path, name))
