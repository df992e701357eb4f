"""Errors about the axes (the fields) of an objective or an advantage estimator that a user has configured. Adds the
accepted names or fields to msgspec's errors.

Does not import torch.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
from msgspec.inspect import EnumType, LiteralType, StructType, Type, UnionType, VarTupleType, type_info

from asyncrl.config.import_path import suggest

_PLACE = re.compile(r"at `\$\.(?P<place>[^`]*)`")
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<field>[^`]*)`")


def check_positive(name: str, value: float, advice: str = "") -> None:
    """Raises ValueError with `advice` unless the value is finite and above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value:g}: it must be finite and above 0{advice}")


def check_ratio_bounds(name: str, lo: float, hi: float, advice: str = "") -> None:
    """Raises ValueError, which ends with `advice`, unless 0 ≤ lo ≤ 1 ≤ hi."""
    if not 0 <= lo <= 1 <= hi:
        raise ValueError(f"{name} bounds are ratios and must satisfy 0 ≤ lo ≤ 1 ≤ hi, got lo={lo}, hi={hi}{advice}")


def explained(error: msgspec.ValidationError, *, struct: type[msgspec.Struct], axes: Mapping[str, Any]) -> str:
    """Returns the text of `error`, which `msgspec.convert(axes, struct)` has raised, and adds what a user may write.

    For an unknown field these are the known fields; for another wrong value, the allowed names or kinds; for a value
    that looks like infinity, how YAML writes infinity. If none of these is known, the text is msgspec's own.
    """
    text = str(error)
    found = _PLACE.search(text)
    place = found["place"] if found else ""
    types, value = list(_alternatives(type_info(struct))), cast(Any, axes)
    for name in re.findall(r"\w+", place):
        value = value[int(name)] if name.isdigit() else value.get(name)
        types = [inner for outer in types for part in _parts(outer, name) for inner in _alternatives(part)]
    if unknown := _UNKNOWN_FIELD.search(text):
        [kind] = [
            kind
            for kind in types
            if isinstance(kind, StructType) and (kind.tag_field is None or value[kind.tag_field] == kind.tag)
        ]
        where = f"{place or 'an objective'}{'' if kind.tag is None else f' of kind {kind.tag}'}"
        known = [field.name for field in kind.fields]
        field = unknown["field"]
        return f"{where} has no field {field!r}{suggest(field, known)}; its fields are {', '.join(known) or 'none'}"
    choices = [str(choice) for kind in types if isinstance(kind, LiteralType) for choice in kind.values]
    if choices:
        return f"{text}; the choices are {', '.join(choices)}{suggest(str(value), choices)}"
    if found and isinstance(value, str) and value.strip("+-").lower().startswith("inf"):
        return f"{text}; infinity is written .inf"
    return text


def _alternatives(outer: Type) -> Iterator[Type]:
    """Yields the types of a union, or the type itself. An enumeration becomes the literals of its values."""
    match outer:
        case UnionType(types=types):
            yield from types
        case EnumType(cls=cls):
            yield LiteralType(tuple(member.value for member in cls))
        case _:
            yield outer


def _parts(outer: Type, name: str) -> Iterator[Type]:
    """Yields the type of the part `name` in a value of type `outer`: an entry of a list, a field, or a struct's tag."""
    match outer:
        case VarTupleType(item_type=item):
            yield item
        case StructType(tag_field=tag_field, tag=tag) if tag_field == name:
            yield LiteralType((cast(str, tag),))
        case StructType(fields=fields):
            yield from (field.type for field in fields if field.name == name)
