"""The health notes: each kind of broken run has the right note first within ten steps, and healthy runs have none."""

import doctest
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from made_up_run import make_step

from asyncrl.common.concern import Concern
from asyncrl.config.schema import Config, RewardTerm
from asyncrl.learner import records as records_module
from asyncrl.learner.records import EvalRecord, Note, StepRecord
from asyncrl.views import evidence, health_docs, health_finds
from asyncrl.views.evidence import evidence_of, since
from asyncrl.views.health import RULES, notes_of
from asyncrl.views.setting import Setting, setting_of

TEN = range(10)
SETTING = Setting(run="runs/mine", learning_rate=1e-3, reward_weights={"right": 1.0, "short": 0.5})


def noise(step: int) -> float:
    """Returns a small number with mean 0 that changes from step to step."""
    return 0.02 * ((step * 7919) % 5 - 2)


def healthy(step: int, **changed: Any) -> StepRecord:
    """Returns a step of a run whose reward rises while its entropy falls, as in the quickstart."""
    own: dict[str, Any] = {
        "reward_mean": 0.1 + 0.06 * step + noise(step),
        "entropy_nats": 0.95 - 0.07 * min(step, 10) + noise(step),
        "reward_components": {"right": 0.1 + 0.06 * step + noise(step), "short": 0.5 + noise(step + 2)},
        "diagnostics": {"published_bits_ratio": 0.01, "kl_to_behaviour_nats": 0.05} | changed.pop("diagnostics", {}),
    }
    return make_step(step, **(own | changed))


def flat(step: int, **changed: Any) -> StepRecord:
    """Returns a step of a run whose reward does not rise."""
    return healthy(step, **({"reward_mean": 0.3 + noise(step), "entropy_nats": 0.9 + noise(step)} | changed))


def dead(step: int, **changed: Any) -> StepRecord:
    """Returns a step in which all rewards are 0, so that no group has a gradient."""
    nothing = {"reward_mean": 0.0, "reward_min": 0.0, "reward_max": 0.0, "reward_std": 0.0, "grad_norm": 0.0}
    unmoved = {"published_bits_ratio": 0.0} | changed.pop("diagnostics", {})
    parts = {"reward_components": {}}
    return flat(step, **(nothing | {"zero_variance_ratio": 1.0, "diagnostics": unmoved} | parts | changed))


BROKEN: dict[str, tuple[Concern, Callable[[int], StepRecord], Setting]] = {
    "max_completion_tokens too small": (Concern.CUT, lambda step: dead(step, truncated_ratio=0.98), SETTING),
    "data.chat=off, 84 % cut": (
        Concern.CUT,
        lambda step: dead(step, truncated_ratio=0.84),
        Setting(run="runs/mine", chat_off=True),
    ),
    "a reward that finds no answer": (Concern.ZERO_REWARDS, dead, SETTING),
    "a reward of one value": (
        Concern.NO_GRADIENT,
        lambda step: flat(step, zero_variance_ratio=0.97, reward_min=0.3, reward_max=0.31),
        SETTING,
    ),
    "a rate of 1e-20": (
        Concern.UNCHANGED,
        lambda step: flat(step, learning_rate=1e-21 * step, diagnostics={"published_bits_ratio": 0.0}),
        Setting(learning_rate=1e-20),
    ),
    "a rate below the precision of bfloat16": (
        Concern.UNCHANGED,
        lambda step: flat(step, diagnostics={"published_bits_ratio": 1e-4}),
        SETTING,
    ),
    "half of the steps are skipped": (Concern.UNCHANGED, lambda step: flat(step, trained=step % 2 == 0), SETTING),
    "entropy collapses": (
        Concern.ENTROPY,
        lambda step: flat(step, entropy_nats=(0.9 if step < 5 else 0.2) + noise(step)),
        SETTING,
    ),
    "entropy collapses in the first steps": (
        Concern.ENTROPY,
        lambda step: flat(step, entropy_nats=(0.95, 1.29, 0.67, 0.12)[step] if step < 4 else 0.03, reward_mean=0.0),
        SETTING,
    ),
    "entropy explodes": (
        Concern.ENTROPY,
        lambda step: flat(step, entropy_nats=(0.9 if step < 5 else 3.0) + noise(step)),
        SETTING,
    ),
    "length collapses": (
        Concern.LENGTH,
        lambda step: flat(step, completion_tokens_mean=(90.0 if step < 5 else 20.0) + noise(step)),
        SETTING,
    ),
    "length grows": (
        Concern.LENGTH,
        lambda step: flat(step, completion_tokens_mean=(90.0 if step < 5 else 300.0) + noise(step)),
        SETTING,
    ),
    "a bonus for short answers": (
        Concern.COMPONENTS,
        lambda step: healthy(
            step,
            reward_components={"right": 0.4 - 0.03 * step + noise(step), "short": 0.1 + 0.1 * step + noise(step + 1)},
            entropy_nats=(1.22 if step < 5 else 0.31) + noise(step),
            reward_mean=0.45 + noise(step),
        ),
        SETTING,
    ),
    "staleness far too high": (
        Concern.STALE_DATA,
        lambda step: flat(step, ess_ratio=0.23, diagnostics={"kl_to_behaviour_nats": 3.0}),
        SETTING,
    ),
    "a high KL": (
        Concern.HIGH_KL,
        lambda step: flat(step, ess_ratio=0.4, diagnostics={"kl_to_behaviour_nats": 0.6}),
        SETTING,
    ),
    "a wrong tool parser": (
        Concern.NO_TOOL_CALLS,
        lambda step: dead(step, diagnostics={"turns_mean": 1.0, "tool_calls_mean": 0.0}),
        Setting(tools=True, several_turns=True),
    ),
    "an agent that ends early": (
        Concern.ONE_TURN,
        lambda step: flat(step, diagnostics={"turns_mean": 1.0, "tool_calls_mean": 0.0}),
        Setting(several_turns=True),
    ),
}


