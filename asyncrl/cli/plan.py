"""`asyncrl doctor --plan`: computes how much memory and time a configuration needs, prints both, and fails if something
does not fit."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from asyncrl.cli.preflight import model_directory
from asyncrl.cli.terminal import say
from asyncrl.config.schema import Config
from asyncrl.deployment.gpu_room import GIB, described_pools, gpu_pools
from asyncrl.deployment.memory_plan import OVER_OBJECT_STORE, Hardware, Line, Plan, plan, stored_versions
from asyncrl.errors import ConfigError
from asyncrl.generation.model_parameters import model_without_weights
from asyncrl.policy.step_loss import holds_reference
from asyncrl.ranks.gather import parameter_specs
from asyncrl.weights.manifest import ParameterSpec

COPIED_BYTES = 256 * 2**20
"""Size of the copy with which the speed of this machine's memory is measured."""
GPU_COPY_SPEED = 10e9
"""Assumed speed of a copy between a node's memory and a GPU, bytes per second. It was not measured."""
LARGE_NODE_GIB = 1024.0
"""Assumed memory of a node with GPUs, GiB, unless the user gives it."""
MEASURED = "1.03 to 1.45"
"""Memory that training has used on GPUs, as a multiple of the sum that the plan computes for a rank (docs/gpu.md). The
difference is fragments and libraries."""


_ONLY_CONFIG = "for a plan, a folder with the model's config.json alone is enough: model.path=FOLDER"


def show_plan(config: Config, *, node_gib: float | None, gpu_gib: float, gpus_per_node: int) -> None:
    """Prints the plan. Raises ConfigError if something does not fit, or for a model of which there is no plan
    (`specs_of`). `node_gib` None: the memory of this machine, or `LARGE_NODE_GIB` if the run uses GPUs."""
    has_gpus = bool(config.generator.gpus or any(pool.gpus for pool in config.rank_pools().values()))
    here = psutil.virtual_memory().total / GIB
    hardware = Hardware(
        node_bytes=GIB * (node_gib or (LARGE_NODE_GIB if has_gpus else here)),
        gpu_bytes=GIB * gpu_gib,
        gpus_per_node=gpus_per_node,
        copy_speed=_copy_speed(),
        gpu_copy_speed=GPU_COPY_SPEED,
    )
    found = plan(
        config,
        specs_of(config),
        hardware,
        reference=holds_reference(config),
        adapter=() if config.model.lora is None else specs_of(config, adapter=True),
    )
    for line in _described(config, found):
        say(line)
    for line in _gpu_lines(config, found, gpus_per_node=gpus_per_node):
        say(line)
    for line in _assumptions(hardware, has_gpus=has_gpus):
        say(line)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    say("everything fits")


def specs_of(config: Config, *, adapter: bool = False) -> tuple[ParameterSpec, ...]:
    """Returns the parameters of the model, or of its adapter, from the model's config.json alone. Raises ConfigError if
    this file is missing or cannot be read, or, for the adapter, if the model lacks layers that `model.lora` names."""
    import torch

    if config.model.tiny is not None and not Path(config.model.path, "config.json").exists():
        raise ConfigError(
            f"model.path = {config.model.path}: the tiny model is not built yet; run `asyncrl model` with the same "
            "configuration"
        )
    directory = model_directory(config)
    if directory is not None and not (directory / "config.json").is_file():
        lacks = "has no config.json" if directory.is_dir() else "there is no such folder"
        raise ConfigError(f"model.path = {config.model.path}: {lacks}; {_ONLY_CONFIG}")
    try:
        model = model_without_weights(config.model.path, lora=config.model.lora if adapter else None)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"model.path = {config.model.path}: its config.json cannot be read ({reason}); {_ONLY_CONFIG}"
        ) from None
    return parameter_specs(model, dtype=getattr(torch, config.model.dtype))


