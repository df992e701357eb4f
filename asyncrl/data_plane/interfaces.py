"""Rows by name: `KVBatchMeta` names rows without holding them, and `DataPlaneClient` moves them.

A row is one sample, with the id `<group>.<attempt>_g<i>`. A field is one of its columns. A partition is a set of rows
with fields and consumer tasks. The first put of an undeclared field registers it. A row is ready for a task when all
fields that the task needs were put. No call marks a field as consumed.

    client.register_partition("train", fields, 64, ["train"])
    meta = client.put_samples(ids, "train", fields={"input_ids": ids_BS, "input_lengths": lengths_B})
    client.put_samples(ids, "train", fields={"advantages": advantages_BS})
    meta = client.claim_meta("train", "train", ["input_ids", "advantages"], batch_size=64)
    batch = client.get_data(meta)
    client.clear_samples(meta.sample_ids, "train")

Every client guarantees:

- Readers see all of a put or nothing. The last put of a (sample, field) wins, so that a put without an answer may be
  repeated.
- A row goes to each task at most once.
- Every wait ends at a deadline.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from asyncrl.data.batched_data_dict import BatchedDataDict

PAD_SEQLEN = "global_forward_pad_seqlen"
"""Key in `extra_info`: the width (tokens) to which all ranks pad every per-token column of the step."""
CUT_KEYS = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")
"""Keys in `extra_info`: how these rows, in this order, are cut into micro-batches."""
LENGTHS_FIELD = "input_lengths"
"""The column [B] with the number of tokens of each row. The per-token columns of a put end at its lengths."""


@dataclass
class KVBatchMeta:
    """Names rows of one partition. Every method except `stamp_tags` returns a copy that shares nothing with this one.

    `sequence_lengths` (tokens) and `tags` (a dict of scalars) have one entry for each of `sample_ids`; otherwise
    ValueError is raised. `extra_info` describes the whole batch. Its width `PAD_SEQLEN`, if it is stamped, is at least
    the length of every row, also after `concat`. The cut into micro-batches (`CUT_KEYS`) is kept only while the rows
    and their order stay the same.
    """

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        for name, column in (("sequence_lengths", self.sequence_lengths), ("tags", self.tags)):
            if column is not None and len(column) != len(self.sample_ids):
                raise ValueError(
                    f"KVBatchMeta: {len(column)} {name} for {len(self.sample_ids)} sample_ids: they must align 1:1"
                )

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.sample_ids)

    def subset(self, indices: Sequence[int]) -> Self:
        """Returns the rows `indices`, in that order. Raises IndexError for an index beyond the batch."""
        rows = [int(i) for i in indices]
        return self._with_rows(
            [self.sample_ids[i] for i in rows],
            sequence_lengths=None if self.sequence_lengths is None else [self.sequence_lengths[i] for i in rows],
            tags=None if self.tags is None else [self.tags[i] for i in rows],
        )

    def slice(self, start: int, stop: int) -> Self:
        """Returns the rows from `start` to `stop` − 1, with the rules of list slices."""
        return self.subset(range(self.size)[start:stop])

    def drop(self, indices: Sequence[int]) -> Self | None:
        """Returns the other rows, in order; None if none is left. Raises IndexError for an index beyond the batch."""
        everything = range(self.size)
        dropped = {everything[int(i)] for i in indices}
        kept = [i for i in everything if i not in dropped]
        return self.subset(kept) if kept else None

    def concat(self, *others: KVBatchMeta) -> Self:
        """Returns these rows followed by the rows of `others`. Raises ValueError unless all are in one partition.

        Lengths and tags become None if an input lacks them. `fields` are the fields that every input names, or None if
        an input has None. If an input has a stamped width (`PAD_SEQLEN`), the result has the largest stamp or the
        longest row, whichever is larger. It has no stamp if an input has neither a stamp nor lengths. Any other entry
        of `extra_info` is dropped if two inputs contradict each other.
        """
        sides: list[KVBatchMeta] = [self, *others]
        partitions = sorted({side.partition_id for side in sides})
        if len(partitions) > 1:
            raise ValueError(
                f"KVBatchMeta.concat: the rows are in the partitions {partitions}, but must be in one partition"
            )
        fields: list[str] | None = None
        if all(side.fields is not None for side in sides):
            fields = [name for name in self.fields or [] if all(name in (side.fields or []) for side in others)]
        joined = self._with_rows(
            [sample_id for side in sides for sample_id in side.sample_ids],
            sequence_lengths=None
            if any(side.sequence_lengths is None for side in sides)
            else [length for side in sides for length in side.sequence_lengths or []],
            tags=None if any(side.tags is None for side in sides) else [tag for s in sides for tag in s.tags or []],
        )
        joined.fields = fields
        cut = {key: value for key, value in joined.extra_info.items() if key in CUT_KEYS}
        joined.extra_info = {**_agreed([side.extra_info for side in sides]), **_joint_stamp(sides), **cut}
        return joined

    def with_fields(self, field_names: Sequence[str]) -> Self:
        """Returns a copy whose `fields` also contain these names."""
        named = self.slice(0, self.size)
        named.fields = list(dict.fromkeys([*(self.fields or []), *field_names]))
        return named

    def stamp_tags(self, scalars: Mapping[str, Sequence[Any]]) -> None:
        """Writes `scalars[name][i]` to the tags of row i, in place. Raises ValueError for a column of another
        length."""
        for name, values in scalars.items():
            if len(values) != self.size:
                raise ValueError(f"KVBatchMeta.stamp_tags: {len(values)} values of {name!r} for {self.size} rows")
        if self.tags is None:
            self.tags = [{} for _ in self.sample_ids]
        for name, values in scalars.items():
            for tag, value in zip(self.tags, values, strict=True):
                tag[name] = value

    def _with_rows(
        self, sample_ids: list[str], *, sequence_lengths: list[int] | None, tags: list[dict[str, Any]] | None
    ) -> Self:
        same_rows = sample_ids == self.sample_ids
        kept = {key: value for key, value in self.extra_info.items() if same_rows or key not in CUT_KEYS}
        return replace(
            self,
            sample_ids=sample_ids,
            fields=None if self.fields is None else list(self.fields),
            sequence_lengths=sequence_lengths,
            extra_info=copy.deepcopy(kept),
            tags=None if tags is None else [copy.deepcopy(tag) for tag in tags],
        )


def _joint_stamp(sides: Sequence[KVBatchMeta]) -> dict[str, int]:
    """Returns the entry `PAD_SEQLEN` of `extra_info` with a width that covers the rows of all `sides`. Returns an empty
    dict if no side has a stamped width, or if the length of any side's rows is unknown."""
    stamps = [side.extra_info[PAD_SEQLEN] for side in sides if PAD_SEQLEN in side.extra_info]
    covered = all(not side.size or PAD_SEQLEN in side.extra_info or side.sequence_lengths is not None for side in sides)
    if not stamps or not covered:
        return {}
    return {PAD_SEQLEN: max([*stamps, *(length for side in sides for length in side.sequence_lengths or [])])}


