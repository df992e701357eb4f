"""The room on the GPUs of a planned run (`memory_plan`): their number, the share of a GPU's memory that each process
may use, and the KV cache of an engine."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.config.schema import Config
from asyncrl.weights.manifest import ParameterSpec

GIB = 2**30
ENGINE = "process of an engine"
ENGINE_GPU = f"GPU of a {ENGINE}"
ENGINE_WORKSPACE_BYTES = 2.0 * GIB
"""Memory of a GPU that an engine takes besides weights and KV cache: CUDA's context, activations and graphs. An
estimate."""
_KEYS_AND_VALUES = ("k_proj.weight", "v_proj.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The KV cache of an engine: bytes on each GPU, sequences of `model.max_length` tokens that fit, and sequences that
    a replica is asked for at once."""

    nbytes: float
    sequences: float
    asked: int


def gpu_share(config: Config, place: str) -> float:
    """Returns the share of a GPU's memory that the process at `place` may use. A rank that may share its GPU with an
    engine gets what `generator.gpu_memory_utilization` leaves."""
    of_engine = config.generator.gpu_memory_utilization
    if place == ENGINE_GPU:
        return of_engine
    pools = config.rank_pools()
    shares = any(place == f"GPU of a rank of the {name}" and pool.gpus < 1 for name, pool in pools.items())
    return 1 - of_engine if shares and 0 < config.generator.gpus < 1 else 1


def kv_cache(config: Config, own: Sequence[ParameterSpec], *, gpu_bytes: float) -> KvCache | None:
    """Estimates the KV cache of an engine on GPUs of `gpu_bytes` each. None for an engine on CPUs, and for models whose
    projections of keys and values are not parameters of their own (`k_proj`, `v_proj`). `own` has the model's
    parameters without those that are tied to another one."""
    generator = config.generator
    per_token = sum(spec.nbytes / math.prod(spec.shape[1:]) for spec in own if spec.name.endswith(_KEYS_AND_VALUES))
    if not generator.gpus or not per_token:
        return None
    parts = generator.tensor_parallel_size
    weights = sum(spec.nbytes for spec in own) / parts
    left = generator.gpu_memory_utilization * gpu_bytes - weights - ENGINE_WORKSPACE_BYTES
    nbytes = max(0.0, left if generator.kv_cache_gib is None else generator.kv_cache_gib * GIB)
    return KvCache(
        nbytes=nbytes,
        sequences=nbytes * parts / per_token / config.model.max_length,
        asked=generator.max_concurrent_groups * config.learner.group_size,
    )


def gpu_pools(config: Config) -> dict[str, tuple[int, float]]:
    """Returns the pools that use GPUs, each with its number of processes and the GPUs of each process."""
    pools = {name: (pool.ranks, pool.gpus) for name, pool in config.rank_pools().items()}
    pools["generators"] = (config.generator.replicas, config.generator.gpus)
    return {name: found for name, found in pools.items() if found[1]}


def room_problems(config: Config, cache: KvCache | None, *, gpus_per_node: int) -> Iterator[str]:
    """Yields a message if the KV cache is smaller than one sequence, and one if a run on one node needs more GPUs than
    the node has. `memory_plan` compares the memory that each GPU needs with the memory that it has."""
    if cache is not None and cache.sequences < 1:
        yield (
            f"a {ENGINE_GPU} has about {cache.nbytes / GIB:.1f} GiB for its KV cache, which is less than a sequence of "
            f"model.max_length = {config.model.max_length} tokens; {advice(config, ENGINE_GPU)}"
        )
    pools = gpu_pools(config)
    together = sum(count * gpus for count, gpus in pools.values())
    if config.ray.address is None and together > gpus_per_node:
        yield (
            f"{described_pools(config)}: `asyncrl up` needs {together:g} GPUs in one node, and has {gpus_per_node} "
            "(--gpus-per-node); use fewer processes, or set ray.address to a cluster of several nodes"
        )


def described_pools(config: Config) -> str:
    """Returns how many GPUs each pool uses, in words."""
    return ", ".join(f"{name} {count} × {gpus:g}" for name, (count, gpus) in gpu_pools(config).items())


def advice(config: Config, place: str) -> str:
    """Returns what the user can change if the memory at `place` is too small. Options that are already on are left
    out."""
    learner, generator = config.learner, config.generator
    if place == ENGINE_GPU:
        return "raise generator.gpu_memory_utilization or generator.tensor_parallel_size, or use a smaller model"
    if not place.startswith("GPU of a rank"):
        return "use fewer processes on a node, or a smaller model"
    choices = []
    if not learner.activation_checkpointing:
        choices.append("set learner.activation_checkpointing: true")
    if learner.ranks > 1 and learner.gradient_sync == "update":
        choices.append("set learner.gradient_sync: micro_batch")
    choices.append("lower learner.micro_batch_tokens")
    choices.append("raise `ranks`, if there are more GPUs")
    if 0 < generator.gpus < 1:
        choices.append("lower generator.gpu_memory_utilization")
    if config.model.lora is None:
        choices.append("train an adapter (model.lora)")
    return ", or ".join(choices)
