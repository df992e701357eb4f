"""Time limits that the user has not set follow the size of the model."""

import doctest

import pytest

from asyncrl.config import timeouts
from asyncrl.config.schema import Config
from asyncrl.config.timeouts import LONGEST_LOAD, derived_timeouts, with_timeouts

SEVENTY_BILLION, SEVEN_BILLION = 70_000_000_000, 7_000_000_000
LORA = {"rank": 8, "alpha": 16}


def test_the_example_in_the_docstring_is_true() -> None:
    assert doctest.testmod(timeouts).failed == 0


def derived(parameters: int | None, **sections: object) -> dict[str, float]:
    return derived_timeouts(Config.model_validate({"model": {"dtype": "bfloat16"}} | sections), parameters=parameters)


@pytest.mark.parametrize("parameters", [None, 1_000_000, SEVEN_BILLION])
def test_small_models_and_models_of_unknown_size_keep_the_defaults(parameters: int | None) -> None:
    assert derived(parameters) == {}


def test_a_large_model_has_the_time_to_be_read_and_sent() -> None:
    """70 billion parameters in bfloat16 are 140 GB: 700 s from a cold disk, and 560 s through the network."""
    found = derived(SEVENTY_BILLION, run={"stall_timeout_s": 3600.0})
    assert found == {
        "generator.startup_timeout_s": 880.0,
        "generator.replace_timeout_s": 880.0,
        "learner.startup_timeout_s": 880.0,
        "weights.load_timeout_s": 560.0,
    }
    assert derived(SEVENTY_BILLION // 2, model={"dtype": "float32"}, run={"stall_timeout_s": 3600.0}) == found


def test_a_number_of_the_user_wins_also_if_it_is_the_default() -> None:
    found = derived(SEVENTY_BILLION, generator={"startup_timeout_s": 300.0}, weights={"load_timeout_s": 5.0})
    assert found.keys() == {"generator.replace_timeout_s", "learner.startup_timeout_s"}


def test_the_limit_of_a_load_stays_below_the_time_after_which_the_run_counts_as_stalled() -> None:
    assert derived(SEVENTY_BILLION)["weights.load_timeout_s"] == LONGEST_LOAD * 300.0


def test_an_adapter_is_sent_in_the_default_time_but_its_model_is_read_like_any_other() -> None:
    found = derived(SEVENTY_BILLION, model={"dtype": "bfloat16", "lora": LORA})
    assert "weights.load_timeout_s" not in found
    assert found["generator.startup_timeout_s"] == 880.0


def test_the_configuration_gets_the_numbers_and_nothing_else_changes() -> None:
    config = Config.model_validate({"generator": {"replicas": 3}})
    found = with_timeouts(config, {"generator.startup_timeout_s": 440.0, "weights.load_timeout_s": 128.0})
    assert (found.generator.startup_timeout_s, found.weights.load_timeout_s) == (440.0, 128.0)
    assert found.generator.replicas == 3
    assert with_timeouts(found, {"generator.startup_timeout_s": 300.0, "weights.load_timeout_s": 60.0}) == config
