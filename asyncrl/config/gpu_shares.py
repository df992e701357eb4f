"""Rules for processes that share a GPU.

If a pool's `gpus` is below 1, Ray counts a share of a GPU for each process and does nothing else. Ray fills one GPU
with shares before it uses the next. It does not look at memory, and it does not know that NCCL refuses two ranks of one
group on the same GPU. So these rules assume that processes share a GPU whenever Ray may place them on the same GPU.
The exception is two pools whose node labels keep them on different nodes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from asyncrl.config.schema import Config

# In floating point 1 - 0.8 is less than 0.2, so comparisons need a margin. Ray counts GPUs in steps of 1e-4, so that
# 1e-6 never hides a real difference.
_ROUNDING = 1e-6


def share_violations(config: Config) -> Iterator[str]:
    """Yields violations: shares that Ray cannot place, that NCCL refuses, or that need more memory than a GPU has."""
    pools = config.rank_pools()
    for name, gpus in {"generator": config.generator.gpus, **{name: pool.gpus for name, pool in pools.items()}}.items():
        if gpus > 1 and not gpus.is_integer():
            yield (
                f"{name}.gpus = {gpus}: Ray can share one GPU, but above 1 it takes whole GPUs only; set it to "
                f"{int(gpus)} or {int(gpus) + 1}"
            )
    for name, pool in pools.items():
        if (together := min(pool.ranks, _fit(1.0, pool.gpus))) > 1:
            yield (
                f"{name}.gpus = {pool.gpus:g}: lets Ray place {together} of {name}.ranks = {pool.ranks} on one "
                "GPU, but NCCL refuses two ranks of one group on the same GPU; set it to 1, or above 0.5 to share the "
                f"GPU with engines, or set {name}.ranks to 1"
            )
    generator = config.generator
    engines = min(generator.replicas, _fit(1.0, generator.gpus))
    if engines * generator.gpu_memory_utilization > 1 + _ROUNDING:
        yield _too_much(config, engines, beside=(), left=1.0)


def share_warnings(config: Config) -> Iterator[str]:
    """Yields a warning if engines take more of a GPU's memory than the share that the ranks on it leave to them. If
    several sets of ranks do so, the warning is about the one that leaves least to each engine."""
    generator = config.generator
    pools = {
        name: pool.gpus
        for name, pool in config.rank_pools().items()
        if pool.gpus > 0 and not _apart(pool.node_labels, generator.node_labels)
    }
    found = []
    for beside in (names for count in range(1, len(pools) + 1) for names in combinations(pools, count)):
        left = 1.0 - sum(pools[name] for name in beside)
        engines = min(generator.replicas, _fit(left, generator.gpus))
        if engines and engines * generator.gpu_memory_utilization > left + _ROUNDING:
            found.append((left / engines, _too_much(config, engines, beside=beside, left=left)))
    if found:
        yield min(found)[1]


def _too_much(config: Config, engines: int, *, beside: Sequence[str], left: float) -> str:
    """Returns the message about engines that take more than `left` of the memory of a GPU that they share with one rank
    of each pool in `beside`."""
    generator, pools = config.generator, config.rank_pools()
    taken, most = engines * generator.gpu_memory_utilization, math.floor(left / engines * 100 + _ROUNDING) / 100
    words = "a replica" if engines == 1 else f"{engines} replicas"
    sharing = [f"{words} of generator.gpus = {generator.gpus:g}"]
    sharing += [f"a rank of {name}.gpus = {pools[name].gpus:g}" for name in beside]
    return (
        f"generator.gpu_memory_utilization = {generator.gpu_memory_utilization:g}: {' and '.join(sharing)} may share "
        f"one GPU, and the engines take {taken:g} of its memory: the process that starts last may not find enough; "
        f"lower it to {most:g}, or raise generator.gpus"
    )


def _fit(left: float, gpus: float) -> int:
    """Returns how many processes with `gpus` each fit into `left`, a share of one GPU; 0 for processes on CPUs."""
    return int(max(0.0, left) / gpus + _ROUNDING) if gpus > 0 else 0


def _apart(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Returns whether node labels place two pools on different nodes.

    Values of Ray's label syntax (`in(a,b)`, `!c`) count as different nodes if their texts differ, even if both allow
    a common node. This errs towards accepting, so that no configuration that could run is refused.
    """
    return any(name in theirs and theirs[name] != value for name, value in ours.items())
