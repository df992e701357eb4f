"""Rows by name: `KVBatchMeta` names rows and holds none, `DataPlaneClient` moves them.

A row is one sample, `<group>.<attempt>_g<i>`; a field is one of its columns. A partition is a set of rows with fields
and consumer tasks. A field that was not declared is registered by its first put. Producing a field is the ready signal:
there is no other, and no call to mark one consumed.

    client.register_partition("train", fields, 64, ["train"])
    meta = client.put_samples(ids, "train", fields={"input_ids": ids_BS, "input_lengths": lengths_B})
    client.put_samples(ids, "train", fields={"advantages": advantages_BS})
    meta = client.claim_meta("train", "train", ["input_ids", "advantages"], batch_size=64)
    batch = client.get_data(meta)
    client.clear_samples(meta.sample_ids, "train")

What must hold on every client: a put is all or nothing for readers, and the last one of a (sample, field) wins, so that
a put whose answer was lost may be repeated; a row goes to each task once; every wait ends at a deadline.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from asyncrl.data.batched_data_dict import BatchedDataDict

PAD_SEQLEN = "global_forward_pad_seqlen"
"""In `extra_info`: tokens that every per-token column of the step is padded to, on all ranks."""
CUT_KEYS = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")
"""In `extra_info`: how these rows, in this order, are cut into micro-batches."""
LENGTHS_FIELD = "input_lengths"
"""The column [B] of tokens a row; in a put it says where the per-token columns of that put end."""


@dataclass
class KVBatchMeta:
    """Names rows of one partition. Every method but `stamp_tags` returns a copy that shares nothing with this one.

    `sequence_lengths` (tokens) and `tags` (a dict of scalars a row) align with `sample_ids`, or ValueError.
    `extra_info` is about the whole batch. The stamped width covers every row, also after `concat`. The cut into
    micro-batches (`CUT_KEYS`) stays only as long as the rows and their order do.
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
        """Rows named."""
        return len(self.sample_ids)

    def subset(self, indices: Sequence[int]) -> Self:
        """The rows `indices`, in that order. IndexError beyond the batch."""
        rows = [int(i) for i in indices]
        return self._with_rows(
            [self.sample_ids[i] for i in rows],
            sequence_lengths=None if self.sequence_lengths is None else [self.sequence_lengths[i] for i in rows],
            tags=None if self.tags is None else [self.tags[i] for i in rows],
        )

    def slice(self, start: int, stop: int) -> Self:
        """Rows start … stop − 1, as a list would cut them."""
        return self.subset(range(self.size)[start:stop])

    def drop(self, indices: Sequence[int]) -> Self | None:
        """The other rows, in order; None when none is left. IndexError beyond the batch."""
        everything = range(self.size)
        dropped = {everything[int(i)] for i in indices}
        kept = [i for i in everything if i not in dropped]
        return self.subset(kept) if kept else None

    def concat(self, *others: "KVBatchMeta") -> Self:
        """These rows, then the others'. ValueError unless all are of one partition.

        Lengths and tags become None if a side lacks them; `fields` are those that all sides have, None if a side names
        none. If a side has a stamped width, the result has the largest stamp or the longest row, whichever is larger;
        it has no stamp if a side has neither a stamp nor lengths. Any other entry of `extra_info` is dropped when two
        sides contradict each other.
        """
        sides: list[KVBatchMeta] = [self, *others]
        partitions = sorted({side.partition_id for side in sides})
        if len(partitions) > 1:
            raise ValueError(f"KVBatchMeta.concat: rows of partitions {partitions}: they must be of one")
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
        """A copy that names these fields too."""
        named = self.slice(0, self.size)
        named.fields = list(dict.fromkeys([*(self.fields or []), *field_names]))
        return named

    def stamp_tags(self, scalars: Mapping[str, Sequence[Any]]) -> None:
        """Writes `scalars[name][i]` to the tags of row i, in place. ValueError when a column has another length."""
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
        return type(self)(
            partition_id=self.partition_id,
            task_name=self.task_name,
            sample_ids=sample_ids,
            fields=None if self.fields is None else list(self.fields),
            sequence_lengths=sequence_lengths,
            extra_info=copy.deepcopy(kept),
            tags=None if tags is None else [copy.deepcopy(tag) for tag in tags],
        )


