"""The numbers of the shipped configurations fit together: GPUs add up, and the staleness limit admits all slots."""

from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.row_bytes import worst_case_group_bytes
from asyncrl.config.rules import check_config
from asyncrl.config.schema import Config
from asyncrl.environments.interfaces import build_reward

CONFIGS = Path(__file__).parents[2] / "configs"
GPUS = {
    "quickstart": (0, 0), "ppo": (0, 0), "one_gpu": (0.5, 0.5),
    "eight_gpus": (6, 2), "two_nodes": (8, 8), "chat": (1, 1), "tiny_chat": (0, 0), "lora": (0, 0),
    "judge": (1, 1), "smollm": (0, 0), "smollm_gpu": (0.5, 0.5),
}  # fmt: skip
"""GPUs of the generators and of the learner."""


def recipe(name: str) -> Config:
    return load_config([CONFIGS / f"{name}.yaml"], [])


@pytest.mark.parametrize("name", GPUS)
def test_the_gpus_of_both_pools_add_up(name: str) -> None:
    config = recipe(name)
    generators, learner = config.generator.replicas * config.generator.gpus, config.learner.ranks * config.learner.gpus
    assert (generators, learner) == GPUS[name]


@pytest.mark.parametrize("name", GPUS)
def test_every_slot_can_be_filled_while_a_step_is_trained(name: str) -> None:
    """At most (η + 1) · B slots exist, and the step that is being trained holds B of them."""
    config = recipe(name)
    in_flight = config.generator.replicas * config.generator.max_concurrent_groups
    step = config.learner.groups_per_step
    assert in_flight + step <= (config.staleness.max_versions + 1) * step


@pytest.mark.parametrize("name", GPUS)
def test_the_buffer_holds_all_that_the_staleness_limit_admits(name: str) -> None:
    config = recipe(name)
    groups = (config.staleness.max_versions + 1) * config.learner.groups_per_step
    assert groups * worst_case_group_bytes(config) <= config.buffer.capacity_bytes
    assert check_config(config) == []


@pytest.mark.parametrize("name", ["one_gpu", "eight_gpus", "two_nodes"])
def test_a_base_model_gets_its_prompt_as_text_though_its_tokenizer_has_a_chat_template(name: str) -> None:
    config = recipe(name)
    assert "Instruct" not in config.model.path
    assert config.data.chat == "off"


@pytest.mark.parametrize("name", ["one_gpu", "eight_gpus", "two_nodes"])
def test_weights_and_optimizer_leave_room_on_their_gpus(name: str) -> None:
    """The ranks together take 16 bytes for each weight, and an engine 2, on GPUs of 24 GiB (one_gpu) or 80 GiB. With
    several ranks, each one also adds up the gradients of all weights in float32."""
    config = recipe(name)
    size = config.model.path.rpartition("-")[2]
    weights, memory = float(size.removesuffix("B")) * 1e9, (24 if name == "one_gpu" else 80) * 2**30
    shares = 1.0 - config.generator.gpu_memory_utilization if name == "one_gpu" else 1.0
    whole_gradients = config.learner.ranks > 1 and config.learner.gradient_sync == "update"
    learner = 16 * weights / config.learner.ranks + 4 * weights * whole_gradients
    assert learner < 0.7 * shares * memory
    engine = config.generator.gpu_memory_utilization * memory
    assert 2 * weights / config.generator.tensor_parallel_size < 0.5 * engine


def test_the_adapter_is_trained_on_the_model_and_the_task_of_the_quickstart() -> None:
    """Their runs can be compared, and they share the model's directory without building it again."""
    lora, quickstart = recipe("lora"), recipe("quickstart")
    assert lora.model.model_copy(update={"lora": None}) == quickstart.model
    assert (lora.data, lora.environment, lora.generator) == (
        quickstart.data,
        quickstart.environment,
        quickstart.generator,
    )


def test_the_judge_can_judge_a_step_while_the_next_one_is_trained() -> None:
    """Its rewards are built as a scoring process builds them, and the names of its variables are listed."""
    config = recipe("judge")
    [judge, _] = config.environment.rewards
    asks = config.environment.score_workers * judge.options["most_per_s"]
    assert config.learner.groups_per_step * config.learner.group_size / asks < 10, "seconds for the answers of a step"
    assert {judge.options["url_variable"], judge.options["key_variable"]} == set(config.environment.secrets)
    assert config.environment.score_timeout_s * 2 < config.generator.rollout_timeout_s, (
        "a late answer is asked for again"
    )
    build_reward(config.environment)