def notes(
    steps: Sequence[StepRecord], *, setting: Setting = SETTING, evals: Sequence[EvalRecord] = ()
) -> tuple[Note, ...]:
    return notes_of(evidence_of(steps, evals, setting=setting))


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_run_has_the_right_note_first_within_ten_steps(kind: str) -> None:
    concern, make, setting = BROKEN[kind]
    found = notes([make(step) for step in TEN], setting=setting)
    assert [note.concern for note in found] == [concern], "its consequences are folded under it"
    assert found[0].causes
    assert found[0].look.startswith(("asyncrl ", "tail "))
    assert found[0].since_step is not None


@pytest.mark.parametrize("length", range(1, 41))
def test_a_healthy_run_has_no_note_at_any_length(length: int) -> None:
    assert notes([healthy(step) for step in range(length)]) == ()


def test_consequences_are_folded_under_their_cause_in_the_order_of_the_rules() -> None:
    (note,) = notes([dead(step, truncated_ratio=0.9, grad_norm=0.1) for step in TEN])
    assert note.consequences == (
        "All rewards of the last 10 steps are 0",
        "In 100 % of the groups of the last 10 steps all rewards are equal, so there is no gradient",
        "At most 0 % of the published weights have other bits after a step, so the policy does not change",
    )
    assert note.sentence.startswith(
        "90 % of the answers of the last 10 steps are cut at their length limit, since step 0. Likely causes: (1) the "
        "limit is too low for the task: raise generator.max_completion_tokens and model.max_length; (2) "
    )
    assert note.sentence.endswith("so the policy does not change. Look: asyncrl samples runs/mine --worst")


def test_the_chat_template_is_the_first_cause_where_it_is_off() -> None:
    cut = [dead(step, truncated_ratio=0.98) for step in TEN]
    (off,), (on,) = notes(cut, setting=Setting(chat_off=True)), notes(cut)
    assert off.causes[0].endswith("set data.chat=auto")
    assert not any("data.chat=auto" in cause for cause in on.causes)


def test_answers_that_became_long_later_have_another_first_cause() -> None:
    (note,) = notes([healthy(step, truncated_ratio=0.0 if step < 4 else 1.0) for step in range(30)])
    assert note.since_step == 4
    assert note.causes[0].startswith("the answers became longer: penalise long ones (algorithm.overlong=penalise)")


