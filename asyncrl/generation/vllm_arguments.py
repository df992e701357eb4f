"""The arguments and the environment variables with which an engine of vLLM starts.

Neither depends on the devices of this machine, so those for GPUs are tested without a GPU. vLLM is not imported here,
because it reads the variables when it is imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl.common.kept_memory import KEPT_MEMORY
from asyncrl.config.schema import Config
from asyncrl.generation import vllm_adapters
from asyncrl.generation.model_parameters import adapted_modules
from asyncrl.generation.prefixes import engine_seed
from asyncrl.vllm_internals import dotted

GIB = 2**30
MIN_BATCHED_TOKENS = 4096
"""Smallest token budget of a scheduler step on CPUs. Without chunked prefill, a whole prompt must fit into one step."""

CPU_KV_CACHE_GIB = 0.5
"""Default size of the KV cache on CPUs."""
CPU_BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache on CPUs, the fewest that vLLM's attention supports there. vLLM's default is 128."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of an engine. `memory_gib` and `name` are those that NVML reports for a GPU. They are 0 and empty for
    a CPU, and for a GPU that NVML does not know."""

    kind: Literal["cpu", "gpu"]
    memory_gib: float = 0.0
    name: str = ""


CPU = Device(kind="cpu")


def engine_environment(config: Config, given: Mapping[str, str], *, loopback: str | None = None) -> dict[str, str]:
    """Returns the environment variables to set before vLLM is imported. `given` are those of the process, and
    `loopback` is the network interface that only this machine can reach, if it is known.

    A variable that the user has set keeps its value, except those on whose value asyncrl relies. An empty value counts
    as not set.
    """
    required = {
        "VLLM_NO_USAGE_STATS": "1",  # a run sends no statistics
        "VLLM_PLUGINS": "asyncrl",  # updates need this plugin, and another one could replace the model
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # each process loads our plugin, and ends with its parent
    }
    preferred = {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}
    if Path(config.model.path).is_dir():
        preferred["HF_HUB_OFFLINE"] = "1"
    if loopback is not None:
        # By default, gloo listens at the address of the host's name, which other machines can often reach. The
        # loopback interface is enough, because all processes of an engine are on one machine.
        preferred["GLOO_SOCKET_IFNAME"] = loopback
    if config.generator.gpus == 0:
        required |= {
            "OMP_NUM_THREADS": "1",  # Ray sets it in its workers too, so a value here need not be the user's
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # our executor cannot bind threads, see `_cpu_arguments`
            "TORCH_COMPILE_DISABLE": "1",  # the first request takes 0.3 s instead of 13 s
            "TORCHDYNAMO_DISABLE": "1",  # vLLM's decorators do not import the compiler: see `without_compiler`
        }
        preferred |= KEPT_MEMORY
    else:
        # vLLM's sampler imports flashinfer when it is built, and fails without it. With flashinfer it would compile a
        # kernel that it never uses: every request here returns processed log-probs, for which vLLM samples itself.
        preferred["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if config.model.dtype == "float32":
            # vLLM computes the attention of float32 with Triton, whose products are TF32 by default: log-probs differ
            # by 4e-3 nats from those of the learner, and the limit is 1e-4. The variable holds for the kernels of
            # adapters too. FLEX_ATTENTION would be exact as well, but has to be compiled, and leaves adapters in TF32.
            preferred["TRITON_F32_DEFAULT"] = "ieee"
    return required | {name: value for name, value in preferred.items() if not given.get(name)}


def engine_arguments(
    config: Config, *, device: Device, model_path: str, name: str, load_weights: bool, sleep_mode: bool
) -> dict[str, Any]:
    """Returns the arguments of vLLM's `AsyncEngineArgs` for an engine on `device`, without those of the weight
    transfer.

    The arguments of `generator.engine_args` come last. The configuration refuses those that must keep their value here
    (`asyncrl.config.engine_args`). `name` is that of the engine, for its seed. Without `load_weights` and `model.lora`,
    the weights are random at first. `sleep_mode` lets the engine free its device memory.
    """
    generator, lora = config.generator, config.model.lora
    sequences = generator.max_concurrent_groups * config.learner.group_size
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_length,
        "max_num_seqs": sequences,
        "enforce_eager": generator.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": generator.tensor_parallel_size,
        "seed": engine_seed(config.run.seed, name),
        "load_format": "auto" if load_weights or lora is not None else "dummy",
        "enable_sleep_mode": sleep_mode,
    }
    if lora is not None:
        arguments |= vllm_adapters.engine_arguments(config, lora, adapted_modules(model_path, lora))
    if config.widths:
        arguments["max_logprobs"] = max(config.widths.values())  # vLLM refuses more log-probs for each token than this
    if config.model.dtype == "bfloat16":
        # In bfloat16 the logits themselves would be rounded, which alone changes log-probs by up to 0.06 nats.
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if device.kind == "cpu":
        arguments |= _cpu_arguments(config, sequences=sequences)
    else:
        arguments |= _gpu_arguments(config, device, sequences=sequences)
    return arguments | generator.engine_args


