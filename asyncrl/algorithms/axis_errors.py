"""Errors about the axes (the fields) of an objective or an advantage estimator that a user has configured. Adds the
accepted names or fields to msgspec's errors.

Does not import torch.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec.inspect import EnumType, LiteralType, StructType, Type, UnionType, VarTupleType, type_info

from asyncrl.config.import_path import suggest

_Place = tuple[str | int, ...]
"""The place of a part in a mapping of axes: keys, and indices of list entries."""
_PLACE = re.compile(r" - at `\$\.?(?P<place>[^`]*)`")
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<field>[^`]*)`")
_MISSING_FIELD = re.compile(r"Object missing required field (?P<field>`[^`]*`)")
_TYPES = {
    "object": "a mapping", "array": "a list", "str": "a text", "int": "an integer", "float": "a number",
    "bool": "true or false", "null": "null",
}  # fmt: skip
"""The types in msgspec's errors, in the words of YAML."""
_NAMED_TYPES = re.compile(rf"`((?:{'|'.join(_TYPES)})(?: \| (?:{'|'.join(_TYPES)}))*)`")


def check_positive(name: str, value: float, advice: str = "") -> None:
    """Raises ValueError with `advice` unless the value is finite and above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value:g}: it must be finite and above 0{advice}")


def check_ratio_bounds(name: str, lo: float, hi: float, advice: str = "") -> None:
    """Raises ValueError, which ends with `advice`, unless 0 ≤ lo ≤ 1 ≤ hi."""
    if not 0 <= lo <= 1 <= hi:
        raise ValueError(f"{name} bounds are ratios and must satisfy 0 ≤ lo ≤ 1 ≤ hi, got lo={lo}, hi={hi}{advice}")


def problems(
    axes: Mapping[str, Any], *, struct: type[msgspec.Struct], key: str, beside: Collection[str] = ()
) -> list[str]:
    """Returns the problems for which `msgspec.convert` refuses `axes` as a `struct`; none if it accepts them. Each text
    begins with the place of the problem below the dotted key `key`. `beside` are the names of the keys beside it, which
    a user may have written inside of it.

    msgspec reports only the first problem. Each part with a problem is therefore left out, so that it has its default
    or is missing, and the rest is converted again. If a part of a struct was left out, problems of the struct as a
    whole, such as a contradiction between its fields, are not returned: the missing part may be their cause.
    """
    found, left_out = list[str](), set[_Place]()
    while True:
        try:
            msgspec.convert(_without(axes, left_out), struct)
            return found
        except msgspec.ValidationError as error:
            text = str(error)
        named, unknown = _PLACE.search(text), _UNKNOWN_FIELD.search(text)
        place = _given_place(named["place"] if named else "", axes, left_out)
        if unknown or not any(part[: len(place)] == place for part in left_out):
            where = f"{key}.{_dotted(place)}" if place else key
            lines = _explained(_PLACE.sub("", text), place=place, struct=struct, axes=axes, beside=beside).splitlines()
            found += [f"{where}: {line}" for line in lines]
        if unknown:
            place = (*place, unknown["field"])
        if not place:
            return found
        left_out.add(place)


def _without(value: Any, left_out: set[_Place], place: _Place = ()) -> Any:
    """Returns `value`, which is at `place`, without the parts at the places in `left_out`."""
    match value:
        case Mapping():
            return {
                key: _without(part, left_out, (*place, key))
                for key, part in value.items()
                if (*place, key) not in left_out
            }
        case list() | tuple():
            return [_without(value[i], left_out, (*place, i)) for i in _kept(value, left_out, place)]
        case _:
            return value


def _kept(entries: Sequence[object], left_out: set[_Place], place: _Place) -> list[int]:
    return [i for i in range(len(entries)) if (*place, i) not in left_out]


def _given_place(text: str, axes: Mapping[str, Any], left_out: set[_Place]) -> _Place:
    """Returns the place that msgspec names, such as `gates[1].stat`, with the indices of entries as the user counts
    them. msgspec does not see the entries that are left out."""
    place, value = _Place(), cast(Any, axes)
    for name in re.findall(r"\w+", text):
        part = _kept(value, left_out, place)[int(name)] if name.isdigit() else name
        value = value[part] if isinstance(part, int) else value.get(part)
        place = (*place, part)
    return place


def _dotted(place: _Place) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _explained(
    text: str, *, place: _Place, struct: type[msgspec.Struct], axes: Mapping[str, Any], beside: Collection[str]
) -> str:
    """Returns the text of one of msgspec's errors, and adds what a user may write at this place.

    For an unknown field these are the known fields; for another wrong value, the allowed names or kinds; for the name
    of a kind without its mapping, the mapping; for a value that looks like infinity, how YAML writes infinity.
    """
    text = _NAMED_TYPES.sub(lambda types: " or ".join(_TYPES[name] for name in types[1].split(" | ")), text)
    text = _MISSING_FIELD.sub(r"has no \g<field>, which is required", text)
    text = text[:1].lower() + text[1:]
    types, value = list(_alternatives(type_info(struct))), cast(Any, axes)
    for part in place:
        value = value[part] if isinstance(part, int) else value.get(part)
        types = [inner for outer in types for each in _parts(outer, str(part)) for inner in _alternatives(each)]
    if unknown := _UNKNOWN_FIELD.search(text):
        [kind] = [
            kind
            for kind in types
            if isinstance(kind, StructType) and (kind.tag_field is None or value[kind.tag_field] == kind.tag)
        ]
        known, field = [field.name for field in kind.fields], unknown["field"]
        of_kind = "" if kind.tag is None else f" of kind {kind.tag}"
        outside = (
            f"; {field} is a key of `algorithm`, beside `loss`"
            if not place and field in beside
            else suggest(field, known).removesuffix("?")
        )
        return f"there is no field {field!r}{of_kind}{outside}; the fields are {', '.join(known) or 'none'}"
    if any(isinstance(kind, StructType) and kind.tag == value for kind in types):
        return f"{text}; write {{kind: {value}}}"
    choices = [str(choice) for kind in types if isinstance(kind, LiteralType) for choice in kind.values]
    if choices:
        return f"{text}; the choices are {', '.join(choices)}{suggest(str(value), choices)}"
    if place and isinstance(value, str) and value.strip("+-").lower().startswith("inf"):
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
