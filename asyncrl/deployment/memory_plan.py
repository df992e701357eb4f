"""The needs of a configuration: the memory of each kind of process, GPU and node, the bytes of a weight publication,
and how long a publication makes both pools wait. All of it is arithmetic over the shapes of the model's parameters, so
nothing is loaded and no run is started.

The memory of a process is what it uses at most during a run, and on CPUs also what it has freed and keeps. Activations
of training are estimated on GPUs, and left out on CPUs. Memory that libraries use for a moment is left out. For memory
that cannot be computed, the numbers are those that were measured on CPUs (benchmarks/plan_check.py). The memory of
CUDA's libraries and context is an estimate.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from asyncrl.config.schema import Config, CriticSection, LearnerSection
from asyncrl.config.starter import GpuNumbers
from asyncrl.deployment.gpu_room import ENGINE, GIB, KvCache, advice, gpu_share, kv_cache, room_problems
from asyncrl.generation.vllm_adapters import slots, vllm_rank
from asyncrl.generation.vllm_arguments import CPU_KV_CACHE_GIB
from asyncrl.policy.export import FILE_BYTES
from asyncrl.ranks.accelerator import compute_dtype
from asyncrl.ranks.optimizer import state_bytes
from asyncrl.weights.manifest import ParameterSpec, aligned
from asyncrl.weights.publisher import MOST_BUCKETS

MASTER_BYTES = 4
"""Bytes of a number in the learner's weights and gradients, which are float32."""
STORED_VERSIONS = 3
"""Versions of the weights that the store keeps: two, and the one that is being published."""
STORED_WITH_DELTAS = 4
"""Memory of the store with `weights.delta`, in sizes of a version: the oldest version, with the versions to which it is
a delta, has less than two sizes, and the next two versions may both be sent whole."""
FREED_VERSIONS = 1
"""Versions that the object store has freed and whose memory it keeps. Measured: 0 to 1.6."""
KEPT_BY_RANKS = 0.75
"""Memory that a rank on a CPU has freed and keeps, as a share of what it uses. Measured: 0.65 and 0.87."""
KEPT_BY_ENGINES = 1.2
"""Memory that an engine on a CPU has freed and keeps, as a share of its packed weights. Measured: 0.9 and 1.6."""
STORED, PROCESS, PACKED = "versions in the object store", "process", "packed weights, live and new"
KEPT = "freed memory that it keeps"
_LAYER = re.compile(r".*?\.\d+\.")
"""Matches the beginning of the name of a layer's parameter."""
OVER_OBJECT_STORE = ("object_store", "collective")
"""Transports that put versions into the object store. `collective` does so only while a replica lacks bytes."""
EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "embed_in.weight")
"""Ends of the names of the parameters that are embeddings or output heads."""
ENGINE_PROCESSES_BYTES = 1.0 * GIB
"""Memory of a replica's processes without weights and KV cache: Python, torch, vLLM and the rollout loop. Measured on
CPUs."""
RANK_PROCESS_BYTES = 0.35 * GIB
"""Memory of a rank's process without weights, gradients and activations. Measured on CPUs."""
CUDA_BYTES = 1.0 * GIB
"""Memory of the host that a process needs in addition if it uses a GPU: CUDA's libraries and its context. An
estimate."""
RAY_BYTES = 0.97 * GIB
"""Memory of Ray's daemons, the coordinator, the stores and the command, without the object store. Measured: 0.93 to
0.99 GiB. While a run starts, Ray also has workers that import the code of ranks and replicas. Their memory is counted
with the ranks and replicas that they become."""
PAUSE_S = 0.022
"""Pause of an engine on a CPU for new weights, seconds, as measured with 95 million parameters. During the pause, the
engine only exchanges pointers to the weights."""
COPIES_OF_A_SNAPSHOT = 1.7
"""Duration of a snapshot on a CPU, as a multiple of the time that a copy of the bytes that the rank sends takes."""


class Memory(StrEnum):
    """Where bytes are: in the memory of a node, or in that of a GPU."""

    NODE = "node"
    GPU = "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The assumptions of the plan about every node. Speeds are in bytes per second: of a copy within a node's memory by
    one thread, and of a copy between a node's memory and a GPU."""

    node_bytes: float
    gpu_bytes: float
    gpus_per_node: int
    copy_speed: float
    gpu_copy_speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Bytes that one process of a kind needs, and the memory in which it needs them. With `processes`, only so many
    processes of the kind need them: so many ranks, or so many replicas of each node."""

    place: str
    what: str
    nbytes: float
    memory: Memory
    processes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The lines of all kinds of processes, the sums of each node and GPU, the times of a publication in seconds, the
    KV cache of an engine on GPUs, and what does not fit. `trained` is the number of parameters that are trained.
    `published_bytes` is the size of a version of the weights, and `sent_bytes` the part that the first rank sends."""

    parameters: int
    trained: int
    published_bytes: int
    sent_bytes: int
    lines: tuple[Line, ...]
    sums: tuple[Line, ...]
    times: tuple[tuple[str, float], ...]
    cache: KvCache | None
    problems: tuple[str, ...]


