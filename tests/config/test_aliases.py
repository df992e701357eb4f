"""The error for a key of another library suggests the key of asyncrl, in whichever section the key is written."""

import pytest

from asyncrl.config.load import ALIASES, NOT_SUPPORTED, REMARKS, flat_config, load_config
from asyncrl.errors import ConfigError

FIELDS = {*flat_config(load_config([], ["model.lora={}"])), "algorithm.overrides"}


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
        ("lr=1e-5", "use learner.optimizer.learning_rate instead of lr"),
        ("learner.optimizer.lr=1e-5", "use learner.optimizer.learning_rate instead of lr"),
        ("trainer.optim.lr=1e-5", "use learner.optimizer.learning_rate instead of lr"),
        ("data.train_batch_size=8", "use learner.groups_per_step instead of train_batch_size (the number of prompts "),
        ("batch_size=8", "use learner.groups_per_step instead of batch_size"),
        ("num_generations=8", "use learner.group_size instead of num_generations"),
        ("actor.rollout_n=8", "use learner.group_size instead of rollout_n"),
        ("generator.n=8", "use learner.group_size instead of n"),
        ("max_new_tokens=8", "use generator.max_completion_tokens instead of max_new_tokens"),
        ("generator.max_tokens=8", "use generator.max_completion_tokens instead of max_tokens"),
        (
            "algorithm.beta=0.1",
            "use algorithm.overrides instead of beta (a penalty is part of the objective, e.g. `alg",
        ),
        ("kl_coef=0.1", "use algorithm.overrides instead of kl_coef"),
        ("learner.epochs=3", "did you mean data.epochs?"),
        ("max_steps=3", "use learner.total_steps instead of max_steps"),
        ("num_gpus=2", "use generator.gpus or learner.gpus instead of num_gpus"),
        ("learner.num_gpus=2", "use learner.gpus instead of num_gpus"),
        ("model.model_name_or_path=gpt2", "use model.path instead of model_name_or_path"),
        ("learner.lora_rank=8", "use model.lora.rank instead of lora_rank"),
        ("peft={lora_rank: 8}", "use the section model.lora"),
        ("model.qlora=true", "weights are not quantized"),
        (
            "trainer={lr: 1e-5, max_steps: 3}",
            "use learner.optimizer.learning_rate instead of lr; use learner.total_ste",
        ),
    ],
)
def test_a_key_of_another_library_is_answered_with_ours(override: str, answer: str) -> None:
    assert f"(on the command line): {answer}" in refusal(override)


def test_the_example_of_a_penalty_is_one() -> None:
    example = REMARKS["algorithm.overrides"].partition("`")[2].rpartition("`")[0].removeprefix("algorithm.overrides: ")
    assert load_config([], [f"algorithm.overrides={example}"]).algorithm.overrides["penalties"]
