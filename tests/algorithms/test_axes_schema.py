"""The JSON schema of `algorithm`: it accepts what a run accepts, refuses wrong axes, and describes every value."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from asyncrl.algorithms.axes import all_axes
from asyncrl.algorithms.axes_schema import with_axes
from asyncrl.algorithms.baselines import CRITIC_BASED, OUTCOMES
from asyncrl.algorithms.presets import PRESETS
from asyncrl.config.load import parse_yaml
from asyncrl.config.schema import Config

SCHEMA = with_axes(Config.model_json_schema())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def problems(algorithm: dict[str, Any]) -> list[Any]:
    return list(VALIDATOR.iter_errors({"algorithm": algorithm}))


def test_the_schema_is_valid_json_and_a_valid_schema() -> None:
    json.dumps(SCHEMA, allow_nan=False)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_is_accepted_by_name_and_as_axes(name: str) -> None:
    assert not problems({"loss": name})
    assert not problems({"loss": json.loads(json.dumps(msgspec.to_builtins(PRESETS[name].objective)))})


def test_the_examples_of_all_axes_are_accepted() -> None:
    for axis in all_axes():
        for place, example in axis.examples().items():
            assert not list(VALIDATOR.iter_errors(parse_yaml(example, source=place))), place


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "grppo"},
        {"loss": {"surrogate": {"kind": "clip"}}},
        {"loss": {"anchor": "behaviour"}},
        {"loss": {"surrogate": {"kind": "clipped", "high": 1.2}}},
        {"overrides": {"weight": {"outside": "mask"}}},
        {"overrides": {"gates": [{"hi": 2.0}]}},
        {"overrides": {"agregation": "sum"}},
        {"advantage": {"name": "group_norm", "kl": {"beta": 0.1}}},
        {"advantage": "group_nrom"},
    ],
)
def test_wrong_axes_and_names_are_refused(algorithm: dict[str, Any]) -> None:
    assert problems(algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "mine.losses:centred"},
        {"loss": {"name": "mine.losses:centred", "cap": 3.0}},
        {"overrides": {"surrogate": {"hi": 1.001}, "weight": None}},
        {"overrides": {"weight": {"hi": float("inf")}}},
        {"advantage": None},
        {"advantage": {"name": "mine:ranked", "temperature": 0.5}},
        {"advantage": {"name": "reinforce_pp", "kl": {"beta": 0.01, "kind": "k1"}, "gamma": 0.9}},
    ],
)
def test_what_a_run_accepts_is_accepted(algorithm: dict[str, Any]) -> None:
    assert not problems(algorithm)


def test_options_of_estimators_have_no_default_because_each_estimator_has_its_own() -> None:
    estimators = {type(row).__name__ for row in {**OUTCOMES, **CRITIC_BASED}.values()}
    properties = [SCHEMA["$defs"][name]["properties"] for name in estimators]
    assert all({"eps", "whiten", "name"} <= {*each} for each in properties)
    assert not [option for each in properties for option, schema in each.items() if "default" in schema]
    assert SCHEMA["$defs"]["Clipped"]["properties"]["lo"]["default"] == 0.8


def test_every_named_value_has_a_description() -> None:
    def consts(part: object) -> Iterator[dict[str, Any]]:
        if isinstance(part, dict):
            if "const" in part:
                yield part
            for below in part.values():
                yield from consts(below)
        elif isinstance(part, list):
            for below in part:
                yield from consts(below)

    found = list(consts([each for name, each in SCHEMA["$defs"].items() if not name.endswith("Section")]))
    assert all(each["description"] for each in found)
    named = {each["const"] for each in found}
    assert {*OUTCOMES, *CRITIC_BASED, "clipped", "sequence_mean_token", "binary_kl", "k3+", "prompt_mean"} <= named
    loss = SCHEMA["$defs"]["AlgorithmSection"]["properties"]["loss"]["anyOf"]
    assert [each["const"] for each in loss if "const" in each] == list(PRESETS)
