"""The arguments with which an engine of vLLM starts. vLLM itself is not imported here."""

from typing import Any

from asyncrl.config.schema import Config
from asyncrl.generation import vllm_adapters
from asyncrl.generation.model_parameters import adapted_modules
from asyncrl.generation.prefixes import engine_seed
from asyncrl.vllm_internals import dotted

GIB = 2**30
MIN_BATCHED_TOKENS = 4096
"""Smallest token budget of a scheduler step on CPUs. Without chunked prefill, a whole prompt must fit into one step."""


def engine_arguments(
    config: Config, *, model_path: str, name: str, load_weights: bool, sleep_mode: bool
) -> dict[str, Any]:
    """Returns the arguments of vLLM's `AsyncEngineArgs`, without those of the weight transfer.

    The arguments of `generator.engine_args` come last. The configuration refuses those that must keep their value here
    (`asyncrl.config.engine_args`). See `VLLMEngine.start` for the parameters.
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
    if generator.top_k is not None:
        arguments["max_logprobs"] = generator.top_k  # vLLM refuses more log-probs for each token than this
    if config.model.dtype == "bfloat16":
        # In bfloat16 the logits themselves would be rounded, which alone changes log-probs by up to 0.06 nats.
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if generator.gpus == 0:
        arguments |= _cpu_arguments(config, sequences=sequences)
    else:
        arguments["gpu_memory_utilization"] = generator.gpu_memory_utilization
    return arguments | generator.engine_args


def _cpu_arguments(config: Config, *, sequences: int) -> dict[str, Any]:
    """Returns the arguments of an engine on CPUs that decodes up to `sequences` sequences at once."""
    generator = config.generator
    alone = dotted("UniProcExecutor")
    return {
        "kv_cache_memory_bytes": int(generator.kv_cache_gib * GIB),
        # vLLM's CPU worker dies when the prefill of a seeded request is split in two ("CPU Generator does not use
        # offset"). An update that recomputes all running sequences at once would split many.
        "enable_chunked_prefill": False,
        # Without a worker process of its own, start-up saves 20 s (one import of vLLM less) and every decoding step
        # saves a message. The full class name is needed because vLLM replaces "uni" on CPUs, where that executor
        # cannot bind threads. No binding is needed here (VLLM_CPU_OMP_THREADS_BIND=nobind).
        "distributed_executor_backend": alone if generator.tensor_parallel_size == 1 else "mp",
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, config.model.max_length, sequences),
    }
