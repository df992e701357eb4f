"""Presets and overrides: they are data, do not import torch, and are refused with advice if they make no sense."""

import math
from typing import Any

import msgspec
import pytest

from asyncrl.algorithms.objective import (
    Aggregation,
    ByCovariance,
    Clamp,
    Clipped,
    Gate,
    Linear,
    Objective,
    Penalty,
    Regression,
    Reinforce,
    Weight,
    Weighted,
    is_corrected,
    is_product,
)
from asyncrl.algorithms.presets import PRESETS, baseline_of, resolve_objective
from asyncrl.config.schema import AlgorithmSection
from asyncrl.errors import ConfigError


def test_the_default_is_corrected_and_the_uncorrected_ones_are_known() -> None:
    assert {name for name, preset in PRESETS.items() if not is_corrected(preset.objective)} == {
        *("reinforce", "rloo", "reinforce_pp", "grpo", "dr_grpo", "dapo", "ppo", "vapo", "dual_clip", "two_sided"),
        *("gspo", "gspo_token", "luspo", "gmpo", "cispo", "aspo", "sapo", "kimi", "maxrl", "gdpo", "opo", "gpg"),
        *("cfpo", "kl_cov", "clip_cov"),
    }


def test_every_row_of_the_designs_table_is_there() -> None:
    assert set(PRESETS) == {
        *("reinforce", "rloo", "reinforce_pp", "grpo", "dr_grpo", "dapo", "dual_clip", "two_sided", "gspo", "luspo"),
        *("gmpo", "cispo", "aipo", "topr", "aspo", "sapo", "vespo", "dppo_tv", "dppo_kl", "tis", "icepop", "seq_tis"),
        *("geometric_rejection", "opsm", "decoupled_ppo", "a3po", "m2po", "kimi", "ppo", "vapo", "vtrace"),
        *("decoupled_icepop", "gspo_token", "dppo_tv_k2", "glm5", "p3o", "oapl", "cfpo", "maxrl", "gdpo", "opo", "gpg"),
        *("kl_cov", "clip_cov", "flash_reinforce", "score_centering"),
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
        (
            {"surrogate": {"kind": "linear"}, "anker": "proximal"},
            "no field 'anker'; the fields are surrogate, anchor, ",
        ),
        ({"surrogate": {"kind": "linear"}, "constant": 3}, "sequence_sum_constant"),
        ({"surrogate": {"kind": "linear"}, "gates": [{"stat": "ratio", "lo": 1.2}]}, "lo=1.2"),
        ({"surrogate": {"kind": "linear"}, "gates": [{"stat": "k2", "budget": -1}]}, "budget"),
        ({"surrogate": {"kind": "linear"}, "weight": {"p": "behaviour"}}, "always 1"),
        ({"surrogate": {"kind": "linear"}, "weight": {"min_ess": 2}}, "min_ess"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            resolve_objective(axes, {})
        assert "algorithm.loss" in str(caught.value)


@pytest.mark.parametrize(
    ("objective", "sources"),
    [
        (Objective(surrogate=Reinforce()), set()),
        (Objective(surrogate=Clipped()), {"proximal"}),
        (Objective(surrogate=Clipped(), anchor="behaviour"), {"behaviour"}),
        (Objective(surrogate=Reinforce(), weight=Weight()), {"proximal", "behaviour"}),
        (Objective(surrogate=Reinforce(), penalties=(Penalty(beta=1.0, kind="k3"),)), {"reference"}),
        (Objective(surrogate=Reinforce(), penalties=(Penalty(beta=1.0, kind="entropy"),)), set()),
        (Objective(surrogate=Reinforce(), penalties=(Penalty(beta=1.0, kind="positive_nll"),)), set()),
        (Objective(surrogate=Reinforce(), penalties=(Penalty(beta=1.0, kind="entropy", ess=True),)), {"behaviour"}),
        (Objective(surrogate=Linear(), anchor="current", gates=(Gate(stat="k2", p="current", hi=1.0),)), {"behaviour"}),
        (Objective(surrogate=Reinforce(), dropped=ByCovariance(share=0.1)), {"proximal"}),
        (Objective(surrogate=Reinforce(), dropped=ByCovariance(share=0.1, order="random")), {"proximal", "behaviour"}),
    ],
)
def test_an_objective_says_whose_log_probs_it_needs(objective: Objective, sources: set[str]) -> None:
    assert objective.sources() == sources


def test_a_penalty_towards_the_sampler_is_no_correction() -> None:
    pulled = (Penalty(beta=1.0, kind="k2", q="behaviour"),)
    assert not is_corrected(Objective(surrogate=Clipped(), penalties=pulled))


def test_products_over_sequences_are_told_whatever_bounds_them() -> None:
    assert {name for name, preset in PRESETS.items() if is_product(preset.objective)} == {"seq_tis", "topr", "vespo"}
    assert is_product(Objective(surrogate=Linear(), level="sequence_sum"))
    assert is_product(Objective(surrogate=Reinforce(), weight=Weight(pool="sum")))
    assert not is_product(Objective(surrogate=Linear(), level="sequence_mean", weight=Weight(pool="mean")))
    regression = Objective(surrogate=Regression(beta=1.0), level="sequence_sum")
    assert not is_product(regression), "it reads the product's logarithm"
    assert is_product(msgspec.structs.replace(regression, weight=Weight(pool="sum")))


CONSTANT = {"kind": "weighted", "positive": {"kind": "clamp", "lo": 1, "hi": 1}}
CONSTANT["negative"] = CONSTANT["positive"]


@pytest.mark.parametrize(
    "axes",
    [
        {"surrogate": {"kind": "reinforce"}, "weight": {"p": "behaviour", "q": "proximal"}},
        {"surrogate": {"kind": "reinforce"}, "weight": {"p": "reference", "q": "behaviour"}},
        {"surrogate": {"kind": "reinforce"}, "gates": [{"stat": "k2", "hi": 1.0, "p": "reference"}]},
        {"surrogate": CONSTANT},
    ],
)
def test_what_does_not_divide_by_the_samplers_probability_is_no_correction(axes: dict[str, Any]) -> None:
    assert not is_corrected(resolve_objective(axes, {}))


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"surrogate": {"kind": "clipped"}, "gates": [{"stat": "ratio"}]}, "ratio is never outside"),
        ({"surrogate": {"kind": "clipped"}, "gates": [{"stat": "k3", "lo": 0.0}]}, "k3 is never outside"),
        ({"surrogate": {"kind": "clipped"}, "gates": [{"stat": "probability", "lo": -1, "hi": 1}]}, "a tighter bound"),
        ({"surrogate": CONSTANT, "anchor": "behaviour"}, "anchor would have no effect: set anchor: proximal"),
        ({"surrogate": {"kind": "reinforce"}, "level": "sequence_sum"}, "level: token"),
        (
            {"surrogate": {"kind": "reinforce"}, "pre_clip": {"lo": 0.8, "hi": 1.2}, "weight": {}},
            "pre_clip would have no effect: set pre_clip: null",
        ),
        ({"surrogate": {"kind": "linear"}, "anchor": "behaviour", "proximal": "interpolated"}, "remove proximal"),
        (
            {
                "surrogate": {"kind": "weighted", "positive": {"kind": "clamp"}, "negative": {"kind": "clamp"}},
                "level": "sequence_mean_token",
            },
            "set level to sequence_mean",
        ),
        (
            {
                "surrogate": {
                    "kind": "weighted",
                    "positive": {"kind": "clamp", "ess": True},
                    "negative": {"kind": "clamp"},
                }
            },
            "anchor to behaviour and level to token, got proximal and token",
        ),
    ],
)
@pytest.mark.fault("F28")
def test_an_axis_that_does_nothing_is_refused(axes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_objective(axes, {})


def test_a_gate_that_has_one_bound_of_two_or_a_budget_has_enough() -> None:
    for settings in ({"lo": 0.5}, {"hi": 2.0}):
        assert Gate(stat="ratio", **settings)
    assert Gate(stat="k2", budget=0.1)
    assert Gate(stat="probability", hi=0.5)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"penalties": [{"kind": "k3", "beta": math.nan}]}, "beta"),
        ({"penalties": [{"kind": "k3", "beta": -1}]}, "beta"),
        ({"penalties": [{"kind": "k3", "beta": math.inf}]}, "beta"),
        ({"surrogate": {"kind": "soft_gate", "positive": math.inf}}, "finite"),
        ({"surrogate": {"kind": "clipped", "dual": math.inf}}, "dual"),
        ({"gates": [{"stat": "k2", "budget": math.inf}]}, "budget"),
        ({"aggregation": "sequence_sum_constant", "constant": math.inf}, "constant"),
        ({"surrogate": {"kind": "quadratic", "width": 0}}, "width"),
        ({"surrogate": {"kind": "regression", "beta": math.inf}}, "beta"),
    ],
)
@pytest.mark.fault("F28")
def test_numbers_without_a_meaning_are_refused(axes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_objective({"surrogate": {"kind": "linear"}, **axes}, {})


def test_a_dual_bound_acts_where_the_upper_clip_never_does() -> None:
    assert resolve_objective("dapo", {"surrogate": {"hi": math.inf, "dual": 3}}).surrogate == Clipped(
        lo=0.8, hi=math.inf, dual=3.0
    )


def test_an_override_reaches_into_one_of_two_kernels() -> None:
    assert resolve_objective("cispo", {"surrogate": {"positive": {"hi": 3}}}).surrogate == Weighted(
        positive=Clamp(hi=3.0), negative=Clamp(hi=5.0)
    )
    # another kind starts with its own defaults
    with pytest.raises(ConfigError, match="shape"):
        resolve_objective("cispo", {"surrogate": {"positive": {"kind": "gamma"}}})


# the worked examples do not fix these numbers from both sides; they are the papers' numbers, not those of the table
def test_thresholds_are_the_papers() -> None:
    """M2PO bounds the second moment, which is twice k2, by .04. DPPO bounds the KL by .05, OPSM by .02, and
    FlashREINFORCE by .003."""
    assert [2 * gate.budget for gate in PRESETS["m2po"].objective.gates if gate.budget] == [0.04]
    assert [gate.hi for gate in PRESETS["dppo_kl"].objective.gates] == [0.05]
    assert [gate.hi for gate in PRESETS["opsm"].objective.gates] == [0.02]
    assert [gate.hi for gate in PRESETS["flash_reinforce"].objective.gates] == [0.003]


def test_advantages_are_those_that_a_paper_was_published_with_and_only_so() -> None:
    assert {name: preset.baseline for name, preset in PRESETS.items() if preset.baseline != "group_norm"} == {
        **{"rloo": "leave_one_out", "reinforce_pp": "reinforce_pp", "dr_grpo": "group_mean", "kimi": "group_mean"},
        **{"glm5": "group_mean", "score_centering": "group_mean", "flash_reinforce": "batch_mean"},
        **{"ppo": "gae", "vapo": "gae", "vtrace": "vtrace"},
        **{"maxrl": "maxrl", "gdpo": "gdpo", "opo": "opo", "gpg": "gpg", "oapl": "oapl"},
        **dict.fromkeys(["decoupled_icepop", "decoupled_ppo", "a3po", "tis", "seq_tis", "geometric_rejection"]),
        **dict.fromkeys(
            [
                "opsm",
                "m2po",
                "aipo",
                "dppo_tv",
                "dppo_tv_k2",
                "dppo_kl",
                "topr",
                "vespo",
                "reinforce",
                "dual_clip",
            ]
        ),
    }


@pytest.mark.parametrize("name", ["rloo", "gspo", "ppo"])
def test_the_baseline_is_the_presets_own_unless_it_is_named(name: str) -> None:
    assert baseline_of(AlgorithmSection(loss=name)) == PRESETS[name].baseline
    assert baseline_of(AlgorithmSection(loss=name, advantage="group_mean")) == "group_mean"
    assert baseline_of(AlgorithmSection(loss={"surrogate": {"kind": "linear"}})) == "group_norm"
    assert baseline_of(AlgorithmSection(loss="reinforce")) == "group_norm"


def test_a_weight_can_be_added_to_an_uncorrected_preset() -> None:
    assert is_corrected(resolve_objective("reinforce", {"weight": {"hi": 3.0}}))


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("decoupled_ice", {}, ["algorithm.loss", "did you mean 'decoupled_icepop'"]),
        ("tis", {"wieght": {}}, ["algorithm.overrides.wieght", "did you mean 'weight'"]),
        (
            "tis",
            {"weight": {"high": 3}},
            ["overrides.weight: there is no field 'high'", "the fields are p, q, pool, lo, hi"],
        ),
        (
            "tis",
            {"surrogate": {"low": 1}},
            ["surrogate: there is no field 'low' of kind clipped", "mean 'lo'", "the fields are lo, hi"],
        ),
        ("tis", {"gates": [{"stat": "k2", "x": 1}]}, ["gates[0]: there is no field 'x'", "the fields are stat, pool"]),
        (
            "aipo",
            {"surrogate": {"positive": {"kind": "clamp", "x": 1}}},
            ["surrogate.positive: there is no field 'x' of kind clamp", "lo, hi"],
        ),
        ("tis", {"weight": {"hi": 0.9}}, ["hi=0.9"]),
        ("tis", {"weight": {"lo": 1.0, "hi": 1.0}}, ["lo < hi"]),
        ("tis", {"surrogate": {"lo": 1.1}}, ["lo=1.1"]),
        ("tis", {"surrogate": {"dual": 1.0}}, ["dual"]),
        ("tis", {"surrogate": {"kind": "ppo"}}, ["ppo"]),
        ("tis", {"surrogate": {"lo": math.nan}}, ["lo=nan"]),
        (
            "tis",
            {"aggregation": "sequence_men"},
            ["the choices are token_mean, sequence_mean", "you mean 'sequence_mean'"],
        ),
        (
            "tis",
            {"surrogate": {"kind": "Clipped"}},
            ["the choices are reinforce", "soft_gate", "did you mean 'clipped'"],
        ),
        ("tis", {"weight": {"outside": "Zero"}}, ["the choices are clamp, zero; did you mean 'zero'"]),
        ("tis", {"gates": [{"stat": "k2", "hi": 1}, {"stat": "ratoi"}]}, ["gates[1].stat", "did you mean 'ratio'"]),
        ("aipo", {"surrogate": {"negative": {"kind": "clam"}}}, ["the choices are clamp, inverse, gamma"]),
        ("tis", {"weight": {"hi": "inf"}}, ["infinity is written .inf"]),
        ("tis", {"weight": 3}, ["overrides.weight: expected a mapping or null, got an integer"]),
        ("tis", {"gates": {"stat": "k2"}}, ["overrides.gates: expected a list, got a mapping"]),
        ("tis", {"gates": [{}]}, ["overrides.gates[0]: has no `stat`, which is required"]),
        ({"surrogate": "linear"}, {}, ["loss.surrogate: expected a mapping, got a text; write {kind: linear}"]),
        (
            {"surrogate": {"kind": "linear"}, "advantage": "grpo"},
            {},
            ["algorithm.loss: there is no field 'advantage'; advantage is a key of `algorithm`, beside `loss`; the"],
        ),
    ],
)
@pytest.mark.fault("F28")
def test_impossible_choices_are_refused(name: Any, overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_objective(name, overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.fault("F28")
def test_all_wrong_axes_and_values_are_reported_at_once() -> None:
    loss = {
        "surrogate": {"kind": "clipped", "lo": 1.5, "hi": 1.0},
        "anker": "behaviour",
        "gates": [{"stat": "ratio"}, {"stat": "k2", "hi": 1.0}, {"stat": "ratoi"}, {"stat": "k3", "low": 0, "lo": 1.0}],
        "level": "tokens",
        "weight": {"p": "prox", "hi": 0.5, "outside": "zeros"},
        "aggregation": "mean",
    }
    with pytest.raises(ConfigError) as caught:
        resolve_objective(loss, {"wieght": {}, "levle": "token"})
    places = [
        "overrides.wieght: ",
        "overrides.levle: ",
        "loss.surrogate: clip bounds",
        "loss: there is no field 'anker'",
    ]
    places += ["loss.gates[0]: ", "loss.gates[2].stat: ", "loss.gates[3]: there is no field 'low'", "loss.level: "]
    places += ["loss.weight.p: ", "loss.weight.outside: ", "loss.aggregation: "]
    lines = str(caught.value).splitlines()
    assert len(lines) == len(places), lines
    for line, place in zip(lines, places, strict=True):
        assert line.startswith(f"algorithm.{place}")
    assert "hi=0.5" not in lines[-3], "the bounds of a weight of which parts are wrong are not judged"


def test_all_axes_that_contradict_each_other_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_objective({"surrogate": {"kind": "reinforce"}, "constant": 3, "level": "sequence_sum"}, {})
    constant, level = str(caught.value).splitlines()
    assert constant.startswith("algorithm.loss: constant is an option of aggregation sequence_sum_constant")
    assert level.startswith("algorithm.loss: the surrogate does not use a ratio, so level would have no effect")


def test_an_overridden_gate_keeps_what_it_does_not_name() -> None:
    """A gate with default fields would compare the proximal policy and act on every token: another objective."""
    narrower = {"gates": [{"stat": "probability", "lo": -0.1, "hi": 0.1}]}
    [gate], [published] = resolve_objective("dppo_tv", narrower).gates, PRESETS["dppo_tv"].objective.gates
    assert (gate.lo, gate.hi) == (-0.1, 0.1)
    assert (gate.p, gate.q, gate.when) == (published.p, published.q, published.when)
    [other] = resolve_objective("dppo_tv", {"gates": [{"stat": "ratio", "hi": 2.0}]}).gates
    assert other == Gate(stat="ratio", hi=2.0), "a gate with another stat does not take fields from the preset's gate"
    [penalty] = resolve_objective("grpo", {"penalties": [{"kind": "k3", "beta": 0.1}]}).penalties
    assert penalty == msgspec.structs.replace(PRESETS["grpo"].objective.penalties[0], beta=0.1)


@pytest.mark.parametrize("bounds", [{"lo": 0.5}, {"lo": 1.0, "hi": 1.0}, {"hi": 0.0}, {"hi": -1.0}])
@pytest.mark.fault("F28")
def test_a_kernel_capped_at_the_effective_share_has_no_lower_bound(bounds: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must have lo 0 and hi above 0"):
        resolve_objective("p3o", {"surrogate": {"positive": bounds}})


@pytest.mark.parametrize("bounds", [{"hi": 0.2}, {"lo": 0.2, "hi": 0.28}, {"lo": 1.5, "hi": 2.0}])
@pytest.mark.fault("F28")
def test_a_kernel_s_bounds_are_ratios_about_1(bounds: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="ratios and must satisfy 0 ≤ lo ≤ 1 ≤ hi"):
        resolve_objective("aipo", {"surrogate": {"positive": bounds}})