def test_equal_rewards_at_the_highest_one_ask_for_harder_questions() -> None:
    start = [flat(0, reward_min=0.0, reward_max=1.0)]
    right = {"reward_mean": 0.99, "reward_max": 1.0, "reward_min": 0.0, "zero_variance_ratio": 0.98}
    (note,) = notes([*start, *(flat(step, **right) for step in range(1, 30))])
    assert "most are 1, the highest reward that the run has seen" in note.fact
    assert note.causes == (
        "if a reward cannot be higher, there is little left to learn: use harder questions; otherwise use easier ones",
    )
    teach = Setting(equal_rewards_teach=True)
    assert notes([*start, *(flat(step, **right) for step in range(1, 30))], setting=teach) == ()


def test_a_solved_task_has_no_note_though_its_highest_reward_is_0_or_its_entropy_fell() -> None:
    penalty = {"reward_max": 0.0, "zero_variance_ratio": 0.5}
    lost = [flat(step, **penalty, reward_min=-3.0, reward_mean=-3.0) for step in range(5)]
    solved = [flat(step, **penalty, reward_min=0.0, reward_mean=0.0) for step in range(5, 30)]
    assert notes([*lost, *solved]) == ()

    def certain(step: int) -> StepRecord:
        late = step >= 5
        return flat(step, reward_mean=0.99 if late else 0.95, entropy_nats=(0.1 if late else 0.9) + noise(step))

    assert notes([certain(step) for step in range(30)]) == ()


@pytest.mark.parametrize(("now", "found"), [(0.63, []), (0.55, [Concern.LENGTH])])
def test_longer_answers_are_noted_only_if_the_rewards_are_not_clearly_higher(now: float, found: list[Concern]) -> None:
    def step(number: int) -> StepRecord:
        late = number >= 5
        reward = (now if late else 0.55) + noise(number)
        return flat(number, reward_mean=reward, completion_tokens_mean=(587 if not late else 1300) + number % 2)

    longer = notes([step(number) for number in TEN])
    assert [note.concern for note in longer] == found
    assert all("rose from 587 to 1.3k tokens, and" in note.fact for note in longer)


def test_a_schedule_that_ends_near_0_is_no_tiny_rate() -> None:
    assert notes([flat(step, learning_rate=0.0) for step in TEN]) == ()


def test_weights_that_stay_are_no_fault_where_the_rate_is_set_to_0() -> None:
    fixed = [flat(step, learning_rate=0.0, diagnostics={"published_bits_ratio": 0.0}) for step in TEN]
    assert notes(fixed, setting=Setting(learning_rate=0.0)) == ()
    assert [note.concern for note in notes(fixed, setting=Setting(learning_rate=1e-20))] == [Concern.UNCHANGED]
    skipped = [healthy(0, trained=False, learning_rate=0.0) for _ in range(5)]
    assert notes(skipped, setting=Setting(learning_rate=0.0)) != (), "skipped steps have another cause"


def test_one_block_with_less_of_a_component_may_be_chance() -> None:
    def step(number: int, *, fallen: int) -> StepRecord:
        late = number >= fallen
        parts = {"right": (0.2 if late else 0.5) + noise(number), "short": (0.9 if late else 0.5) + noise(number + 1)}
        return flat(number, reward_components=parts)

    assert notes([step(number, fallen=25) for number in range(30)]) == ()
    (note,) = notes([step(number, fallen=20) for number in range(30)])
    assert note.concern is Concern.COMPONENTS
    assert note.causes[0].startswith("if the falling component is what you want: ")
    (early,) = notes([step(number, fallen=5) for number in TEN])
    assert early.concern is Concern.COMPONENTS


def test_float32_is_no_cause_where_it_is_set() -> None:
    coarse = [flat(step, diagnostics={"published_bits_ratio": 1e-4}) for step in TEN]
    skipped = [healthy(0, trained=False) for _ in range(5)]
    for steps in (coarse, skipped):
        known = {dtype: notes(steps, setting=Setting(dtype=dtype))[0] for dtype in (None, "bfloat16", "float32")}
        named = {dtype: any("model.dtype=float32" in cause for cause in note.causes) for dtype, note in known.items()}
        assert named == {None: True, "bfloat16": True, "float32": False}
        assert known["float32"].causes