def largest_shard(parameters: Iterable[ParameterSpec], shards: int) -> int:
    """Returns the number of parameters that the first of `shards` ranks holds. FSDP2 divides each parameter by rows,
    and the first rank gets the largest part. A tied parameter counts once."""
    return sum(
        math.ceil(spec.shape[0] / shards) * math.prod(spec.shape[1:]) if spec.shape else 1
        for spec in parameters
        if not spec.tied_to
    )


def gathered(parameters: Iterable[ParameterSpec]) -> int:
    """Returns how many parameters a rank holds whole during a pass: those outside of layers, and the two largest
    layers, because FSDP2 gathers the next layer while it computes one. A tied parameter counts once."""
    layers, outside = Counter[str](), 0
    for spec in parameters:
        if spec.tied_to:
            continue
        if layer := _LAYER.match(spec.name):
            layers[layer[0]] += math.prod(spec.shape)
        else:
            outside += math.prod(spec.shape)
    return outside + sum(sorted(layers.values())[-2:])


def activations(config: Config, parameters: Sequence[ParameterSpec]) -> float:
    """Returns about how many bytes a rank keeps between the forward and the backward pass of its largest micro-batch.

    The backward pass of a matrix needs its inputs, and that of the operations around it about as many numbers as the
    matrix has outputs. For Qwen2.5 with 0.5 and 1.5 billion parameters and padded rows, this estimate is 0.87 and 0.90
    times what was measured on a GPU (docs/gpu.md). Fused experts are left out.
    """
    learner = config.learner
    rows = math.ceil(learner.groups_per_step * learner.group_size / learner.ranks)
    padded = min(rows, learner.micro_batch_size) * config.model.max_length
    packed = min(rows * config.model.max_length, learner.micro_batch_tokens)
    tokens = padded if learner.batching == "padded" else packed
    widths, hidden = Counter[str](), 0
    for spec in parameters:
        if (layer := _LAYER.match(spec.name)) and len(spec.shape) == 2:
            widths[layer[0]] += sum(spec.shape)
        elif spec.name.endswith(EMBEDDINGS):
            hidden = spec.shape[1]
    kept = sum(widths.values())
    if learner.activation_checkpointing:  # the inputs of all layers, and one layer that is computed again
        kept = len(widths) * hidden + max(widths.values(), default=0)
    return float(compute_dtype(config).itemsize * tokens * kept)


def plan(
    config: Config,
    parameters: Sequence[ParameterSpec],
    hardware: Hardware,
    *,
    reference: bool,
    adapter: Sequence[ParameterSpec] = (),
) -> Plan:
    """Plans a run of a model with these parameters, whose dtype is that of the engines. `reference` says whether the
    objective uses the initial weights too, as a KL penalty does. `adapter` has the parameters of the adapter if
    `model.lora` is set."""
    own = [spec for spec in parameters if not spec.tied_to]
    trained = list(adapter) or own
    published, flat = sum(spec.nbytes for spec in trained), sum(aligned(spec.nbytes) for spec in trained)
    itemsize = published // max(1, sum(math.prod(spec.shape) for spec in trained))
    sent = largest_shard(trained, _shards(config.learner)) * itemsize
    lines = [
        *_rank_lines(config, own, trained, sent=sent, reference=reference and not adapter),
        *_replica_lines(config, own, adapter, flat=flat),
    ]
    lines += list(_kept(config, lines))
    sums = list(_sums(config, lines, hardware))
    cache = kv_cache(config, own, gpu_bytes=hardware.gpu_bytes)
    problems = [
        *_problems(config, sums, hardware, published=published),
        *room_problems(config, cache, gpus_per_node=hardware.gpus_per_node),
    ]
    return Plan(
        parameters=sum(math.prod(spec.shape) for spec in own),
        trained=sum(math.prod(spec.shape) for spec in trained),
        published_bytes=published,
        sent_bytes=sent,
        lines=tuple(lines),
        sums=tuple(sums),
        times=tuple(_times(config, hardware, published=published, sent=sent)),
        cache=cache,
        problems=tuple(problems),
    )


