"""A held-out set names what differs from the run, and has the run's other keys."""

import pytest

from asyncrl.config.load import dump_config, load_config
from asyncrl.config.parts import eval_configs
from asyncrl.config.schema import Config, HeldoutSet
from asyncrl.errors import ConfigError

RUN = [
    "data={dataset: hf, path: org/sums, split: train, columns: {prompt: q}, prompt_template: 'Q: {question}', "
    "system_prompt: Be brief}",
    "environment={name: math, options: {a: 1}, reward: exact_match, score_workers: 3}",
]


def of_set(text: str) -> Config:
    """Returns the configuration with which the set `eval.sets.hard` is read and scored."""
    return eval_configs(load_config([], [*RUN, f"eval.sets.hard={text}"]))["eval/hard"]


def test_a_set_has_the_keys_of_the_run_that_it_does_not_set() -> None:
    config = of_set("{data: {split: test}, environment: {score_workers: 1}}")
    data, environment = config.data, config.environment
    assert (data.dataset, str(data.path), data.split, data.columns) == ("hf", "org/sums", "test", {"prompt": "q"})
    assert (data.prompt_template, data.system_prompt) == ("Q: {question}", "Be brief")
    assert (environment.name, environment.options, environment.reward) == ("math", {"a": 1}, "exact_match")
    assert environment.score_workers == 1


def test_another_dataset_begins_without_the_source_of_the_run_and_has_its_prompts() -> None:
    data = of_set("{data: {dataset: jsonl, path: hard.jsonl}}").data
    assert (str(data.path), data.split, data.columns) == ("hard.jsonl", "train", {})
    assert (data.prompt_template, data.system_prompt) == ("Q: {question}", "Be brief")


def test_another_environment_begins_without_the_options_and_the_rewards_of_the_run() -> None:
    environment = of_set("{environment: {name: reasoning_gym}}").environment
    assert (environment.options, environment.reward, environment.score_workers) == ({}, None, 3)
    several = of_set("{environment: {rewards: [{name: short, fn: length}]}}").environment
    assert (several.name, several.reward, len(several.rewards)) == ("math", None, 1)


def test_a_set_is_evaluated_with_the_numbers_of_the_run_unless_it_has_its_own() -> None:
    sets = "{hard: {data: {split: test}, samples: 4, pass_reward: 0.0}, own: {environment: {reward: math_verify}}}"
    evals = load_config([], [*RUN, "eval.prompts=16", "eval.temperature=0.5", f"eval.sets={sets}"]).eval.each_set()
    assert evals == {
        "heldout": HeldoutSet(16, 1, 0.5, 1.0),
        "hard": HeldoutSet(16, 4, 0.5, 0.0),
        "own": HeldoutSet(16, 1, 0.5, 1.0),
    }


def test_a_dumped_configuration_has_whole_sets_and_is_read_back_as_it_was() -> None:
    config = load_config([], [*RUN, "eval.sets.hard={data: {split: test}, environment: {reward: math_verify}}"])
    import yaml

    again = load_config([yaml.safe_load(dump_config(config)), {"data": {"system_prompt": "Be long"}}])
    assert eval_configs(again)["eval/hard"].data.system_prompt == "Be brief", "the set is complete in the file"
    assert load_config([yaml.safe_load(dump_config(config))]) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "{promts: 3}",
            "unknown key eval.sets.hard.promts (on the command line): did you mean eval.sets.hard.prompts?",
        ),
        ("{data: {datset: hf}}", "did you mean eval.sets.hard.data.dataset?"),
        (
            "{data: {epochs: 3}}",
            "unknown key eval.sets.hard.data.epochs (on the command line): did you mean data.epochs?",
        ),
        ("{environment: {rewards: [{nam: a, fn: length}]}}", "did you mean eval.sets.hard.environment.rewards.0.name?"),
        ("{samples: true}", "eval.sets.hard.samples = true (on the command line): must be a whole number"),
        ("{data: 3}", "eval.sets.hard.data = 3 (on the command line): must be a section"),
        ("3", "eval.sets.hard = 3 (on the command line): must be a section"),
    ],
)
def test_a_wrong_key_of_a_set_is_named_with_the_right_one(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [*RUN, f"eval.sets.hard={text}"])
    assert words in str(caught.value)