def test_a_command_has_the_directory_in_quotes_and_the_last_step_if_no_first_one_is_known() -> None:
    (note,) = notes([dead(step) for step in TEN], setting=Setting(run="runs/$(touch x)"))
    assert note.look == "asyncrl samples 'runs/$(touch x)' --worst"

    def long(number: int) -> StepRecord:  # the mean of the last block is high, and its last two steps are not
        tokens = {5: 500.0, 6: 500.0, 7: 450.0, 8: 150.0, 9: 150.0}.get(number, 90.0 + noise(number))
        return flat(number, completion_tokens_mean=tokens)

    (grown,) = notes([long(number) for number in TEN]) or [None]
    assert grown is not None
    assert (grown.since_step, grown.look) == (None, "asyncrl samples runs/mine --step 9")


def test_the_median_of_a_few_kl_divergences_lies_in_their_middle() -> None:
    # the first steps of a run of benchmarks/health_study.py
    values = (0.0, 0.193, 0.38, 0.802, 0.295, 0.326)
    steps = [flat(step, diagnostics={"kl_to_behaviour_nats": value}) for step, value in enumerate(values)]
    assert [[note.concern for note in notes(steps[:number])] for number in (4, 5, 6)] == [[], [], [Concern.HIGH_KL]]


def test_the_fresh_data_of_the_first_step_does_not_hide_that_the_next_steps_are_far_too_old() -> None:
    late = {"ess_ratio": 0.03, "diagnostics": {"kl_to_behaviour_nats": 3.0}}
    (note,) = notes([flat(0), flat(1, **late), flat(2, **late)])
    assert note.concern is Concern.STALE_DATA


def test_answers_that_became_empty_are_noted_although_the_rewards_are_higher() -> None:
    # a run of benchmarks/health_study.py: a bonus for short answers, with twice the weight of right ones
    lengths = (4.82, 3.01, 1.67, 1.01, 1.0, 1.0, 1.0, 1.0)
    rewards = (-1.86, -1.01, -0.34, -0.01, 0.0, 0.0, 0.0, 0.0)

    def step(number: int) -> StepRecord:
        late = number >= len(lengths)
        tokens, reward = (1.0, 0.0) if late else (lengths[number], rewards[number])
        parts = {"right": 0.04 if not number else 0.0, "short": reward / 2}
        return flat(
            number, completion_tokens_mean=tokens, reward_mean=reward, reward_max=0.0, reward_min=reward - 0.1,
            reward_components=parts, entropy_nats=0.9 if number < 2 else 0.01,
        )  # fmt: skip

    assert notes([step(number) for number in range(7)]) == ()
    (note,) = notes([step(number) for number in range(8)])
    assert (note.concern, note.since_step, note.number) == (Concern.LENGTH, 3, pytest.approx(1.002))
    assert note.causes[0].startswith("the reward pays for something else than right answers")
    (later,) = notes([step(number) for number in range(40)])
    assert later.concern is Concern.LENGTH
    one_token = [flat(number, completion_tokens_mean=1.0) for number in range(20)]
    assert notes(one_token) == (), "the answers were never longer"


def test_hidden_tags_are_named_where_rewards_do_not_see_them() -> None:
    (note,) = notes([dead(step) for step in TEN], setting=Setting(hidden_tags=("<think>", "[A]")))
    assert note.causes[0].startswith("if the reward looks for <think> or [A]: the text that it gets never has them")


def test_a_component_without_a_weight_does_not_count_and_a_negative_one_is_turned_round() -> None:
    def step(number: int) -> StepRecord:
        parts = {"right": 0.1 + 0.03 * number + noise(number), "words": 0.5 - 0.03 * number + noise(number)}
        return healthy(number, reward_components=parts)

    steps = [step(number) for number in TEN]
    found = [notes(steps, setting=Setting(reward_weights={"words": weight})) for weight in (1.0, 0.0, -1.0)]
    assert [[note.concern for note in each] for each in found] == [[Concern.COMPONENTS], [], []]


def evaluated(*rewards: float, error: float = 0.02) -> list[EvalRecord]:
    return [
        EvalRecord(version=4 * place, wall_s=1, prompts=100, reward_mean=reward, reward_stderr=error)
        for place, reward in enumerate(rewards)
    ]


