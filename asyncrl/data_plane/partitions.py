"""The index of the rows: which sample has which field, where it is stored, and which tasks have claimed it. Pure.

The index holds no rows. A row is found by its place: the row store of a node, and the key of an object there. The order
of a partition is the order of each sample's first put. Invariants:

- Clearing removes a sample completely: a later put of the same id creates a new row.
- An object of a row store is unused as soon as no field of any sample is in it, and never before. `take_unused` returns
  each unused object once.
- A task claims a sample at most once. A claim takes exactly the requested number of rows, or none.

`DataPlaneClient.claim_meta` and `check_consumption_status` need the claims. asyncrl's own runs call neither, because
the buffer decides which groups are trained.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncrl.data_plane.sample_ids import group_of


class StoredAt(NamedTuple):
    """The place of a row: row number `row` of object `key` in the row store `store`.

    `store` is empty if the rows are not in a row store. The index then never reports their objects as unused.
    """

    store: str
    key: str
    row: int


Address = tuple[str, str]
"""(row store, key) of an object."""


class ObjectRows(NamedTuple):
    """The samples of a call whose rows are in one object: sample number `samples[i]` is row `rows[i]` of the object."""

    samples: list[int]
    rows: list[int]


Places = dict[Address, ObjectRows]
"""The places of some samples, by object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The places of samples, by field, and the number of tokens of each sample (None if unknown). Fields that were put
    together share one `Places`, which is then sent once."""

    places: dict[str, Places]
    lengths: list[int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Rows that a task has claimed. `sequence_lengths` is None if the length of any row is unknown."""

    sample_ids: list[str]
    sequence_lengths: list[int] | None
    tags: list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class _Row:
    where: dict[str, StoredAt] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    length: int | None = None


@dataclass(slots=True, kw_only=True)
class _Partition:
    partition_id: str
    fields: set[str] = field(default_factory=set)
    rows: dict[str, _Row] = field(default_factory=dict)
    num_samples: int = 0
    group_size: int | None = None
    put: int = 0
    """Rows created since the registration, or since the whole partition was last cleared."""
    claims: dict[str, set[str]] = field(default_factory=dict)
    """The existing samples that each task has claimed."""

    def claimed(self, task: str) -> set[str]:
        """Returns the samples that the task has claimed. Raises ValueError for a task that is not registered."""
        if task not in self.claims:
            raise ValueError(
                f"partition {self.partition_id!r} has no task {task!r}; it has {sorted(self.claims)}; register the "
                "task first"
            )
        return self.claims[task]

    def ready(self, task: str, fields: Sequence[str]) -> list[str]:
        """Returns the samples with all these fields that the task may claim, oldest first. With a group size, returns
        complete groups only, in the order of their last samples."""
        claimed, needed = self.claimed(task), set(fields)
        free = [name for name, row in self.rows.items() if row.where.keys() >= needed and name not in claimed]
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


