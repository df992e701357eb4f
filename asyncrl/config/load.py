"""Loads a validated `Config` from files and the command line, and writes a `Config` as YAML.

Layers (files, or mappings from Python) are merged from left to right. All overrides together are the last layer.
Mappings are merged key by key, except for `REPLACED_WHOLE`; any other value replaces the earlier value. Validation is
strict about types: `true` is not accepted as a number, nor `"8"` as an integer. All violations are reported in one
error, each with the layer or override that set the value. `asyncrl.config.rules.check_config` checks the rules that
involve several fields.
"""

import difflib
import functools
import json
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args, get_origin
from urllib.parse import unquote

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.cyaml import CParser  # type: ignore[attr-defined]  # wheels of PyYAML have libyaml
from yaml.resolver import Resolver

from asyncrl.config.import_path import ADAMW, suggest
from asyncrl.config.recipes import config_file, find_data, recipe_file, with_modules
from asyncrl.config.schema import PER_DEPLOYMENT, Config, DatasetSection, KeyPath, ScoringSection, marked, sections
from asyncrl.errors import ConfigError

REPLACED_WHOLE: Collection[KeyPath] = {("algorithm", "loss"), ("algorithm", "advantage")}
"""Mappings that are one value: a later layer replaces them as a whole, because the axes of two objectives, or the
options of two functions, do not belong together. Dotted keys such as `algorithm.loss.cap` change single keys, unless
one of them is `name`."""

_OF_ITS_NAME: Mapping[KeyPath, Collection[str]] = dict.fromkeys(
    (("learner", "optimizer"), ("critic", "optimizer")), ("options", "betas", "eps", "weight_decay")
)
"""Keys of a mapping that belong to its key `name`: if a later layer sets another name, those of earlier layers do not
count. All overrides are one layer, because their order on the command line has no meaning."""

Layer = Path | str | Mapping[str, object]
"""A part of a configuration: the path of a YAML file, the name of a recipe, or a mapping whose keys are sections or
dotted keys."""


def load_config(layers: Sequence[Layer], overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of `layers`, merged from left to right, with the overrides `a.b=c` applied last.

    A layer is the path of a YAML file, the name of a recipe such as `quickstart`, or a mapping. The keys of a mapping
    are sections, or dotted keys: `{"model": {"path": "models/my-llama"}, "learner.total_steps": 100}`. The value of an
    override is YAML: `staleness.max_versions=2`, `generator.stop=["\\n"]`, `data.path=null`.

    Raises ConfigError with one line for each problem. If any file or override cannot be read, the error lists only
    those. Otherwise it lists the values that look like secrets, without showing them; if there are none, it lists the
    wrong keys and values.
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
        (ON_COMMAND_LINE, functools.partial(_parse_overrides, overrides)),
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
    """Returns the first dotted key, in the order of the schema, in which two configurations differ; None if they agree.

    Both are results of `shared_config` or of `flat_config`. A key that only one of them has counts as a difference.
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
    """Returns the tree of a file or of a recipe. A relative `data.path` in it is looked up in the working directory and
    in the folder of the file, and a recipe's modules are imported from its folder."""
    file, by_name = config_file(given)
    tree = _read_mapping(file)
    find_data(tree, folder=file.parent, folder_first=by_name)
    return with_modules(tree, folder=file.parent) if by_name else tree


def _read_mapping(file: Path) -> dict[str, object]:
    try:
        text = _text_of(file)
    except FileNotFoundError:
        or_recipe = f"; `-c {file.stem}` is the recipe of this name" if recipe_file(file.stem) is not None else ""
        raise ConfigError(f"{file}: no such file; name an existing file with -c{or_recipe}") from None
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
    """Returns the text of a file. A pipe or a device is read only below /dev and /proc, where the shell has its pipes,
    such as that of `-c <(command)`. Raises ConfigError for other ones, and for more than `MOST_CHARACTERS` bytes."""
    mode = file.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or str(file).startswith(("/dev/", "/proc/"))):
        raise ConfigError(f"{file}: is a named pipe, a socket or a device; name a regular file, or use -c <(command)")
    with file.open("rb") as opened:
        data = opened.read(MOST_CHARACTERS + 1)
    if len(data) > MOST_CHARACTERS:
        raise ConfigError(f"{file}: has more than {MOST_CHARACTERS:,} bytes; a config has a few thousand")
    return data.decode()


