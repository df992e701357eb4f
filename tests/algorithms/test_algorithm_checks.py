"""Rules about the objective and its baseline: what is refused and what gives a warning before a run starts."""

import pytest
import torch

from asyncrl.algorithms.baselines import CRITIC_BASED, OUTCOMES
from asyncrl.algorithms.checks import check_algorithm, nearest_corrected
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import averages_advantages, is_corrected
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.shares import with_shares
from asyncrl.config.load import load_config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import ConfigError


def violations(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_algorithm(load_config([], overrides))
    return str(caught.value).splitlines()


def warnings(*overrides: str) -> list[str]:
    return check_algorithm(load_config([], overrides))


def test_most_likely_tokens_that_no_loss_reads_give_a_warning() -> None:
    [warning] = [line for line in warnings("generator.logprobs=16") if "generator.logprobs" in line]
    assert "generator.logprobs = 16" in warning
    assert "whose 128 bytes a token have no effect" in warning
    assert not any("generator.logprobs" in line for line in warnings())
    read = ["generator.logprobs=16", "algorithm.loss=score_centering"]
    assert not any("generator.logprobs" in line for line in warnings(*read))
    assert not any("most likely" in line for line in warnings("generator.logprobs=16", "algorithm.loss=tasks:loss"))


@pytest.mark.fault("F28")
def test_an_uncorrected_loss_is_refused_unless_synchronous() -> None:
    [violation] = violations("algorithm.loss=dapo")
    assert "algorithm.loss = dapo has no off-policy correction" in violation
    assert "staleness.max_versions = 2" in violation
    warnings("algorithm.loss=dapo", "staleness.max_versions=0")
    warnings("algorithm.loss=dapo", "algorithm.overrides={weight: {hi: 2}}")


def test_the_uncorrected_stale_baseline_is_allowed_by_its_key_and_named() -> None:
    def baselines(*overrides: str) -> list[str]:
        return [line for line in warnings("algorithm.uncorrected=true", *overrides) if "stale baseline" in line]

    assert baselines("algorithm.loss=dapo") == [
        "Uncorrected stale baseline (algorithm.uncorrected = true): algorithm.loss = dapo has no off-policy "
        "correction, and staleness.max_versions = 2 allows samples of older weights, so the gradient is biased"
    ]
    assert "set algorithm.uncorrected=true" in violations("algorithm.loss=dapo")[0]
    assert baselines("algorithm.loss=dapo", "staleness.max_versions=0") == []
    assert baselines() == [], "the default objective is corrected"
    assert baselines("algorithm.loss=tasks:loss") == [], "an own loss may correct"


@pytest.mark.parametrize("loss", [name for name, preset in PRESETS.items() if not is_corrected(preset.objective)])
@pytest.mark.fault("F28")
def test_an_uncorrected_loss_is_answered_with_presets_that_run_as_they_are(loss: str) -> None:
    objective = PRESETS[loss].objective
    nearest = nearest_corrected(objective, with_critic=False)
    assert len(nearest) > 3
    for name in nearest:
        warnings(f"algorithm.loss={name}")
    assert "gae" not in {PRESETS[name].baseline for name in nearest}
    assert set(nearest) < set(nearest_corrected(objective, with_critic=True))
    [violation] = [line for line in violations(f"algorithm.loss={loss}") if "off-policy" in line]
    assert f"the nearest are {', '.join(nearest[:3])}, the default is decoupled_icepop" in violation
    assert "staleness.max_versions=0" in violation


def test_the_nearest_preset_is_the_one_with_the_fewest_other_axes() -> None:
    assert nearest_corrected(PRESETS["cispo"].objective, with_critic=False)[0] == "aipo", (
        "aipo is cispo with a behaviour anchor"
    )
    assert nearest_corrected(PRESETS["dppo_tv"].objective, with_critic=False)[0] == "dppo_tv"


def test_advantages_for_each_token_are_refused_for_episodes_with_branches() -> None:
    agent, critic = "environment.agent=tasks:play", ["algorithm.loss=ppo", "critic={}"]
    [violation] = [line for line in violations(agent, *critic) if "max_branches" in line]
    assert "has an advantage for each token" in violation
    assert "environment.max_branches = 8" in violation
    assert "max_branches" not in "".join(
        violations(agent, "environment.max_branches=1", *critic, "algorithm.loss=dapo")
    )
    warnings(agent)


@pytest.mark.fault("F28")
def test_a_penalty_is_no_correction() -> None:
    pulled = "algorithm.overrides={penalties: [{kind: k2, q: behaviour, beta: 1}]}"
    assert "no off-policy correction" in violations("algorithm.loss=dapo", pulled)[0]


@pytest.mark.parametrize("loss", ["ppo", "vapo", "vtrace"])
@pytest.mark.fault("F28")
def test_a_baseline_that_needs_a_critic_is_refused_with_the_reason(loss: str) -> None:
    found = violations(f"algorithm.loss={loss}", "staleness.max_versions=0")
    assert "needs a critic" in found[0]
    assert ("product of the ratios of all later tokens" in found[0]) == (loss == "vtrace")
    warnings(f"algorithm.loss={loss}", "algorithm.advantage=group_norm", "staleness.max_versions=0")
    warnings(f"algorithm.loss={loss}", "critic={}", "staleness.max_versions=0")


@pytest.mark.fault("F28")
def test_a_critic_that_no_estimator_uses_is_refused() -> None:
    assert "does not use a critic; remove the section critic" in violations("critic={}")[0]
    assert "does not use a critic" in violations("critic.lam=0.9", "algorithm.advantage=mine:estimator")[0]
    warnings("critic={}", "algorithm.advantage=gae")


@pytest.mark.fault("F28")
def test_gae_s_options_are_refused_with_v_trace() -> None:
    lambdas = ("critic={value_lam: 1.0, length_alpha: 0.05}",)
    assert [
        "critic.value_lam = 1" in line or "critic.length_alpha = 0.05" in line
        for line in violations("algorithm.loss=vtrace", *lambdas)
    ] == [True, True]
    warnings("algorithm.advantage=gae", *lambdas)


def test_a_critic_lets_a_group_have_one_sample() -> None:
    warnings("critic={}", "algorithm.advantage=gae", "learner.group_size=1")


@pytest.mark.fault("F28")
def test_a_group_of_one_has_no_other_sample_to_compare_with() -> None:
    assert "learner.group_size = 1" in violations("learner.group_size=1")[0]
    warnings("learner.group_size=1", "algorithm.advantage=mine:estimator")


@pytest.mark.fault("F28")
def test_a_misspelt_baseline_says_what_was_meant_and_presets_name_built_in_ones() -> None:
    assert "did you mean 'group_norm'" in violations("algorithm.advantage=group_nrom")[0]
    assert {preset.baseline for preset in PRESETS.values()} <= {*OUTCOMES, *CRITIC_BASED, None}


@pytest.mark.fault("F28")
def test_a_penalty_buffer_longer_than_a_completion_is_refused_where_it_matters() -> None:
    long = ("algorithm.overlong_buffer_tokens=17",)
    assert "must be at most generator.max_completion_tokens = 16" in violations("algorithm.overlong=penalise", *long)[0]
    warnings(*long)


@pytest.mark.fault("F28")
def test_masking_zero_variance_is_refused_where_no_group_has_any() -> None:
    alone = ("learner.group_size=1", "algorithm.advantage=reinforce_pp")
    for filters in ("mask", "resample"):
        assert "none would be trained" in violations(f"algorithm.zero_variance={filters}", *alone)[0]
    warnings(*alone)


@pytest.mark.fault("F28")
def test_overrides_of_no_preset_are_refused() -> None:
    assert "algorithm.overrides" in violations("algorithm.loss=mine:loss", "algorithm.overrides={weight: null}")[0]


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        ("decoupled_icepop", "(the surrogate's ratio or clip)"),
        *((loss, "(the surrogate's ratio or clip)") for loss in ("cispo", "sapo", "gspo", "gmpo", "luspo", "dapo")),
        ("aspo", "(the surrogate's ratio or clip, gates[0])"),
        ("kimi", "(penalties[0])"),
    ],
)
def test_what_compares_a_policy_with_itself_is_said(loss: str, parts: str) -> None:
    on_policy = () if loss == "decoupled_icepop" else ("staleness.max_versions=0",)
    [warning] = [line for line in warnings(f"algorithm.loss={loss}", *on_policy) if "have no effect" in line]
    assert parts in warning
    assert not warnings(f"algorithm.loss={loss}", "learner.updates_per_step=2", *on_policy)


