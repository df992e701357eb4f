"""The imports of an engine's processes: without garbage collection, the compiler, and this process's main module."""

import gc
import importlib
import os
import subprocess
import sys
from multiprocessing.spawn import get_preparation_data

import pytest

from asyncrl.common.imports import uncollected, without_compiler
from asyncrl.config.schema import Config
from asyncrl.generation.engine_start import children_begin_with
from asyncrl.generation.vllm_arguments import engine_environment


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


LOWERING = "torch._inductor.lowering"


@pytest.mark.parametrize("off", ["1", "0"])
def test_the_compiler_is_missing_in_the_block_only_and_only_if_it_is_off(
    off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", off)
    monkeypatch.delitem(sys.modules, LOWERING, raising=False)
    with without_compiler():
        assert (LOWERING in sys.modules) == (off == "1")
        if off == "1":
            with pytest.raises(ImportError, match=LOWERING):
                importlib.import_module(LOWERING)
    assert LOWERING not in sys.modules


def test_a_compiler_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setitem(sys.modules, LOWERING, sys)
    with without_compiler():
        assert sys.modules[LOWERING] is sys
    assert sys.modules[LOWERING] is sys


def printed(script: str) -> list[str]:
    """Returns the lines that a process prints with the environment of an engine on CPUs, whose first variable is
    RAY_CLIENT_MODE. Each of these processes imports vLLM, which takes five seconds of a core."""
    environment = {"RAY_CLIENT_MODE": "0"} | os.environ
    environment |= engine_environment(Config.model_validate({"generator": {"gpus": 0}}), {})
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout.splitlines()


IMPORT_WORKER = f"import sys, vllm.v1.worker.cpu_worker; print('{LOWERING}' in sys.modules)"


@pytest.fixture(scope="module")
def engine_process() -> list[str]:
    """Returns whether a process of an engine imports the compiler, and the name that it gets after Ray has changed the
    first variable of its environment."""
    begin = "import os, asyncrl.generation.engine_main; os.environ['RAY_CLIENT_MODE'] = '0'"
    named = "from vllm.utils.system_utils import set_process_title; set_process_title('EngineCore')"
    *_, compiler, name = printed(f"{begin}; {IMPORT_WORKER}; {named}; print(open('/proc/self/comm').read().strip())")
    return [compiler, name]


@pytest.mark.campaign
def test_a_process_of_an_engine_on_cpus_imports_no_compiler(engine_process: list[str]) -> None:
    assert engine_process[0] == "False"


@pytest.mark.campaign
def test_the_process_that_starts_an_engine_on_cpus_imports_no_compiler() -> None:
    assert printed(f"from asyncrl.generation.vllm_engine import preload; preload(); {IMPORT_WORKER}")[-1] == "False"


@pytest.mark.campaign
def test_an_engine_gets_its_name_if_ray_changes_the_first_variable_of_the_environment(
    engine_process: list[str],
) -> None:
    assert engine_process[1] == "VLLM::EngineCor"  # the kernel keeps 15 characters
