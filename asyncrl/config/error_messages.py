"""Turns pydantic's validation errors into one line each: key, value, origin of the value, limit, and what to do.

An unknown key gets a suggestion ("did you mean ...?"). The suggested key may be in another section, or in a section
with another name.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from asyncrl.config.aliases import known_elsewhere
from asyncrl.config.import_path import suggest
from asyncrl.config.plain_yaml import parse_yaml
from asyncrl.config.schema import Config, KeyPath, sections
from asyncrl.errors import ConfigError

ON_COMMAND_LINE = "on the command line"
_MAX_SHOWN_CHARS = 80

_CHANGE_THE_DISTRIBUTION = frozenset({"typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty"})


class _Wanted(NamedTuple):
    """The kind of value that a field takes: in words, and as the types that YAML reads it as."""

    words: str
    types: tuple[type, ...] = ()


_TRUTH_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
"""Words that YAML 1.1 reads as truth values. In YAML 1.2 they are text."""
# by the type of pydantic's error
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
    """Returns one line about one violation. `origins` says where each key was set: `in FILE` or ON_COMMAND_LINE."""
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
    """Returns the keys of the section at `path`, in which numbers of lists and names in mappings of sections stand."""
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