def _joint_stamp(sides: Sequence[KVBatchMeta]) -> dict[str, int]:
    """The stamped width of the rows of all sides, as an entry of `extra_info`; no entry when it cannot be known."""
    stamps = [side.extra_info[PAD_SEQLEN] for side in sides if PAD_SEQLEN in side.extra_info]
    covered = all(not side.size or PAD_SEQLEN in side.extra_info or side.sequence_lengths is not None for side in sides)
    if not stamps or not covered:
        return {}
    return {PAD_SEQLEN: max([*stamps, *(length for side in sides for length in side.sequence_lengths or [])])}


def _agreed(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Entries that no two of `infos` contradict, but for those that rows decide: the stamp and the cut."""
    union: dict[str, Any] = {}
    for info in infos:
        union.update({key: info[key] for key in info if key not in union and key not in (PAD_SEQLEN, *CUT_KEYS)})
    return copy.deepcopy(
        {key: value for key, value in union.items() if all(info.get(key, value) == value for info in infos)}
    )


class DataPlaneClient(ABC):
    """One process's access to the rows. Its calls are blocking and may be made from several threads.

    KeyError for a partition that was not registered, and for a row or field that was never produced or is cleared;
    ValueError for arguments that contradict each other, and for a task that was not registered; TimeoutError when an
    answer is late; ActorGone when a process that keeps rows or the books is dead. RunError after `close`.

    A client of your own implements the abstract calls. It may leave out the keyword `pad_value_dict`: asyncrl passes it
    only for a caller that gave one.
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
        """Declares a partition. Again: fields and tasks are added, the numbers replaced, rows and cursors stay.

        `num_samples`: rows that a round has, see `check_consumption_status`. With `grpo_group_size`, claims hand out
        whole groups of that many samples.
        """

    @abstractmethod
    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Adds columns, tags or both to rows; makes the rows that are new.

        Columns have rows first: tensors or arrays [B] and [B, S, …], lists, or what `codec.encode` made of them.
        Those with tokens end where `input_lengths` of the row says, which this put or another one brings; without it
        they are kept whole. The last put of a (sample, field) wins; tags are merged. A field that was not registered
        is registered. ValueError for a repeated sample, a column of another length, and neither fields nor tags.

        The meta has the `sequence_lengths` that are known after this put: of all rows, or None.
        """

    @abstractmethod
    def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        """These fields of these rows, in this order, right-padded to the longest row.

        Padding is 0, −1 in `weight_versions`, or what `pad_value_dict` says. KeyError names what is not there.
        """

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
        """The next `batch_size` rows that have all these fields and that this task has not claimed, oldest first.

        A field that is not registered is waited for like any other: a put may register it.

        All ranks share the task's cursor, so that a row goes to one of them; `dp_rank` is noted in `extra_info`. With
        fewer rows, a blocking claim waits, and raises TimeoutError after `timeout_s` with the number that is ready; one
        that does not block returns an empty meta. Either claims nothing then.
        """

    @abstractmethod
    def get_data(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        """`get_samples` of the rows that `meta` names, of its own fields unless told otherwise.

        Padded to `extra_info["global_forward_pad_seqlen"]` when it is stamped; ValueError for a row beyond it, and when
        neither names a field.
        """

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Whether each task has claimed every row that is there, and no fewer than `num_samples` were ever put.

        A row that was cleared before a task claimed it is not waited for.
        """

    @abstractmethod
    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Drops these rows, or all of them (None), which also begins the count of `num_samples` anew.

        What is not there is cleared already. The partition stays registered.
        """

    def fields_of(self, sample_ids: Sequence[str], partition_id: str) -> set[str] | None:
        """Fields that all these rows have; for no rows, the fields of the partition. No rows are fetched.

        KeyError for a row that was never put or is cleared. None when the client cannot tell, as here.
        """
        return None

    def lengths_of(self, sample_ids: Sequence[str], partition_id: str) -> list[int] | None:
        """Tokens of each of these rows, by their `input_lengths`; None when a row has none. KeyError as `fields_of`.

        Here the column is read. The clients of asyncrl ask their books, and fetch no rows.
        """
        fields = self.fields_of(sample_ids, partition_id)
        if fields is not None and LENGTHS_FIELD not in fields:
            return None
        return [int(length) for length in self.get_samples(sample_ids, partition_id, [LENGTHS_FIELD])[LENGTHS_FIELD]]

    def rows_outstanding(self) -> dict[str, int]:
        """Rows by partition that were put and not cleared: a gauge shows them. Empty when the client does not count
        them, as here."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Lets go of what this client holds. Rows stay, unless they live in this process. Idempotent."""
