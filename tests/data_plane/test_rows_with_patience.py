"""The access to rows that all processes share: whole groups, rows that a meta names, and repeated calls."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
import torch
from memory_client import MemoryClient

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.rows import PREFIX_PARTITION, TRAIN_PARTITION, Rows
from asyncrl.errors import CallTimeout

CONFIG = Config.model_validate({"learner": {"group_size": 2}})


class LateOnce(MemoryClient):
    """Keeps rows in this process. The next list of its samples is late if `late` is set."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        for partition in (TRAIN_PARTITION, PREFIX_PARTITION):
            self.register_partition(partition, [], 2, [])

    def sample_ids(self, partition_id: str) -> list[str]:
        if self.late:
            self.late = False
            raise CallTimeout("the index took longer than 30 s")
        return super().sample_ids(partition_id)


def group(*values: int) -> BatchedDataDict:
    return BatchedDataDict(input_ids=torch.tensor([[value, value] for value in values]))


@pytest.mark.asyncio
async def test_groups_are_put_listed_counted_read_and_cleared() -> None:
    client = LateOnce()
    rows, prefixes = Rows(CONFIG, client=client), Rows(CONFIG, partition=PREFIX_PARTITION, client=client)
    await rows.put({"0.0": group(1, 2), "7.1": group(3, 4)})
    await prefixes.put({"9.0": group(5, 6)})
    assert (await rows.keys(), await prefixes.keys()) == (["0.0", "7.1"], ["9.0"])
    assert (await rows.outstanding(), await prefixes.outstanding()) == (4, 2)
    assert (await rows.get("7.1", ["input_ids"]))["input_ids"].tolist() == [[3, 3], [4, 4]]
    meta = KVBatchMeta(TRAIN_PARTITION, "train", ["7.1_g1", "0.0_g0"])
    assert (await rows.read(meta, ["input_ids"]))["input_ids"].tolist() == [[4, 4], [1, 1]]
    await rows.clear(["0.0", "never.0"])
    assert (await rows.keys(), await rows.outstanding(), await prefixes.outstanding()) == (["7.1"], 2, 2)


def listed(rows: Rows) -> Sequence[str]:
    return rows.patiently(lambda client: client.sample_ids(TRAIN_PARTITION))


def listed_beside_a_loop(rows: Rows) -> Sequence[str]:
    return [f"{key}_g{sample}" for key in asyncio.run(rows.keys()) for sample in range(2)]


@pytest.mark.parametrize("call", [listed, listed_beside_a_loop])
def test_a_late_call_is_repeated(call: Callable[[Rows], Sequence[str]]) -> None:
    client = LateOnce()
    rows = Rows(CONFIG, client=client)
    asyncio.run(rows.put({"0.0": group(1, 2)}))
    client.late = True
    assert call(rows) == ["0.0_g0", "0.0_g1"]
    assert not client.late, "the first call was late"


@pytest.mark.parametrize("call", [listed, listed_beside_a_loop])
def test_a_call_that_stays_late_is_raised_after_the_stall_timeout(call: Callable[[Rows], Sequence[str]]) -> None:
    class Late(LateOnce):
        def sample_ids(self, partition_id: str) -> list[str]:
            raise CallTimeout("the index took longer than 30 s")

    config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"stall_timeout_s": 0.0})})
    with pytest.raises(CallTimeout, match="longer than 30 s"):
        call(Rows(config, client=Late()))
