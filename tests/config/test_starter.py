"""The configuration that `asyncrl init` writes can run unchanged, for any model and data."""

import dataclasses
from typing import Any

import pytest

from asyncrl.config.load import parse_yaml
from asyncrl.config.rules import check_config
from asyncrl.config.schema import Config
from asyncrl.config.starter import Facts, GpuNumbers, starter_yaml
from asyncrl.errors import ConfigError

FACTS = Facts(
    name="sums",
    model="models/my-llama",
    data={"dataset": "jsonl", "path": "sums.jsonl"},
    reward="exact_match",
    prompts=1000,
    longest_prompt=41,
    longest_answer=5,
    completion_tokens=None,
    longest_model=4096,
    parameters=1_000_000,
    gpus=0,
)


def config_of(**changes: Any) -> Config:
    written = starter_yaml(dataclasses.replace(FACTS, **changes))
    return Config.model_validate(parse_yaml(written, source="run.yaml"))


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
@pytest.mark.parametrize("longest_prompt", [1, 41, 4000])
@pytest.mark.parametrize("completion_tokens", [None, 1, 2048])
def test_it_can_run_as_it_is_and_nobody_needs_to_be_warned(
    gpus: int, longest_prompt: int, completion_tokens: int | None
) -> None:
    config = config_of(
        gpus=gpus, longest_prompt=longest_prompt, completion_tokens=completion_tokens, longest_model=8192
    )
    assert check_config(config) == []
    assert config.learner.batching == "packed"
    assert config.data.max_prompt_tokens >= longest_prompt
    assert config.model.max_length == config.data.max_prompt_tokens + config.generator.max_completion_tokens
    if completion_tokens is not None:
        assert config.generator.max_completion_tokens == completion_tokens


def test_completions_have_room_for_four_times_the_longest_answer() -> None:
    assert config_of(longest_answer=50).generator.max_completion_tokens == 200
    assert config_of(longest_answer=1).generator.max_completion_tokens == 16


def test_completions_give_way_to_prompts_where_the_model_is_short() -> None:
    config = config_of(longest_prompt=41, longest_answer=50, longest_model=100)
    assert (config.data.max_prompt_tokens, config.generator.max_completion_tokens) == (41, 59)
    assert config.model.max_length == 100


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"longest_prompt": 90, "longest_answer": 12, "longest_model": 100}, "set --completion-tokens to at most 10"),
        ({"completion_tokens": 80, "longest_model": 100}, "set --completion-tokens to at most 59"),
        ({"longest_prompt": 100, "longest_model": 100}, "shorten the prompts"),
    ],
)
def test_what_cannot_fit_the_model_is_refused_with_what_would(changes: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        config_of(**changes)


def test_on_gpus_the_pools_share_one_or_have_their_own() -> None:
    one, three = config_of(gpus=1), config_of(gpus=3)
    assert (one.generator.gpus, one.learner.gpus, one.staleness.max_versions) == (0.5, 0.5, 1)
    assert one.generator.gpu_memory_utilization < 0.5
    assert (three.generator.gpus, three.generator.replicas, three.learner.gpus) == (1, 2, 1)
    assert three.model.dtype == "bfloat16"


def test_numbers_for_the_card_are_written_with_what_a_rank_needs() -> None:
    numbers = GpuNumbers(
        ranks=2, gradient_sync="micro_batch", activation_checkpointing=True, micro_batch_tokens=8192, learner_gib=61.4,
        fits=True,
    )  # fmt: skip
    config = config_of(gpus=8, gpu_gib=79.6, numbers=numbers)
    learner = config.learner
    assert (learner.ranks, learner.gradient_sync, learner.activation_checkpointing) == (2, "micro_batch", True)
    assert (learner.micro_batch_tokens, config.generator.replicas) == (8192, 6)
    assert check_config(config) == []
    facts = dataclasses.replace(FACTS, gpus=8, gpu_gib=79.6, numbers=numbers)
    assert "a rank needs about 61 GiB of a GPU of 80 GiB.\n" in starter_yaml(facts)
    too_large = dataclasses.replace(facts, numbers=dataclasses.replace(numbers, fits=False))
    assert "of a GPU of 80 GiB, which is too much." in starter_yaml(too_large)


def test_the_object_store_holds_three_versions_of_the_weights() -> None:
    config = config_of(parameters=500_000_000, gpus=2)
    assert config.ray.object_store_mb * 2**20 >= 3 * 500_000_000 * 2
    assert config_of(parameters=None).ray.object_store_mb == Config().ray.object_store_mb


@pytest.mark.parametrize("model", ["models/it's: a # model", "null", "1e5"])
def test_names_that_yaml_would_read_as_something_else_are_quoted(model: str) -> None:
    assert config_of(model=model).model.path == model


def test_columns_are_written_as_they_are() -> None:
    columns = {"prompt": "a: question, or {so}", "answer": None}
    data = {"dataset": "hf", "path": "my file.csv", "split": "train[:10]", "columns": columns}
    config = config_of(data=data)
    assert (config.data.columns, config.data.split, str(config.data.path)) == (columns, "train[:10]", "my file.csv")


def test_only_a_small_model_gets_a_large_learning_rate_which_falls() -> None:
    optimizers = [config_of(parameters=size).learner.optimizer for size in (500_000, 500_000_000, None)]
    assert [optimizer.learning_rate for optimizer in optimizers] == [5e-4, 1e-5, 1e-5]
    assert [optimizer.schedule for optimizer in optimizers] == ["linear", "constant", "constant"]


def test_a_dataset_of_a_module_has_no_path() -> None:
    config = config_of(data={"dataset": "tasks:questions"})
    assert (config.data.dataset, config.data.path) == ("tasks:questions", None)
