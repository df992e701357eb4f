"""`algorithm.advantage` as data: which values are refused, with the choices; and the user's own estimators with
options."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import Samples, compute_advantages, resolve_estimator
from asyncrl.algorithms.baselines import (
    CRITIC_BASED,
    OUTCOMES,
    CriticBased,
    DiscountedOutcome,
    OwnEstimator,
    RewardKL,
    has_token_advantages,
    resolve_advantage,
    reward_kl,
)
from asyncrl.algorithms.presets import PRESETS, PublishedCritic
from asyncrl.errors import ConfigError

SAMPLES = Samples(
    rewards_N=torch.tensor([1.0, 0.0, 3.0]),
    group_ids_N=torch.tensor([2, 2, 5]),
    completion_tokens_N=torch.tensor([4, 5, 6]),
)


@pytest.mark.parametrize("name", list(OUTCOMES))
def test_axes_spelled_out_over_another_row_are_the_row(name: str) -> None:
    """Every row can be written out by its axes, so a name adds nothing to the axes."""
    default, row = DiscountedOutcome(), OUTCOMES[name]
    axes = {key: value for key, value in msgspec.to_builtins(row).items() if value != getattr(default, key)}
    base = {"name": "reinforce_pp", "whiten": "none"}
    found = resolve_advantage({**base, **axes})
    assert msgspec.to_builtins(found) == msgspec.to_builtins(default) | msgspec.to_builtins(row)


def test_options_replace_only_what_they_name() -> None:
    found = resolve_advantage({"name": "gae", "whiten": "samples", "keep_mean": True})
    assert found == CriticBased(whiten="samples", keep_mean=True)
    assert resolve_advantage({"name": "gpg", "single": "raw"}) == msgspec.structs.replace(OUTCOMES["gpg"], single="raw")
    assert resolve_advantage({"name": "vtrace"}) == CRITIC_BASED["vtrace"]
    assert {row.whiten for row in CRITIC_BASED.values()} == {"tokens"}


def test_a_kl_or_a_discount_gives_tokens_advantages_of_their_own_which_are_whitened_over_tokens() -> None:
    kl = {"beta": 0.01, "kind": "k2"}
    for options in ({"kl": kl}, {"gamma": 0.9}, {"kl": kl, "gamma": 0.9}):
        found = resolve_advantage({"name": "reinforce_pp", **options})
        assert isinstance(found, DiscountedOutcome)
        assert (found.whiten, has_token_advantages(found)) == ("tokens", True)
        kept = resolve_advantage({"name": "reinforce_pp", "whiten": "samples", **options})
        assert isinstance(kept, DiscountedOutcome)
        assert kept.whiten == "samples"
    for whole in ("reinforce_pp", {"name": "reinforce_pp", "gamma": 1.0}, "group_norm", "mine:fn"):
        assert not has_token_advantages(resolve_advantage(whole))
    for name in CRITIC_BASED:
        assert has_token_advantages(resolve_advantage(name))


def test_the_kl_in_the_reward_is_found_wherever_an_estimator_has_one() -> None:
    kl = {"beta": 0.01, "kind": "k2"}
    for name in ("reinforce_pp", "reinforce_pp_baseline", "gae", "vtrace"):
        assert reward_kl({"name": name, "kl": kl}) == RewardKL(beta=0.01, kind="k2")
        assert reward_kl(name) is None
    assert reward_kl("group_norm") is None
    assert reward_kl({"name": "mine:fn", "kl": kl}) is None, "kl is an option of the user's estimator"


# no worked example fixes these numbers; they are the paper's numbers, not those of the table
def test_vapo_s_critic_is_the_papers() -> None:
    """2504.05118: returns use λ = 1, advantages use λ = 1 − 1/(0.05 · length)."""
    critics = {name: preset.critic for name, preset in PRESETS.items() if preset.critic is not None}
    assert critics == {"vapo": PublishedCritic(value_lam=1.0, length_alpha=0.05)}


@pytest.mark.parametrize(
    ("advantage", "words"),
    [
        ("group_nrom", ["algorithm.advantage = group_nrom", "did you mean 'group_norm'"]),
        ({"eps": 1e-3}, ["has no name", "add `name:`"]),
        ({"name": 3}, ["has no name"]),
        (
            {"name": "group_norm", "esp": 1e-3},
            ["algorithm.advantage.esp", "did you mean 'eps'", "its options are whiten"],
        ),
        ({"name": "gae", "single": "raw"}, ["gae has no such option", "its options are whiten, keep_mean, eps"]),
        ({"name": "group_norm", "eps": -1.0}, ["eps is -1", "at least 0"]),
        ({"name": "group_norm", "eps": "small"}, ["advantage.eps: expected a number, got a text"]),
        ({"name": "group_norm", "eps_in": "sdt"}, ["the choices are std, variance; did you mean 'std'"]),
        ({"name": "group_norm", "divisor": "n-2"}, ["the choices are n, n-1; did you mean 'n-1'"]),
        ({"name": "group_norm", "whiten": "token"}, ["the choices are none, samples, tokens"]),
        (
            {"name": "group_norm", "baseline": "greedy"},
            ["scale is group_std with baseline greedy", "set baseline to one of them"],
        ),
        ({"name": "gr3", "length_penalty": 0.0}, ["length_penalty is 0", "above 0, or null"]),
        ({"name": "gdpo", "weights": {"a": 0.0}}, ["weights are {'a': 0.0}", "at least one must not be 0"]),
        ({"name": "reinforce_pp", "gamma": 0.0}, ["gamma is 0", "above 0 and at most 1"]),
        ({"name": "reinforce_pp_baseline", "gamma": 1.5}, ["gamma is 1.5"]),
        (
            {"name": "reinforce_pp", "kl": {"beta": -0.1}},
            ["kl.beta is -0.1", "above 0; to train without a KL, remove kl"],
        ),
        ({"name": "gae", "kl": {"beta": 0}}, ["kl.beta is 0"]),
        ({"name": "gae", "kl": {"beta": math.inf}}, ["kl.beta is inf", "must be finite"]),
        ({"name": "gae", "kl": {"beta": 0.1, "kind": "k4"}}, ["the choices are k1, k2, k3"]),
        ({"name": "reinforce_pp", "kl": {"kind": "k1"}}, ["algorithm.advantage.kl: has no `beta`, which is required"]),
        (
            {"name": "reinforce_pp", "kl": {"beta": 0.1, "knd": "k2"}},
            ["advantage.kl: there is no field 'knd'; did you mean 'kind'; the fields are beta, kind"],
        ),
        ({"name": "reinforce_pp", "kl": 0.1}, ["advantage.kl: expected a mapping"]),
        (
            {"name": "group_norm", "kl": {"beta": 0.1}},
            ["group_norm has no such option", "kl is an option of reinforce_pp, reinforce_pp_baseline, gae, vtrace"],
        ),
        (
            {"name": "gae", "gamma": 0.9},
            ["gae has no such option", "gamma is an option of reinforce_pp, reinforce_pp_"],
        ),
        # options without an effect
        ({"name": "group_mean", "eps": 1e-3}, ["algorithm.advantage.eps: the option has no effect", "remove it"]),
        (
            {"name": "maxrl", "eps_in": "variance"},
            ["eps_in: the option has no effect", "does not divide by a standard deviation"],
        ),
        ({"name": "opo", "divisor": "n"}, ["divisor: the option has no effect"]),
        ({"name": "group_norm", "keep_mean": True}, ["keep_mean: the option has no effect, because whiten is none"]),
        (
            {"name": "reinforce_pp", "single": "raw"},
            ["single: the option has no effect, because baseline none does not compare"],
        ),
        (
            {"name": "group_norm", "weights": {"a": 1.0}},
            ["weights: the option has no effect, because rewards is total"],
        ),
        ({"name": "gae", "whiten": "none", "eps": 1e-3}, ["eps: the option has no effect"]),
    ],
)
@pytest.mark.fault("F28")
def test_impossible_and_idle_options_are_refused(advantage: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_advantage(advantage)
    for word in words:
        assert word in str(caught.value)


def test_docs_list_every_estimator_and_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    for name in (*OUTCOMES, *CRITIC_BASED):
        assert f"| `{name}` |" in page
    for option in DiscountedOutcome.__struct_fields__:
        assert f"| `{option}` |" in page


# --- import paths -----------------------------------------------------------------------------------------------


def scaled(rewards: torch.Tensor, group_ids: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return factor * rewards + 0 * group_ids


def by_length(samples: Samples, *, factor: float) -> torch.Tensor:
    assert samples.completion_tokens_N is not None
    return factor * samples.completion_tokens_N


def test_an_own_estimator_gets_its_options() -> None:
    own = {"name": f"{__name__}:scaled", "factor": 2.0}
    assert resolve_advantage(own) == OwnEstimator(path=f"{__name__}:scaled", options={"factor": 2.0})
    assert compute_advantages(resolve_estimator(own), SAMPLES).tolist() == [2.0, 0.0, 6.0]
    assert compute_advantages(resolve_estimator(f"{__name__}:scaled"), SAMPLES).tolist() == [1.0, 0.0, 3.0]


def test_an_own_estimator_with_a_parameter_samples_gets_all_that_is_known() -> None:
    own = {"name": f"{__name__}:by_length", "factor": 2.0}
    assert compute_advantages(resolve_estimator(own), SAMPLES).tolist() == [8.0, 10.0, 12.0]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            {"name": f"{__name__}:scaled", "factr": 1},
            r"^algorithm\.advantage\.factr: .*:scaled has no such option; its options are factor; did you mean",
        ),
        (
            {"name": f"{__name__}:by_length"},
            r":by_length needs a value for factor, which is missing; add algorithm\.advantage\.factor",
        ),
        ({"name": "torch:is_tensor"}, r"with \(rewards, group_ids\): too many positional"),
    ],
)
@pytest.mark.fault("F28")
def test_options_that_an_own_estimator_does_not_take_are_refused(own: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_estimator(own)


def test_an_estimator_of_a_critic_is_not_one_of_rewards() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage = gae: it needs a critic"):
        resolve_estimator("gae")


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"name": "group_norm", "eps": np.float64(1e-4)}, {"name": "group_norm", "eps": 1e-4}),
        ({"name": "gr3", "length_penalty": np.float32(0.5)}, {"name": "gr3", "length_penalty": 0.5}),
        ({"name": "reinforce_pp", "keep_mean": np.bool_(True)}, {"name": "reinforce_pp", "keep_mean": True}),
        (
            {"name": "reinforce_pp", "gamma": np.array(0.5), "kl": {"beta": np.float64(0.1)}},
            {"name": "reinforce_pp", "gamma": 0.5, "kl": {"beta": 0.1}},
        ),
    ],
)
def test_options_may_be_numbers_of_numpy(options: dict[str, Any], same: dict[str, Any]) -> None:
    assert resolve_advantage(options) == resolve_advantage(same)
