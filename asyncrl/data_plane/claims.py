"""Claims: which rows of a partition each consumer task has taken. Pure.

`DataPlaneClient.claim_meta` and `check_consumption_status` need this bookkeeping. asyncrl's own runs call neither,
because the buffer decides which groups are trained.

Invariants: a task claims a sample at most once. A claim takes exactly the requested number of rows, or none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.data_plane.sample_ids import group_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Rows that a task has claimed. `sequence_lengths` is None if the length of any row is unknown."""

    sample_ids: list[str]
    sequence_lengths: list[int] | None
    tags: list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Claims:
    """The claims of one partition. Errors name the partition."""

    partition_id: str
    num_samples: int = 0
    group_size: int | None = None
    put: int = 0
    """Rows created since the registration, or since the whole partition was last cleared."""
    claimed: dict[str, set[str]] = field(default_factory=dict)
    """The existing samples that each task has claimed."""

    def ready(self, task: str, having: Iterable[str]) -> list[str]:
        """Returns the samples that the task may claim, in order. `having` are the samples with all required fields,
        oldest first. With a group size, groups are whole, and come in the order in which they become complete.

        Raises ValueError for a task that is not registered.
        """
        claimed = self._of(task)
        free = [sample_id for sample_id in having if sample_id not in claimed]
        if self.group_size is None:
            return free
        ready: list[str] = []
        groups: dict[str, list[str]] = {}
        for sample_id in free:
            group = groups.setdefault(group_of(sample_id), [])
            group.append(sample_id)
            if len(group) == self.group_size:
                ready.extend(groups.pop(group_of(sample_id)))
        return ready

    def take(self, task: str, having: Iterable[str], *, batch_size: int) -> list[str] | None:
        """Claims the task's next samples. If fewer than `batch_size` are ready, returns None and changes nothing.

        Raises ValueError unless `batch_size` is a positive multiple of the group size.
        """
        if batch_size < 1 or batch_size % (self.group_size or 1):
            raise ValueError(
                f"cannot claim a batch of {batch_size} from partition {self.partition_id!r}: it must be a positive "
                f"multiple of its grpo_group_size, {self.group_size or 1}"
            )
        taken = self.ready(task, having)[:batch_size]
        if len(taken) < batch_size:
            return None
        self.claimed[task].update(taken)
        return taken

    def consumed(self, tasks: Sequence[str], rows: Iterable[str]) -> bool:
        """Returns True if the tasks have claimed every one of `rows`, and at least `num_samples` rows were put."""
        claimed = [self._of(task).issuperset(rows) for task in tasks]
        return all(claimed) and self.put >= self.num_samples

    def forget(self, sample_ids: Iterable[str]) -> None:
        """Forgets samples that were cleared. A later put of the same id may be claimed again."""
        for claimed in self.claimed.values():
            claimed.difference_update(sample_ids)

    def _of(self, task: str) -> set[str]:
        if task not in self.claimed:
            raise ValueError(
                f"partition {self.partition_id!r} has no task {task!r}; it has {sorted(self.claimed)}; register the "
                "task first"
            )
        return self.claimed[task]