def test_what_acts_is_not_said_to_be_inert() -> None:
    assert not warnings("algorithm.loss=a3po"), "an interpolated proximal policy differs from the current policy"
    assert not warnings("learner.updates_per_step=2")
    assert not warnings("algorithm.loss=aipo"), "aipo has no clip"
    assert not warnings("algorithm.loss=tis", "algorithm.overrides={anchor: behaviour, weight: null}"), "the clip acts"


def test_a_product_over_sequences_is_said_with_the_share_that_it_leaves() -> None:
    lengths = ("generator.max_completion_tokens=1024", "model.max_length=2048")
    [warning] = [line for line in warnings("algorithm.loss=seq_tis", *lengths) if "multiplies" in line]
    assert "1024 tokens" in warning
    assert warning.endswith("= 0.077")
    for loss in ("vespo", "topr"):
        assert any("multiplies" in line for line in warnings(f"algorithm.loss={loss}", *lengths))
    assert not any("multiplies" in line for line in warnings("algorithm.loss=seq_tis", "staleness.max_versions=0"))


@pytest.mark.parametrize("loss", ["ppo", "vapo", "vtrace"])
def test_a_preset_without_its_critic_is_said_to_be_half_of_it(loss: str) -> None:
    found = warnings(f"algorithm.loss={loss}", "algorithm.advantage=group_norm", "staleness.max_versions=0")
    assert any(f"algorithm.loss = {loss} was published with a critic" in line for line in found)
    assert not any("critic" in line for line in warnings("algorithm.loss=aipo", "algorithm.advantage=group_mean"))


