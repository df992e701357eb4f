"""The imports of an engine's processes: without garbage collection, and without this process's main module."""

import gc
import os
import subprocess
import sys
from multiprocessing.spawn import get_preparation_data

import pytest

from asyncrl.common.imports import uncollected
from asyncrl.generation.engine_start import children_begin_with


def first_module() -> object:
    """Returns the module with which a process that `multiprocessing` spawns would begin."""
    return get_preparation_data("child").get("init_main_from_name")


def test_a_child_begins_with_the_given_module_in_the_block_only() -> None:
    before = first_module()
    with children_begin_with("asyncrl.generation.engine_main"):
        assert first_module() == "asyncrl.generation.engine_main" != before
    assert first_module() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_in_the_block_and_afterwards_all_is_as_before(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.mark.slow
def test_an_engine_gets_its_name_if_ray_changes_the_first_variable_of_the_environment() -> None:
    named = "import os, asyncrl.generation.engine_main; os.environ['RAY_CLIENT_MODE'] = '0'"
    script = f"{named}; from vllm.utils.system_utils import set_process_title; set_process_title('EngineCore')"
    shown = subprocess.run(
        [sys.executable, "-c", f"{script}; print(open('/proc/self/comm').read())"],
        env={"RAY_CLIENT_MODE": "0"} | os.environ, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert "VLLM::EngineCo" in shown.stdout
