"""Keys of other libraries are answered with ours, wherever they are written."""

import pytest

from asyncrl.config.aliases import ALIASES, NOT_SUPPORTED, REMARKS
from asyncrl.config.load import flat_config, load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

FIELDS = {*flat_config(Config()), "algorithm.overrides"}


def refusal(override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([], [override])
    return str(caught.value)


def test_every_answer_is_a_key_of_the_schema() -> None:
    assert set(ALIASES) <= FIELDS
    assert set(REMARKS) <= set(ALIASES)


def test_no_key_of_ours_is_answered_with_another() -> None:
    names = {name for names in ALIASES.values() for name in names} | set(NOT_SUPPORTED)
    assert not names & {part for key in FIELDS for part in key.split(".")}


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("lr=1e-5", "lr is learner.optimizer.learning_rate here"),
        ("learner.optimizer.lr=1e-5", "lr is learner.optimizer.learning_rate here"),
        ("trainer.optim.lr=1e-5", "lr is learner.optimizer.learning_rate here"),
        ("data.train_batch_size=8", "train_batch_size is learner.groups_per_step here (prompts a step; "),
        ("batch_size=8", "batch_size is learner.groups_per_step here"),
        ("num_generations=8", "num_generations is learner.group_size here"),
        ("actor.rollout_n=8", "rollout_n is learner.group_size here"),
        ("generator.n=8", "n is learner.group_size here"),
        ("max_new_tokens=8", "max_new_tokens is generator.max_completion_tokens here"),
        ("generator.max_tokens=8", "max_tokens is generator.max_completion_tokens here"),
        ("algorithm.beta=0.1", "beta is algorithm.overrides here (an objective's penalty, e.g. `algorithm.overrides: "),
        ("kl_coef=0.1", "kl_coef is algorithm.overrides here"),
        ("learner.epochs=3", "did you mean data.epochs?"),
        ("max_steps=3", "max_steps is learner.total_steps here"),
        ("num_gpus=2", "num_gpus is generator.gpus or learner.gpus here"),
        ("learner.num_gpus=2", "num_gpus is learner.gpus here"),
        ("model.model_name_or_path=gpt2", "model_name_or_path is model.path here"),
        ("learner.lora.rank=8", "LoRA is not supported yet"),
        ("peft={lora_rank: 8}", "LoRA is not supported yet"),
        ("trainer={lr: 1e-5, max_steps: 3}", "lr is learner.optimizer.learning_rate here; max_steps is learner.total"),
    ],
)
def test_a_key_of_another_library_is_answered_with_ours(override: str, answer: str) -> None:
    assert f"(on the command line): {answer}" in refusal(override)


def test_the_example_of_a_penalty_is_one() -> None:
    example = REMARKS["algorithm.overrides"].partition("`")[2].rpartition("`")[0].removeprefix("algorithm.overrides: ")
    assert load_config([], [f"algorithm.overrides={example}"]).algorithm.overrides["penalties"]
