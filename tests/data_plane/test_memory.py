"""The data plane within one process passes the contract of clients."""

from collections.abc import Mapping, Sequence

import pytest
from client_contract import IDS, ClientContract, Connect
from memory_client import MemoryClient

from asyncrl.data_plane.codec import PickedFields
from asyncrl.data_plane.partitions import Places


class TestMemoryClient(ClientContract):
    @pytest.fixture
    def connect(self) -> Connect:
        client = MemoryClient()
        return lambda: client


class RewrittenMeanwhile(MemoryClient):
    """During a read, another put replaces the rows that the index has just returned."""

    def __init__(self, *, replacements: int) -> None:
        super().__init__()
        self.replacements = replacements

    def _load(self, partition_id: str, sample_ids: Sequence[str], places: Mapping[str, Places]) -> PickedFields:
        if self.replacements:
            self.replacements -= 1
            self.put_samples(sample_ids, partition_id, fields={"kept": [self.replacements] * len(sample_ids)})
            raise KeyError("dropped")
        return super()._load(partition_id, sample_ids, places)


def test_objects_without_rows_are_dropped() -> None:
    client = MemoryClient()
    client.register_partition("p", ["kept"], 4, ["train"])
    client.put_samples(IDS, "p", fields={"kept": [1] * 4})
    client.put_samples(IDS, "p", fields={"kept": [2] * 4})
    client.put_samples(IDS, "p", tags=[{}] * 4)
    client.clear_samples(IDS[:3], "p")
    assert len(client.objects) == 1
    client.clear_samples(IDS[3:], "p")
    assert not client.objects


def test_a_read_that_meets_a_put_asks_the_index_again() -> None:
    client = RewrittenMeanwhile(replacements=2)
    client.register_partition("p", ["kept"], 4, ["train"])
    client.put_samples(IDS, "p", fields={"kept": [9] * 4})
    assert client.get_samples(IDS, "p", ["kept"])["kept"] == [0] * 4


def test_a_read_that_keeps_missing_its_rows_gives_up() -> None:
    client = RewrittenMeanwhile(replacements=9)
    client.register_partition("p", ["kept"], 4, ["train"])
    client.put_samples(IDS, "p", fields={"kept": [9] * 4})
    with pytest.raises(KeyError, match="dropped"):
        client.get_samples(IDS, "p", ["kept"])