def _agreed(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entries that no two of `infos` contradict, without `PAD_SEQLEN` and `CUT_KEYS`, which depend on the
    rows."""
    union: dict[str, Any] = {}
    for info in infos:
        union.update({key: info[key] for key in info if key not in union and key not in (PAD_SEQLEN, *CUT_KEYS)})
    return copy.deepcopy(
        {key: value for key, value in union.items() if all(info.get(key, value) == value for info in infos)}
    )


class DataPlaneClient(ABC):
    """One process's access to the rows. Its calls block, and several threads may make them.

    Errors: KeyError for a partition that is not registered, and for a row or field that was never produced or has been
    cleared. ValueError for arguments that contradict each other, and for a task that is not registered. TimeoutError
    after a deadline. ActorGone when a process that keeps rows or their index is dead. RunError after `close`.

    Your own client implements the abstract calls. It may omit the keyword `pad_value_dict`: asyncrl passes it only if
    the caller has given one.
    """

    @abstractmethod
    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
    ) -> None:
        """Declares a partition. A repeated call adds fields and tasks, and replaces `num_samples` and
        `grpo_group_size`. Rows stay, and so do the claims of each task.

        `num_samples` is the number of rows that must be put before `check_consumption_status` returns True. With
        `grpo_group_size`, claims return complete groups of that many samples.
        """

    @abstractmethod
    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Adds columns, tags or both to rows. Creates the rows that do not exist yet.

        The first dimension of a column is the rows. A column is a tensor or array [B] or [B, S, …], a list, or the
        result of `codec.encode`. A per-token column ends at the row's `input_lengths`, which may come from this put or
        from another one. A row without `input_lengths` is kept whole. The last put of a (sample, field) wins. Tags are
        merged. A new field is registered. Raises ValueError for a repeated sample, for a column of another length, and
        if neither fields nor tags are given.

        The `sequence_lengths` of the returned meta are None if the length of any of these rows is unknown after this
        put.
        """

    def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        """Returns these fields of these rows, in this order, right-padded to the longest row.

        The pad value is the field's entry in `pad_value_dict` or `codec.PAD_VALUES`, else 0. Raises KeyError, which
        names a missing row or field.

        This default calls `get_data`.
        """
        padding: dict[str, Any] = {} if pad_value_dict is None else {"pad_value_dict": pad_value_dict}
        return self.get_data(KVBatchMeta(partition_id, None, list(sample_ids), list(select_fields)), **padding)

    @abstractmethod
    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """Claims the next `batch_size` rows that have all these fields and that this task has not claimed, oldest
        first.

        A claim also waits for a field that is not registered, because a put may register it.

        All ranks share the claims of the task, so that a row goes to only one rank. `dp_rank` is stored in
        `extra_info`. If there are fewer rows, a blocking claim waits, and raises TimeoutError with the number of ready
        rows after `timeout_s`. A claim that does not block returns an empty meta. Both claim nothing in this case.
        """

    @abstractmethod
    def get_data(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        """Returns the rows that `meta` names, like `get_samples`; its own fields unless `select_fields` is given.

        Pads to `extra_info["global_forward_pad_seqlen"]` if it is stamped. Raises ValueError for a longer row, and if
        neither `select_fields` nor `meta` names fields.
        """

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Returns True if each task has claimed every existing row, and at least `num_samples` rows were ever put.

        Rows that were cleared before a task claimed them do not count as missing.
        """

    @abstractmethod
    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Drops these rows, or all rows (None). Dropping all also starts the count for `num_samples` again.

        Ignores rows that do not exist. The partition stays registered.
        """

    def fields_of(self, sample_ids: Sequence[str], partition_id: str) -> set[str] | None:
        """Returns the fields that all these rows have; without rows, the fields of the partition. Fetches no rows.

        Raises KeyError for a row that was never put or has been cleared. Returns None if the client cannot tell. This
        default returns None.
        """
        return None

    def lengths_of(self, sample_ids: Sequence[str], partition_id: str) -> list[int] | None:
        """Returns the number of tokens of each of these rows (`input_lengths`); None if a row has no length. Raises
        KeyError like `fields_of`.

        This default reads the column. The clients of asyncrl look in their index and fetch no rows.
        """
        fields = self.fields_of(sample_ids, partition_id)
        if fields is not None and LENGTHS_FIELD not in fields:
            return None
        return [int(length) for length in self.get_samples(sample_ids, partition_id, [LENGTHS_FIELD])[LENGTHS_FIELD]]

    def sample_ids(self, partition_id: str) -> list[str]:
        """Returns the ids of the samples that were put and not cleared; none if the partition is not registered. This
        default returns none, for clients that do not list them."""
        return []

    def rows_outstanding(self) -> dict[str, int]:
        """Returns the number of rows, by partition, that were put and not cleared. A gauge shows them. This default
        returns an empty dict, for clients that do not count."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Releases the resources of this client. Rows stay, unless they are in this process. It may be called again."""
