"""The data plane on the real TransferQueue package and a real Ray. Skipped without the package."""

from collections.abc import Iterator

import pytest
from client_contract import ClientContract, Connect
from local_ray import local_ray

from asyncrl.data_plane.transfer_queue import TransferQueueClient
from asyncrl.errors import PlacementError

pytest.importorskip("transfer_queue", reason="the extra transfer-queue is not installed")

pytestmark = pytest.mark.integration

NAMESPACE = "plane"
STORAGE_UNITS = 2


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # logical CPUs: each of TransferQueue's actors requests one
    with local_ray(cpus=1 + STORAGE_UNITS, namespace=NAMESPACE):
        yield


def connect_client() -> TransferQueueClient:
    return TransferQueueClient(namespace=NAMESPACE, timeout_s=120.0, storage_units=STORAGE_UNITS, start_timeout_s=400.0)


def test_without_room_for_its_actors_the_start_ends_with_the_numbers() -> None:
    with pytest.raises(
        PlacementError, match=r"needs 5 logical CPUs \(a controller and 4 storage units\), but only 3 are free"
    ):
        TransferQueueClient(namespace=NAMESPACE, timeout_s=30.0, storage_units=4, start_timeout_s=0.0)


@pytest.fixture(scope="module")
def owner(cluster: None) -> Iterator[TransferQueueClient]:
    """Starts TransferQueue with one client. Other clients attach, and leave it running when they close."""
    client = connect_client()
    yield client
    client.close()


class TestTransferQueueClient(ClientContract):
    @pytest.fixture
    def connect(self, owner: TransferQueueClient) -> Iterator[Connect]:
        clients: list[TransferQueueClient] = []

        def connect() -> TransferQueueClient:
            clients.append(connect_client())
            return clients[-1]

        yield connect
        for client in clients:
            client.close()
