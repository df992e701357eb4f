"""Which sample has which field, where, and which task has claimed it: the books behind every client. Pure.

No row is in here: `where` is whatever the client needs to find one. The partition's own order is that of the first put
of each sample. What must hold:

- a sample is claimed by a task at most once, and never before it has all the fields that the claim asks for;
- a claim has exactly the rows that were asked for, or none;
- clearing forgets a sample altogether: a later put of the same id is a new row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

W = TypeVar("W")


def group_of(sample_id: str) -> str:
    """The group that a sample belongs to: `7.0` of `7.0_g3`; an id of another form is a group of its own.

    >>> group_of("7.0_g3")
    '7.0'
    """
    group, _, number = sample_id.rpartition("_g")
    return group if group and number.isdecimal() else sample_id


def samples_of(group: str, *, count: int) -> list[str]:
    """Ids of a group's samples.

    >>> samples_of("7.0", count=2)
    ['7.0_g0', '7.0_g1']
    """
    return [f"{group}_g{i}" for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Rows that a task got. Lengths are None when the length of a row is not known."""

    sample_ids: list[str]
    sequence_lengths: list[int] | None
    tags: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Located(Generic[W]):
    """The place of each sample, by field, and the tokens of each sample; None where they are not known."""

    places: dict[str, list[W]]
    lengths: list[int | None]


@dataclass(slots=True, kw_only=True)
class _Row(Generic[W]):
    where: dict[str, W] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    length: int | None = None


@dataclass(slots=True, kw_only=True)
class _Partition(Generic[W]):
    fields: dict[str, None] = field(default_factory=dict)
    num_samples: int = 0
    group_size: int | None = None
    rows: dict[str, _Row[W]] = field(default_factory=dict)
    put: int = 0
    """Rows made since the registration, or since the partition was cleared as a whole."""
    unclaimed: dict[str, dict[str, None]] = field(default_factory=dict)
    """By task, in the partition's order: what is not here was claimed."""


