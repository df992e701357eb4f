"""A user's own client has only the calls of the interface document. Calls that asyncrl adds have defaults."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from asyncrl.data_plane.rows import TRAIN_PARTITION, Rows


class OwnClient(DataPlaneClient):
    """Keeps rows in a dictionary of this process. Its signatures are exactly those of the document."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
    ) -> None:
        pass

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        for i, sample_id in enumerate(sample_ids):
            row = self.rows.setdefault((partition_id, sample_id), {})
            row.update({name: column[i] for name, column in (fields or {}).items()})
        return KVBatchMeta(partition_id, None, list(sample_ids), list(fields or {}))

    def get_samples(
        self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]
    ) -> BatchedDataDict:
        found = [self.rows[partition_id, sample_id] for sample_id in sample_ids]
        return BatchedDataDict({name: torch.stack([row[name] for row in found]) for name in select_fields})

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
        return KVBatchMeta(partition_id, task_name, [sample_id for _, sample_id in self.rows][:batch_size])

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> BatchedDataDict:
        return self.get_samples(meta.sample_ids, meta.partition_id, select_fields or meta.fields or [])

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        return False

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        for key in list(self.rows):
            if key[0] == partition_id and (sample_ids is None or key[1] in sample_ids):
                del self.rows[key]

    def close(self) -> None:
        pass


def test_an_own_client_needs_only_the_calls_of_the_document_and_what_it_cannot_tell_is_not_known() -> None:
    client = OwnClient()
    client.put_samples(["a", "b"], "p", {"input_ids": torch.ones(2, 3), "input_lengths": torch.tensor([3, 1])})
    assert client.rows_outstanding() == {}
    assert client.fields_of(["a"], "p") is None
    assert client.lengths_of(["b", "a"], "p") == [1, 3]
    with pytest.raises(KeyError, match="zzz"):
        client.lengths_of(["zzz"], "p")


def test_groups_are_put_and_cleared_through_an_own_client() -> None:
    client = OwnClient()
    rows = Rows(Config.model_validate({"learner": {"group_size": 2}}), client=client)
    asyncio.run(rows.put({"0.0": BatchedDataDict(input_ids=torch.ones(2, 3))}))
    assert client.get_samples(["0.0_g1"], TRAIN_PARTITION, ["input_ids"])["input_ids"].tolist() == [[1, 1, 1]]
    asyncio.run(rows.clear(["0.0"]))
    assert not client.rows


def test_a_long_group_of_a_delivery_does_not_pad_the_others() -> None:
    stored: list[int] = []

    class Weighing(OwnClient):
        def put_samples(self, sample_ids: Any, partition_id: str, fields: Any = None, tags: Any = None) -> Any:
            stored.append(fields["input_ids"].numel())
            return super().put_samples(sample_ids, partition_id, fields, tags)

    client = Weighing()
    rows = Rows(Config.model_validate({"learner": {"group_size": 2}}), client=client)
    widths = {"0.0": 900, "1.0": 90_000, **{f"{i}.0": 1000 for i in range(2, 40)}, "40.0": 970}
    asyncio.run(rows.put({key: BatchedDataDict(input_ids=torch.ones(2, width)) for key, width in widths.items()}))
    assert {key[1] for key in client.rows} == {f"{key}_g{i}" for key in widths for i in range(2)}
    assert len(stored) == 2
    assert sum(stored) <= 1.1 * 2 * sum(widths.values())


def test_lengths_are_not_known_when_an_own_client_tells_that_rows_lack_the_column() -> None:
    class Telling(OwnClient):
        def fields_of(self, sample_ids: Sequence[str], partition_id: str) -> set[str] | None:
            return set.intersection(*(set(self.rows[partition_id, sample_id]) for sample_id in sample_ids))

    client = Telling()
    client.put_samples(["a"], "p", {"kept": torch.ones(1)})
    assert client.lengths_of(["a"], "p") is None


def test_a_client_that_reads_rows_by_their_meta_also_reads_them_by_name() -> None:
    class ByMeta(OwnClient):
        get_samples = DataPlaneClient.get_samples  # type: ignore[assignment]

        def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> BatchedDataDict:
            found = [self.rows[meta.partition_id, sample_id] for sample_id in meta.sample_ids]
            return BatchedDataDict({name: torch.stack([row[name] for row in found]) for name in meta.fields or []})

    client = ByMeta()
    client.put_samples(["a", "b"], "p", {"kept": torch.tensor([1, 2]), "other": torch.zeros(2)})
    assert client.get_samples(["b", "a"], "p", ["kept"])["kept"].tolist() == [2, 1]