def _cpu_arguments(config: Config, *, sequences: int) -> dict[str, Any]:
    """Returns the arguments that `engine_arguments` adds for an engine on CPUs. The engine decodes up to `sequences`
    sequences at once."""
    generator = config.generator
    alone = dotted("UniProcExecutor")
    return {
        "kv_cache_memory_bytes": int((generator.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB),
        # vLLM's CPU worker dies when the prefill of a seeded request is split in two ("CPU Generator does not use
        # offset"). An update that recomputes all running sequences at once would split many.
        "enable_chunked_prefill": False,
        # Without a worker process of its own, start-up saves 20 s (one import of vLLM less) and every decoding step
        # saves a message. The full class name is needed because vLLM replaces "uni" on CPUs, where that executor
        # cannot bind threads. No binding is needed here (VLLM_CPU_OMP_THREADS_BIND=nobind).
        "distributed_executor_backend": alone if generator.tensor_parallel_size == 1 else "mp",
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, config.model.max_length, sequences),
        # The samples of a group share whole blocks only. With blocks of 128 tokens, each sample computes a prompt of 89
        # tokens again (docs/benchmarks.md, "Blocks of the KV cache").
        "block_size": CPU_BLOCK_TOKENS,
    }


def _gpu_arguments(config: Config, device: Device, *, sequences: int) -> dict[str, Any]:
    """Returns the arguments that `engine_arguments` adds for an engine on GPUs. The engine decodes up to `sequences`
    sequences at once."""
    generator, own = config.generator, config.generator.engine_args
    # As vLLM does with its own default, the budget is limited to all tokens of all sequences. vLLM refuses a budget of
    # fewer tokens than sequences, and without chunked prefill one of fewer tokens than the longest prompt has.
    tokens = min(served_batched_tokens(device), sequences * config.model.max_length)
    if own.get("performance_mode") == "throughput":
        tokens *= 2  # as in `vllm serve`
    least = sequences if own.get("enable_chunked_prefill", True) else max(sequences, config.model.max_length)
    arguments = {
        "gpu_memory_utilization": generator.gpu_memory_utilization,
        "max_num_batched_tokens": max(tokens, least),
    }
    if generator.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(generator.kv_cache_gib * GIB)
    kernels = own.get("kernel_config")
    if not (isinstance(kernels, Mapping) and kernels.get("enable_flashinfer_autotune") is not None):
        # By default vLLM times the kernels of flashinfer at each start, which few models use. It refuses a value that
        # is given twice, here and in kernel_config.
        arguments["enable_flashinfer_autotune"] = False
    return arguments


def served_batched_tokens(device: Device) -> int:
    """Returns the token budget of a scheduler step that `vllm serve` takes by default on a GPU.

    `AsyncLLM` itself takes 2,048 on every GPU, because vLLM knows its user only as "engine". The numbers are those of
    `EngineArgs.get_batch_defaults`, and a test compares them.

    >>> served_batched_tokens(Device(kind="gpu", memory_gib=79.6, name="NVIDIA H100 80GB HBM3"))
    8192
    >>> served_batched_tokens(Device(kind="gpu", memory_gib=22.5, name="NVIDIA A10G"))
    2048
    """
    if device.memory_gib >= 160:
        return 16384
    if device.memory_gib >= 70 and "a100" not in device.name.lower():  # on A100s, large steps are slower (vLLM #17885)
        return 8192
    return 2048