class Partitions(Generic[W]):
    """The partitions of one data plane. One thread at a time."""

    def __init__(self) -> None:
        self._partitions: dict[str, _Partition[W]] = {}

    def register(
        self,
        partition_id: str,
        *,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        group_size: int | None,
    ) -> None:
        """Declares a partition, or adds to one: rows and cursors stay, a new task may claim what is there."""
        for name, value in (("num_samples", num_samples), ("grpo_group_size", group_size)):
            if value is not None and value < 1:
                raise ValueError(f"partition {partition_id!r}: {name} is {value}, it must be at least 1")
        partition = self._partitions.setdefault(partition_id, _Partition())
        partition.fields.update(dict.fromkeys(fields))
        partition.num_samples, partition.group_size = num_samples, group_size
        for task in consumer_tasks:
            partition.unclaimed.setdefault(task, dict.fromkeys(partition.rows))

    def check_registered(self, partition_id: str) -> None:
        """KeyError for a partition that was not registered."""
        self._partition(partition_id)

    def produce(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        *,
        fields: Sequence[str],
        where: Sequence[W],
        lengths: Sequence[int] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[W]:
        """Enters that `fields` of each sample are at `where[i]`, and registers the fields that are new.

        Returns the places that this replaced, a place a field.
        """
        partition = self._partition(partition_id)
        partition.fields.update(dict.fromkeys(fields))
        replaced: list[W] = []
        for i, sample_id in enumerate(sample_ids):
            row = partition.rows.get(sample_id)
            if row is None:
                row = partition.rows[sample_id] = _Row()
                partition.put += 1
                for unclaimed in partition.unclaimed.values():
                    unclaimed[sample_id] = None
            for name in fields:
                if name in row.where:
                    replaced.append(row.where[name])
                row.where[name] = where[i]
            if lengths is not None:
                row.length = lengths[i]
            if tags is not None:
                row.tags.update(tags[i])
        return replaced

    def claim(self, partition_id: str, task: str, *, fields: Sequence[str], batch_size: int) -> Claim | None:
        """The task's next rows, oldest first; None, and nothing changes, when fewer than `batch_size` are ready.

        In a partition with a group size, groups are handed out whole, in the order in which they are complete. A field
        that is not registered yet may still be put, so it only makes no row ready.
        """
        partition = self._partition(partition_id)
        size = partition.group_size or 1
        if batch_size < 1 or batch_size % size:
            raise ValueError(
                f"a batch of {batch_size} from partition {partition_id!r}: it must be a positive multiple of its "
                f"grpo_group_size, {size}"
            )
        unclaimed = self._unclaimed(partition_id, task)
        taken: list[str] = []
        for unit in self._ready(partition, unclaimed, fields=fields):
            taken.extend(unit)
            if len(taken) == batch_size:
                break
        else:
            return None
        for sample_id in taken:
            del unclaimed[sample_id]
        rows = [partition.rows[sample_id] for sample_id in taken]
        return Claim(sample_ids=taken, sequence_lengths=_lengths(rows), tags=[dict(row.tags) for row in rows])

    def ready(self, partition_id: str, task: str, *, fields: Sequence[str]) -> int:
        """Rows that the task could claim now."""
        partition = self._partition(partition_id)
        return sum(map(len, self._ready(partition, self._unclaimed(partition_id, task), fields=fields)))

    def locate(self, partition_id: str, sample_ids: Sequence[str], *, fields: Sequence[str]) -> Located[W]:
        """Where each of the fields of each of the samples is. KeyError names the first that is not there."""
        rows = self._rows(partition_id, sample_ids)
        places: dict[str, list[W]] = {}
        for name in fields:
            places[name] = []
            for sample_id, row in zip(sample_ids, rows, strict=True):
                if name not in row.where:
                    raise KeyError(
                        f"sample {sample_id!r} of partition {partition_id!r} has no field {name!r}; it has "
                        f"{sorted(row.where)}"
                    )
                places[name].append(row.where[name])
        return Located(places=places, lengths=[row.length for row in rows])

    def fields_of(self, partition_id: str, sample_ids: Sequence[str]) -> set[str]:
        """Fields that all these samples have. KeyError names the first sample that is not there."""
        rows = self._rows(partition_id, sample_ids)
        if not rows:
            return set(self._partition(partition_id).fields)
        return set(rows[0].where).intersection(*(row.where for row in rows[1:]))

    def lengths_of(self, partition_id: str, sample_ids: Sequence[str]) -> list[int] | None:
        """Tokens of each sample, None when one is not known. KeyError names the first sample that is not there."""
        return _lengths(self._rows(partition_id, sample_ids))

    def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        """Whether the tasks have claimed every row that is here, of at least `num_samples` that were put."""
        partition = self._partition(partition_id)
        left = [self._unclaimed(partition_id, task) for task in tasks]
        return partition.put >= partition.num_samples and not any(left)

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> list[W]:
        """Forgets samples (None: all, and how many there ever were); the places that they were at, one a field."""
        partition = self._partition(partition_id)
        if sample_ids is None:
            sample_ids = list(partition.rows)
            partition.put = 0
        released: list[W] = []
        for sample_id in sample_ids:
            row = partition.rows.pop(sample_id, None)
            if row is not None:
                released.extend(row.where.values())
                for unclaimed in partition.unclaimed.values():
                    unclaimed.pop(sample_id, None)
        return released

    def rows_outstanding(self) -> dict[str, int]:
        """Rows by partition."""
        return {partition_id: len(partition.rows) for partition_id, partition in self._partitions.items()}

    def _partition(self, partition_id: str) -> _Partition[W]:
        if partition_id not in self._partitions:
            raise KeyError(f"partition {partition_id!r} is not registered; there are {sorted(self._partitions)}")
        return self._partitions[partition_id]

    def _rows(self, partition_id: str, sample_ids: Sequence[str]) -> list[_Row[W]]:
        rows = self._partition(partition_id).rows
        for sample_id in sample_ids:
            if sample_id not in rows:
                raise KeyError(f"partition {partition_id!r} has no sample {sample_id!r}: never put, or cleared")
        return [rows[sample_id] for sample_id in sample_ids]

    def _unclaimed(self, partition_id: str, task: str) -> dict[str, None]:
        tasks = self._partition(partition_id).unclaimed
        if task not in tasks:
            raise ValueError(f"partition {partition_id!r} has no task {task!r}; registered are {sorted(tasks)}")
        return tasks[task]

    @staticmethod
    def _ready(partition: _Partition[W], unclaimed: Iterable[str], *, fields: Sequence[str]) -> Iterable[list[str]]:
        """What can be handed out together: single samples, or whole groups."""
        groups: dict[str, list[str]] = {}
        size = partition.group_size or 1
        for sample_id in unclaimed:
            where = partition.rows[sample_id].where
            if all(name in where for name in fields):
                group = groups.setdefault(group_of(sample_id) if size > 1 else sample_id, [])
                group.append(sample_id)
                if len(group) == size:
                    yield groups.pop(group_of(sample_id) if size > 1 else sample_id)


def _lengths(rows: Sequence[_Row[Any]]) -> list[int] | None:
    lengths = [row.length for row in rows if row.length is not None]
    return lengths if len(lengths) == len(rows) else None