def test_a_loss_that_is_not_verified_is_a_warning_when_data_may_be_old() -> None:
    assert any("not verified to correct" in warning for warning in warnings("algorithm.loss=mine:loss"))
    assert not warnings("algorithm.loss=mine:loss", "staleness.max_versions=0")


def test_a_correction_by_ratio_and_by_weight_is_said_to_be_two() -> None:
    twice = "algorithm.overrides={anchor: behaviour}"
    assert any("corrects twice" in line for line in warnings("algorithm.loss=tis", twice))
    assert not any("corrects twice" in line for line in warnings("algorithm.loss=tis"))
    assert not any("corrects twice" in line for line in warnings("algorithm.loss=aipo"))


@pytest.mark.fault("F28")
def test_a_correction_that_an_override_took_away_is_asked_for_by_its_axis() -> None:
    with pytest.raises(ConfigError, match=r"decoupled_icepop with algorithm.overrides has no off-policy.*anchor: beh"):
        warnings("algorithm.overrides={weight: null}")


def test_an_advantage_with_options_is_checked_like_a_name() -> None:
    warnings("algorithm.advantage={name: group_norm, eps: 1e-4, eps_in: variance, divisor: n}")
    assert "the option has no effect" in violations("algorithm.advantage={name: group_mean, eps: 1e-4}")[0]
    assert "did you mean 'eps'" in violations("algorithm.advantage={name: group_norm, esp: 1e-4}")[0]
    both = violations("algorithm.advantage={name: group_norm, esp: 1e-4}", "algorithm.loss=dapo")
    assert len(both) == 2, "an invalid option does not hide other violations"
    assert "needs a critic" in violations("algorithm.advantage={name: gae, keep_mean: true}")[0]
    warnings("critic={}", "algorithm.advantage={name: gae, whiten: samples}")
    assert "does not use a critic" in violations("critic={}", "algorithm.advantage={name: mine:fn, factor: 2}")[0]


@pytest.mark.fault("F28")
def test_what_a_run_does_not_have_is_refused_with_the_reason() -> None:
    for advantage in ("gdpo", "{name: group_norm, rewards: components}"):
        assert "this configuration gives one reward" in violations(f"algorithm.advantage={advantage}")[0]
        warnings(f"algorithm.advantage={advantage}", "environment.rewards=[{name: right, fn: exact_match}]")
    assert "reads the reward of a greedy completion" in violations("algorithm.advantage=remax")[0]
    assert "reads several rewards" in violations("algorithm.loss=gdpo", "staleness.max_versions=0")[0]
    for name in ("maxrl", "gr3"):
        [violation] = violations(f"algorithm.advantage={name}", "algorithm.overlong=penalise")
        assert f"algorithm.advantage = {name} needs rewards of at least 0" in violation
        warnings(f"algorithm.advantage={name}", "algorithm.overlong=mask")