def test_a_held_out_reward_that_falls_while_the_training_reward_rises_is_noted_at_the_third_evaluation() -> None:
    steps = [healthy(step) for step in range(20)]
    (note,) = notes(steps, evals=evaluated(0.4, 0.35, 0.3))
    assert (note.concern, note.number, note.since_step) == (Concern.HELDOUT, 0.3, 0)
    assert notes(steps, evals=evaluated(0.4, 0.3)) == (), "two evaluations show no trend"
    assert notes(steps, evals=evaluated(0.4, 0.3, 0.35)) == ()
    assert notes(steps, evals=evaluated(0.4, 0.35, 0.3, error=0.1)) == (), "the difference may be chance"
    assert notes([flat(step) for step in range(20)], evals=evaluated(0.4, 0.35, 0.3)) == ()
    # a run of benchmarks/health_study.py with wrong answers: the reward is near 0 and falls no further
    (low,) = notes(steps, evals=evaluated(0.56, 0.08, 0.06, 0.08, error=0.05))
    assert low.fact == "The held-out reward falls (0.56 → 0.08) while the training reward rises"
    assert notes(steps, evals=evaluated(0.4, 0.3, 0.32, error=0.03)) == (), "the difference may be chance"


def test_a_start_with_a_few_wrong_answers_has_no_note() -> None:
    first = [dead(step, trained_samples=64) for step in range(3)]
    assert notes(first) == ()
    assert [note.concern for note in notes([dead(step) for step in range(3)])] == [Concern.ZERO_REWARDS]


def test_steps_without_a_gradient_or_with_a_low_rate_by_the_schedule_do_not_show_unchanged_weights() -> None:
    unmoved = {"published_bits_ratio": 0.0}
    assert notes([flat(step, grad_norm=0.0, diagnostics=unmoved) for step in TEN]) == ()
    assert notes([flat(step, learning_rate=4e-4, diagnostics=unmoved) for step in TEN]) == ()


def test_the_step_since_which_something_holds_forgives_one_step() -> None:
    held = [False, True, True, False, True, True]
    steps = [make_step(number) for number in range(len(held))]
    assert since(steps, lambda record: held[record.step]) == 1
    assert since(steps, lambda record: record.step in (1, 4, 5)) == 4
    assert since(steps, lambda record: None if record.step == 3 else record.step > 1) == 2
    assert since(steps, lambda record: False) is None


def test_every_fault_has_one_rule_in_the_order_of_urgency_and_follows_from_rules_only() -> None:
    assert [rule.concern for rule in RULES] == [concern for concern in Concern if concern is not Concern.BOTTLENECK]
    for rule in RULES:
        assert rule.concern not in rule.follows_from
        assert all(limit.reason for limit in rule.limits)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.concern.value)
def test_every_cause_names_settings_and_every_command_exists(rule: Any) -> None:
    for cause in rule.causes:
        for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", cause.text):
            assert section == "task" or section == "surrogate" or key in type(getattr(Config(), section)).model_fields
    assert rule.look.format(run="R", step=1).split()[:2] in (
        ["asyncrl", "samples"],
        ["asyncrl", "report"],
        ["tail", "-n"],
    )


def test_the_page_shows_all_rules_and_is_up_to_date() -> None:
    page = health_docs.PATH.read_text()
    assert page == health_docs.markdown()
    for rule in RULES:
        assert f"| `{rule.concern.value}` | {rule.shows} |" in page


def test_a_setting_knows_tools_turns_and_weights() -> None:
    config = Config.model_validate(
        {
            "environment": {
                "name": "calculator",
            },
            "data": {"dataset": "environment", "chat": "off"},
        }
    )
    known = setting_of(config, cores=None)
    assert (known.tools, known.several_turns, known.chat_off, known.run) == (True, True, True, "runs/quickstart")
    plain = setting_of(Config(), cores=None)
    assert plain.dtype == "float32"
    assert (plain.tools, plain.several_turns, plain.chat_off) == (False, False, False)
    rewards = [RewardTerm(name="right", fn="exact_match", weight=2.0)]
    weighted = config.model_copy(update={"environment": config.environment.model_copy(update={"rewards": rewards})})
    assert setting_of(weighted, cores=None).reward_weights == {"right": 2.0}


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({"agent": "my_agent:play"}, False),
        ({"agent": "my_agent:play", "tools": ["my_tools:add"]}, False),
        ({"name": "verifiers"}, False),
        ({"name": "openenv"}, False),
        ({"name": "calculator", "max_turns": 1}, False),
        ({"name": "calculator"}, True),
        ({"tools": ["my_tools:add"]}, True),
    ],
)
def test_only_tools_and_built_in_environments_are_made_for_several_turns(
    environment: dict[str, Any], several: bool
) -> None:
    config = Config()
    section = config.environment.model_copy(update=environment)
    assert setting_of(config.model_copy(update={"environment": section}), cores=None).several_turns is several