def _described(config: Config, found: Plan) -> list[str]:
    learner, generator = config.learner, config.generator
    rows = [(line.place, _what(line), _gib(line.nbytes), line.memory) for line in found.lines]
    trained = "" if config.model.lora is None else f" and an adapter of {found.trained / 1e6:,.4g} million"
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"{found.parameters / 1e9:,.4g} billion parameters{trained}, {learner.ranks} ranks, {generator.replicas} "
        f"replicas of {generator.tensor_parallel_size} processes",
        f"a publication: {_gib(found.published_bytes)} in {config.model.dtype}; a rank copies and sends "
        f"{_gib(found.sent_bytes)}, and all of it is staged once on each node with replicas",
        "",
        "memory of each process:",
        *(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in rows),
        "",
        f"together, at most{'' if learner.gpus else ', without the activations of training'}:",
        *(f"  {line.place}: {_gib(line.nbytes)} of its {_where(line)}" for line in found.sums),
        "",
        *(f"{what} for {seconds * 1e3:,.4g} ms at each publication" for what, seconds in found.times),
        "",
    ]


def _gpu_lines(config: Config, found: Plan, *, gpus_per_node: int) -> Iterator[str]:
    """Yields the lines that only a plan with GPUs has: the number of GPUs and nodes, the room for the KV cache, the
    size of Ray's object store, and the measured error of the plan."""
    pools = gpu_pools(config)
    if not pools:
        return
    together = sum(count * gpus for count, gpus in pools.values())
    nodes = math.ceil(together / gpus_per_node)
    yield f"GPUs: {described_pools(config)}; together {together:g}, at least {nodes} node{'s' * (nodes != 1)}"
    if (cache := found.cache) is not None:
        yield (
            f"KV cache of an engine: about {_gib(cache.nbytes)} on each GPU, room for {cache.sequences:,.0f} sequences "
            f"of model.max_length = {config.model.max_length} tokens; a replica has {cache.asked:,} at once "
            "(max_concurrent_groups × group_size), and those without room wait"
        )
    if config.ray.address is not None and config.weights.transport in OVER_OBJECT_STORE:
        versions = stored_versions(config) * found.sent_bytes
        yield (
            f"Ray's object store on the learner's node: {_gib(versions)} for each rank on that node, and the rows; "
            "start Ray there with `ray start --object-store-memory BYTES`, and give /dev/shm as much"
        )
    yield (
        f"ranks have taken {MEASURED} times their sum on real GPUs (docs/gpu.md): leave room for fragments and "
        "libraries, or lower learner.micro_batch_tokens"
    )
    yield ""


def _what(line: Line) -> str:
    if line.processes is None:
        return line.what
    who = f"{line.processes} of the ranks" if line.place.startswith("rank") else "once a node"
    return f"{line.what} ({who})"


def _where(line: Line) -> str:
    return "memory" if line.memory == "node" else "GPU's memory"


def _assumptions(hardware: Hardware, *, has_gpus: bool) -> list[str]:
    lines = [f"assumed: {hardware.node_bytes / GIB:,.0f} GiB in a node (--node-gib)"]
    if has_gpus:
        lines.append(
            f"         {hardware.gpu_bytes / GIB:,.0f} GiB in a GPU (--gpu-gib), {hardware.gpus_per_node} GPUs in a "
            f"node (--gpus-per-node), {hardware.gpu_copy_speed / 1e9:g} GB/s to and from a GPU (not measured)"
        )
    here = f"measured here, for the time of a snapshot: a copy in memory, {hardware.copy_speed / 1e9:.1f} GB/s"
    return [*lines, *([] if has_gpus else [here]), ""]


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:,.1f} MiB"


def _copy_speed() -> float:
    """Returns the speed of a copy in this machine's memory by one thread, bytes per second. The plan derives from
    it how long training waits for a snapshot of the weights."""
    source, target = np.ones(COPIED_BYTES, dtype=np.uint8), np.ones(COPIED_BYTES, dtype=np.uint8)

    def seconds() -> float:
        started_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - started_s

    return COPIED_BYTES / min(seconds() for _ in range(3))  # of three, because other programs may slow a copy down