class Partitions:
    """The partitions of one data plane. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._partitions: dict[str, _Partition] = {}
        self._references: Counter[Address] = Counter()
        self._stores: set[str] = set()
        self._unused: dict[str, list[str]] = {}

    def register(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        group_size: int | None = None,
    ) -> None:
        """Declares a partition or extends one. Rows and claims stay. A new task may claim the existing rows."""
        for name, value in (("num_samples", num_samples), ("grpo_group_size", group_size)):
            if value is not None and value < 1:
                raise ValueError(f"partition {partition_id!r}: {name} is {value}, but must be at least 1")
        partition = self._partitions.setdefault(partition_id, _Partition(partition_id=partition_id))
        partition.fields.update(fields)
        partition.num_samples, partition.group_size = num_samples, group_size
        for task in consumer_tasks:
            partition.claims.setdefault(task, set())

    def produce(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        *,
        fields: Sequence[str],
        where: Sequence[StoredAt],
        lengths: Sequence[int] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int] | None:
        """Records that `fields` of sample i are at `where[i]`, and registers new fields.

        Returns the numbers of tokens of these samples, known from this put or an earlier one, as `lengths_of` does.
        """
        partition = self._partition(partition_id)
        partition.fields.update(fields)
        for place in where if fields else []:
            if place.store:
                self._stores.add(place.store)
                self._references[place.store, place.key] += len(fields)
        for i, sample_id in enumerate(sample_ids):
            if sample_id not in partition.rows:
                partition.rows[sample_id] = _Row()
                partition.put += 1
            row = partition.rows[sample_id]
            self._release(row.where[name] for name in fields if name in row.where)
            row.where.update(dict.fromkeys(fields, where[i]))
            if lengths is not None:
                row.length = lengths[i]
            if tags is not None:
                row.tags.update(tags[i])
        return self.lengths_of(partition_id, sample_ids)

    def locate(self, partition_id: str, sample_ids: Sequence[str], *, fields: Sequence[str]) -> Located:
        """Returns the place of each field of each sample. Raises KeyError, which names a missing sample or field."""
        rows = self._rows(partition_id, sample_ids)
        places: dict[str, Places] = {}
        found: list[tuple[list[StoredAt], Places]] = []
        for name in fields:
            try:
                stored = [row.where[name] for row in rows]
            except KeyError:
                sample_id, row = next(each for each in zip(sample_ids, rows, strict=True) if name not in each[1].where)
                raise KeyError(
                    f"sample {sample_id!r} of partition {partition_id!r} has no field {name!r}; it has "
                    f"{sorted(row.where)}"
                ) from None
            same = next((of_others for others, of_others in found if others == stored), None)
            places[name] = same or _places(stored)
            if same is None:
                found.append((stored, places[name]))
        return Located(places=places, lengths=[row.length for row in rows])

    def fields_of(self, partition_id: str, sample_ids: Sequence[str]) -> set[str]:
        """Returns the fields that all these samples have; without samples, the fields of the partition. Raises
        KeyError, which names the first missing sample, or the partition if it is not registered."""
        rows = self._rows(partition_id, sample_ids)
        if not rows:
            return set(self._partition(partition_id).fields)
        return set(rows[0].where).intersection(*(row.where for row in rows[1:]))

    def lengths_of(self, partition_id: str, sample_ids: Sequence[str]) -> list[int] | None:
        """Returns the number of tokens of each sample; None if any is unknown. Raises KeyError, which names the first
        missing sample."""
        rows = self._rows(partition_id, sample_ids)
        lengths = [row.length for row in rows if row.length is not None]
        return lengths if len(lengths) == len(rows) else None

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> list[str]:
        """Removes samples (None: all, and resets the count of rows). Returns the removed samples that had fields.

        Removing all samples also makes the objects unused that a writer stored in a row store, but never entered into
        the index with `produce`.
        """
        partition = self._partition(partition_id)
        if sample_ids is None:
            sample_ids = list(partition.rows)
            partition.put = 0
            for store in self._stores:
                self._unused.setdefault(store, []).append(f"{partition_id}/")
        removed = {name: partition.rows.pop(name) for name in sample_ids if name in partition.rows}
        for claimed in partition.claims.values():
            claimed.difference_update(removed)
        self._release(place for row in removed.values() for place in row.where.values())
        return [sample_id for sample_id, row in removed.items() if row.where]

    def sample_ids(self, partition_id: str) -> list[str]:
        """Returns the ids of the samples that exist; none if the partition is not registered."""
        return list(self._partitions[partition_id].rows) if partition_id in self._partitions else []

    def rows_outstanding(self) -> dict[str, int]:
        """Returns the number of existing rows of each partition."""
        return {partition_id: len(partition.rows) for partition_id, partition in self._partitions.items()}

    def take_unused(self) -> dict[str, list[str]]:
        """Returns the keys of the objects that became unused since the last call, by row store. A key that ends in "/"
        means all keys that begin with it."""
        unused, self._unused = self._unused, {}
        return unused

    # --- claims -------------------------------------------------------------------------------------------------

    def claim(self, partition_id: str, task: str, *, fields: Sequence[str], batch_size: int) -> Claim | None:
        """Claims the next rows that have these fields for the consumer `task`. If fewer than `batch_size` are ready,
        returns None and changes nothing. A field that is not registered may still be put, so no row is ready for it
        yet.

        Raises ValueError unless `batch_size` is a positive multiple of the group size.
        """
        partition = self._partition(partition_id)
        group_size = partition.group_size or 1
        if batch_size < 1 or batch_size % group_size:
            raise ValueError(
                f"cannot claim a batch of {batch_size} from partition {partition_id!r}: it must be a positive multiple "
                f"of its grpo_group_size, {group_size}"
            )
        taken = partition.ready(task, fields)[:batch_size]
        if len(taken) < batch_size:
            return None
        partition.claims[task].update(taken)
        tags = [dict(partition.rows[sample_id].tags) for sample_id in taken]
        return Claim(sample_ids=taken, sequence_lengths=self.lengths_of(partition_id, taken), tags=tags)

    def ready(self, partition_id: str, task: str, *, fields: Sequence[str]) -> int:
        """Returns the number of rows that the task could claim now."""
        return len(self._partition(partition_id).ready(task, fields))

    def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        """Returns True if each of the tasks has claimed every existing row, and at least `num_samples` rows were
        put."""
        partition = self._partition(partition_id)
        claimed = [partition.claimed(task).issuperset(partition.rows) for task in tasks]
        return all(claimed) and partition.put >= partition.num_samples

    # --- private ------------------------------------------------------------------------------------------------

    def _partition(self, partition_id: str) -> _Partition:
        if partition_id not in self._partitions:
            raise KeyError(
                f"partition {partition_id!r} is not registered; registered are {sorted(self._partitions)}; call "
                "register_partition first"
            )
        return self._partitions[partition_id]

    def _rows(self, partition_id: str, sample_ids: Sequence[str]) -> list[_Row]:
        rows = self._partition(partition_id).rows
        for sample_id in sample_ids:
            if sample_id not in rows:
                raise KeyError(f"partition {partition_id!r} has no sample {sample_id!r}: it was never put, or cleared")
        return [rows[sample_id] for sample_id in sample_ids]

    def _release(self, places: Iterable[StoredAt]) -> None:
        for store, key, _ in places:
            if store:
                self._references[store, key] -= 1
                if not self._references[store, key]:
                    del self._references[store, key]
                    self._unused.setdefault(store, []).append(key)


def _places(stored: Sequence[StoredAt]) -> Places:
    places: defaultdict[Address, ObjectRows] = defaultdict(lambda: ObjectRows([], []))
    for sample, (store, key, row) in enumerate(stored):
        of_object = places[store, key]
        of_object.samples.append(sample)
        of_object.rows.append(row)
    return dict(places)
