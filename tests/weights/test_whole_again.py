"""A link of a chain is lost or damaged where the transport keeps it: the replicas that need it get whole weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delta_chains import SPECS
from fake_engine import FakeEngine
from pool import LocalWeights

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.errors import InfraError
from asyncrl.generation.weight_updates import UpdateHooks, WeightUpdates
from asyncrl.learner.publication import Publisher
from asyncrl.learner.recording import described_metrics
from asyncrl.metrics.recorders import GeneratorMetrics
from asyncrl.weights.delta import DeltaSender
from asyncrl.weights.manifest import Manifest, layout
from asyncrl.weights.publisher import DeliveredBucket, Snapshot, snapshot_of
from asyncrl.weights.store import WeightStore
from asyncrl.weights.transports.filesystem import FilesystemTransport

pytestmark = pytest.mark.slow  # imports torch

PARAMETERS = {spec.name: (spec.shape, spec.dtype) for spec in SPECS}
ROWS = 4
"""Rows of the first parameter that rank 0 has."""


class LocalStore(LocalWeights):
    """Has the methods that a learner needs too."""

    async def publish(self, manifest: Manifest, handles: list[Any], *, again: bool) -> int:
        return await self._store.publish(manifest, handles, again)

    async def refused(self, after: int, *, wait_s: float) -> int | None:
        return await self._store.refused(after, wait_s)


class Learner:
    """Two ranks that send changes through files, and their publisher. Version v has the step v in its weights."""

    def __init__(self, folder: Path, store: LocalStore) -> None:
        self.senders = [DeltaSender(anchor_every=100) for _ in range(2)]
        self.weights = {"a": torch.randn(8, 40), "b": torch.randn(3)}
        self.snapshots: dict[int, list[Snapshot]] = {}
        self.sent: list[tuple[int, bool]] = []
        """The bytes of each delivery, and whether it was whole."""
        config = Config.model_validate({})
        anything: Any = self
        policy: Any = SimpleNamespace(ranks=SimpleNamespace(call=self._take, beside=self._deliver))
        self.metrics = described_metrics(config)
        self.publisher = Publisher(
            config=config,
            policy=policy,
            entries=layout(SPECS),
            probe_tokens=[],
            transport=FilesystemTransport(folder),
            coordinator=anything,
            weights=store,  # type: ignore[arg-type]
            metrics=self.metrics,
            delivered=lambda manifest: None,
        )

    async def call(self, method: Any, version: Version) -> None: ...

    def _take(self, method: Any, entries: Any, probe_tokens: Any, slot: int) -> list[Any]:
        a, b = self.weights.values()
        shards = ([("a", 0, a[:ROWS])], [("a", ROWS * a.shape[1], a[ROWS:]), ("b", 0, b)])
        self.snapshots[slot] = [snapshot_of(each, entries, bucket_bytes=400) for each in shards]
        return [([], None)]

    def _deliver(
        self, lane: str, method: Any, transport: Any, slot: int, version: Version, previous: Version | None, whole: bool
    ) -> list[list[DeliveredBucket]]:
        pairs = zip(self.senders, self.snapshots[slot], strict=True)
        by_rank = [
            sender.deliver(snapshot, transport, version, previous=previous, whole=whole) for sender, snapshot in pairs
        ]
        buckets = [each.bucket for rank in by_rank for each in rank]
        self.sent.append((sum(bucket.links[-1].nbytes for bucket in buckets), whole))
        return by_rank

    async def publish(self, step: int) -> None:
        """Changes one element of each rank, and publishes the weights."""
        for tensor in self.weights.values():
            tensor.view(-1)[step % tensor.numel()] += 1.0
        await self.publisher.publish(Version(1, step))
        await self.publisher.settle()

    def holds(self, replica: WeightUpdates) -> bool:
        """Returns True if the replica has staged the learner's bytes."""
        flat, entries = replica._staged.flat, layout(SPECS)
        return all(
            flat[entry.offset : entry.offset + entry.nbytes].tobytes()
            == self.weights[entry.name].bfloat16().view(torch.uint8).numpy().tobytes()
            for entry in entries
        )


@asynccontextmanager
async def replica_at(step: int, folder: Path, store: LocalStore) -> AsyncIterator[WeightUpdates]:
    """A replica that has loaded the version of a step."""

    async def ignore(*_: InfraError) -> None: ...

    updates = WeightUpdates(
        config=Config.model_validate({}),
        name="a",
        engine=FakeEngine(),
        source=store,  # type: ignore[arg-type]
        transport=FilesystemTransport(folder),
        parameters=PARAMETERS,
        metrics=GeneratorMetrics(environment="test"),
    )
    hooks = UpdateHooks(show_loading=lambda is_loading: None, fail_unverified=ignore, report=ignore)
    running = asyncio.create_task(updates.run(hooks))
    try:
        await loaded(updates, step)
        yield updates
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def loaded(replica: WeightUpdates, step: int) -> None:
    async with asyncio.timeout(10.0):
        while replica.version != Version(1, step):
            await asyncio.sleep(0.001)


@pytest.mark.asyncio
@pytest.mark.fault("F12")
@pytest.mark.fault("F38")
@pytest.mark.parametrize("fault", ["damaged", "missing"])
async def test_a_replica_that_cannot_get_a_link_gets_the_version_whole_and_the_next_one_as_changes(
    tmp_path: Path, fault: str
) -> None:
    """No newer version comes, because with η = 0 the learner waits for groups of this one."""
    store = LocalStore(WeightStore())
    learner = Learner(tmp_path, store)
    await learner.publish(0)
    async with replica_at(0, tmp_path, store) as steady:
        for step in (1, 2):
            await learner.publish(step)
            await loaded(steady, step)
        assert [whole for _, whole in learner.sent] == [False] * 3
        [link, *_] = sorted((tmp_path / "1.1").iterdir())
        if fault == "missing":
            link.unlink()
        else:
            data = bytearray(link.read_bytes())
            data[-3] ^= 1
            link.write_bytes(data)
        async with replica_at(2, tmp_path, store) as late:
            assert learner.holds(late)
            weights_bytes = sum(spec.nbytes for spec in SPECS)
            assert learner.sent[3:] == [(weights_bytes, True)], "one more delivery"
            await learner.publish(3)
            for replica in (steady, late):
                await loaded(replica, 3)
                assert learner.holds(replica)
            assert learner.sent[4][0] < 0.2 * weights_bytes
            assert not learner.sent[4][1]
    again = learner.metrics.registry.get_sample_value("asyncrl_weight_deliveries_total", {"outcome": "again"})
    assert again == 1
    await learner.publisher.stop()
