"""The axes of `algorithm` as texts: their values, formulas, effects on stale tokens and examples.

docs/losses.md, `asyncrl losses --axes` and `asyncrl config schema` are made from these texts. The texts are the
docstrings beside the axes in `objective.py`, `baselines.py` and the section `algorithm` of the schema. The
docstring of `objective.py` describes their form. A value or a field without a text is an error of the code
(LookupError).

Does not import torch.
"""

import ast
import functools
import inspect
import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin

import msgspec

from asyncrl.algorithms import baselines, objective
from asyncrl.algorithms.presets import DEFAULT_BASELINE, PRESETS
from asyncrl.config.import_path import suggest
from asyncrl.config.schema import AlgorithmSection
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A docstring of an axis or a value. `stale` says what happens to tokens of older weights, and `example` is YAML
    that belongs into a configuration; both may be empty."""

    meaning: str
    stale: str = ""
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A named value of an axis. `options` are the fields that only this value has, and `presets` the names of the
    presets that have it."""

    name: str
    text: Text
    options: tuple["Axis", ...] = ()
    presets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis, or an option of a value. `kind` is the type of its value in words. `default` is YAML (words for
    `advantage`), or "" if the user must set it. `choices` are its named values, and `options` the fields of its mapping
    or of each entry of its list. `presets` are the names of the presets that set an axis whose value is a mapping or a
    list."""

    name: str
    kind: str
    default: str
    text: Text
    choices: tuple[Choice, ...] = ()
    options: tuple["Axis", ...] = ()
    presets: tuple[str, ...] = ()

    def examples(self) -> dict[str, str]:
        """Returns the examples of this axis and of its values as YAML, by `axis` or `axis.value`."""
        found = {self.name: self.text.example} | {
            f"{self.name}.{each.name}": each.text.example for each in self.choices
        }
        return {name: example for name, example in found.items() if example}


@functools.cache
def all_axes() -> tuple[Axis, ...]:
    """Returns the axes of an objective in their order, with the kernels after the surrogates, then the advantage
    estimator and the filters of samples."""
    surrogate, *others = options_of(objective.Objective)
    kernel = Axis(
        name="kernel",
        kind="mapping",
        default="",
        text=docstring("Kernel", objective),
        choices=_kinds(get_args(objective.Kernel)),
    )
    return tuple(map(_with_presets, (surrogate, kernel, *others, _advantage(), *_filters())))


def axis_named(name: str) -> Axis:
    """Returns the axis with this name. For an unknown name, raises ConfigError with the names of all axes."""
    found = {axis.name: axis for axis in all_axes()}
    if name not in found:
        raise ConfigError(
            f"--axes {name}: there is no such axis; the axes are {', '.join(found)}{suggest(name, list(found))}"
        )
    return found[name]


def docstring(name: str, module: ModuleType) -> Text:
    """Returns the docstring of a class, of a name of the module, or of a field in the form `Class.field`. Raises
    LookupError if there is none."""
    found = _docstrings(module)
    if name not in found:
        raise LookupError(f"{module.__name__}.{name} has no docstring, from which docs/losses.md is made: write one")
    return found[name]


def choice_texts(text: Text, names: Iterable[str]) -> dict[str, Text]:
    """Returns the text of each named value, which a docstring gives as "`value`: text". Raises LookupError if a value
    has none."""
    values = list(names)
    pattern = re.compile("|".join(rf"`({re.escape(value)})`: " for value in sorted(values, key=len, reverse=True)))
    places = list(pattern.finditer(text.meaning))
    found = {}
    for place, after in itertools.zip_longest(places, places[1:]):
        found[place[0][1:-3]] = Text(meaning=text.meaning[place.end() : after and after.start()].strip())
    if missing := sorted({*values} - {*found}):
        raise LookupError(f"the docstring {text.meaning!r} does not describe {', '.join(missing)}: add `value`: text")
    return {value: found[value] for value in values}


def introduction(text: Text, names: Sequence[str]) -> str:
    """Returns the part of a docstring that comes before the texts of its values."""
    starts = [text.meaning.find(f"`{name}`: ") for name in names]
    return text.meaning[: min((start for start in starts if start >= 0), default=None)].strip()


def options_of(struct: type[msgspec.Struct]) -> tuple[Axis, ...]:
    """Returns the fields of a struct as axes."""
    return tuple(_axis(struct, field) for field in msgspec.structs.fields(struct))


def field_text(struct: type[msgspec.Struct], name: str) -> Text:
    """Returns the docstring of a field, which may be inherited. Raises LookupError if there is none."""
    for owner in struct.__mro__:
        if name in inspect.get_annotations(owner):
            return docstring(f"{owner.__name__}.{name}", sys.modules[owner.__module__])
    raise LookupError(f"{struct.__name__} has no field {name}")


def _axis(struct: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> Axis:
    types = [part for part in _alternatives(field.type) if part is not NoneType]
    optional = " or null" if NoneType in _alternatives(field.type) else ""
    text, kind = field_text(struct, field.name), _kind(types[0])
    options: tuple[Axis, ...] = ()
    choices: tuple[Choice, ...] = ()
    structs = [part for part in types if isinstance(part, type) and issubclass(part, msgspec.Struct)]
    if get_origin(types[0]) is tuple:
        structs = [get_args(types[0])[0]]
    if len(structs) > 1:
        choices = _kinds(structs)
    elif structs:
        options = options_of(structs[0])
        of_struct = docstring(structs[0].__name__, sys.modules[structs[0].__module__])
        text = Text(meaning=f"{text.meaning}\n\n{of_struct.meaning}", stale=of_struct.stale, example=of_struct.example)
    elif values := _values(types[0]):
        texts = choice_texts(_with_members(text, types[0]), values)
        choices = tuple(Choice(name=value, text=texts[value]) for value in values)
        text = Text(meaning=introduction(text, values), stale=text.stale, example=text.example)
    return Axis(
        name=field.name, kind=kind + optional, default=_default(field), text=text, choices=choices, options=options
    )


def _kinds(structs: Sequence[type[msgspec.Struct]]) -> tuple[Choice, ...]:
    return tuple(
        Choice(
            name=str(each.__struct_config__.tag),
            text=docstring(each.__name__, sys.modules[each.__module__]),
            options=options_of(each),
        )
        for each in structs
    )


def _advantage() -> Axis:
    rows = {"OUTCOMES": baselines.OUTCOMES, "CRITIC_BASED": baselines.CRITIC_BASED}
    texts: dict[str, Text] = {}
    for table, names in rows.items():
        texts |= choice_texts(docstring(table, baselines), names)
    text = docstring("Advantage", baselines)
    return Axis(
        name="advantage",
        kind="name, import path or mapping",
        default="the estimator that the preset was published with, else group_norm",
        text=text,
        choices=tuple(Choice(name=name, text=each) for name, each in texts.items()),
        options=options_of(baselines.DiscountedOutcome),
    )


def _filters() -> Iterator[Axis]:
    examples = {
        "zero_variance": "algorithm: {zero_variance: resample, max_resamples_per_step: 32}",
        "overlong": "algorithm: {overlong: penalise, overlong_buffer_tokens: 8}",
    }
    for name, example in examples.items():
        field = AlgorithmSection.model_fields[name]
        values = [str(value) for value in get_args(field.annotation)]
        text = Text(meaning=" ".join((field.description or "").split()))
        texts = choice_texts(text, values)
        yield Axis(
            name=name,
            kind="name",
            default=str(field.default),
            text=Text(
                meaning=introduction(text, values), stale="no effect: it reads rewards and lengths.", example=example
            ),
            choices=tuple(Choice(name=value, text=texts[value]) for value in values),
        )


def _with_presets(axis: Axis) -> Axis:
    used = {name: _used(msgspec.to_builtins(preset.objective)) for name, preset in PRESETS.items()}
    for name, preset in PRESETS.items():
        used[name]["advantage"] = {preset.baseline or DEFAULT_BASELINE} if preset.baseline else set()

    def users(value: str) -> tuple[str, ...]:
        return tuple(name for name, values in used.items() if value in values.get(axis.name, ()))

    choices = tuple(
        Choice(name=each.name, text=each.text, options=each.options, presets=users(each.name)) for each in axis.choices
    )
    return Axis(
        name=axis.name,
        kind=axis.kind,
        default=axis.default,
        text=axis.text,
        choices=choices,
        options=axis.options,
        presets=users("set"),
    )


def _used(axes: Mapping[str, Any]) -> dict[str, set[str]]:
    """Returns the named values that an objective has on each axis. An axis that is a mapping or a list has the value
    `set` if it is neither null nor empty. `anchor` and `level` are left out if the surrogate has no ratio."""
    surrogate = axes["surrogate"]
    kernels = {surrogate[side]["kind"] for side in ("positive", "negative") if isinstance(surrogate.get(side), Mapping)}
    named = {name: {value} for name, value in axes.items() if isinstance(value, str)}
    present = {name: {"set"} for name, value in axes.items() if isinstance(value, Mapping | list | tuple) and value}
    without_ratio = not objective.uses_ratio(msgspec.convert(axes, objective.Objective).surrogate)
    if without_ratio:
        named = {name: values for name, values in named.items() if name not in ("anchor", "level")}
    return {**named, **present, "surrogate": {surrogate["kind"]}, "kernel": kernels}


# The functions below write types and defaults as the texts show them.


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return (
        get_args(kind)
        if isinstance(kind, UnionType) or get_origin(kind) not in (None, Literal, tuple, dict)
        else (kind,)
    )


def _values(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [str(member.value) for member in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def _kind(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return "list of mappings"
    if _values(kind):
        return "name"
    return {float: "number", bool: "true or false"}.get(kind, "mapping")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return ""
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float) and math.isinf(default):
        return ".inf" if default > 0 else "-.inf"
    return "[]" if default == () else str(default)


# Python does not keep the docstrings of fields and of a module's names, so they are read from the source.


@functools.cache
def _docstrings(module: ModuleType) -> Mapping[str, Text]:
    """Returns the docstrings of a module's classes, names and fields. If the type of a field is a documented name
    of the module, such as `Pool`, the field's docstring ends with the docstring of that name."""
    body = ast.parse(inspect.getsource(module)).body
    names = {name: text for name, text, _ in _documented(body)}
    found = dict(names)
    for each in body:
        if isinstance(each, ast.ClassDef):
            found[each.name] = ast.get_docstring(each) or ""
            for name, text, kind in _documented(each.body):
                found[f"{each.name}.{name}"] = f"{text} {names.get(kind, '')}".strip()
    return {name: _text(value) for name, value in found.items() if value}


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str, str]]:
    """Yields the name, the docstring and the annotation of each assignment with a string below it."""
    for statement, below in itertools.pairwise(body):
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            continue
        text = inspect.cleandoc(str(below.value.value))
        if isinstance(statement, ast.AnnAssign):
            yield cast(ast.Name, statement.target).id, text, ast.unparse(statement.annotation)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            yield statement.targets[0].id, text, ""


def _text(value: str) -> Text:
    paragraphs = [" ".join(paragraph.split()) for paragraph in value.split("\n\n")]
    rest = [each for each in paragraphs if not each.startswith(("Stale tokens: ", "Example: "))]
    labelled = dict(each.split(": ", 1) for each in paragraphs if each not in rest)
    return Text(
        meaning="\n\n".join(rest),
        stale=labelled.get("Stale tokens", ""),
        example=labelled.get("Example", "").strip("`"),
    )


def _with_members(text: Text, kind: Any) -> Text:
    """Adds the docstrings of an enumeration's members in the form "`value`: text"."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        return text
    module = sys.modules[kind.__module__]
    members = [f"`{each.value}`: {docstring(f'{kind.__name__}.{each.name}', module).meaning}" for each in kind]
    return Text(meaning=" ".join([text.meaning, *members]), stale=text.stale, example=text.example)
