"""Rules for processes that share a GPU.

If a pool's `gpus` is below 1, Ray counts a share of a GPU for each process and does nothing else. Ray fills one GPU
with shares before it uses the next. It does not look at memory, and it does not know that NCCL refuses two ranks of one
group on the same GPU. So these rules assume that processes share a GPU whenever Ray may place them on the same GPU.
The exception is two pools whose node labels keep them on different nodes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from asyncrl.config.schema import Config

# In floating point 1 - 0.8 is less than 0.2, so comparisons need a margin. Ray counts GPUs in steps of 1e-4, so that
# 1e-6 never hides a real difference.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Neighbours:
    """A set of processes that Ray may place on one GPU: some engines, and one rank of each of some pools.

    `taken` is the share of the GPU's memory that the engines take together. `left` is the share of the GPU, in Ray's
    counting, that the ranks leave to the engines. `most` is the share that each engine may take of that.
    """

    words: str
    taken: float
    left: float
    most: float

    def overfull(self) -> bool:
        """Returns whether the engines take more memory than the GPU has, or leave none to the ranks on it."""
        return self.taken > 1 + _ROUNDING or (self.left < 1 and self.taken > 1 - _ROUNDING)


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
    yield from _narrowest(config, _Neighbours.overfull, "would take {taken:g} of its memory")


def share_warnings(config: Config) -> Iterator[str]:
    """Yields a warning if engines take more of a GPU's memory than the share that the ranks on it leave to them."""
    yield from _narrowest(
        config,
        lambda each: each.taken > each.left + _ROUNDING,
        "take {taken:g} of its memory: the process that starts last may not find enough",
    )


def _narrowest(config: Config, is_problem: Callable[[_Neighbours], bool], problem: str) -> Iterator[str]:
    """Yields one message, about the neighbours with a problem whose engines have the least room; none without one."""
    worst = min(filter(is_problem, _neighbours(config)), key=lambda each: each.most, default=None)
    if worst is not None:
        yield (
            f"generator.gpu_memory_utilization = {config.generator.gpu_memory_utilization:g}: {worst.words} may share "
            f"one GPU, and the engines {problem.format(taken=worst.taken)}; lower it to "
            f"{math.floor(worst.most * 100 + _ROUNDING) / 100:g}, or raise generator.gpus"
        )


def _neighbours(config: Config) -> Iterator[_Neighbours]:
    """Yields the sets of processes that may share a GPU: first engines only, then engines with ranks."""
    generator = config.generator
    beside = {
        name: pool.gpus
        for name, pool in config.rank_pools().items()
        if pool.gpus > 0 and not _apart(pool.node_labels, generator.node_labels)
    }
    for count in range(len(beside) + 1):
        for names in combinations(beside, count):
            left = 1.0 - sum(beside[name] for name in names)
            engines = min(generator.replicas, _fit(left, generator.gpus))
            if engines > 0:
                words = "a replica" if engines == 1 else f"{engines} replicas"
                ranks = [f"a rank of {name}.gpus = {beside[name]:g}" for name in names]
                yield _Neighbours(
                    words=" and ".join([f"{words} of generator.gpus = {generator.gpus:g}", *ranks]),
                    taken=engines * generator.gpu_memory_utilization,
                    left=left,
                    most=left / engines,
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
