"""Rules over what shares a GPU.

A pool's `gpus` below 1 is a share in Ray's books and nothing more: Ray fills one GPU with shares before it takes the
next, and looks neither at memory nor at NCCL, which has one rank of a group on a GPU and no more. So these rules take
all for neighbours that Ray may make neighbours, but pools that a node label keeps apart.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from asyncrl.config.schema import Config, CriticSection, LearnerSection

# As floats, 1 - 0.8 is less than 0.2; Ray counts in ten-thousandths.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Neighbours:
    """Engines that Ray may put on one GPU, beside a rank of each of `sections`, and the share that those leave them."""

    engines: int
    sections: tuple[str, ...]
    left: float

    def words(self, config: Config) -> str:
        replicas = "a replica" if self.engines == 1 else f"{self.engines} replicas"
        ranks = [f"a rank of {section}.gpus = {_ranks(config)[section].gpus:g}" for section in self.sections]
        return " and ".join([f"{replicas} of generator.gpus = {config.generator.gpus:g}", *ranks])

    def taken(self, config: Config) -> float:
        """The engines' part of the GPU's memory."""
        return self.engines * config.generator.gpu_memory_utilization

    def most(self) -> float:
        """Of the memory, for each engine, if the engines take no more than their share of the GPU."""
        return self.left / self.engines

    def mend(self) -> str:
        return f"lower it to {math.floor(self.most() * 100 + _ROUNDING) / 100:g}, or raise generator.gpus"


def share_violations(config: Config) -> Iterator[str]:
    """What Ray does not place, what NCCL refuses, and what no GPU's memory holds."""
    ranks = _ranks(config)
    for name, gpus in [("generator", config.generator.gpus), *[(name, ranks[name].gpus) for name in ranks]]:
        if gpus > 1 and not gpus.is_integer():
            yield (
                f"{name}.gpus = {gpus}: Ray shares one GPU, and of more it has whole ones only; take {int(gpus)} or "
                f"{int(gpus) + 1}"
            )
    for name, section in ranks.items():
        if (together := min(section.ranks, _fit(1.0, section.gpus))) > 1:
            yield (
                f"{name}.gpus = {section.gpus:g}: lets Ray put {together} of {name}.ranks = {section.ranks} on one "
                "GPU, and NCCL refuses two ranks of a group there; take 1, or more than 0.5 to share it with engines, "
                f"or {name}.ranks = 1"
            )
    worst = _narrowest(each for each in _neighbours(config) if _overfull(each, config))
    if worst is not None:
        yield (
            f"generator.gpu_memory_utilization = {config.generator.gpu_memory_utilization:g}: {worst.words(config)} "
            f"may share one GPU, of whose memory the engines would take {worst.taken(config):g}; {worst.mend()}"
        )


def share_warnings(config: Config) -> Iterator[str]:
    """Engines that leave the ranks beside them a smaller part of the memory than of the GPU."""
    worst = _narrowest(each for each in _neighbours(config) if each.taken(config) > each.left + _ROUNDING)
    if worst is not None:
        yield (
            f"generator.gpu_memory_utilization = {config.generator.gpu_memory_utilization:g}: {worst.words(config)} "
            f"may share one GPU, of whose memory the engines take {worst.taken(config):g}: whoever comes second may "
            f"not find enough; {worst.mend()}"
        )


def _overfull(each: _Neighbours, config: Config) -> bool:
    """Whether the engines take more than there is, or leave ranks nothing."""
    taken = each.taken(config)
    return taken > 1 + _ROUNDING or (bool(each.sections) and taken > 1 - _ROUNDING)


def _narrowest(neighbours: Iterator[_Neighbours]) -> _Neighbours | None:
    return min(neighbours, key=_Neighbours.most, default=None)


def _ranks(config: Config) -> dict[str, LearnerSection | CriticSection]:
    return {"learner": config.learner} | ({} if config.critic is None else {"critic": config.critic})


def _neighbours(config: Config) -> Iterator[_Neighbours]:
    """Engines by themselves first, then with ranks beside them."""
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
    """How many processes of `gpus` each have room in what is left of one GPU; none for those on CPUs."""
    return int(max(0.0, left) / gpus + _ROUNDING) if gpus > 0 else 0


def _apart(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Whether labels send two pools to different nodes. Of Ray's words (`in(a,b)`, `!c`) two that differ count as such:
    what they allow in common is not looked for, so that nothing is refused that could run."""
    return any(name in theirs and theirs[name] != value for name, value in ours.items())