def _rank_lines(
    config: Config, own: Sequence[ParameterSpec], trained: Sequence[ParameterSpec], *, sent: int, reference: bool
) -> Iterator[Line]:
    for name, pool in config.rank_pools().items():
        rank, device = f"rank of the {name}", Memory.GPU if pool.gpus else Memory.NODE
        adapted = name == "learner" and config.model.lora is not None
        changed = trained if adapted else own
        shard = largest_shard(changed, _shards(pool))
        # With HSDP only the ranks of the first copy send, and all ranks write parts of a checkpoint.
        copies = pool.ranks // _shards(pool)
        senders = _shards(pool) if copies > 1 else None
        if adapted:
            frozen = compute_dtype(config).itemsize * largest_shard(own, _shards(pool))
            yield Line(place=rank, what="frozen weights", nbytes=frozen, memory=device)
        what = "adapter, float32" if adapted else "weights, float32"
        yield Line(place=rank, what=what, nbytes=MASTER_BYTES * shard, memory=device)
        gradients = MASTER_BYTES * _gradients(config, pool, changed, shard)
        yield Line(place=rank, what="gradients", nbytes=gradients, memory=device)
        state = state_bytes(pool.optimizer, key=f"{name}.optimizer") * shard
        named = pool.optimizer.name
        what = "AdamW's moments" if pool.optimizer.own is None else f"state of {named} (measured with a small matrix)"
        yield Line(place=rank, what=what, nbytes=state, memory=device)
        whole = compute_dtype(config).itemsize * gathered(own)
        yield Line(place=rank, what="whole layers in a pass", nbytes=whole, memory=device)
        if pool.gpus:
            what = "activations (estimated)"
            yield Line(place=rank, what=what, nbytes=activations(config, own), memory=Memory.GPU)
            loaded = (compute_dtype(config).itemsize if adapted else MASTER_BYTES) * sum(
                math.prod(spec.shape) for spec in own
            )
            yield Line(place=rank, what="whole model, while it loads", nbytes=loaded, memory=Memory.NODE)
        if name == "learner":
            if reference:
                yield Line(place=rank, what="reference weights", nbytes=MASTER_BYTES * shard, memory=device)
            for what, nbytes in _sending(config, sent):
                yield Line(place=rank, what=what, nbytes=nbytes, memory=Memory.NODE, processes=senders)
        # also without `checkpoint.every_steps`: a run ends with a checkpoint
        saved = (MASTER_BYTES * shard + state) / copies
        yield Line(place=rank, what="copy for a checkpoint", nbytes=saved, memory=Memory.NODE)
        if name == "learner":
            file = min(FILE_BYTES, sum(spec.nbytes for spec in changed))
            yield Line(place=rank, what="a file of an export", nbytes=file, memory=Memory.NODE)
        process = RANK_PROCESS_BYTES + (CUDA_BYTES if pool.gpus else 0)
        yield Line(place=rank, what=PROCESS, nbytes=process, memory=Memory.NODE)


