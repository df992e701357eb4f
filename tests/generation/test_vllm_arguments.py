"""An engine starts with the arguments that follow from the configuration, and then with those of the user."""

import pytest

from asyncrl.config.checks import check_config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.generation.vllm_arguments import engine_arguments

ON_CPUS: list[str] = []
ON_GPUS = ["generator.gpus=1", "learner.gpus=1", "model.dtype=bfloat16", "generator.top_k=8"]
MAY_BE_REPLACED = {"max_num_batched_tokens"}


def arguments(*overrides: str) -> dict[str, object]:
    config = load_config([], overrides)
    return engine_arguments(config, model_path="m", name="a", load_weights=True, sleep_mode=False)


@pytest.mark.parametrize("place", [ON_CPUS, ON_GPUS], ids=["CPUs", "GPUs"])
def test_the_users_arguments_are_added(place: list[str]) -> None:
    own = "generator.engine_args={max_num_batched_tokens: 9999, block_size: 16}"
    assert arguments(*place, own) == arguments(*place) | {"max_num_batched_tokens": 9999, "block_size": 16}


def test_an_engine_has_room_for_adapters_only_if_the_model_has_one() -> None:
    assert not {"enable_lora", "max_loras"} & arguments().keys()


def test_vllm_may_return_the_log_probs_of_a_support() -> None:
    assert arguments("generator.top_k=50") == arguments() | {"max_logprobs": 50}


@pytest.mark.parametrize("place", [ON_CPUS, ON_GPUS], ids=["CPUs", "GPUs"])
def test_what_asyncrl_sets_cannot_be_replaced(place: list[str]) -> None:
    for name in arguments(*place).keys() - MAY_BE_REPLACED:
        with pytest.raises(ConfigError, match=f"generator.engine_args.{name}: "):
            check_config(load_config([], [*place, f"generator.engine_args={{{name}: 1}}"]))
