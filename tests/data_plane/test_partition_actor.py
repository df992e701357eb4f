"""The body of the index's actor, without Ray: calls that wait for a put, and objects that become unused."""

import asyncio
from collections.abc import Callable
from typing import Any

from asyncrl.data_plane.partitions import Claim, Partitions, StoredAt
from asyncrl.data_plane.row_store import PartitionActor

FAR_S = 60.0
IDS = ["0.0_g0", "0.0_g1"]


async def call(
    actor: PartitionActor, method: Callable[..., Any], *arguments: Any, wait_s: float = 0.0, **options: Any
) -> Any:
    return await actor.call(method.__name__, arguments, options, wait_s)


async def registered(**options: Any) -> PartitionActor:
    actor = PartitionActor("plane", **options)
    await call(actor, Partitions.register, "p", ["x"], 2, ["train"])
    return actor


async def put(actor: PartitionActor, *ids: str, key: str = "k", store: str = "") -> None:
    where = [StoredAt(store, key, row) for row in range(len(ids))]
    await call(actor, Partitions.produce, "p", ids, fields=["x"], where=where)


async def claimed(actor: PartitionActor, count: int, *, wait_s: float = 0.0) -> list[str] | None:
    claim: Claim | None = await call(
        actor, Partitions.claim, "p", "train", fields=["x"], batch_size=count, wait_s=wait_s
    )
    return None if claim is None else claim.sample_ids


def test_a_claim_waits_for_the_put_that_completes_it() -> None:
    async def run() -> None:
        actor = await registered()
        waiting = asyncio.create_task(claimed(actor, 2, wait_s=FAR_S))
        for sample_id in IDS:
            await asyncio.sleep(0)  # lets the claim run; it must still wait
            assert not waiting.done()
            await put(actor, sample_id)
        assert await waiting == IDS

    asyncio.run(run())


def test_of_two_claims_that_wait_for_the_same_rows_one_gets_them_and_the_other_takes_nothing() -> None:
    async def run() -> None:
        actor = await registered()
        waiting = [asyncio.create_task(claimed(actor, 1, wait_s=FAR_S)) for _ in IDS]
        await asyncio.sleep(0)
        await put(actor, IDS[0])
        done, pending = await asyncio.wait(waiting, timeout=FAR_S, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [IDS[:1]]
        await put(actor, IDS[1])
        assert [await task for task in pending] == [IDS[1:]]

    asyncio.run(run())


def test_a_claim_whose_time_is_over_takes_nothing() -> None:
    async def run() -> None:
        actor = await registered()
        await put(actor, IDS[0])
        assert await claimed(actor, 2, wait_s=0.001) is None
        assert await claimed(actor, 1) == IDS[:1]

    asyncio.run(run())


def test_the_stores_are_told_which_objects_are_unused_and_a_store_that_has_ended_is_skipped() -> None:
    told: list[tuple[str, list[str]]] = []

    class Handle:
        def __init__(self, name: str) -> None:
            self.clear = self
            self._name = name

        def remote(self, keys: list[str]) -> None:
            told.append((self._name, keys))

    def find(name: str, *, namespace: str) -> Handle | None:
        return None if name == "rows-dead" else Handle(name)

    async def run() -> None:
        actor = await registered(find=find)
        await put(actor, *IDS, key="first", store="rows-a")
        await put(actor, IDS[0], key="second", store="rows-dead")
        assert told == []  # the other row is still in the first object
        await put(actor, IDS[1], key="third", store="rows-a")
        assert told == [("rows-a", ["first"])]
        await call(actor, Partitions.clear, "p", None)
        assert told[1:] == [("rows-a", ["p/", "third"])]

    asyncio.run(run())
