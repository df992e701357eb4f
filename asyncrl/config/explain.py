"""Turns pydantic's validation errors into one line each: key, value, origin of the value, limit, and what to do.

An unknown key gets a suggestion ("did you mean ...?"). The suggested key may be in another section, or in a section
with another name.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from asyncrl.config.aliases import known_elsewhere
from asyncrl.config.dialect import parse_yaml
from asyncrl.config.import_path import suggest
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

KeyPath = tuple[str, ...]

ON_COMMAND_LINE = "on the command line"
_MAX_SHOWN_CHARS = 80

_CHANGE_THE_DISTRIBUTION = frozenset(
    {"top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
)

# Maps a type of pydantic error to the kind of value that the field takes.
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping of keys",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a section (a mapping of keys)",
    "string_type": "text",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("must be above {gt}", "gt"),
    "greater_than_equal": ("must be at least {ge}", "ge"),
    "less_than": ("must be below {lt}", "lt"),
    "less_than_equal": ("must be at most {le}", "le"),
}


def explain(violation: ErrorDetails, *, origins: Mapping[KeyPath, str]) -> str:
    """Returns one line about one violation. `origins` says where each key was set: `in FILE` or ON_COMMAND_LINE."""
    path = tuple(str(part) for part in violation["loc"])
    origin = _origin(path, origins)
    if violation["type"] == "extra_forbidden" and path[-1] in _CHANGE_THE_DISTRIBUTION:
        return (
            f"{_dotted(path)}{origin}: is not supported; remove it. With it, the engine would sample from a "
            "distribution that differs from the one whose log-probs the learner computes, and every importance weight "
            "would be wrong"
        )
    if violation["type"] == "extra_forbidden":
        return f"unknown key {_dotted(path)}{origin}: {suggest_key(path, value=violation['input'])}"
    if violation["type"] == "missing":
        return f"{_dotted(path)}{origin}: is missing; add it"
    return f"{_dotted(path)} = {_shown(violation['input'])}{origin}: {_limit_and_mend(violation, origin=origin)}"


def suggest_key(path: KeyPath, *, value: object = None) -> str:
    """Returns advice for an unknown key: the key that the user probably meant, else the keys of the section.

    `value` is the value of the unknown key. If it is a mapping, its keys help to find a section with another name.
    """
    if answer := known_elsewhere(path, value):
        return answer
    *section, name = path
    sections = dict(_sections())
    siblings = list(sections[tuple(section)].model_fields)
    typo_of = [(*section, close) for close in difflib.get_close_matches(name, siblings, n=1)]
    moved_to = [(*place, name) for place, model in sections.items() if name in model.model_fields]
    if typo_of or moved_to:
        return _did_you_mean([*typo_of, *moved_to])
    renamed = _sections_sharing_keys(value, sections)
    if renamed:
        return _did_you_mean(renamed)
    everywhere = {field: (*place, field) for place, model in sections.items() for field in model.model_fields}
    close = difflib.get_close_matches(name, everywhere, n=1, cutoff=0.75)
    if close:
        return _did_you_mean([everywhere[close[0]]])
    home = f"the keys of `{_dotted(section)}` are" if section else "the sections are"
    return f"{home} {', '.join(siblings)}"


def _did_you_mean(paths: Sequence[KeyPath]) -> str:
    return f"did you mean {' or '.join(_dotted(path) for path in paths)}?"


def _limit_and_mend(violation: ErrorDetails, *, origin: str) -> str:
    kind, value, context = violation["type"], violation["input"], violation.get("ctx", {})
    if kind in _BOUNDS:
        text, bound = _BOUNDS[kind]
        return text.format(**{bound: _number(context[bound])})
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}{_type_mend(kind, value, origin=origin)}"
    if kind == "literal_error":
        expected = str(context["expected"])
        options = [option.strip("'") for option in expected.replace(" or ", ", ").split(", ")]
        return f"must be {expected}{suggest(str(value), options) if len(options) > 1 else ''}"
    if kind == "finite_number":
        return "must be a finite number"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    return violation["msg"]


def _type_mend(kind: str, value: object, *, origin: str) -> str:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f"; write {_quoted(_shown(value), origin=origin)}, with the quotes"
    if kind == "string_type" and isinstance(value, Mapping) and list(value.values()) == [None]:
        return (
            f"; write {_quoted(f'{{{next(iter(value))}}}', origin=origin)}, with the quotes: without them YAML reads "
            "a mapping"
        )
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, str) and _reads_as(kind, value):
        return "; write it without quotes"
    if kind == "list_type" and isinstance(value, str):
        return f"; write [{_shown(value)}]"
    if kind == "model_type" and value is None:
        return "; set a key of the section, or remove the line"
    return ""


def _quoted(text: str, *, origin: str) -> str:
    """Returns `text` in quotes for YAML. On the command line it gets a second pair, because the shell removes one."""
    return f"""'"{text}"'""" if ON_COMMAND_LINE in origin else f'"{text}"'


def _reads_as(kind: str, text: str) -> bool:
    """Returns whether `text`, written in YAML without quotes, would have the type that `kind` asks for."""
    try:
        value = parse_yaml(text, source="")
    except ConfigError:
        return False
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "int_type":
            return number and isinstance(value, int)
        case "float_type":
            return number
        case "bool_type":
            return isinstance(value, bool)
        case _:
            return False


def _origin(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    """Returns where the key, or the nearest key above it, was set, as ` (in FILE)`; "" if it was not set."""
    for end in range(len(path), 0, -1):
        if path[:end] in origins:
            return f" ({origins[path[:end]]})"
    return ""


def _sections() -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Yields each section of the schema with its path, breadth first, beginning with the root."""
    queue: list[tuple[KeyPath, type[BaseModel]]] = [((), Config)]
    while queue:
        path, model = queue.pop(0)
        yield path, model
        for name, field in model.model_fields.items():
            options = (field.annotation, *get_args(field.annotation))
            below = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
            queue.extend(((*path, name), section) for section in below)


def _sections_sharing_keys(value: object, sections: Mapping[KeyPath, type[BaseModel]]) -> list[KeyPath]:
    """Returns the section that has the most keys in common with an unknown section, which is probably a renamed one.

    The list is empty if no section has a key in common.
    """
    if not isinstance(value, Mapping):
        return []
    shared = {path: len(value.keys() & model.model_fields.keys()) for path, model in sections.items() if path}
    best = max(shared, key=lambda path: shared[path])
    return [best] if shared[best] else []


def _dotted(path: Sequence[str]) -> str:
    return ".".join(path)


def _number(bound: float) -> str:
    return f"{bound:g}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