@pytest.mark.parametrize(
    "advantage",
    [
        "gpg",
        "{name: gpg, single: raw}",
        "{name: group_mean, scale: informative_share}",
        "{name: gpg, scale: nonzero_share}",
        "{name: leave_one_out, scale: nonzero_share}",
        "{name: group_mean, scale: nonzero_share}",
    ],
)
@pytest.mark.fault("F28")
def test_groups_of_equal_rewards_do_not_scale_advantages_twice(advantage: str) -> None:
    found = violations(f"algorithm.advantage={advantage}", "algorithm.zero_variance=mask")
    assert any("scaled twice; set algorithm.zero_variance to keep or resample" in line for line in found)
    for other in ("keep", "resample"):
        warnings(f"algorithm.advantage={advantage}".replace(", single: raw", ""), f"algorithm.zero_variance={other}")
    warnings("algorithm.advantage=group_mean", "algorithm.zero_variance=mask")


@pytest.mark.parametrize("name", ["group_norm", "leave_one_out_std", "maxrl", "gpg", "opo", "gr3", "gae"])
@pytest.mark.fault("F28")
def test_estimators_that_compare_a_group_refuse_a_group_of_one(name: str) -> None:
    alone = ("learner.group_size=1", *(("critic={}",) if name == "gae" else ()))
    if name == "gae":
        warnings(f"algorithm.advantage={name}", *alone)
        return
    assert "learner.group_size = 1" in violations(f"algorithm.advantage={name}", *alone)[0]
    warnings(f"algorithm.advantage={{name: {name}, single: raw}}", *alone)
    [inert] = warnings(f"algorithm.advantage={{name: {name}, single: raw}}")
    assert "it has no effect" in inert


def pushes_opposite_tokens(name: str) -> bool:
    """Returns True if advantages 1 and −1 of a sequence of two tokens give a gradient when all policies agree."""
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    columns = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    data = BatchedDataDict(
        {name: torch.tensor([[0.0, -1.0, -1.0]]) for name in columns}
        | {"advantages": torch.tensor([[0.0, 1.0, -1.0]]), "token_mask": torch.tensor([[0.0, 1.0, 1.0]])}
        | {"sample_mask": torch.ones(1), "staleness": torch.zeros(1, 3)}
        | {"rewards": torch.zeros(1), "group_ids": torch.zeros(1).long()}
        | dict.fromkeys(("top_ids", "top_logprobs"), torch.zeros(1, 3, 1))
    )
    data = with_shares(data)
    loss, _ = ObjectiveLoss(PRESETS[name].objective)(
        data=data,
        global_valid_seqs=torch.tensor(1),
        global_valid_toks=torch.tensor(2),
        next_token_logprobs=logprobs,
        next_token_centering=torch.zeros(1, 2),
    )
    loss.backward()
    assert logprobs.grad is not None
    return bool(logprobs.grad.abs().max() > 1e-6)


def test_centering_needs_the_log_probs_of_the_samplers_most_likely_tokens() -> None:
    [violation] = violations("algorithm.loss=score_centering")
    assert "generator.logprobs is unset: algorithm.loss = score_centering has centering = score" in violation
    assert "set generator.logprobs, for example to 16, or algorithm.overrides.centering to null" in violation
    warnings("algorithm.loss=score_centering", "generator.logprobs=4")
    warnings("algorithm.loss=score_centering", "algorithm.overrides={centering: null}")
    with pytest.raises(ConfigError, match=r"algorithm\.overrides: centering is score.*surrogate: \{kind: clipped\}"):
        check_algorithm(load_config([], ["algorithm.loss=tis", "algorithm.overrides={weight: null, centering: score}"]))


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("dr_grpo", "m2po")])
@pytest.mark.fault("F28")
def test_token_advantages_are_refused_just_where_a_sequence_averages_them(name: str) -> None:
    """The gradient shows which presets these are. dr_grpo and m2po are left out, because their constant and their bound
    are not set here."""
    assert averages_advantages(PRESETS[name].objective) == (not pushes_opposite_tokens(name))


@pytest.mark.parametrize("loss", ["gspo", "luspo", "gmpo"])
@pytest.mark.fault("F28")
def test_a_ratio_of_the_sequence_with_token_advantages_is_refused(loss: str) -> None:
    here = (f"algorithm.loss={loss}", "critic={}", "staleness.max_versions=0")
    [violation] = violations(*here, "algorithm.advantage=gae")
    assert f"algorithm.loss = {loss} has one ratio a sequence" in violation
    assert "Choose an objective at token level, e.g. algorithm.loss: gspo_token" in violation
    warnings(*here, "algorithm.advantage=gae", "algorithm.overrides.level=token")


