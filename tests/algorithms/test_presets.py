"""Presets and overrides: data, torch-free, and refused with a mend where they make no sense."""

import math
import subprocess
import sys
from typing import Any

import pytest

from asyncrl.algorithms.objective import Aggregation, Clipped, Objective, Reinforce, Weight, is_corrected
from asyncrl.algorithms.presets import PRESETS, resolve_objective
from asyncrl.errors import ConfigError


def test_presets_import_without_torch() -> None:
    code = "import sys, asyncrl.algorithms.presets; sys.exit(bool({'torch', 'ray', 'vllm'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_default_is_corrected_and_the_uncorrected_ones_are_known() -> None:
    assert {name for name, objective in PRESETS.items() if not is_corrected(objective)} == {"dapo", "reinforce"}


def test_the_default_has_the_designs_bounds() -> None:
    assert PRESETS["decoupled_icepop"] == Objective(
        surrogate=Clipped(lo=0.8, hi=1.28, dual=3.0),
        weight=Weight(lo=0.5, hi=5.0, outside="zero"),
        aggregation=Aggregation.TOKEN_MEAN,
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, PRESETS["tis"]),
        ({"weight": {"hi": math.inf}}, Objective(surrogate=Clipped(lo=0.8, hi=1.2), weight=Weight())),
        ({"weight": None}, Objective(surrogate=Clipped(lo=0.8, hi=1.2))),
        ({"surrogate": {"hi": 1.5, "dual": 4}}, Objective(surrogate=Clipped(hi=1.5, dual=4.0), weight=Weight(hi=2.0))),
        ({"surrogate": {"kind": "reinforce"}}, Objective(surrogate=Reinforce(), weight=Weight(hi=2.0))),
        (
            {"aggregation": "sequence_sum"},
            Objective(surrogate=Clipped(), weight=Weight(hi=2.0), aggregation=Aggregation.SEQUENCE_SUM),
        ),
    ],
)
def test_overrides_replace_just_what_they_name(overrides: dict[str, Any], expected: Objective) -> None:
    assert resolve_objective("tis", overrides) == expected


def test_a_weight_can_be_added_to_an_uncorrected_preset() -> None:
    assert is_corrected(resolve_objective("reinforce", {"weight": {"hi": 3.0}}))


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("decoupled_ice", {}, ["algorithm.loss", "did you mean 'decoupled_icepop'"]),
        ("tis", {"wieght": {}}, ["algorithm.overrides.wieght", "did you mean 'weight'"]),
        ("tis", {"weight": {"high": 3}}, ["high"]),
        ("tis", {"weight": {"hi": 0.9}}, ["hi=0.9"]),
        ("tis", {"weight": {"lo": 1.0, "hi": 1.0}}, ["lo < hi"]),
        ("tis", {"surrogate": {"lo": 1.1}}, ["lo=1.1"]),
        ("tis", {"surrogate": {"dual": 1.0}}, ["dual"]),
        ("tis", {"surrogate": {"kind": "ppo"}}, ["ppo"]),
        ("tis", {"surrogate": {"lo": math.nan}}, ["lo=nan"]),
        ("tis", {"aggregation": "mean"}, ["mean"]),
    ],
)
def test_f28_impossible_choices_are_refused(name: str, overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_objective(name, overrides)
    for word in words:
        assert word in str(caught.value)
