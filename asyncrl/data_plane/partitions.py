"""The index behind every client ("the books"): which sample has which field, where it is, and which tasks have claimed
it. Pure.

It holds no rows: `where` is any value with which the client finds a row. The order of a partition is the order of each
sample's first put. Invariants:

- A task claims a sample at most once, and only when the sample has all fields of the claim.
- A claim returns exactly the requested number of rows, or none.
- Clearing removes a sample completely: a later put of the same id creates a new row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

W = TypeVar("W")


def group_of(sample_id: str) -> str:
    """Returns the group of a sample: `7.0` for `7.0_g3`. A sample id of another form is a group of its own.

    >>> group_of("7.0_g3")
    '7.0'
    """
    group, _, number = sample_id.rpartition("_g")
    return group if group and number.isdecimal() else sample_id


def samples_of(group: str, *, count: int) -> list[str]:
    """Returns the ids of a group's samples.

    >>> samples_of("7.0", count=2)
    ['7.0_g0', '7.0_g1']
    """
    return [f"{group}_g{i}" for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Rows that a task has claimed. `sequence_lengths` is None if the length of any row is unknown."""

    sample_ids: list[str]
    sequence_lengths: list[int] | None
    tags: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Located(Generic[W]):
    """The place of each sample, by field, and the tokens of each sample (None if unknown)."""

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
    """Rows created since the registration, or since the whole partition was last cleared."""
    unclaimed: dict[str, dict[str, None]] = field(default_factory=dict)
    """For each task, its unclaimed samples in the partition's order. A sample that is not here was claimed."""


class Partitions(Generic[W]):
    """The partitions of one data plane. Only one thread may use it at a time."""

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
        """Declares a partition or extends one. Rows and cursors stay. A new task may claim the existing rows."""
        for name, value in (("num_samples", num_samples), ("grpo_group_size", group_size)):
            if value is not None and value < 1:
                raise ValueError(f"partition {partition_id!r}: {name} is {value}, but must be at least 1")
        partition = self._partitions.setdefault(partition_id, _Partition())
        partition.fields.update(dict.fromkeys(fields))
        partition.num_samples, partition.group_size = num_samples, group_size
        for task in consumer_tasks:
            partition.unclaimed.setdefault(task, dict.fromkeys(partition.rows))

    def check_registered(self, partition_id: str) -> None:
        """Raises KeyError if the partition is not registered."""
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
        """Records that `fields` of sample i are at `where[i]`, and registers new fields.

        Returns the replaced places, one for each replaced field.
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
        """Claims the task's next rows, oldest first. If fewer than `batch_size` are ready, returns None and changes
        nothing.

        In a partition with a group size, groups are claimed whole, in the order in which they become complete. A field
        that is not registered may still be put, so no row is ready for it yet.
        """
        partition = self._partition(partition_id)
        size = partition.group_size or 1
        if batch_size < 1 or batch_size % size:
            raise ValueError(
                f"cannot claim a batch of {batch_size} from partition {partition_id!r}: it must be a positive multiple "
                f"of its grpo_group_size, {size}"
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
        """Returns the number of rows that the task could claim now."""
        partition = self._partition(partition_id)
        return sum(map(len, self._ready(partition, self._unclaimed(partition_id, task), fields=fields)))

    def locate(self, partition_id: str, sample_ids: Sequence[str], *, fields: Sequence[str]) -> Located[W]:
        """Returns the place of each field of each sample. Raises KeyError, which names the first missing one."""
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
        """Returns the fields that all these samples have. Raises KeyError, which names the first missing sample."""
        rows = self._rows(partition_id, sample_ids)
        if not rows:
            return set(self._partition(partition_id).fields)
        return set(rows[0].where).intersection(*(row.where for row in rows[1:]))

    def lengths_of(self, partition_id: str, sample_ids: Sequence[str]) -> list[int] | None:
        """Returns the tokens of each sample; None if any is unknown. Raises KeyError, which names the first missing
        sample."""
        return _lengths(self._rows(partition_id, sample_ids))

    def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        """Returns True if the tasks have claimed every existing row, and at least `num_samples` rows were put."""
        partition = self._partition(partition_id)
        left = [self._unclaimed(partition_id, task) for task in tasks]
        return partition.put >= partition.num_samples and not any(left)

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> list[W]:
        """Removes samples (None: all, and resets the count of rows). Returns their places, one for each field."""
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
        """Returns the number of rows by partition."""
        return {partition_id: len(partition.rows) for partition_id, partition in self._partitions.items()}

    def _partition(self, partition_id: str) -> _Partition[W]:
        if partition_id not in self._partitions:
            raise KeyError(
                f"partition {partition_id!r} is not registered; registered are {sorted(self._partitions)}; call "
                "register_partition first"
            )
        return self._partitions[partition_id]

    def _rows(self, partition_id: str, sample_ids: Sequence[str]) -> list[_Row[W]]:
        rows = self._partition(partition_id).rows
        for sample_id in sample_ids:
            if sample_id not in rows:
                raise KeyError(f"partition {partition_id!r} has no sample {sample_id!r}: it was never put, or cleared")
        return [rows[sample_id] for sample_id in sample_ids]

    def _unclaimed(self, partition_id: str, task: str) -> dict[str, None]:
        tasks = self._partition(partition_id).unclaimed
        if task not in tasks:
            raise ValueError(
                f"partition {partition_id!r} has no task {task!r}; it has {sorted(tasks)}; register the task first"
            )
        return tasks[task]

    @staticmethod
    def _ready(partition: _Partition[W], unclaimed: Iterable[str], *, fields: Sequence[str]) -> Iterable[list[str]]:
        """Yields the units that can be claimed: single samples, or whole groups."""
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
