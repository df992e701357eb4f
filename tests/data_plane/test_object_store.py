"""The data plane on row stores and Ray's object store, with a real Ray."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
import torch
from client_contract import IDS, ClientContract, Connect
from local_ray import end_actor, local_ray

from asyncrl.data_plane.object_store import OBJECT_BYTES, ObjectStoreClient
from asyncrl.data_plane.partitions import Partitions
from asyncrl.data_plane.row_store import Index, ensure_row_store
from asyncrl.errors import RowsLost

pytestmark = pytest.mark.integration

NAMESPACE = "plane"
TIMEOUT_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # Send this module's classes by value, because actors cannot import a test module.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with local_ray(cpus=2, namespace=NAMESPACE):
        yield


def connect_client() -> ObjectStoreClient:
    return ObjectStoreClient(namespace=NAMESPACE, timeout_s=TIMEOUT_S)


class Writer:
    """A process that puts rows and can be killed."""

    def put(self, partition: str, rows: torch.Tensor) -> int:
        connect_client().put_samples(IDS, partition, fields={"input_ids": rows})
        return os.getpid()


def stored(partition: str) -> int:
    """Returns how many objects of the partition this node's row store holds, by telling it to drop them."""
    store = ray.get_actor(ensure_row_store(namespace=NAMESPACE), namespace=NAMESPACE)
    # The index's actor calls the store too. A call to that actor makes sure that its earlier calls come first.
    Index(namespace=NAMESPACE, timeout_s=TIMEOUT_S).call(Partitions.rows_outstanding)
    count: int = ray.get(store.clear.remote([f"{partition}/"]), timeout=TIMEOUT_S)
    return count


class TestObjectStoreClient(ClientContract):
    @pytest.fixture
    def connect(self) -> Connect:
        return connect_client

    @pytest.mark.fault("F2")
    def test_rows_outlive_the_process_that_put_them(self, partition: str) -> None:
        writer = ray.remote(Writer).options(num_cpus=0).remote()
        rows_BS = torch.arange(4 * 50_000).reshape(4, 50_000)  # larger than what Ray sends inline
        process = psutil.Process(ray.get(writer.put.remote(partition, rows_BS), timeout=TIMEOUT_S))
        process.kill()
        process.wait(timeout=60)
        assert torch.equal(connect_client().get_samples(IDS, partition, ["input_ids"])["input_ids"], rows_BS)

    def test_large_groups_of_a_put_have_objects_of_their_own(self, partition: str) -> None:
        rows_BS = torch.zeros(4, OBJECT_BYTES // 8)  # 2 samples of a group in float32 fill one object
        connect_client().put_samples(IDS, partition, fields={"input_ids": rows_BS})
        assert stored(partition) == 2

    def test_small_groups_of_a_put_share_an_object(self, partition: str) -> None:
        client = connect_client()
        client.put_samples(IDS, partition, fields={"advantages": torch.arange(4.0), "input_lengths": torch.ones(4)})
        client.clear_samples(IDS[:3], partition)
        assert client.get_samples(IDS[3:], partition, ["advantages"])["advantages"].tolist() == [3.0]
        assert stored(partition) == 1

    def test_a_put_that_is_refused_stores_nothing(self, partition: str) -> None:
        with pytest.raises(KeyError, match="nowhere"):
            connect_client().put_samples(IDS, "nowhere", fields={"kept": [1] * 4})
        assert stored("nowhere") == 0

    def test_the_index_is_asked_once_whether_a_partition_is_registered(self, partition: str) -> None:
        asked: list[str] = []

        class Noted(Index):
            def call(self, method: Any, *arguments: Any, **options: Any) -> Any:
                if method is Partitions.fields_of:
                    asked.append(arguments[0])
                return super().call(method, *arguments, **options)

        index = Noted(namespace=NAMESPACE, timeout_s=TIMEOUT_S)
        client = ObjectStoreClient(namespace=NAMESPACE, timeout_s=TIMEOUT_S, index=index)
        for field in ("kept", "not declared"):
            client.put_samples(IDS, partition, fields={field: [1] * 4})
        for _ in range(2):
            with pytest.raises(KeyError, match="nowhere"):
                client.put_samples(IDS, "nowhere", fields={"kept": [1] * 4})
        assert asked == [partition, "nowhere", "nowhere"]

    def test_objects_are_dropped_when_their_last_row_is_cleared_or_replaced(self, partition: str) -> None:
        client = connect_client()
        client.put_samples(IDS, partition, fields={"kept": [1] * 4})
        client.put_samples(IDS, partition, fields={"kept": [2] * 4})  # replaces both objects
        client.put_samples(IDS, partition, fields={"text": [""] * 4})
        client.clear_samples([IDS[0], IDS[2], IDS[3]], partition)  # one row of the first group remains
        assert client.get_samples(IDS[1:2], partition, ["kept", "text"])["kept"] == [2]
        assert stored(partition) == 2

    def test_clearing_the_partition_also_drops_what_a_writer_did_not_live_to_enter(self, partition: str) -> None:
        client = connect_client()
        client.put_samples(IDS, partition, fields={"kept": [1] * 4})
        store = ray.get_actor(ensure_row_store(namespace=NAMESPACE), namespace=NAMESPACE)
        ray.get(store.put.remote({f"{partition}/0.0/lost": {}}), timeout=TIMEOUT_S)
        client.clear_samples(None, partition)
        assert stored(partition) == 0

    @pytest.mark.fault("F37")
    def test_rows_of_a_dead_store_are_a_typed_error_and_the_next_put_makes_a_new_one(self, partition: str) -> None:
        client = connect_client()
        client.put_samples(IDS, partition, fields={"kept": [1] * 4})
        end_actor(ray.get_actor(ensure_row_store(namespace=NAMESPACE), namespace=NAMESPACE))
        with pytest.raises(RowsLost) as lost:
            client.get_samples(IDS, partition, ["kept"])
        assert list(lost.value.sample_ids) == IDS
        client.put_samples(IDS[2:], partition, fields={"kept": [3] * 2})
        assert client.get_samples(IDS[2:], partition, ["kept"])["kept"] == [3] * 2
        with pytest.raises(RowsLost) as lost:  # the new store has the name of the old one, but not its rows
            client.get_samples(IDS, partition, ["kept"])
        assert list(lost.value.sample_ids) == IDS[:2]
