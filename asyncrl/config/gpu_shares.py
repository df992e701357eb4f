"""Rules for processes that share a GPU.

If a pool's `gpus` is below 1, Ray counts a share of a GPU for each process and does nothing else. Ray fills one GPU
with shares before it uses the next. It does not look at memory, and it does not know that NCCL refuses two ranks of one
group on the same GPU. So these rules assume that processes share a GPU whenever Ray may place them on the same GPU.
The exception is two pools whose node labels keep them on different nodes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from asyncrl.config.schema import Config, CriticSection, LearnerSection

# In floating point 1 - 0.8 is less than 0.2, so comparisons need a margin. Ray counts GPUs in steps of 1e-4, so that
# 1e-6 never hides a real difference.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Neighbours:
    """A set of processes that Ray may place on one GPU: some engines, and one rank of each section in `sections`.

    `left` is the share of the GPU, in Ray's counting, that the ranks leave to the engines.
    """

    engines: int
    sections: tuple[str, ...]
    left: float

    def words(self, config: Config) -> str:
        replicas = "a replica" if self.engines == 1 else f"{self.engines} replicas"
        ranks = [f"a rank of {section}.gpus = {_ranks(config)[section].gpus:g}" for section in self.sections]
        return " and ".join([f"{replicas} of generator.gpus = {config.generator.gpus:g}", *ranks])

    def taken(self, config: Config) -> float:
        """Returns the share of the GPU's memory that the engines take together."""
        return self.engines * config.generator.gpu_memory_utilization

    def most(self) -> float:
        """Returns the share of memory that each engine may take if the engines keep to their share of the GPU."""
        return self.left / self.engines

    def fix(self) -> str:
        return f"lower it to {math.floor(self.most() * 100 + _ROUNDING) / 100:g}, or raise generator.gpus"


def share_violations(config: Config) -> Iterator[str]:
    """Yields violations: shares that Ray cannot place, that NCCL refuses, or that need more memory than a GPU has."""
    ranks = _ranks(config)
    for name, gpus in [("generator", config.generator.gpus), *[(name, ranks[name].gpus) for name in ranks]]:
        if gpus > 1 and not gpus.is_integer():
            yield (
                f"{name}.gpus = {gpus}: Ray can share one GPU, but above 1 it takes whole GPUs only; set it to "
                f"{int(gpus)} or {int(gpus) + 1}"
            )
    for name, section in ranks.items():
        if (together := min(section.ranks, _fit(1.0, section.gpus))) > 1:
            yield (
                f"{name}.gpus = {section.gpus:g}: lets Ray place {together} of {name}.ranks = {section.ranks} on one "
                "GPU, but NCCL refuses two ranks of one group on the same GPU; set it to 1, or above 0.5 to share the "
                f"GPU with engines, or set {name}.ranks to 1"
            )
    worst = _narrowest(each for each in _neighbours(config) if _overfull(each, config))
    if worst is not None:
        yield (
            f"generator.gpu_memory_utilization = {config.generator.gpu_memory_utilization:g}: {worst.words(config)} "
            f"may share one GPU, and the engines would take {worst.taken(config):g} of its memory; {worst.fix()}"
        )


def share_warnings(config: Config) -> Iterator[str]:
    """Yields a warning if engines take more of a GPU's memory than the share that the ranks on it leave to them."""
    worst = _narrowest(each for each in _neighbours(config) if each.taken(config) > each.left + _ROUNDING)
    if worst is not None:
        yield (
            f"generator.gpu_memory_utilization = {config.generator.gpu_memory_utilization:g}: {worst.words(config)} "
            f"may share one GPU, and the engines take {worst.taken(config):g} of its memory: the process that starts "
            f"last may not find enough; {worst.fix()}"
        )


def _overfull(each: _Neighbours, config: Config) -> bool:
    """Returns whether the engines take more memory than the GPU has, or leave none to the ranks on it."""
    taken = each.taken(config)
    return taken > 1 + _ROUNDING or (bool(each.sections) and taken > 1 - _ROUNDING)


def _narrowest(neighbours: Iterator[_Neighbours]) -> _Neighbours | None:
    return min(neighbours, key=_Neighbours.most, default=None)


def _ranks(config: Config) -> dict[str, LearnerSection | CriticSection]:
    return {"learner": config.learner} | ({} if config.critic is None else {"critic": config.critic})


def _neighbours(config: Config) -> Iterator[_Neighbours]:
    """Yields the sets of processes that may share a GPU: first engines only, then engines with ranks."""
    generator = config.generator
    beside = {
        name: section.gpus
        for name, section in _ranks(config).items()
        if section.gpus > 0 and not _apart(section.node_labels, generator.node_labels)
    }
    for count in range(len(beside) + 1):
        for sections in combinations(beside, count):
            left = 1.0 - sum(beside[name] for name in sections)
            engines = min(generator.replicas, _fit(left, generator.gpus))
            if engines > 0:
                yield _Neighbours(engines=engines, sections=sections, left=left)


def _fit(left: float, gpus: float) -> int:
    """Returns how many processes with `gpus` each fit into `left`, a share of one GPU; 0 for processes on CPUs."""
    return int(max(0.0, left) / gpus + _ROUNDING) if gpus > 0 else 0


def _apart(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Returns whether node labels place two pools on different nodes.

    Values of Ray's label syntax (`in(a,b)`, `!c`) count as different nodes if their texts differ, even if both allow
    a common node. This errs towards accepting, so that no configuration that could run is refused.
    """
    return any(name in theirs and theirs[name] != value for name, value in ours.items())
