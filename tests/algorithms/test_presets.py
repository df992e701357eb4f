"""Presets and overrides: data, torch-free, and refused with a mend where they make no sense."""

import math
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from asyncrl.algorithms.objective import (
    Aggregation,
    Clamp,
    Clipped,
    Gate,
    Linear,
    Objective,
    Penalty,
    Reinforce,
    Weight,
    Weighted,
    is_corrected,
    is_product,
)
from asyncrl.algorithms.presets import PRESETS, baseline_of, resolve_objective
from asyncrl.config.schema import AlgorithmSection
from asyncrl.errors import ConfigError


@pytest.mark.slow
def test_presets_import_without_torch() -> None:
    code = "import sys, asyncrl.algorithms.presets; sys.exit(bool({'torch', 'ray', 'vllm'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_default_is_corrected_and_the_uncorrected_ones_are_known() -> None:
    assert {name for name, preset in PRESETS.items() if not is_corrected(preset.objective)} == {
        *("reinforce", "rloo", "reinforce_pp", "grpo", "dr_grpo", "dapo", "ppo", "vapo", "dual_clip", "two_sided"),
        *("gspo", "luspo", "gmpo", "cispo", "aspo", "sapo", "kimi"),
    }


def test_every_row_of_the_designs_table_is_there() -> None:
    assert set(PRESETS) == {
        *("reinforce", "rloo", "reinforce_pp", "grpo", "dr_grpo", "dapo", "dual_clip", "two_sided", "gspo", "luspo"),
        *("gmpo", "cispo", "aipo", "topr", "aspo", "sapo", "vespo", "dppo_tv", "dppo_kl", "tis", "icepop", "seq_tis"),
        *("geometric_rejection", "opsm", "decoupled_ppo", "a3po", "m2po", "kimi", "ppo", "vapo", "vtrace"),
        "decoupled_icepop",
    }


def test_the_default_has_the_designs_bounds() -> None:
    assert PRESETS["decoupled_icepop"].objective == Objective(
        surrogate=Clipped(lo=0.8, hi=1.28, dual=3.0),
        weight=Weight(lo=0.5, hi=5.0, outside="zero"),
        aggregation=Aggregation.TOKEN_MEAN,
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, PRESETS["tis"].objective),
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


@pytest.mark.parametrize("name", list(PRESETS))
def test_axes_spelled_out_are_the_preset(name: str) -> None:
    spelled = msgspec.to_builtins(PRESETS[name].objective)
    assert resolve_objective(spelled, {}) == PRESETS[name].objective


def test_an_objective_can_be_made_of_axes_and_bad_ones_name_the_key() -> None:
    found = resolve_objective(
        {"surrogate": {"kind": "linear"}, "anchor": "behaviour", "gates": [{"stat": "k3", "hi": 0.1}]}, {}
    )
    assert found == Objective(surrogate=Linear(), anchor="behaviour", gates=(Gate(stat="k3", hi=0.1),))
    for axes, words in (
        ({}, "surrogate"),
        ({"surrogate": {"kind": "linear"}, "anker": "proximal"}, "no field 'anker'; there are surrogate, anchor, "),
        ({"surrogate": {"kind": "linear"}, "constant": 3}, "sequence_sum_constant"),
        ({"surrogate": {"kind": "linear"}, "gates": [{"stat": "ratio", "lo": 1.2}]}, "lo=1.2"),
        ({"surrogate": {"kind": "linear"}, "gates": [{"stat": "k2", "budget": -1}]}, "budget"),
        ({"surrogate": {"kind": "linear"}, "weight": {"p": "behaviour"}}, "always 1"),
        ({"surrogate": {"kind": "linear"}, "weight": {"min_ess": 2}}, "min_ess"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            resolve_objective(axes, {})
        assert caught.value.key == "algorithm.loss"


@pytest.mark.parametrize(
    ("objective", "sources"),
    [
        (Objective(surrogate=Reinforce()), set()),
        (Objective(surrogate=Clipped()), {"proximal"}),
        (Objective(surrogate=Clipped(), anchor="behaviour"), {"behaviour"}),
        (Objective(surrogate=Reinforce(), weight=Weight()), {"proximal", "behaviour"}),
        (Objective(surrogate=Reinforce(), penalties=(Penalty(beta=1.0, kind="k3"),)), {"reference"}),
        (Objective(surrogate=Reinforce(), penalties=(Penalty(beta=1.0, kind="entropy"),)), set()),
        (Objective(surrogate=Linear(), anchor="current", gates=(Gate(stat="k2", p="current"),)), {"behaviour"}),
    ],
)
def test_an_objective_says_whose_log_probs_it_needs(objective: Objective, sources: set[str]) -> None:
    assert objective.sources() == sources


def test_a_penalty_towards_the_sampler_is_no_correction() -> None:
    pulled = (Penalty(beta=1.0, kind="k2", q="behaviour"),)
    assert not is_corrected(Objective(surrogate=Clipped(), penalties=pulled))


def test_products_over_sequences_are_told_from_kernels_that_bound_them() -> None:
    assert {name for name, preset in PRESETS.items() if is_product(preset.objective)} == {"seq_tis"}
    assert is_product(Objective(surrogate=Linear(), level="sequence_sum"))
    unbounded = Weighted(positive=Clamp(hi=1.0), negative=Clamp())
    assert is_product(Objective(surrogate=unbounded, level="sequence_sum"))


@pytest.mark.parametrize("name", ["rloo", "gspo", "ppo"])
def test_the_baseline_is_the_presets_own_unless_it_is_named(name: str) -> None:
    assert baseline_of(AlgorithmSection(loss=name)) == PRESETS[name].baseline
    assert baseline_of(AlgorithmSection(loss=name, advantage="group_mean")) == "group_mean"
    assert baseline_of(AlgorithmSection(loss={"surrogate": {"kind": "linear"}})) == "group_norm"


def test_a_weight_can_be_added_to_an_uncorrected_preset() -> None:
    assert is_corrected(resolve_objective("reinforce", {"weight": {"hi": 3.0}}))


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("decoupled_ice", {}, ["algorithm.loss", "did you mean 'decoupled_icepop'"]),
        ("tis", {"wieght": {}}, ["algorithm.overrides.wieght", "did you mean 'weight'"]),
        ("tis", {"weight": {"high": 3}}, ["weight has no field 'high'", "there are p, q, pool, lo, hi"]),
        ("tis", {"surrogate": {"low": 1}}, ["surrogate of kind clipped", "mean 'lo'", "there are lo, hi, dual"]),
        ("tis", {"gates": [{"stat": "k2", "x": 1}]}, ["gates[0] has no field 'x'", "there are stat, pool"]),
        (
            "aipo",
            {"surrogate": {"positive": {"kind": "clamp", "x": 1}}},
            ["surrogate.positive of kind clamp", "lo, hi"],
        ),
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