KL = "algorithm.advantage={name: reinforce_pp, kl: {beta: 0.01}}"


@pytest.mark.parametrize("options", ["kl: {beta: 0.01}", "gamma: 0.9"])
@pytest.mark.fault("F28")
def test_token_advantages_without_a_critic_are_refused_with_a_ratio_of_the_sequence(options: str) -> None:
    here = ("algorithm.loss=gspo", "staleness.max_versions=0")
    [violation] = violations(*here, f"algorithm.advantage={{name: reinforce_pp_baseline, {options}}}")
    assert "algorithm.advantage = reinforce_pp_baseline with kl or gamma gives every token" in violation
    warnings(*here, "algorithm.advantage=reinforce_pp_baseline")
    warnings("algorithm.loss=gspo_token", here[1], f"algorithm.advantage={{name: reinforce_pp_baseline, {options}}}")


@pytest.mark.fault("F28")
def test_a_kl_in_the_reward_that_is_impossible_is_refused() -> None:
    assert not warnings(KL)
    assert not warnings("critic={}", "algorithm.advantage={name: gae, kl: {beta: 0.01, kind: k3}}")
    for advantage, words in (
        ("{name: reinforce_pp, kl: {beta: -0.01}}", "kl.beta is -0.01: it must be finite and above 0"),
        ("{name: reinforce_pp, kl: {beta: 0.01}, gamma: 1.1}", "gamma is 1.1: it must be above 0 and at most 1"),
        ("{name: group_norm, kl: {beta: 0.01}}", "kl is an option of reinforce_pp, reinforce_pp_baseline, gae, vtrace"),
        ("{name: group_norm, gamma: 0.9}", "gamma is an option of reinforce_pp, reinforce_pp_baseline"),
    ):
        [violation] = violations(f"algorithm.advantage={advantage}")
        assert words in violation
    assert (
        "learner.group_size = 1"
        in violations("learner.group_size=1", "algorithm.advantage={name: reinforce_pp_baseline, kl: {beta: 0.01}}")[0]
    )
    assert "does not use a critic" in violations("critic={}", KL)[0]


def test_a_pull_to_the_reference_by_reward_and_by_penalty_is_said_to_be_two() -> None:
    here = ("algorithm.loss=reinforce_pp", "staleness.max_versions=0")
    [warning] = [line for line in warnings(*here, KL) if "twice" in line]
    assert "algorithm.loss = reinforce_pp already has a penalty against the reference" in warning
    for other in (
        (*here, KL, "algorithm.overrides={penalties: []}"),
        (*here, KL, "algorithm.overrides={penalties: [{kind: entropy, beta: 0.1}]}"),
        (*here, KL, "algorithm.overrides={penalties: [{kind: k2, q: proximal, beta: 0.1}]}"),
        here,
    ):
        assert not [line for line in warnings(*other) if "twice" in line]


@pytest.mark.parametrize(
    ("advantage", "critic"),
    [("reinforce_pp", False), ("{name: reinforce_pp, whiten: none}", False), ("gae", True), ("vtrace", True)],
)
@pytest.mark.parametrize("filters", ["mask", "resample"])
@pytest.mark.fault("F28")
def test_groups_of_equal_rewards_are_not_left_out_where_they_have_a_gradient(
    advantage: str, critic: bool, filters: str
) -> None:
    settings = [f"algorithm.advantage={advantage}", *(["critic={}"] if critic else [])]
    found = violations(*settings, f"algorithm.zero_variance={filters}")
    assert any("does not compare the samples of a group" in line for line in found), found
    warnings("algorithm.advantage=reinforce_pp_baseline", f"algorithm.zero_variance={filters}")


def test_wrong_axes_of_the_objective_and_of_the_advantages_are_reported_at_once() -> None:
    given = ["algorithm.advantage={name: group_norm, eps: -1}", "algorithm.overrides={levle: token, proximal: no}"]
    with pytest.raises(ConfigError) as caught:
        check_algorithm(load_config([], given))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3, lines
    for line, key in zip(
        lines, ["advantage: eps", "overrides.levle: ", "overrides.proximal: invalid enum value"], strict=True
    ):
        assert line.startswith(f"algorithm.{key}")