def _replica_lines(
    config: Config, own: Sequence[ParameterSpec], adapter: Sequence[ParameterSpec], *, flat: int
) -> Iterator[Line]:
    generator = config.generator
    whole = sum(spec.nbytes for spec in own)
    place, device = (ENGINE, Memory.GPU) if generator.gpus else ("replica", Memory.NODE)
    if generator.gpus:
        yield Line(place=ENGINE, what="weights", nbytes=whole / generator.tensor_parallel_size, memory=Memory.GPU)
        if generator.kv_cache_gib is not None:
            yield Line(place=ENGINE, what="KV cache", nbytes=generator.kv_cache_gib * GIB, memory=Memory.GPU)
    else:
        # Embeddings are packed too, because they may be heads, and their plain form stays.
        packed = whole + sum(spec.nbytes for spec in own if spec.name.endswith(EMBEDDINGS))
        # with an adapter, the packed weights never change
        what, forms = ("packed weights", 1) if adapter else (PACKED, 2)
        yield Line(place="replica", what=what, nbytes=forms * packed, memory=Memory.NODE)
        kv = (generator.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB * generator.tensor_parallel_size
        yield Line(place="replica", what="KV cache", nbytes=kv, memory=Memory.NODE)
    if config.model.lora is not None and adapter:
        adapters = slots(config) * sum(spec.nbytes for spec in adapter)
        padded = adapters * vllm_rank(config.model.lora) / config.model.lora.rank
        yield Line(place=place, what="adapters", nbytes=padded, memory=device)
        yield Line(place="replica", what="files of adapters", nbytes=2 * adapters, memory=Memory.NODE)
    # The replicas of a node share the staged weights. One of them fetches the buckets, but all receive a broadcast.
    fetching = None if config.weights.transport == "collective" else 1
    yield Line(place="replica", what="staged weights", nbytes=flat, memory=Memory.NODE, processes=1)
    buckets = 2 * min(flat, max(config.weights.bucket_bytes, flat // MOST_BUCKETS))
    yield Line(place="replica", what="buckets on their way", nbytes=buckets, memory=Memory.NODE, processes=fetching)
    processes = ENGINE_PROCESSES_BYTES + (CUDA_BYTES * generator.tensor_parallel_size if generator.gpus else 0)
    yield Line(place="replica", what="processes", nbytes=processes, memory=Memory.NODE)


def _sending(config: Config, sent: int) -> Iterator[tuple[str, float]]:
    """Yields the memory that a rank needs in order to publish weights, if it sends `sent` bytes of each version: a name
    and a number of bytes for each use."""
    yield "two snapshots to publish", 2 * sent
    if config.weights.delta:
        yield "sent versions, for deltas", 2 * sent
    if config.weights.transport in OVER_OBJECT_STORE:
        yield STORED, stored_versions(config) * sent


def stored_versions(config: Config) -> int:
    """Returns the memory that the object store needs, as a multiple of the size of a version, with freed versions whose
    memory it keeps."""
    return FREED_VERSIONS + (STORED_WITH_DELTAS if config.weights.delta else STORED_VERSIONS)


def _kept(config: Config, lines: Sequence[Line]) -> Iterator[Line]:
    """Yields the freed memory that processes on CPUs keep, beside the other `lines`."""
    for name, pool in config.rank_pools().items():
        place = f"rank of the {name}"
        used = sum(line.nbytes for line in lines if line.place == place and line.what not in (STORED, PROCESS))
        if not pool.gpus:
            yield Line(place=place, what=KEPT, nbytes=KEPT_BY_RANKS * used, memory=Memory.NODE)
    for line in lines:
        if line.what == PACKED:
            yield Line(place="replica", what=KEPT, nbytes=KEPT_BY_ENGINES * line.nbytes, memory=Memory.NODE)


def _shards(pool: LearnerSection | CriticSection) -> int:
    """Returns the number of ranks that share one copy of the model."""
    return (pool.shards if isinstance(pool, LearnerSection) else None) or pool.ranks


def _gradients(config: Config, pool: LearnerSection | CriticSection, own: Sequence[ParameterSpec], shard: int) -> int:
    """Returns the number of elements of the gradients that a rank keeps between its micro-batches: of its own shard, or
    of all parameters with `learner.gradient_sync: update`."""
    if pool.ranks > 1 and config.learner.gradient_sync == "update":
        return sum(math.prod(spec.shape) for spec in own)
    return shard


def on_a_node(processes: int, gpus: float, gpus_per_node: int) -> int:
    """Returns how many processes of a pool Ray places on one node: as many as have their GPUs there, or all of them if
    they use no GPU. `gpus` is the number of GPUs of one process."""
    return min(processes, max(1, int(gpus_per_node / gpus))) if gpus else processes


def _sums(config: Config, lines: Sequence[Line], hardware: Hardware) -> Iterator[Line]:
    """Yields what a GPU of each pool needs, and a node of each pool. Pools share a node if they have no GPUs, or if one
    node has enough GPUs for all."""

    def needs(place: str, memory: Memory, count: int = 1) -> float:
        found = [line for line in lines if line.place == place and line.memory is memory]
        return sum(line.nbytes * min(count, line.processes or count) for line in found)

    generator = config.generator
    pools = {f"rank of the {name}": (name, pool.ranks, pool.gpus) for name, pool in config.rank_pools().items()}
    pools["replica"] = ("generators", generator.replicas, generator.gpus)
    one_node = sum(count * gpus for _, count, gpus in pools.values()) <= hardware.gpus_per_node
    apart, together = [], {}
    for place, (name, count, gpus) in pools.items():
        on_node = needs(place, Memory.NODE, on_a_node(count, gpus, hardware.gpus_per_node))
        if gpus:
            user = ENGINE if place == "replica" else place
            yield Line(place=f"GPU of a {user}", what="", nbytes=needs(user, Memory.GPU), memory=Memory.GPU)
        if one_node or not gpus:
            together[name] = on_node
        else:
            apart.append({name: on_node})
    for nodes in [together, *apart] if together else apart:
        nbytes = RAY_BYTES + sum(nodes.values())
        yield Line(place=f"node with {' and '.join(nodes)}", what="", nbytes=nbytes, memory=Memory.NODE)


def _times(config: Config, hardware: Hardware, *, published: int, sent: int) -> Iterator[tuple[str, float]]:
    learner, generator = config.learner, config.generator
    if learner.gpus:
        yield "training waits for a snapshot", sent / hardware.gpu_copy_speed
    else:
        yield "training waits for a snapshot", COPIES_OF_A_SNAPSHOT * sent / hardware.copy_speed
    if config.model.lora is not None:
        return  # engines do not pause for an adapter
    # On a GPU, the pause also copies the weights to it.
    copied = published / generator.tensor_parallel_size if generator.gpus else 0
    yield "an engine pauses", PAUSE_S + copied / hardware.gpu_copy_speed


def _problems(config: Config, sums: Sequence[Line], hardware: Hardware, *, published: int) -> Iterator[str]:
    for line in sums:
        room = hardware.node_bytes
        if line.memory is Memory.GPU:
            room = hardware.gpu_bytes * gpu_share(config, line.place)
        if line.nbytes > room:
            shortage = f"a {line.place} needs {line.nbytes / GIB:.1f} GiB and has {room / GIB:.1f}"
            yield f"{shortage}; {advice(config, line.place)}"
    versions = stored_versions(config)
    needed, has = versions * published, config.ray.object_store_mb * 2**20
    if config.weights.transport in OVER_OBJECT_STORE and config.ray.address is None and needed > has:
        yield (
            f"ray.object_store_mb = {config.ray.object_store_mb} does not hold {versions} versions of the "
            f"weights; set it to {math.ceil(needed / 2**20) + 200}"
        )


# The numbers of a first configuration that depend on the memory of the GPUs: `asyncrl init` writes them.

ROOM = 0.9
"""Share of a GPU's memory that may be planned. The rest is for fragments, and for activations beyond the estimate."""
LIBRARIES_BYTES = 1.5 * GIB
"""Memory of a GPU for CUDA's context, NCCL and a chunk of the output head's logits (0.75 GiB, docs/gpu.md)."""
TOKENS_PER_PASS = (32768, 16384, 8192, 4096)
RANK_GPU = "GPU of a rank of the learner"
_ANY_MACHINE = Hardware(node_bytes=1e15, gpu_bytes=1e15, gpus_per_node=8, copy_speed=1e10, gpu_copy_speed=1e10)


def gpu_numbers(
    config: Config, parameters: Sequence[ParameterSpec], *, gpus: int, gpu_gib: float, reference: bool
) -> GpuNumbers:
    """Returns the first of `_choices` with which a rank of the learner fits its GPU, or the last one if none fits.
    `config` says whether both pools share GPUs, and how long a sequence may be: a micro-batch has room for at least
    one. The learner gets at most half of several GPUs."""
    found = None
    for choice in _choices(gpus, longest=config.model.max_length):
        learner = config.learner.model_copy(update={"batching": "packed", **choice})
        tried = config.model_copy(update={"learner": learner})
        sums = plan(tried, parameters, _ANY_MACHINE, reference=reference).sums
        [of_rank] = [line for line in sums if line.place == RANK_GPU]
        room = ROOM * gpu_gib * GIB * gpu_share(tried, RANK_GPU) - LIBRARIES_BYTES
        found = GpuNumbers(**choice, learner_gib=of_rank.nbytes / GIB, fits=of_rank.nbytes <= room)
        if found.fits:
            break
    assert found is not None, "there is always a choice"
    return found


def _choices(gpus: int, *, longest: int) -> Iterator[dict[str, Any]]:
    """Yields settings of the learner for `gpus` GPUs to try, the fastest first: fewer ranks leave more GPUs to the
    engines, and without activation checkpointing nothing is computed twice."""
    ranks = 1
    while ranks <= max(1, gpus // 2):
        for gradient_sync in ("update", "micro_batch") if ranks > 1 else ("update",):
            for checkpointing in (False, True):
                for tokens in TOKENS_PER_PASS:
                    yield {
                        "ranks": ranks,
                        "gradient_sync": gradient_sync,
                        "activation_checkpointing": checkpointing,
                        "micro_batch_tokens": max(tokens, longest),
                    }
        ranks *= 2
