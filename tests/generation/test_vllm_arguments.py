"""An engine starts with the arguments and the environment that follow from the configuration and the device, and then
with those of the user."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from asyncrl.config.load import load_config
from asyncrl.config.rules import check_config
from asyncrl.errors import ConfigError
from asyncrl.generation.vllm_arguments import (
    CPU,
    GIB,
    Device,
    engine_arguments,
    engine_environment,
    served_batched_tokens,
)
from asyncrl.generation.vllm_engine import prepare_environment

H100 = Device(kind="gpu", memory_gib=79.6, name="NVIDIA H100 80GB HBM3")
A10G = Device(kind="gpu", memory_gib=22.5, name="NVIDIA A10G")
A100 = Device(kind="gpu", memory_gib=80.0, name="NVIDIA A100-SXM4-80GB")
B200 = Device(kind="gpu", memory_gib=178.4, name="NVIDIA B200")
UNKNOWN = Device(kind="gpu")
DEVICES = [CPU, H100, A10G]
NAMES = ["CPU", "H100", "A10G"]
ON_GPUS = ["generator.gpus=1", "learner.gpus=1", "model.dtype=bfloat16", "generator.top_k=8"]
MAY_BE_REPLACED = {"max_num_batched_tokens", "enable_flashinfer_autotune", "block_size"}


def place(device: Device) -> list[str]:
    """Returns the overrides of the quickstart for a run on this device."""
    return [] if device.kind == "cpu" else ON_GPUS


def arguments(device: Device, *overrides: str) -> dict[str, object]:
    config = load_config([], [*place(device), *overrides])
    return engine_arguments(config, device=device, model_path="m", name="a", load_weights=True, sleep_mode=False)


def environment(
    device: Device, *overrides: str, given: dict[str, str] | None = None, loopback: str | None = None
) -> dict[str, str]:
    return engine_environment(load_config([], [*place(device), *overrides]), given or {}, loopback=loopback)


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
def test_the_users_arguments_are_added(device: Device) -> None:
    own = "generator.engine_args={max_num_batched_tokens: 9999, block_size: 64}"
    assert arguments(device, own) == arguments(device) | {"max_num_batched_tokens": 9999, "block_size": 64}


def test_an_engine_has_room_for_adapters_only_if_the_model_has_one() -> None:
    assert not {"enable_lora", "max_loras"} & arguments(CPU).keys()


def test_vllm_may_return_the_log_probs_of_a_support() -> None:
    assert arguments(CPU, "generator.top_k=50") == arguments(CPU) | {"max_logprobs": 50}
    assert arguments(CPU, "generator.logprobs=64") == arguments(CPU) | {"max_logprobs": 64}
    assert arguments(CPU, "generator.logprobs=64", "generator.top_k=50") == arguments(CPU, "generator.logprobs=64")
    assert "max_logprobs" not in arguments(CPU), "a run without these columns leaves vLLM's default"


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
def test_what_asyncrl_sets_cannot_be_replaced(device: Device) -> None:
    for name in arguments(device).keys() - MAY_BE_REPLACED:
        with pytest.raises(ConfigError, match=f"generator.engine_args.{name}: "):
            check_config(load_config([], [*place(device), f"generator.engine_args={{{name}: 1}}"]))


def test_blocks_are_small_on_cpus_so_that_samples_share_their_prompt() -> None:
    assert arguments(CPU)["block_size"] == 32
    assert "block_size" not in arguments(H100)


@pytest.mark.parametrize(("device", "tokens"), [(H100, 8192), (A10G, 2048), (A100, 2048), (B200, 16384)])
def test_a_step_on_a_gpu_has_as_many_tokens_as_in_vllm_serve(device: Device, tokens: int) -> None:
    assert arguments(device, "model.max_length=4096")["max_num_batched_tokens"] == tokens


def test_the_cache_has_the_size_that_is_set_and_is_measured_on_gpus_otherwise() -> None:
    assert arguments(CPU)["kv_cache_memory_bytes"] == GIB // 2
    assert "kv_cache_memory_bytes" not in arguments(H100)
    for device in (CPU, H100):
        assert arguments(device, "generator.kv_cache_gib=4")["kv_cache_memory_bytes"] == 4 * GIB


@pytest.mark.parametrize("device", [*DEVICES, UNKNOWN], ids=[*NAMES, "unknown"])
def test_each_of_many_sequences_has_a_token_in_a_step(device: Device) -> None:
    found = arguments(device, "generator.max_concurrent_groups=3000", "learner.group_size=8")
    assert found["max_num_seqs"] == found["max_num_batched_tokens"] == 24_000


def test_a_step_on_a_gpu_is_not_larger_than_all_sequences_together() -> None:
    found = arguments(H100, "generator.max_concurrent_groups=2", "learner.group_size=4", "model.max_length=100")
    assert found["max_num_batched_tokens"] == 800


def test_a_step_on_a_gpu_follows_the_users_arguments() -> None:
    prompts = ["model.max_length=10000", "generator.engine_args={enable_chunked_prefill: false}"]
    assert arguments(H100, *prompts)["max_num_batched_tokens"] == 10_000
    throughput = ["model.max_length=4096", "generator.engine_args={performance_mode: throughput}"]
    assert arguments(H100, *throughput)["max_num_batched_tokens"] == 16_384


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ("{}", False),
        ("{enable_flashinfer_autotune: true}", True),
        ("{kernel_config: {moe_backend: triton}}", False),
        ("{kernel_config: {enable_flashinfer_autotune: true}}", None),
    ],
)
def test_kernels_are_tuned_only_if_the_user_asks_for_it(own: str, found: bool | None) -> None:
    assert arguments(H100, f"generator.engine_args={own}").get("enable_flashinfer_autotune") is found
    assert "enable_flashinfer_autotune" not in arguments(CPU)


@pytest.mark.slow
@pytest.mark.parametrize("device", [H100, A10G, A100, B200, UNKNOWN], ids=lambda device: device.name or "unknown")
def test_the_numbers_of_vllm_serve_are_those_of_the_installed_vllm(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    from vllm.usage.usage_lib import UsageContext

    platform = SimpleNamespace(
        get_device_total_memory=lambda: int(device.memory_gib * GIB),
        get_device_name=lambda: device.name,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, _ = arg_utils.EngineArgs.get_batch_defaults(1)
    assert served_batched_tokens(device) == tokens[UsageContext.OPENAI_API_SERVER]


# -- environment -----------------------------------------------------------------------------------------------------


def test_an_engine_on_a_gpu_samples_without_flashinfer() -> None:
    assert environment(H100)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in environment(CPU)


@pytest.mark.parametrize(
    ("device", "dtype", "precision"),
    [(H100, "float32", "ieee"), (H100, "bfloat16", None), (CPU, "float32", None)],
)
def test_float32_is_exact_on_gpus(device: Device, dtype: str, precision: str | None) -> None:
    assert environment(device, f"model.dtype={dtype}").get("TRITON_F32_DEFAULT") == precision


def test_threads_and_compilation_are_those_of_the_machine_on_gpus_only() -> None:
    of_cpus = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    of_cpus |= {"TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}
    assert environment(CPU, given={"OMP_NUM_THREADS": "7"}).items() >= of_cpus.items()
    assert not environment(H100).keys() & of_cpus.keys()


@pytest.mark.parametrize("device", [CPU, H100], ids=["CPU", "H100"])
def test_a_variable_of_the_user_wins_unless_asyncrl_relies_on_its_value(device: Device, tmp_path: Path) -> None:
    overrides = ["model.dtype=float32", f"model.path={tmp_path}"]
    ours = environment(device, *overrides)
    always = environment(device, *overrides, given=dict.fromkeys(ours, "mine"))
    assert {"VLLM_PLUGINS", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS"} <= always.keys()
    assert always.items() <= ours.items()
    assert ours.keys() - always.keys() >= {"VLLM_LOGGING_LEVEL", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"}
    assert not always.keys() & {"TRITON_F32_DEFAULT", "VLLM_USE_FLASHINFER_SAMPLER"}


@pytest.mark.parametrize("device", DEVICES, ids=NAMES)
@pytest.mark.parametrize("loopback", ["lo", "lo0", "dummy"])
def test_the_processes_of_an_engine_meet_where_no_other_machine_reaches_them(device: Device, loopback: str) -> None:
    assert environment(device, loopback=loopback)["GLOO_SOCKET_IFNAME"] == loopback
    given = {"GLOO_SOCKET_IFNAME": "eth1"}
    assert "GLOO_SOCKET_IFNAME" not in environment(device, loopback=loopback, given=given)
    assert "GLOO_SOCKET_IFNAME" not in environment(device)


def test_the_interface_of_the_loopback_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})
    prepare_environment(load_config([]))
    assert "127.0.0.1" in {at.address for at in psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]}


def test_an_empty_variable_counts_as_not_set() -> None:
    assert environment(CPU, given={"VLLM_LOGGING_LEVEL": ""}) == environment(CPU)
