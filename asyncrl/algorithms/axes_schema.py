"""The JSON schema of the section `algorithm` with all axes, presets and estimators, for the completion in editors."""

import copy
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from asyncrl.algorithms import baselines, objective
from asyncrl.algorithms.axes import Axis, Text, axis_named, docstring, options_of
from asyncrl.algorithms.presets import PRESETS
from asyncrl.config.import_path import IMPORT_PATH

Schema = dict[str, Any]

_REF = "#/$defs/"
_PARTIAL = "Partial"
_LISTED = {"Gate": ["stat"], "Penalty": ["kind"]}
"""The field by which an entry of `algorithm.overrides` finds the preset's entry. It cannot be left out."""


def with_axes(schema: Mapping[str, Any]) -> Schema:
    """Returns a copy of the JSON schema of configurations in which `algorithm.loss`, `overrides` and `advantage` have
    types: every named value is a `const` with its description.

    In `overrides`, every field of an axis may be left out, because the preset has it, except the fields in `_LISTED`.
    """
    found: Schema = copy.deepcopy(dict(schema))
    axes, estimators = _definitions([objective.Objective]), _definitions([baselines.RewardKL, *_rows()])
    for struct, names in _rows().items():
        definition = estimators[struct.__name__]
        # No defaults: an option that is left out has the value of the named estimator, not the one of the struct.
        options = {
            option: {key: value for key, value in property.items() if key != "default"}
            for option, property in definition["properties"].items()
        }
        definition["properties"] = {"name": _consts("Name of the estimator.", _named(names)), **options}
        definition["required"] = ["name"]
    found["$defs"] |= {**axes, **_partial(axes), **estimators}
    fields = found["$defs"]["AlgorithmSection"]["properties"]
    presets = {name: Text(meaning=f"{preset.use} ({preset.source})") for name, preset in PRESETS.items()}
    loss = "A loss of your own."
    fields["loss"] = _retyped(
        fields["loss"], [*_options(presets), _import_path(loss), _ref("Objective"), _with_own_options(loss)]
    )
    fields["overrides"] = _retyped(fields["overrides"], [_ref(f"{_PARTIAL}Objective")])
    estimator = "An estimator of your own."
    own = _with_own_options(estimator)
    rows = [_ref(struct.__name__) for struct in _rows()]
    fields["advantage"] = _retyped(
        fields["advantage"],
        [*_options(_named()), _import_path(estimator), *rows, own, {"type": "null"}],
    )
    return found


def _rows() -> dict[type[msgspec.Struct], list[str]]:
    """Returns the names of the estimators by the struct that has their options."""
    rows: dict[type[msgspec.Struct], list[str]] = {}
    for name, row in {**baselines.OUTCOMES, **baselines.CRITIC_BASED}.items():
        rows.setdefault(type(row), []).append(name)
    return rows


def _named(names: Iterable[str] = ()) -> dict[str, Text]:
    """Returns the texts of the estimators with these names, or of all estimators if `names` is empty."""
    return {each.name: each.text for each in axis_named("advantage").choices if each.name in set(names) or not names}


def _definitions(structs: Iterable[type[msgspec.Struct]]) -> dict[str, Schema]:
    """Returns the schemas of the structs and of all structs in them, by name, with the texts of their docstrings."""
    _, found = msgspec.json.schema_components(structs, ref_template=f"{_REF}{{name}}")
    described = {}
    for name, definition in found.items():
        struct = getattr(objective, name, None) or getattr(baselines, name)
        if issubclass(struct, msgspec.Struct):
            described[name] = _described(struct, definition)
    return described


def _described(struct: type[msgspec.Struct], definition: Schema) -> Schema:
    options = {option.name: option for option in options_of(struct)}
    text = docstring(struct.__name__, baselines if struct.__module__ == baselines.__name__ else objective)
    properties = {name: _property(options.get(name), each, text) for name, each in definition["properties"].items()}
    return {**definition, "description": text.meaning, "properties": properties}


def _property(option: Axis | None, property: Schema, owner: Text) -> Schema:
    if option is None:  # the tag of a surrogate or a kernel
        return {"const": property["enum"][0], "description": owner.meaning}
    kept = {key: value for key, value in property.items() if key in ("default", "anyOf", "items", "type", "$ref")}
    default = kept.get("default")
    if isinstance(default, float) and math.isinf(default):  # JSON cannot write infinity
        del kept["default"]
    named = option.choices and "anyOf" not in property
    kept |= _consts("", {each.name: each.text for each in option.choices}) if named else {}
    if named:
        kept.pop("$ref", None)
    return {**kept, "description": option.text.meaning}


def _partial(definitions: Mapping[str, Schema]) -> dict[str, Schema]:
    """Returns the definitions for `algorithm.overrides`, in which no field is required but those of `_LISTED`."""
    renamed: dict[str, Schema] = json.loads(json.dumps(definitions).replace(_REF, f"{_REF}{_PARTIAL}"))
    for name, definition in renamed.items():
        definition["required"] = _LISTED.get(name, [])
    return {f"{_PARTIAL}{name}": definition for name, definition in renamed.items()}


def _retyped(field: Schema, options: list[Schema]) -> Schema:
    return {"anyOf": options, "default": field.get("default"), "description": field["description"]}


def _consts(description: str, texts: Mapping[str, Text]) -> Schema:
    return {"description": description, "anyOf": _options(texts)}


def _options(texts: Mapping[str, Text]) -> list[Schema]:
    return [{"const": name, "description": text.meaning} for name, text in texts.items()]


def _import_path(description: str) -> Schema:
    return {"type": "string", "pattern": f"^{IMPORT_PATH.pattern}$", "description": description}


def _with_own_options(description: str) -> Schema:
    """Returns the schema of an import path with options, which only the user's code knows."""
    return {"type": "object", "properties": {"name": _import_path(description)}, "required": ["name"]}


def _ref(name: str) -> Schema:
    return {"$ref": f"{_REF}{name}"}