def _parse_overrides(overrides: Sequence[str]) -> dict[str, object]:
    """Returns all overrides as one layer. Raises ConfigError with the problems of all of them."""
    parsed: list[tuple[str, object]] = []
    problems: list[str] = []
    for override in overrides:
        try:
            parsed.append(_parse_override(override))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return _nested(parsed)


def _parse_override(override: str) -> tuple[str, object]:
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
        return key, parse_yaml(text, source=f"override {override!r}", fix=fix)
    except ConfigError:
        if secrets := list(secret_values(_nested([(key, text)]))):  # the error of `parse_yaml` may show the text
            raise ConfigError(secret_message(secrets[0], origin=f" ({ON_COMMAND_LINE})")) from None
        raise


def _source(number: int, layer: Layer) -> tuple[str, Callable[[], dict[str, object]]]:
    """Returns where the keys of a layer stand, for messages, and a function that reads the layer."""
    if isinstance(layer, Mapping):
        return f"in mapping {number}", lambda: _nested(plain(layer, source=f"mapping {number}").items())
    return f"in {layer}", functools.partial(_read_layer, Path(layer))


class _Keys(dict[str, object]):
    """A mapping that stands for dotted keys, and not for the whole value of its key."""


def _nested(items: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Returns pairs of a key and its value as a tree in which dotted keys have become sections. Their order counts only
    if a key occurs twice: `a.b` changes the value of `a`, also if it stands before it."""
    tree: dict[str, object] = {}
    origins: dict[KeyPath, str] = {}
    for path, value in sorted(((str(key).split("."), value) for key, value in items), key=lambda item: len(item[0])):
        for name in reversed(path):
            value = _Keys({name: value})
        _merge(tree, cast("_Keys", value), origin="", origins=origins)
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
        earlier, origins[(*path, name)] = origins.get((*path, name), origin), origin
        if not isinstance(value, Mapping):
            into[name] = value
            continue
        below = into.get(name)
        whole = not isinstance(value, _Keys) or ("name" in value and earlier != origin)
        if not isinstance(below, dict) or ((*path, name) in REPLACED_WHOLE and whole):
            below = into[name] = _Keys() if isinstance(value, _Keys) else {}
        if value.get("name", "") not in ("", below.get("name", ADAMW)):
            for key in _OF_ITS_NAME.get((*path, name), ()):
                if origins.get((*path, name, key), origin) != origin:
                    below.pop(key, None)
        _merge(below, value, origin=origin, origins=origins, path=(*path, name))


# Turns pydantic's validation errors into one line each: key, value, origin of the value, limit, and what to do.
#
# An unknown key gets a suggestion ("did you mean ...?"). The suggested key may be in another section, or in a section
# with another name.

ON_COMMAND_LINE = "on the command line"
_MAX_SHOWN_CHARS = 80

_CHANGE_THE_DISTRIBUTION = frozenset({"typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty"})


class _Wanted(NamedTuple):
    """The kind of value that a field takes: in words, and as the types that YAML reads it as."""

    words: str
    types: tuple[type, ...] = ()


_TRUTH_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
"""Words that YAML 1.1 reads as truth values. In YAML 1.2 they are text."""
# The kind of value that a field takes, by the type of pydantic's error for another value.
_WANTED = {
    "bool_type": _Wanted("true or false", (bool,)),
    "dict_type": _Wanted("a mapping of keys"),
    "float_type": _Wanted("a number", (int, float)),
    "int_type": _Wanted("a whole number", (int,)),
    "list_type": _Wanted("a list"),
    "model_type": _Wanted("a section (a mapping of keys)"),
    "string_type": _Wanted("text"),
    "tuple_type": _Wanted("a list"),
}


def error_message(violation: ErrorDetails, *, origins: Mapping[KeyPath, str]) -> str:
    """Returns one line about one violation. `origins` says where each key was set: `in FILE`, `in mapping 2` or
    ON_COMMAND_LINE."""
    path = tuple(str(part) for part in violation["loc"])
    origin = origin_of(path, origins)
    key, value = ".".join(path), violation["input"]
    if violation["type"] == "extra_forbidden" and path[-1] in _CHANGE_THE_DISTRIBUTION:
        return (
            f"{key}{origin}: is not supported; remove it. With it, the engine would sample from a distribution that "
            "differs from the one whose log-probs the learner computes, and every importance weight would be wrong. "
            "generator.top_k, top_p and min_p are supported, because they only choose among which tokens it samples"
        )
    if violation["type"] == "extra_forbidden":
        return f"unknown key {key}{origin}: {_suggest_key(path, value=value)}"
    if path[:2] == ("environment", "secrets"):  # the value may be a secret that stands in the place of its name
        return f"{key}{origin}: must be a list of names of environment variables, such as [JUDGE_API_KEY]"
    if violation["type"] == "missing":
        return f"{key}{origin}: is missing; add it"
    return f"{key} = {_shown(value)}{origin}: {_limit_and_fix(violation, origin=origin)}"


def origin_of(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    """Returns where a key, or the nearest key above it, was set: ` (in FILE)`. Empty if it was not set."""
    return next((f" ({origins[path[:end]]})" for end in range(len(path), 0, -1) if path[:end] in origins), "")


def _suggest_key(path: KeyPath, *, value: object) -> str:
    """Returns advice for an unknown key: the key that the user probably meant, else the keys of the section.

    `value` is the value of the unknown key. If it is a mapping, its keys help to find a section with another name.
    """
    if answer := known_elsewhere(path, value):
        return answer
    *section, name = path
    fields = {place: list(model.model_fields) for place, model in sections(of_lists=False)}
    siblings = _keys_at(section)
    meant: list[Sequence[str]] = [(*section, close) for close in difflib.get_close_matches(name, siblings, n=1)]
    meant += [(*place, name) for place, names in fields.items() if name in names]
    if not meant and isinstance(value, Mapping):
        shared = {place: len(value.keys() & set(names)) for place, names in fields.items() if place}
        # the section that has the most keys in common with the unknown section was probably renamed
        best = max(shared, key=lambda place: shared[place])
        meant += [best] if shared[best] else []
    if not meant:
        everywhere = {field: (*place, field) for place, names in fields.items() for field in names}
        meant += [everywhere[close] for close in difflib.get_close_matches(name, everywhere, n=1, cutoff=0.75)]
    if meant:
        return f"did you mean {' or '.join('.'.join(each) for each in meant)}?"
    home = f"the keys of `{'.'.join(section)}`" if section else "the sections"
    return f"{home} are {', '.join(siblings)}"


def _keys_at(path: Sequence[str]) -> list[str]:
    """Returns the keys of the section at `path`. For a section in a list or in a mapping of sections, `path` has its
    index or its name after the key of the list or mapping."""
    section: type[BaseModel] = Config
    parts = iter(path)
    for part in parts:
        annotation = section.model_fields[part].annotation
        if get_origin(annotation) in (list, dict):
            next(parts)
        options = (annotation, *get_args(annotation))
        section = next(each for each in options if isinstance(each, type) and issubclass(each, BaseModel))
    return list(section.model_fields)


def _limit_and_fix(violation: ErrorDetails, *, origin: str) -> str:
    kind, value = violation["type"], violation["input"]
    if kind in _WANTED:
        return f"must be {_WANTED[kind].words}{_type_fix(kind, value, origin=origin)}"
    message = re.sub("^(Input|String) should", "must", violation["msg"])
    if kind == "literal_error":
        options = [option.strip("'") for option in str(violation["ctx"]["expected"]).replace(" or ", ", ").split(", ")]
        return message + (suggest(str(value), options) if len(options) > 1 else "")
    return message


def _type_fix(kind: str, value: object, *, origin: str) -> str:
    # on the command line, text needs a second pair of quotes, because the shell removes one
    quoted = "'\"{}\"'" if ON_COMMAND_LINE in origin else '"{}"'
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f"; write {quoted.format(_shown(value))}, with the quotes"
    if kind == "string_type" and isinstance(value, Mapping) and list(value.values()) == [None]:
        text = quoted.format(f"{{{next(iter(value))}}}")
        return f"; write {text}, with the quotes: without them YAML reads a mapping"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, str) and _reads_as(_WANTED[kind].types, value):
        return "; write it without quotes"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        digits = value.replace("_", "")
        return f"; write {digits}" if _reads_as(_WANTED[kind].types, digits) else ""
    if kind == "bool_type" and isinstance(value, str) and value.lower() in _TRUTH_WORDS:
        return f"; write {_TRUTH_WORDS[value.lower()]}"
    if kind == "list_type" and isinstance(value, str):
        return f"; write [{_shown(value)}]"
    if kind == "model_type" and value is None:
        return "; set a key of the section, or remove the line"
    return ""


def _reads_as(types: tuple[type, ...], text: str) -> bool:
    """Returns whether `text`, written in YAML without quotes, would have one of the types."""
    try:
        return type(parse_yaml(text, source="")) in types
    except ConfigError:
        return False


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


# Key names of other libraries. The error for an unknown key suggests the key of asyncrl with the same meaning.

_PENALTY = "a penalty is part of the objective, e.g. `algorithm.overrides: {penalties: [{kind: k3, beta: 0.01}]}`"
_GROUPS = "the number of prompts in a step; learner.group_size is the number of samples of a prompt"

ALIASES: Mapping[str, tuple[str, ...]] = {
    "model.path": ("model_name_or_path", "model_name", "model_id", "pretrained_model_name_or_path"),
    "model.max_length": ("max_model_len", "max_seq_len", "max_seq_length", "seq_len", "context_length"),
    "model.dtype": ("bf16", "fp16", "torch_dtype"),
    "model.lora.rank": ("lora_rank", "lora_r"),
    "model.lora.alpha": ("lora_alpha",),
    "model.lora.target_modules": ("lora_target_modules",),
    "data.path": ("train_files", "train_file", "dataset_path"),
    "data.dataset": ("dataset_name", "train_dataset"),
    "data.epochs": ("num_epochs", "num_train_epochs", "total_epochs"),
    "data.max_prompt_tokens": ("max_prompt_length", "prompt_length"),
    "data.chat": ("chat_template", "apply_chat_template"),
    "environment.reward": ("reward_fn", "reward_func", "reward_funcs", "reward_function"),
    "generator.max_completion_tokens": (
        "max_new_tokens",
        "max_tokens",
        "max_completion_length",
        "max_response_length",
        "response_length",
    ),
    "generator.tensor_parallel_size": ("tp", "tp_size", "tensor_parallel"),
    "generator.gpus": ("num_gpus", "n_gpus", "gpus_per_node", "n_gpus_per_node"),
    "learner.gpus": ("num_gpus", "n_gpus", "gpus_per_node", "n_gpus_per_node"),
    "learner.total_steps": ("max_steps", "num_steps", "num_train_steps", "total_training_steps"),
    "learner.groups_per_step": ("batch_size", "train_batch_size", "rollout_batch_size", "global_batch_size"),
    "learner.group_size": (
        "n",
        "rollout_n",
        "num_generations",
        "num_return_sequences",
        "samples_per_prompt",
        "rollouts_per_example",
    ),
    "learner.micro_batch_size": ("per_device_train_batch_size", "micro_batch_size_per_gpu", "mbs"),
    "learner.activation_checkpointing": ("gradient_checkpointing",),
    "learner.optimizer.learning_rate": ("lr",),
    "learner.optimizer.schedule": ("lr_scheduler", "lr_scheduler_type", "lr_schedule"),
    "learner.optimizer.warmup_steps": ("num_warmup_steps", "lr_warmup_steps", "warmup_ratio"),
    "learner.optimizer.max_grad_norm": ("grad_clip", "clip_grad", "gradient_clipping"),
    "algorithm.overrides": ("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl_beta"),
    "staleness.max_versions": ("max_staleness", "max_async_level", "async_level", "max_off_policy_steps"),
    "checkpoint.every_steps": ("save_steps", "save_freq", "save_interval"),
    "metrics.trackers": ("report_to", "logger", "loggers"),
    "run.name": ("run_name", "experiment_name"),
    "run.dir": ("output_dir", "default_local_dir"),
}
"""Maps a key of asyncrl to its names in other libraries."""

REMARKS: Mapping[str, str] = {"algorithm.overrides": _PENALTY, "learner.groups_per_step": _GROUPS}
"""Maps a key of asyncrl to a remark that a user of another library needs to set it."""

_LORA = "use the section model.lora, which has rank, alpha and target_modules; another kind of adapter is not supported"
NOT_SUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("peft", "peft_config", "use_peft", "lora_config"), _LORA),
    "qlora": "weights are not quantized; model.lora trains an adapter of the weights in model.dtype",
}
"""Maps names of features that asyncrl does not have, or has in another form, to the message for them."""


def known_elsewhere(path: Sequence[str], value: object) -> str | None:
    """Returns advice for the unknown key at `path` if another library uses its name; else None.

    If `value` is a mapping, the keys inside it are looked up too, so that a section of another library (such as
    `trainer`) gets advice for each known key in it.
    """
    found = list(dict.fromkeys(_answers(path, value)))
    return "; ".join(found) or None


def _answers(path: Sequence[str], value: object) -> Iterator[str]:
    *section, name = path
    if name in NOT_SUPPORTED:
        yield NOT_SUPPORTED[name]
        return
    keys = [key for key, names in ALIASES.items() if name in names]
    if keys:
        beside = [key for key in keys if section and key.startswith(f"{section[0]}.")]
        chosen = beside or keys
        remarks = [f" ({REMARKS[key]})" for key in chosen if key in REMARKS]
        yield f"use {' or '.join(chosen)} instead of {name}{''.join(remarks)}"
    elif isinstance(value, Mapping):
        for below, inner in value.items():
            yield from _answers([*path, str(below)], inner)


# Finds values of a configuration that look like secrets.
#
# A configuration is written to config.yaml, the report and the trackers, and errors show its values. So it may not
# contain a secret. A value is refused in three cases:
#
# - It has the form of a known kind of credential. A URL with a user's name or password is one.
# - Its name is one of `_SECRET_NAME`. Names are keys of the configuration, parameters in the query of a URL, options of
#   a command (`--api-key=...`), and parts of a connection string (`host=db password=...`).
# - Its name ends with `token` or `key`, and it looks random. Such a name may also name something else (`stop_token`,
#   `answer_key`).
#
# In the second case, values that are not secrets are accepted: `_HARMLESS` (placeholders, paths, names of variables),
# and numbers below 1000.

_CREDENTIAL = re.compile(
    r"""
      \b [spr]k [-_] (?= [\w-]*\d ) (?= [\w-]*[A-Z] ) [\w-]{20,}    # OpenAI, Anthropic, Stripe and others
    | \b (?: hf | gh[pousr] | npm ) _ [A-Za-z0-9]{30,}
    | \b github_pat_ \w{22,} | \b glpat- [\w-]{20,} | \b xox[abprs]- [\w-]{10,}
    | \b AKIA [0-9A-Z]{16} \b                                       # AWS
    | \b AIza [\w-]{30,}                                            # Google
    | \b eyJ [\w-]{8,} \. [\w-]{8,} \. [\w-]*                       # a JSON web token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    | :// [^\s/:@?\#]* : [^\s/@?\#]+ @ | https?:// [^\s/@?\#]+ @    # a URL with a password, or with a token
    | \A (?i: bearer | basic ) \ (?! [$<{] ) \S{6,} \Z               # the header Authorization
    """,
    re.VERBOSE,
)
_SECRET_NAME = re.compile(
    r"""
    (?: ^ | _ ) (?:
        secret | passwords? | passwd | passphrase | pwd | passcode | pass | credential | authorization | api_?key
      | (?: access | auth | private | secret | encryption | signing | account | subscription | master ) _? key
      | (?: access | api | auth | bearer | hf | refresh | session | security ) _? token
      | (?: github | gitlab | slack | wandb ) _? token
      | (?: db | user | admin | root | smtp | redis | postgres | mysql | proxy | login ) _? (?: pass | pwd | password )
    ) s? $
    """,
    re.VERBOSE,
)
"""The names of secrets, in lower case and with `_` between words."""
_NO_SECRET_NAME = re.compile(r"(?:first|second|single|two|multi|one|each|per|low|high|band|forward|backward)_pass$")
_SECRET_PARAMETER = re.compile(r"^(?:sig|signature|token|key|auth|apikey|jwt)$|(?:_signature|_credential|_token)$")
"""Further names of secrets in the query of a URL."""
_QUERY = re.compile(r"[?&;#]([\w.%-]+)=([^&;#\s]+)")
_ARGUMENT = re.compile(r"(?:^|\s|--?)([A-Za-z][\w-]*)=(\S+)|(?:^|\s)--?([A-Za-z][\w-]*)\s+([^\s-]\S*)")
"""An option of a command (`--api-key=VALUE`, `--api-key VALUE`), or a part of a connection string."""
_AMBIGUOUS_KEY = re.compile(r"(?:^|_)(?:token|key)s?$")
_RANDOM = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16,}")
"""A run of letters and digits that is too long for a word."""
_HARMLESS = re.compile(
    r"""
      (?i: none | null | true | false | dummy | empty | unused | not-needed | -+ | x+ )?    # nothing, or a placeholder
    | \$ [\w{(] .* | < [^<>]* > | \{+ \w+ \}+ | \*+                         # a variable, or a placeholder
    | [A-Z_]+ | [A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+                               # the name of an environment variable
    | [~.]{0,2}/.*                                                          # a path
    """,
    re.VERBOSE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_NAMES: KeyPath = ("environment", "secrets")
"""The key whose values are names of environment variables."""


def secret_values(value: object, *, path: KeyPath = (), key: str = "") -> Iterator[KeyPath]:
    """Yields the path of each value, and of each key, that looks like a secret, in a configuration or in a part of it
    at `path`. `key` is the name by which the value is judged: the last part of the path. For an item of a list, where
    the last part is an index, it is the key of the list, or the item before it if that is an option of a command
    (`--api-key`)."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            if _CREDENTIAL.search(str(name)):
                yield (*path, str(name))
            else:
                yield from secret_values(below, path=(*path, name), key=name)
    elif isinstance(value, list):
        for number, below in enumerate(value):
            before = value[number - 1] if number else None
            option = before if isinstance(before, str) and before.startswith("-") else key
            yield from secret_values(below, path=(*path, str(number)), key="" if path == _NAMES else option)
    elif isinstance(value, str) and _is_secret(value, key=_words(key)):
        yield path
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 1000 and _names_secret(_words(key)):
        yield path  # a password of digits


def _words(name: str) -> str:
    return _CAMEL.sub("_", str(name).strip("-")).replace("-", "_").lower()


def _names_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAME.search(name)


def _is_secret(value: str, *, key: str) -> bool:
    if _CREDENTIAL.search(value) or any(_is_harmful(*found) for found in _given(value)):
        return True
    random = bool(_RANDOM.search(value))
    if _HARMLESS.fullmatch(value) and not random:
        return False
    return _names_secret(key) or bool(random and _AMBIGUOUS_KEY.search(key))


def _given(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yields the names and values that are written in a text, and whether they are in the query of a URL."""
    if "://" in text:
        yield from ((_words(name), unquote(value), True) for name, value in _QUERY.findall(text))
    for name, value, option, argument in _ARGUMENT.findall(text):
        yield _words(name or option), (value or argument).strip("'\""), False


def _is_harmful(name: str, value: str, in_query: bool) -> bool:
    named = _names_secret(name) or (in_query and _SECRET_PARAMETER.search(name))
    return bool(named) and (not _HARMLESS.fullmatch(value) or bool(_RANDOM.search(value)))


def secret_message(path: KeyPath, *, origin: str) -> str:
    """Returns the error about a value that looks like a secret, without the value. `origin` says where it was set."""
    key = ".".join("<a secret in the place of a key>" if _CREDENTIAL.search(part) else part for part in path)
    advice = (
        "list the name of an environment variable there, and not its value"
        if path[:2] == _NAMES
        else "put it into an environment variable, and list the name of the variable in environment.secrets "
        "(docs/rewards.md); if it is not a secret, give the key another name"
    )
    return f"{key}{origin}: looks like a secret, but the configuration is written to files and shown; {advice}"


# Reads and writes plain YAML: text, numbers, lists and mappings. A key that stands twice in a mapping is an error.
#
# Scalars are read by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2, section 10.3.2): `on`, `off`, `yes` and
# `no` are text, and so are dates, `1:30` and `1_000`. `1e3` is a number, and `010` is ten. PyYAML reads YAML 1.1, so
# this module replaces its rules, and keeps its merge key `<<`. `parse_yaml` reads the output of `dump_yaml` back as the
# same data.

_TAG = "tag:yaml.org,2002:"
_MERGE_TAG = f"{_TAG}merge"
_CORE_SCHEMA = (
    # (tag, first characters, pattern of the whole scalar)
    ("null", ["~", "n", "N", ""], r"~|null|Null|NULL|"),
    ("bool", list("tTfF"), r"true|True|TRUE|false|False|FALSE"),
    ("int", list("-+0123456789"), r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    (
        "float",
        list("-+.0123456789"),
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
    ("merge", ["<"], "<<"),
)

MOST_NODES, MOST_DEPTH, MOST_CHARACTERS, NODE_CHARACTERS = 10_000, 50, 2**20, 8
"""Limits of a YAML document: the number of its values, the depth of its lists and mappings, and its characters after
each alias is written out. Each value counts as `NODE_CHARACTERS` characters more than its text has. A configuration
with all of its keys has 500 values and a depth of 5. A file has at most `MOST_CHARACTERS` bytes."""


class _Loader(Composer, SafeConstructor, Resolver, CParser):
    """Safe loader that refuses repeated keys, keys that are not text, and documents that are much larger than a
    configuration, also those that become large by their aliases. The text is split by libyaml, which takes a fifth of
    the time of PyYAML's own parser."""

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        for part in (Composer, SafeConstructor, Resolver):
            part.__init__(self)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes, self._depth = self._nodes + 1, self._depth + 1
        if self._nodes > MOST_NODES:
            raise _too_large(self._mark(), f"has more than {MOST_NODES:,} values")
        if self._depth > MOST_DEPTH:
            raise _too_large(self._mark(), f"is nested more than {MOST_DEPTH} levels deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _mark(self) -> Any:
        event: Any = self.peek_event()
        return event.start_mark

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _check_expanded(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refusal(key_node, f"the key {key!r} is not text; put it in quotes")
            if key in seen:
                raise _refusal(key_node, f"the key {key!r} stands twice in this mapping; remove one of the two")
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0 if text.startswith(("0o", "0x")) else 10)


_Loader.yaml_implicit_resolvers = {}
for _name, _first, _pattern in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_core_int)  # type: ignore[type-var]


class _Dumper(yaml.SafeDumper):
    """Safe dumper that puts text in quotes only if YAML 1.1 or YAML 1.2 would otherwise read it as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML writes these Unicode line breaks unescaped in single quotes, and reads them back as spaces. Double
        # quotes make it write escapes.
        style = '"' if any(line_break in text for line_break in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _name, _first, _pattern in _CORE_SCHEMA:
    _Dumper.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), _first)
_Dumper.add_representer(str, _Dumper.represent_text)


def _check_expanded(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Returns the size and the depth of a node in which each alias is replaced by its node. `known` has the results for
    nodes by id: (0, 0) for a node whose values are still visited. Raises MarkedYAMLError if size or depth is too large,
    or if an alias stands for a node that contains the alias."""
    if (found := known.get(id(node))) is not None:
        if found == (0, 0):
            raise _refusal(
                node,
                "a config may hold only text, numbers, lists and mappings; this value contains an alias for the whole "
                "value, so it has no end",
            )
        return found
    known[id(node)] = 0, 0
    if isinstance(node, yaml.ScalarNode):
        size, depth = NODE_CHARACTERS + len(node.value), 1
    else:
        pairs = isinstance(node, yaml.MappingNode)
        below = [_check_expanded(each, known) for value in node.value for each in (value if pairs else (value,))]
        size = NODE_CHARACTERS + sum(size for size, _ in below)
        depth = 1 + max((depth for _, depth in below), default=0)
    if size > MOST_CHARACTERS:
        raise _too_large(node.start_mark, f"has more than {MOST_CHARACTERS:,} characters with its aliases written out")
    if depth > MOST_DEPTH:
        raise _too_large(node.start_mark, f"is nested more than {MOST_DEPTH} levels deep by its aliases")
    known[id(node)] = size, depth
    return size, depth


def _too_large(mark: yaml.Mark, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(
        problem=f"the configuration {problem}; no configuration needs so much", problem_mark=mark
    )


def _refusal(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def parse_yaml(text: str, *, source: str, fix: str = "") -> object:
    """Returns the data of one YAML document; None for an empty document.

    Raises ConfigError with `source`, and with line and column if they are known. Data that JSON cannot express (sets,
    bytes, cycles) is refused too. `fix` is appended to the error if the text is not valid YAML; it says what the user
    can do.
    """
    loader = None
    try:
        loader = _Loader(text)
        data = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        problem = error.problem or error.context or "not YAML"
        if isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
            problem = f"not YAML ({problem}){fix}"
        raise ConfigError(f"{place}: {problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not YAML ({error}){fix}") from None
    finally:
        if loader is not None:
            loader.dispose()
    return plain(data, source=source)


def plain(data: object, *, source: str) -> Any:
    """Returns a deep copy of `data`, with paths as text. Raises ConfigError for data that JSON cannot express (sets,
    bytes, cycles)."""
    try:
        return json.loads(json.dumps(data, default=lambda value: str(Path(value))))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source}: a config may hold only text, numbers, lists and mappings ({error}); replace the value"
        ) from None


def dump_yaml(data: object) -> str:
    """Returns plain data as YAML text. Keys keep their order."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


# Fills the sections of named held-out sets up with the run's own keys, before a configuration is validated.
#
# So a set names only what differs, and a dumped configuration, which has all keys, is read back as the same one.

_NOT_TAKEN_OVER: Mapping[str, Collection[str]] = {
    "dataset": ("path", "subset", "split", "columns", "options"),
    "name": ("options", "reward", "rewards"),
    "reward": ("rewards",),
    "rewards": ("reward",),
}
"""Keys that a held-out set does not take over from the run if it has its own value of another key."""


def with_whole_sets(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree of a configuration in which each set of `eval.sets` has the keys of `data` and `environment`
    that it does not set itself. Sections that are not mappings stay as they are: the validation refuses them."""
    sets = _below(_below(given, "eval"), "sets")
    if not isinstance(sets, Mapping):
        return dict(given)
    whole = {name: _completed(each, given) for name, each in sets.items()}
    return {**given, "eval": {**given["eval"], "sets": whole}}


def _below(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, Mapping) else None


def _completed(each: Any, given: Mapping[str, Any]) -> Any:
    """Returns a held-out set with the keys of the run's sections that it does not set itself."""
    found = {}
    for section, kind in (("data", DatasetSection), ("environment", ScoringSection)):
        own, of_run = _below(each, section), _below(given, section)
        if isinstance(own, Mapping) and isinstance(of_run, Mapping):
            left_out = {key for name in own for key in _NOT_TAKEN_OVER.get(name, ())}
            taken = {key: of_run[key] for key in kind.model_fields if key in of_run and key not in left_out}
            found[section] = taken | dict(own)
    return {**each, **found} if found else each