def test_a_setting_has_the_weights_of_the_rewards_of_all_parts_of_a_mixture() -> None:
    def part(name: str, weight: float) -> dict[str, Any]:
        term = {"name": name, "fn": "exact_match", "weight": weight}
        return {"name": name, "data": {"dataset": f"{name}.jsonl"}, "environment": {"rewards": [term]}}

    config = Config.model_validate({"data": {"mixture": [part("sums", -2.0), part("words", 0.5)]}})
    assert setting_of(config, cores=None).reward_weights == {"sums": -2.0, "words": 0.5}


def test_doctests() -> None:
    for module in (evidence, health_finds, records_module):
        assert doctest.testmod(module).failed == 0


def failed(failures: dict[str, int], **groups: float) -> Sequence[Note]:
    return notes_of(evidence_of([healthy(0)], setting=SETTING, groups=groups, failures=failures))


def test_failed_groups_are_noted_with_their_reasons() -> None:
    of_reward = {"reward_raised": 20}
    (note,) = failed(of_reward, trained=24, failed=23, reserved=400)
    assert note.fact == "49 % of the groups failed and were not trained (reward_raised 20)"
    assert note.causes == ("fix the reward (environment.reward)",)
    assert failed(of_reward, trained=95, failed=5) == ()
    for failures in ({}, of_reward | {"infra": 3}):
        (other,) = failed(failures, trained=80, failed=20)
        assert other.causes == ("fix the cause",)


def test_rewards_that_fail_for_many_samples_of_trained_groups_are_noted_too() -> None:
    (note,) = notes([healthy(step, diagnostics={"failed_samples_ratio": step / 9}) for step in range(4)])
    assert note.fact.startswith("The reward failed for 17 % of the trained groups' samples, which are left out")
    assert note.causes == ("fix the reward (environment.reward)",)
    assert notes([healthy(step, diagnostics={"failed_samples_ratio": 0.05}) for step in range(4)]) == ()


@pytest.mark.parametrize(
    ("numbers", "concern", "length"),
    [({"witness_gradient_ratio": 1.5}, Concern.NOT_VERIFIED, 40), ({"parity_ratio": 6.0}, Concern.PARITY, 22)],
)
def test_a_wrong_update_is_noted_for_the_rest_of_the_run_and_a_wrong_log_prob_for_20_steps(
    numbers: dict[str, float], concern: Concern, length: int
) -> None:
    steps = [healthy(step, diagnostics=numbers if step == 2 else {}) for step in range(40)]
    (note,) = notes(steps[:length])
    assert (note.concern, note.number, note.since_step) == (concern, next(iter(numbers.values())), 2)
    assert len(notes(steps)) == (concern is Concern.NOT_VERIFIED)
    accepted = [healthy(step, diagnostics=dict.fromkeys(numbers, 1.0)) for step in range(4)]
    assert notes(accepted) == ()


def test_a_run_that_skipped_every_step_trained_nothing() -> None:
    (note,) = notes([healthy(0, trained=False) for _ in range(5)])
    assert note.concern is Concern.NOTHING_TRAINED
    assert "every step was skipped" in note.fact


@pytest.mark.parametrize(
    ("lowest", "highest", "now", "found"),
    [
        (0.0, 1.1, 0.1, None),  # right format, wrong answers
        (0.0, 1.1, 1.08, 1.1),
        (0.0, 1.0, 0.95, 1.0),
        (0.0, 1.0, 0.0, None),
        (-1.0, 0.0, -0.05, 0.0),
        (-3.0, -1.0, -3.0, None),
        (0.1, 0.1, 0.1, None),  # the run has seen one reward only
        (None, None, None, None),
    ],
)
def test_rewards_are_the_highest_if_their_mean_is_near_the_highest_of_the_run(
    lowest: float | None, highest: float | None, now: float | None, found: float | None
) -> None:
    first = make_step(0, reward_min=lowest, reward_max=highest, reward_mean=lowest)
    last = [make_step(step, reward_min=now, reward_max=now, reward_mean=now) for step in range(1, 21)]
    assert evidence_of([first, *last], setting=SETTING).at_highest_reward == found
